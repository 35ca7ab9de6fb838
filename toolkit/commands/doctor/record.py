"""What one process of a watched run saw: numbers and names in JSON, tensors in safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.experts.parallel.ownership import EMPTY_ROW


@dataclass
class Step:
    """One optimizer step on one rank."""

    losses: list[float] = field(default_factory=list)
    """What `Accelerator.backward` was given, per micro-batch."""
    penalties: list[float] = field(default_factory=list)
    """This rank's share of the router losses (ours), per micro-batch."""
    balance_losses: list[float] = field(default_factory=list)
    """`aux_loss` of the model's output (transformers), per micro-batch."""
    samples: list[list[str]] = field(default_factory=list)
    """A digest of each sample that the model was given, per micro-batch."""
    counts: dict[str, list[int]] = field(default_factory=dict)
    """Assignments (token-expert pairs) per expert of each layer, from this rank."""
    norm: float | None = None
    """What clipping returned, or None where nothing was clipped."""
    rates: list[float] = field(default_factory=list)
    """Learning rate of each parameter group."""
    gradients: dict[str, str] = field(default_factory=dict)
    """Digest of each replicated parameter's gradient, before it was clipped."""


@dataclass
class Phase:
    """The state before the first step, or after a step and all that followed it until the next forward."""

    rows: dict[str, list[int]] = field(default_factory=dict)
    """Ids of the rows that this rank holds of each parameter that is stacked by expert."""
    owns: dict[str, list[bool]] = field(default_factory=dict)
    """For each of those rows, whether this rank owns it, or has a replica of a row that another rank owns."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digest of each parameter that every rank has in full."""


@dataclass
class Record:
    """The whole of it. Tensors are named `phase/kind/parameter`."""

    rank: int = 0
    world: int = 1
    precision: str = "no"
    notes: list[str] = field(default_factory=list)
    """What the recorder changed in the script, in words."""
    steps: list[Step] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    modules: list[list[str]] = field(default_factory=list)
    """[name, type] of modules in the order in which their first forwards ended."""
    overwritten: list[str] = field(default_factory=list)
    """Rows owned by this rank that `Accelerator.prepare` changed."""
    overwritten_buffers: list[str] = field(default_factory=list)
    """Buffers of this rank that DDP changed before a forward."""
    redecided: list[str] = field(default_factory=list)
    """MoE layers whose second forward, during backward, chose other experts than the first."""
    outside: list[str] = field(default_factory=list)
    """Trainable parameters that no optimizer holds."""
    frozen_adapters: list[str] = field(default_factory=list)
    """Matrices B of active low-rank adapters that are zero and frozen."""
    lost_micro_batches: list[str] = field(default_factory=list)
    """Steps in which the gradients of a micro-batch were gone before those of the next were added."""
    unused_losses: list[str] = field(default_factory=list)
    """Losses of the router that the model returned and no backward reached."""
    repeated_orders: list[str] = field(default_factory=list)
    """Samplers that shuffle and gave the same order twice."""
    saved_by: str = ""
    """What saved and loaded, or nothing where there was no way."""
    lost: list[str] = field(default_factory=list)
    """What was not as before after saving and loading."""
    save_error: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def note_lost(self, key: str, before: Tensor, after: Tensor, ids: Sequence[int] | None) -> None:
        """Name the tensor, or of its rows the experts `ids`, that saving and loading did not bring back."""
        if before.shape != after.shape or ((ids is None or not before.ndim) and not torch.equal(before, after)):
            self.lost.append(key)
        elif ids is not None and before.ndim:
            changed = [id for row, id in enumerate(ids) if not torch.equal(before[row], after[row])]
            self.lost += [f"{key} of expert {id}" for id in changed if id != EMPTY_ROW]

    def write(self, folder: Path) -> None:
        content = asdict(self, dict_factory=lambda pairs: {k: v for k, v in pairs if k != "tensors"})
        save_file(self.tensors, folder / f"rank{self.rank}.safetensors")
        (folder / f"rank{self.rank}.json").write_text(json.dumps(content))


def read_records(folder: Path) -> list[Record]:
    """What the processes of one run wrote, by rank; only of those that came to an end."""
    records = []
    for path in sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem[4:])):
        content: dict[str, Any] = json.loads(path.read_text())
        content["steps"] = [Step(**step) for step in content["steps"]]
        content["phases"] = [Phase(**phase) for phase in content["phases"]]
        records.append(Record(**content, tensors=load_file(path.with_suffix(".safetensors"))))
    return records


def frozen_adapters(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """The matrices B of active adapters of PEFT, by name, that are zero and cannot become anything else."""
    found = []
    for name, module in modules:
        matrices: Any = getattr(module, "lora_B", {})
        layer: Any = module
        for adapter in [each for each in layer.active_adapters if each in matrices] if len(matrices) else []:
            weight = matrices[adapter].weight
            if not (weight.requires_grad or weight.detach().any()):
                found.append(f"{name}.lora_B.{adapter}")
    return found


def digest(*tensors: Tensor) -> str:
    """Of the bits of `tensors`."""
    together = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        together.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return together.hexdigest()


def plain(tensor: Tensor) -> Tensor:
    """A copy on the CPU that stays as it is. A collective for a DTensor."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True).contiguous()

"""Record of one rank of a watched run: numbers and names in JSON, tensors in safetensors."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.experts.placement.placement import EMPTY_ROW

PADDING = (0, -1, -100)
"""Padding values of inputs and labels."""
GIVEN = ("hidden states of ", "expert ids of ", "routing weights of ")
"""Prefixes to the name of a layer, for the inputs of its experts. Values of a token are in the order of expert ids."""
SEEN = {
    "one routing decision": "MoE layers whose second forward, during backward, chose other experts than the first",
    "all micro-batches": "steps in which the gradients of a micro-batch were gone before those of the next were added",
    "buffers of ranks": "buffers of this rank that DDP changed before a forward",
    "parameters in an optimizer": "trainable parameters that no optimizer holds",
    "balance loss in the backward": "losses of the router that the model returned and no backward reached",
    "order of epochs": "samplers that shuffle and gave the same order twice",
}
"""Quantities that a rank checks locally -> the faults that it records."""


@dataclass
class Step:
    """One optimizer step on one rank."""

    losses: list[float] = field(default_factory=list)
    """Arguments of `Accelerator.backward`, per micro-batch."""
    penalties: list[float] = field(default_factory=list)
    """This rank's share of `RouterPenalty` losses, per micro-batch."""
    balance_losses: list[float] = field(default_factory=list)
    """`aux_loss` of the model's output (transformers), per micro-batch."""
    samples: list[list[str]] = field(default_factory=list)
    """Digest of each input sample, per micro-batch."""
    counts: dict[str, list[int]] = field(default_factory=dict)
    """(token, expert) pairs per expert of each layer, from this rank."""
    norm: float | None = None
    """Norm that clipping returned, or None without clipping."""
    rates: list[float] = field(default_factory=list)
    """Learning rate of each parameter group."""
    gradients: dict[str, str] = field(default_factory=dict)
    """Digest of each replicated parameter's gradient, before it was clipped."""


@dataclass
class Phase:
    """The state before the first step, or after a step, taken at the next forward pass."""

    rows: dict[str, list[int]] = field(default_factory=dict)
    """Row ids that this rank holds of each parameter that is stacked by expert."""
    owns: dict[str, list[bool]] = field(default_factory=dict)
    """Whether this rank owns each row, or has a replica of a row that another rank owns."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digest of each parameter that every rank has in full."""


@dataclass
class Record:
    """Record of one rank. Tensors are named `phase/kind/parameter`; outputs `step/output/micro-batch/module`."""

    rank: int = 0
    world: int = 1
    precision: str = "no"
    notes: list[str] = field(default_factory=list)
    """The recorder's changes to the script, in words."""
    steps: list[Step] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    """The type of each module with a recorded output, in the order of first forwards, and of inputs by `GIVEN`."""
    seen: dict[str, list[str]] = field(default_factory=lambda: {quantity: [] for quantity in SEEN})
    """Faults that this rank found locally, by quantity of `SEEN`."""
    saved_by: str = ""
    """Functions that saved and loaded, or empty without any."""
    lost: list[str] = field(default_factory=list)
    """State that saving and loading changed."""
    save_error: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def see(self, quantity: str, *names: str) -> None:
        """Record faults of a quantity of `SEEN`, each name once."""
        self.seen[quantity] += [name for name in names if name not in self.seen[quantity]]

    def note_lost(self, key: str, before: Tensor, after: Tensor, ids: Sequence[int] | None) -> None:
        """Record a tensor, or its rows of experts `ids`, if saving and loading did not restore it."""
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
    """Read the records of one run, by rank; ranks that did not finish have none."""
    records = []
    for path in sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem[4:])):
        content: dict[str, Any] = json.loads(path.read_text())
        content["steps"] = [Step(**step) for step in content["steps"]]
        content["phases"] = [Phase(**phase) for phase in content["phases"]]
        records.append(Record(**content, tensors=load_file(path.with_suffix(".safetensors"))))
    return records


def digest(*tensors: Tensor) -> str:
    """Return a digest of the bits of `tensors`."""
    together = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        together.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return together.hexdigest()


def is_spread_by_others(parameter: Tensor) -> bool:
    """Return whether another library has sharded a stack of matrices by its rows, which are experts then."""
    return isinstance(parameter, DTensor) and parameter.ndim == 3 and any(p.is_shard(0) for p in parameter.placements)


def plain(tensor: Tensor) -> Tensor:
    """Return an independent copy on the CPU. A collective for a DTensor."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True).contiguous()


def sample_digests(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Return a digest of each input sample of a model, without padding.

    Padding has 0 in an argument called `...mask` (B, T); without a mask, it is the zeros and ignored labels at the end.
    """
    names = [*inspect.signature(model.forward).parameters][: len(args)]
    given = dict(zip(names + [f"argument{i}" for i in range(len(names), len(args))], args, strict=True)) | dict(kwargs)
    if len(args) == 1 and isinstance(args[0], Mapping):
        given = {**args[0], **kwargs}
    inputs = {name: value for name, value in given.items() if isinstance(value, Tensor) and value.ndim}
    rows = next(iter(inputs.values())).shape[0] if inputs else 0
    aligned = {name: value for name, value in inputs.items() if value.shape[0] == rows}
    mask = next((value for name, value in aligned.items() if "mask" in name and value.ndim == 2), None)
    digests = []
    for row in range(rows):
        parts = [value[row] for value in aligned.values()]
        if mask is not None:
            kept = mask[row].bool()
            parts = [part[kept] if part.ndim and len(part) == len(kept) else part for part in parts]
        digests.append(digest(*(_unpadded(part) for part in parts)))
    return digests


def _unpadded(part: Tensor) -> Tensor:
    """Strip trailing steps of `part` (T, ...) with only one kind of padding."""
    if not part.ndim:
        return part
    steps = part.reshape(len(part), -1)
    used = torch.stack([(steps != value).any(1) for value in PADDING]).all(0).nonzero()
    return part[: int(used[-1]) + 1] if len(used) else part[:0]

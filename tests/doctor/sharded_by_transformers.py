"""A loop on a MoE model whose experts transformers shards: python sharded_by_transformers.py FOLDER [FAULT].

With the fault `undivided`, expert gradients are the sum over ranks instead of the mean; with `own_norm`, each rank
clips by the norm of its experts.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

FOLDER, FAULT = sys.argv[1], "".join(sys.argv[2:])

logging.disable_progress_bar()
accelerator = Accelerator(cpu=True)
world = accelerator.num_processes
set_seed(0)
model: Any = AutoModelForCausalLM.from_pretrained(
    FOLDER,
    dtype=torch.float32,
    distributed_config=DistributedConfig(fsdp_size=world, ep_size=world),
    experts_implementation="eager",
    attn_implementation="eager",
)
model.train()
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(3))
loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=4)
model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
optimizer, loader = accelerator.prepare(optimizer, loader)


def state(model: Any, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def save_checkpoint(folder: str) -> None:
    dcp.save(state(model, optimizer), checkpoint_id=Path(folder) / "state")


def load_checkpoint(folder: str) -> None:
    loaded = state(model, optimizer)
    dcp.load(loaded, checkpoint_id=Path(folder) / "state")
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])


def clip() -> None:
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = []
    for each in by_mesh.values():
        gradients = [parameter.grad for parameter in each]
        if FAULT == "own_norm":
            gradients = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
        norm = get_total_norm(gradients)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = torch.stack(norms).norm()
    for each in by_mesh.values():
        clip_grads_with_norm_(each, 0.1, norm)


for batch in loader:
    accelerator.backward(model(**batch).loss)
    if FAULT == "undivided" and world > 1:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.grad.mul_(world)
    clip()
    optimizer.step()
    optimizer.zero_grad()

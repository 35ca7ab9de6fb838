"""A short training of adapters with a fault to switch on: adapter_training.py FAULT [BASE OUT [MERGED]].

A fault is a few lines done wrong, as threads on adapters of experts report it. `benchmarks/faults/adapter_faults.py`
has `toolkit doctor` examine each, and `toolkit adapter verify` what it saves in OUT.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.integrations.peft.faults import MATRICES
from tests.integrations.peft.models import config
from tests.integrations.transformers.families import EXPERTS, awaken, tokens
from tests.support.equality import in_float64
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.moving.migrate import migrate
from toolkit.experts.parallel.ownership import is_owned
from toolkit.experts.parallel.replica_check import ReplicaCheck
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.peft.merged_weights import save_merged
from toolkit.integrations.transformers import causal_lm, place_experts, save_pretrained

STEPS, SAMPLES = 4, 8
MOVED = ExpertPlacement((tuple(range(EXPERTS // 2, EXPERTS)), tuple(range(EXPERTS // 2))))

fault, *folders = sys.argv[1:]
# So that nothing is to be told from rounding, on any processor.
ExitStack().enter_context(in_float64())
accelerator = Accelerator(cpu=True)
rank, world = accelerator.process_index, accelerator.num_processes
torch.manual_seed(0)
base: Any = causal_lm(folders[0] if folders else config("olmoe"), dtype=torch.float64, experts_implementation="eager")
if not folders:
    awaken(base)
settings = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj"], target_parameters=MATRICES)
torch.manual_seed(1)
model: Any = get_peft_model(base, settings)
if fault == "frozen while claimed trained":
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name and "experts" not in name)
optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
experts = ExpertParallel(accelerator)
wrapped, optimizer = experts.prepare(model, optimizer)
rows = [p for p in model.parameters() if is_owned(p) and p.requires_grad]
if fault == "each rank its own adapter":  # as where the wrapper that averages is left out
    ReplicaCheck.check = lambda *_: None  # type: ignore[method-assign]
    if world > 1:
        wrapped = model
if fault == "scaling lost in training" and world > 1:
    for module in model.modules():
        if getattr(module, "parameter_name", None) is not None:
            module.scaling["default"] = 1.0

for step in range(STEPS):
    ids = tokens(step, SAMPLES)[rank * SAMPLES // world :][: SAMPLES // world]
    accelerator.backward(wrapped(input_ids=ids, labels=ids).loss)
    if fault == "averaged over all ranks" and world > 1:  # as trainable plain parameters are
        for parameter in rows:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 and world > 1:
        if fault == "moments lost in a move":  # which place_experts refuses
            for stack in expert_stacks(model).values():
                migrate(stack, MOVED, torch.optim.AdamW(model.parameters()))
        else:
            place_experts(model, MOVED, optimizer)
if folders:
    save_pretrained(wrapped, folders[1])
if len(folders) > 2:
    save_merged(wrapped, folders[2])

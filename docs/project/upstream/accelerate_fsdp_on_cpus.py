"""On CPU processes `Accelerator(fsdp_plugin=...)` drops the plugin, and DDP replicates the model.

torchrun --nproc_per_node 2 accelerate_fsdp_on_cpus.py
"""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
is_sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
accelerator.print(f"{accelerator.distributed_type}, {type(model).__name__}, sharded: {is_sharded}")
dist.destroy_process_group()
sys.exit(not is_sharded)

"""`nonzero` of a replicated DTensor raises an error that does not name the missing strategy.

python torch_dtensor_nonzero.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
used = distribute_tensor(torch.tensor([True, False]), init_device_mesh("cpu", (1,)), [Replicate()])
wrong = 0
try:
    print(used.nonzero())
except Exception as error:
    wrong = 1
    print(f"{type(error).__name__}: {error}")
dist.destroy_process_group()
sys.exit(wrong)

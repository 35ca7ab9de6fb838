"""On a mesh of one process, FSDP2 divides by `gradient_divide_factor` twice in float16 and float64.

python torch_fsdp2_divides_twice.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
wrong = 0
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    layer = torch.nn.Linear(2, 1, bias=False, dtype=dtype)
    fully_shard(layer, mesh=mesh)
    layer.set_gradient_divide_factor(4.0)
    layer(torch.full((1, 2), 4.0, dtype=dtype)).sum().backward()
    found = layer.weight.grad.full_tensor()[0, 0].item()
    print(f"{dtype}: 4 divided by 4 is {found}")
    wrong += found != 1.0
dist.destroy_process_group()
sys.exit(wrong > 0)

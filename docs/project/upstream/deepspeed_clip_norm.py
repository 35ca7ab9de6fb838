"""DeepSpeed without ZeRO clips an MoE model by the mean of the ranks' norms, not by the global norm.

torchrun --nproc_per_node 2 deepspeed_clip_norm.py
"""

import math
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_

deepspeed.init_distributed("gloo")
expert = torch.nn.Parameter(torch.zeros(1))
expert.allreduce = False  # each rank has another
expert.grad = torch.tensor([3.0 if dist.get_rank() == 0 else 4.0])
norm = clip_grad_norm_([expert], max_norm=1.0).item()
if dist.get_rank() == 0:
    print(f"experts with gradients 3 and 4: their norm is 5, and DeepSpeed clips by {norm}")
dist.destroy_process_group()
sys.exit(not math.isclose(norm, 5.0, rel_tol=1e-5))

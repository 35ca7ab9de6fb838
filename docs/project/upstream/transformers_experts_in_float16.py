"""In float16 and float64, transformers' expert gradients are too small by the world size.

torchrun --nproc_per_node 2 transformers_experts_in_float16.py
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "vocab_size": 32, "head_dim": 8}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
config = Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, **sizes, **heads)
with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # before there is a process group: on each rank
    dist.init_process_group("gloo")
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(0))
    wrong = 0
    for dtype in (torch.float32, torch.float16, torch.float64):
        found = []
        for sharded in (None, DistributedConfig(fsdp_size=2, ep_size=2)):
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, experts_implementation="eager", distributed_config=sharded
            )
            ids = tokens if sharded is None else tokens[dist.get_rank()][None]
            model(input_ids=ids, labels=ids).loss.backward()
            gradient = model.model.layers[0].mlp.experts.down_proj.grad
            found.append((gradient if sharded is None else gradient.full_tensor()).float())
        ratio = (found[1].norm() / found[0].norm()).item()
        wrong += abs(ratio - 1) > 0.1
        if dist.get_rank() == 0:
            print(f"{dtype}: gradients of experts on two processes are {ratio:.3f} times those on one")
dist.destroy_process_group()
sys.exit(wrong > 0)

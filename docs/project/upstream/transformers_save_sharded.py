"""`save_pretrained` of a model after `fully_shard` raises an error about storage.

torchrun --nproc_per_node 2 transformers_save_sharded.py
"""

import sys
import tempfile

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "vocab_size": 32, "head_dim": 8}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, **sizes, **heads))
fully_shard(model)
wrong = 0
with tempfile.TemporaryDirectory() as folder:
    try:
        model.save_pretrained(folder)
    except RuntimeError as error:
        wrong = 1
        print(f"rank {dist.get_rank()}: {error}")
dist.destroy_process_group()
sys.exit(wrong)

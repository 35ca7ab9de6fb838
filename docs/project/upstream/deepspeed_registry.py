"""DeepSpeed's AutoEP cannot convert an MoE model of transformers 5.24, whose output registry has another `get`.

torchrun --nproc_per_node 2 deepspeed_registry.py
"""

import sys

import deepspeed
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "vocab_size": 32, "head_dim": 8}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, **sizes, **heads))
settings = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "qwen3_moe", "use_grouped_mm": False},
}
wrong = 0
try:
    deepspeed.initialize(model=model, config=settings)
except TypeError as error:
    wrong = 1
    print(f"TypeError: {error}")
dist.destroy_process_group()
sys.exit(wrong)

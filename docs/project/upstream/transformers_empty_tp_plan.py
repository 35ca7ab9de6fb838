"""`DistributedConfig(tp_size=2, ep_size=2, tp_plan={})`, for sharded experts only, raises.

torchrun --nproc_per_node 2 transformers_empty_tp_plan.py
"""

import sys
import tempfile

import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "vocab_size": 32, "head_dim": 8}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
config = Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, **sizes, **heads)
wrong = 0
with tempfile.TemporaryDirectory() as folder:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.init_process_group("gloo")
    for settings in ({"tp_size": 2, "ep_size": 2, "tp_plan": {}}, {"tp_size": 2, "enable_expert_parallel": True}):
        try:
            AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**settings))
            said = "loaded"
        except ValueError as error:
            said, wrong = f"refused: {error}", 1
        if dist.get_rank() == 0:
            print(f"DistributedConfig({settings}): {said}")
dist.barrier()
dist.destroy_process_group()
sys.exit(wrong)

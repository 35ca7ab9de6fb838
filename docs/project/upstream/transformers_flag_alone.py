"""`DistributedConfig(enable_expert_parallel=True)` shards nothing, and each rank trains its own model.

torchrun --nproc_per_node 2 transformers_flag_alone.py
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
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.init_process_group("gloo")
    sharded = DistributedConfig(enable_expert_parallel=True)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sharded)
experts = model.model.layers[0].mlp.experts
ids = torch.randint(32, (1, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
model(input_ids=ids, labels=ids).loss.backward()
gradients = [torch.empty_like(model.lm_head.weight) for _ in range(2)]
dist.all_gather(gradients, model.lm_head.weight.grad)
if dist.get_rank() == 0:
    print(f"experts on this process: {experts.num_experts} of 4")
    print(f"gradients are the same on both processes: {torch.equal(*gradients)}")
dist.destroy_process_group()
sys.exit(experts.num_experts == 4)

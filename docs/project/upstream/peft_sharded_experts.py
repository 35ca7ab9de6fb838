"""Adapters of experts that transformers has sharded raise errors that name neither experts nor adapters.

torchrun --nproc_per_node 2 peft_sharded_experts.py
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "vocab_size": 32, "head_dim": 8}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
config = Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, **sizes, **heads)
targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
wrong = 0
with tempfile.TemporaryDirectory() as folder:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.init_process_group("gloo")
    for settings in ({"fsdp_size": 2, "ep_size": 2}, {"tp_size": 2, "ep_size": 2}):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, distributed_config=DistributedConfig(**settings), experts_implementation="eager"
            )
            model = get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=targets))
            ids = torch.zeros(1, 8, dtype=torch.long)
            model(input_ids=ids, labels=ids).loss.backward()
            said = "trained"
        except Exception as error:
            said, wrong = f"{type(error).__name__}: {str(error).splitlines()[0]}", 1
        if dist.get_rank() == 0:
            print(f"DistributedConfig({settings}): {said}")
dist.barrier()
dist.destroy_process_group()
sys.exit(wrong)

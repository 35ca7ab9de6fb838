"""Train a small MoE model of transformers with expert parallelism: two lines differ from an Accelerate script.

accelerate launch --config_file accelerate_configs/ddp_cpu.yaml docs/examples/two_lines.py
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from toolkit import ExpertParallel

accelerator = Accelerator()
torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_experts": 8}
config = Qwen3MoeConfig(**sizes, head_dim=16, num_attention_heads=4, num_key_value_heads=2)
model = Qwen3MoeForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
source = torch.tensor(list(Path(__file__).read_bytes()))
loader = DataLoader(source.unfold(0, 64, 1), batch_size=16, shuffle=True, drop_last=True)
model, optimizer, loader = ExpertParallel(accelerator).prepare(model, optimizer, loader)
for tokens in loader:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print(f"loss {loss.item():.3f}")

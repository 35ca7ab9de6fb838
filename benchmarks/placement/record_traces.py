"""Record routing traces for `toolkit lab`: two models at several seeds and weights of the balance loss.

    python benchmarks/placement/record_traces.py FOLDER            all traces, about ten minutes on two cores
    python benchmarks/placement/record_traces.py FOLDER mnist-     traces with this prefix
    python benchmarks/placement/record_traces.py FOLDER --seeds 2 3 4 5 --steps 900     longer traces, hours

Six runs of `recipes/mnist_moe.py` on four processes, and six runs of a character-level language model on Shakespeare's
plays (Qwen3-MoE architecture, 16 experts, two layers, from scratch). Each has three weights of the balance loss,
including 0, and two seeds. Needs $TOOLKIT_DATA_DIR.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from toolkit.experts.placement.placement import contiguous
from toolkit.experts.routing.traces import TraceFile

PROCESSES, EXPERTS, TOP_K = 4, 16, 2


def mnist(path: Path, seed: int, balance_weight: float, steps: int) -> None:
    """Record the recipe on four processes."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = {
            "--num-processes": PROCESSES,
            "--max-steps": steps,
            "--batch-size": 256,
            "--experts": EXPERTS,
            "--seed": seed,
            **({"--balance-weight": balance_weight} if balance_weight else {"--balance": "none"}),
            "--tracker": "none",
            "--run-dir": run,
        }
        words = [str(word) for pair in settings.items() for word in pair]
        recipe = ROOT / "recipes" / "mnist_moe.py"
        command = [sys.executable, str(recipe), "top2", "--cpu", "--record-traces", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        shutil.copy(run / "traces.npz", path)


def language_model(path: Path, seed: int, balance_weight: float, steps: int) -> None:
    """Record AdamW training at 1e-3 on 16 sequences of 128 characters per step.

    One process stands for four ranks, a quarter of the batch each: routing does not depend on the rank of a token.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    text = (Path(os.environ["TOOLKIT_DATA_DIR"]) / "tinyshakespeare" / "input.txt").read_text()
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([letters[letter] for letter in text])
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(letters),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        output_router_logits=balance_weight > 0,
        router_aux_loss_coef=balance_weight,
        max_position_embeddings=128,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    layers = {name: m for name, m in model.named_modules() if name.endswith(".mlp.experts")}
    load_LSE: list[torch.Tensor] = []

    def note(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        sources = inputs[1].view(PROCESSES, -1)  # top_k_index of tokens in the order of the batch
        load_LSE.append(torch.stack([ids.bincount(minlength=EXPERTS) for ids in sources]))

    for module in layers.values():
        module.register_forward_pre_hook(note)
    load_TLSE = []
    placements = [contiguous(EXPERTS, PROCESSES)] * len(layers)
    draws = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(ids) - 129, (16,), generator=draws)
        batch = torch.stack([ids[start : start + 128] for start in starts.tolist()])
        load_LSE.clear()
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        load_TLSE.append(torch.stack(load_LSE))
    expert = sum(p[0].numel() * p.element_size() for p in next(iter(layers.values())).parameters())
    trace = TraceFile(path)
    trace.add(torch.stack(load_TLSE).numpy(), range(steps), placements)
    trace.close(
        {
            "name": "qwen3_moe",
            "seed": seed,
            "top_k": [TOP_K] * len(layers),
            "layers": list(layers),
            "world_size": PROCESSES,
            "ep_size": PROCESSES,
            "row_bytes": [[4 * 128, 4 * 128]] * len(layers),
            "weight_bytes": [expert] * len(layers),
            "optimizer_bytes": [2 * expert] * len(layers),
        }
    )


RUNS = {
    f"{name}-balance{weight:g}": (record, weight)
    for name, record, weights in (("mnist", mnist, (0.007, 0.001, 0.0)), ("lm", language_model, (0.01, 0.001, 0.0)))
    for weight in weights
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prefix", nargs="?", default="")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, (record, weight) in RUNS.items():
        for seed in args.seeds:
            if f"{name}-seed{seed}".startswith(args.prefix):
                record(args.folder / f"{name}-seed{seed}.npz", seed, weight, args.steps)
                print(f"{name}-seed{seed}", flush=True)

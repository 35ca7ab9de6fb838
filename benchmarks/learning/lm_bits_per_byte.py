"""Bits per byte on held-out text: MoE models and dense models with equal active parameters and tokens.

    python benchmarks/learning/lm_bits_per_byte.py         3 seeds on Shakespeare: six runs of a minute on an idle CPU
    python benchmarks/learning/lm_bits_per_byte.py --folder F  keep the runs in F, and resume
    python benchmarks/learning/lm_bits_per_byte.py --larger  the preset larger: nine runs of two to three minutes
    python benchmarks/learning/lm_bits_per_byte.py --much    a fraction of an epoch of a longer text: an hour
    python benchmarks/learning/lm_bits_per_byte.py --muon  Muon and AdamW, also at equal processor time: 27 runs of
                                                           a minute
    python benchmarks/learning/lm_bits_per_byte.py --choose  tune learning rates on the training text

Each run is `recipes/lm_moe.py`; it needs tinyshakespeare in $TOOLKIT_DATA_DIR or --data-dir. Writes
benchmarks/results/lm_bits_per_byte.json, lm_bits_larger.json, lm_bits_much.json or lm_bits_muon.json.

With --choose, every arm trains at every learning rate of `RATES`, with a separate seed, on `:validation` of the text
(the last tenth of the training text is held out), and results are in lm_bits*_choice.json. With --much only 16 experts
and the dense model with equal tokens are tuned; the other two arms use their rates.

With --much the text is Python's standard library, a step has 2,048 tokens, and model capacity matters: 16 and 64
experts, and dense models with equal active parameters. One dense model trains for the processor time of 16 experts
(`LONGER`, from the runs of --choose). One thread per run.

With --muon, `AS_LONG_AS` has the arms that also train for the processor time of another arm, by the median processor
time of their steps in interleaved rounds. `dense, wider, Muon` has 1.5 times the width of the dense model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

import toolkit as tk
from benchmarks.report import sd, write_report
from recipes.lm_moe import Config, build_model, dense, full, larger, main
from toolkit.data.images import VALIDATION
from toolkit.data.text import SHAKESPEARE

ARMS = {"mixture": full, "dense": dense}
LARGER = {
    "mixture": larger,
    "dense, as many tokens": lambda: dense(larger()),
    "dense, for as long": lambda: dense(larger()).replace(epochs=3),
}
"""Three epochs: a step of the MoE model takes about 1.5 times as long as a step of the dense model."""

LONGER = 1.1
"""Processor time per step of 16 experts relative to the dense model, with --much."""


def much(experts: int) -> Config:
    """Return a config for a fifth of an epoch."""
    return larger().replace(dataset="stdlib", experts=experts, batch_size=16, max_steps=STEPS_OF_MUCH, lr=RATE_OF_MUCH)


STEPS_OF_MUCH, RATE_OF_MUCH = 400, 6e-3
MUCH = {
    "mixture, 16 experts": lambda: much(16),
    "mixture, 64 experts": lambda: much(64),
    "dense, as many tokens": lambda: dense(much(16)),
    "dense, for as long": lambda: dense(much(16)).replace(max_steps=round(LONGER * STEPS_OF_MUCH)),
}
STEPS_OF_FULL = 490
ROUNDS = 60
"""Rounds in which steps are timed."""


def with_muon(config: Config, lr: float) -> Config:
    return config.replace(optimizer=config.optimizer.replace(kind="muon"), lr=lr)


RATE_OF_MUON = {
    "MoE, AdamW": 4e-2,
    "MoE, Muon": 4e-2,
    "dense, AdamW": 4e-2,
    "dense, Muon": 8e-2,
    "dense, wider, Muon": 2e-2,
}
MUON: dict[str, Callable[[], Config]] = {
    "MoE, AdamW": lambda: full().replace(lr=RATE_OF_MUON["MoE, AdamW"]),
    "MoE, Muon": lambda: with_muon(full(), RATE_OF_MUON["MoE, Muon"]),
    "dense, AdamW": lambda: dense().replace(lr=RATE_OF_MUON["dense, AdamW"]),
    "dense, Muon": lambda: with_muon(dense(), RATE_OF_MUON["dense, Muon"]),
    "dense, wider, Muon": lambda: with_muon(dense().replace(dim=48), RATE_OF_MUON["dense, wider, Muon"]),
}
AS_LONG_AS = {
    "MoE, AdamW": "MoE, Muon",
    "dense, AdamW": "dense, Muon",
    "dense, Muon": "MoE, Muon",
    "dense, wider, Muon": "MoE, Muon",
}
COMPARED = {
    "per_byte": ("mixture", "dense"),
    "larger": ("mixture", "dense, as many tokens"),
    "much": ("mixture, 16 experts", "dense, as many tokens"),
    "muon": ("MoE, Muon", "dense, wider, Muon, as long as MoE, Muon"),
}
"""Arms whose difference is the gain of each seed."""
RATES = {
    "muon": (1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1),
    "per_byte": (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2),
    "larger": (1.5e-3, 3e-3, 6e-3),
    "much": (3e-3, 6e-3, 1.2e-2),
}
"""Learning rates for --choose."""
CHOICE_SEED = 100


def run(config: Config) -> dict[str, Any]:
    """Return the results of a run; start or resume it if it is unfinished."""
    assert config.run_dir is not None
    results, taken = config.run_dir / "results.json", config.run_dir / "processor_seconds.json"
    if not results.exists():
        began = time.process_time()
        main(config)
        taken.write_text(json.dumps(time.process_time() - began))
    return {**json.loads(results.read_text()), "processor_seconds": json.loads(taken.read_text())}


def step_seconds(arms: Mapping[str, Callable[[], Config]]) -> dict[str, float]:
    """Return the median processor seconds of a training step of each arm, in interleaved rounds."""
    steps = {arm: training_step(make()) for arm, make in arms.items()}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(ROUNDS):
        for arm, step in steps.items():
            began = time.process_time()
            step()
            seconds[arm].append(time.process_time() - began)
    return {arm: statistics.median(each) for arm, each in seconds.items()}


def training_step(config: Config) -> Callable[[], None]:
    """Return a step of the recipe on random bytes."""
    model = build_model(config, 256)
    if config.experts:
        tk.experts.shard_experts(model, tk.experts.ExpertGroups())
    optimizer, parameters = tk.build_optimizer(model, config), list(model.parameters())
    routers = tk.transformers.watch_routers(model) if config.experts else []
    task = tk.LanguageModeling(penalty=tk.experts.RouterPenalty(routers, balance_weight=config.balance_weight))
    tokens = torch.randint(256, (config.batch_size, config.context + 1))

    def step() -> None:
        (task.loss(model, {"tokens": tokens}).total / tokens[:, 1:].numel()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def row(arm: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    bits = [each["test_bits_per_byte"] for each in runs]
    return {
        "arm": arm,
        "bits per byte": round(statistics.mean(bits), 4),
        "sd": sd(bits, 4),
        "each seed": [round(each, 4) for each in bits],
        "active parameters": runs[0]["active_parameters"],
        "parameters": runs[0]["parameters"],
        "tokens": runs[0]["samples"] * full().context,
        "processor seconds": round(statistics.median(each["processor_seconds"] for each in runs)),
        "least used expert %": round(100 * min(each["min_expert_load"] for each in runs), 1)
        if not arm.startswith("dense")
        else None,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data-dir", type=Path, default=None, help="folder with tinyshakespeare. Default: $TOOLKIT_DATA_DIR"
    )
    parser.add_argument("--folder", type=Path, default=None, help="folder of the runs. Default: a temporary folder")
    parser.add_argument("--larger", action="store_true", help="the preset larger")
    parser.add_argument("--much", action="store_true", help="Python's standard library, 16 and 64 experts")
    parser.add_argument("--muon", action="store_true", help="AdamW and Muon, presets full and dense")
    parser.add_argument("--choose", action="store_true", help="tune learning rates on the end of the training text")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds. Default: 3")
    args = parser.parse_args()
    table = next((name for name in ("larger", "much", "muon") if vars(args)[name]), "per_byte")
    arms = {"per_byte": ARMS, "larger": LARGER, "much": MUCH, "muon": MUON}[table]
    torch.set_num_threads(2 if args.larger else 1)
    with tempfile.TemporaryDirectory() as scratch:
        common = {"data_dir": args.data_dir, "cpu": True, "tracker": "none", "export": False}
        folder = args.folder or Path(scratch)
        text = "stdlib" if args.much else SHAKESPEARE

        def runs_of(arm: str, seeds: Iterable[int], dataset: str = text, **changed: Any) -> list[dict[str, Any]]:
            config = arms[arm]().replace(dataset=dataset, **common, **changed)
            config = config.replace(checkpoint=config.checkpoint.replace(every_steps=70))
            name = "-".join([arm, *map(str, changed.values())])
            return [run(config.replace(seed=seed, run_dir=folder / f"{name}-seed{seed}")) for seed in seeds]

        if args.choose:
            tried = {
                (arm, rate): runs_of(arm, [CHOICE_SEED], text + VALIDATION, lr=rate)
                for arm in arms
                if (table != "much" or arm in ("mixture, 16 experts", "dense, as many tokens"))
                for rate in RATES[table]
            }
            rows = [{"lr": rate, **row(arm, runs)} for (arm, rate), runs in tried.items()]
            write_report("lm_bits_choice" if table == "per_byte" else f"lm_bits_{table}_choice", rows)
        else:
            runs = {arm: runs_of(arm, range(args.seeds)) for arm in arms}
            seconds = step_seconds(arms) if table == "muon" else {}
            for arm, other in AS_LONG_AS.items() if seconds else ():
                steps = round(STEPS_OF_FULL * seconds[other] / seconds[arm])
                runs[f"{arm}, as long as {other}"] = runs_of(arm, range(args.seeds), epochs=3, max_steps=steps)
            moe, baseline = (runs[arm] for arm in COMPARED[table])
            gains = [d["test_bits_per_byte"] - m["test_bits_per_byte"] for m, d in zip(moe, baseline, strict=True)]
            rows = [row(arm, each) for arm, each in runs.items()]
            step_ms = {arm: round(1e3 * each, 1) for arm, each in seconds.items()}
            write_report(f"lm_bits_{table}", rows, gain_of_each_seed=gains, **({"step_ms": step_ms} if seconds else {}))

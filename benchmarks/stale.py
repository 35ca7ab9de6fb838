"""Which records are older than a change to what they measure?

    python benchmarks/stale.py              a line for each record, those with most changes first
    python benchmarks/stale.py --since 100  only those of whose code at least 100 lines changed

Git counts, with renames followed, how many lines of the code that a record measures were added or removed since the
commit in it. What a script measures stands below. A number is a reason to look, not a verdict: a record is made again
where the change could have moved its figures.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXPERTS = "toolkit/experts/"
LAYER = (f"{EXPERTS}layer/",)
SPREAD = (*LAYER, f"{EXPERTS}parallel/", f"{EXPERTS}sharding/")
PLANS = (f"{EXPERTS}placement/", "toolkit/lab/")
TRAINS = ("toolkit/train/", "toolkit/data/")
MEASURED: dict[str, tuple[str, ...]] = {
    "checkpoint_stall.py": ("toolkit/checkpoint/", f"{EXPERTS}state/"),
    "dynamic_experts.py": ("toolkit/dynamic/",),
    "ep_crossover.py": SPREAD,
    "ep_speed.py": SPREAD,
    "exchanged_bytes.py": LAYER,
    "expert_adapters.py": (*SPREAD, "toolkit/integrations/peft/"),
    "expected_memory.py": ("toolkit/integrations/", "toolkit/train/"),
    "few_labels.py": ("recipes/digits/",),
    "finetune_moe.py": ("toolkit/integrations/peft/", "recipes/language/"),
    "force_balanced.py": (*LAYER, "toolkit/train/"),
    "gpu_layer.py": LAYER,
    "gpu_training.py": (*SPREAD, "toolkit/integrations/transformers/", *TRAINS),
    "har_folds.py": ("recipes/activity/",),
    "large_checkpoint.py": ("toolkit/integrations/transformers/", f"{EXPERTS}sharding/"),
    "lm_bits_per_byte.py": (*LAYER, "recipes/language/"),
    "lmu_forms.py": ("recipes/speech/",),
    "lmu_psmnist.py": ("recipes/speech/",),
    "lmu_speech.py": ("recipes/speech/",),
    "metrics_cost.py": (f"{EXPERTS}routing/", "toolkit/train/callbacks/"),
    "migration.py": (f"{EXPERTS}moving/",),
    "mnist_accuracy.py": LAYER,
    "mnist_throughput.py": (*LAYER, *TRAINS),
    "moe_layer.py": LAYER,
    "moving_experts.py": (*SPREAD, f"{EXPERTS}placement/", f"{EXPERTS}moving/"),
    "placement_lab.py": PLANS,
    "planners.py": (f"{EXPERTS}placement/",),
    "quality.py": TRAINS,
    "ray_faults.py": ("toolkit/run/",),
    "report_page.py": ("toolkit/commands/report/",),
    "router_replay.py": (f"{EXPERTS}routing/", "toolkit/integrations/accelerate/"),
    "scaling.py": (*SPREAD, *TRAINS),
    "score.py": ("toolkit/doctor/", "benchmarks/faults/silent_bugs/"),
    "simulator.py": (*SPREAD, f"{EXPERTS}placement/"),
    "trainer_overhead.py": TRAINS,
    "vae_robustness.py": ("recipes/autoencoder/",),
}
"""Folders by script."""


@cache
def changed_lines(commit: str) -> list[tuple[str, int]]:
    """Files of today, and the lines added to and removed from them since `commit`."""
    command = ["git", "diff", "-M", "--numstat", "-z", commit, "HEAD", "--", "*.py"]
    fields = iter(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"))
    return list(_files(fields))


def _files(fields: Iterator[str]) -> Iterator[tuple[str, int]]:
    for field in fields:
        if field:
            added, removed, path = field.split("\t")
            if not path:  # renamed: the old path and the new one follow
                next(fields)
                path = next(fields)
            yield path, int(added) + int(removed)


def script_of(command: str) -> str:
    """The name of the script that a record's command starts."""
    return next(Path(word).name for word in shlex.split(command) if word.endswith(".py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", type=int, default=0, metavar="LINES")
    options = parser.parse_args()
    rows = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        record = json.loads(path.read_text())
        if "command" not in record:
            continue
        script = script_of(record["command"])
        commit = record["commit"].removesuffix("-dirty")
        lines = sum(many for file, many in changed_lines(commit) if file.startswith(MEASURED[script]))
        rows.append((lines, path.stem, script, record["commit"], record["machine"]["date"]))
    for lines, name, script, commit, date in sorted(rows, reverse=True):
        if lines >= options.since:
            print(f"{lines:6,} lines since {date} {commit:16} {name} ({script})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

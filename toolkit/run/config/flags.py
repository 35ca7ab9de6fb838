"""The flags of a config: their names, how a message names them, and what to type in place of one that there is not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.experts.options import Options

NO_DEVICE = "a GPU is used if there is one; --cpu stays on the CPU"
LAUNCHER = "a launcher sets it in the environment: leave it out, or use --num-processes"

REMEDIES: Mapping[str, str] = {
    "accumulate-grad-batches": "use --gradient-accumulation-steps",
    "amp": "use --mixed-precision bf16, fp16 or no",
    "bf16": "use --mixed-precision bf16",
    "checkpoint-frequency": "use --checkpoint.every-steps",
    "checkpointing-steps": "use --checkpoint.every-steps",
    "cuda": NO_DEVICE,
    "dataloader-num-workers": "use --num-workers",
    "dataset-name": "use --dataset",
    "device": NO_DEVICE,
    "devices": "use --num-processes",
    "early-stopping-patience": "use --early-stopping.patience",
    "eval-steps": "use --eval-every-steps",
    "expert-k": "use --top-k",
    "fp16": "use --mixed-precision fp16",
    "global-batch-size": "use --batch-size, which is over all processes",
    "gpu-mode": NO_DEVICE,
    "gradient-checkpointing": "use --recompute full",
    "gradient-clip": "use --optimizer.max-grad-norm",
    "learning-rate": "use --lr",
    "load-best-model-at-end": "use --checkpoint.best validation/loss",
    "local-rank": LAUNCHER,
    "log-interval": "use --log-every",
    "logging-steps": "use --log-every",
    "lr-scheduler-type": "use --schedule.name",
    "max-epochs": "use --epochs",
    "max-train-steps": "use --max-steps",
    "metric-for-best-model": "use --checkpoint.best, as in validation/accuracy",
    "micro-batch-size": "use --batch-size, which is over all processes, and --gradient-accumulation-steps",
    "model-name-or-path": "use --model",
    "multi-gpu": "use --num-processes 4; one process is the usual",
    "nproc-per-node": "use --num-processes",
    "num-epochs": "use --epochs",
    "num-experts": "use --experts",
    "num-initial-experts": "use --experts",
    "num-train-epochs": "use --epochs",
    "optim": "build_optimizer in the recipe makes it",
    "output-dir": "use --run-dir",
    "per-device-train-batch-size": "use --batch-size, which is over all processes",
    "pin-memory": "batches are pinned wherever there is a GPU: leave it out",
    "report-to": "use --tracker",
    "resume-from-checkpoint": "use --resume, or --resume-from and a step",
    "save-dir": "use --run-dir",
    "save-steps": "use --checkpoint.every-steps",
    "save-total-limit": "use --checkpoint.keep",
    "sync-batchnorm": "use --sync-bn",
    "wandb-project": "use --project",
    "warmup-ratio": "use --schedule.warmup-steps",
    "weight-decay": "use --optimizer.weight-decay",
    "world-size": "use --num-processes, or a launcher",
}
"""What to use in place of flags of other programs; `docs/start/migration/` has the complete tables."""


def flags_of(options: type[Options], prefix: str = "--") -> dict[str, Any]:
    """Returns every flag of a config, with the type of its field; a switch is there with its opposite, too."""
    flags: dict[str, Any] = {}
    for name, field in options.model_fields.items():
        hint: Any = field.annotation
        word = name.replace("_", "-")
        if isinstance(hint, type) and issubclass(hint, Options):
            flags |= flags_of(hint, f"{prefix}{word}.")
            continue
        flags[f"{prefix}{word}"] = hint
        if hint is bool:
            flags[f"{prefix}no-{word}"] = hint
    return flags


def as_typed(sentence: object, config: Options | None) -> str:
    """`sentence`, in which a field of `config` is the flag that sets it: `ep_size=3` is `--ep-size 3`."""
    fields = {} if config is None else {flag[2:].replace("-", "_"): flag for flag in flags_of(type(config))}

    def flag(found: re.Match[str]) -> str:
        name, value = found[1], found[2].strip("'")
        known = name if name in fields else next((full for full in fields if full.endswith(f".{name}")), None)
        if known is None:
            return found[0]
        group, dot, last = fields[known][2:].rpartition(".")
        switch = {"True": f"--{group}{dot}{last}", "False": f"--{group}{dot}no-{last}"}
        return switch.get(value) or f"{fields[known]} {'none' if value == 'None' else value}"

    return re.sub(r"\b([a-z][\w.]*)=('[^']*'|\([^)]*\)|\S+?)(?=[.,:;)]*(?:\s|$))", flag, str(sentence))


def instead_of(flag: str, flags: Mapping[str, Any]) -> str:
    """Returns what to type instead of `flag`, which is not in `flags`, as the end of a sentence."""
    members = [name for name in flags if name.startswith(f"{flag}.") and ".no-" not in name]
    if members:
        return f"it is a group of flags: {', '.join(members[:4])}{', ...' if len(members) > 4 else ''}."
    remedy = REMEDIES.get(flag.removeprefix("--").removeprefix("no-"), "")
    named = re.findall(r"--[a-z][\w.-]*", remedy)
    if remedy and (not named or any(other in flags for other in named)):
        return f"{remedy}."
    return nearest(flag, flags) or "see --help all."


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns "did you mean ...?" with the known word closest to `word`; a nested flag may lack its group."""
    names = {name.rpartition(".")[2].lstrip("-"): name for name in known} | {name.lstrip("-"): name for name in known}
    wanted = word.lstrip("-").lower()
    alike = [name for name in names if len(wanted) > 4 and name.startswith(wanted)]
    alike = alike or difflib.get_close_matches(wanted, names, n=1, cutoff=0.8)
    return f"did you mean {names[alike[0]]}?" if alike else None

"""Flags of other programs, and what to use here instead: for the message about an unknown flag.

`docs/start/migration/` has the complete tables.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

NO_DEVICE = "a GPU is used if there is one"
FROM_DATA = "it is taken from the data: leave it out"
LAUNCHER = "a launcher sets it in the environment: leave it out, or use --num-processes"
OF_DDP = "DDP has its defaults here: leave it out"

REMEDIES: Mapping[str, str] = {
    # MORPH: examples/gpu_training_example.py and MorphConfig; docs/start/migration/morph.md.
    "gpu-mode": f"{NO_DEVICE}; --cpu stays on the CPU, --num-processes 4 takes four GPUs",
    "device": f"{NO_DEVICE}; --cpu stays on the CPU, CUDA_VISIBLE_DEVICES=1 picks one",
    "gpu-memory-fraction": "use --memory-fraction, with --auto-batch-size",
    "enable-mixed-precision": "use --mixed-precision bf16, or fp16",
    "precision-type": "use --mixed-precision bf16, fp16 or no",
    "pin-memory": "batches are pinned wherever there is a GPU: leave it out",
    "accumulation-steps": "use --gradient-accumulation-steps, or --auto-batch-size",
    "compile-mode": "use --compile",
    "monitor-gpu": "every line of metrics has perf/peak_memory_bytes: leave it out",
    "num-epochs": "use --epochs",
    "learning-rate": "use --lr",
    "weight-decay": "use --optimizer.weight-decay",
    "num-initial-experts": "use --experts",
    "expert-k": "use --top-k",
    "input-size": FROM_DATA,
    "output-size": FROM_DATA,
    "enable-dynamic-experts": "use the preset dynamic, or --max-experts 16",
    "expert-creation-uncertainty-threshold": "use --lifecycle.plateau-threshold",
    "expert-similarity-threshold": "use --lifecycle.merge-distance and --lifecycle.merge-similarity",
    "dormant-steps-threshold": "use --lifecycle.min-age",
    "min-lifetime-activations": "use --lifecycle.prune-below, a fraction of the mean load",
    "enable-sleep": "use --lifecycle.sleep or --lifecycle.no-sleep",
    "sleep-cycle-frequency": "use --lifecycle.sleep-every",
    "enable-adaptive-sleep": "use --lifecycle.adaptive-sleep or --lifecycle.no-adaptive-sleep",
    "min-sleep-frequency": "use --lifecycle.min-sleep-every",
    "max-sleep-frequency": "use --lifecycle.max-sleep-every",
    "memory-replay-batch-size": "use --lifecycle.replay-batch-size",
    "memory-buffer-size": "use --lifecycle.memory-size, which counts samples",
    "replay-learning-rate": "use --lifecycle.replay-lr",
    "knowledge-edge-decay": "use --lifecycle.edge-decay",
    "knowledge-edge-min": "use --lifecycle.edge-floor",
    "enable-expert-reorganization": "use --planner, which moves experts between processes",
    "overlap-threshold": "use --planner, which moves experts between processes",
    "specialization-threshold": "specialization is only measured and drawn here: leave it out",
    "enable-meta-learning": "it had no effect in the original: leave it out",
    "meta-learning-intervals": "it had no effect in the original: leave it out",
    # Multi-GPU training system, activity and speech recognition; docs/start/migration/training.md, har.md, lmu.md.
    "training-mode": "use --num-processes 4; one process is the usual",
    "multi-gpu": "use --num-processes 4; one process is the usual",
    "device-ids": "use CUDA_VISIBLE_DEVICES=0,1 and --num-processes 2",
    "world-size": "use --num-processes, or a launcher",
    "nnodes": LAUNCHER,
    "node-rank": LAUNCHER,
    "rank": LAUNCHER,
    "local-rank": LAUNCHER,
    "master-gpu": LAUNCHER,
    "master-addr": LAUNCHER,
    "master-port": LAUNCHER,
    "init-method": LAUNCHER,
    "backend": "it is NCCL on GPUs, and gloo with --cpu",
    "timeout": "use --process-timeout, in minutes",
    "recovery-timeout": "use --process-timeout, in minutes",
    "amp": "use --mixed-precision bf16, fp16 or no",
    "use-mixed-precision": "use --mixed-precision bf16, fp16 or no",
    "find-unused-parameters": OF_DDP,
    "static-graph": OF_DDP,
    "broadcast-buffers": OF_DDP,
    "bucket-cap-mb": OF_DDP,
    "use-gradient-as-bucket-view": OF_DDP,
    "reduce-bucket-size": OF_DDP,
    "use-fp16-allreduce": "gradients are averaged in the type that they have: leave it out",
    "fp16-compression": "gradients are averaged in the type that they have: leave it out",
    "sync-bn": "convert the model with torch.nn.SyncBatchNorm",
    "sync-batchnorm": "convert the model with torch.nn.SyncBatchNorm",
    "grad-accum-steps": "use --gradient-accumulation-steps",
    "accumulate-grad-batches": "use --gradient-accumulation-steps",
    "gradient-clip": "use --optimizer.max-grad-norm",
    "prefetch-factor": "use --num-workers",
    "persistent-workers": "use --num-workers, which live as long as the run",
    "use-gradient-checkpointing": "use --recompute full",
    "enable-fault-tolerance": "every run is saved: leave it out",
    "checkpoint-frequency": "use --checkpoint.every-steps",
    "save-dir": "use --run-dir",
    "early-stopping-patience": "use --early-stopping.patience",
    "enable-monitoring": "every run is monitored: leave it out",
    "log-every-n-steps": "use --log-every",
    "log-interval": "use --log-every",
    "profile-every-n-steps": "use --profile, which profiles five steps once",
    "n-mels": "use --num-mels",
    "theta": "use --thetas",
    "memory-size": "use --order",
    "use-fft": "use --encoder memory",
    "downsample": "use --stride",
    "num-heads": "use --heads; where there is --width, a head has 64 of it",
    "num-layers": "use --layers, or --thetas with one number for each layer",
    "max-duration": "utterances of any length are taken: leave it out",
    # Robustness of semi-supervised autoencoders; docs/start/migration/vae.md.
    "eval-frequency": "use --eval-every",
    "gpu-ids": "use CUDA_VISIBLE_DEVICES=0,1 and --num-processes 2",
    "no-multi-gpu": "one process is the usual: leave it out, or use --num-processes 1",
    "cuda": f"{NO_DEVICE}; --cpu stays on the CPU",
    "num-style": "use --style-dim",
    "n-labels": "use --labels, or toolkit sweep --grid labels=100,600",
    "corruption-rates": "use --corruption-rate, or toolkit sweep --grid corruption-rate=0,0.2",
    "alpha-values": "use --supervision-weight, or toolkit sweep --grid supervision-weight=50,100",
    "num-seeds": "use --seed, or toolkit sweep --num-seeds 10",
    "seed-offset": "use --seed, or toolkit sweep --seed-offset 0",
}


def remedy(flag: str, known: Collection[str]) -> str | None:
    """What to use instead of `flag`, as the end of a sentence.

    None for a flag of no program that we know, and where the `known` flags have none of those that it names.
    """
    name = flag.lstrip("-").replace("_", "-")
    text = REMEDIES.get(name) or REMEDIES.get(name.removeprefix("no-"))
    named = set(re.findall(r"--[a-z][\w.-]*", text or ""))
    return text if not named or named & set(known) else None

"""Memory and time of loading an MoE checkpoint into sharded experts, if one process is too small for it.

    python benchmarks/speed/large_checkpoint.py                      20 GB on disk, ten minutes; needs 24 GiB of memory
    python benchmarks/speed/large_checkpoint.py --gigabytes 2 --processes 1 2 4
    python benchmarks/speed/large_checkpoint.py --offload --leave 12       experts of 20 GB in 12 GB of memory
    python benchmarks/speed/large_checkpoint.py --save --gigabytes 5 --processes 4
    python benchmarks/speed/large_checkpoint.py --transformers --gigabytes 5 --processes 2 4     and transformers' load
    python benchmarks/speed/large_checkpoint.py --audit --processes 1          `toolkit audit` of 20 GB

The checkpoint has the shape of Qwen3-30B-A3B (width 2,048, 128 experts of width 768, top 8, bf16, one tensor per
expert), random weights, and the number of layers that `--gigabytes` needs. It is written to a temporary folder, and
each case runs in new processes. `ours` loads it with `experts_in_files()`, adds expert adapters, shards the experts and
trains two steps on 64 tokens; `stock` is `from_pretrained` on every rank. A process ends if its memory exceeds its
share of the machine's memory.

Memory is the peak of the private anonymous pages of a process (Pss_Anon) after its imports; `resident` includes pages
of files. `expected` is the estimate of `toolkit plan` from the configuration, for `stock` the size of all weights. A
plain read before each case reads all files once. Cases start without the files in the page cache; processor seconds
and bytes read from storage are sums over all ranks until the model is loaded. With `--offload` experts stay in a file.
With `--leave` another process holds the free memory except for the given GB. With `--save` the model is loaded, sharded
and saved in files of at most 3 GB, and each tensor is compared; expected is the memory of a process plus the tensors of
one file. With `--transformers` both variants train only the norms, and the second loads with
`DistributedConfig(fsdp_size=world size, ep_size=world size)`, which reads non-expert weights in the first step.
Steps take minutes on a CPU without bf16 products, `--steps 0` leaves them out.
Writes benchmarks/results/large_checkpoint*.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.report import write_report
from benchmarks.support.processes import run_distributed
from toolkit.train.fine_tuning_memory import Layout, fine_tuning_memory

DIM, HIDDEN, EXPERTS, TOP_K, VOCAB = 2048, 768, 128, 8, 32_000
EXPERT_BYTES = 3 * DIM * HIDDEN * 2
LAYER_BYTES = EXPERTS * EXPERT_BYTES
TOKENS, FILE = 64, 3
OFFLOADED, SAVED, AUDITED = "ours, experts in a file", "ours, saved", "toolkit audit"
NORMS, SHARDED = "ours, norms trained", "transformers' sharded load, norms trained"
CASES = {
    "offload": ("large_checkpoint_offloaded", (OFFLOADED,)),
    "save": ("large_checkpoint_saved", (SAVED,)),
    "audit": ("large_checkpoint_audited", (AUDITED,)),
    "transformers": ("large_checkpoint_sharded", (NORMS, SHARDED)),
}
"""Result file and variants by flag."""
VERBS = {SAVED: "save", AUDITED: "audit"}


def settings(layers: int) -> Any:
    """Return the configuration of Qwen3-30B-A3B with fewer layers and a smaller vocabulary."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=3 * DIM,
        moe_intermediate_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,  # type: ignore[call-arg]
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )


def write_checkpoint(folder: Path, layers: int) -> int:
    """Write a file per layer and return the total bytes. Experts share random numbers, rolled and scaled."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings(layers))
    files: dict[str, dict[str, Tensor]] = {}
    for name, value in model.state_dict().items():
        if ".experts." not in name and name != "lm_head.weight":
            part = next((each for each in name.split(".") if each.isdigit()), "none")
            random = torch.randn(value.shape) * DIM**-0.5 if value.ndim > 1 else torch.ones(value.shape)
            files.setdefault(part, {})[name] = random.bfloat16()
    shapes = {"gate_proj": (HIDDEN, DIM), "up_proj": (HIDDEN, DIM), "down_proj": (DIM, HIDDEN)}
    expert = {name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}
    weight_map: dict[str, str] = {}
    total = 0
    for part in list(files):
        state = files.pop(part)  # frees the layer
        for number in range(EXPERTS if part != "none" else 0):
            for name, value in expert.items():
                scaled = value * (1 + int(part) / 64)
                state[f"model.layers.{part}.mlp.experts.{number}.{name}.weight"] = scaled.roll(number, 0)
        file = f"model-{part}.safetensors"
        save_file(state, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(state, file)
        total += sum(value.nbytes for value in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings(layers).save_pretrained(folder)
    return total


def drop_page_cache(folder: Path) -> None:
    """Drop the files in `folder` from the page cache."""
    os.sync()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(folder: Path) -> float:
    """Return the seconds to read all files."""
    drop_page_cache(folder)
    start, block = time.perf_counter(), bytearray(1 << 24)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - start


@contextmanager
def all_but(gigabytes: float | None) -> Iterator[None]:
    """Hold the free memory except for `gigabytes` in a subprocess; None holds nothing."""
    if gigabytes is None:
        yield
        return
    held = psutil.virtual_memory().available - int(gigabytes * 1e9)
    code = f"import sys; held = bytearray(b'1') * {held}; print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield
    finally:
        holder.kill()
        holder.wait()


class Watch:
    """Time, reads and memory of this process, which ends above `limit` bytes of private memory."""

    def __init__(self, limit: float):
        self.limit, self.own, self.resident = limit, 0, 0
        self.before = self._read()[0]
        threading.Thread(target=self._follow, daemon=True).start()
        self.begun = self._spent()

    def spent(self) -> dict[str, float]:
        """Return seconds, processor seconds and bytes read from storage since the start."""
        return {key: value - self.begun[key] for key, value in self._spent().items()}

    def _spent(self) -> dict[str, float]:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        seconds = {"seconds": time.perf_counter(), "processor seconds": time.process_time()}
        return seconds | {"bytes read": int(counts["read_bytes"])}

    def peaks(self) -> tuple[float, float]:
        """Return peak GB since the last call: private memory beyond the start, and resident memory."""
        own, resident = self.own - self.before, self.resident
        self.own = self.resident = 0
        return own / 1e9, resident / 1e9

    def _read(self) -> tuple[int, int]:
        lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        sizes = {words[0]: int(words[1]) * 1024 for words in lines}
        return sizes["Pss_Anon:"], sizes["Rss:"]

    def _follow(self) -> None:
        while True:
            own, resident = self._read()
            self.own, self.resident = max(self.own, own), max(self.resident, resident)
            if own > self.limit:
                os._exit(137)
            time.sleep(0.2)


def adapted(model: Any) -> Any:
    """Add adapters to one matrix of the experts."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    return get_peft_model(model, adapters, autocast_adapter_dtype=False)


def with_norms_trained(model: Any) -> Any:
    """Freeze all parameters except norms."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


def load_and_train(
    folder: Path, limit: float, count: int, *, offload: bool = False, adapt: Callable[[Any], Any] = adapted
) -> dict[str, float]:
    """Load lazily, shard and train `count` steps on one rank."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
    from toolkit.integrations.transformers import experts_in_files, use_toolkit_kernel

    kernel, watch = use_toolkit_kernel(), Watch(limit)
    with experts_in_files(offload=folder if offload else None):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=kernel)
    model = adapt(model)
    accelerator = Accelerator(cpu=True)
    experts = ExpertParallel(accelerator)
    wrapped, optimizer = experts.prepare(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    )
    spent = watch.spent()
    return spent | steps(count, wrapped, optimizer, accelerator.backward, watch)


def load_sharded(folder: Path, limit: float, count: int) -> dict[str, float]:
    """Load with transformers' sharded load and train `count` steps on one rank."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    world, watch = dist.get_world_size(), Watch(limit)
    config = DistributedConfig(fsdp_size=world, ep_size=world)
    model: Any = with_norms_trained(AutoModelForCausalLM.from_pretrained(folder, distributed_config=config))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    spent = watch.spent()
    return spent | steps(count, model, optimizer, torch.Tensor.backward, watch)


def steps(
    count: int, model: Any, optimizer: Any, backward: Callable[[Tensor], object], watch: Watch
) -> dict[str, float]:
    """Train `count` steps, and return the seconds of a step and the memory before and during training."""
    own, resident = watch.peaks()
    if not count:
        return {"own": own, "resident": resident}
    draws = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    start = time.perf_counter()
    for _ in range(count):
        ids = torch.randint(VOCAB, (1, TOKENS), generator=draws)
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(loss)
    seconds = (time.perf_counter() - start) / count
    return {"own": own, "resident": resident, "seconds of a step": seconds, "own in training": watch.peaks()[0]}


def load_and_save(folder: Path, limit: float) -> dict[str, float]:
    """Load, shard and save on one rank; rank 0 compares the saved tensors."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
    from toolkit.integrations.transformers import experts_in_files, save_pretrained, use_toolkit_kernel

    kernel, watch = use_toolkit_kernel(), Watch(limit)
    with experts_in_files():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=kernel)
    accelerator = Accelerator(cpu=True)
    wrapped = ExpertParallel(accelerator).prepare(model.requires_grad_(False))
    watch.peaks()
    start = time.perf_counter()
    save_pretrained(wrapped, folder / "saved", max_shard_size=f"{FILE}GB")
    own, resident = watch.peaks()
    if accelerator.is_main_process:
        compare(folder, folder / "saved")
    return {"seconds": time.perf_counter() - start, "own": own, "resident": resident}


def compare(folder: Path, saved: Path) -> None:
    """Raise AssertionError if the tensors of two checkpoints differ."""
    from safetensors import safe_open

    places = [
        {
            name: path / file
            for name, file in json.loads((path / "model.safetensors.index.json").read_text())["weight_map"].items()
        }
        for path in (folder, saved)
    ]
    assert places[0].keys() == places[1].keys()
    for name, path in places[0].items():
        with safe_open(path, "pt") as one, safe_open(places[1][name], "pt") as other:
            assert torch.equal(one.get_tensor(name), other.get_tensor(name)), name


def run_audit(folder: Path, limit: float) -> dict[str, float]:
    """Audit the checkpoint in one process."""
    from toolkit.audit.checks import audit

    watch, start = Watch(limit), time.perf_counter()
    assert not audit(folder).findings
    own, resident = watch.peaks()
    return {"seconds": time.perf_counter() - start, "own": own, "resident": resident}


def load_stock(folder: Path, limit: float) -> dict[str, float]:
    """Load with `from_pretrained` on one rank."""
    from transformers import AutoModelForCausalLM

    watch = Watch(limit)
    AutoModelForCausalLM.from_pretrained(folder)
    spent, (own, resident) = watch.spent(), watch.peaks()
    return spent | {"own": own, "resident": resident}


def row(name: str, folder: Path, processes: int, layers: int, total: int, count: int) -> dict[str, Any]:
    """Return the results of a case: maxima over ranks, and sums of processor seconds and of bytes read."""
    part = LAYER_BYTES / processes
    layout = Layout(ep_size=processes, sequences=1, context=TOKENS)
    expected_of = partial(fine_tuning_memory, settings(layers), adapt=adapted)
    cases: dict[str, tuple[Callable[..., dict[str, float]], float]] = {
        "ours": (partial(load_and_train, count=count), expected_of(layout).total),
        OFFLOADED: (
            partial(load_and_train, count=count, offload=True),
            expected_of(replace(layout, offload="file")).total,
        ),
        SAVED: (load_and_save, layers * part + FILE * 1e9),
        NORMS: (partial(load_and_train, count=count, adapt=with_norms_trained), total / processes),
        SHARDED: (partial(load_sharded, count=count), total / processes),
        AUDITED: (run_audit, 1e9),
        "stock": (load_stock, total),
    }
    rank, expected = cases[name]
    trains, loads = count > 0 and name in ("ours", OFFLOADED, NORMS, SHARDED), name not in VERBS
    described: dict[str, Any] = {"contender": name, "processes": processes, "expected GB": round(expected / 1e9, 2)}
    described["seconds of a plain read"] = round(plain_read(folder), 1)
    drop_page_cache(folder)
    limit = psutil.virtual_memory().total / processes
    try:
        ranks = run_distributed(rank, processes, folder, limit, timeout_s=2400)
    except AssertionError as error:
        if "exited without a result" not in str(error):
            raise
        return described | {"GB": f"ended above {limit / 1e9:.1f}"}
    most = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    described |= {
        "GB": round(most["own"], 2),
        "GB in training": round(most["own in training"], 2) if trains else None,
        "resident GB": round(most["resident"], 2),
        f"seconds to {VERBS.get(name, 'load')}": round(most["seconds"], 1),
        "processor seconds": round(sum(rank["processor seconds"] for rank in ranks), 1) if loads else None,
        "bytes read / checkpoint": round(sum(rank["bytes read"] for rank in ranks) / total, 2) if loads else None,
        "seconds of a step": round(most["seconds of a step"], 2) if trains else None,
    }
    return described


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=20.0, help="minimum size of the checkpoint. Default: 20")
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, default=2, help="steps after a load. Default: 2")
    parser.add_argument("--offload", action="store_true", help="keep experts in a file")
    parser.add_argument("--save", action="store_true", help="load, shard and save")
    parser.add_argument("--transformers", action="store_true", help="compare with transformers' sharded load")
    parser.add_argument("--audit", action="store_true", help="toolkit audit")
    parser.add_argument("--leave", type=float, metavar="GB", help="free memory that another process does not hold")
    parser.add_argument("--folder", help="folder of the checkpoint. Default: the folder of temporary files")
    options = parser.parse_args()
    layers = -int(-options.gigabytes * 1e9 // LAYER_BYTES)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        (total,) = run_distributed(write_checkpoint, 1, folder, layers, timeout_s=1200)  # frees its memory
        usual = "large_checkpoint" if len(options.processes) == 1 else "large_checkpoint_worlds", ("ours", "stock")
        result, variants = next((case for flag, case in CASES.items() if getattr(options, flag)), usual)
        with all_but(options.leave):
            rows = [
                row(name, folder, processes, layers, total, options.steps)
                for processes in options.processes
                for name in variants
            ]
    finally:
        shutil.rmtree(folder)
    columns = dict.fromkeys(key for each in rows for key in each)
    filled = [{key: each.get(key) for key in columns} for each in rows]
    write_report(result, filled, gigabytes=round(total / 1e9, 2), layers=layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

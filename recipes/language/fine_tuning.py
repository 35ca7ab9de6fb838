"""What fine-tuning a language model adds to a run: the text that it knew, what is written, and a table of controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from language.cached_run import cached_run
from toolkit.data.hub import model_folder
from toolkit.data.identity import identity
from toolkit.errors import UserError, require
from toolkit.experts.parallel.nodes import ranks_per_node
from toolkit.integrations.peft.adapters import AdapterOptions, add_adapters
from toolkit.integrations.peft.merged_weights import save_merged
from toolkit.integrations.transformers.language_models import read_config
from toolkit.integrations.transformers.pretrained_files import save_pretrained, write_on_main
from toolkit.run.config.experts import ExpertRunConfig
from toolkit.run.config.run import RunConfig
from toolkit.run.folder import results_of
from toolkit.run.hardware import free_memory
from toolkit.run.run import Run
from toolkit.train.batch_size import accumulation_steps
from toolkit.train.callbacks.evaluation import Evaluation
from toolkit.train.fine_tuning_memory import Layout, fine_tuning_memory
from toolkit.train.tasks.language_modeling import LanguageModeling

if TYPE_CHECKING:
    from pathlib import Path

    from toolkit.data.text import TextData
    from toolkit.data.tokenizer import Tokenizer

C = TypeVar("C", bound=RunConfig)


def make_base(run: Run, config: ExpertRunConfig, old: TextData | None, recipe: Path) -> str:
    """The folder of the model that `recipe`, lm_moe, has trained on the text `old`, in this run or for an earlier one.

    Its sizes are those of `config`: `experts`, `top_k`, `expert_hidden_size` and `context`. A collective. Raises
    UserError without a text.
    """
    settings: Any = config
    if old is None:
        raise UserError("--model none: give a folder or Hub name, or --old-dataset, on which a small model is trained.")
    flags = ["--dataset", str(settings.old_dataset), "--sample-tokens", "1", "--export", "--cpu", "--tracker", "none"]
    for name in ("experts", "top_k", "expert_hidden_size", "context"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    preset = "debug" if config.preset == "debug" else "full"
    key = identity(old.train)["sha256"]
    run.print(old.notice or f"the base is a model that lm_moe trains on {old.name}")
    return str(run.on_main_and_share(lambda: cached_run(recipe, [preset, *flags], needs="model", key=key)) / "model")


def foresee_memory(
    run: Run, config: ExpertRunConfig, base: str, build_optimizer: Callable[[nn.Module], Optimizer]
) -> None:
    """Print what each process is expected to take, before the model in `base` is loaded. A collective.

    Raises UserError where that is more than there is, unless `config.force`. Says nothing where the dense part is
    sharded.
    """
    if config.dense_parallel != "ddp":
        return
    settings: Any = config
    on_cpu = run.device.type == "cpu"
    remedy = "experts on a CPU are in the host's memory: give a folder, or leave it out"
    require(not on_cpu or settings.offload != "memory", "offload", settings.offload, remedy)
    layout = Layout(
        ep_size=run.expert_groups.ep_size,
        spare_slots=config.spare_slots,
        sequences=config.batch_size // run.world_size // accumulation_steps(run),
        context=settings.context,
        dtype=getattr(torch, settings.dtype),
        quantize=settings.quantize,
        offload=None if settings.offload is None else "file" if on_cpu else "host",
        gradient_checkpointing=settings.gradient_checkpointing,
    )
    adapt = partial(add_adapters, options=settings)

    def decide() -> str:
        expected = fine_tuning_memory(read_config(model_folder(base)), layout, adapt, build_optimizer)
        needs = {"": (expected.total, run.device)}
        if settings.offload == "memory":
            needs[" of the host's memory"] = expected.host, torch.device("cpu")
        found = []
        for of, (taken, device) in needs.items():
            here, there = taken / 2**30, free_memory(device, ranks_per_node(run.world_size)) / 2**30
            require(
                here <= there or settings.force,
                "force",
                settings.force,
                f"each process is expected to take {here:.1f} GiB{of} and has {there:.1f}: use more processes, "
                "quantize='4bit', gradient_checkpointing=True or smaller batches, or try with force=True",
            )
            found.append(f"{here:.2f} GiB{of} expected in each process, of {there:.1f} that are free")
        return f"memory      {'; '.join(found)}"

    run.print(run.on_main_and_share(decide))


def eval_batch_size(run: Run) -> int:
    """Sequences that all processes evaluate at a time: no more than a micro-batch has, so that memory suffices."""
    return run.config.batch_size // accumulation_steps(run)


def evaluate_known_text(run: Run, text: TextData | None, blocks: int | None) -> list[Evaluation]:
    """Bits per byte of the held-out part of a text that the model knows, or of some of its blocks, at start and at each
    epoch's end: `old_bits_per_byte_at_start`, `old_bits_per_byte`. Empty without `text`."""
    if text is None:
        return []
    run.describe(old_dataset=text.name)
    task = LanguageModeling(bytes_per_token=text.bytes_per_token)
    size = eval_batch_size(run)
    return [Evaluation.of(run, text.some_test(blocks), batch_size=size, name="old", task=task, at_start=True)]


def save_trained(model: nn.Module, folder: Path, options: AdapterOptions, tokenizer: Tokenizer) -> None:
    """Write what was trained below the run's `folder`: `adapter/` as stock PEFT reads it, with `merge` also `merged/`;
    or `model/`, where there are no adapters. The latter two are of transformers, with the tokenizer. A collective.

    Raises UserError on every rank alike where a folder cannot be written.
    """
    whole = folder / ("merged" if options.lora_rank else "model")
    save_pretrained(model, folder / "adapter" if options.lora_rank else whole)
    if options.merge:
        save_merged(model, whole)
    if options.merge or not options.lora_rank:
        write_on_main(whole, tokenizer.save_pretrained)


def compare(
    run: Run,
    config: C,
    results: Mapping[str, Any],
    main: Callable[[C], Mapping[str, Any]],
    controls: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """A row for the model as it was, this run's, and each of `controls`: its settings are those of `config` changed by
    these. A control is a run of `main` in `controls/NAME` of this run's folder; a finished one is not run again, one
    that was stopped is continued. A collective."""
    rows = [_row("nothing", 0, results, "_at_start"), _row(results["trained"], results["trained_parameters"], results)]
    for name, changes in controls.items():
        folder = run.folder / "controls" / name
        done = run.on_main_and_share(partial(results_of, folder))
        if done is None or (config.extend and done["steps"] != results["steps"]):
            usual: dict[str, Any] = {"run_dir": folder, "resume": "auto", "resume_from": None, "tracker": "none"}
            control = config.replace(**changes, **usual, extend=done is not None)
            run.print(f"\ncontrol: {name}")
            done = dict(main(control))
        rows.append(_row(done["trained"], done["trained_parameters"], done))
    return rows


def _row(trained: str, parameters: int, results: Mapping[str, Any], when: str = "") -> dict[str, Any]:
    row = {"trained": trained, "parameters": parameters, "new text": results[f"test_bits_per_byte{when}"]}
    old = results.get(f"old_bits_per_byte{when}")
    return row if old is None else row | {"old text": old}

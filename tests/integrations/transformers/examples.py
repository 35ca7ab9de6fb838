"""Runs of those scripts of docs/examples that have the form of other projects' own examples and plugins."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from pydantic import BaseModel

from tests.integrations.peft.models import base
from tests.integrations.transformers.families import tokens
from tests.integrations.transformers.trainers import adapters, quiet_float64, tokenizer, world
from tests.support.helpers import ROOT

FOLDER = ROOT / "docs" / "examples"
GLOBAL_BATCH = 8


class Found(NamedTuple):
    losses: list[float]
    weights: dict[str, torch.Tensor]
    """Of the model that was saved, or of its adapters."""
    moved: int


def run(folder: Path) -> dict[str, Found]:
    """By project. Each script moves experts, where there are several processes."""
    with quiet_float64(), mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        # Accelerate's last, whose end_training ends the process group.
        return {"trl": trl(folder), "axolotl": axolotl(folder), "accelerate": accelerate(folder)}


def script_in_float64(name: str) -> Any:
    """A new module of the script, with experts that know float64 and plans that need not pay."""
    torch.seed()  # as a new process has it: other random numbers on each
    script = importlib.import_module(name)
    script.Qwen3MoeConfig = partial(script.Qwen3MoeConfig, experts_implementation="eager")
    script.ReplanOptions = partial(script.ReplanOptions, guarded=False)
    return script


def accelerate(folder: Path) -> Found:
    script = script_in_float64("accelerate_expert_parallelism")
    config = {"lr": 3e-3, "num_epochs": 2, "seed": 1, "batch_size": 64}
    out = folder / f"accelerate-{world()}"
    arguments = Namespace(cpu=True, mixed_precision=None, ep_size=None, replan_every=2, output_dir=str(out))
    made = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        made.append(of_toolkit(*args, **kwargs))
        return made[0]

    of_toolkit = script.ExpertParallel
    with (
        mock.patch.object(script, "ExpertParallel", watched),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        script.training_function(config, arguments)
    lines = [ast.literal_eval(line) for line in re.findall(r"epoch \d+: (\{.*\})", printed.getvalue())]
    return found(out, [value for line in lines for value in line.values()], len(made[0].migrations))


def trl(folder: Path) -> Found:
    script = script_in_float64("trl_expert_parallelism")
    out = folder / f"trl-{world()}"
    given = {
        "output_dir": out,
        "bf16": False,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "per_device_train_batch_size": GLOBAL_BATCH // world(),
        "report_to": "none",
        "disable_tqdm": True,
        "planner": "lpt",
        "replan_every": 1,
    }
    words = ["--use_cpu", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]
    trainer = script.main(*script.make_parser().parse_args_and_config(words))
    return found(out, losses_of(trainer), len(trainer.experts.migrations))


def losses_of(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def found(out: Path, losses: list[float], moved: int) -> Found:
    from safetensors.torch import load_file

    if dist.is_initialized():
        dist.barrier()
    (file,) = out.glob("*model.safetensors")
    return Found(losses, load_file(file), moved)


# --- what Axolotl 0.19.0, which pins other versions of the libraries, does with a plugin, in its order -------------


class Settings(dict[str, Any]):
    """`axolotl.utils.dict.DictDefault`: names that it lacks are None."""

    def __missing__(self, name: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return Settings(value) if type(value := self[name]) is dict else value


@contextlib.contextmanager
def stand_in_for_axolotl() -> Iterator[None]:
    """Its modules that a plugin imports, with what is called of them."""
    from transformers import Trainer

    class BasePlugin:
        pass

    class AxolotlTrainer(Trainer):
        """Saves whenever it is called, as a rank that need not know others would."""

        def __init__(self, *args: Any, dataset_tags: Any = None, **kwargs: Any):
            self.dataset_tags = dataset_tags
            super().__init__(*args, **kwargs)

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            main = self.accelerator.is_main_process
            self.model.save_pretrained(output_dir, state_dict=state_dict, is_main_process=main)

    modules = {name: ModuleType(name) for name in ("axolotl", "axolotl.integrations", "axolotl.core")}
    modules["axolotl.integrations.base"] = base_module = ModuleType("axolotl.integrations.base")
    modules["axolotl.core.trainers"] = trainers = ModuleType("axolotl.core.trainers")
    base_module.BasePlugin, trainers.AxolotlTrainer = BasePlugin, AxolotlTrainer  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, modules):
        yield


def loaded_plugin(**given: Any) -> tuple[Any, Settings]:
    """A plugin of `plugins:`, and the settings after its arguments have become a base of their model."""
    module, name = ["axolotl_expert_parallelism", "ExpertPlacementPlugin"]
    plugin = getattr(importlib.import_module(module), name)()
    of_arguments, name_of_arguments = plugin.get_input_args().rsplit(".", 1)

    class Known(BaseModel):
        output_dir: str = ""
        rl: str | None = None
        expert_parallel_size: int | None = None

    merged = type("Merged", (Known, getattr(importlib.import_module(of_arguments), name_of_arguments)), {})
    return plugin, Settings(merged(**given).model_dump(exclude_none=True))


def axolotl(folder: Path) -> Found:
    from datasets import Dataset
    from peft import get_peft_model
    from transformers import PrinterCallback, TrainingArguments

    out = folder / f"axolotl-{world()}"
    ids = [tokens(row, 1)[0].tolist() for row in range(24)]
    with stand_in_for_axolotl():
        placed = {"balance_weight": 0.01, "replan": {"planner": "lpt", "every": 1, "guarded": False}}
        plugin, cfg = loaded_plugin(output_dir=str(out), expert_placement=placed)
        model = base("qwen3_moe")
        torch.seed()
        plugin.pre_lora_load(cfg, model)
        model = get_peft_model(model, adapters())
        given: dict[str, Any] = {
            "output_dir": str(out),
            "use_cpu": True,
            "max_steps": 3,
            "save_steps": 2,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "per_device_train_batch_size": GLOBAL_BATCH // world(),
            "report_to": [],
            "disable_tqdm": True,
        } | plugin.get_training_args(cfg)
        trainer = plugin.get_trainer_cls(cfg)(
            model=model,
            args=TrainingArguments(**given),
            train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
            processing_class=tokenizer(),
            dataset_tags=["texts"],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        plugin.post_train(cfg, trainer.model)
        if not dist.is_initialized() or dist.get_rank() == 0:
            model.save_pretrained(cfg.output_dir)
        plugin.post_train(cfg, model)
    return found(out, losses_of(trainer), len(trainer.experts.migrations))

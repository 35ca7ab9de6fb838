"""Runs of the scripts of docs/examples in the form of other projects' examples and plugins."""

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
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import get_peft_model
from pydantic import BaseModel
from safetensors.torch import load_file

from benchmarks.support.processes import ROOT
from tests.integrations.peft.models import base, lora_config
from tests.integrations.transformers.trainers import dataset, settings_of_run, tokenizer, world

FOLDER = ROOT / "docs" / "examples"


Result = tuple[list[float], dict[str, torch.Tensor], int]
"""Losses, weights of the saved model or adapters, and the number of migrations."""


def run(folder: Path) -> dict[str, Result]:
    """Run each script, with migrations if there are several processes; returns results by project."""
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        # Accelerate runs last, because its end_training destroys the process group.
        return {"trl": trl(folder), "axolotl": axolotl(folder), "accelerate": accelerate(folder)}


def import_in_float64(name: str) -> Any:
    """Import a script with experts that support float64, and without the cost check of plans."""
    torch.seed()  # seeds differ by rank, as in new processes
    script = importlib.import_module(name)
    script.Qwen3MoeConfig = partial(script.Qwen3MoeConfig, experts_implementation="eager")
    script.ReplanOptions = partial(script.ReplanOptions, guarded=False)
    return script


def accelerate(folder: Path) -> Result:
    script = import_in_float64("accelerate_expert_parallelism")
    config = {"lr": 3e-3, "num_epochs": 2, "seed": 1, "batch_size": 64}
    out = folder / f"accelerate-{world()}"
    arguments = Namespace(cpu=True, mixed_precision=None, ep_size=None, replan_every=2, output_dir=str(out))
    made = []

    class Watched(script.ExpertParallel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    with mock.patch.object(script, "ExpertParallel", Watched), contextlib.redirect_stdout(io.StringIO()) as printed:
        script.training_function(config, arguments)
    lines = [ast.literal_eval(line) for line in re.findall(r"epoch \d+: (\{.*\})", printed.getvalue())]
    return result(out, [value for line in lines for value in line.values()], made[0])


def trl(folder: Path) -> Result:
    script = import_in_float64("trl_expert_parallelism")
    out = folder / f"trl-{world()}"
    given = settings_of_run(out) | {"bf16": False, "planner": "lpt", "replan_every": 1}
    words = ["--use_cpu", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]
    trainer = script.main(*script.make_parser().parse_args_and_config(words))
    return result(out, losses_of(trainer), trainer.experts)


def losses_of(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def result(out: Path, losses: list[float], experts: Any) -> Result:
    if dist.is_initialized():
        dist.barrier()
    (file,) = out.glob("*model.safetensors")
    return losses, load_file(file), len(experts.migrations)


# --- Axolotl 0.19.0, which pins other versions of the libraries: its calls of a plugin, in its order ---------------


class DictDefault(dict[str, Any]):
    """Stub of `axolotl.utils.dict.DictDefault`, whose missing names are None."""

    def __missing__(self, name: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return DictDefault(value) if type(value := self[name]) is dict else value


@contextlib.contextmanager
def stub_axolotl() -> Iterator[None]:
    """Stub the modules that a plugin imports."""
    from transformers import Trainer

    class AxolotlTrainer(Trainer):
        """Trainer that saves on the calling rank only."""

        def __init__(self, *args: Any, dataset_tags: Any = None, **kwargs: Any):
            self.dataset_tags = dataset_tags
            super().__init__(*args, **kwargs)

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            main = self.accelerator.is_main_process
            self.model.save_pretrained(output_dir, state_dict=state_dict, is_main_process=main)

    names = ("axolotl", "axolotl.integrations", "axolotl.integrations.base", "axolotl.core", "axolotl.core.trainers")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["axolotl.integrations.base"].BasePlugin = type("BasePlugin", (), {})
    modules["axolotl.core.trainers"].AxolotlTrainer = AxolotlTrainer
    with mock.patch.dict(sys.modules, modules):
        yield


def load_plugin(**given: Any) -> tuple[Any, DictDefault]:
    """Return the plugin, and settings validated by a model that inherits from its arguments."""
    plugin = importlib.import_module("axolotl_expert_parallelism").ExpertPlacementPlugin()
    module, name = plugin.get_input_args().rsplit(".", 1)

    class Known(BaseModel):
        output_dir: str = ""
        rl: str | None = None
        expert_parallel_size: int | None = None

    merged = type("Merged", (Known, getattr(importlib.import_module(module), name)), {})
    return plugin, DictDefault(merged(**given).model_dump(exclude_none=True))


def axolotl(folder: Path) -> Result:
    from transformers import PrinterCallback, TrainingArguments

    out = folder / f"axolotl-{world()}"
    with stub_axolotl():
        placed = {"balance_weight": 0.01, "replan": {"planner": "lpt", "every": 1, "guarded": False}}
        plugin, cfg = load_plugin(output_dir=str(out), expert_placement=placed)
        model = base("qwen3_moe")
        torch.seed()
        plugin.pre_lora_load(cfg, model)
        model = get_peft_model(model, lora_config())
        given = (
            settings_of_run(out)
            | {"use_cpu": True, "save_strategy": "steps", "save_steps": 2}
            | plugin.get_training_args(cfg)
        )
        trainer = plugin.get_trainer_cls(cfg)(
            model=model,
            args=TrainingArguments(**given),
            train_dataset=dataset("Trainer", 24),
            processing_class=tokenizer(),
            dataset_tags=["texts"],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        plugin.post_train(cfg, trainer.model)
        if not dist.is_initialized() or dist.get_rank() == 0:
            model.save_pretrained(cfg.output_dir)
        plugin.post_train(cfg, model)
    return result(out, losses_of(trainer), trainer.experts)

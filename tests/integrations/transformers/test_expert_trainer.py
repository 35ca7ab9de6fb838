"""Trainer, SFTTrainer and GRPOTrainer with sharded experts equal one process, and resume bitwise identically."""

import gc
import shutil
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel

from benchmarks.support.families import config, randomize_routers
from benchmarks.support.precision import IN_FLOAT64, relative_difference
from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import error_of
from tests.integrations.peft.models import adapted, base, lora_config, rows, together
from tests.integrations.transformers import examples
from tests.integrations.transformers.trainers import STEPS, dataset, make, quiet_float64, usage, world
from tests.integrations.transformers.training import prepare
from tests.support.equality import assert_equal_rows
from toolkit.errors import UserError
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.routing.routes import Routes
from toolkit.experts.sharding.router_replay import record_routes
from toolkit.integrations.transformers import causal_lm, expert_trainer

FAMILY = "qwen3_moe"
Runs = dict[tuple[int, Callable[[Path], Any]], list[Any]]
"""Results of each rank by number of processes and function."""


MOVING = {"replan": ReplanOptions(planner="lpt", every=1, guarded=False)}
ROUNDED = 1e-6
"""Tolerance for Qwen3, whose norms compute in float32; a wrong row differs by a tenth."""
SETTINGS = dict[str, Any]
PACKED = {"packing": True, "max_length": 16}
CASES: dict[str, tuple[str, SETTINGS, SETTINGS]] = {
    "Trainer, adapters": ("adapters", {"balance_weight": 0.1, **MOVING}, {"gradient_accumulation_steps": 2}),
    # The loss of a classifier ignores the number of tokens.
    "Trainer, classifier": ("classifier", MOVING, {"average_tokens_across_devices": False}),
    "SFTTrainer, peft_config": ("peft_config", {}, {}),
    "SFTTrainer, adapters": ("adapters", {}, {"completion_only_loss": True, "gradient_accumulation_steps": 2}),
    "SFTTrainer, experts": ("experts", MOVING, {**PACKED, "packing_strategy": "wrapped"}),
    "SFTTrainer, packed": ("peft_config", {"balance_weight": 0.1}, PACKED),
}
"""Trained parameters, options of `expert_trainer` and settings by case: the adapters of the model or of the trainer's
`peft_config`, or all parameters of a language model or a classifier."""


def classifier() -> Any:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    settings = config(FAMILY)
    settings.num_labels = 3
    options = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
    return randomize_routers(AutoModelForSequenceClassification.from_config(settings, **options))


def with_peft_config(trained: str) -> dict[str, Any]:
    torch.manual_seed(1)
    return {"peft_config": lora_config()} if trained == "peft_config" else {}


def curve(trainer: Any, *names: str) -> list[tuple[float, ...]]:
    return [tuple(line[name] for name in names) for line in trainer.state.log_history if "grad_norm" in line]


def train(folder: Path, case: str) -> dict[str, Any]:
    trained, options, settings = CASES[case]
    model = adapted(FAMILY) if trained == "adapters" else base(FAMILY)
    more = settings | with_peft_config(trained)
    if trained == "classifier":
        model, data = classifier(), dataset("Trainer")
        more["train_dataset"] = data.remove_columns("labels").add_column("labels", [n % 3 for n in range(len(data))])
    trainer = make(case.partition(",")[0], folder, model, options=options, **more)
    trainer.train()
    saved = folder / f"{case}, {world()}"
    trainer.save_model(str(saved))
    if dist.is_initialized():
        dist.barrier()
    loaded = (
        type(model).from_pretrained(saved, dtype=torch.float64)
        if trained in ("experts", "classifier")
        else PeftModel.from_pretrained(base(FAMILY), saved)
    )
    return {
        "logs": trainer.state.log_history,
        "curve": curve(trainer, "loss", "grad_norm"),
        "weights": rows(trainer.model),
        "loaded": rows(loaded),
        "migrations": len(trainer.experts.migrations),
    }


def train_all(folder: Path) -> dict[str, dict[str, Any]]:
    return {case: train(folder, case) for case in CASES}


def assert_close_curves(found: list[tuple[float, ...]], expected: list[tuple[float, ...]], tolerance: float) -> None:
    columns = (torch.tensor(curve, dtype=torch.float64).T for curve in (found, expected))
    for column, other in zip(*columns, strict=True):
        assert relative_difference(column, other) < tolerance


assert_equal_tensors = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_trainer_on_two_processes_equals_one(case: str, runs: Runs):
    (expected,), ranks = ([rank[case] for rank in runs[number, train_all]] for number in (1, 2))
    for rank in ranks:
        assert len(rank["curve"]) == STEPS
        assert_close_curves(rank["curve"], expected["curve"], ROUNDED)
    for line, other in zip(ranks[0]["logs"], expected["logs"], strict=True):
        assert usage(line) == pytest.approx(usage(other), rel=1e-12)
    weights = together([rank["weights"] for rank in ranks])
    assert_equal_rows(weights, expected["weights"], ROUNDED)
    assert_equal_tensors(ranks[0]["loaded"], weights)
    assert bool(ranks[0]["migrations"]) == ("replan" in CASES[case][1])


def resume(folder: Path) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """Train three steps, and the last one again from the checkpoint of step 2 with a new model and trainer."""
    found = []
    for kind, trained, options in (("Trainer", "experts", MOVING), ("SFTTrainer", "peft_config", {})):
        for checkpoint in (None, True):
            model = base(FAMILY)
            for module in model.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.1
            saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "warmup_steps": 1}
            trainer = make(kind, folder / kind, model, options=options, **saving, **with_peft_config(trained))
            trainer.train(resume_from_checkpoint=checkpoint)
            found.append((curve(trainer, "loss", "grad_norm", "learning_rate"), rows(trainer.model)))
            remove_checkpoint(folder / kind / "checkpoint-3")
    return found


def load_best(folder: Path) -> list[dict[str, Any]]:
    """Train two steps with evaluations that rate step 1 best; return the final weights and those saved at step 1."""
    found = []
    # Files of gpt_oss have stacked experts, files of qwen3_moe one tensor per expert.
    for kind, family in (("Trainer", "gpt_oss"), ("Trainer", FAMILY), ("SFTTrainer", FAMILY)):
        out = folder / f"best-{kind}-{family}"
        more = with_peft_config("peft_config" if kind == "SFTTrainer" else "experts")
        saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        trainer = make(kind, out, base(family), options={}, **saving, **best, prediction_loss_only=True, **more)
        trainer.evaluate = partial(evaluate_rising, trainer, trainer.evaluate)
        trainer.train()
        saved = out / "checkpoint-1"
        loaded = PeftModel.from_pretrained(base(family), saved) if more else causal_lm(saved, dtype=torch.float64)
        losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        found.append({"losses": losses, "weights": rows(trainer.model), "saved": rows(loaded)})
    return found


def evaluate_rising(trainer: Any, evaluate: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
    return evaluate(*args, **kwargs) | {"eval_loss": trainer.state.global_step}


def test_load_best_model_at_end_loads_all_ranks(runs: Runs):
    for first, second in zip(*runs[2, load_best], strict=True):
        assert len(first["losses"]) == 2
        assert first["losses"] == second["losses"]
        assert_equal_tensors(together([first["weights"], second["weights"]]), first["saved"])


def train_two_models(folder: Path) -> dict[str, Any]:
    """Train two models of `model_init` with one trainer, as a hyperparameter search does."""
    models: list[Any] = []

    def model_init() -> Any:
        model = base(FAMILY)
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + len(models))
        models.append(weakref.ref(model))
        return model

    options = {"balance_weight": 0.1, **MOVING}
    trainer = make("Trainer", folder, None, options=options, model_init=model_init)
    curves = []
    for _ in range(2):
        trainer.train()
        curves.append(curve(trainer, "loss", "grad_norm"))
    trainer.save_model(str(folder / f"{world()}"))
    if dist.is_initialized():
        dist.barrier()
    gc.collect()
    _, first, second = models
    assert second() is trainer.model
    assert first() is None, "the first model is kept in memory"
    assert trainer.experts.migrations or world() == 1
    loaded = rows(causal_lm(folder / f"{world()}", dtype=torch.float64))
    return {"curves": curves, "weights": rows(trainer.model), "loaded": loaded}


def test_trainer_with_model_init_on_two_processes_equals_one(runs: Runs):
    (expected,), ranks = (runs[number, train_two_models] for number in (1, 2))
    assert len(expected["curves"][1]) == STEPS
    assert expected["curves"][0][0] != pytest.approx(expected["curves"][1][0])
    for rank in ranks:
        for found, reference in zip(rank["curves"], expected["curves"], strict=True):
            assert_close_curves(found, reference, IN_FLOAT64)
    weights = together([rank["weights"] for rank in ranks])
    assert_equal_rows(weights, expected["weights"], IN_FLOAT64)
    assert_equal_tensors(ranks[0]["loaded"], weights)


def train_with_z_loss(folder: Path) -> list[list[tuple[float, ...]]]:
    """Train with one and with two micro-batches per step, and a penalty that is a mean over tokens."""
    found = []
    for micro_batches in (1, 2):
        settings = {"gradient_accumulation_steps": micro_batches, "options": {"z_weight": 1.0}}
        trainer = make("Trainer", folder, base(FAMILY), **settings)
        trainer.train()
        found.append(curve(trainer, "loss", "grad_norm"))
    return found


def test_router_penalty_with_micro_batches_equals_one_batch(runs: Runs):
    ((expected, found),) = runs[1, train_with_z_loss]
    assert len(expected) == STEPS
    assert_close_curves(found, expected, IN_FLOAT64)


def train_after_evaluation(folder: Path) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """Train without and with an evaluation before, in float64 and under bf16 autocast."""
    found: list[tuple[Any, dict[str, torch.Tensor]]] = []
    for bf16 in (False, True):
        for evaluates in (False, True):
            model = base(FAMILY).float() if bf16 else base(FAMILY)
            trainer = make("Trainer", folder, model, options={}, eval_strategy="no", bf16=bf16)
            if evaluates:
                trainer.evaluate()
            trainer.train()
            found.append((curve(trainer, "loss", "grad_norm"), rows(model)))
    return found


@pytest.mark.parametrize("variant", [resume, train_after_evaluation])
def test_trainer_resumed_or_evaluated_trains_bitwise_identically(variant: Callable[[Path], Any], runs: Runs):
    for rank in runs[2, variant]:
        for (expected, weights), (found, found_weights) in (rank[:2], rank[2:]):
            assert len(expected) == STEPS
            assert found == expected
            assert_equal_tensors(found_weights, weights)


def train_again(folder: Path) -> tuple[list[str], list[tuple[float, ...]]]:
    """Return errors of training again with another optimizer or model, and the learning rates with the first ones."""
    from trl import BEMACallback

    trainer = make("Trainer", folder, base(FAMILY), options={}, lr_scheduler_type="constant")
    trainer.train()
    errors, model, optimizer = [], trainer.model, trainer.optimizer
    for name, value in (("optimizer", None), ("model", base(FAMILY))):
        setattr(trainer, name, value)
        errors.append(error_of(trainer.train))
        trainer.model, trainer.optimizer = model, optimizer
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 1e-4
    trainer.train()
    rates = curve(trainer, "learning_rate")
    trainer = make("Trainer", folder, base(FAMILY), options={}, max_steps=1)
    trainer.add_callback(BEMACallback())
    return [*errors, error_of(trainer.train)], rates


def test_train_again_keeps_optimizer_or_raises(runs: Runs):
    for (optimizer, model, callback), rates in runs[2, train_again]:
        assert rates == [(1e-4,)] * STEPS
        assert "replaced after the experts were sharded" in optimizer
        assert "replaced after the experts were sharded" in model
        assert "BEMACallback copies the experts of one rank" in callback


def errors_of_trainers(folder: Path) -> dict[str, str]:
    """Return errors by expected message."""
    from transformers import LlamaConfig

    def error(model: Any, *, kind: str = "Trainer", **given: Any) -> str:
        return error_of(lambda: make(kind, folder, model, max_steps=1, **given).train())

    prepared = [base(FAMILY), base(FAMILY)]
    for model in prepared:
        prepare(model)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    balanced = {"kind": "SFTTrainer", "options": {"balance_weight": 0.1}, "router_aux_loss_coef": 0.1}
    saving = {"save_strategy": "steps", "save_only_model": False}
    synced = {"kind": "GRPOTrainer", "options": {}, "sync_ref_model": True}
    return {
        "call expert_trainer with a model that was not prepared": error(prepared[0]),
        "are sharded already": error(prepared[1], options={}),
        "has no experts": error(causal_lm(LlamaConfig(vocab_size=64, **sizes)), options={}),
        "Pass save_only_model=True": error(base(FAMILY), options={}, **saving),
        "router_aux_loss_coef=0.0": error(base(FAMILY), **balanced),
        "sync_ref_model: uses the weights of one rank": error(base(FAMILY), **synced),
    }


def test_expert_trainer_with_unsupported_settings_raises(runs: Runs):
    (errors,) = runs[1, errors_of_trainers]
    for message, error in errors.items():
        assert message in error
        assert "\n" not in error


def remove_checkpoint(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


def train_policies(folder: Path) -> list[dict[str, Any]]:
    """Train by GRPO with adapters, with all parameters, and resumed from step 2."""
    found = [train_policy(folder / trained, trained) for trained in ("peft_config", "experts")]
    remove_checkpoint(folder / "experts" / "checkpoint-4")
    return [*found, train_policy(folder / "experts", "experts", checkpoint=True)]


def train_policy(folder: Path, trained: str, checkpoint: bool | None = None) -> dict[str, Any]:
    """Train four steps on two rollouts whose lengths differ by rank; count flipped experts with and without replay."""
    more = with_peft_config(trained)
    rollouts = {"num_iterations": 2, "max_steps": 4, "beta": 0.04 if more else 0.0}
    saving = {"save_strategy": "steps", "save_steps": 2}
    options = {"replay_routes": True, **MOVING}
    model = base(FAMILY).float()
    trainer = make("GRPOTrainer", folder, model, options=options, max_grad_norm=1.0, **rollouts, **saving, **more)
    trainer.generation_config.max_new_tokens = 3 + 5 * dist.get_rank()
    compute_loss, flipped, without_replay, longest = trainer.compute_loss, [], [], []

    def watched(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ids, mask = (torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"]], 1) for of in ("ids", "mask"))
        texts = [tuple(row[here.bool()].tolist()) for row, here in zip(ids, mask, strict=True)]
        generated = Routes.from_rollout([trainer.routes.known[text] for text in texts], mask)
        longest.append(int(inputs["completion_mask"].sum(1).max()))
        with mock.patch.object(trainer.routes, "known", {}), torch.no_grad(), record_routes(trainer.model) as routes:
            compute_loss(model, inputs, *args, **kwargs)
        without_replay.append(routes.flipped(generated))
        with record_routes(trainer.model) as routes:
            loss = compute_loss(model, inputs, *args, **kwargs)
        flipped.append(routes.flipped(generated))
        return loss

    trainer.compute_loss = watched
    trainer.train(resume_from_checkpoint=checkpoint)
    norms = curve(trainer, "grad_norm")
    return {"norms": norms, "longest": longest, "flipped": flipped, "without_replay": without_replay}


def test_grpo_trainer_replays_experts_of_rollouts_with_unequal_lengths(runs: Runs):
    ranks = runs[2, train_policies]
    for first, second in zip(*ranks, strict=True):
        assert first["norms"] == second["norms"]
        assert len(first["norms"]) == 4
        assert max(first["norms"]) > (0,)
        assert max(first["longest"]) <= 3 < max(second["longest"])
        assert {*first["flipped"], *second["flipped"]} == {0}
        assert max(first["without_replay"] + second["without_replay"]) > 0
    _, expected, resumed = ranks[0]
    assert resumed["norms"] == expected["norms"]
    assert len(resumed["flipped"]) == 2


@pytest.mark.parametrize("project", ["accelerate", "trl", "axolotl"])
def test_example_script_on_two_processes_equals_one(project: str, runs: Runs):
    (single,), ranks = (runs[number, examples.run] for number in (1, 2))
    expected, expected_weights, _ = single[project]
    assert len(set(expected)) > 2
    for number, (losses, weights, migrations) in enumerate(rank[project] for rank in ranks):
        assert migrations > 0
        if number == 0 or losses:  # the Accelerate script prints losses on rank 0 only
            assert losses == pytest.approx(expected, rel=ROUNDED)
        assert_equal_rows(weights, expected_weights, ROUNDED)


@pytest.mark.parametrize("other", [{"rl": "grpo"}, {"expert_parallel_size": 2}])
def test_axolotl_plugin_with_conflicting_setting_raises(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(examples.FOLDER)
    with examples.stub_axolotl():
        plugin, cfg = examples.load_plugin(expert_placement={"ep_size": 2}, **other)
        with pytest.raises(UserError, match=r"remove one\.$"):
            plugin.get_trainer_cls(cfg)
        plugin, cfg = examples.load_plugin(**other)
        assert plugin.get_trainer_cls(cfg) is plugin.get_training_args(cfg) is None


def test_compute_loss_with_keyword_only_arguments_trains(tmp_path: Path):
    from transformers import Trainer, TrainingArguments

    class KeywordLoss(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, *, return_outputs: bool = False, num_items_in_batch: Any = None
        ):
            assert num_items_in_batch is not None
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(str(tmp_path), max_steps=1, **options)
    trainer = expert_trainer(KeywordLoss)(model=base(FAMILY), args=args, train_dataset=dataset("Trainer", 8))
    assert trainer.train().training_loss > 0


ON_TWO = [train_two_models, resume, load_best, train_after_evaluation, train_again, train_policies, examples.run]
LAUNCHES: dict[int, list[Callable[[Path], Any]]] = {
    1: [train_all, train_two_models, train_with_z_loss, errors_of_trainers, examples.run],
    2: [train_all, *ON_TWO],
}
"""Functions by number of processes, which import TRL once for all of them."""


def run_all(folder: Path, number: int) -> list[Any]:
    found = []
    for function in LAUNCHES[number]:
        # In float64, eager attention returns NaN for GRPO's left padding.
        with nullcontext() if function is train_policies else quiet_float64():
            found.append(function(folder / function.__name__))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder, found = tmp_path_factory.mktemp("trainers"), {}
    for number, functions in LAUNCHES.items():
        for function, *ranks in zip(functions, *run_distributed(run_all, number, folder, number), strict=True):
            found[number, function] = ranks
    return found

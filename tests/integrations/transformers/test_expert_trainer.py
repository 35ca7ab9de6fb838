"""Trainer, SFTTrainer and GRPOTrainer with spread experts: two processes equal one, and resuming ends the same."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.integrations.peft.models import adapted, base, rows
from tests.integrations.peft.test_parity import together
from tests.integrations.transformers import examples
from tests.integrations.transformers.families import EXPERTS, awaken, config, tokens
from tests.integrations.transformers.trainers import (
    STEPS,
    adapters,
    make,
    quiet_float64,
    usage_by_hand,
    usage_of,
    world,
)
from tests.support.equality import IN_FLOAT64, assert_equal_rows, relative_difference
from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.routing.routes import Routes
from toolkit.experts.sharding.router_replay import record_routes
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import causal_lm

FAMILY = "qwen3_moe"


class Case(NamedTuple):
    kind: str
    trained: str
    """"experts" and all else; "classifier", the same of a model without text; "adapters", which the model has; or those
    of the trainer's `peft_config`."""
    spread: Mapping[str, Any] = MappingProxyType({})
    given: Mapping[str, Any] = MappingProxyType({})

    def __str__(self) -> str:
        return " ".join([self.kind, self.trained, *self.spread, *self.given])


MOVING = {"replan": ReplanOptions(planner="lpt", every=1, guarded=False)}
ROUNDED = 1e-6
"""Qwen3's norms compute in float32 whatever the weights are, and round otherwise on another processor; a wrong row
differs by a tenth."""
CASES = [
    Case("Trainer", "adapters", {"balance_weight": 0.1, **MOVING}, {"gradient_accumulation_steps": 2}),
    Case("Trainer", "experts", MOVING),
    Case("Trainer", "classifier", MOVING, {"average_tokens_across_devices": False}),  # its loss ignores their number
    Case("SFTTrainer", "peft_config"),
    Case("SFTTrainer", "adapters", given={"completion_only_loss": True, "gradient_accumulation_steps": 2}),
    Case("SFTTrainer", "experts", MOVING, {"packing": True, "packing_strategy": "wrapped", "max_length": 16}),
    Case("SFTTrainer", "peft_config", {"balance_weight": 0.1}, {"packing": True, "max_length": 16}),
]


def classifier() -> Any:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    settings = config(FAMILY)
    settings.num_labels = 3
    return awaken(
        AutoModelForSequenceClassification.from_config(
            settings, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
    )


def classes(number: int = 96) -> dict[str, list[Any]]:
    return {
        "input_ids": [tokens(row, 1)[0].tolist() for row in range(number)],
        "labels": [n % 3 for n in range(number)],
    }


class Chosen:
    """Counts the experts that tokens choose in forwards that are learnt from, padding left out, from the arguments of
    modules alone."""

    def __init__(self, model: Any) -> None:
        self.load_FLE: list[list[list[int]]] = []
        """Of each forward."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name, module in model.named_modules():
            if name.endswith("mlp.experts"):
                module.register_forward_pre_hook(self._add)

    def _begin(self, model: Any, _: Any, inputs: dict[str, Any]) -> None:  # noqa: ARG002
        self.mask = inputs.get("attention_mask")
        if torch.is_grad_enabled():
            self.load_FLE.append([])

    def _add(self, experts: Any, arguments: tuple[torch.Tensor, ...]) -> None:  # noqa: ARG002
        if torch.is_grad_enabled():
            ids = arguments[1] if self.mask is None else arguments[1][self.mask.flatten().bool()]
            self.load_FLE[-1].append(torch.bincount(ids.flatten(), minlength=EXPERTS).tolist())


def train(folder: Path, case: Case) -> dict[str, Any]:
    from datasets import Dataset
    from peft import PeftModel

    model = adapted(FAMILY) if case.trained == "adapters" else base(FAMILY)
    more = dict(case.given)
    if case.trained == "classifier":
        model, more["train_dataset"] = classifier(), Dataset.from_dict(classes())
    if case.trained == "peft_config":
        torch.manual_seed(1)
        more["peft_config"] = adapters()
    trainer = make(case.kind, folder, model, spread=dict(case.spread), **more)
    chosen = Chosen(trainer.model)
    trainer.train()
    saved = folder / f"{CASES.index(case)}-{world()}"
    trainer.save_model(str(saved))
    if dist.is_initialized():
        dist.barrier()
    loaded = (
        type(model).from_pretrained(saved, dtype=torch.float64)
        if case.trained in ("experts", "classifier")
        else PeftModel.from_pretrained(base(FAMILY), saved)
    )
    return {
        "logs": trainer.state.log_history,
        "weights": rows(trainer.model),
        "loaded": rows(loaded),
        "moved": len(trainer.experts.migrations),
        "chosen": chosen.load_FLE,
    }


def train_all(folder: Path) -> list[dict[str, Any]]:
    with quiet_float64():
        return [train(folder, case) for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_processes_train_what_one_trains(case: Case, runs: Runs):
    (expected,), ranks = ([rank[CASES.index(case)] for rank in runs[number, train_all]] for number in (1, 2))
    for name in ("loss", "grad_norm"):
        wanted = torch.tensor([line[name] for line in expected["logs"][:STEPS]], dtype=torch.float64)
        for rank in ranks:
            found = torch.tensor([line[name] for line in rank["logs"][:STEPS]], dtype=torch.float64)
            assert relative_difference(found, wanted) < ROUNDED, name
    for line, alone in zip(ranks[0]["logs"], expected["logs"], strict=True):
        assert usage_of(line) == pytest.approx(usage_of(alone), rel=1e-12)
    weights = together([rank["weights"] for rank in ranks])
    assert_equal_rows(weights, expected["weights"], ROUNDED)
    for name, row in ranks[0]["loaded"].items():
        assert torch.equal(row, weights[name]), f"{name} was saved otherwise"
    assert ranks[0]["loaded"].keys() == weights.keys()
    assert bool(ranks[0]["moved"]) == ("replan" in case.spread)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logs_have_the_load_of_all_ranks_experts_in_five_numbers(case: Case, runs: Runs):
    for number in (1, 2):
        ranks = [rank[CASES.index(case)] for rank in runs[number, train_all]]
        chosen_FLE = np.sum([rank["chosen"] for rank in ranks], 0)
        load_SLE = chosen_FLE.reshape(STEPS, -1, *chosen_FLE.shape[1:]).sum(1)
        for rank in ranks:
            *lines, last = rank["logs"]
            assert not usage_of(last)
            for line, load_LE in zip(lines, load_SLE.tolist(), strict=True):
                assert usage_of(line) == pytest.approx(usage_by_hand(load_LE), rel=1e-12)


def interrupted(folder: Path) -> list[dict[str, Any]]:
    """Three steps, then the last of them again from the checkpoint of step 2 by a new model and trainer."""
    found = []
    for case in (Case("Trainer", "experts", MOVING), Case("SFTTrainer", "peft_config")):
        out, ends = folder / case.kind, []
        for resume in (None, True):
            model = base(FAMILY)
            for module in model.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.1
            torch.manual_seed(1)
            more = {"peft_config": adapters()} if case.trained == "peft_config" else {}
            saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "warmup_steps": 1}
            trainer = make(case.kind, out, model, spread=dict(case.spread), **saving, **more)
            trainer.train(resume_from_checkpoint=resume)
            lines = [
                (line["loss"], line["grad_norm"], line["learning_rate"]) for line in trainer.state.log_history[:-1]
            ]
            ends.append({"lines": lines, "weights": rows(trainer.model)})
            remove_checkpoint(out / "checkpoint-3")
        found.append({"kind": case.kind, "ends": ends})
    return found


def best(folder: Path) -> list[dict[str, Any]]:
    """With evaluation, where the model of step 1 is called the best: what is left at the end, and what was saved."""
    from peft import PeftModel

    found = []
    # gpt_oss has its experts in files as in the model, qwen3_moe has not
    for kind, family in (("Trainer", "gpt_oss"), ("Trainer", FAMILY), ("SFTTrainer", FAMILY)):
        out = folder / f"best-{kind}-{family}"
        more = {"peft_config": adapters()} if kind == "SFTTrainer" else {}
        saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
        chosen = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        trainer = make(kind, out, base(family), spread={}, **saving, **chosen, prediction_loss_only=True, **more)
        trainer.evaluate = partial(evaluate_as_ever_worse, trainer, trainer.evaluate)
        trainer.train()
        saved = out / "checkpoint-1"
        loaded = PeftModel.from_pretrained(base(family), saved) if more else causal_lm(saved, dtype=torch.float64)
        losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        found.append({"losses": losses, "weights": rows(trainer.model), "saved": rows(loaded)})
    return found


def evaluate_as_ever_worse(trainer: Any, evaluate: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
    return evaluate(*args, **kwargs) | {"eval_loss": trainer.state.global_step}


def saved_and_resumed(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    with quiet_float64():
        return interrupted(folder), best(folder)


def test_a_resumed_training_ends_with_the_same_bits(runs: Runs):
    for interruptions, _ in runs[2, saved_and_resumed]:
        for found in interruptions:
            whole, again = found["ends"]
            assert len(again["lines"]) == 3
            assert again["lines"] == whole["lines"], found["kind"]
            assert again["weights"].keys() == whole["weights"].keys()
            for name, value in whole["weights"].items():
                assert torch.equal(again["weights"][name], value), f"{found['kind']}: {name}"


def test_the_best_model_is_loaded_at_the_end_on_every_rank(runs: Runs):
    for number in range(3):
        ranks = [rank[1][number] for rank in runs[2, saved_and_resumed]]
        assert len(ranks[0]["losses"]) == 2
        assert ranks[0]["losses"] == ranks[1]["losses"]
        weights = together([rank["weights"] for rank in ranks])
        assert weights.keys() == ranks[0]["saved"].keys()
        for name, value in ranks[0]["saved"].items():
            assert torch.equal(weights[name], value), name


class Twice(NamedTuple):
    lines: list[list[tuple[float, float]]]
    weights: dict[str, torch.Tensor]
    moved: int
    loaded: dict[str, torch.Tensor]
    first_is_kept: bool


def train_two_models(folder: Path) -> Twice:
    """Two trainings of one trainer, each of a model of its own, as trials of a hyperparameter search are."""
    models: list[Any] = []

    def model_init() -> Any:
        model = base(FAMILY)
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + len(models))
        models.append(weakref.ref(model))
        return model

    with quiet_float64():
        spread = {"balance_weight": 0.1, **MOVING}
        trainer = make("Trainer", folder, None, spread=spread, model_init=model_init)
        lines = []
        for _ in range(2):
            trainer.train()
            logs = trainer.state.log_history
            lines.append([(line["loss"], line["grad_norm"]) for line in logs if "grad_norm" in line])
        trainer.save_model(str(folder / f"{world()}"))
        if dist.is_initialized():
            dist.barrier()
        gc.collect()
        _, first, second = models
        assert second() is trainer.model
        loaded = rows(causal_lm(folder / f"{world()}", dtype=torch.float64))
        return Twice(lines, rows(trainer.model), len(trainer.experts.migrations), loaded, first() is not None)


def test_each_model_of_model_init_is_trained_as_on_one_process(runs: Runs):
    (expected,), ranks = (runs[number, train_two_models] for number in (1, 2))
    assert len(expected.lines[1]) == STEPS
    assert expected.lines[0][0] != pytest.approx(expected.lines[1][0]), "one model was trained twice"
    for rank in ranks:
        assert rank.moved > 0
        assert not rank.first_is_kept, "the memory of two models is held"
        for found, wanted in zip(rank.lines, expected.lines, strict=True):
            assert relative_difference(torch.tensor(found), torch.tensor(wanted)) < IN_FLOAT64
    weights = together([rank.weights for rank in ranks])
    assert_equal_rows(weights, expected.weights, IN_FLOAT64)
    for name, row in ranks[0].loaded.items():
        assert torch.equal(row, weights[name]), f"{name} was saved otherwise"


def curves_with_z_loss(folder: Path) -> list[list[tuple[float, float]]]:
    """Loss and norm of each step of eight samples in one micro-batch and in two, with a penalty that is a mean over
    tokens."""
    found = []
    with quiet_float64():
        for micro_batches in (1, 2):
            settings = {"gradient_accumulation_steps": micro_batches, "spread": {"z_weight": 1.0}}
            trainer = make("Trainer", folder, base(FAMILY), **settings)
            trainer.train()
            logs = trainer.state.log_history
            found.append([(line["loss"], line["grad_norm"]) for line in logs if "grad_norm" in line])
    return found


def test_a_penalty_is_the_mean_of_those_of_micro_batches(runs: Runs):
    ((whole, parts),) = runs[1, curves_with_z_loss]
    assert len(whole) == STEPS
    assert relative_difference(torch.tensor(parts), torch.tensor(whole)) < IN_FLOAT64


def train_after_evaluation(folder: Path) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """Without an evaluation and with one before training, in float64 and under bf16 autocast."""
    found: list[tuple[Any, dict[str, torch.Tensor]]] = []
    with quiet_float64():
        for bf16 in (False, True):
            for evaluates in (False, True):
                model = base(FAMILY).float() if bf16 else base(FAMILY)
                trainer = make("Trainer", folder, model, spread={}, eval_strategy="no", bf16=bf16)
                if evaluates:
                    trainer.evaluate()
                trainer.train()
                lines = [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
                found.append((lines, rows(model)))
    return found


def test_an_evaluation_before_training_changes_nothing(runs: Runs):
    for rank in runs[2, train_after_evaluation]:
        for (lines, weights), (lines_after, weights_after) in (rank[:2], rank[2:]):
            assert len(lines) == STEPS
            assert lines_after == lines
            for name, row in weights.items():
                assert torch.equal(weights_after[name], row), name


def second_stages(folder: Path) -> tuple[list[str], list[float]]:
    """What a replaced optimizer and a replaced model are told, and the rates of a second training by the first one."""
    with quiet_float64():
        trainer = make("Trainer", folder, base(FAMILY), spread={}, lr_scheduler_type="constant")
        trainer.train()
        said, model, optimizer = [], trainer.model, trainer.optimizer
        for name, value in (("optimizer", None), ("model", base(FAMILY))):
            setattr(trainer, name, value)
            with pytest.raises(UserError) as caught:
                trainer.train()
            said.append(str(caught.value))
            trainer.model, trainer.optimizer = model, optimizer
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 1e-4
        trainer.train()
        rates = [line["learning_rate"] for line in trainer.state.log_history if "grad_norm" in line]
        return said, rates


def test_a_second_stage_keeps_its_optimizer(runs: Runs):
    for said, rates in runs[2, second_stages]:
        assert all("replaced after the experts were sharded" in line for line in said)
        assert rates == [1e-4] * STEPS


def refused(folder: Path) -> dict[str, str]:
    """What each of these says, in one process."""
    from accelerate import Accelerator
    from transformers import LlamaConfig

    def message(model: Any, *, spread: dict[str, Any] | None = None, kind: str = "Trainer", **given: Any) -> str:
        with pytest.raises(UserError) as caught:
            make(kind, folder, model, spread=spread, max_steps=1, **given).train()
        return str(caught.value)

    def dense() -> Any:
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
        return causal_lm(LlamaConfig(vocab_size=64, **sizes))

    def prepared() -> Any:
        model = base(FAMILY)
        ExpertParallel(Accelerator(cpu=True)).prepare(model, torch.optim.SGD(model.parameters()))
        return model

    with quiet_float64():
        return {
            "prepared before, in a Trainer": message(prepared()),
            "prepared before": message(prepared(), spread={}),
            "no experts": message(dense(), spread={}),
            "saving": message(base(FAMILY), spread={}, save_strategy="steps", save_only_model=False),
            "two penalties": message(
                base(FAMILY), kind="SFTTrainer", spread={"balance_weight": 0.1}, router_aux_loss_coef=0.1
            ),
            "the model's reference": message(base(FAMILY), kind="GRPOTrainer", spread={}, sync_ref_model=True),
        }


def test_what_would_use_a_part_of_the_experts_is_refused_in_one_line(runs: Runs):
    expected = {
        "prepared before, in a Trainer": "call expert_trainer with a model that was not prepared",
        "prepared before": "are sharded already",
        "no experts": "has no experts",
        "saving": "Pass save_only_model=True",
        "two penalties": "router_aux_loss_coef=0.0",
        "the model's reference": "sync_ref_model: uses the weights of one rank",
    }
    (messages,) = runs[1, refused]
    assert messages.keys() == expected.keys()
    for name, message in messages.items():
        assert expected[name] in message
        assert "\n" not in message


def train_with_averages(folder: Path) -> str:
    from trl import BEMACallback

    with quiet_float64():
        trainer = make("Trainer", folder, base(FAMILY), spread={}, max_steps=1)
        trainer.add_callback(BEMACallback())
        with pytest.raises(UserError) as caught:
            trainer.train()
        return str(caught.value)


def test_train_callback_that_copies_weights_raises(runs: Runs):
    for message in runs[2, train_with_averages]:
        assert "BEMACallback copies the experts of one rank" in message


def learn_from_rollouts(folder: Path) -> list[dict[str, Any]]:
    """GRPO learns twice from texts of other lengths on each rank: which experts were used, with replay and without."""
    found = [learn(folder / trained, trained) for trained in ("peft_config", "experts")]
    remove_checkpoint(folder / "experts" / "checkpoint-4")
    return [*found, learn(folder / "experts", "experts", resume=True)]


def remove_checkpoint(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


def learn(folder: Path, trained: str, resume: bool | None = None) -> dict[str, Any]:
    torch.manual_seed(1)
    more = {"peft_config": adapters()} if trained == "peft_config" else {}
    rollouts = {
        "num_iterations": 2,
        "max_steps": 4,
        "beta": 0.04 if more else 0.0,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    spread = {"replay_routes": True, **MOVING}
    model = base(FAMILY).float()  # in float64, eager attention has no numbers for padding at the left
    trainer = make("GRPOTrainer", folder, model, spread=spread, max_grad_norm=1.0, **rollouts, **more)
    trainer.generation_config.max_new_tokens = 3 + 5 * dist.get_rank()
    compute_loss, flipped, without_replay, longest = trainer.compute_loss, [], [], []

    def watched(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        ids, mask = (torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"]], 1) for of in ("ids", "mask"))
        texts = [tuple(row[here.bool()].tolist()) for row, here in zip(ids, mask, strict=True)]
        generated = Routes.from_rollout([trainer.routes.known[text] for text in texts], mask)
        longest.append(int(inputs["completion_mask"].sum(1).max()))
        with mock.patch.object(trainer.routes, "known", {}), torch.no_grad(), record_routes(trainer.model) as anew:
            compute_loss(model, inputs, *args, **kwargs)
        without_replay.append(anew.flipped(generated))
        with record_routes(trainer.model) as used:
            loss = compute_loss(model, inputs, *args, **kwargs)
        flipped.append(used.flipped(generated))
        return loss

    trainer.compute_loss = watched
    trainer.train(resume_from_checkpoint=resume)
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    return {"norms": norms, "longest": longest, "flipped": flipped, "without_replay": without_replay}


def test_policies_learn_with_the_experts_that_generated_texts_of_unequal_lengths(runs: Runs):
    ranks = runs[2, learn_from_rollouts]
    for first, second in zip(*ranks, strict=True):
        assert first["norms"] == second["norms"]
        assert len(first["norms"]) == 4
        assert max(first["norms"]) > 0
        assert max(first["longest"]) <= 3 < max(second["longest"])
        for rank in (first, second):
            assert set(rank["flipped"]) == {0}
        assert max(first["without_replay"] + second["without_replay"]) > 0, "nothing to replay"
    _, whole, again = ranks[0]
    assert again["norms"] == whole["norms"]
    assert len(again["flipped"]) == 2


@pytest.mark.parametrize("project", ["accelerate", "trl", "axolotl"])
def test_files_for_other_projects_train_on_two_processes_what_they_train_on_one(project: str, runs: Runs):
    (alone,), ranks = (runs[number, examples.run] for number in (1, 2))
    expected = alone[project]
    assert len(set(expected.losses)) > 2
    for found in (rank[project] for rank in ranks):
        assert found.moved > 0
        if found.losses:  # Accelerate prints on rank 0
            assert found.losses == pytest.approx(expected.losses, rel=ROUNDED)
        assert_equal_rows(found.weights, expected.weights, ROUNDED)
    assert ranks[0][project].losses


@pytest.mark.parametrize("other", [{"rl": "grpo"}, {"expert_parallel_size": 2}])
def test_the_plugin_of_axolotl_refuses_what_it_is_not_for(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(examples.FOLDER)
    with examples.stand_in_for_axolotl():
        plugin, cfg = examples.loaded_plugin(expert_placement={"ep_size": 2}, **other)
        with pytest.raises(UserError, match=r"remove one\.$"):
            plugin.get_trainer_cls(cfg)
        plugin, cfg = examples.loaded_plugin(**other)
        assert plugin.get_trainer_cls(cfg) is plugin.get_training_args(cfg) is None


LAUNCHES: dict[int, list[Callable[[Path], Any]]] = {
    1: [train_all, train_two_models, curves_with_z_loss, refused, examples.run],
    2: [
        train_all,
        saved_and_resumed,
        train_two_models,
        train_after_evaluation,
        second_stages,
        train_with_averages,
        learn_from_rollouts,
        examples.run,
    ],
}
"""By number of processes, which import TRL once for all of them."""
Runs = dict[tuple[int, Callable[[Path], Any]], list[Any]]


def test_compute_loss_with_keyword_only_arguments_trains(tmp_path: Path):
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    from toolkit.integrations.transformers.expert_trainer import expert_trainer

    class KeywordLoss(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, *, return_outputs: bool = False, num_items_in_batch: Any = None
        ):
            assert num_items_in_batch is not None
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    args = TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    data = Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens(0, 8).tolist()])
    trainer = expert_trainer(KeywordLoss)(model=base(FAMILY), args=args, train_dataset=data)
    assert trainer.train().training_loss > 0


def run_all(folder: Path, number: int) -> list[Any]:
    return [function(folder / function.__name__) for function in LAUNCHES[number]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """By number of processes and function, what each rank returned."""
    folder, found = tmp_path_factory.mktemp("trainers"), {}
    for number, functions in LAUNCHES.items():
        for function, *ranks in zip(functions, *run_distributed(run_all, number, folder, number), strict=True):
            found[number, function] = ranks
    return found

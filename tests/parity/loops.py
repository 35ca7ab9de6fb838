"""Ways to train with sharded experts, by name, and the plain loop of one process that they have to equal."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, ParallelismConfig
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import toolkit as tk
from benchmarks.support.accelerators import make_accelerator
from tests.parity.case import CHECKPOINTING, Case
from tests.parity.data import (
    BATCH,
    FULL,
    SAMPLES,
    STEPS,
    TEST,
    TRAIN,
    Rows,
    rank_and_world,
    summed_loss,
    targets,
    trainer_rows,
    transformers_rows,
    transformers_samples,
    unequal_rows,
    unequal_share,
)
from tests.parity.layouts import place
from tests.parity.models import OF_TRANSFORMERS, build, in_float64_throughout
from tests.parity.optimizers import make_optimizer
from tests.parity.outcome import Outcome
from toolkit import experts
from toolkit.data.batches import EvalBatches, TrainBatches
from toolkit.experts.parallel.collectives import sum_over_ranks
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.callbacks.expert_balance import WholeStepBalance
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.callbacks.replan import Replan

MAX_NORM, STOP = 0.5, 2
"""The norm for clipping, and the step after which a run is saved and resumed."""


def decayed(step: int) -> float:
    """The factor of the learning rate in a step."""
    return 1 / (1 + step)


def make_model(case: Case) -> nn.Module:
    model: Any = build(case.model, torch.float32 if case.dtype is torch.bfloat16 else case.dtype)
    if case.frozen:
        names = dict(model.named_parameters())
        for part in ("norm", ".experts."):
            names[next(name for name in names if part in name)].requires_grad_(False)
    if (use_reentrant := CHECKPOINTING[case.checkpointing]) is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return model


def make_optimizer_and_scheduler(case: Case, model: nn.Module) -> tuple[Optimizer, LambdaLR | None]:
    optimizer = make_optimizer(case.optimizer, model, groups=case.groups)
    if case.dtype is not torch.float64:  # updates would amplify rounding errors
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    return optimizer, LambdaLR(optimizer, decayed) if case.scheduler else None


def make_penalty(case: Case, model: nn.Module) -> experts.RouterPenalty | None:
    return experts.RouterPenalty(model, balance_weight=0.1, z_weight=0.01) if case.penalty else None


def use_weights_for(mode: str, optimizer: Any) -> None:
    """Switch a schedule-free optimizer to the weights for "train" or "eval"."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


def split_of(case: Case, rank: int, world: int) -> Rows:
    """Return the samples of a rank. Models of transformers compute no empty batches, so theirs are split equally."""
    if case.loop == "expert_trainer":
        return transformers_rows(case.accumulation, rank, world)
    if case.model in OF_TRANSFORMERS or case.loop == "Trainer":
        return trainer_rows(FULL if case.model in OF_TRANSFORMERS else SAMPLES, case.accumulation, rank, world)
    return unequal_rows(case.accumulation, rank, world)


def train_reference(case: Case) -> Outcome:
    """Train in plain torch on one process."""
    outcome = Outcome()
    with in_float64_throughout(case.model):
        model = make_model(case)
        optimizer, scheduler = make_optimizer_and_scheduler(case, model)
        outcome.watch(model, optimizer)
        penalty, monitor = make_penalty(case, model), experts.RouterMonitor(model)
        for rows in split_of(case, 0, 1):
            if case.penalty and case.loop == "Trainer":
                rows = [torch.cat(rows)]
            use_weights_for("train", optimizer)
            total, loss = sum(map(targets, rows)), torch.zeros((), dtype=torch.float64)
            for part in rows:
                with torch.autocast("cpu", enabled=case.dtype is torch.bfloat16):
                    logits = model.train()(input_ids=TRAIN[part])["logits"]
                nats = summed_loss(logits.to(torch.promote_types(logits.dtype, torch.float32)), TRAIN[part])
                loss = loss + (nats + (targets(part) * penalty() if penalty else 0)) / total
            loss.backward()
            if case.clipping:
                outcome.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            outcome.losses.append(loss.item())
            outcome.add_loads(monitor.metrics())
            if case.evaluation:
                use_weights_for("eval", optimizer)
                with torch.no_grad():
                    test = summed_loss(model.eval()(input_ids=TEST)["logits"], TEST)
                outcome.evaluations.append(test.item() / targets(TEST))
        use_weights_for("eval", optimizer)
        monitor.close()
        outcome.finish(model, optimizer)
    return outcome


class OwnLoop(ABC):
    """Training loop of a user. Subclasses shard the experts and make steps."""

    def __init__(self, case: Case, folder: Path):
        self.case, self.folder, self.layout, self.outcome = case, folder, case.ranks, Outcome()
        self.rank, self.world = rank_and_world()
        self.set_up(self.layout.placement)

    def set_up(self, placement: str) -> None:
        self.raw = make_model(self.case)
        self.device = torch.device("cpu")
        self.penalty = make_penalty(self.case, self.raw)
        self.shard(lambda _, count, ranks: place(placement, count, ranks))
        self.outcome.watch(self.raw, self.raw_optimizer)

    @abstractmethod
    def shard(self, placement: Any) -> None:
        """Set `model`, which is called, `optimizer`, which steps, `raw_optimizer`, and functions for the experts:
        `write` and `read` a checkpoint, read `metrics`, and list `migrations`."""

    @abstractmethod
    def learn(self, rows: list[Tensor], counts: list[int]) -> Tensor:
        """Make a step on this rank's micro-batches, which have `counts` targets over all ranks; return the loss."""

    def loss_of(self, rows: Tensor, count: int, total: int) -> Tensor:
        """Return this rank's share of the loss of a micro-batch with `count` of the `total` targets of a step."""
        ids = TRAIN[rows].to(self.device)
        nats = summed_loss(self.model(input_ids=ids)["logits"], ids)
        return (nats + count * self.penalty.share() if self.penalty else nats) / total

    def save(self) -> None:
        self.write({} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()})

    def load(self) -> None:
        extra = self.read()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(extra["scheduler"])

    def count_moves(self) -> int:
        return sum(migration.report.cost.experts for migration in self.migrations())

    def train(self) -> Outcome:
        for step in range(STEPS):
            if self.case.resume and step == STOP:
                self.save()
                moved = self.count_moves()
                self.set_up(self.layout.resumed)
                self.load()
                self.outcome.moved += moved
            use_weights_for("train", self.optimizer)
            self.model.train()
            counts = list(map(targets, split_of(self.case, 0, 1)[step]))
            loss = self.learn(split_of(self.case, self.rank, self.world)[step], counts)
            self.outcome.losses.append(sum_over_ranks(loss.detach()).item())
            self.outcome.add_loads(self.metrics())
            if self.scheduler is not None:
                self.scheduler.step()
            if self.case.evaluation:
                use_weights_for("eval", self.optimizer)
                self.model.eval()
                with torch.no_grad():
                    test = self.evaluate()
                    self.evaluate_full_copy(test)
                self.outcome.evaluations.append(sum_over_ranks(test).item() / targets(TEST))
        use_weights_for("eval", self.optimizer)
        self.outcome.moved += self.count_moves()
        self.outcome.finish(self.raw, self.raw_optimizer)
        return self.outcome

    def evaluate_full_copy(self, expected: Tensor) -> None:
        """Assert that a copy with all experts gives the loss `expected` over all ranks, computed on each rank."""
        copied = experts.full_copy(self.model)
        found = summed_loss(copied(input_ids=TEST.to(self.device))["logits"], TEST.to(self.device))
        torch.testing.assert_close(found, sum_over_ranks(expected.clone()), rtol=1e-10, atol=0)

    def evaluate(self) -> Tensor:
        """Return the summed loss of this rank's test samples, an equal number on each rank."""
        rows = TEST.chunk(self.world)[self.rank].to(self.device)
        return summed_loss(self.model(input_ids=rows)["logits"], rows)


class ExpertParallelLoop(OwnLoop):
    """A loop on Accelerate, by `ExpertParallel`."""

    def shard(self, placement: Any) -> None:
        layout = self.layout
        self.accelerator = make_accelerator(
            layout.dense,
            layout.fsdp_size,
            mixed_precision="bf16" if self.case.dtype is torch.bfloat16 else "no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=self.case.accumulation, sync_with_dataloader=False
            ),
        )
        self.device = self.accelerator.device
        self.experts = ExpertParallel(
            self.accelerator,
            groups=layout.groups(),
            placement=placement,
            spare_slots=layout.spare_slots,
            replan=layout.replan,
        )
        self.raw_optimizer, self.scheduler = make_optimizer_and_scheduler(self.case, self.raw)
        self.model, self.optimizer = self.experts.prepare(self.raw, self.raw_optimizer)
        self.write = lambda extra: self.experts.save(self.folder / "half", **extra)
        self.read = lambda: self.experts.load(self.folder / "half")
        self.metrics, self.migrations = self.experts.metrics, lambda: self.experts.migrations
        self.metrics()

    def learn(self, rows: list[Tensor], counts: list[int]) -> Tensor:
        losses = []
        for part, count in zip(rows, counts, strict=True):
            with self.accelerator.accumulate(self.model):
                loss = self.loss_of(part, count, sum(counts))
                self.accelerator.backward(loss * self.world * len(rows))
                if self.case.clipping and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                    self.outcome.norms.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss)
        return torch.stack(losses).sum()

    def evaluate(self) -> Tensor:
        if self.layout.dense == "fsdp2":
            return super().evaluate()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with self.experts.join():  # a forward pass per sample, so that ranks make different numbers of them
            for row in unequal_share(TEST, self.rank, self.world).to(self.device):
                total += summed_loss(self.model(input_ids=row[None])["logits"], row[None])
        return total


class TorchLoop(OwnLoop):
    """A loop on torch only, with DDP."""

    steps = 0

    def shard(self, placement: Any) -> None:
        spare = self.layout.spare_slots
        shards = experts.ExpertShards() if self.layout.dense == "fsdp2" else None
        stacks = experts.shard_experts(
            self.raw, self.layout.groups(), spare_slots=spare, placement=placement, shards=shards
        )
        self.model = self.raw
        if shards is not None:
            rows = {parameter for stack in stacks.values() for parameter in stack.parameters.values()}
            fully_shard(self.raw, ignored_params=rows, reshard_after_forward=True)
        elif self.world > 1:
            self.model = DistributedDataParallel(self.raw)
        self.raw_optimizer, self.scheduler = make_optimizer_and_scheduler(self.case, self.raw)
        self.optimizer = self.raw_optimizer
        self.replanner = experts.Replanner(stacks, self.layout.replan) if self.layout.replan is not None else None
        rebalance = None if self.replanner is None else self.replanner.after_step
        self.sync = experts.ExpertSync(self.model, self.optimizer, rebalance)
        self.write = lambda extra: experts.save(self.folder / "half", self.raw, self.optimizer, extra)
        self.read = lambda: experts.load(self.folder / "half", self.raw, self.optimizer)
        self.metrics = experts.RouterMonitor(self.model, self.replanner).metrics
        self.migrations = lambda: [] if self.replanner is None else self.replanner.migrations

    def learn(self, rows: list[Tensor], counts: list[int]) -> Tensor:
        losses = []
        for number, (part, count) in enumerate(zip(rows, counts, strict=True), start=1):
            awaits_more = number < len(rows) and isinstance(self.model, DistributedDataParallel)
            with self.model.no_sync() if awaits_more else nullcontext():
                losses.append(self.loss_of(part, count, sum(counts)))
                (losses[-1] * self.world).backward()
        if self.case.clipping:
            self.outcome.norms.append(float(self.sync.clip(self.raw.parameters(), MAX_NORM)))
        self.optimizer.step()
        self.steps += 1
        self.sync.after_step(self.steps, self.optimizer)
        self.optimizer.zero_grad()
        return torch.stack(losses).sum()


class LanguageTask:
    """The task of a `Trainer`.

    Attention of transformers computes no empty batch, such as the one of a resume: with `pads`, one sample without
    weight replaces it.
    """

    def __init__(self, *, pads: bool):
        self.pads = pads

    def count(self, batch: dict[str, Tensor]) -> int:
        return targets(batch["input_ids"])

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tk.Loss:
        ids = batch["input_ids"]
        if self.pads and not len(ids):
            return tk.Loss(0 * model(input_ids=TRAIN[:1].to(ids.device))["logits"].sum(), 0)
        return tk.Loss(summed_loss(model(input_ids=ids)["logits"], ids), self.count(batch))

    evaluate = loss


class Watcher(tk.Callback):
    """Records a `Trainer`'s numbers, evaluates, and stops it."""

    def __init__(self, case: Case, outcome: Outcome, stop_after: int):
        self.case, self.outcome, self.stop_after = case, outcome, stop_after

    def on_step_end(self, trainer: tk.Trainer) -> None:
        means = trainer.sums.compute()
        self.outcome.losses.append(means["loss"] + means.get("penalty", 0.0))
        self.outcome.add_loads(trainer._recorded)
        if self.case.clipping:
            self.outcome.norms.append(float(trainer._recorded["train/grad_norm"]))
        if self.case.evaluation:
            test = EvalBatches(
                tk.TensorTable(input_ids=TEST),
                batch_size=len(TEST),
                rank=trainer.run.rank,
                world_size=trainer.run.world_size,
            )
            self.outcome.evaluations.append(trainer.evaluate(test)["eval/loss"])
        if trainer.state.step == self.stop_after:
            trainer.request_stop("half")


def train_by_trainer(case: Case, folder: Path) -> Outcome:
    """Train by a `Trainer`, with its callbacks for moves and checkpoints."""
    AcceleratorState._reset_state(reset_partial_state=True)
    layout, outcome = case.ranks, Outcome()
    config = tk.MoERunConfig(
        run_dir=folder / "run",
        tracker="none",
        cpu=os.environ["ACCELERATE_USE_CPU"] == "true",
        batch_size=BATCH,
        log_every=1,
        gradient_accumulation_steps=case.accumulation,
        dense_parallel=layout.dense,
        fsdp_size=layout.fsdp_size,
    )
    table = tk.TensorTable(input_ids=TRAIN if case.model in OF_TRANSFORMERS else TRAIN[:SAMPLES])
    placements = [layout.placement, layout.resumed] if case.resume else [layout.placement]
    for number, placement in enumerate(placements):
        is_last = number == len(placements) - 1
        with tk.start_run("parity", config) as run:
            model = make_model(case)
            experts.shard_experts(
                model,
                layout.groups(),
                spare_slots=layout.spare_slots,
                placement=lambda _, count, ranks, placement=placement: place(placement, count, ranks),
            )
            optimizer, _ = make_optimizer_and_scheduler(case, model)
            where = {"rank": run.rank, "world_size": run.world_size, "device": run.device}
            penalty = make_penalty(case, model)
            callbacks: list[tk.Callback] = [ExpertLoad()]
            callbacks += [] if layout.replan is None else [Replan(layout.replan)]
            callbacks += [] if penalty is None else [WholeStepBalance(penalty)]
            trainer = tk.Trainer(
                run,
                LanguageTask(pads=case.model in OF_TRANSFORMERS),
                model,
                optimizer,
                TrainBatches(table, batch_size=BATCH, seed=0, accumulation=case.accumulation, **where),
                max_steps=STEPS,
                schedule=decayed if case.scheduler else lambda _: 1.0,
                max_grad_norm=MAX_NORM if case.clipping else None,
                log_every=1,
                penalty=penalty,
                callbacks=[*callbacks, Watcher(case, outcome, STEPS if is_last else STOP), Checkpointing()],
            )
            outcome.watch(model, optimizer)
            trainer.fit()
            outcome.moved += trainer.results.get("migrated_experts", 0) if is_last else 0
            if is_last:
                outcome.finish(model, optimizer)
        if dist.is_initialized():
            dist.barrier()
    return outcome


def train_by_expert_trainer(case: Case, folder: Path) -> Outcome:
    """Train by transformers' Trainer."""
    import transformers
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.utils import logging

    from toolkit.integrations.transformers import expert_trainer

    AcceleratorState._reset_state(reset_partial_state=True)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    layout, outcome = case.ranks, Outcome()
    _, world = rank_and_world()
    sets = layout.fsdp_size and ParallelismConfig(world // layout.fsdp_size, layout.fsdp_size)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "transformers"),
        use_cpu=True,
        **({"fsdp": True, "fsdp_config": {"version": 2}} if layout.dense == "fsdp2" else {}),
        parallelism_config=sets,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // world // case.accumulation,
        gradient_accumulation_steps=case.accumulation,
        per_device_eval_batch_size=1,
        eval_strategy="steps" if case.evaluation else "no",
        eval_steps=1,
        max_grad_norm=MAX_NORM if case.clipping else 0.0,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="steps" if case.resume else "no",
        save_steps=STOP,
        save_only_model=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        ddp_find_unused_parameters=False,
    )

    class Stopping(TrainerCallback):
        def on_train_begin(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
            outcome.watch(model, getattr(optimizer, "optimizer", optimizer))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            outcome.losses.append(sum_over_ranks(torch.stack(micro_batches).sum()).item() / world)
            micro_batches.clear()
            control.should_training_stop = state.global_step == stop_after

    def dataset(ids: Tensor) -> Dataset:
        # The first token is no target, and Trainer counts it for some models.
        labels = [[-100, *row[1:]] for row in ids.tolist()]
        return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels})

    micro_batches: list[Tensor] = []
    """Losses of this step, which Trainer averages over ranks and adds up in float32."""

    def mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = summed_loss(outputs["logits"], labels) / num_items_in_batch
        if model.training:
            micro_batches.append(loss.detach())
        return loss

    placements = [layout.placement, layout.resumed] if case.resume else [layout.placement]
    for number, placement in enumerate(placements):
        stop_after = STOP if number < len(placements) - 1 else STEPS
        model = make_model(case)
        optimizer, scheduler = make_optimizer_and_scheduler(case, model)
        kind = expert_trainer(
            transformers.Trainer,
            ep_size=layout.ep_size,
            replan=layout.replan,
            spare_slots=layout.spare_slots,
            placement=lambda _, count, ranks, placement=placement: place(placement, count, ranks),
        )
        trainer = kind(
            model=model,
            args=arguments,
            train_dataset=dataset(TRAIN[: transformers_samples(case.accumulation)]),
            eval_dataset=dataset(TEST),
            data_collator=transformers.default_data_collator,
            compute_loss_func=mean_loss,
            callbacks=[Stopping()],
        )
        trainer.optimizer = optimizer  # under FSDP2, Trainer takes none as an argument
        trainer.lr_scheduler = scheduler or LambdaLR(optimizer, lambda _: 1.0)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=number > 0)
        outcome.moved += sum(migration.report.cost.experts for migration in trainer.experts.migrations)
    lines = trainer.state.log_history
    outcome.norms = [float(line["grad_norm"]) for line in lines if case.clipping and "grad_norm" in line]
    outcome.evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    use_weights_for("eval", trainer.optimizer)
    if dist.is_initialized():
        dist.barrier()
    for line in tk.read_metrics(folder / "transformers" / "metrics.jsonl"):
        if line["step"] > 0:
            outcome.add_loads(line)
    outcome.finish(model, optimizer)
    return outcome


def train(case: Case, folder: Path) -> Outcome:
    """Train `case` on the ranks of this process group."""
    by_loop = {
        "ExpertParallel": lambda: ExpertParallelLoop(case, folder).train(),
        "torch only": lambda: TorchLoop(case, folder).train(),
        "Trainer": partial(train_by_trainer, case, folder),
        "expert_trainer": partial(train_by_expert_trainer, case, folder),
    }
    with mock.patch.dict(os.environ), in_float64_throughout(case.model):  # transformers sets variables of Accelerate
        if case.ranks.nodes > 1:
            os.environ["LOCAL_WORLD_SIZE"] = str(case.ranks.world // case.ranks.nodes)
        return by_loop[case.loop]()

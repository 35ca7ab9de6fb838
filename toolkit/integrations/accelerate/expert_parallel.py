"""Expert parallelism in a loop on Accelerate."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from toolkit.errors import UserError, require, require_count, require_type
from toolkit.experts.expert_records import ExpertRecords
from toolkit.experts.layer.losses import TWO_BALANCE_LOSSES, balance_weight_of
from toolkit.experts.layer.model_inputs import own_balance_loss, watch_inputs
from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.moving.replan import Migration, Replanner
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.collectives import is_main, meet, world_size
from toolkit.experts.parallel.ddp import BATCH_NORM_IS_LOCAL, has_batch_norm
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.nodes import launched_world
from toolkit.experts.parallel.optimizer_rows import has_stepped, refuse_foreign_parameters
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.experts.placement.placement import EMPTY_ROW
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.sharding.find import find_experts
from toolkit.experts.sharding.join import join_forwards
from toolkit.experts.sharding.libraries import libraries
from toolkit.experts.sharding.router_replay import hook_blocks
from toolkit.experts.sharding.shard import PlacementOf, require_sharding, shard_experts
from toolkit.experts.state import checkpoint_files
from toolkit.integrations.accelerate.accelerator_methods import replace_training_methods
from toolkit.integrations.accelerate.compat import is_marked_as_prepared, schedulers_of, steps_once_per_process
from toolkit.integrations.accelerate.patches import Patches
from toolkit.integrations.accelerate.prepare import check_accelerator, fit_optimizers, prepare, strategy_of
from toolkit.integrations.accelerate.saving import replace_saving_methods


class ExpertParallel(AbstractContextManager["ExpertParallel"]):
    """Shards the experts of any model over ranks, trains them there, and rebalances them.

    Its `prepare` replaces `accelerator.prepare`; the rest of a loop on Accelerate stays. As a context manager it calls
    `close` at the end. `docs/train/accelerate.md` lists the steps of `prepare`.

    Args:
        accelerator: Prepares the non-expert parameters.
        ep_size: Expert-parallel group size. Default: the largest divisor of both world size and number of experts.
        groups: Custom EP groups from `make_expert_groups`, instead of `ep_size`.
        replan: When experts are rebalanced, and by which planner. Default: never.
        spare_slots: Empty slots on each rank, for replicas of experts in demand.
        placement: Initial placement: "contiguous", "round_robin", or a function of (layer, number of experts,
            `ep_size`).

    Raises:
        UserError: An argument of another type, a size out of range, both `ep_size` and `groups`, `replan` without a
            planner, an accelerator that shards the model by other means than FSDP2, or processes of the launcher that
            Accelerate does not know.

    Example:
        >>> experts = ExpertParallel(accelerator, ep_size=2, replan=ReplanOptions(planner="swap", every=200))
        >>> model, optimizer, loader = experts.prepare(model, optimizer, loader)
        >>> for inputs, labels in loader:
        ...     accelerator.backward(loss_of(model(inputs), labels))
        ...     accelerator.clip_grad_norm_(model.parameters(), 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        ep_size: int | None = None,
        groups: ExpertGroups | None = None,
        replan: ReplanOptions | None = None,
        spare_slots: int = 0,
        placement: InitialPlacement | PlacementOf = "contiguous",
    ):
        require_type("accelerator", accelerator, Accelerator, "Pass Accelerator()")
        require_type("replan", replan, ReplanOptions | None, 'Pass ReplanOptions(planner="swap")')
        require(replan is None or bool(replan.planner), "replan.planner", None, "name one, or leave replan out")
        require_sharding(groups, spare_slots, placement)
        require_count("ep_size", 1 if ep_size is None else ep_size)
        if groups is not None and ep_size is not None:
            raise UserError(f"ep_size: {ep_size} and groups both say which ranks share the experts. Leave one out.")
        check_accelerator(accelerator)
        if (world := launched_world()) not in (None, accelerator.num_processes):
            raise UserError(
                f"accelerator: {world} processes were started, and each became a world of its own. "
                "Set ACCELERATE_USE_CPU=true, or start one process per GPU."
            )
        self.accelerator, self.ep_size, self.groups = accelerator, ep_size, groups
        self.spare_slots, self.placement = spare_slots, placement
        self.replanner = None if replan is None else Replanner({}, replan)
        self.sync: ExpertSync | None = None
        """Owner of the optimizer's steps; None before `prepare` and after `close`."""
        self.stacks: dict[str, ExpertStack] = {}
        """The experts of each layer, by the layer's name, with their placement; empty before `prepare`."""
        self.optimizers: list[Optimizer] = []
        """The model's optimizers. The first has all experts."""
        self._records: ExpertRecords | None = None
        self.patches = Patches()
        """Replaced attributes of other libraries' objects."""

    def prepare(self, *objects: Any) -> Any:
        """Shard the experts of a model, and prepare all objects by Accelerate. A collective.

        Args:
            *objects: A model, the same on all ranks, its optimizer, and whatever else Accelerate prepares, in any
                order. Of several models the first with experts is sharded. Its optimizer has all experts, must not
                have stepped, and stays valid. Further optimizers may have other parameters of the model; under FSDP2
                they must be given. Without an optimizer the model can only be evaluated.

        Returns:
            The prepared objects in the same order; the object itself if there is one. Schedulers step as Accelerate's
            do, once per process and optimizer step.

        Raises:
            UserError: Before anything is changed: there is no model, an object is a class, the model or an optimizer
                was prepared before, an optimizer has stepped or has parameters outside the model, a parameter is on the
                meta device, or two auxiliary losses are active. Also as `shard_experts`, and for fp16 with sharded
                experts.

        Example:
            >>> experts = ExpertParallel(Accelerator())
            >>> model, optimizer, loader = experts.prepare(model, optimizer, loader)
        """
        for each in objects:
            require_type("objects", each, object, "Pass a model, an optimizer, a loader or a scheduler")
        models = [each for each in objects if isinstance(each, nn.Module)]
        require(bool(models), "objects", [*map(type, objects)], "pass the model and its optimizer, each as an argument")
        model = next(filter(find_experts, models), models[0])
        optimizers, before = _optimizers_of(model, objects), dict(model.named_parameters())
        self._check(model, optimizers)
        strategy = strategy_of(self.accelerator, model, optimizers)
        watch_inputs(model)
        self.optimizers = optimizers
        groups = self.groups if self.ep_size is None else make_expert_groups(self.ep_size)
        self.stacks = shard_experts(
            model, groups, spare_slots=self.spare_slots, placement=self.placement, shards=strategy.shards
        )
        self.groups = next(iter(self.stacks.values())).groups
        hook_blocks(model, self.stacks)
        fit_optimizers(optimizers, before, model, self.stacks)
        wrapped = prepare(self.accelerator, model, *optimizers)
        prepared = dict(zip(map(id, (model, *optimizers)), wrapped, strict=True))
        first = optimizers[0] if optimizers else None
        rebalance = None if self.replanner is None else self.replanner.after_step
        self.sync = sync = ExpertSync(model, first, rebalance, prepared=wrapped[0])
        if first is not None:
            self.patches.callback(first.register_step_post_hook(self._after_step).remove)
            for stack in self.stacks.values():
                stack.sync = sync
            if self.replanner is not None:
                self.replanner.watch(self.stacks)
                self.patches.callback(self.replanner.watch, {})
        replace_training_methods(self.accelerator, sync, self.patches)
        replace_saving_methods(self)
        for library in libraries():
            library.save_whole_model(model, self.patches.replace)
        self._print_summary()
        found = [prepared[id(each)] if id(each) in prepared else self.accelerator.prepare(each) for each in objects]
        return found[0] if len(found) == 1 else tuple(found)

    def _check(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        """Raise UserError for silent misuse."""
        if self.sync is not None:
            raise UserError("prepare: it was called before. Make one ExpertParallel for each model.")
        is_wrapped = isinstance(model, DistributedDataParallel) or is_marked_as_prepared(model)
        if is_wrapped or any(isinstance(each, AcceleratedOptimizer) for each in optimizers):
            raise UserError(
                "prepare: the model or an optimizer was prepared by accelerator.prepare. "
                "Call only ExpertParallel's prepare, once, and evaluate the model that it returns."
            )
        for each in optimizers:
            refuse_foreign_parameters(model, each)
        if optimizers and has_stepped(optimizers[0]):
            raise UserError(
                "optimizer: it has stepped, with states of all experts. Call prepare before its first step."
            )
        if balance_weight_of(model.modules()) and own_balance_loss(model):
            raise UserError(TWO_BALANCE_LOSSES)

    def _print_summary(self) -> None:
        model = self._require_sync("prepare").model
        for experts, layers in Counter(map(_experts_on_ranks, self.stacks.values())).items():
            self.accelerator.print(f"experts: {layers} layer{'s' if layers > 1 else ''} with {experts}.")
        weight, own = balance_weight_of(model.modules()), own_balance_loss(model)
        by = f"RouterPenalty, balance_weight={weight:g}" if weight else f"the model's, of each rank's tokens ({own})"
        self.accelerator.print(f"auxiliary loss: {by if weight or own else 'none'}.")
        if self.optimizers and self.accelerator.num_processes > 1 and has_batch_norm(model):
            synchronised = "nn.SyncBatchNorm.convert_sync_batchnorm(model) before prepare has it over all, on GPUs."
            self.accelerator.print(f"{BATCH_NORM_IS_LOCAL}{synchronised}")

    def _require_sync(self, called: str) -> ExpertSync:
        if self.sync is None:
            raise UserError(f"{called}: it was called before prepare, or after close. Call prepare first.")
        return self.sync

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._records is not None:
            self._records.fold_when_many()
        self._require_sync("step").after_step(self.steps, optimizer)

    def close(self) -> None:
        """Remove the patches and hooks of `prepare`, as at the end of a `with`. A second call does nothing.

        The model stays sharded: it can be called on all ranks, and saved by `save_pretrained` of
        `toolkit.integrations.transformers` or `whole_state_dict` of `toolkit.experts.state.state_dict`. Steps of
        optimizers with sharded experts raise UserError. If several share an accelerator, close the last one first.
        """
        self.patches.close()
        if self.sync is not None:
            self.sync.close()
        self.sync, self.stacks, self.optimizers, self._records = None, {}, [], None

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps(self) -> int:
        """Optimizer steps since `prepare`, and before the checkpoint that was loaded."""
        return 0 if self.sync is None else self.sync.steps

    @property
    def migrations(self) -> list[Migration]:
        """Migrations since `prepare`, in this process."""
        return [] if self.replanner is None else self.replanner.migrations

    @contextmanager
    def join(self, *models: nn.Module) -> Iterator[None]:
        """Evaluate or generate, without gradients, with unequal numbers of batches per rank. A collective at the end.

        Ranks that run out of batches keep serving their experts until every rank has finished.

        Args:
            *models: All models that are called, the same on each rank, if it is not only the prepared model, such as
                copies of it (an EMA, a reference model).

        Raises:
            UserError: Under FSDP2, whose parameters all ranks gather in each forward pass, and for a copy that is
                called and was not named.

        Example:
            >>> with experts.join():
            ...     for batch in batches_of_this_rank:
            ...         model(**batch)
        """
        sync = self._require_sync("join")
        if self.accelerator.is_fsdp2:
            raise UserError(
                "join: FSDP2 gathers parameters in each forward pass. Use the same number of batches on all ranks."
            )
        meet("join")
        sync.begin_evaluation()
        with Patches() as meanwhile:
            if isinstance(sync.prepared, DistributedDataParallel):
                # Or each forward pass would broadcast buffers.
                meanwhile.replace(sync.prepared, "require_forward_param_sync", False)
            with self.accelerator.autocast(), join_forwards(models or (sync.model,), list(self.stacks.values())):
                yield

    def global_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the 2-norm of the gradients of `parameters` over the experts of all ranks. A collective.

        Call it after the last backward pass of a step, such as the first one of sharpness-aware minimization (SAM).
        """
        return self._require_sync("global_norm").clip(parameters, None)

    def metrics(self) -> dict[str, Any]:
        """Return load, balance, traffic and migrations over all ranks since the last call. A collective.

        `docs/reference/metrics.md` explains the names. `save_expert_figures` draws the results of all calls.

        Returns:
            Numbers; lists with the load of each expert and rank of a layer; and the placement of each layer, if it
            changed. The first call starts counting and returns the placement. A later call without training forward
            passes since the last returns an empty dict.

        Example:
            >>> records = [{"step": 0, **experts.metrics()}]
            >>> for step, batch in enumerate(loader, start=1):
            ...     ...
            ...     if step % 50 == 0:
            ...         records.append({"step": step, **experts.metrics()})
            >>> if accelerator.is_main_process:
            ...     tk.save_expert_figures("figures", records)
        """
        model = self._require_sync("metrics").model
        meet("metrics")
        if self._records is None:
            self._records = ExpertRecords(Experts.of(model), self.replanner, step=self.steps)
        return self._records.read(self.steps)

    def save(self, folder: Path | str, **extra: Any) -> None:
        """Write model, optimizers, placement, random states and `extra` as a checkpoint. A collective.

        Args:
            folder: Becomes the checkpoint.
            extra: Plain JSON values, which `load` returns, such as the state dict of a scheduler.

        Raises:
            OSError: The folder cannot be written.
        """
        model = self._require_sync("save").model
        replanner = None if self.replanner is None else self.replanner.state_dict()
        state = {"steps": self.steps, "replanner": replanner, "world_size": world_size(), "extra": extra}
        checkpoint_files.save(folder, model, self.optimizers, state)

    def load(self, folder: Path | str) -> dict[str, Any]:
        """Load a checkpoint of `save`, with any world size, `ep_size` and placement. A collective.

        Optimizers get their saved settings, such as learning rates. With the same ranks and slots, experts are placed
        as they were saved; with the same world size, random states are restored.

        Returns:
            The `extra` that was saved.

        Raises:
            UserError: Before anything is changed: the checkpoint is missing or damaged, or does not fit.
        """
        sync = self._require_sync("load")
        state = checkpoint_files.load(folder, sync.model, self.optimizers)
        sync.steps, saved = state["steps"], state["world_size"]
        if self._records is not None:
            self._records.begin(self.steps)
        if self.replanner is not None and state["replanner"] is not None:
            self.replanner.load_state_dict(state["replanner"])
        if saved != world_size() and is_main() and any(map(steps_once_per_process, schedulers_of(self.accelerator))):
            warnings.warn(
                f"scheduler: Accelerate steps it once per process, {world_size()} times per step instead of {saved}. "
                "Use Accelerator(step_scheduler_with_optimizer=False) or split_batches for the same rates.",
                stacklevel=2,
            )
        extra: dict[str, Any] = state["extra"]
        return extra


def _experts_on_ranks(stack: ExpertStack) -> str:
    """Return how many experts a layer has, and where, as `128 experts, 64 on each of 2 ranks, each over 4 shards`."""
    found = sorted({sum(expert != EMPTY_ROW for expert in slots) for slots in stack.placement.slots})
    here = str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
    ranks = stack.placement.ranks
    where = f"{here} on each of {ranks} ranks" if ranks > 1 else "all on each rank"
    shards = max(p.device_mesh.shape[-1] if isinstance(p, DTensor) else 1 for p in stack.parameters.values())
    return f"{stack.num_experts} experts, {where}{f', each over {shards} shards' if shards > 1 else ''}"


def _optimizers_of(model: nn.Module, objects: Iterable[Any]) -> list[Optimizer]:
    """Return the optimizers of `objects` that have parameters of `model`; the first optimizer if none has."""
    known = set(model.parameters())
    found = [each for each in objects if isinstance(each, Optimizer)]
    return [o for o in found if any(p in known for group in o.param_groups for p in group["params"])] or found[:1]

"""Expert parallelism under a user's own Accelerate loop, with no trainer of ours.

    experts = ExpertParallel(accelerator, ep_size=4, replan=ReplanOptions(planner="swap", every=200))
    model, optimizer, loader = experts.prepare(model, optimizer, loader)     # in place of accelerator.prepare

The rest of the loop stays as it is: `accelerator.backward`, `accelerator.clip_grad_norm_`, `optimizer.step`. What
Accelerate would get wrong without an error is corrected here, or refused: see `docs/train/accelerate.md`. What is
replaced for it is listed in `toolkit.integrations.accelerate.patches`, and `close` takes it back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from pydantic import BaseModel, NonNegativeInt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.errors import UserError, require_choice
from toolkit.experts.layer.losses import TWO_BALANCE_LOSSES, balance_weight_of
from toolkit.experts.layer.stack import ExpertStack, only_names_are_read
from toolkit.experts.moving.replan import Migration, Replanner
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.dense import OF_EACH_PROCESS, has_batch_norm, refuse_meta
from toolkit.experts.parallel.gradients import (
    average_accumulated,
    clip_grad_norm_,
    refresh_replicas,
)
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.nodes import launched_world
from toolkit.experts.parallel.optimizer_rows import refuse_strangers
from toolkit.experts.parallel.parallel_options import Dense
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.routing.load_meter import LoadMeter
from toolkit.experts.routing.model_inputs import own_balance_loss, watch_inputs
from toolkit.experts.sharding.foreign import num_experts
from toolkit.experts.sharding.libraries import libraries
from toolkit.experts.sharding.shard import (
    PlacementOf,
    require_experts,
    shard_experts,
)
from toolkit.experts.state import checkpoint_files
from toolkit.experts.state.state_dict import is_spread, whole_state_dict
from toolkit.integrations.accelerate.compat import is_marked_as_prepared, models_of, without_states
from toolkit.integrations.accelerate.join import join_forwards
from toolkit.integrations.accelerate.patches import Patches
from toolkit.integrations.accelerate.prepare import prepare
from toolkit.integrations.accelerate.prepared_optimizer import fit_optimizer, load_only_own_states, step_by_only
from toolkit.integrations.accelerate.pretrained_files import push_as_called, save_as_called
from toolkit.integrations.accelerate.replica_check import ReplicaCheck
from toolkit.integrations.accelerate.route_hooks import hook_blocks

DIVIDES = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Ways of Accelerate in which each process has a part of the model."""


class ExpertParallel(AbstractContextManager["ExpertParallel"]):
    """Spreads the experts of any model over ranks, trains them there, and moves them when loads change.

    A model's experts are found by what they are: our `MoE` layers, and modules with an integer `num_experts` whose own
    parameters all have that many rows, called with (hidden (T, D), expert ids (T, K), weights (T, K)), such as the
    experts of every mixture in transformers.

    Args:
        accelerator: Prepares what is not an expert.
        ep_size: Neighbouring ranks that share one set of experts; None takes as many as divide both the processes and
            the experts.
        groups: Other ranks that do, as `make_expert_groups` made them.
        replan: When experts are moved, and by which planner; None leaves them where they are.
        spare_slots: Empty slots on each rank, for replicas of experts in demand.
        placement: Where experts are at first: in contiguous blocks of ids, round-robin, or as a function of (layer,
            number of experts, `ep_size`) says.
        dense: How the other parameters are trained: replicated by DDP, or sharded by FSDP2.
        fsdp_size: Neighbouring ranks over which FSDP2 shards (HSDP); None: all.

    Raises:
        UserError: For an unknown `placement` or `dense`, for settings that do not go together, where the launcher's
            processes are no world of Accelerate, and for an `accelerator` that divides the model itself or is none.
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
        dense: Dense = "ddp",
        fsdp_size: int | None = None,
    ):
        _refuse_accelerator(accelerator)
        if groups is not None and ep_size is not None:
            raise UserError(f"ep_size={ep_size}: groups=... says which ranks share the experts: leave one of them out.")
        require_choice("dense", dense, Dense)
        if isinstance(placement, str):
            require_choice("placement", placement, InitialPlacement)
        if fsdp_size is not None and dense != "fsdp2":
            raise UserError(f'fsdp_size={fsdp_size}: dense={dense!r} shards nothing: add dense="fsdp2".')
        world = launched_world()
        if world not in (None, accelerator.num_processes):
            raise UserError(
                f"{world} processes were started and Accelerate made each a world of its own, as it does without GPUs: "
                "set ACCELERATE_USE_CPU=true, or launch as many processes as there are GPUs."
            )
        self.accelerator, self.ep_size, self.dense, self.fsdp_size = accelerator, ep_size, dense, fsdp_size
        self.spare_slots, self._place = spare_slots, placement
        self.groups = groups or ExpertGroups()
        self._makes_groups = groups is None
        self.patches = Patches()
        """What `prepare` changed of other libraries' objects."""
        self.stacks: dict[str, ExpertStack] = {}
        """The experts of each layer, by the layer's name; their `placement` says where each one is."""
        self.replanner: Replanner | None = None
        if replan is not None and replan.planner is not None:
            self.replanner = Replanner({}, replan)
        self.steps = 0
        """Optimizer steps since `prepare`."""
        self._meter: LoadMeter | None = None
        self._model: Any = None
        self._prepared: Any = None
        self._optimizers: list[torch.optim.Optimizer] = []
        """Those of the model; the first has the experts."""

    @property
    def migrations(self) -> list[Migration]:
        """Returns what was moved since `prepare`, by this process."""
        return self.replanner.migrations if self.replanner else []

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        """Spread the experts of a model, and let Accelerate prepare everything. A collective.

        Args:
            *objects: The model and its optimizer, the first of their kinds, and what else Accelerate prepares, in any
                order. All ranks hold the same model; each keeps the rows of its own experts, in place, so the optimizer
                stays valid (it must not have stepped yet). It holds all experts' parameters; the others may be in
                further optimizers, which under FSDP2 must be given. Schedulers step as Accelerate has prepared ones
                step: once per process and optimizer step. Without an optimizer the model can be evaluated, and not
                trained.

        Returns:
            What Accelerate made of them, in that order. Rank 0 prints which layers were spread, which balance penalty
            is active, and of batch norm that each process has its own.

        Raises:
            UserError: A model is missing or was prepared before, an optimizer was prepared before or has parameters
                outside the model, a parameter is on the meta device, no experts are found, ranks cannot share them, or
                two balance penalties are active.
        """
        if self.stacks:
            raise UserError("prepare was called twice: make one ExpertParallel for each model.")
        model, optimizer = _model_and_optimizer(objects)
        refuse_meta(model)
        for library in libraries():
            library.refuse_spread(model)
        layers = require_experts(model)
        optimizers = _optimizers_of(model, objects)
        for each in optimizers:
            refuse_strangers(model, each)
        balance = describe_balance(model)
        if self._makes_groups:
            self.groups = make_expert_groups(self._fitting_ep_size(layers))
        self.stacks = shard_experts(model, self.groups, spare_slots=self.spare_slots, placement=self._place)
        hook_blocks(model)
        known: dict[int, Any] = {}
        if optimizer is None:
            known[id(model)] = self.accelerator.prepare_model(model, evaluation_mode=True)
        else:
            known[id(model)], known[id(optimizer)] = self._prepare_to_train(model, optimizer, optimizers)
        self._model, self._prepared, self._optimizers = model, known[id(model)], optimizers
        if optimizer is not None:
            self._follow_steps(optimizer)
            self.patches.keep(*load_only_own_states(optimizer, self.stacks))
        self.patches.callback(step_by_only(optimizer, self.expert_parameters()))
        self._correct_accelerate()
        self._correct_model()
        ranks = f"spread over {self.groups.ep_size} ranks" if self.groups.ep_size > 1 else "whole on each rank"
        self.accelerator.print(f"experts {ranks}: {', '.join(self.stacks)}.")
        self.accelerator.print(balance)
        if optimizer is not None and self.accelerator.num_processes > 1 and has_batch_norm(model):
            over_all = "nn.SyncBatchNorm.convert_sync_batchnorm(model) before prepare has it over all, on GPUs."
            self.accelerator.print(f"{OF_EACH_PROCESS}{over_all}")
        return tuple(known[id(each)] if id(each) in known else self.accelerator.prepare(each) for each in objects)

    def _prepare_to_train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, optimizers: list[torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        fit_optimizer(optimizer, self.stacks)
        if self.groups.ep_size > 1:
            self._average_in_backward()
        if self.replanner is not None:
            self.replanner.watch(self.stacks)
        return prepare(
            self.accelerator,
            model,
            optimizer,
            more_optimizers=[each for each in optimizers if each is not optimizer],
            dense=self.dense,
            fsdp_size=self.fsdp_size,
        )

    def close(self) -> None:
        """Take back what `prepare` replaced and hooked: see `toolkit.integrations.accelerate.patches`.

        Where several share an accelerator, close the last one first.

        The model stays spread: it can be called on all ranks, and saved by `save_pretrained` of
        `toolkit.integrations.transformers` and `whole_state_dict` of `toolkit.experts.state.state_dict`. Its experts
        can be trained no more where ranks have different ones, and a step of an optimizer that has them raises
        UserError. Nothing here keeps the model in memory. A second call does nothing.
        """
        self.patches.close()
        self.stacks = {}
        self._model = self._prepared = self._meter = None
        self._optimizers = []
        if self.replanner is not None:
            self.replanner.watch({})

    def __exit__(self, *_: object) -> None:
        self.close()

    def expert_parameters(self) -> list[nn.Parameter]:
        """The stacked parameters of all layers."""
        return [p for stack in self.stacks.values() for p in stack.parameters.values()]

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Returns what `accelerator.clip_grad_norm_` is after `prepare`: it returns the norm over all ranks' experts.

        None, and nothing is clipped, before the last micro-batch of a step. Raises UserError unless `norm_type` is 2.
        """
        if norm_type != 2:
            raise UserError(f"norm_type={norm_type}: gradients of experts on several ranks are clipped by 2-norm only.")
        if not self.accelerator.sync_gradients:
            return None
        self.accelerator.unscale_gradients()
        average_accumulated(self.expert_parameters())
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return clip_grad_norm_(listed, max_norm)

    @contextmanager
    def join(self, *models: nn.Module) -> Iterator[None]:
        """For evaluation and generation without gradients, in which ranks call the model unequally often, or never.

            with experts.join():
                for batch in batches_of_this_rank:
                    model(**batch)

        `models`: all that are called, the same on each rank, where these are not the prepared model alone. A copy of it
        (an EMA, a reference model) has to be named: `experts.join(ema)`. A rank that comes to the end computes its
        experts for the others until all have: a collective. Raises UserError under FSDP2, whose parameters are gathered
        by all ranks in each forward, and where a copy is called that was not named.
        """
        self._require_prepared("join")
        if self.dense == "fsdp2" and self.accelerator.num_processes > 1:
            raise UserError('dense="fsdp2" gathers parameters in each forward: give all ranks equally many batches.')
        with Patches() as meanwhile:
            if isinstance(self._prepared, DistributedDataParallel):
                # Or each forward would broadcast buffers.
                meanwhile.replace(self._prepared, "require_forward_param_sync", False)
            with self.accelerator.autocast(), join_forwards(models or (self._model,), list(self.stacks.values())):
                yield

    def metrics(self) -> dict[str, float]:
        """Balance and traffic over all ranks since the last call, by the names of
        `docs/experts/moe.md#read-the-metrics`.

        The first call starts counting and returns an empty dict, as does one without training forwards since the last.
        A collective.
        """
        self._require_prepared("metrics")
        if self._meter is None:
            self._meter = LoadMeter(self._model)
            self._meter.begin(self.steps)
        self._meter.fold()
        return self._meter.read(self.steps)[1]

    def save(self, folder: Path | str, **extra: Any) -> None:
        """Write model, optimizers, placement, guard, random states and `extra` as a checkpoint. A collective.

        Args:
            folder: Becomes the checkpoint.
            extra: Plain JSON values, which `load` returns. The state dict of a scheduler may be among them.

        Raises:
            UserError: Where `extra` is no JSON, or the folder cannot be written.
        """
        self._require_prepared("save")
        for name, value in extra.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise UserError(f"{name}={value!r} cannot be saved: {error}: give save plain JSON values.") from None
        replanner = self.replanner.state_dict() if self.replanner else None
        state = {"steps": self.steps, "replanner": replanner, "extra": extra}
        checkpoint_files.save(folder, self._model, self._optimizers, state)

    def load(self, folder: Path | str) -> dict[str, Any]:
        """Load what `save` wrote, under any number of processes, `ep_size` and placement. A collective.

        Optimizers have the settings that were saved, such as learning rates. On as many ranks with as many slots
        experts are placed where they were saved, and on as many ranks random states are restored.

        Args:
            folder: The checkpoint.

        Returns:
            The `extra` that was saved.

        Raises:
            UserError: Before anything is changed, where the checkpoint is missing, damaged, does not fit, or was saved
                by another.
        """
        self._require_prepared("load")

        def oddity(saved: dict[str, Any]) -> str | None:
            try:
                checkpoint_files.check_types(_Saved, saved, "training")
            except ValueError as error:
                return f"it was not saved by ExpertParallel ({error})"
            return None

        state = checkpoint_files.load(folder, self._model, self._optimizers, oddity)
        self.steps = state["steps"]
        if self._meter is not None:
            self._meter.begin(self.steps)
        if self.replanner and state["replanner"]:
            self.replanner.load_state_dict(state["replanner"])
        extra: dict[str, Any] = state["extra"]
        return extra

    def _require_prepared(self, called: str) -> None:
        if not self.stacks:
            raise UserError(
                f"{called} was called before prepare, or after close: call prepare(model, optimizer) first."
            )

    # --- before training ----------------------------------------------------------------------------------------

    def _fitting_ep_size(self, layers: Mapping[str, nn.Module]) -> int:
        if self.ep_size is not None:
            return self.ep_size
        world = self.accelerator.num_processes
        return math.gcd(world, *map(num_experts, layers.values()))

    def _average_in_backward(self) -> None:
        """Have the gradient of each owned parameter averaged, exactly once."""
        accelerator = self.accelerator  # a hook of a parameter that held `self` would keep the model for ever
        for stack in self.stacks.values():
            stack.average_in_backward(lambda: accelerator.sync_gradients)
            self.patches.callback(stack.stop_averaging)

    def _follow_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Have each step of `optimizer` begin with averaged gradients, and end with what `_after_step` does."""
        keep = self.patches.keep
        keep(optimizer.register_step_pre_hook(lambda *_: average_accumulated(self.expert_parameters())))
        if self.accelerator.num_processes > 1:
            keep(optimizer.register_step_pre_hook(ReplicaCheck(self._prepared)))
        for stack in self.stacks.values():
            keep(*stack.note_gradients(optimizer))
        keep(optimizer.register_step_post_hook(lambda *_: self._after_step()))

    def _correct_accelerate(self) -> None:
        """Replace, on this accelerator, the methods that assume replicated parameters.

        An accelerator may outlive its models: what it has of this object does not keep it in memory.
        """
        accelerator, mine = self.accelerator, ref(self)
        name = f"experts_{_number_of(accelerator, self._model, self._prepared)}"

        def here() -> ExpertParallel | None:
            """This object while its accelerator has its model, which all ranks say alike; `free_memory` ends that."""
            experts = mine()
            known = {id(model) for model in models_of(accelerator)}
            return experts if experts and known & {id(experts._model), id(experts._prepared)} else None

        def get_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
            """Whole on rank 0 and empty elsewhere, for a model that is spread. A collective. `save_model` calls it."""
            inner = accelerator.unwrap_model(model) if unwrap else model
            return whole_state_dict(inner) if is_spread(inner) else of_accelerate["get_state_dict"](model, unwrap)

        def clip(*args: Any, **kwargs: Any) -> Tensor | None:
            experts = mine()
            return (experts.clip_grad_norm_ if experts else of_accelerate["clip_grad_norm_"])(*args, **kwargs)

        def join_uneven_inputs(joinables: list[Any], even_batches: bool | None = None) -> AbstractContextManager[None]:
            even = accelerator.even_batches if even_batches is None else even_batches
            if mine() and not even and accelerator.num_processes > 1:
                raise UserError(
                    "join_uneven_inputs with even_batches=False would wait for ever, because each forward needs all "
                    "ranks' experts: train with even_batches=True, and evaluate in ExpertParallel's join()."
                )
            return of_accelerate["join_uneven_inputs"](joinables, even_batches)

        def save_state(*args: Any, **kwargs: Any) -> Any:
            return with_mine("save_state", lambda experts, *at: experts.save(Path(at[-1]) / name), *args, **kwargs)

        def load_state(*args: Any, **kwargs: Any) -> Any:
            return with_mine("load_state", lambda experts, *at: experts.load(Path(at[-1]) / name), *args, **kwargs)

        def with_mine(called: str, add: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """Accelerate's method for all but the model and its optimizers, and for those `add`."""
            experts, register = here(), getattr(accelerator, f"register_{called}_pre_hook")
            if experts is None:
                return of_accelerate[called](*args, **kwargs)
            hook = register(partial(add, experts))
            try:
                with without_states(accelerator, experts._model, experts._prepared, *experts._optimizers):
                    return of_accelerate[called](*args, **kwargs)
            finally:
                hook.remove()

        replaced = {
            "get_state_dict": get_state_dict,
            "clip_grad_norm_": clip,
            "join_uneven_inputs": join_uneven_inputs,
            "save_state": save_state,
            "load_state": load_state,
        }
        of_accelerate = {name: self.patches.replace(accelerator, name, ours) for name, ours in replaced.items()}

    def _correct_model(self) -> None:
        """Replace those methods of modules that would write one rank's experts, or read what is refused."""
        within_peft = hasattr(self._model, "peft_config")
        for module in self._model.modules():
            is_inner = within_peft and module is not self._model
            whole = is_inner and self.groups.ep_size == 1  # and as PEFT left it
            for name, value in (("save_pretrained", save_as_called), ("push_to_hub", push_as_called)):
                if hasattr(type(module), name) and not whole:
                    self.patches.replace(module, name, _refuse_base if is_inner else partial(value, module))
            if hasattr(type(module), "load_adapter"):
                self.patches.replace(module, "load_adapter", partial(_load_adapter, module.load_adapter))

    # --- while training -----------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        self.steps += 1
        # The optimizer also steps a parameter that was frozen after it got a gradient.
        refresh_replicas(p for p in self.expert_parameters() if p.requires_grad or p.grad is not None)
        if self._meter is not None:
            self._meter.fold_when_many()
        if self.replanner is not None:
            self.replanner.after_step(self.steps, self._optimizers[0])


class _Saved(BaseModel, strict=True):
    """The types of what `ExpertParallel.save` gives."""

    steps: NonNegativeInt
    replanner: dict[str, Any] | None
    extra: dict[str, Any]


def describe_balance(model: nn.Module) -> str:
    """Return one line: the balance penalty is that of a `RouterPenalty`, the model's own, or none.

    From now on its forwards tell padding from tokens (`toolkit.experts.routing.model_inputs`). Raises UserError for a
    model that has both.
    """
    watch_inputs(model)
    weight, own = balance_weight_of(model.modules()), own_balance_loss(model)
    if weight and own:
        raise UserError(TWO_BALANCE_LOSSES)
    if weight:
        return f"balance penalty: RouterPenalty, balance_weight={weight:g}."
    if own:
        return f"balance penalty: the model's own aux_loss, of each rank's tokens ({own})."
    return "balance penalty: none."


def _refuse_accelerator(accelerator: Any) -> None:
    """Raise UserError for what is no Accelerator, one that divides the model itself, and one of a device without the
    float64 in which tokens are counted."""
    if not isinstance(accelerator, Accelerator):
        raise UserError(
            f"accelerator={type(accelerator).__name__}: give an Accelerator; docs/experts/torch_alone.md has loops on "
            "Lightning Fabric and on torch alone."
        )
    if accelerator.distributed_type in DIVIDES or accelerator.parallelism_config is not None:
        raise UserError(
            "FSDP, DeepSpeed, Megatron-LM and parallelism_config divide the model themselves: leave them out of "
            'Accelerator, and give ExpertParallel dense="fsdp2" to shard what is no expert.'
        )
    if accelerator.device.type == "mps":
        raise UserError("the device mps has no float64, in which tokens are counted: use Accelerator(cpu=True).")


def _model_and_optimizer(objects: Iterable[Any]) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Return the first model and the first optimizer of `objects`. Raises UserError where there is no model, or one was
    prepared before."""
    given = list(objects)
    models = [each for each in given if isinstance(each, nn.Module)]
    optimizers = [each for each in given if isinstance(each, torch.optim.Optimizer)]
    if not models:
        raise UserError(
            f"prepare got {', '.join(type(each).__name__ for each in given) or 'nothing'}: "
            "give it a model, its optimizer unless it is only evaluated, and what else Accelerate prepares."
        )
    optimizer = optimizers[0] if optimizers else None
    was_prepared = isinstance(models[0], DistributedDataParallel) or is_marked_as_prepared(models[0])
    if was_prepared or isinstance(optimizer, AcceleratedOptimizer):
        raise UserError(
            "accelerator.prepare or prepare_model was called with this model or optimizer before: call "
            "ExpertParallel's prepare instead, once, and evaluate what it returns."
        )
    return models[0], optimizer


def _optimizers_of(model: nn.Module, objects: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Return the first optimizer of `objects`, and those after it that have parameters of `model`."""
    known = set(model.parameters())
    found = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
    has_some = [any(p in known for group in each.param_groups for p in group["params"]) for each in found]
    return [each for number, each in enumerate(found) if number == 0 or has_some[number]]


def _number_of(accelerator: Accelerator, *forms: nn.Module) -> int:
    """Return the place of a model, of which Accelerate keeps one of the `forms`, among those of its accelerator."""
    return next(number for number, each in enumerate(models_of(accelerator)) if any(each is form for form in forms))


def _refuse_base(*_: Any, **__: Any) -> None:
    raise UserError(
        "the base of a model with adapters would be saved with the experts of one rank: save the adapters by the whole "
        "model's save_pretrained, or both by save_merged of toolkit.integrations.peft.merged_weights."
    )


def _load_adapter(of_peft: Any, *args: Any, **kwargs: Any) -> Any:
    """`load_adapter` of a model whose experts are spread: PEFT reads the names of state dicts in it."""
    with only_names_are_read(of_peft.__self__):
        return of_peft(*args, **kwargs)

"""transformers' Trainer, and trainers derived from it, with expert parallelism by `ExpertParallel`.

    trainer = expert_trainer(SFTTrainer, ep_size=4, replan=ReplanOptions(planner="swap", every=200))(
        model, args=arguments, train_dataset=data, peft_config=adapters
    )

A callback gets neither its trainer nor the accelerator, and Trainer saves on rank 0 only, so this is a subclass. It
overrides documented methods of Trainer only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.router_monitor import RouterMonitor
from toolkit.experts.routing.routes import Routes
from toolkit.experts.sharding.router_replay import record_routes
from toolkit.experts.sharding.router_replay import replay_routes as replaying_routes
from toolkit.experts.sharding.shard import PlacementOf
from toolkit.experts.state import checkpoint_files
from toolkit.experts.state.random_states import random_states, restore_random_states
from toolkit.integrations.accelerate.compat import undo_prepare_for_evaluation
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.accelerate.patches import Patches
from toolkit.integrations.transformers.router_watch import watch_routers
from toolkit.integrations.transformers.trainer_records import RouterEvents

FOLDER = "toolkit"
"""Folder within each checkpoint of the Trainer."""


def expert_trainer(
    trainer: type,
    *,
    ep_size: int | None = None,
    replan: ReplanOptions | None = None,
    spare_slots: int = 0,
    placement: InitialPlacement | PlacementOf = "contiguous",
    balance_weight: float = 0.0,
    z_weight: float = 0.0,
    replay_routes: bool = False,
) -> type:
    """Return a subclass of `trainer` that shards the model's experts, and is called as `trainer` is.

    Experts are sharded when `train` begins, with the adapters that the model has by then, and stay sharded. Non-expert
    parameters are replicated, or sharded with `TrainingArguments(fsdp=True)`. Training logs have the numbers of
    `RouterMonitor.metrics`, and `metrics.jsonl` in the output folder has the load of each expert. Figures of it are
    written at each save and at the end, and sent to W&B and TensorBoard. Generation runs inside
    `ExpertParallel.join`, so texts may differ in length between ranks. Call `save_model` on every rank. The trainer's
    `experts` is its `ExpertParallel`, a new one for each model that `model_init` makes.

    Args:
        trainer: transformers' Trainer, or a class derived from it.
        ep_size: Expert-parallel group size, as in `ExpertParallel`.
        replan: When and by which planner experts are rebalanced.
        spare_slots: Empty slots on each rank, for replicas.
        placement: Initial placement.
        balance_weight: Weight of the load-balancing loss of a `RouterPenalty`.
        z_weight: Weight of its router z-loss.
        replay_routes: Train on generated text with the experts that generated it: see `RolloutRoutes`, the trainer's
            `routes`.

    Raises:
        UserError: For settings that would train, save or generate with the experts of one rank only.

    Example:
        from transformers import Trainer
        from toolkit.integrations.transformers import expert_trainer

        trainer = expert_trainer(Trainer, ep_size=4)(model=model, args=args, train_dataset=dataset)
        trainer.train()
    """
    from transformers import TrainerCallback

    base: Any = trainer

    class State(TrainingState, TrainerCallback): ...

    class ExpertTrainer(base):
        experts: ExpertParallel
        penalty: RouterPenalty | None = None
        routes: RolloutRoutes | None = None
        _sharded_model: Any = None
        _prepared: Any = None
        _is_preparing = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # `experts` saves, loads and clips the shards of FSDP2, on all their meshes.
            self.is_fsdp_enabled = self._mixed_mesh_grads = False
            self._state = State(self)
            # Before the callbacks of trackers, which close them at the end of training.
            self.callback_handler.callbacks.insert(0, self._state)

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            _refuse(self.args)
            self._make_experts()

        def _make_experts(self) -> None:
            self.experts = ExpertParallel(
                self.accelerator, ep_size=ep_size, replan=replan, spare_slots=spare_slots, placement=placement
            )
            of_accelerate = self.accelerator.prepare

            def prepare(*given: Any, **how: Any) -> Any:
                """Shard the model when Trainer prepares it with its optimizer, or return the prepared objects."""
                if self._is_preparing:
                    return of_accelerate(*given, **how)
                if len(given) == 2 and given[0] is self.model is not self._sharded_model:
                    self._prepared = self._shard(*given)
                    return self._prepared
                if self._prepared is not None and given[-1] is self.optimizer:
                    if self.model is not self._sharded_model or self.optimizer is not self._prepared[1]:
                        raise UserError(
                            "trainer.model, trainer.optimizer: replaced after the experts were sharded. Keep both and "
                            "change `lr` and `initial_lr` of the optimizer's param_groups, or make a new trainer."
                        )
                    return self._prepared if len(given) == 2 else self._prepared[1]
                return of_accelerate(*given, **how)

            self.experts.patches.replace(self.accelerator, "prepare", prepare)

        def _shard(self, model: Any, optimizer: Any) -> Any:
            self._sharded_model = self._prepared = None  # lest two models take memory at once
            if self.experts.stacks:  # of a former model: model_init makes one for each training
                self.experts.close()
                self._make_experts()
            if balance_weight or z_weight:
                self.penalty = RouterPenalty(watch_routers(model), balance_weight=balance_weight, z_weight=z_weight)
            undo_prepare_for_evaluation(model)  # `evaluate` before `train`, after which it would not be put under DDP
            self._is_preparing = True
            try:
                prepared = self.experts.prepare(model, optimizer)
            finally:
                self._is_preparing = False
            _refuse_copies(self.callback_handler.callbacks, self.experts)
            self._sharded_model = model
            if replay_routes or hasattr(model, "generate"):
                generate = model.generate
                if replay_routes:
                    self.routes = RolloutRoutes(model)
                    generate = partial(self.routes.generate, generate)
                self.experts.patches.replace(model, "generate", partial(_generate_together, self.experts, generate))
            return prepared

        def compute_loss(
            self,
            model: nn.Module,
            inputs: dict[str, Any],
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            loss = super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
            if self.penalty is None or not model.training:
                return loss
            penalty = self._scaled(self.penalty(), num_items_in_batch)
            return (loss[0] + penalty, loss[1]) if return_outputs else loss + penalty

        def _scaled(self, penalty: Any, num_items_in_batch: Any) -> Any:
            """Scale a penalty as Trainer's losses are summed over micro-batches."""
            is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
            if is_scaled is None:
                counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
                is_scaled = counted or self.compute_loss_func is not None
            return penalty / self.current_gradient_accumulation_steps if is_scaled else penalty

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            with Patches() as meanwhile:
                if self.model is self._sharded_model and not self.args.should_save:
                    self.model.save_pretrained(output_dir or self.args.output_dir)  # Trainer does on the others
                    # Trainer's returns at once on these ranks; derived trainers, such as Axolotl's, may save again.
                    meanwhile.replace(self, "_save", lambda *_, **__: None)
                super().save_model(output_dir, _internal_call)

    ExpertTrainer.__name__ = ExpertTrainer.__qualname__ = f"Expert{trainer.__name__}"
    return ExpertTrainer


def _generate_together(experts: ExpertParallel, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with experts.join():
        return generate(*args, **kwargs)


def _refuse(args: Any) -> None:
    """Raise UserError for training arguments that would silently use the experts of one rank."""
    if args.save_strategy != "no" and not args.save_only_model:
        raise UserError(
            "save_only_model: False saves the optimizer of rank 0, with a part of the experts. Pass "
            "save_only_model=True; checkpoints still have all that resuming needs."
        )
    for setting in ("use_vllm", "use_transformers_continuous_batching", "sync_ref_model"):  # of TRL
        if getattr(args, setting, False):
            raise UserError(f"{setting}: uses the weights of one rank as the full model. Leave it out.")


def _refuse_copies(callbacks: Iterable[Any], experts: ExpertParallel) -> None:
    """Raise UserError for a callback of TRL that copies the weights of one rank as the full model."""
    if not any(stack.is_part for stack in experts.stacks.values()):
        return
    for kind in (kind for callback in callbacks for kind in type(callback).__mro__):
        if kind.__name__ in ("BEMACallback", "SyncRefModelCallback"):
            raise UserError(
                f"callbacks: {kind.__name__} copies the experts of one rank. Leave it out, and average with "
                "toolkit.experts.full_copy and ema_update."
            )


# --- checkpoints and logs ---------------------------------------------------------------------------------------------


class TrainingState(RouterEvents):
    """Callback that adds training state to Trainer's checkpoints, and measures experts between log steps.

    The state has parameters, optimizer, scheduler, random states, placement and the cost check of rebalancing.
    Checkpoints load with any world size. Raises UserError if the trainer did not prepare its model, and for
    checkpoints outside `output_dir` or without the state.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._random: dict[str, Any] | None = None
        """Random states of the checkpoint that training continues from, until they are restored."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
        experts: ExpertParallel = self.trainer.experts
        if experts.sync is None:
            raise UserError(
                "expert_trainer: Trainer did not prepare the model, as under torch.nn.DataParallel. Start one process "
                "for each GPU with accelerate launch."
            )
        experts.sync.steps = state.global_step
        self.watch(RouterMonitor(trainer["model"], experts.replanner))
        if state.global_step == 0:
            return
        scheduler, optimizer = trainer["lr_scheduler"], trainer["optimizer"]
        saved = checkpoint_files.load(_checkpoint(args, state) / FOLDER, trainer["model"], optimizer)
        if experts.replanner is not None and saved["replanner"] is not None:
            experts.replanner.load_state_dict(saved["replanner"])
        scheduler.load_state_dict(saved["scheduler"])
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        file = _random_file(args, state)
        self._random = json.loads(file.read_text()) if file.exists() else None  # fewer ranks wrote it
        self._mid_epoch = abs(state.epoch - round(state.epoch)) > 1e-6

    # Random states are restored when Trainer restores its own: at the start of an epoch, or after the batches of
    # a begun one were skipped, so that the data loader makes the same draws.
    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        if self._random is not None and not self._mid_epoch:
            self.on_step_begin()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._random is not None:
            restore_random_states(self._random)
            self._random = None

    def on_save(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
        replanner = self.trainer.experts.replanner
        content = {
            "replanner": None if replanner is None else replanner.state_dict(),
            "scheduler": trainer["lr_scheduler"].state_dict(),
        }
        checkpoint_files.save(_checkpoint(args, state) / FOLDER, trainer["model"], trainer["optimizer"], content)
        _random_file(args, state).write_text(json.dumps(random_states()))
        super().on_save()

    def on_train_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # Trainer leaves out experts that files have under other names than the model, as in most MoE models.
            checkpoint_files.load(Path(state.best_model_checkpoint) / FOLDER, trainer["model"], trainer["optimizer"])
        super().on_train_end()


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _random_file(args: Any, state: Any) -> Path:
    return _checkpoint(args, state) / f"random_states-{args.process_index}.json"


# --- router replay ----------------------------------------------------------------------------------------------------


class RolloutRoutes:
    """Records the routes of text that `model` generates in training mode, and replays them.

    Weights change between a rollout and the steps that train on it, so a router would choose other experts for some
    tokens, and the ratio of new and old probabilities would compare two different networks.

    Every forward pass of `model` on these texts, identified by their tokens, replays the routes. Only the last
    call of `generate` is kept. Raises UserError in a forward pass with gradients on other texts.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.known: dict[tuple[int, ...], NDArray[Any]] = {}
        """Routes, shape (L, layers, K), by the tokens of prompt and completion, as `Routes.from_rollout` takes them."""
        self._generates = False
        self._replay = ExitStack()
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def generate(self, generate: Callable[..., Tensor], **inputs: Any) -> Tensor:
        """Call `generate(**inputs)`, with `input_ids`, `attention_mask` and `generation_config`, and record it."""
        if not self.model.training:
            return generate(**inputs)
        self._generates = True
        try:
            with record_routes(self.model) as routes:
                sequences_BL = generate(**inputs | {"use_cache": True})  # so that each token is routed once
        finally:
            self._generates = False
        mask_BL = _mask(sequences_BL, inputs["attention_mask"], inputs["generation_config"].eos_token_id)
        arrays = routes.to_rollout(mask_BL.cpu())
        self.known = dict(zip(_texts(sequences_BL, mask_BL), arrays, strict=True))
        return sequences_BL

    def _begin(self, model: nn.Module, _: Any, inputs: dict[str, Any]) -> None:
        if self._generates or not self.known:
            return
        found = [self.known.get(text) for text in _texts(inputs["input_ids"], inputs["attention_mask"])]
        arrays = [array for array in found if array is not None]
        if len(arrays) == len(found):
            routes = Routes.from_rollout(arrays, inputs["attention_mask"].cpu())
            self._replay.enter_context(replaying_routes(model, routes))
        elif model.training and torch.is_grad_enabled():
            raise UserError(
                f"replay_routes: {len(found) - len(arrays)} of {len(found)} training sequences are not from the last "
                "call of generate. Leave it out for tools, other rollouts and masked completions."
            )

    def _end(self, *_: Any) -> None:
        self._replay.close()


def _texts(ids_BL: Tensor, mask_BL: Tensor) -> list[tuple[int, ...]]:
    """Return the tokens of each sequence, without padding."""
    return [tuple(ids_L[mask_L.bool()].tolist()) for ids_L, mask_L in zip(ids_BL.cpu(), mask_BL.cpu(), strict=True)]


def _mask(sequences_BL: Tensor, prompt_mask: Tensor, eos: int | list[int]) -> Tensor:
    """Return int64 (B, L): 1 for tokens of prompts, and of completions up to their first end-of-text token."""
    completions = sequences_BL[:, prompt_mask.shape[1] :]
    is_end = torch.isin(completions, torch.tensor(eos, device=completions.device)).long()
    return torch.cat([prompt_mask, (is_end.cumsum(1) - is_end == 0).long()], dim=1)

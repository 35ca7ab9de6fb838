"""transformers' Trainer, and trainers derived from it, with experts spread over ranks by `ExpertParallel`.

    trainer = expert_trainer(SFTTrainer, ep_size=4, replan=ReplanOptions(planner="swap", every=200))(
        model, args=arguments, train_dataset=data, peft_config=adapters
    )

A callback is given neither its trainer nor its accelerator, and Trainer saves on rank 0 alone, so this is a subclass.
It overrides documented methods of Trainer only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from toolkit.compat import undo_prepare_for_evaluation
from toolkit.errors import UserError
from toolkit.experts.hosts.loop.engine import ExpertParallel
from toolkit.experts.hosts.transformers.anatomy import watch_routers
from toolkit.experts.hosts.transformers.rollout_routes import RolloutRoutes
from toolkit.experts.hosts.transformers.saving import save_pretrained
from toolkit.experts.hosts.transformers.training_state import ExpertTrainingState
from toolkit.experts.layer.losses import RouterPenalty


def expert_trainer(
    trainer: type,
    *,
    balance_weight: float = 0.0,
    z_weight: float = 0.0,
    replay_routes: bool = False,
    **options: Any,
) -> type:
    """A subclass of `trainer`, which is transformers' Trainer or derived from it, that spreads the model's experts.

    It is called as `trainer` is. Experts are spread when `train` begins, with any adapters that were added before, and
    stay spread. `options` are those of `ExpertParallel` but `dense` and `fsdp_size`; its instance is the trainer's
    `experts`, a new one for each model that `model_init` makes. Load metrics are among the training logs.
    `balance_weight` and `z_weight` add a `RouterPenalty` to the loss. Text is generated within `ExpertParallel.join`,
    so that it may have unequal lengths on the ranks. `replay_routes` has generated text learnt from with the experts
    that generated it: see `RolloutRoutes`, the trainer's `routes`. Call `save_model` on every rank.

    Raises UserError, when the trainer is made, for what would train, save or generate with a part of the experts.
    """
    from transformers import TrainerCallback

    for option in {"dense", "fsdp_size"} & options.keys():
        raise UserError(
            f"{option}={options[option]!r}: under a Trainer the other parameters are replicated: leave it out."
        )
    base: Any = trainer

    class State(ExpertTrainingState, TrainerCallback): ...

    class ExpertTrainer(base):
        experts: ExpertParallel
        penalty: RouterPenalty | None = None
        routes: RolloutRoutes | None = None
        _spread_model: Any = None
        _prepared: Any = None
        _saving: State | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = inspect.signature(base.__init__).bind_partial(self, *args, **kwargs).arguments
            _refuse_other_generators(given.get("args"))
            super().__init__(*args, **kwargs)
            _refuse(self, replay_routes=replay_routes)
            self._saving = State(self.experts, trainer.__name__)
            self.add_callback(self._saving)

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self._make_experts()
            of_accelerate = self.accelerator.prepare

            def prepare(*given: Any, **how: Any) -> Any:
                """What Trainer calls with its model and optimizer when training begins, or, where the model was wrapped
                in a former training, with the optimizer alone."""
                if len(given) == 2 and given[0] is self.model is not self._spread_model:
                    self.accelerator.prepare = of_accelerate
                    try:
                        self._prepared = self._spread(*given)
                    finally:
                        self.accelerator.prepare = prepare
                    self._spread_model = self.model
                    return self._prepared
                if self._prepared is not None and given[-1] is self.optimizer:
                    _refuse_replaced(self.model, self._spread_model, self.optimizer, self._prepared[1])
                    return self._prepared if len(given) == 2 else self._prepared[1]
                return of_accelerate(*given, **how)

            self.accelerator.prepare = prepare

        def _make_experts(self) -> None:
            self.experts = ExpertParallel(self.accelerator, **options)
            if self._saving is not None:
                self._saving.follow(self.experts)

        def _spread(self, model: Any, optimizer: Any) -> Any:
            _refuse_model(model, replay_routes=replay_routes)
            self._spread_model = self._prepared = None  # lest two models take memory at once
            if self.experts.stacks:  # of a former model: model_init makes one for each training
                self._make_experts()
            if balance_weight or z_weight:
                self.penalty = RouterPenalty(watch_routers(model), balance_weight=balance_weight, z_weight=z_weight)
            undo_prepare_for_evaluation(model)  # `evaluate` before `train`, after which it would not be put under DDP
            prepared = self.experts.prepare(model, optimizer)
            model.save_pretrained = partial(_save_whole, model)
            if hasattr(model, "generate"):
                generate = model.generate
                if replay_routes:
                    self.routes = RolloutRoutes(model)
                    generate = partial(self.routes.generate, generate)
                model.generate = partial(_generate_together, self.experts, generate)
            return prepared

        def compute_loss(
            self,
            model: nn.Module,
            inputs: dict[str, Any],
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            if self.penalty is None or not model.training:
                return loss
            penalty = self._penalty(self.penalty, num_items_in_batch)
            return (loss[0] + penalty, loss[1]) if return_outputs else loss + penalty

        def _penalty(self, penalty: RouterPenalty, num_items_in_batch: Any) -> Tensor:
            """As Trainer's losses are scaled: averaged over ranks, summed over micro-batches."""
            share = penalty()
            assert share is not None
            if not share.requires_grad:
                raise UserError(
                    "balance_weight and z_weight have no effect, because routers get no gradient in this loss: "
                    "leave them out."
                )
            is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
            if is_scaled is None:
                counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
                is_scaled = counted or self.compute_loss_func is not None
            share = share * self.accelerator.num_processes
            return share / self.current_gradient_accumulation_steps if is_scaled else share

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            if "loss" in logs:
                logs |= self.experts.metrics()
            super().log(logs, start_time)

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            if self.model is self._spread_model and not self.args.should_save:
                self.model.save_pretrained(output_dir or self.args.output_dir)  # Trainer does on the others
            super().save_model(output_dir, _internal_call)

    ExpertTrainer.__name__ = ExpertTrainer.__qualname__ = f"Expert{trainer.__name__}"
    return ExpertTrainer


def _save_whole(model: Any, folder: str, **how: Any) -> None:
    """As Trainer calls a model's `save_pretrained`, with a state dict of None. A collective."""
    save_pretrained(model, folder, **{name: value for name, value in how.items() if name != "state_dict"})


def _generate_together(experts: ExpertParallel, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with experts.join():
        return generate(*args, **kwargs)


def _refuse_model(model: Any, *, replay_routes: bool) -> None:
    """Raise UserError for a model that could not be saved, or whose routes are to be replayed and that has none."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config"):
        raise UserError(
            f"model={type(model).__name__}: Trainer would save its state dict, with the experts of one rank: give a "
            "PreTrainedModel or a PeftModel, or prepare it with ExpertParallel in a loop of your own."
        )
    if replay_routes and not hasattr(model, "generate"):
        raise UserError(f"replay_routes=True: {type(model).__name__} generates no text to learn from: leave it out.")


def _refuse_replaced(model: Any, spread: Any, optimizer: Any, prepared: Any) -> None:
    """Raise UserError where `model` is not the one that is `spread`, or `optimizer` not the one that was `prepared`."""
    if model is not spread:
        raise UserError(
            "trainer.model was replaced after training, and trainer.model_wrapped was not: set both, and "
            "trainer.optimizer and trainer.lr_scheduler to None."
        )
    if optimizer is not prepared:
        raise UserError(
            "trainer.optimizer was replaced after the experts were spread, and would not follow them: keep it and "
            "change `lr` and `initial_lr` of its param_groups, or save the model and load it in a new trainer."
        )


def _refuse(trainer: Any, *, replay_routes: bool) -> None:
    """Raise UserError for settings of `trainer` under which ranks would have a part of the experts, unnoticed."""
    _refuse_model(trainer.model, replay_routes=replay_routes)
    args, accelerator = trainer.args, trainer.accelerator
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or accelerator.parallelism_config is not None:
        raise UserError(
            "fsdp, deepspeed and parallelism_config divide the model themselves: leave them out, or load the model "
            "with use_toolkit_ep(), which has experts spread under FSDP2."
        )
    if getattr(trainer.model, "is_distributed_loading_by_transformers", False):
        raise UserError(
            "distributed_config: transformers has spread this model already: train it with replan_callback and the "
            "Trainer itself, or load it without."
        )
    if args.save_strategy != "no" and not args.save_only_model:
        raise UserError(
            "save_only_model=False would save the optimizer of rank 0, which has a part of the experts: pass "
            "save_only_model=True, with which checkpoints have all that resuming needs."
        )


def _refuse_other_generators(args: Any) -> None:
    """Raise UserError for settings of TRL by which a copy of the weights is made from those of one rank."""
    for setting in ("use_vllm", "use_transformers_continuous_batching", "sync_ref_model"):
        if getattr(args, setting, False):
            raise UserError(
                f"{setting}=True takes the weights that one rank has for those of the whole model: leave it out."
            )

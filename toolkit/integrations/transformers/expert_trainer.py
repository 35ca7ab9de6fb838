"""transformers' Trainer, and trainers derived from it, with experts spread over ranks by `ExpertParallel`.

    trainer = expert_trainer(SFTTrainer, ep_size=4, replan=ReplanOptions(planner="swap", every=200))(
        model, args=arguments, train_dataset=data, peft_config=adapters
    )

A callback is given neither its trainer nor its accelerator, and Trainer saves on rank 0 alone, so this is a subclass.
It overrides documented methods of Trainer only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.routing.routes import Routes
from toolkit.experts.sharding.router_replay import record_routes
from toolkit.experts.sharding.router_replay import replay_routes as replaying_routes
from toolkit.experts.sharding.shard import PlacementOf
from toolkit.integrations.accelerate.compat import undo_prepare_for_evaluation
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.accelerate.patches import Patches
from toolkit.integrations.transformers.router_watch import watch_routers
from toolkit.integrations.transformers.training_state import ExpertTrainingState


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
    """Returns a subclass of `trainer` that spreads the model's experts, and is called as `trainer` is.

    Experts are spread when `train` begins, with any adapters that were added before, and stay spread. The load of
    experts is among the training logs, in five numbers over all layers and ranks. Text is generated within
    `ExpertParallel.join`, so that it may have unequal lengths on the ranks. Call `save_model` on every rank. The other
    parameters are replicated. The instance of `ExpertParallel` is the trainer's `experts`, a new one for each model
    that `model_init` makes.

    Args:
        trainer: transformers' Trainer, or a class that is derived from it.
        ep_size: As of `ExpertParallel`, as are `replan`, `spare_slots` and `placement`.
        replan: When experts are moved, and by which planner.
        spare_slots: Empty slots on each rank, for replicas.
        placement: Where experts are at first.
        balance_weight: Of the balance loss that a `RouterPenalty` adds.
        z_weight: Of its z-loss.
        replay_routes: Has generated text learnt from with the experts that generated it: see `RolloutRoutes`, the
            trainer's `routes`.

    Raises:
        UserError: When the trainer is made, for what would train, save or generate with a part of the experts.
    """
    from transformers import TrainerCallback

    base: Any = trainer

    class State(ExpertTrainingState, TrainerCallback): ...

    class ExpertTrainer(base):
        experts: ExpertParallel
        penalty: RouterPenalty | None = None
        routes: RolloutRoutes | None = None
        _spread_model: Any = None
        _prepared: Any = None
        _is_spreading = False
        _saving: State | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._saving = State(self.experts)
            self.add_callback(self._saving)

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            _refuse(self)
            self._make_experts()

        def _make_experts(self) -> None:
            self.experts = ExpertParallel(
                self.accelerator, ep_size=ep_size, replan=replan, spare_slots=spare_slots, placement=placement
            )
            of_accelerate = self.accelerator.prepare

            def prepare(*given: Any, **how: Any) -> Any:
                """Returns what Trainer calls with its model and optimizer when training begins, or, where the model was
                wrapped in a former training, with the optimizer alone."""
                if self._is_spreading:
                    return of_accelerate(*given, **how)
                if len(given) == 2 and given[0] is self.model is not self._spread_model:
                    self._prepared = self._spread(*given)
                    return self._prepared
                if self._prepared is not None and given[-1] is self.optimizer:
                    if self.model is not self._spread_model or self.optimizer is not self._prepared[1]:
                        raise UserError(
                            "trainer.model or trainer.optimizer was replaced after its experts were spread: keep both "
                            "and change `lr` and `initial_lr` of the optimizer's param_groups, or make a new trainer."
                        )
                    return self._prepared if len(given) == 2 else self._prepared[1]
                return of_accelerate(*given, **how)

            self.experts.patches.replace(self.accelerator, "prepare", prepare)
            if self._saving is not None:
                self._saving.follow(self.experts)

        def _spread(self, model: Any, optimizer: Any) -> Any:
            _refuse_model(model, replay_routes=replay_routes)
            self._spread_model = self._prepared = None  # lest two models take memory at once
            if self.experts.stacks:  # of a former model: model_init makes one for each training
                self.experts.close()
                self._make_experts()
            if balance_weight or z_weight:
                self.penalty = RouterPenalty(watch_routers(model), balance_weight=balance_weight, z_weight=z_weight)
            undo_prepare_for_evaluation(model)  # `evaluate` before `train`, after which it would not be put under DDP
            self._is_spreading = True
            try:
                prepared = self.experts.prepare(model, optimizer)
            finally:
                self._is_spreading = False
            self._spread_model = model
            replace = self.experts.patches.replace
            if hasattr(model, "generate"):
                generate = model.generate
                if replay_routes:
                    self.routes = RolloutRoutes(model)
                    generate = partial(self.routes.generate, generate)
                replace(model, "generate", partial(_generate_together, self.experts, generate))
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
            """Returns the penalty, scaled as Trainer's losses are: averaged over ranks, summed over micro-batches."""
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
            if "loss" in logs and self._saving is not None:
                logs |= self._saving.load_metrics()
            super().log(logs, start_time)

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            with Patches() as meanwhile:
                if self.model is self._spread_model and not self.args.should_save:
                    self.model.save_pretrained(output_dir or self.args.output_dir)  # Trainer does on the others
                    # Trainer's returns at once on these ranks; those of derived trainers, as Axolotl's, may save again.
                    meanwhile.replace(self, "_save", lambda *_, **__: None)
                super().save_model(output_dir, _internal_call)

    ExpertTrainer.__name__ = ExpertTrainer.__qualname__ = f"Expert{trainer.__name__}"
    return ExpertTrainer


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


def _refuse(trainer: Any) -> None:
    """Raise UserError for settings of `trainer` under which ranks would have a part of the experts, unnoticed."""
    args, accelerator = trainer.args, trainer.accelerator
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or accelerator.parallelism_config is not None:
        raise UserError(
            "fsdp, deepspeed, parallelism_config: expert_trainer shards the experts itself. Leave them out."
        )
    if args.save_strategy != "no" and not args.save_only_model:
        raise UserError(
            "save_only_model=False would save the optimizer of rank 0, which has a part of the experts: pass "
            "save_only_model=True, with which checkpoints have all that resuming needs."
        )
    for setting in ("use_vllm", "use_transformers_continuous_batching", "sync_ref_model"):  # of TRL
        if getattr(args, setting, False):
            raise UserError(
                f"{setting}=True takes the weights that one rank has for those of the whole model: leave it out."
            )


# --- the experts that generated a text, used again when the model is trained on it ---------------------------------


class RolloutRoutes:
    """Records the routes of what `model` generates while it is in training mode, and replays them.

    Weights change between a rollout and the steps that learn from it, so a router would choose other experts for some
    tokens, and the ratio of new and old probabilities would be that of two different networks.

    Routes are replayed in every forward of `model` on these texts, whose tokens they are known by: those that learn,
    and those that compute probabilities of a former policy. Only the last call of `generate` is kept. Raises UserError
    in a forward with gradients on a text that it did not generate.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.known: dict[tuple[int, ...], NDArray[Any]] = {}
        """(length, layers, K) by the tokens of prompt and completion, as `Routes.from_rollout` takes it."""
        self._generates = False
        self._replay = ExitStack()
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def generate(self, generate: Callable[..., Tensor], **inputs: Any) -> Tensor:
        """`generate(**inputs)`, of `input_ids`, `attention_mask` and `generation_config`, recorded."""
        if not self.model.training:
            return generate(**inputs)
        self._generates = True
        try:
            with record_routes(self.model) as routes:
                sequences_BS = generate(**inputs | {"use_cache": True})  # so that each token is routed once
        finally:
            self._generates = False
        mask_BS = _mask(sequences_BS, inputs["attention_mask"], inputs["generation_config"].eos_token_id)
        arrays = routes.to_rollout(mask_BS.cpu())
        self.known = dict(zip(_texts(sequences_BS, mask_BS), arrays, strict=True))
        return sequences_BS

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
                f"replay_routes=True: {len(found) - len(arrays)} of {len(found)} sequences to learn from were not "
                "generated by the last call of generate: leave it out for tools, other rollouts and masked completions."
            )

    def _end(self, *_: Any) -> None:
        self._replay.close()


def _texts(ids_BS: Tensor, mask_BS: Tensor) -> list[tuple[int, ...]]:
    """The tokens of each sequence, without padding."""
    return [tuple(ids_S[mask_S.bool()].tolist()) for ids_S, mask_S in zip(ids_BS.cpu(), mask_BS.cpu(), strict=True)]


def _mask(sequences_BS: Tensor, prompt_mask_BP: Tensor, eos: int | list[int]) -> Tensor:
    """int64 (B, S): 1 for the prompts' tokens, and for those of completions up to the first that ends one."""
    completions = sequences_BS[:, prompt_mask_BP.shape[1] :]
    is_end = torch.isin(completions, torch.tensor(eos, device=completions.device)).long()
    return torch.cat([prompt_mask_BP, (is_end.cumsum(1) - is_end == 0).long()], dim=1)

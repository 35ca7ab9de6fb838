"""Expert parallelism with movable experts as a plugin of Axolotl, for full fine-tuning and LoRA of mixtures.

In the configuration, with the folder of this file in PYTHONPATH (or the file in Axolotl's `integrations`):

    plugins:
      - axolotl_expert_parallelism.ExpertPlacementPlugin
    expert_placement:
      ep_size: 4                  # processes that share the experts; without it as many as can
      spare_slots: 0              # on each process, for replicas of experts in demand
      balance_weight: 0.001       # of a balance loss over the tokens of all processes
      replan:                     # as of toolkit.experts.ReplanOptions
        planner: swap
        every: 200

Without `expert_placement` the plugin does nothing. It is for one process per GPU under DDP: FSDP, DeepSpeed and
Axolotl's own `expert_parallel_size` divide experts themselves. Tried with Axolotl 0.19.0, on one CPU process and on
two: full fine-tuning, and LoRA of experts and attention. Not tried with it: sample packing, quantised weights, GPUs.
"""

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from transformers import set_seed

from toolkit import UserError
from toolkit.experts import ReplanOptions
from toolkit.integrations.transformers import expert_trainer


class ExpertPlacement(BaseModel, extra="forbid"):
    """The options of `expert_trainer` that a file can say."""

    ep_size: int | None = None
    spare_slots: int = 0
    balance_weight: float = 0.0
    replan: ReplanOptions | None = None


class ExpertPlacementArgs(BaseModel):
    """What the plugin adds to Axolotl's configuration."""

    expert_placement: ExpertPlacement | None = None


class ExpertPlacementPlugin(BasePlugin):
    """Has Axolotl train with `expert_trainer`, and save the model on every process."""

    def get_input_args(self):
        return f"{__name__}.ExpertPlacementArgs"

    def pre_lora_load(self, cfg, model):  # noqa: ARG002
        # Axolotl seeds its trainer, later. Adapters of an expert that several processes have must begin alike.
        if cfg.expert_placement:
            set_seed(42 if cfg.seed is None else cfg.seed)

    def get_training_args(self, cfg):
        # Checkpoints can be resumed nevertheless: the optimizer of all processes is in their folder `toolkit`.
        return {"save_only_model": True} if cfg.expert_placement else None

    def get_trainer_cls(self, cfg):
        if not cfg.expert_placement:
            return None
        for setting in ("rl", "reward_model", "process_reward_model"):
            if cfg[setting]:  # Axolotl gives a trainer of a plugin the arguments of its own causal trainer
                raise UserError(f"{setting}={cfg[setting]}: expert_placement is for supervised training: remove one.")
        if (cfg.expert_parallel_size or 1) > 1:
            raise UserError(
                f"expert_parallel_size={cfg.expert_parallel_size} and expert_placement both spread experts: remove one."
            )
        from axolotl.core.trainers import AxolotlTrainer  # which imports plugins

        options = ExpertPlacement.model_validate(cfg.expert_placement)  # of whose parts Axolotl made a dict
        return expert_trainer(AxolotlTrainer, **dict(options))

    def post_train(self, cfg, model):
        """Saves the model on every process, because each gives its experts.

        Axolotl calls this once before it saves, on all processes, and again at its end. In between it saves on the
        first process of each machine alone, which would wait for the others for ever.
        """
        if cfg.expert_placement and vars(model).get("save_pretrained") is not _was_saved:
            model.save_pretrained(cfg.output_dir)
            model.save_pretrained = _was_saved


def _was_saved(*_, **__):
    """Takes the place of `model.save_pretrained` after it was called on every process."""

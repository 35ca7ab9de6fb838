"""The public names, once: `toolkit/__init__.py` loads each when it is first used."""

from .cli import run_recipe as run_recipe
from .config.run import CheckpointConfig as CheckpointConfig, EarlyStoppingConfig as EarlyStoppingConfig, OptimizerConfig as OptimizerConfig, RunConfig as RunConfig, ScheduleConfig as ScheduleConfig, require as require
from .config.experts import ExpertRunConfig as ExpertRunConfig, LivingRunConfig as LivingRunConfig, MoERunConfig as MoERunConfig
from .errors import Preempted as Preempted, UserError as UserError
from .run.run import Run as Run, start_run as start_run
from .task import Batch as Batch, Loss as Loss, Task as Task
from .trainer import Trainer as Trainer
from .standard.trainer import standard_trainer as standard_trainer
from .standard.experts import expert_callbacks as expert_callbacks, life_callbacks as life_callbacks
from .callbacks.base import Callback as Callback
from .callbacks.checkpointing import Checkpointing as Checkpointing
from .callbacks.early_stopping import EarlyStopping as EarlyStopping
from .callbacks.evaluation import Evaluation as Evaluation
from .callbacks.preemption import Preemption as Preemption
from .callbacks.throughput import Throughput as Throughput
from .data.batches import EvalBatches as EvalBatches
from .data.blanking import BlankPixels as BlankPixels
from .data.images import load_images as load_images
from .data.table import TensorTable as TensorTable
from .data.text import load_text as load_text
from .tasks.classification import Classification as Classification
from .tasks.language_modeling import LanguageModeling as LanguageModeling
from .models.mlp import MLP as MLP, Pixels as Pixels, ResidualClassifier as ResidualClassifier
from .hosts.engine import ExpertParallel as ExpertParallel
from .hosts.spread import spread_experts as spread_experts
from .moe.layer import MoE as MoE, describe_experts as describe_experts, make_moe as make_moe
from .moe.losses import RouterPenalty as RouterPenalty
from .moe.replan import Replan as Replan
from .placement.placement import ExpertPlacement as ExpertPlacement
from .parallel.ownership import ShardGroups as ShardGroups, make_shard_groups as make_shard_groups
from .version import __version__ as __version__
from .domains import activity as activity, autoencoder as autoencoder, continual as continual, speech as speech
from .hosts import transformers as transformers

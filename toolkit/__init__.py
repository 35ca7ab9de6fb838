"""A training toolkit on Hugging Face Accelerate in which experts have a place.

The public names are loaded when they are first used, so that `import toolkit` and `--help` cost no more than the
command line needs:

    import toolkit as tk
    tk.Trainer, tk.MoE, ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from toolkit.version import __version__

_HOMES = {
    "toolkit.cli": ["run_recipe"],
    "toolkit.config": [
        "CheckpointConfig",
        "EarlyStoppingConfig",
        "OptimizerConfig",
        "RunConfig",
        "ScheduleConfig",
        "require",
    ],
    "toolkit.errors": ["Preempted", "UserError"],
    "toolkit.expert_config": ["ExpertRunConfig", "LivingRunConfig", "MoERunConfig"],
    "toolkit.run": ["Run", "start_run"],
    "toolkit.task": ["Batch", "Loss", "Task"],
    "toolkit.trainer": ["Trainer"],
    "toolkit.optim": ["build_optimizer"],
    "toolkit.schedules": ["build_schedule"],
    "toolkit.standard": ["standard_trainer"],
    "toolkit.callbacks": [
        "Callback",
        "Checkpointing",
        "EarlyStopping",
        "Evaluation",
        "Preemption",
        "Progress",
        "StyleLeakage",
        "Throughput",
        "reference_mask",
    ],
    "toolkit.data": [
        "ActivityData",
        "BatchOrder",
        "BlankPixels",
        "BucketedOrder",
        "Characters",
        "EvalBatches",
        "FewLabels",
        "ImageData",
        "LogMel",
        "SpecAugment",
        "SpeechData",
        "TensorTable",
        "TextData",
        "TrainBatches",
        "balanced_rows",
        "load_activity",
        "load_images",
        "load_speech",
        "load_text",
        "with_noise",
    ],
    "toolkit.tasks": [
        "CTC",
        "Classification",
        "LabelledOnly",
        "LanguageModeling",
        "Lexicon",
        "RelaxedBound",
        "SemiSupervised",
        "VotedClassification",
        "class_weights",
    ],
    "toolkit.models": [
        "AttentionEncoder",
        "LMU",
        "MLP",
        "MemoryEncoder",
        "ParallelLMU",
        "Pixels",
        "RelaxedVAE",
        "ResidualClassifier",
        "SemiSupervisedVAE",
        "SequenceClassifier",
        "SpeechClassifier",
        "SpeechRecogniser",
        "Standardise",
        "WindowClassifier",
        "WindowEncoder",
        "load_encoder",
        "view_channels",
    ],
    "toolkit.transcribe": ["Recogniser", "save_recogniser"],
    "toolkit.models.hf": [
        "GlobalRouterPenalty",
        "causal_lm",
        "describe_language_model",
        "export_language_model",
        "language_model_config",
        "sample_tokens",
        "use_toolkit_kernel",
    ],
    "toolkit.moe": [
        "BiasBalancing",
        "ExpertLoad",
        "ExpertParallel",
        "ExpertPlacement",
        "MoE",
        "Replan",
        "RouterPenalty",
        "TraceRecorder",
        "WholeStepBalance",
        "describe_experts",
        "make_moe",
        "spread_experts",
    ],
    "toolkit.moe.standard": ["expert_callbacks", "life_callbacks"],
    "toolkit.parallel": ["ShardGroups", "clip_grad_norm_", "make_shard_groups", "mark_sharded"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from toolkit.callbacks import (
        Callback,
        Checkpointing,
        EarlyStopping,
        Evaluation,
        Preemption,
        Progress,
        StyleLeakage,
        Throughput,
        reference_mask,
    )
    from toolkit.cli import run_recipe
    from toolkit.config import (
        CheckpointConfig,
        EarlyStoppingConfig,
        OptimizerConfig,
        RunConfig,
        ScheduleConfig,
        require,
    )
    from toolkit.data import (
        ActivityData,
        BatchOrder,
        BlankPixels,
        BucketedOrder,
        Characters,
        EvalBatches,
        FewLabels,
        ImageData,
        LogMel,
        SpecAugment,
        SpeechData,
        TensorTable,
        TextData,
        TrainBatches,
        balanced_rows,
        load_activity,
        load_images,
        load_speech,
        load_text,
        with_noise,
    )
    from toolkit.errors import Preempted, UserError
    from toolkit.expert_config import ExpertRunConfig, LivingRunConfig, MoERunConfig
    from toolkit.models import (
        LMU,
        MLP,
        AttentionEncoder,
        MemoryEncoder,
        ParallelLMU,
        Pixels,
        RelaxedVAE,
        ResidualClassifier,
        SemiSupervisedVAE,
        SequenceClassifier,
        SpeechClassifier,
        SpeechRecogniser,
        Standardise,
        WindowClassifier,
        WindowEncoder,
        load_encoder,
        view_channels,
    )
    from toolkit.models.hf import (
        GlobalRouterPenalty,
        causal_lm,
        describe_language_model,
        export_language_model,
        language_model_config,
        sample_tokens,
        use_toolkit_kernel,
    )
    from toolkit.moe import (
        BiasBalancing,
        ExpertLoad,
        ExpertParallel,
        ExpertPlacement,
        MoE,
        Replan,
        RouterPenalty,
        TraceRecorder,
        WholeStepBalance,
        describe_experts,
        make_moe,
        spread_experts,
    )
    from toolkit.moe.standard import expert_callbacks, life_callbacks
    from toolkit.optim import build_optimizer
    from toolkit.parallel import ShardGroups, clip_grad_norm_, make_shard_groups, mark_sharded
    from toolkit.run import Run, start_run
    from toolkit.schedules import build_schedule
    from toolkit.standard import standard_trainer
    from toolkit.task import Batch, Loss, Task
    from toolkit.tasks import (
        CTC,
        Classification,
        LabelledOnly,
        LanguageModeling,
        Lexicon,
        RelaxedBound,
        SemiSupervised,
        VotedClassification,
        class_weights,
    )
    from toolkit.trainer import Trainer
    from toolkit.transcribe import Recogniser, save_recogniser

"""Description of transformers' experts for sharding: `toolkit` registers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from toolkit.experts.sharding.libraries import Library
from toolkit.integrations.transformers.kernel import TransformersLayout, projections
from toolkit.integrations.transformers.pretrained_files import save_whole_model


class TransformersLibrary(Library):
    def layout(self, experts: nn.Module) -> type[TransformersLayout] | None:
        return TransformersLayout if projections(experts) else None

    def save_whole_model(self, model: nn.Module, replace: Callable[[Any, str, Any], Any]) -> None:
        save_whole_model(model, replace)

    def projections(self, experts: nn.Module) -> tuple[str, ...]:
        return projections(experts)

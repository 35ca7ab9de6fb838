"""Description of transformers' experts for sharding: `toolkit` registers it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from toolkit.experts.sharding.libraries import Library
from toolkit.integrations.transformers.cpu_offload import stay_on_host
from toolkit.integrations.transformers.kernel import experts_forward, projections
from toolkit.integrations.transformers.lazy_loading import read_rows
from toolkit.integrations.transformers.pretrained_files import save_whole_model


class TransformersLibrary(Library):
    def read_rows(self, experts: nn.Module, slots: Sequence[int]) -> dict[str, Tensor]:
        return read_rows(experts, slots)

    def after_sharding(self, layers: Iterable[nn.Module]) -> None:
        stay_on_host(layers)

    def save_whole_model(self, model: nn.Module, replace: Callable[[Any, str, Any], Any]) -> None:
        save_whole_model(model, replace)

    def projections(self, experts: nn.Module) -> tuple[str, ...]:
        return projections(experts)

    def forward_with_adapters(
        self, experts: nn.Module, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        return experts_forward(experts, hidden_TD, ids_TK, weights_TK)

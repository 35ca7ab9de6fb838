"""Description of transformers' experts for sharding: `toolkit` registers it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from toolkit.experts.layer.stack import only_names_are_read
from toolkit.experts.parallel.collectives import on_main
from toolkit.experts.sharding.libraries import Library
from toolkit.experts.state.state_dict import whole_state_dict
from toolkit.integrations.accelerate.patches import Patches
from toolkit.integrations.transformers.kernel import TransformersLayout, projections
from toolkit.integrations.transformers.pretrained_files import push_as_called, save_as_called


class TransformersLibrary(Library):
    layout = TransformersLayout
    projections = staticmethod(projections)

    def save_whole_model(self, model: nn.Module, replace: Callable[[Any, str, Any], Any]) -> None:
        """Have the `save_pretrained` and `push_to_hub` of `model` gather the experts of all ranks.

        The base of a model with adapters keeps its own methods, which raise. So does a model of another library around
        a model of transformers, such as SentenceTransformer, which calls the methods of that one.
        """
        from transformers import PreTrainedModel

        of_transformers: list[nn.Module] = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        if hasattr(model, "peft_config"):
            of_transformers = [model]
        for module in of_transformers:
            replace(module, "save_pretrained", partial(save_as_called, module))
            replace(module, "push_to_hub", partial(push_as_called, module))
        for name in ("save_pretrained", "push_to_hub") if not of_transformers else ():
            if hasattr(type(model), name):
                replace(model, name, partial(_call_with_whole_state, model, name))
        for module in model.modules():
            if hasattr(type(module), "load_adapter"):
                replace(module, "load_adapter", partial(_load_adapter, module.load_adapter))


def _call_with_whole_state(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
    """Call the method `name` of another library's model on rank 0, with the experts of all ranks. A collective.

    Methods like those in `huggingface_hub.PyTorchModelHubMixin` and diffusers read `model.state_dict()`.
    """
    state = whole_state_dict(model)

    def call() -> None:
        with Patches() as meanwhile:
            meanwhile.replace(model, "state_dict", lambda *_, **__: dict(state))
            meanwhile.replace(model, "save_pretrained", partial(type(model).save_pretrained, model))  # type: ignore[attr-defined]
            getattr(type(model), name)(model, *args, **kwargs)

    on_main(call)


def _load_adapter(load: Any, *args: Any, **kwargs: Any) -> Any:
    with only_names_are_read(load.__self__):  # PEFT reads the names of its state dict
        return load(*args, **kwargs)

"""Ways to shard the experts of an MoE model, one class for each library path, with the same methods.

A path loads saved weights as its library documents and trains step by step. If a library has no function for an
operation, the path does the same as the library's `Trainer` or examples.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.support.precision import in_float64
from toolkit.experts.parallel.ownership import ownership_of

EXPERTS, LAYERS, VOCAB, SAMPLES, LENGTH = 4, 2, 32, 4, 8
RATE, MAX_NORM = 1e-2, 0.1
"""Large enough to change every weight, and small enough to clip every gradient."""
MATRICES = ("gate_up_proj", "down_proj")


@contextlib.contextmanager
def all_in_float64() -> Iterator[None]:
    """Extend `in_float64` to explicit float32 casts in Qwen3-MoE."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    class Wide:
        float = float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with in_float64(), mock.patch.object(modeling_qwen3_moe, "torch", Wide()):
        yield


def save_model(folder: Path) -> None:
    """Save a small Qwen3-MoE with random nonzero weights and unequal expert loads."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 24,
        "vocab_size": VOCAB,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_cache": False,
        "tie_word_embeddings": False,
    }
    config = Qwen3MoeConfig(**settings)
    with all_in_float64():
        model = Qwen3MoeForCausalLM(config)
        draws = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draws)
            parameter.data = noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + 0.1 * noise
        model.save_pretrained(folder)


def read(folder: Path, **settings: Any) -> Any:
    """Load the saved model with unmodified `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    eager = {"experts_implementation": "eager", "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.get_default_dtype(), **(eager | settings))


def with_adapters(model: Any) -> Any:
    """Add LoRA adapters to all experts, with the same random weights on every rank."""
    from peft import LoraConfig, get_peft_model

    targets = [f"mlp.experts.{matrix}" for matrix in MATRICES]
    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(r=2, lora_alpha=8, target_modules=[], target_parameters=targets, init_lora_weights=False)
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=RATE, weight_decay=0.1)


class OneProcess:
    """One process: transformers, PEFT and torch."""

    name = "one process"
    shares_batch = True
    """True if every rank gets the full batch, False if each gets a part."""
    note = ""
    """Description for the page."""
    precision, tolerance = torch.float64, 1e-8
    """Float type, and relative tolerance of each tensor; bugs cause differences of 1e-2 or more."""
    needs = ""
    """Required library beyond the toolkit's."""

    @classmethod
    def is_installed(cls) -> bool:
        return not cls.needs or importlib.util.find_spec(cls.needs) is not None

    def __init__(self, folder: Path, *, adapters: bool = False) -> None:
        self.inner = self.read(folder)
        if adapters:
            self.inner = self.with_adapters(folder)
        self.inner.train()
        self.model, self.optimizer = self.shard()

    def read(self, folder: Path) -> Any:
        return read(folder)

    def with_adapters(self, _folder: Path) -> Any:
        return with_adapters(self.inner)

    def shard(self) -> tuple[Any, Any]:
        """Return the sharded model and the optimizer."""
        return self.inner, make_optimizer(self.inner)

    def part(self, ids: Tensor) -> Tensor:
        if self.shares_batch:
            return ids
        return ids.chunk(dist.get_world_size())[dist.get_rank()]

    def backward(self, ids: Tensor) -> float:
        """Run a forward and backward pass, and return the loss over all ranks."""
        ids = self.part(ids)
        loss = self.model(input_ids=ids, labels=ids).loss
        self.take_backward(loss)
        value = loss.detach().clone()
        if not self.shares_batch:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value.item()

    def take_backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self) -> float:
        """Clip with the documented function of the library, and return the norm before clipping."""
        return full_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)).item()

    def values(self, *, grads: bool = False) -> dict[str, Tensor]:
        """Return full weights or gradients of the trained parameters on every rank. A collective."""
        found = {}
        for name, parameter in self.inner.named_parameters():
            value = parameter.grad if grads else parameter.detach()
            if parameter.requires_grad and value is not None:
                found[name] = full_tensor(value, parameter)
        return found

    def save(self, folder: Path) -> None:
        """Save for unmodified `from_pretrained`."""
        self.inner.save_pretrained(folder)

    def save_state(self, folder: Path) -> None:
        """Save a checkpoint to resume from, including the optimizer."""
        model, optimizer = get_state_dict(self.inner, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    @classmethod
    def resume(cls, start: Path, folder: Path) -> OneProcess:
        """Restore the path of `save_state`; `start` has the initial weights."""
        path = cls(start)
        path.load_state(folder)
        return path

    def load_state(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.inner, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.inner, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@torch.no_grad()
def full_tensor(value: Tensor, parameter: Tensor | None = None) -> Tensor:
    """Return a copy of the full tensor, on every rank."""
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    ownership = None if parameter is None else ownership_of(parameter)
    if ownership is None or ownership.groups.ep_size == 1:
        return value.detach().clone()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (ownership.row_ids, value.detach()))
    found = value.new_zeros(EXPERTS, *value.shape[1:])
    for ids, rows in parts:
        found[list(ids)] = rows
    return found


class AccelerateDDP(OneProcess):
    name = "Accelerate, DDP"
    note = "the control: every process has all experts"
    shares_batch = False

    def shard(self) -> tuple[Any, Any]:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        return self.accelerator.prepare(self.inner, make_optimizer(self.inner))

    def clip(self) -> float:
        return self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM).item()

    def save(self, folder: Path) -> None:
        self.accelerator.unwrap_model(self.model).save_pretrained(
            folder, is_main_process=self.accelerator.is_main_process
        )

    def save_state(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load_state(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))


class FullyShard(OneProcess):
    name = "torch, FSDP2"
    note = "`fully_shard` of each layer and of the model; every process computes all experts"
    shares_batch = False

    def shard(self) -> tuple[Any, Any]:
        from torch.distributed.fsdp import fully_shard

        for layer in self.inner.get_submodule(self.prefix() + "model.layers"):
            fully_shard(layer)
        fully_shard(self.inner)
        return self.inner, make_optimizer(self.inner)

    def prefix(self) -> str:
        return "base_model.model." if hasattr(self.inner, "peft_config") else ""


class AccelerateFSDP2(OneProcess):
    name = "Accelerate, FSDP2"
    note = (
        "it drops its plugin on CPUs ([10](upstream/README.md#10-the-fsdp-plugin-is-dropped-on-cpus)), so "
        "`fsdp2_prepare_model` is called, as on GPUs"
    )
    shares_batch = False

    def shard(self) -> tuple[Any, Any]:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        model = fsdp2_prepare_model(self.accelerator(), self.inner)
        return model, make_optimizer(model)

    def accelerator(self) -> Any:
        """Return the attributes of an accelerator that FSDP2 reads."""
        from accelerate import FullyShardedDataParallelPlugin

        layers = {"transformer_cls_names_to_wrap": ["Qwen3MoeDecoderLayer"]}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
            state_dict_type="FULL_STATE_DICT",
            **layers,
        )
        return SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            mixed_precision="no",
            is_main_process=dist.get_rank() == 0,
            wait_for_everyone=dist.barrier,
        )

    def full_state(self) -> dict[str, Any]:  # as `accelerator.get_state_dict` does under FSDP2
        return get_model_state_dict(self.inner, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def save(self, folder: Path) -> None:
        state = self.full_state()
        if dist.get_rank() == 0:
            self.inner.save_pretrained(folder, state_dict=state)
        dist.barrier()


class OnSeveralMeshes(OneProcess):
    """Path whose parameters Accelerate's `clip_grad_norm_` supports, but torch's does not."""

    def clip(self) -> float:
        from accelerate import Accelerator

        return Accelerator(cpu=True).clip_grad_norm_(self.inner.parameters(), MAX_NORM).item()


class DTensorPlan(OnSeveralMeshes):
    name = "torch, DTensor plan"
    note = "stacked experts `Shard(0)`, `parallelize_module`, `batched_mm`; ranks share the batch"
    experts = "batched_mm"

    def shard(self) -> tuple[Any, Any]:
        from torch.distributed.tensor.parallel import PrepareModuleInputOutput, parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in self.inner.modules():
            if "gate_up_proj" in module._parameters:
                for name in MATRICES:
                    value = getattr(module, name)
                    sharded = distribute_tensor(value.data, mesh, [Shard(0)])
                    setattr(module, name, nn.Parameter(sharded, requires_grad=value.requires_grad))
                layouts = (Replicate(), Replicate(), Replicate())
                plan = PrepareModuleInputOutput(
                    input_layouts=layouts,
                    desired_input_layouts=layouts,
                    output_layouts=Replicate(),
                    desired_output_layouts=Replicate(),
                )
                parallelize_module(module, mesh, plan)
        self.inner.config._experts_implementation = self.experts
        return self.inner, make_optimizer(self.inner)


class DTensorPlanEager(DTensorPlan):
    name = "torch, DTensor plan, eager"
    note = 'the same with `experts_implementation="eager"`'
    experts = "eager"


class Transformers(OnSeveralMeshes):
    """`from_pretrained` with a `DistributedConfig`."""

    settings: ClassVar[dict[str, Any]]

    def read(self, folder: Path) -> Any:
        from transformers.distributed import DistributedConfig

        return read(folder, distributed_config=DistributedConfig(**self.settings))

    def save_state(self, folder: Path) -> None:
        from transformers.distributed import save_optimizer_distributed

        self.inner.save_pretrained(folder / "model", distributed_checkpoint=True)
        save_optimizer_distributed(self.inner, self.optimizer, str(folder / "optimizer"))

    @classmethod
    def resume(cls, _start: Path, folder: Path) -> OneProcess:
        from transformers.distributed import load_optimizer_distributed

        path = cls(folder / "model")
        load_optimizer_distributed(path.inner, path.optimizer, str(folder / "optimizer"))
        return path


class TransformersFlag(Transformers):
    name = "transformers, the flag only"
    note = "`DistributedConfig(enable_expert_parallel=True)` in a loop without DDP"
    shares_batch = False
    settings: ClassVar = {"enable_expert_parallel": True}


class TransformersShared(Transformers):
    name = "transformers, one batch"
    note = "`DistributedConfig(tp_size=2, ep_size=2, tp_plan={})`; ranks share the batch"
    settings: ClassVar = {"tp_size": 2, "ep_size": 2, "tp_plan": {}}


class TransformersTP(Transformers):
    name = "transformers, TP"
    note = "`DistributedConfig(tp_size=2, ep_size=2)`; ranks share the batch"
    settings: ClassVar = {"tp_size": 2, "ep_size": 2}


class TransformersFSDP2(Transformers):
    name = "transformers, FSDP2"
    note = "`DistributedConfig(fsdp_size=2, ep_size=2)`"
    shares_batch = False
    settings: ClassVar = {"fsdp_size": 2, "ep_size": 2}


class TransformersFSDP2InFloat32(TransformersFSDP2):
    name = "transformers, FSDP2, in float32"
    note = "the same in float32, compared with one process in float32"
    precision, tolerance = torch.float32, 1e-5


class TransformersByHand(OnSeveralMeshes):
    name = "transformers, by hand"
    note = "`apply_expert_parallelism`, DDP for the rest; the loop divides gradients of experts"
    shares_batch = False

    def shard(self) -> tuple[Any, Any]:
        from torch.nn.parallel import DistributedDataParallel
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        world = dist.get_world_size()
        modules = [name for name, module in self.inner.named_modules() if "gate_up_proj" in module._parameters]
        names = [f"{module}.{matrix}" for module in modules for matrix in MATRICES]
        plan = dict.fromkeys(names, "grouped_gemm") | dict.fromkeys(modules, "ep_dispatch_experts")
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
        apply_expert_parallelism(self.inner, mesh["ep"], mesh["tp"], plan, "all_to_all")
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.inner, names)
        return DistributedDataParallel(self.inner), make_optimizer(self.inner)

    def backward(self, ids: Tensor) -> float:
        loss = super().backward(ids)
        for parameter in self.inner.parameters():
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                parameter.grad.div_(dist.get_world_size())
        return loss


class DeepSpeed(OneProcess):
    name, needs = "DeepSpeed, AutoEP", "deepspeed"
    note = "`expert_parallel` with ZeRO stage 0"
    shares_batch = False
    precision, tolerance = torch.float32, 1e-5

    def shard(self) -> tuple[Any, Any]:
        import deepspeed

        experts = {"enabled": True, "autoep_size": 2, "preset_model": "qwen3_moe", "use_grouped_mm": False}
        config = {
            "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
            "gradient_clipping": MAX_NORM,
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1, "torch_adam": True}},
            "zero_optimization": {"stage": 0},
            "expert_parallel": experts,
        }
        self.engine, *_ = deepspeed.initialize(model=self.inner, config=config)
        return self.engine, SimpleNamespace(step=lambda: None, zero_grad=lambda: None)

    def take_backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def clip(self) -> float:  # the engine clips in its step and does not return the norm
        from deepspeed.runtime import engine

        found = []

        def clip(*args: Any, _clip: Any = engine.clip_grad_norm_, **settings: Any) -> None:
            found.append(_clip(*args, **settings).item())

        with mock.patch.object(engine, "clip_grad_norm_", clip):
            self.engine.step()
        return found[0]

    def values(self, *, grads: bool = False) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.inner.named_parameters():
            value = parameter.grad if grads else parameter.detach()
            if not parameter.requires_grad or value is None:
                continue
            if ".experts.w" in name:
                parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, value.contiguous())
                value = torch.cat(parts)
            found[name.replace(".router.gate.", ".gate.")] = value.detach().clone()
        for name in [name for name in found if name.endswith(".w1")]:
            stem = name.removesuffix("w1")
            found[stem + "gate_up_proj"] = torch.cat([found.pop(name), found.pop(stem + "w3")], 1)
            found[stem + "down_proj"] = found.pop(stem + "w2")
        return found

    def save_state(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder))

    def load_state(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder))


class DeepSpeedMended(DeepSpeed):
    name = "DeepSpeed, AutoEP, mended"
    note = "with the fix of report 7, in float32: it takes no float64"

    def shard(self) -> tuple[Any, Any]:
        from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY as registry

        by_model = type(registry).get

        def get(self: Any, model: Any, default: Any = None) -> Any:
            return dict.get(self, model, default) if isinstance(model, str) else by_model(self, model)

        def put(self: Any, model: Any, outputs: Any) -> None:
            dict.__setitem__(self, model if isinstance(model, str) else str(model.__class__), outputs)

        with mock.patch.multiple(type(registry), get=get, __setitem__=put):
            return super().shard()


class Axolotl(AccelerateFSDP2):
    name, needs = "Axolotl, torch backend", "axolotl"
    note = (
        "`expert_parallel_backend: torch` with FSDP2; the methods of its plugin, its `fsdp2_prepare_model`, clipping "
        "and checkpoints are called in its loader's and trainer's order"
    )
    precision, tolerance = torch.float32, 1e-5

    def __init__(self, folder: Path, *, adapters: bool = False) -> None:
        from axolotl.integrations.expert_parallel.plugin import ExpertParallelPlugin
        from axolotl.utils.dict import DictDefault

        self.plugin = ExpertParallelPlugin()
        self.cfg = DictDefault(
            expert_parallel_size=dist.get_world_size(), expert_parallel_backend="torch", experts_implementation="eager"
        )
        super().__init__(folder, adapters=adapters)

    def read(self, folder: Path) -> Any:
        self.plugin.pre_model_load(self.cfg)
        model = read(folder, experts_implementation=self.cfg.experts_implementation)
        self.plugin.post_model_build(self.cfg, model)
        return model

    def with_adapters(self, folder: Path) -> Any:
        from axolotl.integrations.expert_parallel.shard import ep_local_adapter_dir
        from peft import PeftModel

        with tempfile.TemporaryDirectory() as saved:
            with_adapters(read(folder)).save_pretrained(saved)
            local = ep_local_adapter_dir(self.inner, saved)
            return PeftModel.from_pretrained(self.inner, local, is_trainable=True)

    def shard(self) -> tuple[Any, Any]:
        from axolotl.monkeypatch.accelerate.fsdp2 import fsdp2_prepare_model
        from axolotl.monkeypatch.accelerate.fsdp2_checkpoint import patch_fsdp2_full_checkpoint

        patch_fsdp2_full_checkpoint()
        self.plugin.post_model_load(self.cfg, self.inner)
        model = fsdp2_prepare_model(self.accelerator(), self.inner)
        return model, make_optimizer(model)

    def clip(self) -> float:
        from axolotl.utils.gradient_clipping import clip_grad_norm_ep_local_shards_, ep_local_parameter_ids

        return clip_grad_norm_ep_local_shards_(
            self.model.parameters(), MAX_NORM, ep_local_parameters=ep_local_parameter_ids(self.model)
        ).item()

    def values(self, *, grads: bool = False) -> dict[str, Tensor]:
        from axolotl.integrations.expert_parallel.shard import gather_expert_lora_full
        from axolotl.monkeypatch.accelerate.fsdp2_checkpoint import expert_ownership

        found = super().values(grads=grads)
        for name, owner in expert_ownership(self.inner).items():
            if name in found:  # rows of experts lie as in lora_A
                kind = "B" if owner["kind"] == "B" else "A"
                found[name] = gather_expert_lora_full(found[name], kind, EXPERTS, dist.group.WORLD)
        return found

    def full_state(self) -> dict[str, Any]:
        from axolotl.monkeypatch.accelerate.fsdp2_checkpoint import full_model_state

        return full_model_state(self.inner)

    def save_state(self, folder: Path) -> None:
        from accelerate.utils import fsdp_utils

        fsdp_utils.save_fsdp_model(*self.fsdp(), self.model, folder)
        fsdp_utils.save_fsdp_optimizer(*self.fsdp(), self.optimizer, self.model, folder)

    def load_state(self, folder: Path) -> None:
        from accelerate.utils import fsdp_utils

        fsdp_utils.load_fsdp_model(*self.fsdp(), self.model, folder)
        fsdp_utils.load_fsdp_optimizer(*self.fsdp(), self.optimizer, self.model, folder)

    def fsdp(self) -> tuple[Any, Any]:
        accelerator = self.accelerator()
        return accelerator.state.fsdp_plugin, accelerator


class AxolotlMended(Axolotl):
    name = "Axolotl, torch backend, mended"
    note = (
        "with the CPU in the two places that require CUDA, in float32: it rounds routing weights and norms to float32"
    )

    def __init__(self, folder: Path, *, adapters: bool = False) -> None:
        from axolotl.integrations.expert_parallel import plugin, shard

        cuda = SimpleNamespace(current_device=int, is_available=bool)
        on_cpu = SimpleNamespace(**(vars(torch) | {"cuda": cuda, "device": lambda *_: torch.device("cpu")}))
        make_mesh = plugin.per_rank_expert_mesh
        with (
            mock.patch.object(shard, "torch", on_cpu),
            mock.patch.object(plugin, "per_rank_expert_mesh", lambda mesh, _: make_mesh(mesh, "cpu")),
        ):
            super().__init__(folder, adapters=adapters)


class Toolkit(AccelerateDDP):
    name = "toolkit, DDP"
    note = "`ExpertParallel(accelerator)`"
    dense: Literal["ddp", "fsdp2"] = "ddp"

    def shard(self) -> tuple[Any, Any]:
        from benchmarks.support.accelerators import make_accelerator
        from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

        self.accelerator = make_accelerator(self.dense, cpu=True)
        self.experts = ExpertParallel(self.accelerator, ep_size=dist.get_world_size())
        return self.experts.prepare(self.inner, make_optimizer(self.inner))

    def save(self, folder: Path) -> None:
        from toolkit.integrations.transformers import save_pretrained

        save_pretrained(self.model, folder)


class ToolkitFSDP2(Toolkit):
    name = "toolkit, FSDP2"
    note = "`ExpertParallel(Accelerator(fsdp_plugin=...))`"
    dense = "fsdp2"


PATHS: dict[str, type[OneProcess]] = {
    each.name: each
    for each in (
        AccelerateDDP,
        AccelerateFSDP2,
        FullyShard,
        DTensorPlan,
        DTensorPlanEager,
        TransformersFlag,
        TransformersShared,
        TransformersTP,
        TransformersFSDP2,
        TransformersFSDP2InFloat32,
        TransformersByHand,
        DeepSpeed,
        DeepSpeedMended,
        Axolotl,
        AxolotlMended,
        Toolkit,
        ToolkitFSDP2,
    )
}
"""Paths by name, in the order of the page."""

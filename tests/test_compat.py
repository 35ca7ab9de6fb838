"""Canaries for the `compat.py` modules: each private name of a library still behaves as the toolkit needs.

If a library release breaks one, only its `compat.py` has to change.
"""

import copy
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import toolkit as tk
from benchmarks.support.processes import run_distributed
from toolkit import compat as other_compat
from toolkit.experts import compat
from toolkit.integrations.accelerate import compat as accelerate_compat
from toolkit.integrations.transformers import compat as transformers_compat


@pytest.fixture(autouse=True)
def versions() -> None:
    """Show library versions with a failure."""
    print(*(f"{name} {version(name)}" for name in ("torch", "accelerate", "transformers", "datasets")))  # noqa: T201


def test_without_dynamo_runs_a_call_uncompiled():
    is_compiled = []
    plain = compat.without_dynamo(lambda x: is_compiled.append(torch.compiler.is_compiling()) or x)
    torch.compile(lambda x: plain(x) + 1, backend="eager")(torch.ones(2))
    assert is_compiled == [False]


def test_multiply_each_and_norm_of_each_take_tensors_of_any_shape():
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[1.0, 2.0], [2.0, 4.0]])]
    assert compat.norm_of_each(tensors).tolist() == [5.0, 5.0]
    compat.multiply_each_(tensors, torch.tensor(2.0))
    assert [t.tolist() for t in tensors] == [[6.0, 8.0], [[2.0, 4.0], [4.0, 8.0]]]


def test_embedding_bag_weights_grad_is_the_dot_product_with_each_row():
    grad_TD, table_ND = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    indices_N, bag_N = torch.tensor([3, 0, 1, 2]), torch.tensor([0, 0, 1, 1])
    found = compat.embedding_bag_weights_grad(grad_TD, table_ND, indices_N, torch.tensor([0, 2]), bag_N)
    assert found.tolist() == (grad_TD[bag_N] * table_ND[indices_N]).sum(1).tolist()


def test_set_data_of_other_shape_has_gradients_while_an_earlier_graph_is_kept():
    weight = nn.Parameter(torch.ones(4))
    calls = []
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(len(parameter.grad)))
    earlier = weight.sum()
    compat.set_data_of_other_shape(weight, weight.data[:2])
    (2 * weight).sum().backward()
    assert (weight.grad.tolist(), calls, earlier.item()) == ([2, 2], [2], 4)


def copy_of_shards() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2))
    model.register_forward_hook(lambda *_: None)
    fully_shard([model[0], model[1]])
    fully_shard(model)
    before, x = model(torch.ones(1, 2)), torch.ones(1, 2)
    copied = compat.copy_without_fsdp(model)
    hooks = [hooks for m in copied.modules() for name, hooks in vars(m).items() if name.endswith("_hooks")]
    assert sum(len(each) for each in hooks) == 1, "FSDP2's hooks would shard the copy"
    assert [type(module) for module in copied.modules()] == [nn.Sequential, nn.Linear, nn.Linear, nn.LayerNorm]
    assert torch.equal(copied(x), before)
    assert isinstance(model, FSDPModule)
    model(x).sum().backward()


def test_copy_without_fsdp_has_the_own_classes_and_hooks():
    run_distributed(copy_of_shards, 2)


def test_version_of_increases_with_changes_in_place():
    parameter = nn.Parameter(torch.zeros(2))
    before = compat.version_of(parameter)
    with torch.no_grad():
        parameter.add_(1)
    assert compat.version_of(parameter) > before


def test_in_backward_and_in_reentrant_checkpoint_tell_recomputation_from_evaluation():
    seen = []

    def region(x: Tensor) -> Tensor:
        seen.append((compat.in_backward(), compat.in_reentrant_checkpoint(), torch.is_grad_enabled()))
        return x.sin()

    for use_reentrant in (False, True):
        checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    with torch.no_grad():
        region(torch.ones(2))
        with pytest.warns(UserWarning, match="requires_grad"):
            checkpoint(region, torch.ones(2), use_reentrant=True)
    recomputation, evaluation = (True, False, True), (False, False, False)
    assert seen == [(False, False, True), recomputation, (False, True, False), recomputation, evaluation, evaluation]


def two_layers(value: float = 1.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def train_under_ddp() -> tuple[list[float], list[float], list[str], float]:
    rank = dist.get_rank()
    model = two_layers(1.0 + rank)
    compat.exclude_from_ddp(model, ["1.weight"])
    wrapped = DistributedDataParallel(model)
    weights = [p.item() for p in model.parameters()]
    wrapped(torch.full((1, 1), 1.0 + rank)).sum().backward()
    holders = [type(holder).__name__ for holder in compat.holders_of_process_group(wrapped)]
    return weights, [p.grad.item() for p in model.parameters()], holders, compat.timeout_of().total_seconds()


def test_excluded_parameters_are_not_broadcast_or_averaged_by_ddp():
    first, second = run_distributed(train_under_ddp, 2)
    averaged = (1 * 1 + 2 * 2) / 2
    assert first == ([1.0, 1.0], [averaged, 1.0], ["Reducer", "Logger"], 1800.0)
    assert second == ([1.0, 2.0], [averaged, 2.0], ["Reducer", "Logger"], 1800.0)


def test_without_compile_prefix_returns_names_of_the_uncompiled_model():
    model = nn.Sequential(nn.Linear(1, 1), two_layers())
    compiled = copy.deepcopy(model)
    compiled[1] = torch.compile(compiled[1], backend="eager")
    names = [name for name, _ in torch.compile(compiled, backend="eager").named_parameters()]
    plain = [name for name, _ in model.named_parameters()]
    assert names != plain
    assert [compat.without_compile_prefix(name) for name in names] == plain


def test_new_iterator_restarts_persistent_workers():
    loader = DataLoader(range(2), num_workers=1, persistent_workers=True)
    first = compat.new_iterator(loader)
    assert iter(loader) is first
    assert compat.new_iterator(loader) is not first


def test_module_that_moves_its_parameters_keeps_only_these():
    class KeepsWeight(compat.MovesParameters, nn.Linear):
        def moved(self, change: Callable[[Tensor], Tensor]) -> list[str]:
            moved.append(change(torch.zeros(1)).dtype)
            return ["weight"]

    moved: list[torch.dtype] = []
    module = nn.Sequential(KeepsWeight(2, 2), nn.Linear(2, 2)).double()
    assert moved == [torch.float64]
    assert [part.weight.dtype for part in module] == [torch.float32, torch.float64]
    assert {part.bias.dtype for part in module} == {torch.float64}


def test_operations_notes_results_without_values():
    class Bytes(compat.Operations):
        seen: ClassVar[list[int]] = []

        def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
            self.multiplied = compat.multiplies_groups(operation, args)
            return super().run(operation, args, kwargs)

        def note(self, result: torch.Tensor) -> None:
            self.seen.append(result.untyped_storage().nbytes())

    with compat.without_values(), Bytes() as operations:
        rows, matrices = torch.empty(4, 16, dtype=torch.bfloat16), torch.empty(2, 16, 8, dtype=torch.bfloat16)
        assert operations.seen == [rows.nbytes, matrices.nbytes]
        assert compat.storage_id(rows.untyped_storage()) == compat.storage_id(rows[1:].untyped_storage())
        assert compat.storage_id(rows.untyped_storage()) != compat.storage_id(matrices.untyped_storage())
        assert not operations.multiplied
        torch.nn.functional.grouped_mm(rows, matrices, offs=torch.empty(2, dtype=torch.int32))
        assert operations.multiplied


# --- Accelerate ------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerate_state():
    accelerate_compat.reset_accelerator_state()
    yield
    accelerate_compat.reset_accelerator_state()


@pytest.mark.usefixtures("accelerate_state")
def test_undo_prepare_for_evaluation_restores_the_forward():
    accelerator, model = Accelerator(cpu=True, mixed_precision="bf16"), nn.Linear(1, 1)
    plain = model.forward
    accelerator.prepare_model(model, evaluation_mode=True)
    assert accelerate_compat.is_marked_as_prepared(model)
    assert model.forward != plain
    for _ in range(2):
        accelerate_compat.undo_prepare_for_evaluation(model)
        assert not accelerate_compat.is_marked_as_prepared(model)
        assert model.forward == plain


@pytest.mark.usefixtures("accelerate_state")
def test_without_states_skips_a_model_and_an_optimizer(tmp_path: Path):
    accelerator, model, skipped = Accelerator(cpu=True), nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(skipped.parameters())
    accelerator.prepare(model, skipped, optimizer)
    assert accelerate_compat.models_of(accelerator) == [model, skipped]
    with accelerate_compat.without_states(accelerator, skipped, optimizer):
        accelerator.save_state(str(tmp_path))
        weight = model.weight.detach().clone()
        for each in (model, skipped):
            nn.init.constant_(each.weight, 7)
        accelerator.load_state(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "random_states_0.pkl"}
    assert torch.equal(model.weight, weight)
    assert skipped.weight.item() == 7
    assert accelerate_compat.models_of(accelerator) == [model, skipped]


@pytest.mark.usefixtures("accelerate_state")
def test_reset_accelerator_state_clears_all_states():
    Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    accelerate_compat.reset_accelerator_state()
    assert [state._shared_state for state in (AcceleratorState, GradientState, PartialState)] == [{}, {}, {}]
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"


# --- transformers ----------------------------------------------------------------------------------------------------


def test_apply_gate_applies_the_gate_in_the_first_half_of_the_columns():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    experts = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=4, moe_intermediate_size=2, num_experts=2))
    assert transformers_compat.has_default_gate(experts)
    hidden = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    gated = transformers_compat.apply_gate(experts, hidden)
    assert torch.equal(gated, nn.functional.silu(hidden[:, :2]) * hidden[:, 2:])
    experts.__class__ = type("OwnGate", (type(experts),), {"_apply_gate": lambda _, hidden: hidden})
    assert not transformers_compat.has_default_gate(experts)


def test_weights_loaded_by_calls_the_loader_with_a_model_on_the_meta_device(tmp_path: Path):
    from transformers import LlamaConfig, LlamaModel

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    saved = LlamaModel._from_config(LlamaConfig(**sizes, num_attention_heads=2), experts_implementation="eager")
    saved.save_pretrained(tmp_path)
    calls = []

    def load(original: Any, model: Any, state: Any, files: Any, *rest: Any) -> Any:
        calls.append((model.norm.weight.is_meta, state, [Path(file).name for file in files]))
        transformers_compat.mark_as_loaded(model.norm.weight)
        return original(model, state, files, *rest)

    with transformers_compat.weights_loaded_by(load):
        model = LlamaModel.from_pretrained(tmp_path)
    LlamaModel.from_pretrained(tmp_path)
    assert calls == [(True, None, ["model.safetensors"])]
    assert torch.equal(model.norm.weight, saved.norm.weight)
    assert transformers_compat.experts_implementation(saved.config) == "eager"


def test_names_of_stacked_experts_maps_names_in_files():
    names = dict(transformers_compat.names_of_stacked_experts("granitemoe"))
    assert names[r"block_sparse_moe\.input_linear\.weight"] == "block_sparse_moe.experts.gate_up_proj"
    assert transformers_compat.names_of_stacked_experts("no such family") == []
    in_model = transformers_compat.renaming_of_files("mixtral")("layers.0.block_sparse_moe.experts.3.w1.weight")
    assert in_model == "layers.0.mlp.experts.3.w1.weight"


def test_fingerprint_depends_on_the_content_of_a_dataset():
    import datasets

    first, equal, other = (datasets.Dataset.from_dict({"text": [text]}) for text in ("a", "a", "b"))
    mapped = first.map(lambda row: {"text": row["text"] + "!"})
    assert other_compat.fingerprint(first) == other_compat.fingerprint(equal)
    assert other_compat.fingerprint(first) not in (other_compat.fingerprint(other), other_compat.fingerprint(mapped))


def test_is_wandb_service_matches_the_binary_of_wandb():
    wandb = pytest.importorskip("wandb")
    binaries = [path for path in Path(wandb.__file__).parent.rglob("wandb-core*") if path.is_file()]
    assert binaries
    assert all(other_compat.is_wandb_service(path.name) for path in binaries)
    assert not other_compat.is_wandb_service("python")


def test_log_images_sends_them_to_the_callbacks_of_trackers(tmp_path: Path):
    from transformers.integrations import TensorBoardCallback, WandbCallback

    path = tk.save_figure(tmp_path / "empty.png", lambda _: None)
    tensorboard, wandb = TensorBoardCallback(mock.Mock()), WandbCallback()
    assert wandb._wandb.run is None
    wandb._wandb = mock.Mock()
    for callback in (tensorboard, wandb, object()):
        transformers_compat.log_images(callback, {"load": path}, 7)
    name, pixels, step = tensorboard.tb_writer.add_image.call_args.args
    assert (name, pixels.shape[2], step) == ("train/load", 3, 7)
    (logged,) = wandb._wandb.log.call_args.args
    assert {*logged} == {"train/load", "train/global_step"}

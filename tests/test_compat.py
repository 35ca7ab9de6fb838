"""Canaries for the files `compat.py`: what we rely on beyond the documented interface of each library still works.

A failure here names the library and the release that changed it; mend `compat.py`, and nothing else.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.support.helpers import run_distributed
from toolkit import compat as other_compat
from toolkit.doctor import watch
from toolkit.experts import compat
from toolkit.integrations.accelerate import compat as accelerate_compat
from toolkit.integrations.transformers import compat as transformers_compat


@contextmanager
def relying_on(library: str, what: str) -> Iterator[None]:
    """Whatever fails inside is reported as a change of `library`."""
    try:
        yield
    except Exception as error:
        message = f"{library} {version(library)} changed {what}: mend compat.py ({error!r})"
        raise AssertionError(message) from error


def tensors() -> list[Tensor]:
    return [torch.tensor([3.0, 4.0]), torch.tensor([[1.0, 2.0], [2.0, 4.0]])]


# --- torch -------------------------------------------------------------------------------------------------------


def test_many_tensors_are_multiplied_and_measured_at_once():
    with relying_on("torch", "torch._foreach_mul_ by a tensor"):
        each = tensors()
        compat.multiply_each_(each, torch.tensor(2.0))
        assert [t.tolist() for t in each] == [[6.0, 8.0], [[2.0, 4.0], [4.0, 8.0]]]
    with relying_on("torch", "torch._foreach_norm"):
        assert compat.norm_of_each(tensors()).tolist() == [5.0, 5.0]


def test_the_gradient_of_bag_weights_is_the_dot_product_with_each_row():
    grad_TD, table_ND = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    indices_N, bag_N = torch.tensor([3, 0, 1, 2]), torch.tensor([0, 0, 1, 1])
    with relying_on("torch", "aten::_embedding_bag_per_sample_weights_backward"):
        found = compat.embedding_bag_weights_grad(grad_TD, table_ND, indices_N, torch.tensor([0, 2]), bag_N)
        assert found.tolist() == (grad_TD[bag_N] * table_ND[indices_N]).sum(1).tolist()


def test_a_parameter_of_another_shape_has_gradients_while_an_earlier_graph_is_kept():
    weight = torch.nn.Parameter(torch.ones(4))
    calls = []
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(len(parameter.grad)))
    kept = weight.sum()
    compat.set_data_of_other_shape(weight, weight.data[:2])
    (2 * weight).sum().backward()
    assert weight.grad.tolist() == [2, 2]
    assert calls == [2]
    assert kept.item() == 4


def test_a_recomputation_runs_inside_the_backward_and_a_forward_does_not():
    seen: list[bool] = []

    def region(x: Tensor) -> Tensor:
        seen.append(compat.in_backward())
        return x.sin()

    with relying_on("torch", "torch._C._current_graph_task_id"):
        checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
        assert seen == [False, True]
        assert not compat.in_backward()


def test_a_reentrant_checkpoint_is_told_from_an_evaluation():
    seen: list[tuple[bool, bool]] = []

    def region(x: Tensor) -> Tensor:
        seen.append((compat.in_reentrant_checkpoint(), torch.is_grad_enabled()))
        return x.sin()

    with relying_on("torch", "torch.utils.checkpoint.CheckpointFunction.forward"):
        checkpoint(region, torch.ones(2, requires_grad=True), use_reentrant=True).sum().backward()
        with torch.no_grad():
            region(torch.ones(2))
            with pytest.warns(UserWarning, match="requires_grad"):
                checkpoint(region, torch.ones(2), use_reentrant=True)
        assert seen == [(True, False), (False, True), (False, False), (False, False)]


class TwoLayers(nn.Module):
    def __init__(self, value: float):
        super().__init__()
        self.shared, self.own = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.shared(x))


def under_ddp() -> tuple[list[float], list[float], list[str]]:
    rank = dist.get_rank()
    model = TwoLayers(1.0 + rank)
    compat.exclude_from_ddp(model, ["own.weight"])
    wrapped = DistributedDataParallel(model)
    weights = [p.item() for p in model.parameters()]
    wrapped(torch.full((1, 1), 1.0 + rank)).sum().backward()
    holders = compat.holders_of_process_group(wrapped)
    grads = [parameter.grad.item() for parameter in model.parameters() if parameter.grad is not None]
    return weights, grads, [type(holder).__name__ for holder in holders]


def test_excluded_parameters_are_neither_broadcast_nor_averaged_by_ddp():
    with relying_on("torch", "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"):
        (first, first_grads, holders), (second, second_grads, _) = run_distributed(under_ddp, 2)
        assert (first, second) == ([1.0, 1.0], [1.0, 2.0])
        # shared: x * own, averaged over ranks; own: x * shared, each its own
        assert first_grads == [(1 * 1 + 2 * 2) / 2, 1.0]
        assert second_grads == [(1 * 1 + 2 * 2) / 2, 2.0]
    with relying_on("torch", "DistributedDataParallel.reducer or .logger"):
        assert holders == ["Reducer", "Logger"]


def test_names_under_torch_compile_are_those_without_it():
    model = nn.Sequential(nn.Linear(1, 1), TwoLayers(1.0))
    compiled = copy.deepcopy(model)
    compiled[1] = torch.compile(compiled[1], backend="eager")  # type: ignore[index]
    with relying_on("torch", "the name of what torch.compile wraps"):
        wrapped = [name for name, _ in torch.compile(compiled, backend="eager").named_parameters()]
        plain = [name for name, _ in model.named_parameters()]
        assert wrapped != plain
        assert [compat.without_compile_prefix(name) for name in wrapped] == plain


def world_timeout() -> float:
    return compat.timeout_of().total_seconds()


def test_a_process_group_knows_its_time_out():
    with relying_on("torch", "ProcessGroup._get_backend, options._timeout"):
        assert set(run_distributed(world_timeout, 2)) == {1800.0}


def test_persistent_workers_are_started_anew_with_a_new_iterator():
    loader = DataLoader(range(2), num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    with relying_on("torch", "DataLoader._iterator"):
        first = compat.new_iterator(loader)
        assert iter(loader) is first
        assert compat.new_iterator(loader) is not first


# --- Accelerate --------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerate_state() -> Iterator[None]:
    accelerate_compat.reset_accelerator_state()
    yield
    accelerate_compat.reset_accelerator_state()


@pytest.mark.usefixtures("accelerate_state")
def test_a_model_that_is_marked_as_prepared_is_returned_as_it_is():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plain, marked = nn.Linear(1, 1), nn.Linear(1, 1)
    accelerate_compat.mark_as_prepared(marked)
    with relying_on("accelerate", "_is_accelerate_prepared"):
        accelerator.prepare(plain)
        accelerator.prepare(marked)
        assert "forward" in vars(plain), "Accelerate gives a model autocast by replacing its forward"
        assert "forward" not in vars(marked)


@pytest.mark.usefixtures("accelerate_state")
def test_a_model_prepared_for_evaluation_can_be_prepared_again():
    accelerator, model = Accelerator(cpu=True, mixed_precision="bf16"), nn.Linear(1, 1)
    plain = model.forward
    with relying_on("accelerate", "_is_accelerate_prepared or _original_forward"):
        accelerator.prepare_model(model, evaluation_mode=True)
        assert accelerate_compat.is_marked_as_prepared(model)
        assert model.forward != plain
        accelerate_compat.undo_prepare_for_evaluation(model)
        assert not accelerate_compat.is_marked_as_prepared(model)
        assert model.forward == plain
        accelerate_compat.undo_prepare_for_evaluation(model)
        assert model.forward == plain


@pytest.mark.usefixtures("accelerate_state")
def test_saved_states_leave_out_models_and_optimizers(tmp_path: Path):
    accelerator, kept, left_out = Accelerator(cpu=True), nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(left_out.parameters())
    prepared, *_ = accelerator.prepare(kept, left_out, optimizer)
    assert accelerate_compat.models_of(accelerator) == [kept, left_out]
    with accelerate_compat.without_states(accelerator, left_out, optimizer):
        accelerator.save_state(str(tmp_path))
        with torch.no_grad():
            weight = kept.weight.clone()
            for model in (kept, left_out):
                model.weight.fill_(7)
        accelerator.load_state(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "random_states_0.pkl"}
    assert torch.equal(prepared.weight, weight)
    assert left_out.weight.item() == 7
    assert accelerate_compat.models_of(accelerator) == [kept, left_out]


def test_accelerators_state_is_forgotten():
    accelerate_compat.reset_accelerator_state()  # of an earlier test of this process
    Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    with relying_on("accelerate", "AcceleratorState._reset_state or GradientState._reset_state"):
        accelerate_compat.reset_accelerator_state()
        states: list[Any] = [AcceleratorState, GradientState, PartialState]
        assert [state._shared_state for state in states] == [{}, {}, {}]
        assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"


def test_the_launch_config_has_the_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from accelerate.commands.config import config_args

    path = tmp_path / "config.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: 'no'\n"
        "num_processes: 3\nuse_cpu: true\n"
    )
    with relying_on("accelerate", "commands.config.config_args"):
        for found in (str(path), None):
            monkeypatch.setattr(config_args, "default_config_file", str(path))
            config = accelerate_compat.launch_config(found)
            assert (config.num_processes, config.use_cpu) == (3, True)
        monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "none"))
        assert accelerate_compat.launch_config(None) is None


@pytest.mark.usefixtures("accelerate_state")
def test_wrapped_methods_of_the_accelerator_are_called(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []

    def noting(original: Any) -> Any:
        return lambda *args, **settings: (calls.append(original.__name__), original(*args, **settings))[1]

    names = ["__init__", "prepare", "prepare_model", "backward", "clip_grad_norm_"]
    for name in names:
        monkeypatch.setattr(Accelerator, name, getattr(Accelerator, name))  # undone after the test
        watch.wrap_method(Accelerator, name, noting)
    with relying_on("accelerate", "the methods of Accelerator that the doctor wraps"):
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(1, 1))
        accelerator.backward(model(torch.ones(1, 1)).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert calls == names
        assert "dataloader_config" in inspect.signature(Accelerator.__init__).parameters


def test_version_of_changes_in_place():
    with relying_on("torch", "Tensor._version"):
        parameter = nn.Parameter(torch.zeros(2))
        before = compat.version_of(parameter)
        with torch.no_grad():
            parameter.add_(1)
        assert compat.version_of(parameter) > before


def test_a_module_can_be_moved_by_something_else():
    with relying_on("torch", "nn.Module._apply"):
        moved, module = [], nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        compat.move_by(module[0], lambda part, change: moved.append((part, change(torch.zeros(1)).dtype)), ["weight"])
        module.double()
        assert moved == [(module[0], torch.float64)]
        assert [part.weight.dtype for part in module] == [torch.float32, torch.float64]
        assert {part.bias.dtype for part in module} == {torch.float64}
        compat.move_as_usual(module[0])
        assert {p.dtype for p in module.double().parameters()} == {torch.float64}


# --- transformers ------------------------------------------------------------------------------------------------


def small_moe(implementation: str) -> Any:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=4, moe_intermediate_size=2, num_experts=2, num_experts_per_tok=1)
    config._experts_implementation = implementation
    experts: Any = Qwen3MoeExperts(config)
    for number, parameter in enumerate(experts.parameters()):
        nn.init.constant_(parameter, 0.5 + number)
    return experts


def test_operations_without_values_are_seen_with_their_results():
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


def test_a_registered_experts_function_is_called_with_experts_tokens_ids_and_weights():
    seen: list[tuple[Any, ...]] = []

    def forward(experts: nn.Module, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        seen.append((experts, hidden_TD.shape, ids_TK.shape, weights_TK.shape))
        return hidden_TD * 2

    with relying_on("transformers", "ALL_EXPERTS_FUNCTIONS"):
        transformers_compat.register_experts_function("canary", forward)
        experts = small_moe("canary")
        out = experts(torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
        assert out.tolist() == torch.full((3, 4), 2.0).tolist()
        assert seen == [(experts, (3, 4), (3, 1), (3, 1))]


def test_the_gate_of_an_experts_module_is_applied_to_the_first_half_of_the_columns():
    with relying_on("transformers", "_apply_gate or _default_apply_gate of an experts module"):
        experts = small_moe("eager")
        assert transformers_compat.has_default_gate(experts)
        hidden = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        gated = transformers_compat.apply_gate(experts, hidden)
        assert gated.tolist() == (nn.functional.silu(hidden[:, :2]) * hidden[:, 2:]).tolist()


def test_an_experts_module_with_a_gate_of_its_own_is_not_taken_for_the_default():
    class Own(type(small_moe("eager"))):  # type: ignore[misc]
        def _apply_gate(self, hidden: Tensor) -> Tensor:
            return hidden

    own = small_moe("eager")
    own.__class__ = Own
    assert not transformers_compat.has_default_gate(own)


def test_weights_of_a_pretrained_model_can_be_loaded_by_something_else(tmp_path):
    from transformers import LlamaConfig, LlamaModel

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    whole = LlamaModel._from_config(LlamaConfig(**sizes, num_attention_heads=2), experts_implementation="eager")
    whole.save_pretrained(tmp_path)
    seen: list[Any] = []

    def load(theirs: Any, model: Any, state: Any, files: Any, config: Any, *rest: Any) -> Any:
        seen.extend([model.norm.weight.is_meta, state, [Path(file).name for file in files]])
        transformers_compat.mark_as_loaded(model.norm.weight)
        return theirs(model, state, files, config, *rest)

    with relying_on("transformers", "PreTrainedModel._load_pretrained_model"):
        with transformers_compat.weights_loaded_by(load):
            model = LlamaModel.from_pretrained(tmp_path)
        assert seen == [True, None, ["model.safetensors"]]
        LlamaModel.from_pretrained(tmp_path)
        assert len(seen) == 3
        assert torch.equal(model.norm.weight, whole.norm.weight)
    with relying_on("transformers", "config._experts_implementation"):
        assert transformers_compat.experts_implementation(whole.config) == "eager"


def test_transformers_tells_how_a_family_names_stacked_experts():
    with relying_on("transformers", "conversion_mapping.get_checkpoint_conversion_mapping"):
        names = dict(transformers_compat.names_of_stacked_experts("granitemoe"))
        assert names[r"block_sparse_moe\.input_linear\.weight"] == "block_sparse_moe.experts.gate_up_proj"
        assert transformers_compat.names_of_stacked_experts("no such family") == []


# --- datasets and wandb ------------------------------------------------------------------------------------------


def test_a_dataset_has_a_fingerprint_of_its_content():
    import datasets

    with relying_on("datasets", "Dataset._fingerprint"):
        same, again, other = (datasets.Dataset.from_dict({"text": [text]}) for text in ("a", "a", "b"))
        assert other_compat.fingerprint(same) == other_compat.fingerprint(again)
        assert other_compat.fingerprint(same) != other_compat.fingerprint(other)
        mapped = same.map(lambda row: {"text": row["text"] + "!"})
        assert other_compat.fingerprint(mapped) != other_compat.fingerprint(same)


def test_wandb_workspaces_sends_what_we_print():
    ws = pytest.importorskip("wandb_workspaces.workspaces")
    with relying_on("wandb_workspaces", "Workspace._to_model"):
        workspace = ws.Workspace(entity="me", project="digits", sections=[ws.Section(name="Training")])
        sent = json.loads(other_compat.workspace_as_json(workspace))
        assert sent["section"]["panelBankConfig"]["sections"][0]["name"] == "Training"


def test_wandbs_service_is_still_called_so():
    wandb = pytest.importorskip("wandb")
    with relying_on("wandb", "the name of its service"):
        binaries = [path for path in Path(wandb.__file__).parent.rglob("wandb-core*") if path.is_file()]
        assert binaries
        assert all(other_compat.is_wandb_service(path.name) for path in binaries)
    assert not other_compat.is_wandb_service("python")

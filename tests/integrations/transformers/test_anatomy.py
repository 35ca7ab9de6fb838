"""What is found in a transformers model, and losses that see all ranks' tokens."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.integrations.transformers.families import EXPERTS, FAMILIES, awaken, config, tokens
from tests.integrations.transformers.mixtures import build, outputs
from tests.support.helpers import run_distributed
from toolkit.errors import UserError, is_out_of_memory
from toolkit.experts.layer.losses import RouterPenalty, global_load, load_balancing_share
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import causal_lm, experts_modules, routers, save_pretrained, watch_routers
from toolkit.integrations.transformers.pretrained_files import Tensors, write_on_main, write_pretrained
from toolkit.integrations.transformers.router_watch import has_sigmoid_scores


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    return awaken(causal_lm(config(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_routers_are_found_in_every_family(family: str):
    model = model_of(family)
    layers = [1] if family == "deepseek_v3" else [0, 1]
    assert list(experts_modules(model)) == [f"model.layers.{layer}.mlp.experts" for layer in layers]
    assert {type(router).__name__.lower() for router in routers(model).values()} == {
        family.replace("_", "") + "topkrouter"
    }


def test_a_dense_model_has_no_experts_and_nothing_to_balance():
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = causal_lm(LlamaConfig(vocab_size=64, **sizes))
    assert experts_modules(model) == {}
    with pytest.raises(UserError, match="has no experts to balance"):
        watch_routers(model)


def prepare_sharded(folder: Path) -> str:
    """What `prepare` raises for a model that transformers has sharded."""
    from accelerate import Accelerator
    from transformers.distributed import DistributedConfig

    model = causal_lm(folder, distributed_config=DistributedConfig(fsdp_size=2, ep_size=2))
    with pytest.raises(UserError) as raised:
        ExpertParallel(Accelerator(cpu=True)).prepare(model, torch.optim.AdamW(model.parameters()))
    return str(raised.value)


def test_prepare_of_experts_that_transformers_has_sharded_raises(tmp_path: Path):
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers before 5.23 cannot shard them")
    model_of("qwen3_moe").save_pretrained(tmp_path)
    for message in run_distributed(prepare_sharded, 2, tmp_path):
        assert "has no experts that can be sharded" in message


def test_with_one_layer_the_balance_loss_is_transformers_own():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    settings = config("mixtral")
    settings.num_hidden_layers = 1
    torch.manual_seed(0)
    model: Any = awaken(causal_lm(settings))
    penalty = RouterPenalty(watch_routers(model), balance_weight=1.0)
    logits = model(input_ids=tokens(0, 4), output_router_logits=True).router_logits
    # Theirs counts each of the two choices of a token as a whole, so it is twice ours, which is 1 when balanced.
    assert 2 * penalty().item() == pytest.approx(load_balancing_loss_func(logits, EXPERTS, 2).item(), rel=1e-6)


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2", "hy_v3", "lfm2_moe", "flint", "cohere2_moe"])
def test_sigmoid_scores_are_balanced_as_shares_of_their_sum(family: str):
    model = build(family)
    for module in model.modules():
        if hasattr(module, "expert_selection_fn"):  # cohere2_moe has both
            module.expert_selection_fn = "sigmoid"
    penalty = RouterPenalty(watch_routers(model), balance_weight=1.0)
    ids = tokens(0, 4)
    outputs(model, ids)
    (watch,) = penalty.layers
    assert watch.routing is not None
    scores = watch.routing.logits_TE.sigmoid()
    share = scores / scores.sum(1, keepdim=True)
    expected = load_balancing_share(share, watch.last_load_E / watch.last_load_E.sum(), ids.numel(), share.shape[1])
    assert penalty().item() == pytest.approx(expected.item())


def test_the_score_of_a_router_is_read_from_its_weights_where_they_tell():
    logits = torch.randn(50, EXPERTS, generator=torch.Generator().manual_seed(0))
    for is_sigmoid, scores in ((True, logits.sigmoid()), (False, logits.softmax(-1))):
        for top_k, scale in ((1, 1.0), (1, 2.5), (2, 1.0)):
            weights, ids = scores.topk(top_k)
            assert has_sigmoid_scores(logits, scale * weights, ids) is is_sigmoid
            assert has_sigmoid_scores(logits.bfloat16(), (scale * weights).bfloat16(), ids) is is_sigmoid
        normalised = weights / weights.sum(-1, keepdim=True)
        assert has_sigmoid_scores(logits, normalised, ids) is is_sigmoid
    assert has_sigmoid_scores(torch.zeros_like(logits), torch.full_like(weights, 0.5), ids) is None
    assert has_sigmoid_scores(logits[:0], weights[:0], ids[:0]) is None


def enable_checkpointing(model: Any, *, use_reentrant: bool) -> None:
    """By the name that transformers has for it since 5.23, or the older one."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_neither_gradients_nor_what_was_routed(family: str):
    found = []
    for checkpointing in (False, True):
        model = model_of(family).train()
        penalty = RouterPenalty(watch_routers(model), balance_weight=1.0)
        if checkpointing:
            enable_checkpointing(model, use_reentrant=False)
        ids = tokens(0, 4)
        loss = model(input_ids=ids, labels=ids).loss + penalty()
        routed = [watch.routing for watch in penalty.layers]
        loss.backward()
        assert all(watch.routing is routing for watch, routing in zip(penalty.layers, routed, strict=True))
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((gradients, [watch.last_load_E.tolist() for watch in penalty.layers]))
    (plain, load), (again, load_again) = found
    assert load_again == load
    assert again.keys() == plain.keys()
    assert all(torch.allclose(again[name], gradient, rtol=1e-5, atol=1e-9) for name, gradient in plain.items())


def test_a_penalty_that_reentrant_checkpointing_would_leave_without_gradients_is_refused():
    model = model_of("mixtral").train()
    watch_routers(model)
    enable_checkpointing(model, use_reentrant=True)
    model.enable_input_require_grads()
    with pytest.raises(UserError, match=r"a routing without gradients.*use_reentrant.*False"):
        model(input_ids=tokens(0, 4))


def share_of_ranks(samples: int) -> tuple[float, float, list[int]]:
    model = model_of("qwen3_moe")
    penalty = RouterPenalty(watch_routers(model), balance_weight=1.0, z_weight=0.5)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    model(input_ids=tokens(0, samples)[rank * samples // world : (rank + 1) * samples // world])
    share = penalty()
    share.backward()
    weight = next(iter(routers(model).values())).weight
    return share.item(), weight.grad.norm().item(), global_load(penalty.layers).sum(1).tolist()


def test_the_shares_of_ranks_add_up_to_the_loss_of_the_whole_batch():
    whole, _, load = share_of_ranks(4)
    ranks = run_distributed(share_of_ranks, 2, 4)
    assert sum(share for share, _, _ in ranks) == pytest.approx(whole, rel=1e-6)
    assert all(rank[2] == load for rank in ranks)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save_pretrained(model_of("mixtral"), tmp_path / "file" / "folder")


def saved_by_the_model(folder: Path) -> list[str]:
    """What Accelerate's and transformers' ways to save write, and what is refused."""
    from accelerate import Accelerator
    from transformers.utils.hub import PushToHubMixin

    accelerator, model = Accelerator(cpu=True), model_of("qwen3_moe")
    wrapped, _ = ExpertParallel(accelerator).prepare(model, torch.optim.AdamW(model.parameters()))
    inner = accelerator.unwrap_model(wrapped)
    inner.save_pretrained(folder / "collective")
    for size in ("1GB", "100KB", "20KB"):  # one file, then several in its place, then others
        inner.save_pretrained(folder / "in parts", max_shard_size=size)
    inner.save_pretrained(
        folder / "given", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(wrapped)
    )
    uploads = []

    def push_to_hub(self: Any, repo_id: str) -> None:
        uploads.append(repo_id)
        self.save_pretrained(folder / repo_id, max_shard_size="1MB")

    with mock.patch.object(PushToHubMixin, "push_to_hub", push_to_hub):
        inner.push_to_hub("pushed")
    dist.barrier()
    if accelerator.is_main_process:
        with pytest.raises(UserError, match=r"'model.layers.0.mlp.experts.*has the experts of one rank"):
            inner.save_pretrained(folder / "part", state_dict=dict(model.named_parameters()))
    assert not (folder / "part").exists()
    assert len(uploads) == accelerator.is_main_process
    return sorted(path.name for path in folder.iterdir())


def test_a_models_own_savers_write_the_whole_model(tmp_path: Path):
    for names in run_distributed(saved_by_the_model, 2, tmp_path):
        assert names == ["collective", "given", "in parts", "pushed"]
    expected = model_of("qwen3_moe").state_dict()
    for folder in tmp_path.iterdir():
        found = causal_lm(folder).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), folder
    index = json.loads((tmp_path / "in parts/model.safetensors.index.json").read_text())
    assert {path.name for path in (tmp_path / "in parts").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        *index["weight_map"].values(),
    }
    assert len(set(index["weight_map"].values())) > 4
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())


class Unsavable(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        raise self.error


def errors_of_saving(folder: Path) -> list[Exception]:
    found = []
    for error in (
        ValueError("a setting that cannot be saved"),
        Exception("No space left on device (os error 28)"),  # as of the library tokenizers
        MemoryError(),
    ):
        with pytest.raises((RuntimeError, UserError)) as raised:
            write_pretrained(Unsavable(error), folder, [Tensors(0, lambda _: None)])
        found.append(raised.value)
    return found


def test_a_model_that_rank_0_cannot_write_ends_all_ranks_with_the_reason(tmp_path: Path):
    for bug, disk, memory in run_distributed(errors_of_saving, 2, tmp_path):
        assert (type(bug), str(bug)) == (RuntimeError, "a setting that cannot be saved on rank 0")
        assert isinstance(disk, UserError)
        assert f"{tmp_path}: cannot be written (No space left on device (os error 28)" in str(disk)
        assert is_out_of_memory(memory)
    assert not any(tmp_path.iterdir())


class Uploaded(nn.Module):
    """Notes where it is saved, of which transformers makes the name of an upload."""

    def save_pretrained(self, folder: Path, **_: Any) -> None:
        self.folders = [*getattr(self, "folders", ()), folder]


def test_a_model_that_is_uploaded_as_it_is_saved_is_whole_and_has_the_name_of_its_folder(tmp_path: Path):
    model = Uploaded()
    two_files = [Tensors(10, lambda _: None), Tensors(10, lambda _: None)]
    write_pretrained(model, tmp_path / "mine", two_files, max_shard_size="10B", push_to_hub=True)
    assert [folder.name for folder in model.folders] == ["mine"]


SIZES = {"one file": "1GB", "in parts": "20KB"}


def saved_as(files: str, folder: Path, fails: Callable[[], None] | None = None) -> None:
    """Save a small mixture as one file, or as more than five; with `fails` one of other values, after the first part
    of it."""
    model = model_of("mixtral")
    shard_experts(model, ExpertGroups())
    if fails is None:
        save_pretrained(model, folder, max_shard_size=SIZES[files])
        return
    with torch.no_grad():
        next(model.parameters()).zero_()
    save = type(model).save_pretrained

    def save_and_fail(*args: Any, **options: Any) -> None:
        save(*args, **options)
        fails()

    with mock.patch.object(type(model), "save_pretrained", save_and_fail):
        save_pretrained(model, folder, max_shard_size=SIZES[files])


def _has_no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("files", SIZES)
def test_a_save_that_fails_midway_leaves_the_model_that_was_there(files: str, tmp_path: Path):
    saved_as(files, tmp_path)
    before = _files(tmp_path)
    assert (len(before) > 5) == (files == "in parts")
    with pytest.raises(UserError, match=r"cannot be written \(.*No space left"):
        saved_as(files, tmp_path, _has_no_room)
    with pytest.raises(AssertionError, match="died without a word"):
        run_distributed(saved_as, 1, files, tmp_path, _is_killed)
    assert _files(tmp_path) == before
    saved_as(files, tmp_path)  # clears away what is left
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


INDEX = "model.safetensors.index.json"


def write_model(version: str, count: int, folder: Path) -> None:
    """Files of a model as `count` of them, all of which say which version they are of."""
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for name in names if count > 1 else ["model.safetensors"]:
        (folder / name).write_text(version)
    if count > 1:
        (folder / INDEX).write_text(json.dumps({"weight_map": {name: name for name in names}}))


def versions_in(folder: Path) -> set[str]:
    """Those of which `from_pretrained` would read files; none where it would find no model."""
    names = ["model.safetensors"]
    if not (folder / names[0]).exists():
        index = folder / INDEX
        names = list(json.loads(index.read_text())["weight_map"].values()) if index.exists() else []
    return {(folder / name).read_text() for name in names}


@contextmanager
def stopped_after(count: int) -> Iterator[list[str]]:
    """Lets `count` files be renamed or removed, and no more; yields what was called."""
    called: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        call = getattr(Path, name)

        def unless_stopped(*args: Any, **options: Any) -> Any:
            called.append(name)
            if len(called) > count:
                raise KeyboardInterrupt
            return call(*args, **options)

        return unless_stopped

    methods = {name: watched(name) for name in ("replace", "unlink")}
    with mock.patch.multiple(Path, **methods), suppress(KeyboardInterrupt):
        yield called


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 1), (3, 4), (3, 3)])
def test_a_save_that_is_stopped_at_any_moment_leaves_no_files_of_two_models(before: int, after: int, tmp_path: Path):
    write_on_main(tmp_path / "new", partial(write_model, "new", after))
    found: list[set[str]] = []
    for count in itertools.count():
        folder = tmp_path / str(count)
        write_on_main(folder, partial(write_model, "old", before))
        with stopped_after(count) as called:
            write_on_main(folder, partial(write_model, "new", after))
        found.append(versions_in(folder))
        if len(called) <= count:
            break
    assert found[0] == {"old"}
    assert found[-1] == {"new"}
    assert _files(folder) == _files(tmp_path / "new")
    # While files of the same names are replaced, there is no model.
    between = [set()] if before == after > 1 else []
    assert all(versions in [{"old"}, {"new"}, *between] for versions in found)

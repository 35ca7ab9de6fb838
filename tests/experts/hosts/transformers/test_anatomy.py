"""What is found in a transformers model, and losses that see all ranks' tokens."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.experts.hosts.transformers.families import EXPERTS, FAMILIES, awaken, config, tokens
from tests.experts.hosts.transformers.mixtures import build, outputs
from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.experts.hosts.loop.engine import ExpertParallel
from toolkit.experts.hosts.loop.pretrained_files import Tensors, write_pretrained
from toolkit.experts.hosts.spreading.spread import spread_experts
from toolkit.experts.hosts.transformers import causal_lm, experts_modules, routers, save_pretrained, watch_routers
from toolkit.experts.hosts.transformers.router_watch import has_sigmoid_scores
from toolkit.experts.layer.losses import RouterPenalty, global_load, load_balancing_share
from toolkit.experts.parallel.groups import ExpertGroups


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
    expected = load_balancing_share(share, watch.last_load_E / watch.last_load_E.sum(), ids.numel())
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
    with pytest.raises(UserError, match=r"balance nothing: .*use_reentrant.*False"):
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


def test_a_model_that_is_neither_here_nor_in_the_cache_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="model no/such-model-anywhere cannot be built"):
        causal_lm("no/such-model-anywhere")


def test_an_unknown_experts_implementation_is_refused_in_one_sentence():
    with pytest.raises(UserError, match="MixtralConfig cannot be built") as refused:
        causal_lm(config("mixtral"), experts_implementation="no_such_thing")
    assert "\n" not in str(refused.value)


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
    """Cannot be written, for a reason that is not the disk's."""

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        raise ValueError("a setting that cannot be saved")


def error_of_saving() -> str:
    try:
        write_pretrained(Unsavable(), "nowhere", [Tensors(0, lambda _: None)])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_a_model_that_rank_0_cannot_write_ends_all_ranks():
    assert run_distributed(error_of_saving, 2) == ["RuntimeError: a setting that cannot be saved on rank 0"] * 2


def in_parts(folder: Path, fails: Callable[[], None] | None = None) -> None:
    """Save a small mixture as more than five files; with `fails` one of other values, after two parts of it."""
    model = model_of("mixtral")
    spread_experts(model, ExpertGroups())
    if fails is None:
        save_pretrained(model, folder, max_shard_size="20KB")
        return
    with torch.no_grad():
        next(model.parameters()).zero_()
    save, calls = type(model).save_pretrained, []

    def save_twice(*args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) > 2:
            fails()
        save(*args, **options)

    with mock.patch.object(type(model), "save_pretrained", save_twice):
        save_pretrained(model, folder, max_shard_size="20KB")


def _has_no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_save_in_parts_that_fails_midway_leaves_the_model_that_was_there(tmp_path: Path):
    in_parts(tmp_path)
    before = _files(tmp_path)
    assert len(before) > 5
    with pytest.raises(UserError, match=r"cannot be written \(.*No space left"):
        in_parts(tmp_path, _has_no_room)
    with pytest.raises(AssertionError, match="died without a word"):
        run_distributed(in_parts, 1, tmp_path, _is_killed)
    assert _files(tmp_path) == before
    in_parts(tmp_path)  # clears away what is left
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_transformers_model_has_the_scopes_of_our_own_layers():
    model = model_of("mixtral")
    watches = watch_routers(model)
    model(input_ids=tokens(0, 4))
    shares = [RouterPenalty(watches, balance_weight=1.0, balance_scope=scope)() for scope in ("global", "local")]
    assert shares[0].item() == shares[1].item(), "one process has all tokens"
    with pytest.raises(UserError, match="balance_scope='sequence'"):
        RouterPenalty(watches, balance_weight=1.0, balance_scope="sequence")()

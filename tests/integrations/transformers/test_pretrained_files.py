"""Models with sharded experts are saved as ordinary transformers weights, and failures keep the older model."""

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

from benchmarks.support.families import model_of
from benchmarks.support.processes import run_distributed
from tests.integrations.transformers.training import prepare
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError, is_out_of_memory
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.transformers import causal_lm, save_pretrained
from toolkit.integrations.transformers.language_models import read_config
from toolkit.integrations.transformers.pretrained_files import Tensors, write_on_main, write_pretrained

INDEX = "model.safetensors.index.json"


def save_by_model_methods(folder: Path) -> None:
    from transformers.utils.hub import PushToHubMixin

    model = model_of("qwen3_moe")
    experts, wrapped, _ = prepare(model)
    accelerator = experts.accelerator
    inner = accelerator.unwrap_model(wrapped)
    inner.save_pretrained(folder / "collective")
    for size in ("1GB", "100KB", "20KB"):  # one file, replaced by several, replaced by others
        inner.save_pretrained(folder / "sharded", max_shard_size=size)
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


def test_save_pretrained_and_push_to_hub_write_all_experts(tmp_path: Path):
    run_distributed(save_by_model_methods, 2, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"collective", "given", "pushed", "sharded"}
    expected = model_of("qwen3_moe").state_dict()
    for folder in tmp_path.iterdir():
        torch.testing.assert_close(causal_lm(folder).state_dict(), expected, rtol=0, atol=0)
    index = json.loads((tmp_path / "sharded" / INDEX).read_text())
    files = {*index["weight_map"].values()}
    found = {path.name for path in (tmp_path / "sharded").iterdir()}
    assert found == {"config.json", "generation_config.json", INDEX, *files}
    assert len(files) > 4
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())


def model_with(save_pretrained: mock.Mock) -> nn.Module:
    return type("Model", (nn.Module,), {"save_pretrained": save_pretrained})()


def errors_of_saving(folder: Path) -> list[Exception]:
    found = []
    for error in (
        ValueError("a setting that cannot be saved"),
        Exception("No space left on device (os error 28)"),  # raised by tokenizers
        MemoryError(),
    ):
        with pytest.raises((RuntimeError, UserError)) as raised:
            write_pretrained(model_with(mock.Mock(side_effect=error)), folder, [Tensors(0, lambda _: None)])
        found.append(raised.value)
    return found


def test_write_pretrained_error_on_rank_0_raises_on_all_ranks(tmp_path: Path):
    for bug, disk, memory in run_distributed(errors_of_saving, 2, tmp_path):
        assert (type(bug), str(bug)) == (RuntimeError, "a setting that cannot be saved on rank 0")
        assert isinstance(disk, UserError)
        assert f"{tmp_path}: cannot be written (No space left on device (os error 28)" in str(disk)
        assert is_out_of_memory(memory)
    assert not any(tmp_path.iterdir())


def test_write_pretrained_with_push_to_hub_saves_once_in_named_folder(tmp_path: Path):
    save_pretrained = mock.Mock()
    two_files = [Tensors(10, lambda _: None), Tensors(10, lambda _: None)]
    write_pretrained(
        model_with(save_pretrained), tmp_path / "my-model", two_files, max_shard_size="10B", push_to_hub=True
    )
    assert [call.args[1].name for call in save_pretrained.call_args_list] == ["my-model"]


def save(size: str, folder: Path, scale: float = 1.0, fail: Callable[[], object] = dict) -> None:
    """Save a model with a scaled weight in files of `size`, and call `fail` after the first file."""
    model = model_of("mixtral")
    shard_experts(model, ExpertGroups())
    next(model.parameters()).data *= scale
    write = type(model).save_pretrained

    def write_and_fail(*args: Any, **options: Any) -> None:
        write(*args, **options)
        fail()

    with mock.patch.object(type(model), "save_pretrained", write_and_fail):
        save_pretrained(model, folder, max_shard_size=size)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_failed_save_pretrained_keeps_older_model(size: str, tmp_path: Path):
    save(size, tmp_path)
    before = _files(tmp_path)
    assert (len(before) > 5) == (size == "20KB")
    full_disk = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(UserError, match=r"cannot be written \(.*No space left"):
        save(size, tmp_path, 2.0, full_disk)
    with pytest.raises(AssertionError, match="exited without a result"):
        run_distributed(save, 1, size, tmp_path, 2.0, _kill)
    assert _files(tmp_path) == before
    save(size, tmp_path)  # deletes the remains
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def write_model(version: str, count: int, folder: Path) -> None:
    """Write a model in `count` files, each with its version."""
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for name in names if count > 1 else ["model.safetensors"]:
        (folder / name).write_text(version)
    if count > 1:
        (folder / INDEX).write_text(json.dumps({"weight_map": {name: name for name in names}}))


def versions_in(folder: Path) -> set[str]:
    """Return the versions of the files that `from_pretrained` would read."""
    names = ["model.safetensors"]
    if not (folder / names[0]).exists():
        index = folder / INDEX
        names = list(json.loads(index.read_text())["weight_map"].values()) if index.exists() else []
    return {(folder / name).read_text() for name in names}


@contextmanager
def interrupt_after(count: int) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt after `count` renamed or removed files; yields the called methods."""
    called: list[str] = []

    def interrupting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call_or_interrupt(*args: Any, **options: Any) -> Any:
            called.append(method.__name__)
            if len(called) > count:
                raise KeyboardInterrupt
            return method(*args, **options)

        return call_or_interrupt

    methods = {"replace": interrupting(Path.replace), "unlink": interrupting(Path.unlink)}
    with mock.patch.multiple(Path, **methods), suppress(KeyboardInterrupt):
        yield called


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 1), (3, 4), (3, 3)])
def test_interrupted_save_leaves_files_of_one_model(before: int, after: int, tmp_path: Path):
    write_on_main(tmp_path / "new", partial(write_model, "new", after))
    found: list[set[str]] = []
    for count in itertools.count():
        folder = tmp_path / str(count)
        write_on_main(folder, partial(write_model, "old", before))
        with interrupt_after(count) as called:
            write_on_main(folder, partial(write_model, "new", after))
        found.append(versions_in(folder))
        if len(called) <= count:
            break
    assert found[0] == {"old"}
    assert found[-1] == {"new"}
    assert _files(folder) == _files(tmp_path / "new")
    # There is no model while files of the same names are replaced.
    between = [set()] if before == after > 1 else []
    assert all(versions in [{"old"}, {"new"}, *between] for versions in found)


CODE = '__import__("pathlib").Path(__file__).with_name("ran").touch()'


@pytest.mark.parametrize("load", [causal_lm, read_config, Tokenizer])
def test_load_of_folder_with_custom_code_raises(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    names |= {"AutoTokenizer": ["code.Tokenizer", None]}
    config = {"model_type": "unknown", "auto_map": names, "tokenizer_class": "Unknown"}
    (tmp_path / "code.py").write_text(CODE)
    for file in ("config.json", "tokenizer_config.json"):
        (tmp_path / file).write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    with pytest.raises(ValueError, match="contains custom code"):
        load(str(tmp_path))
    assert questions == []
    assert not [*tmp_path.rglob("ran")]

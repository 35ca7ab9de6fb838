"""Contents, verification, retention and atomic writes of checkpoints."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.support.small_run import SmallConfig, SmallModel
from tests.support.special_files import replace_by_pipe
from toolkit.checkpoint.checkpoint import begin_checkpoint, load_checkpoint
from toolkit.checkpoint.finding import find_checkpoint
from toolkit.checkpoint.retention import drop_older
from toolkit.data.identity import identity_of_length
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.ownership import mark_owned
from toolkit.experts.placement.placement import EMPTY_ROW
from toolkit.experts.sharding.shard import shard_experts
from toolkit.experts.state import checkpoint_files, manifest
from toolkit.experts.state.tensor_files import SavedTensors, load_optimizer
from toolkit.run.storage import Storage
from toolkit.train.optim import build_optimizer


class OneRank:
    """The part of `Run` that checkpoints use."""

    def __init__(self, config: tk.RunConfig | None = None):
        self.config = config or SmallConfig()
        self.data: dict = {}
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.is_main = self.owns_folder = self.rank == 0
        self.ranks_here = list(range(self.world_size))
        self.storage: Storage | None = None
        self.lines: list[str] = []

    on_main_and_share = tk.Run.on_main_and_share

    def print(self, text: str) -> None:
        if self.is_main:
            self.lines.append(text)


Pair = tuple[SmallModel, torch.optim.Optimizer]


def trained(groups: ExpertGroups | None = None, *, steps: int = 2, experts: int = 4, spare_slots: int = 0) -> Pair:
    """Return a model and its optimizer, with values that depend on uid, parameter and `steps`."""
    torch.manual_seed(0)
    model = SmallModel(groups or ExpertGroups(), experts)
    if spare_slots:
        shard_experts(model, ExpertGroups(), spare_slots=spare_slots)
    optimizer = build_optimizer(model, tk.RunConfig(lr=0.1))
    for step in range(steps):
        for place, parameter in enumerate(model.parameters()):
            ids = getattr(parameter, "ownership", None)
            rows = range(len(parameter)) if ids is None else ids.row_ids
            value = torch.tensor([1.0 + row * 10 + place + step for row in rows])
            parameter.grad = torch.sin(value).view(-1, *[1] * (parameter.ndim - 1)).expand_as(parameter).clone()
        optimizer.step()
    model.moe.router.bias += steps
    return model, optimizer


def state_at(step: int) -> dict[str, Any]:
    return {"step": step, "callbacks": {"Some": {"of": "these"}}}


def with_rows(row_ids: tuple[int, ...], steps: int = 2) -> Pair:
    pair = trained(steps=steps)
    for name in ("up", "down"):
        mark_owned(getattr(pair[0].moe.experts, name), row_ids=row_ids, groups=ExpertGroups())
    return pair


def save(folder: Path, pair: Pair, step: int, keep: int = 2, run: OneRank | None = None) -> Path | None:
    run = run or OneRank()
    return begin_checkpoint(folder, model=pair[0], optimizer=pair[1], state=state_at(step), keep=keep, run=run)(None)


def load(path: Path, pair: Pair, run: OneRank | None = None) -> dict[str, Any]:
    return load_checkpoint(path, model=pair[0], optimizer=pair[1], run=run or OneRank())


def numbers(pair: Pair) -> Iterator[tuple[str, torch.Tensor]]:
    model, optimizer = pair
    yield from model.state_dict(keep_vars=True).items()
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            yield f"{name}.{key}", value


def assert_same(one: Pair, other: Pair) -> None:
    left, right = dict(numbers(one)), dict(numbers(other))
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("steps", [0, 5])
def test_load_restores_weights_and_states_bitwise_and_in_place(steps, tmp_path):
    then, now = trained(), trained(steps=steps)
    path = save(tmp_path, then, 7)
    assert path == tmp_path / "step-00000007"
    places = {name: tensor.data_ptr() for name, tensor in now[0].state_dict().items()}
    assert load(path, now) == state_at(7)
    assert_same(now, then)
    assert places == {name: tensor.data_ptr() for name, tensor in now[0].state_dict().items()}
    assert checkpoint_files.load(path, *trained(steps=0))["step"] == 7


def test_load_keeps_the_memory_format_of_weights_for_moments(tmp_path):
    """Fused optimizers step weights and moments in memory order."""
    images = torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    expected, loaded = (torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    optimizers = [build_optimizer(model, tk.RunConfig(lr=0.1)) for model in (expected, loaded)]

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()

    step(expected, optimizers[0])
    checkpoint_files.save(tmp_path / "saved", expected, optimizers[0])
    checkpoint_files.load(tmp_path / "saved", loaded, optimizers[1])
    step(expected, optimizers[0])
    step(loaded, optimizers[1])
    assert torch.equal(expected.weight, loaded.weight)


def test_save_writes_rows_under_uids_and_everything_else_once(tmp_path):
    pair = trained()
    path = save(tmp_path, pair, 7)
    names = ["experts-00000.safetensors", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert sorted(file.name for file in path.iterdir()) == sorted([*names, manifest.NAME])
    with safe_open(path / names[0], "pt") as file:
        states = ("", "/exp_avg", "/exp_avg_sq", "/step")
        assert set(file.keys()) == {f"moe.experts.{p}/{i}{s}" for p in ("up", "down") for i in range(4) for s in states}
        assert torch.equal(file.get_tensor("moe.experts.up/2")[0], pair[0].moe.experts.up[2])
    with safe_open(path / names[1], "pt") as file:
        assert "moe.router.bias" in file.keys()  # noqa: SIM118
        assert not any("experts" in key for key in file.keys())  # noqa: SIM118
    assert manifest.read_manifest(path)["rows"][names[0]]["moe.experts.up"] == [0, 1, 2, 3]


def test_empty_row_is_neither_saved_nor_overwritten(tmp_path):
    then, now = trained(spare_slots=1), trained(steps=0, spare_slots=1)
    up = now[0].moe.experts.up
    with torch.no_grad():
        up[4] = 7.0
    path = save(tmp_path, then, 7)
    assert manifest.read_manifest(path)["rows"]["experts-00000.safetensors"]["moe.experts.up"] == [0, 1, 2, 3]
    load(path, now)
    assert (up[4] == 7.0).all()
    assert torch.equal(up[:4], then[0].moe.experts.up[:4])
    assert then[1].state[then[0].moe.experts.up]["exp_avg"][4].any()
    assert not now[1].state[up]["exp_avg"][4].any()


def test_rank_that_owns_no_row_gets_empty_moments_and_shared_states(tmp_path):
    path = save(tmp_path, trained(steps=2), 7)
    model, optimizer = trained(steps=0)
    groups = ExpertGroups(ep_size=2, ep_rank=1)
    up = model.moe.experts.up
    mark_owned(up, row_ids=(2, 0, EMPTY_ROW, 3), groups=groups, rows_of_ranks=((0, 1, 2, 3), (2, 0, EMPTY_ROW, 3)))
    with SavedTensors() as tensors:
        tensors.open(path, manifest.read_manifest(path)["files"])
        load_optimizer(model, optimizer, tensors)
    state = optimizer.state[up]
    assert state["step"] == 2
    assert state["exp_avg"].shape == up.shape
    assert not state["exp_avg"].any()


def test_loss_scaling_is_restored(tmp_path):
    (model, optimizer), (other, fresh) = trained(), trained(steps=0)
    saved, loaded = (SimpleNamespace(optimizer=each, scaler=torch.amp.GradScaler("cpu")) for each in (optimizer, fresh))
    saved.scaler.load_state_dict(saved.scaler.state_dict() | {"scale": 1024.0, "_growth_tracker": 17})
    load(save(tmp_path, (model, saved), 7), (other, loaded))
    assert loaded.scaler.state_dict() == saved.scaler.state_dict()


def error_of(folder: Path, pair: Pair, run: OneRank | None = None) -> str:
    before = {name: value.detach().clone() for name, value in numbers(pair)}
    placement = pair[0].moe.placement
    with pytest.raises(tk.UserError) as caught:
        load(find_checkpoint(folder, OneRank()), pair, run)
    for name, value in numbers(pair):
        assert torch.equal(value, before[name]), f"{name} was changed"
    assert pair[0].moe.placement == placement
    return str(caught.value)


def in_float64() -> Pair:
    model, optimizer = trained(steps=0)
    return model.double(), optimizer


def with_sgd() -> Pair:
    model = trained()[0]
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("saved", "present", "message"),
    [
        (lambda: trained(experts=6), trained, "'moe.router.weight' is float32[6, 16] and this run's is float32[4, 16]"),
        (lambda: with_rows((0, 1, 2, 9)), lambda: with_rows((0, 1, 2, EMPTY_ROW)), "it holds 'moe.experts.down/9'"),
        (lambda: with_rows((0, 1, 2, EMPTY_ROW)), trained, "it lacks 'moe.experts.up/3'"),
        (trained, in_float64, "'stem.weight' is float32[16, 8] and this run's is float64[16, 8]"),
        (trained, with_sgd, "made with the optimizer AdamW and this run has SGD"),
    ],
)
def test_load_of_another_model_or_optimizer_raises_before_anything_is_changed(saved, present, message, tmp_path):
    save(tmp_path, saved(), 7)
    assert message in error_of(tmp_path, present())


def test_load_with_other_settings_raises_if_they_affect_results(tmp_path):
    path = save(tmp_path, trained(), 7)
    load(path, trained(steps=0), OneRank(SmallConfig(log_every=7, tracker="none")))
    message = error_of(tmp_path, trained(), OneRank(SmallConfig(lr=0.5)))
    assert "it was made with lr 0.001 and this run has 0.5. Use" in message


def test_load_with_other_data_raises(tmp_path):
    then, now = OneRank(), OneRank()
    then.data, now.data = ({"train": identity_of_length(rows)} for rows in (3, 4))
    path = save(tmp_path, trained(), 7, run=then)
    load(path, trained(steps=0), then)
    assert "it was made with train data of 3 rows" in error_of(tmp_path, trained(), now)


def test_checkpoint_of_another_format_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "FORMAT", 2)
    save(tmp_path, trained(), 7)
    monkeypatch.undo()
    assert "has format 2, and this version reads format 1" in error_of(tmp_path, trained())


def flip(file: Path, seed: int) -> None:
    data = bytearray(file.read_bytes())
    bit = random.Random(seed).randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def swap(file: Path) -> None:
    other = next(f for f in sorted(file.parent.iterdir()) if f != file)
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"flipped bit {seed}": lambda file, seed=seed: flip(file, seed) for seed in range(2)},
    "truncated": lambda file: os.truncate(file, file.stat().st_size * 2 // 3),
    "emptied": lambda file: os.truncate(file, 0),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\n"),
    "missing": Path.unlink,
    "swapped with another": swap,
    "of another step": lambda file: shutil.copy(file.parent.with_name("step-00000003") / file.name, file),
}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    save(folder, trained(steps=1), 3)
    save(folder, trained(steps=2), 7)
    return folder


@pytest.fixture
def folder(two_checkpoints, tmp_path):
    """Checkpoints of steps 3 and 7."""
    return shutil.copytree(two_checkpoints, tmp_path / "checkpoints")


def warning_of(folder: Path) -> str:
    """Return the warning for the checkpoint of step 7, without its start."""
    run = OneRank()
    assert find_checkpoint(folder, run) == folder / "step-00000003"
    (line,) = run.lines
    start = "warning: checkpoint step-00000007 is passed over: "
    assert line.startswith(start)
    return line.removeprefix(start)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["experts-00000", "model", "optimizer", "state.json", "manifest.json"])
def test_damaged_file_is_found_and_the_checkpoint_before_is_used(name, damage, folder):
    file = folder / "step-00000007" / (name if "." in name else f"{name}.safetensors")
    DAMAGES[damage](file)
    warning_of(folder)
    with pytest.raises(tk.UserError, match="cannot be loaded, because"):
        checkpoint_files.load(folder / "step-00000007", *trained())
    pair = trained(steps=0)
    load(folder / "step-00000003", pair)
    assert_same(pair, trained(steps=1))


def link(file: Path) -> None:
    file.symlink_to(file.rename(file.parents[2] / file.name))


def name_a_file_of_another_folder(file: Path) -> None:
    about = manifest.read_manifest(file.parent)
    about["files"]["../step-00000003/model.safetensors"] = about["files"]["model.safetensors"]
    file.write_text(manifest.canonical(about | {"digest": manifest.digest(about)}))


@pytest.mark.parametrize(
    ("name", "tamper", "message"),
    [
        *((name, link, f"{name} cannot be read (it is a link") for name in ("model.safetensors", manifest.NAME)),
        *(
            (name, replace_by_pipe, f"{name} cannot be read (it is a link")
            for name in ("model.safetensors", manifest.NAME)
        ),
        (manifest.NAME, lambda file: os.truncate(file, 2**40), "cannot be read (it has 1,099,511,627,776 bytes)"),
        (manifest.NAME, name_a_file_of_another_folder, "names a file of another folder"),
    ],
)
def test_tampered_checkpoint_is_passed_over(name, tamper, message, folder):
    tamper(folder / "step-00000007" / name)
    assert message in warning_of(folder)


def test_folder_renamed_to_another_step_is_passed_over(folder):
    (folder / "step-00000003").rename(folder / "step-00000009")
    run = OneRank()
    assert find_checkpoint(folder, run).name == "step-00000007"
    assert run.lines == ["warning: checkpoint step-00000009 is passed over: its files are from step 3."]


def test_repeated_save_replaces_a_damaged_checkpoint_only(folder):
    before = (folder / "step-00000007").stat().st_ino
    assert save(folder, trained(steps=2), 7) == folder / "step-00000007"
    assert (folder / "step-00000007").stat().st_ino == before
    flip(folder / "step-00000007" / "model.safetensors", 0)
    assert save(folder, trained(steps=2), 7, keep=1) == folder / "step-00000007"
    assert [path.name for path in folder.iterdir()] == ["step-00000007"]
    assert find_checkpoint(folder, OneRank()).name == "step-00000007"


def test_later_damaged_checkpoint_does_not_count_among_kept(folder):
    flip(folder / "step-00000007" / "model.safetensors", 0)
    save(folder, trained(steps=2), 5, keep=1)
    assert find_checkpoint(folder, OneRank()).name == "step-00000005"


def test_full_disk_deletes_neither_the_best_nor_the_newest_checkpoint(folder):
    save(folder, trained(steps=3), 9, keep=3)
    drop_older(folder, 11, 3, lambda _: None, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000009"]


@pytest.mark.parametrize(
    ("capacity", "newest_is_damaged", "kept"),
    [(2.5, False, [7, 9]), (2.5, True, [3, 7]), (1.5, False, [3, 7])],
    ids=["older deleted", "last valid kept", "too little to free"],
)
def test_full_disk_deletes_older_checkpoints(capacity, newest_is_damaged, kept, folder, monkeypatch):
    size = sum(file.stat().st_size for file in (folder / "step-00000007").iterdir())
    if newest_is_damaged:
        flip(folder / "step-00000007" / "model.safetensors", 0)

    def usage(_: Path) -> Any:
        used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return shutil._ntuple_diskusage(int(size * capacity), used, int(size * capacity) - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    run = OneRank()
    assert (save(folder, trained(steps=3), 9, run=run) is not None) == (9 in kept)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in kept]
    (line,) = run.lines
    assert ("step-00000003 was deleted to make room for step 9." if 9 in kept else "the disk is full") in line


class Killed(BaseException):
    """Stand-in for a kill, which no handler may catch."""


def before_operations(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    """Call `before(name)` before each file operation of a save."""

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before(name)
            return original(*args, **kwargs)

        return call

    for owner, names in (
        (checkpoint_files, ["save_file"]),
        (Path, ["mkdir", "rename", "write_text"]),
        (manifest.os, ["fsync", "unlink", "rmdir"]),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))


def kill_at(point: int) -> Callable[[str], None]:
    left = iter(range(point))

    def kill(_: str) -> None:
        if next(left, None) is None:
            raise Killed

    return kill


def save_after(folder: Path, monkeypatch: pytest.MonkeyPatch, keep: int, before: Callable[[str], None]) -> None:
    for step in range(1, 1 + keep):
        save(folder, trained(steps=1), step, keep)
    with monkeypatch.context() as patch:
        before_operations(patch, before)
        save(folder, trained(steps=2), 7, keep)


@pytest.mark.parametrize("keep", [1, 3])
def test_kill_at_any_moment_of_a_save_leaves_a_checkpoint_to_continue_from(keep, tmp_path, monkeypatch):
    done: list[str] = []
    save_after(tmp_path / "undisturbed", monkeypatch, keep, done.append)
    published = done.index("rename")
    assert done[:published].count("fsync") == 6, "four files, the manifest and their folder reach the disk first"
    assert done[published:].count("fsync") == 1, "the folder of all checkpoints"
    assert done.count("rename") == 2, "publishes the new checkpoint and hides the old one"
    for point in range(len(done)):
        folder = tmp_path / str(point)
        with pytest.raises(Killed):
            save_after(folder, monkeypatch, keep, kill_at(point))
        run = OneRank()
        path = find_checkpoint(folder, run)
        assert path is not None, f"no checkpoint after a kill before {done[point]} number {point}"
        assert not run.lines
        assert path.name == ("step-00000007" if "rename" in done[:point] else f"step-{keep:08d}")
        pair = trained(steps=0)
        load(path, pair)
        assert_same(pair, trained(steps=2 if path.name == "step-00000007" else 1))
        save(folder, trained(steps=2), 8, keep)
        expected = [f"step-{step:08d}" for step in (*range(1, keep + 1), 7, 8)]
        kept = sorted(path.name for path in folder.iterdir())
        assert kept == sorted(set(kept) & set(expected))[-keep:]


def test_kill_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new(tmp_path, monkeypatch):
    def replaced(folder: Path, before: Callable[[str], None]) -> None:
        checkpoint_files.save(folder, *trained(steps=1), {"of": "old"})
        with monkeypatch.context() as patch:
            before_operations(patch, before)
            checkpoint_files.save(folder, *trained(steps=2), {"of": "new"})

    done: list[str] = []
    replaced(tmp_path / "undisturbed", done.append)
    found = []
    for point in range(len(done)):
        folder = tmp_path / str(point) / "last"
        with pytest.raises(Killed):
            replaced(folder, kill_at(point))
        pair = trained(steps=0)
        found.append(checkpoint_files.load(folder, *pair)["of"])
        assert_same(pair, trained(steps=2 if found[-1] == "new" else 1))
        checkpoint_files.save(folder, *pair, {"of": "later"})
        assert [path.name for path in folder.parent.iterdir()] == ["last"]
    assert found == sorted(found, reverse=True)
    assert set(found) == {"old", "new"}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("operation", ["save_file", "write_text", "fsync", "mkdir"])
def test_failed_write_is_one_warning_and_keeps_older_checkpoints(operation, folder, monkeypatch):
    before = snapshot(folder)

    def full(name: str) -> None:
        if name == operation:
            failure = SafetensorError if name == "save_file" else OSError
            raise failure("No space left on device (os error 28)")

    run = OneRank()
    with monkeypatch.context() as patch:
        before_operations(patch, full)
        assert save(folder, trained(steps=3), 9, keep=1, run=run) is None
        with pytest.raises(OSError, match=r"No space left on device.*; .* bytes needed in"):
            checkpoint_files.save(folder / "step-00000007", *trained(steps=5))
    assert snapshot(folder) == before
    assert len(run.lines) == 1
    assert "no checkpoint at step 9: No space left on device" in run.lines[0]
    assert save(folder, trained(steps=3), 9, keep=1) == folder / "step-00000009"


def test_file_that_the_disk_changed_is_not_published(folder, monkeypatch):
    before, sync = snapshot(folder), manifest.sync

    def lose_a_byte(path: Path) -> None:
        sync(path)
        if path.name.startswith(manifest.WRITING):
            file = path / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"?")

    monkeypatch.setattr(manifest, "sync", lose_a_byte)
    run = OneRank()
    assert save(folder, trained(steps=3), 9, keep=1, run=run) is None
    assert snapshot(folder) == before
    assert "model.safetensors does not match its SHA-256 when read back" in run.lines[0]


def fail_on_rank_one(folder: Path) -> None:
    groups, run = make_expert_groups(2), OneRank()
    path = save(folder, trained(groups, steps=1), 3, run=run)
    write = checkpoint_files.save_file

    def fail_with(error: Exception) -> None:
        def save_file(*args: Any) -> None:
            if run.rank == 1:
                raise error
            write(*args)

        checkpoint_files.save_file = save_file

    fail_with(OSError(28, "No space left on device"))
    assert save(folder, trained(groups), 7, run=run) is None
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    assert len(run.lines) == (1 if run.is_main else 0)
    assert all("No space left on device on rank 1" in line for line in run.lines)
    fail_with(KeyError("bug"))
    with pytest.raises(RuntimeError, match=r"bug.*on rank 1"):
        save(folder, trained(groups), 9, run=run)
    pair = trained(groups, steps=0)
    if run.rank == 1:
        pair[0].moe.experts.double()
    before = {name: value.detach().clone() for name, value in numbers(pair)}
    with pytest.raises(tk.UserError, match=r"'moe.experts.up/2' is float32\[1, .*\] and this run's is float64"):
        load(path, pair, run)
    assert all(torch.equal(value, before[name]) for name, value in numbers(pair))


def test_failure_or_mismatch_on_one_rank_raises_on_all(tmp_path):
    run_distributed(fail_on_rank_one, 2, tmp_path)


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_optimizer_state_that_is_not_finite_is_not_saved(number, tmp_path):
    checkpoint_files.save(tmp_path / "last", *trained())
    before = snapshot(tmp_path)
    model, optimizer = trained(steps=3)
    optimizer.state[model.moe.experts.up]["exp_avg_sq"][1, 2, 3] = number
    with pytest.raises(tk.UserError, match=r"not written, because optimizer state 'exp_avg_sq' of 'moe.experts.up' is"):
        checkpoint_files.save(tmp_path / "last", model, optimizer)
    assert snapshot(tmp_path) == before


def test_folder_that_is_no_checkpoint_is_neither_replaced_nor_loaded(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(tk.UserError, match="is not a checkpoint and would be deleted"):
        checkpoint_files.save(tmp_path / "thesis", *trained())
    with pytest.raises(tk.UserError, match=r"manifest.json is missing"):
        checkpoint_files.load(tmp_path / "thesis", *trained())
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"

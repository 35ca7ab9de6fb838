"""A checkpoint is complete and verified or not there, and fits or is refused, whatever happens to the machine."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import toolkit as tk
from tests.support.helpers import run_distributed
from tests.support.small_run import SmallConfig, SmallModel, small_config, small_trainer
from toolkit.checkpoint import without_model
from toolkit.checkpoint.checkpoint import begin_checkpoint, load_checkpoint
from toolkit.checkpoint.finding import find_checkpoint
from toolkit.checkpoint.retention import best_or_newest, drop_older
from toolkit.experts.moving.migrate import migrate
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.ownership import mark_owned
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement
from toolkit.experts.state import checkpoint_files, manifest
from toolkit.experts.state.tensor_files import SavedTensors, load_optimizer
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.run.storage import Storage
from toolkit.train.callbacks.evaluation import Evaluation
from toolkit.train.optim import build_optimizer


class OneRank:
    """What a checkpoint needs of a run, without a folder and without Accelerate."""

    def __init__(self, config: tk.RunConfig | None = None):
        self.config = config or SmallConfig()
        self.data: dict = {}
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.is_main = self.owns_folder = self.rank == 0
        self.ranks_here = list(range(self.world_size))
        self.storage: Storage | None = None
        self.said: list[str] = []

    on_main_and_share = tk.Run.on_main_and_share

    def print(self, text: str) -> None:
        if self.is_main:
            self.said.append(text)


Pair = tuple[SmallModel, torch.optim.Optimizer]


def trained(groups: ExpertGroups | None = None, *, steps: int = 2, experts: int = 4) -> Pair:
    """A model and its optimizer whose every number depends on its expert's id, its place and `steps`."""
    torch.manual_seed(0)
    model = SmallModel(groups or ExpertGroups(), experts)
    optimizer = build_optimizer(model, lr=0.1, config=tk.OptimizerOptions())
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
    """As `Trainer.state_dict` is."""
    callbacks = {"Some": {"of": "these"}}
    return {
        "step": step,
        "samples": 8 * step,
        "metric_sums": [{}],
        "recorded": {},
        "results": {},
        "callbacks": callbacks,
    }


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


# --- what is in it ------------------------------------------------------------------------------------------------


def test_a_loaded_model_and_optimizer_have_the_same_bits(tmp_path):
    then, now = trained(), trained(steps=0)
    path = save(tmp_path, then, 7)
    assert path == tmp_path / "step-00000007"
    places = {name: tensor.data_ptr() for name, tensor in now[0].state_dict().items()}
    assert load(path, now) == state_at(7)
    assert_same(now, then)
    assert places == {name: tensor.data_ptr() for name, tensor in now[0].state_dict().items()}, "not loaded in place"


def test_loading_replaces_the_state_of_an_optimizer_that_has_stepped(tmp_path):
    then, now = trained(steps=2), trained(steps=5)
    load(save(tmp_path, then, 7), now)
    assert_same(now, then)


def test_moments_keep_the_memory_format_of_their_weights(tmp_path):
    """A fused optimizer goes through a weight and its moments as they lie in memory."""
    images = torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(0))

    def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(images).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        return model, build_optimizer(model, lr=0.1, config=tk.OptimizerOptions())

    going_on, loaded = fresh(), fresh()
    learn(*going_on)
    checkpoint_files.save(tmp_path / "saved", *going_on)
    checkpoint_files.load(tmp_path / "saved", *loaded)
    learn(*going_on)
    learn(*loaded)
    assert torch.equal(going_on[0].weight, loaded[0].weight)


def test_rows_are_saved_under_their_stable_ids_and_everything_else_once(tmp_path):
    pair = trained()
    path = save(tmp_path, pair, 7)
    files = sorted(file.name for file in path.iterdir())
    assert files == [
        "experts-00000.safetensors",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    with safe_open(path / "experts-00000.safetensors", "pt") as file:
        states = ("", "/exp_avg", "/exp_avg_sq", "/step")
        assert set(file.keys()) == {f"moe.experts.{p}/{i}{s}" for p in ("up", "down") for i in range(4) for s in states}
        assert torch.equal(file.get_tensor("moe.experts.up/2")[0], pair[0].moe.experts.up[2])
    with safe_open(path / "model.safetensors", "pt") as file:
        assert "moe.router.bias" in file.keys()  # noqa: SIM118
        assert not any("experts" in key for key in file.keys())  # noqa: SIM118
    assert manifest.read_manifest(path)["rows"]["experts-00000.safetensors"]["moe.experts.up"] == [0, 1, 2, 3]


def test_an_empty_row_is_neither_saved_nor_overwritten(tmp_path):
    then, now = with_rows((0, 1, EMPTY_ROW, 9)), with_rows((0, 1, EMPTY_ROW, 9), steps=0)
    up = now[0].moe.experts.up
    untouched = up[2].detach().clone()
    path = save(tmp_path, then, 7)
    assert manifest.read_manifest(path)["rows"]["experts-00000.safetensors"]["moe.experts.up"] == [0, 1, 9]
    load(path, now)
    assert torch.equal(up[2], untouched)
    assert torch.equal(up[3], then[0].moe.experts.up[3])
    assert not now[1].state[up]["exp_avg"][2].any()


def test_a_rank_that_owns_no_row_has_room_for_moments_and_what_rows_share(tmp_path):
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


def test_loss_scaling_is_saved(tmp_path):
    class Wrapped:
        def __init__(self, optimizer: torch.optim.Optimizer):
            self.optimizer, self.scaler = optimizer, torch.amp.GradScaler("cpu")

    then, now = trained(), trained(steps=0)
    wrapped, other = Wrapped(then[1]), Wrapped(now[1])
    wrapped.scaler.load_state_dict(wrapped.scaler.state_dict() | {"scale": 1024.0, "_growth_tracker": 17})
    path = save(tmp_path, (then[0], wrapped), 7)
    load(path, (now[0], other))
    assert other.scaler.state_dict() == wrapped.scaler.state_dict()
    with pytest.raises(tk.UserError, match="made with fp16's loss scaling"):
        load(path, now)


# --- other layouts ------------------------------------------------------------------------------------------------


def ranks(folder: Path, ep_size: int, work: str) -> dict[str, torch.Tensor]:
    """Save, or load and return what this rank has then; all under `ep_size`."""
    groups = make_expert_groups(ep_size)
    run = OneRank()
    if work == "save":
        save(folder, trained(groups), 7, run=run)
        return {}
    pair = trained(groups, steps=0)
    load(find_checkpoint(folder, run), pair, run)
    return {name: value.detach().clone() for name, value in numbers(pair)}


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((4, 2), (2, 1)), ((2, 2), (4, 4))])
def test_any_number_of_ranks_loads_what_another_saved(before, after, tmp_path):
    run_distributed(ranks, before[0], tmp_path, before[1], "save")
    assert len(list(tmp_path.glob("step-00000007/experts-*"))) == before[1], "one writer per row"
    loaded = run_distributed(ranks, after[0], tmp_path, after[1], "load")
    for name, value in numbers(trained()):
        for rank, mine in enumerate(loaded):
            rows = value
            if ".experts." in name and value.ndim:
                rows = value.chunk(after[1])[rank % after[1]]
            assert torch.equal(mine[name], rows), (name, rank)


# --- refused ------------------------------------------------------------------------------------------------------


def refusal(folder: Path, pair: Pair, run: OneRank | None = None) -> str:
    before = {name: value.detach().clone() for name, value in numbers(pair)}
    with pytest.raises(tk.UserError) as caught:
        load(find_checkpoint(folder, OneRank()), pair, run)
    for name, value in numbers(pair):
        assert torch.equal(value, before[name]), f"{name} was touched"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_touched(tmp_path):
    save(tmp_path, trained(experts=6), 7)
    assert "its 'moe.router.weight' is float32[6, 16] and this run's is float32[4, 16] (and 5 more)" in refusal(
        tmp_path, trained()
    )


def test_a_checkpoint_with_more_rows_than_anybody_wants_is_refused(tmp_path):
    save(tmp_path, with_rows((0, 1, 2, 9)), 7)
    assert "it holds 'moe.experts.down/9' (and 1 more)" in refusal(tmp_path, with_rows((0, 1, 2, EMPTY_ROW)))


def test_a_checkpoint_that_lacks_a_row_is_refused(tmp_path):
    save(tmp_path, with_rows((0, 1, 2, EMPTY_ROW)), 7)
    assert "it lacks 'moe.experts.up/3'" in refusal(tmp_path, trained())


def test_another_type_is_refused(tmp_path):
    save(tmp_path, trained(), 7)
    pair = trained(steps=0)
    pair[0].double()
    assert "'stem.weight' is float32[16, 8] and this run's is float64[16, 8]" in refusal(tmp_path, pair)


def test_another_configuration_is_refused_by_its_first_difference(tmp_path):
    save(tmp_path, trained(), 7)
    assert "it was made with lr 0.001 and this run has 0.5: use" in refusal(
        tmp_path, trained(), OneRank(SmallConfig(lr=0.5))
    )


def test_settings_that_do_not_decide_what_is_learned_may_differ(tmp_path):
    path = save(tmp_path, trained(), 7)
    load(path, trained(steps=0), OneRank(SmallConfig(log_every=7, tracker="none")))


def test_another_optimizer_is_refused(tmp_path):
    save(tmp_path, trained(), 7)
    model = trained()[0]
    pair = model, torch.optim.SGD(model.parameters(), lr=0.1)
    assert "made with the optimizer AdamW and this run has SGD" in refusal(tmp_path, pair)


def test_another_format_is_refused_and_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "FORMAT", 2)
    save(tmp_path, trained(), 7)
    monkeypatch.undo()
    assert "has format 2 and this version reads format 1" in refusal(tmp_path, trained())


# --- damage -------------------------------------------------------------------------------------------------------


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
    **{f"flipped bit {seed}": lambda file, seed=seed: flip(file, seed) for seed in range(4)},
    "truncated": lambda file: os.truncate(file, file.stat().st_size * 2 // 3),
    "emptied": lambda file: os.truncate(file, 0),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\n"),
    "missing": Path.unlink,
    "swapped with another": swap,
    "of another step": lambda file: shutil.copy(file.parent.with_name("step-00000003") / file.name, file),
}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    save(folder, trained(steps=1), 3)
    save(folder, trained(steps=2), 7)
    return folder


@pytest.fixture
def folder(two_checkpoints, tmp_path) -> Path:
    """Checkpoints of steps 3 and 7."""
    return shutil.copytree(two_checkpoints, tmp_path / "checkpoints")


def passed_over(folder: Path) -> str:
    """Why the checkpoint of step 7 is passed over for that of step 3, in one line."""
    run = OneRank()
    assert find_checkpoint(folder, run) == folder / "step-00000003"
    (said,) = run.said
    start = "warning: checkpoint step-00000007 is passed over: "
    assert said.startswith(start)
    return said.removeprefix(start)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["experts-00000", "model", "optimizer", "state.json", "manifest.json"])
def test_any_damage_is_found_and_the_checkpoint_before_is_used(name, damage, folder):
    file = folder / "step-00000007" / (name if "." in name else f"{name}.safetensors")
    DAMAGES[damage](file)
    passed_over(folder)
    pair = trained(steps=0)
    load(folder / "step-00000003", pair)
    assert_same(pair, trained(steps=1))


def test_a_folder_under_the_name_of_another_step_is_passed_over(folder):
    (folder / "step-00000003").rename(folder / "step-00000009")
    run = OneRank()
    assert find_checkpoint(folder, run).name == "step-00000007"
    assert run.said == ["warning: checkpoint step-00000009 is passed over: its files are those of step 3."]


def test_the_damaged_one_is_written_anew_when_its_step_comes_again(folder):
    flip(folder / "step-00000007" / "model.safetensors", 0)
    assert save(folder, trained(steps=2), 7, keep=1) == folder / "step-00000007"
    assert [path.name for path in folder.iterdir()] == ["step-00000007"]
    assert find_checkpoint(folder, OneRank()).name == "step-00000007"


def test_a_later_one_that_is_damaged_does_not_count_among_those_that_are_kept(folder):
    flip(folder / "step-00000007" / "model.safetensors", 0)
    save(folder, trained(steps=2), 5, keep=1)
    assert find_checkpoint(folder, OneRank()).name == "step-00000005"


def test_saving_a_step_again_keeps_what_is_there(folder):
    before = (folder / "step-00000007").stat().st_ino
    assert save(folder, trained(steps=2), 7) == folder / "step-00000007"
    assert (folder / "step-00000007").stat().st_ino == before


def test_a_file_that_would_run_code_is_not_even_opened(folder, tmp_path):
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save(Hostile(), folder / "step-00000007" / "model.safetensors")
    torch.save(Hostile(), folder / "step-00000007" / "optimizer.bin")
    assert find_checkpoint(folder, OneRank()).name == "step-00000003"
    assert not (tmp_path / "owned").exists()


# --- manifests that somebody has edited -----------------------------------------------------------------------------


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit the manifest in `folder`, and give it the digest that fits."""
    about = manifest.read_manifest(folder)
    change(about)
    manifest.write_canonical(folder / manifest.NAME, about | {"digest": manifest.digest(about)})


def seal_of(size: int) -> dict[str, Any]:
    return {"bytes": size, "sha256": "0" * 64}


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no files": lambda about: about.pop("files"),
    "files in a list": lambda about: about.update(files=["model.safetensors"]),
    "a file without a size": lambda about: about["files"]["state.json"].pop("bytes"),
    "a size in words": lambda about: about["files"]["state.json"].update(bytes="many"),
    "a seal that is a number": lambda about: about["files"].update({"state.json": 3}),
    "no state": lambda about: about["files"].pop("state.json"),
    "no step": lambda about: about.pop("step"),
    "a step in words": lambda about: about.update(step="seven"),
    "no format": lambda about: about.pop("format"),
    "rows in a list": lambda about: about.update(rows=[1, 2]),
    "rows of a file in words": lambda about: about["rows"].update({"experts-00000.safetensors": "all"}),
    "placement in words": lambda about: about.update(placement="contiguous"),
    "slots in words": lambda about: about["placement"].update({"moe.experts.up": {"slots": "0 1 2 3"}}),
    "no slots": lambda about: about["placement"].update({"moe.experts.up": {}}),
    "slots of other experts": lambda about: about["placement"].update({"moe.experts.up": {"slots": [[0, 1, 2, 9]]}}),
    "slots of fewer experts": lambda about: about["placement"].update({"moe.experts.up": {"slots": [[0, 1, 2]]}}),
    "slots of more experts": lambda about: about["placement"].update({"moe.experts.up": {"slots": [[0, 1, 2, 3, 4]]}}),
    "slots reversed in one of two parameters": lambda about: about["placement"]["moe.experts.up"]["slots"][0].reverse(),
    "a file of another folder": lambda about: about["files"].update(
        {"../step-00000003/model.safetensors": about["files"]["model.safetensors"]}
    ),
    "an absolute path": lambda about: about["files"].update({"/dev/zero": seal_of(0)}),
    "a name with a null byte": lambda about: about["files"].update({"model\0.safetensors": seal_of(0)}),
    "a folder": lambda about: about["files"].update({".": seal_of(4096)}),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_manifest_of_another_shape_is_passed_over_in_one_line(forgery, folder):
    forge(folder / "step-00000007", FORGERIES[forgery])
    passed_over(folder)


def test_a_manifest_that_is_no_object_is_passed_over(folder):
    (folder / "step-00000007" / manifest.NAME).write_text("[]\n")
    passed_over(folder)


def forge_state(folder: Path, change: Callable[[Any], object]) -> None:
    """Edit state.json in `folder`, and seal it in the manifest."""
    file = folder / "state.json"
    content = manifest.read_canonical(file)
    manifest.write_canonical(file, change(content) or content)
    forge(folder, lambda about: about["files"].update({"state.json": manifest.seal(file)}))


FORGED_STATES: dict[str, Callable[[Any], object]] = {
    "a list": lambda _: [1],
    "no optimizer": lambda content: content.pop("optimizer") and None,
    "a scaler in words": lambda content: content["optimizer"].update(scaler="1024"),
    "no training": lambda content: content.update(training={"step": 7}),
    "a step in words": lambda content: content["training"].update(step="7"),
    "another step": lambda content: content["training"].update(step=6),
    "negative samples": lambda content: content["training"].update(samples=-1),
    "samples in half": lambda content: content["training"].update(samples=1.5),
    "sums in a dict": lambda content: content["training"].update(metric_sums={}),
    "a callback in a list": lambda content: content["training"]["callbacks"].update(Some=[1]),
    "sums of two": lambda content: content["training"].update(metric_sums=[{"loss": [1.0, "float32"]}]),
    "a seal in words": lambda content: content["training"].update(metrics={"bytes": "x", "sha256": 3}),
    "a best in words": lambda content: content["training"]["callbacks"].update(Checkpointing={"best": "x"}),
    "a best without its metric": lambda content: content["training"]["callbacks"].update(
        Checkpointing={"best": {"metric": "test/loss", "step": 3, "evaluated": {}}}
    ),
    "a rate in words": lambda content: content["optimizer"]["groups"][0].update(lr="fast"),
    "a rate below 0": lambda content: content["optimizer"]["groups"][0].update(lr=-1.0),
    "an infinite rate": lambda content: content["optimizer"]["groups"][0].update(lr=float("inf")),
    "a setting in a dict": lambda content: content["optimizer"]["groups"][0].update(betas={"a": 1}),
    "random states of nothing": lambda content: content.update(random=[{}]),
}


@pytest.mark.parametrize("forgery", FORGED_STATES)
def test_a_state_of_another_shape_is_passed_over(forgery, folder):
    forge_state(folder / "step-00000007", FORGED_STATES[forgery])
    assert passed_over(folder).startswith("state.json ")


def test_a_best_checkpoint_in_words_is_not_gone_by(folder):
    forge_state(folder / "step-00000007", FORGED_STATES["a best in words"])
    assert best_or_newest(folder) == folder / "step-00000007"


def forge_tensors(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / name
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    forge(folder, lambda about: about["files"].update({name: manifest.seal(file)}))


UP_2 = "moe.experts.up/2/exp_avg"


@pytest.mark.parametrize(
    ("file", "key", "made", "said"),
    [
        ("optimizer", "stem.weight.exp_avg", lambda t: t.T.contiguous(), "its 'exp_avg' of 'stem.weight' has shape"),
        ("optimizer", "stem.weight.exp_avg", lambda t: t[:1].clone(), "has shape (1, 8) where the weight has (16, 8)"),
        ("optimizer", "head.bias.exp_avg_sq", lambda t: t * torch.inf, "its 'exp_avg_sq' of 'head.bias' is not finite"),
        (
            "experts-00000",
            "moe.experts.up/2/exp_avg",
            lambda t: t * torch.nan,
            "'exp_avg' of 'moe.experts.up/2' is not",
        ),
        (
            "experts-00000",
            "moe.experts.up/2/exp_avg",
            lambda t: t.mT.contiguous(),
            "of 'moe.experts.up/2' has shape (1,",
        ),
        (
            "experts-00000",
            "moe.experts.up/2/exp_avg",
            lambda _: None,
            "rows of 'moe.experts.up' have different optimizer",
        ),
    ],
)
def test_optimizer_states_that_no_step_makes_are_refused(file, key, made, said, folder):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key] = made(tensors[key])
        if tensors[key] is None:
            del tensors[key]

    forge_tensors(folder / "step-00000007", f"{file}.safetensors", change)
    assert said in refusal(folder, trained(steps=0))


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("what", ["link to the same bytes", "link to /dev/zero", "named pipe"])
def test_a_file_that_is_a_link_or_a_device_is_not_opened(what, name, folder, tmp_path):
    file = folder / "step-00000007" / name
    elsewhere = file.rename(tmp_path / name)
    if what == "named pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(elsewhere if what == "link to the same bytes" else Path("/dev/zero"))
    assert passed_over(folder).startswith(f"{name} cannot be read (it is a link")


def test_a_huge_manifest_is_not_read(folder):
    os.truncate(folder / "step-00000007" / manifest.NAME, 2**40)  # a sparse file
    assert "manifest.json cannot be read (it has 1,099,511,627,776 bytes)" in passed_over(folder)


# --- the machine fails in mid-save --------------------------------------------------------------------------------


class Died(BaseException):
    """In place of a kill: nothing may handle it."""


def operations(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    """Have `before(what)` called ahead of everything that a save does to the disk."""

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            before(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(checkpoint_files, "save_file")
    for name in ("mkdir", "rename", "write_text"):
        watch(Path, name)
    watch(manifest.os, "fsync")
    watch(manifest.os, "unlink")
    watch(manifest.os, "rmdir")


def save_after(folder: Path, monkeypatch: pytest.MonkeyPatch, keep: int, before: Callable[[str], None]) -> None:
    for step in range(1, 1 + keep):
        save(folder, trained(steps=1), step, keep)
    with monkeypatch.context() as patch:
        operations(patch, before)
        save(folder, trained(steps=2), 7, keep)


@pytest.mark.parametrize("keep", [1, 3])
def test_a_kill_at_any_moment_of_a_save_leaves_a_checkpoint_to_continue_from(keep, tmp_path, monkeypatch):
    done: list[str] = []
    save_after(tmp_path / "undisturbed", monkeypatch, keep, done.append)
    assert done.count("fsync") == 7, "four files, the manifest, two folders"
    assert done.count("rename") == 2, "the new one, and the old one out of sight"
    for point in range(len(done)):
        folder, left = tmp_path / str(point), [point]

        def die(_: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Died

        with pytest.raises(Died):
            save_after(folder, monkeypatch, keep, die)
        run = OneRank()
        path = find_checkpoint(folder, run)
        assert path is not None, f"nothing left after a kill before {done[point]} number {point}"
        assert not run.said, "a half-written folder was taken for a checkpoint"
        assert path.name == ("step-00000007" if "rename" in done[:point] else f"step-{keep:08d}")
        pair = trained(steps=0)
        load(path, pair)
        assert_same(pair, trained(steps=2 if path.name == "step-00000007" else 1))
        save(folder, trained(steps=2), 8, keep)
        expected = [f"step-{step:08d}" for step in (*range(1, keep + 1), 7, 8)]
        kept = sorted(path.name for path in folder.iterdir())
        assert kept == sorted(set(kept) & set(expected))[-keep:], "leftovers"


def test_every_file_reaches_the_disk_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    synced: set[int] = set()
    fsync, rename = os.fsync, Path.rename

    def noting_fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checking_rename(path: Path, target: Path) -> Path:
        if target.name.startswith("step-"):
            unsynced = [p.name for p in (path, *path.iterdir()) if p.stat().st_ino not in synced]
            assert not unsynced
            synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "rename", checking_rename)
    save(tmp_path, trained(), 7)
    assert tmp_path.stat().st_ino in synced, "the name itself"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


FAILURES = ["save_file", "write_text", "fsync", "mkdir"]


@pytest.mark.parametrize("operation", FAILURES)
def test_a_full_disk_costs_one_line_and_no_old_checkpoint(operation, folder, monkeypatch):
    before = snapshot(folder)

    def full(what: str) -> None:
        if what == operation:
            failure = SafetensorError if what == "save_file" else OSError
            raise failure("No space left on device (os error 28)")

    run = OneRank()
    with monkeypatch.context() as patch:
        operations(patch, full)
        assert save(folder, trained(steps=3), 9, keep=1, run=run) is None
    assert snapshot(folder) == before
    assert len(run.said) == 1
    assert "no checkpoint at step 9: " in run.said[0]
    assert "No space left on device" in run.said[0]
    assert "bytes needed, " in run.said[0]
    assert save(folder, trained(steps=3), 9, keep=1) == folder / "step-00000009", "when there is room again"


def test_too_little_room_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10_000, 9_000, 1_000))
    run = OneRank()
    assert save(tmp_path / "new", trained(), 9, run=run) is None
    assert "the disk is full" in run.said[0]
    assert "1,000 free" in run.said[0]
    assert list((tmp_path / "new").iterdir()) == []


def free_up_to(capacity: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the disk of `folder` take `capacity` bytes of checkpoints."""

    def usage(_: Path) -> Any:
        used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return shutil._ntuple_diskusage(capacity, used, capacity - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)


@pytest.mark.parametrize(
    ("room", "newest_is_damaged", "kept"),
    [
        pytest.param(2.5, False, [7, 9], id="the older of two makes room"),
        pytest.param(2.5, True, [3, 7], id="the last that verifies stays"),
        pytest.param(1.5, False, [3, 7], id="none goes where that would not be enough"),
    ],
)
def test_on_a_full_disk_older_checkpoints_make_room(room, newest_is_damaged, kept, folder, monkeypatch):
    size = sum(file.stat().st_size for file in (folder / "step-00000007").iterdir())
    if newest_is_damaged:
        flip(folder / "step-00000007" / "model.safetensors", 0)
    free_up_to(int(size * room), folder, monkeypatch)
    run = OneRank()
    assert (save(folder, trained(steps=3), 9, run=run) is not None) == (9 in kept)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:08d}" for step in kept]
    (said,) = run.said
    if 9 in kept:
        assert said == "warning: the disk is full: step-00000003 was deleted to make room for step 9."


def fail_on_rank_one(folder: Path) -> None:
    groups, run = make_expert_groups(2), OneRank()
    save(folder, trained(groups, steps=1), 3, run=run)
    write = checkpoint_files.save_file

    def full(*args: Any) -> None:
        if run.rank == 1:
            raise OSError(28, "No space left on device")
        write(*args)

    checkpoint_files.save_file = full
    assert save(folder, trained(groups), 7, run=run) is None
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    assert len(run.said) == (1 if run.is_main else 0)
    assert all("No space left on device on rank 1" in line for line in run.said)
    checkpoint_files.save_file = write
    assert save(folder, trained(groups), 7, run=run) is not None

    def bug(*args: Any) -> None:
        if run.rank == 1:
            raise KeyError("bug")
        write(*args)

    checkpoint_files.save_file = bug
    with pytest.raises(RuntimeError, match=r"bug.*on rank 1"):
        save(folder, trained(groups), 9, run=run)


def test_a_failure_on_one_rank_reaches_all(tmp_path):
    run_distributed(fail_on_rank_one, 2, tmp_path)


def refuse_on_rank_one(folder: Path) -> None:
    groups, run = make_expert_groups(2), OneRank()
    path = save(folder, trained(groups), 7, run=run)
    pair = trained(groups, steps=0)
    if run.rank == 1:
        pair[0].moe.experts.double()
    before = {name: value.detach().clone() for name, value in numbers(pair)}
    with pytest.raises(tk.UserError, match=r"'moe.experts.up/2' is float32\[1, .*\] and this run's is float64"):
        load(path, pair, run)
    assert all(torch.equal(value, before[name]) for name, value in numbers(pair))


def test_what_does_not_fit_one_rank_is_refused_by_all(tmp_path):
    run_distributed(refuse_on_rank_one, 2, tmp_path)


# --- without a run ------------------------------------------------------------------------------------------------


def test_a_loop_of_ones_own_saves_and_loads_without_a_run(tmp_path):
    then, now = trained(), trained(steps=0)
    checkpoint_files.save(tmp_path / "any name", *then, {"epoch": 3})
    assert checkpoint_files.load(tmp_path / "any name", *now) == {"epoch": 3}
    assert_same(now, then)
    assert [path.name for path in tmp_path.iterdir()] == ["any name"]
    assert checkpoint_files.load(save(tmp_path, trained(), 7), *now)["step"] == 7, "what a trainer saved"


def test_experts_are_placed_where_they_were_saved_and_only_where_the_checkpoint_fits(tmp_path):
    moved = trained()
    migrate(moved[0].moe.expert_stack, ExpertPlacement(((3, 1, 0, 2),)), moved[1])
    checkpoint_files.save(tmp_path / "saved", *moved)
    model, optimizer = trained(steps=0)
    checkpoint_files.load(tmp_path / "saved", model, optimizer)
    assert model.moe.placement == moved[0].moe.placement
    expected, now = moved[0].moe.experts.up, model.moe.experts.up
    assert torch.equal(now, expected)
    assert torch.equal(now, trained()[0].moe.experts.up[[3, 1, 0, 2]])
    assert torch.equal(optimizer.state[now]["exp_avg"], moved[1].state[expected]["exp_avg"])
    larger = trained(experts=6)
    before = larger[0].moe.placement
    with pytest.raises(tk.UserError, match="build the model that it was made with"):
        checkpoint_files.load(tmp_path / "saved", *larger)
    assert larger[0].moe.placement == before


def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new(tmp_path, monkeypatch):
    def replaced(folder: Path, before: Callable[[str], None]) -> None:
        checkpoint_files.save(folder, *trained(steps=1), {"of": "old"})
        with monkeypatch.context() as patch:
            operations(patch, before)
            checkpoint_files.save(folder, *trained(steps=2), {"of": "new"})

    done: list[str] = []
    replaced(tmp_path / "undisturbed", done.append)
    found = []
    for point in range(len(done)):
        left = [point]

        def die(_: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Died

        folder = tmp_path / str(point) / "last"
        with pytest.raises(Died):
            replaced(folder, die)
        pair = trained(steps=0)
        found.append(checkpoint_files.load(folder, *pair)["of"])
        assert_same(pair, trained(steps=2 if found[-1] == "new" else 1))
        checkpoint_files.save(folder, *pair, {"of": "later"})
        assert [path.name for path in folder.parent.iterdir()] == ["last"], "leftovers"
    assert found == sorted(found, reverse=True), "first the old, then the new"
    assert set(found) == {"old", "new"}


def test_a_checkpoint_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    checkpoint_files.save(tmp_path / "last", *trained())
    before = snapshot(tmp_path)

    def full(what: str) -> None:
        if what == "save_file":
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        operations(patch, full)
        with pytest.raises(tk.UserError, match=r"could not be written: .*No space left on device; .* bytes needed"):
            checkpoint_files.save(tmp_path / "last", *trained(steps=5))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_a_moment_that_is_not_finite_is_not_saved(number, tmp_path):
    checkpoint_files.save(tmp_path / "last", *trained())
    before = snapshot(tmp_path)
    model, optimizer = trained(steps=3)
    optimizer.state[model.moe.experts.up]["exp_avg_sq"][1, 2, 3] = number
    with pytest.raises(tk.UserError, match=r"not written, because optimizer state 'exp_avg_sq' of 'moe.experts.up' is"):
        checkpoint_files.save(tmp_path / "last", model, optimizer)
    assert snapshot(tmp_path) == before


def test_a_folder_of_something_else_is_neither_replaced_nor_loaded(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(tk.UserError, match="holds something that is no checkpoint"):
        checkpoint_files.save(tmp_path / "thesis", *trained())
    with pytest.raises(tk.UserError, match=r"thesis cannot be loaded: manifest.json is missing"):
        checkpoint_files.load(tmp_path / "thesis", *trained())
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"


def test_a_damaged_checkpoint_is_refused_with_the_file_named(tmp_path):
    checkpoint_files.save(tmp_path / "last", *trained())
    flip(tmp_path / "last" / "experts-00000.safetensors", 300)
    with pytest.raises(tk.UserError, match=r"cannot be loaded: experts-00000.safetensors does not match its SHA-256"):
        checkpoint_files.load(tmp_path / "last", *trained())


# --- the callback -------------------------------------------------------------------------------------------------


def test_a_run_keeps_as_many_as_it_was_told_and_says_where_it_continues(tmp_path, capsys):
    config = small_config(tmp_path / "run", checkpoint=CheckpointOptions(every_steps=4, keep=3))
    with small_trainer(config) as trainer:
        trainer.fit()
    folder = config.run_dir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000012", "step-00000016", "step-00000020"]
    flip(folder / "step-00000020" / "model.safetensors", 1)
    capsys.readouterr()
    with small_trainer(config) as trainer:
        trainer.fit()
    said = capsys.readouterr().out.splitlines()
    assert "warning: checkpoint step-00000020 is passed over: model.safetensors does not match its SHA-256." in said
    assert "continuing at step 16 (step-00000016 verified)" in said
    assert manifest.find_damage(folder / "step-00000020") is None


def test_on_save_is_told_of_each_verified_folder(tmp_path):
    told = []

    class Listener(tk.Callback):
        def on_save(self, trainer: tk.Trainer, folder: Path) -> None:
            assert manifest.find_damage(folder) is None
            told.append((trainer.state.step, folder.name))

    with small_trainer(small_config(tmp_path / "run"), callbacks=[Listener()]) as trainer:
        trainer.fit()
    assert told == [(10, "step-00000010"), (20, "step-00000020")]


def test_resume_yes_without_a_checkpoint_is_refused(tmp_path):
    config = small_config(tmp_path / "run")
    with small_trainer(config):
        pass
    with (
        small_trainer(small_config(tmp_path / "run", resume="yes")) as trainer,
        pytest.raises(tk.UserError, match=r"resume=.yes.: no checkpoint in .* verifies"),
    ):
        trainer.fit()


def test_state_is_plain_json(tmp_path):
    with small_trainer(small_config(tmp_path / "run")) as trainer:
        trainer.fit()
        assert json.loads(json.dumps(trainer.state_dict())) == trainer.state_dict()


class Evaluated(Evaluation):
    """Gives these accuracies in turn, after every second step."""

    on_fit_start = on_step_start = on_fit_end = lambda *_: None
    state_key, name = "validation", "validation"

    def __init__(self, accuracies: list[float]):
        self.accuracies = accuracies

    def state_dict(self) -> dict[str, Any]:
        return {}

    def on_step_end(self, trainer: tk.Trainer) -> None:
        if trainer.state.step % 2 == 0 and self.accuracies:
            trainer.hooks("on_evaluate_end", "validation", {"validation/accuracy": self.accuracies.pop(0)})


def test_the_best_checkpoint_is_kept_beside_the_newest_also_over_a_restart(tmp_path):
    options = CheckpointOptions(every_steps=5, keep=1, best="validation/accuracy")
    config = small_config(tmp_path / "run", checkpoint=options)

    def run(accuracies: list[float], until: int, config: SmallConfig = config) -> list[str]:
        with small_trainer(config, callbacks=[Evaluated(accuracies)]) as trainer:
            trainer.max_steps = until
            trainer.fit()
            best.append(trainer.results.get("best_checkpoint"))
            kept = trainer.run.checkpoints / f"step-{best[-1]['step'] if best[-1] else until:08d}"
            without_model.export(kept, tmp_path / f"{len(best)}.safetensors")
            weights = load_file(tmp_path / f"{len(best)}.safetensors")
            assert all(torch.equal(value, weights[name]) for name, value in trainer.raw_model.state_dict().items())
        return sorted(path.name for path in (config.run_dir / "checkpoints").iterdir())

    best: list[dict[str, Any]] = []
    assert run([0.5, 0.7, torch.nan, 0.6], 10) == ["step-00000004", "step-00000010"]
    assert best[-1] == {"metric": "validation/accuracy", "step": 4, "evaluated": {"validation/accuracy": 0.7}}
    assert best_or_newest(config.run_dir / "checkpoints").name == "step-00000004"
    assert run([0.7, 0.1], 16) == ["step-00000004", "step-00000016"], "as good is not better"
    shutil.rmtree(config.run_dir / "checkpoints" / "step-00000004")
    with pytest.raises(tk.UserError, match="the best checkpoint, of step 4, is not there: put it back"):
        best_or_newest(config.run_dir / "checkpoints")
    assert run([0.6], 20) == ["step-00000018", "step-00000020"], "what is gone is not the best any more"
    run([], 20, config.replace(checkpoint=CheckpointOptions(every_steps=5, keep=2)))
    assert best[-1] is None, "it was kept in an earlier part of the run"
    assert find_checkpoint(config.run_dir / "checkpoints", OneRank()).name == "step-00000020", "a run continues there"
    flip(config.run_dir / "checkpoints" / "step-00000020" / "state.json", 0)
    assert best_or_newest(config.run_dir / "checkpoints").name == "step-00000018"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("old/loss", "name one such as eval/loss, validation/loss"),
        ("validation/f1", "an evaluation gives validation"),
    ],
)
def test_a_metric_that_no_evaluation_gives_is_refused(name, remedy, tmp_path):
    config = small_config(tmp_path, checkpoint=CheckpointOptions(best=name))
    with (
        small_trainer(config, callbacks=[Evaluated([0.5])]) as trainer,
        pytest.raises(tk.UserError, match=f"checkpoint.best='{name}': {remedy}"),
    ):
        trainer.fit()


def test_test_is_another_word_for_eval_and_validation_is_held_out_to_choose_by(tmp_path):
    assert CheckpointOptions(best="test/loss").best == "eval/loss"
    for best, validates in (("validation/loss", True), ("eval/loss", False), (None, False)):
        assert small_config(tmp_path, checkpoint=CheckpointOptions(best=best)).validates == validates
    for best in ("loss", "validation/"):
        with pytest.raises(tk.UserError, match=f"^best='{best}': name an evaluation and its metric, such as valid"):
            CheckpointOptions(best=best)


def test_the_best_makes_no_room_on_a_full_disk(folder):
    save(folder, trained(steps=3), 9, keep=3)
    drop_older(folder, 11, 3, lambda _: None, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000009"]

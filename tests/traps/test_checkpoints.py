"""What `save_state`, `load_state` and `save_model` lose, break or do not notice, and that our checkpoints do not."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.integrations.accelerate.test_expert_parallel import Model
from tests.support.helpers import run_distributed
from tests.traps.toys import ToyMixture, my_mean_loss, spread, toy_trainer
from toolkit.checkpoint.finding import find_checkpoint
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.ownership import is_owned, ownership_of
from toolkit.experts.state import checkpoint_files, manifest
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.train.trainer import Trainer

PLACED = (0, 2, 3, 1)
"""Experts 0 and 3 on rank 0, 1 and 2 on rank 1."""


def trainer_in(folder: Path, model: nn.Module | None = None, *, max_steps: int) -> Trainer:
    trainer = toy_trainer(model, max_steps=max_steps)
    trainer.run.folder = folder
    return trainer


def resumed(folder: Path, *, max_steps: int) -> Trainer:
    """A fresh trainer that continues from the newest checkpoint in `folder`."""
    trainer = trainer_in(folder, max_steps=max_steps)
    newest = find_checkpoint(trainer.run.checkpoints, trainer.run)
    assert newest is not None
    trainer.restore(newest)
    return trainer


def expert_rows(model: ToyMixture, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and first moments of this rank's experts, by expert id."""
    rows = {}
    for name, parameter in model.moe.experts.named_parameters():
        mark, moments = ownership_of(parameter), optimizer.state[parameter]["exp_avg"]
        assert mark is not None
        for row_id, weight, moment in zip(mark.row_ids, parameter.detach(), moments, strict=True):
            rows |= {f"{name}/{row_id}": weight.clone(), f"{name}/{row_id}/exp_avg": moment.clone()}
    return rows


# --- G5, fact 6: experts ----------------------------------------------------------------------------------------------


def plain_round_trip(folder: Path) -> dict[str, Any]:
    model = ToyMixture(spread())
    with pytest.raises(UserError, match="whole_state_dict"):
        model.state_dict()
    model.moe._state_dict_pre_hooks.clear()  # so that it is saved as a layer of anyone's is
    names = [name for name, p in model.named_parameters() if is_owned(p)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    accelerator = Accelerator()
    raw = torch.optim.AdamW(model.parameters())
    prepared, optimizer = accelerator.prepare(model, raw)
    accelerator.backward(my_mean_loss(prepared))
    optimizer.step()
    before = list(expert_rows(model, raw).values())
    accelerator.save_state(str(folder))
    dist.barrier()
    accelerator.load_state(str(folder))
    return {"before": before, "after": list(expert_rows(model, raw).values())}


def save_spread(folder: Path, slot_of_expert: tuple[int, ...]) -> dict[str, Tensor]:
    model = ToyMixture(spread(), slot_of_expert)
    trainer = trainer_in(folder, model, max_steps=2)
    trainer.fit()
    trainer.save()
    return expert_rows(model, trainer.optimizer)


def load_spread(folder: Path, slot_of_expert: tuple[int, ...]) -> dict[str, Tensor]:
    model = ToyMixture(spread(), slot_of_expert)
    trainer = trainer_in(folder, model, max_steps=2)
    newest = find_checkpoint(trainer.run.checkpoints, trainer.run)
    assert newest is not None
    trainer.restore(newest)
    return expert_rows(model, trainer.optimizer)


def assert_same_rows(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_g5_fact_6_a_reload_gives_every_rank_the_experts_of_rank_0_and_ours_gives_each_its_own(tmp_path: Path):
    first, second = run_distributed(plain_round_trip, 2, tmp_path / "plain")
    assert all(torch.equal(a, b) for a, b in zip(first["after"], first["before"], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(second["after"], second["before"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(second["after"], first["before"], strict=True)), "no error, either"

    saved = run_distributed(save_spread, 2, tmp_path / "ours", (0, 1, 2, 3))
    loaded = run_distributed(load_spread, 2, tmp_path / "ours", (0, 1, 2, 3))
    for found, expected in zip(loaded, saved, strict=True):
        assert_same_rows(found, expected)


def exported(folder: Path) -> dict[str, Tensor]:
    """Saves a plain model with an expert of each rank's own, and `Model` under `ExpertParallel`; the plain expert, as
    it is on this rank and as `get_state_dict` has it."""
    torch.manual_seed(1 + dist.get_rank())
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ["1.weight", "1.bias"])
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(plain)
    accelerator.save_model(prepared, folder / "plain")
    answer = {"expert": plain[1].weight.detach(), "state": accelerator.get_state_dict(prepared)["1.weight"]}

    model = Model()
    spread_model, _ = ExpertParallel(accelerator).prepare(model, torch.optim.SGD(model.parameters()))
    accelerator.save_model(spread_model, folder / "ours")
    return answer


def test_a_plain_export_has_the_experts_of_rank_0_alone_and_ours_has_all(tmp_path: Path):
    first, second = run_distributed(exported, 2, tmp_path)
    assert not torch.equal(first["expert"], second["expert"])
    assert all(torch.equal(rank["state"], rank["expert"]) for rank in (first, second)), "each rank's own, no error"
    assert torch.equal(load_file(tmp_path / "plain" / "model.safetensors")["1.weight"], first["expert"])

    found, expected = load_file(tmp_path / "ours" / "model.safetensors"), Model().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def load_plainly_on_one_process(folder: Path) -> str:
    model = ToyMixture(ExpertGroups())
    accelerator = Accelerator()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch for .*experts\.up") as failure:
        accelerator.load_state(str(folder))
    return str(failure.value)


def test_a_plain_checkpoint_of_two_ranks_fits_no_other_layout_and_ours_fits_all(tmp_path: Path):
    run_distributed(plain_round_trip, 2, tmp_path / "plain")
    run_distributed(load_plainly_on_one_process, 1, tmp_path / "plain")

    by_rank = run_distributed(save_spread, 2, tmp_path / "ours", PLACED)
    assert sorted(name for name in by_rank[0] if name.startswith("up/") and name.count("/") == 1) == ["up/0", "up/3"]
    saved = by_rank[0] | by_rank[1]
    (alone,) = run_distributed(load_spread, 1, tmp_path / "ours", (0, 1, 2, 3))
    assert_same_rows(alone, saved)
    elsewhere = run_distributed(load_spread, 2, tmp_path / "ours", (3, 1, 0, 2))
    assert_same_rows(elsewhere[0] | elsewhere[1], saved)
    assert elsewhere[0].keys() == by_rank[0].keys(), "experts are placed where they were saved"


# --- fact 3: a kill during a save -------------------------------------------------------------------------------------


def plain_accelerator(folder: Path, total_limit: int | None, weight: float) -> tuple[Accelerator, nn.Module]:
    names = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=total_limit)
    accelerator = Accelerator(project_config=names)
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, weight)
    prepared, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, prepared


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plain_kill_during_the_second_save(folder: Path) -> None:
    accelerator, _ = plain_accelerator(folder, total_limit=1, weight=1.0)
    accelerator.save_state()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("torch.save", die)  # weights are written by then, the optimizer is not
        accelerator.save_state()


def plain_load_newest(folder: Path) -> str:
    accelerator, _ = plain_accelerator(folder, total_limit=1, weight=0.0)
    with pytest.raises(FileNotFoundError) as failure:
        accelerator.load_state()
    return str(failure.value)


def our_kill_during_the_second_save(folder: Path, moment: str) -> None:
    trainer = trainer_in(folder, max_steps=2)
    steps = trainer.batches.steps(0)
    trainer.train_step(next(steps))
    trainer.save(keep=1)
    trainer.train_step(next(steps))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            *{"writing": (checkpoint_files, "save_file"), "renaming": (manifest, "publish")}[moment], die
        )
        trainer.save(keep=1)


def our_step_after_restart(folder: Path) -> int:
    trainer = resumed(folder, max_steps=4)
    step = trainer.state.step
    trainer.fit()
    trainer.save()
    assert trainer.state.step == 4
    return step


def test_fact_3_a_kill_during_a_save_leaves_accelerate_with_nothing_and_ours_with_the_one_before(tmp_path: Path):
    with pytest.raises(AssertionError, match="died without a word"):
        run_distributed(plain_kill_during_the_second_save, 1, tmp_path / "plain")
    (failure,) = run_distributed(plain_load_newest, 1, tmp_path / "plain")
    assert "optimizer" in failure
    assert len(list((tmp_path / "plain" / "checkpoints").iterdir())) == 1, "the good one had been deleted first"

    for moment in ("writing", "renaming"):
        with pytest.raises(AssertionError, match="died without a word"):
            run_distributed(our_kill_during_the_second_save, 1, tmp_path / moment, moment)
        assert run_distributed(our_step_after_restart, 1, tmp_path / moment) == [1]


# --- fact 4: resume, then save again ----------------------------------------------------------------------------------


def plain_save_after_restart(folder: Path, total_limit: int | None) -> tuple[str | None, float]:
    """Saves weights 1 and 2, restarts, saves weight 3; returns the error, and the weight that a load then gives."""
    accelerator, model = plain_accelerator(folder, total_limit, weight=1.0)
    accelerator.save_state()
    nn.init.constant_(model.module.weight, 2.0)
    accelerator.save_state()

    accelerator, model = plain_accelerator(folder, total_limit, weight=0.0)
    accelerator.load_state()
    assert model.module.weight.item() == 2.0
    nn.init.constant_(model.module.weight, 3.0)
    error = None
    try:
        accelerator.save_state()
    except ValueError as failure:
        error = str(failure)
    accelerator.load_state()
    return error, model.module.weight.item()


def our_save_after_restart(folder: Path) -> list[int]:
    trainer = trainer_in(folder, max_steps=2)
    steps = trainer.batches.steps(0)
    for _ in range(2):
        trainer.train_step(next(steps))
        trainer.save()
    again = resumed(folder, max_steps=3)
    again.fit()
    again.save()
    return [2, again.state.step, resumed(folder, max_steps=3).state.step]


def test_fact_4_a_save_after_a_resume_collides_or_is_passed_over_and_ours_is_the_newest(tmp_path: Path):
    ((error, _),) = run_distributed(plain_save_after_restart, 1, tmp_path / "unlimited", None)
    assert error is not None
    assert "already exists" in error
    ((error, weight),) = run_distributed(plain_save_after_restart, 1, tmp_path / "limited", 2)
    assert (error, weight) == (None, 2.0), "the third save took the first one's name, so the second counts as newest"

    assert run_distributed(our_save_after_restart, 1, tmp_path / "ours") == [[2, 3, 3]]


# --- fact 5: a flipped bit --------------------------------------------------------------------------------------------


def flip_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 0b0100_0000
    file.write_bytes(content)


def plain_load_with_a_flipped_bit(folder: Path) -> float:
    accelerator, model = plain_accelerator(folder, None, weight=1.0)
    nn.init.constant_(model.module.bias, 1.0)
    accelerator.save_state()
    flip_last_bit(folder / "checkpoints" / "checkpoint_0" / "model.safetensors")
    accelerator.load_state()
    return model.module.weight.item() * model.module.bias.item()


def our_load_with_a_flipped_bit(folder: Path) -> int:
    trainer = trainer_in(folder, max_steps=2)
    steps = trainer.batches.steps(0)
    for _ in range(2):
        trainer.train_step(next(steps))
        newest = trainer.save()
    assert newest is not None
    flip_last_bit(next(newest.glob("*.safetensors")))
    return resumed(folder, max_steps=2).state.step


def test_fact_5_a_flipped_bit_is_loaded_without_a_word_and_ours_passes_that_checkpoint_over(tmp_path: Path):
    (product,) = run_distributed(plain_load_with_a_flipped_bit, 1, tmp_path / "plain")
    assert product != 1.0
    assert run_distributed(our_load_with_a_flipped_bit, 1, tmp_path / "ours") == [1]

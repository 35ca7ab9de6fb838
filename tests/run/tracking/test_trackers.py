"""W&B and TensorBoard runs, read back, and faults of W&B, in a process each; training does not feel them."""

import json
import os
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.support.processes import ROOT, free_port
from tests.support.forked_python import run_forked
from toolkit.run.config.run import RunConfig
from toolkit.run.tracking import guard
from toolkit.run.tracking.guard import GuardedTracker, expand
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.run.tracking.trackers import labels_of

FAKE_KEY = "0123456789" * 4
PROGRAM = """
    import os
    import sys
    import time
    from pathlib import Path

    from tests.run.tracking.toy import train
    from toolkit.run.tracking import guard, trackers
    from toolkit.train.callbacks.base import Callback
    from toolkit.run.config.run import RunConfig

    # Other tests keep the machine busy.
    guard.CLOSE_S = trackers.WANDB_START_S = trackers.WANDB_FINISH_S = 60.0

    config = RunConfig(run_dir=Path(sys.argv[1]), tracker="wandb", cpu=True, log_every=2, lr=1e-2)

    def wait_for_offline_run(trainer):
        while not list(trainer.run.folder.glob("wandb/offline-run-*/*.wandb")):
            time.sleep(0.05)
"""


def run_program(program, folder, **env):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "ACCELERATE_"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NETRC": os.devnull} | env
    code = textwrap.dedent(PROGRAM) + textwrap.dedent(program)
    return run_forked("-c", code, str(folder), env=environment, timeout_s=120)


def assert_complete(done, folder):
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == list(range(2, 21, 2))
    assert json.loads((folder / "results.json").read_text())["steps"] == 20


def offline_folder(folder):
    (run_folder,) = (folder / "wandb").glob("offline-run-*")
    return run_folder


def inspect(folder, *options):
    """Return the records of the offline run in `folder` as JSON."""
    viewer = Path(sys.executable).parent / "wandb"
    command = [viewer, "leet", "inspect", *options, "--json", offline_folder(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def records_of(folder):
    return [json.loads(line) for line in inspect(folder).splitlines()]


def log_steps(records):
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    return [item for item in items if "train/loss" in item]


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "offline"
    program = """
    from toolkit.run import run
    run.PICTURES_S, run.PICTURES_SHARE = 0.0, 2.0  # draws the first log step, and not each

    class Confusion(Callback):
        def on_step_end(self, trainer):
            trainer.record("moe/load/wide", [expert / 4950 for expert in range(100)])
            trainer.record("eval/confusion", [[0.5, 0.25], [0.0, trainer.state.step / 100]])

    facts = {"classes": ["no", "yes"], "expert_placement": {"block": [[0, 1], [2, 3]]}}
    train(config, Confusion(), **facts)
    """
    done = run_program(program, folder)
    assert_complete(done, folder)
    summary = json.loads(inspect(folder, "--summary"))
    return SimpleNamespace(folder=folder, out=done.stdout, records=records_of(folder), summary=summary)


def test_run_without_api_key_is_offline_with_config_labels_and_metrics(offline_run):
    upload = f"wandb sync {offline_folder(offline_run.folder)}"
    assert f"W&B is offline (no API key: wandb login); {upload}" in offline_run.out
    rows = log_steps(offline_run.records)
    local = list(read_metrics(offline_run.folder / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [line["step"] for line in local]
    for row, line in zip(rows, local, strict=True):
        assert row["train/loss"] == pytest.approx(line["train/loss"])
        assert row["perf/samples_per_second"] > 0
        assert [row[f"moe/load/block/{expert:02d}"] for expert in range(4)] == [0.4, 0.3, 0.2, 0.1]
        assert (row["moe/load/wide._type"], row["moe/load/wide.bins"]) == ("histogram", list(range(101)))
        assert row["moe/load/wide.values"] == pytest.approx(line["moe/load/wide"])
    drawn = [record["history"]["item"] for record in offline_run.records if record["type"] == "history"]
    steps = [row["step"] for row in drawn if "plots/expert_load.count" in row]
    assert steps == sorted(steps)
    assert steps[0] < steps[-1] == 20, "one key for all steps"
    assert {row["step"] for row in rows if "eval/accuracy" in row} == {10, 20}
    metrics = [record["metric"] for record in offline_run.records if record["type"] == "metric"]
    assert [metric["step_metric"] for metric in metrics if metric.get("glob_name") == "*"] == ["step"]
    config = offline_run.summary["config"]
    assert config | {"lr": 0.01, "dataset": "rule", "world_size": 1, "log_every": 2} == config
    assert offline_run.summary["state"] == "finished"
    (run,) = [record["run"] for record in offline_run.records if record["type"] == "run"]
    labels = {"project": "toy", "display_name": "toy offline", "run_group": "toy", "tags": ["toy"]}
    assert run | labels == run


def test_offline_run_has_results_in_summary_and_tables(offline_run):
    summary = offline_run.summary["summary"]
    results = json.loads((offline_run.folder / "results.json").read_text())
    assert summary["test_accuracy"] == pytest.approx(results["test_accuracy"])
    files = offline_folder(offline_run.folder) / "files"
    (table,) = files.glob("media/table/results_*.table.json")
    rows = dict(json.loads(table.read_text())["data"])
    assert rows["test_loss"] == str(results["test_loss"])
    assert set(rows) == set(results)
    (table,) = files.glob("media/table/eval/confusion_*.table.json")
    confusion = json.loads(table.read_text())
    assert confusion["columns"] == ["true class", "no", "yes"]
    assert confusion["data"] == [["no", 0.5, 0.25], ["yes", 0.0, 0.2]], "of the last evaluation"
    for name in ("loss", "expert_load", "expert_placement"):
        (image,) = summary[f"plots/{name}"]["filenames"]
        assert (files / image).read_bytes().startswith(b"\x89PNG")
        assert (offline_run.folder / f"{name}.png").exists()


@pytest.mark.parametrize(
    ("variables", "flags", "labels"),
    [
        ({"PROJECT": "digits", "NAME": "first"}, {}, ("digits", "first", "toy tiny", ["toy", "tiny"])),
        (
            {"RUN_GROUP": "few", "NAME": "labels=100 seed=0", "TAGS": "sweep few", "PROJECT": "other"},
            {"project": "toy"},
            ("toy", "labels=100 seed=0", "few", ["toy", "tiny", "sweep few"]),
        ),
        ({}, {}, ("toy", "toy tiny run", "toy tiny", ["toy", "tiny"])),
        ({"NAME": "second"}, {"run_name": "first"}, ("toy", "first", "toy tiny", ["toy", "tiny"])),
    ],
)
def test_labels_are_from_flags_environment_or_recipe_and_preset(monkeypatch, variables, flags, labels):
    for name in ("PROJECT", "NAME", "RUN_GROUP", "TAGS"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    config = RunConfig(**flags)
    object.__setattr__(config, "preset", "tiny")
    assert tuple(labels_of(config, "toy", Path("runs/run")).values()) == labels


def test_server_that_is_down_leaves_complete_offline_run(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    done = run_program("train(config)", tmp_path, WANDB_API_KEY=FAKE_KEY, WANDB_BASE_URL=url)
    assert_complete(done, tmp_path)
    assert f"W&B is offline (127.0.0.1 does not answer); wandb sync {offline_folder(tmp_path)}" in done.stdout


FAILING_SERVER = """
    import http.server, threading

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

    class Wait(Callback):  # until W&B gives up, on its own thread
        def on_step_start(self, trainer, micro_batches):
            wait_for_offline_run(trainer)

    train(config, Wait())
"""


@pytest.mark.parametrize("answer", [401, None])
def test_online_start_that_fails_continues_offline(answer, tmp_path):
    done = run_program(FAILING_SERVER.format(answer=answer), tmp_path, WANDB_API_KEY=FAKE_KEY)
    assert_complete(done, tmp_path)
    assert done.stdout.index("W&B: sending metrics to toy.") < done.stdout.index("W&B is offline (")
    assert f"wandb sync {offline_folder(tmp_path)} uploads the run." in done.stdout
    assert len(log_steps(records_of(tmp_path))) == 10


DISTURBANCE = """
    import contextlib
    import psutil

    class Disturb(Callback):
        def on_step_end(self, trainer):
            if trainer.state.step == 10:
                wait_for_offline_run(trainer)
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):  # W&B has short-lived processes
                        if process.name().startswith("wandb-core"):
                            process.{action}()

    guard.CLOSE_S = 5.0
    train(config, Disturb())
"""


@pytest.mark.parametrize("action", ["kill", "suspend"])
def test_wandb_service_that_dies_or_hangs_costs_one_message(tmp_path, action):
    done = run_program(DISTURBANCE.format(action=action), tmp_path)
    assert_complete(done, tmp_path)
    assert done.stdout.count("W&B is off for this run (") == 1


def test_tensorboard_has_metrics_and_plots(tmp_path):
    program = """
    train(config.replace(tracker="tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(config.run_dir / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(2, 21, 2))
    assert abs(events.Scalars("moe/load/block/03")[0].value - 0.1) < 1e-6
    assert "plots/loss" in str(events.Tags()["images"]), events.Tags()
    """
    done = run_program(program, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tensorboard --logdir" in done.stdout
    assert list((tmp_path / "tensorboard").rglob("hparams.yml"))


class Backend:
    """Backend that records its calls; `faults` maps a call to an error, or to "hang"."""

    name = "fake"

    def __init__(self, **faults):
        self.faults, self.calls, self.released = faults, [], threading.Event()

    def __getattr__(self, call):
        return partial(self._do, call)

    def _do(self, call, *args, **kwargs):
        self.calls.append((call, *args, *kwargs.values()))
        fault = self.faults.get(call)
        if call == "kill":
            self.released.set()
        elif fault == "hang":
            self.released.wait()
        elif fault is not None:
            raise fault
        return "hello" if call == "start" else None


def run_with(backend, steps=3):
    """Log `steps` steps and return the printed messages."""
    messages = []
    tracker = GuardedTracker(backend, messages.append)
    for step in range(steps):
        tracker.log({"a": [1.0, 2.0]}, step)
    tracker.close()
    assert not tracker._thread.is_alive()
    return messages


def test_calls_reach_backend_in_order():
    backend = Backend()
    assert run_with(backend, steps=1) == ["hello"]
    assert backend.calls == [("start",), ("log", {"a/00": 1.0, "a/01": 2.0}, 0), ("finish", False), ("abandon",)]


@pytest.mark.parametrize("call", ["start", "log", "finish"])
@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit(3), KeyboardInterrupt()])
def test_error_in_backend_turns_tracker_off_with_one_message(call, error):
    backend = Backend(**{call: error}, abandon=error)
    assert [message for message in run_with(backend) if message != "hello"] == [
        f"fake is off for this run ({str(error) or 'KeyboardInterrupt'}); metrics.jsonl has every line."
    ]
    assert backend.calls[-1] == ("abandon",)


@pytest.mark.parametrize("call", ["start", "log", "finish", "abandon"])
def test_backend_that_hangs_is_killed(call, monkeypatch):
    monkeypatch.setattr(guard, "CLOSE_S", 0.05)
    backend = Backend(**{call: "hang"})
    assert sum("is off for this run (no answer" in message for message in run_with(backend)) == 1
    assert ("kill",) in backend.calls


def test_full_queue_turns_tracker_off(monkeypatch):
    monkeypatch.setattr(guard, "QUEUE_LENGTH", 10)
    monkeypatch.setattr(guard, "CLOSE_S", 0.05)
    messages = run_with(Backend(start="hang"), steps=100)
    assert messages[0] == "fake is off for this run (too slow); metrics.jsonl has every line."
    assert sum("is off" in message for message in messages) == 1


def test_expand_keeps_all_values_of_long_lists():
    flat = expand({"load": [0.5] * 100, "none": None, "some": [1.0, None], "x": 1, "table": [[0.5]] * 100})
    assert flat == {"load": [0.5] * 100, "some/00": 1.0, "x": 1}

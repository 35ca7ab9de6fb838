"""The command `toolkit doctor`."""

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.support.processes import program_environment
from tests.doctor.test_causes import TOY
from tests.support.forked_python import run_forked
from toolkit.commands import main

PLAIN = """
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))
data = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.randint(2, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
"""
WARM_UP = PLAIN.replace(
    "ExponentialLR(optimizer, 0.5)",
    "LambdaLR(optimizer, lambda step: min(1, step / (8 * accelerator.num_processes)))",
)
SPLIT_BATCHES = WARM_UP.replace("steps=2", "steps=2, dataloader_config=DataLoaderConfiguration(split_batches=True)")
FUNCTIONAL_DROPOUT = PLAIN.replace("nn.Dropout(0.5)", "Dropout()").replace(
    "\nset_seed(0)",
    """
class Dropout(nn.Module):
    def forward(self, x):
        x = nn.functional.alpha_dropout(nn.functional.dropout(x, p=0.5, training=self.training), 0.3, True)
        rows = x[:, None, :, None]
        return x + nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.2)[:, 0, :, 0]

set_seed(0)""",
)

Doctor = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """Function that runs `toolkit doctor` on a script, with ranks as forks."""

    def run(
        text: str | None, *words: str, options: Sequence[str] = (), code: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        if text is not None:
            (tmp_path / "script.py").write_text(text)
        command = ("-m", "toolkit", "doctor", *options, str(tmp_path / "script.py"), *words)
        done = run_forked(*command, env=program_environment() | environment, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def test_script_runs_in_a_new_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "script.py"
    script.write_text("import accelerate\nraise RuntimeError('out of luck')")
    assert main(["doctor", str(script)]) == 2
    assert "fails in one process: RuntimeError: out of luck" in capsys.readouterr().err


def test_correct_script_is_healthy_and_has_a_json_report(doctor: Doctor, tmp_path: Path):
    out = doctor(PLAIN, options=["--out", str(tmp_path / "report.json")]).stdout
    assert "healthy: both learn the same." in out
    assert "dropout" in out
    assert "split_batches=True" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ok"], report["steps"], report["findings"]) == (True, 3, [])
    assert "save and load" in [check["quantity"] for check in report["checks"]]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (WARM_UP, 0, "the scheduler makes a step for each process"),
        (SPLIT_BATCHES, 1, "likely cause: learning rate depends on the world"),
        (FUNCTIONAL_DROPOUT, 0, "dropout was switched off"),
    ],
    ids=["warm-up of all processes", "warm-up with split batches", "functional dropout"],
)
def test_report_names_schedules_and_dropout(text: str, code: int, message: str, doctor: Doctor):
    assert message in doctor(text, code=code).stdout


def test_script_has_no_variables_of_a_launcher(doctor: Doctor):
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TOOLKIT_LAUNCH")
    script = f"import os\nraise ValueError(sorted({{*os.environ}} & {set(names)}))\n"
    done = doctor(script, code=2, **dict.fromkeys(names, "2"))
    assert "fails in one process: ValueError: []" in done.stderr


def test_fault_is_named_with_its_remedy_and_exit_code_1(doctor: Doctor):
    out = doctor(TOY.read_text(), "buffer", code=1).stdout
    assert "likely cause: buffer overwritten by broadcast" in out
    assert "remedy   keep counts of a rank in a plain attribute" in out
    assert "WRONG buffers of ranks" in out


def test_rank_that_skips_a_step_is_named():
    code = (
        "import sys, toolkit.doctor.examine as examine; from toolkit.commands import main;"
        "examine.MOST_WAIT_S = 1.0;"
        f"sys.exit(main(['doctor', {str(TOY)!r}, 'skip']))"
    )
    done = run_forked("-c", code)
    assert done.returncode == 1, done.stderr
    for message in ("likely cause: ranks out of step", "rank 0 at step 2", "rank 1 at step 3"):
        assert message in done.stdout


def test_report_without_a_script_names_versions_and_sums_over_processes():
    done = run_forked("-m", "toolkit", "doctor", "--num-processes=2", env=program_environment(ACCELERATE_USE_CPU="1"))
    assert done.returncode == 0, done.stderr
    assert f"torch {torch.__version__}" in done.stdout
    assert "\nall-reduce   2 process(es) on cpu, " in done.stdout


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (None, [], "not a file"),
        ("", ["--num-processes", "2"], "Use its --processes"),
        ("print('hello')", [], "the doctor saw no optimizer step"),
        (PLAIN.replace("batch_size=8", "batch_size=7"), [], "runs in one process and fails in 2: ValueError"),
    ],
)
def test_script_that_cannot_be_examined_exits_with_code_2(text: str | None, words, message: str, doctor: Doctor):
    last = doctor(text, *words, code=2).stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_offline_wandb_run_of_the_script_is_deleted(doctor: Doctor, tmp_path: Path):
    doctor("import wandb\nwandb.init(mode='offline').finish()\nraise RuntimeError('it was recorded')", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]

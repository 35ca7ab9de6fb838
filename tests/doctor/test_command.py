"""`toolkit doctor` as people call it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.doctor.test_causes import TOY
from tests.support.forked_python import run_forked
from tests.support.helpers import program_environment
from toolkit.commands import main

PLAIN = """
import torch
from accelerate import Accelerator
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


def doctor(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """`toolkit doctor`, whose ranks are forks; `test_a_script_is_run_in_a_new_process` starts one as it does."""
    return run_forked("-m", "toolkit", "doctor", *map(str, words))


def test_a_script_is_run_in_a_new_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "script.py"
    script.write_text("import accelerate\nraise RuntimeError('out of luck')")
    assert main(["doctor", str(script)]) == 2
    assert "fails in one process: RuntimeError: out of luck" in capsys.readouterr().err


def test_a_plain_script_in_order_is_healthy(tmp_path: Path):
    script, report = tmp_path / "plain.py", tmp_path / "report.json"
    script.write_text(PLAIN)
    done = doctor("--out", report, script)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "healthy: both learn the same." in out
    assert "dropout" in out
    assert "split_batches=True" in out, "what was changed for the comparison is said"
    found = json.loads(report.read_text())
    assert (found["ok"], found["steps"], found["findings"]) == (True, 3, [])
    assert "save and load" in [check["quantity"] for check in found["checks"]]


SCHEDULE = "schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)"
WARM_UP = "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / ({})))"


def test_doctor_of_a_schedule_in_steps_of_all_processes_is_healthy(tmp_path: Path):
    script = tmp_path / "warm_up.py"
    script.write_text(PLAIN.replace(SCHEDULE, f"schedule = {WARM_UP.format('8 * accelerator.num_processes')}"))
    done = doctor(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the scheduler makes a step for each process" in done.stdout


def test_doctor_of_a_schedule_that_split_batches_makes_too_long_names_it(tmp_path: Path):
    script = tmp_path / "warm_up.py"
    text = PLAIN.replace(SCHEDULE, f"schedule = {WARM_UP.format('8 * accelerator.num_processes')}")
    splits = "dataloader_config=DataLoaderConfiguration(split_batches=True)"
    text = text.replace("import Accelerator", "import Accelerator, DataLoaderConfiguration")
    script.write_text(text.replace("(gradient_accumulation_steps=2)", f"(gradient_accumulation_steps=2, {splits})"))
    done = doctor(script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "likely cause: learning rate depends on the world" in done.stdout


def test_a_script_is_no_rank_of_the_world_that_the_doctor_is_started_in(tmp_path: Path):
    launched = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "PMI_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "1",
        "TOOLKIT_LAUNCH": "folder",
    }
    script = tmp_path / "script.py"
    script.write_text(f"import os\nraise ValueError(sorted({{*os.environ}} & {set(launched)}))\n")
    done = run_forked("-m", "toolkit", "doctor", str(script), env=program_environment() | launched)
    assert done.returncode == 2
    assert "fails in one process: ValueError: []" in done.stderr


def test_a_fault_is_named_with_its_remedy_and_the_exit_code_is_1():
    done = doctor(TOY, "buffer")
    assert done.returncode == 1, done.stderr
    out = done.stdout
    assert "likely cause: buffer overwritten by broadcast" in out
    assert "remedy   keep counts of a rank in a plain attribute" in out
    assert "WRONG buffers of ranks" in out


def test_dropout_that_is_no_module_raises_no_alarm(tmp_path: Path):
    functions = """
class Dropped(nn.Module):
    def forward(self, x):
        x = nn.functional.alpha_dropout(nn.functional.dropout(x, p=0.5, training=self.training), 0.3, True)
        rows = x[:, None, :, None]
        return x + nn.functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.2)[:, 0, :, 0]

set_seed(0)"""
    script = tmp_path / "functional.py"
    script.write_text(PLAIN.replace("nn.Dropout(0.5)", "Dropped()").replace("\nset_seed(0)", functions))
    done = doctor(script)
    assert done.returncode == 0, done.stderr
    assert "dropout was switched off" in done.stdout


def test_a_rank_that_skips_a_step_is_named():
    code = (
        "import sys, toolkit.doctor.examine as examine; from toolkit.commands import main;"
        "examine.MOST_WAIT_S = 1.0;"
        f"sys.exit(main(['doctor', {str(TOY)!r}, 'skip']))"
    )
    done = run_forked("-c", code)
    assert done.returncode == 1, done.stderr
    out = done.stdout
    assert "likely cause: ranks out of step" in out
    assert "rank 0 at step 2" in out
    assert "rank 1 at step 3" in out


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        (None, [], "not a file"),
        ("", ["--num-processes", "2"], "Use its --processes"),
        ("print('hello')", [], "the doctor saw no optimizer step"),
        (PLAIN.replace("batch_size=8", "batch_size=7"), [], "runs in one process and fails in 2: ValueError"),
    ],
)
def test_what_cannot_be_examined_is_one_line_and_exit_code_2(
    content: str | None, words: list[str], said: str, tmp_path: Path
):
    script = tmp_path / "script.py"
    if content is not None:
        script.write_text(content)
    done = doctor(script, *words)
    assert done.returncode == 2, done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert said in last


def test_a_script_that_records_offline_leaves_no_wandb_run_behind(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import wandb\nwandb.init(mode='offline').finish()\nraise RuntimeError('it was recorded')")
    assert run_forked("-m", "toolkit", "doctor", str(script), cwd=tmp_path).returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]

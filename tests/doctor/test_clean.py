"""Correct scripts have no finding."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.support.processes import ROOT
from tests.doctor.recording import record
from toolkit.doctor.compare import Comparison, Evidence
from toolkit.doctor.examine import judge
from toolkit.doctor.recorder import Variant

RECIPE = ["debug", "--dataset", "digits", "--tracker", "none"]
START = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

set_seed(0)
accelerator = Accelerator()
mine = slice(accelerator.process_index, None, accelerator.num_processes)
"""
ROUNDED = f"""{START}
class Rounded(nn.Module):
    def forward(self, x):
        if accelerator.num_processes == 1:
            return x
        noise = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
        return x + 1e-7 * x.detach().square().mean().sqrt() * noise

layers = []
for _ in range(8):
    layers += [nn.Linear(16, 16), Rounded(), nn.Tanh()]
    nn.init.orthogonal_(layers[-3].weight, gain=3.0)
model = nn.Sequential(*layers, nn.Linear(16, 3)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(5):
    x, y = torch.randn(16, 16).double(), torch.randint(3, (16,))
    accelerator.backward(nn.functional.cross_entropy(model(x[mine]), y[mine]))
    optimizer.step()
    optimizer.zero_grad()
"""
"""Rounding errors of float32 in several processes, which later layers amplify. In float64, so that they are the same on
every processor."""
INACTIVE = f"""{START}
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 3))
model[0].bias.data[:500] = -10
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    x, y = torch.randn(16, 32) + 50 * (step > 0), torch.randint(3, (16,))
    accelerator.backward(nn.functional.cross_entropy(model(x[mine]), y[mine]))
    if step == 1:
        for parameter in model.parameters():
            parameter.grad *= 1 + 2e-3 * (accelerator.num_processes > 1)
    optimizer.step()
    optimizer.zero_grad()
"""
"""A small fault, and units that ReLU makes inactive. If rounding moved their weights, later steps would differ."""


def runner(folder: Path, script: Path | str, *args: str) -> Callable[..., Evidence]:
    """Return a function that records `script` under a name, on a number of processes, as a variant."""

    def run(name: str, processes: int, variant: Variant = "as it is") -> Evidence:
        run_dir = ["--run-dir", str(folder / name / "run")] if args else []
        return record(folder / name, processes, ROOT / script, *args, *run_dir, variant=variant)

    return run


def assert_clean(one: Evidence, many: Evidence, run: Callable[..., Evidence]) -> Comparison:
    comparison, findings = judge(one, many, 1e-6, run)
    assert [check for check in comparison.checks if not check.ok] == []
    assert findings == []
    return comparison


@pytest.mark.parametrize(
    ("world", "flags"),
    [(1, ""), (2, "--ep-size 1 --balance bias"), (4, "--ep-size 2 --gradient-accumulation-steps 2")],
)
def test_correct_recipe_has_no_finding(world: int, flags: str, tmp_path: Path):
    run = runner(tmp_path, "recipes/mnist_moe.py", *RECIPE, *flags.split())
    comparison = assert_clean(run("one", 1), run("many", world), run)
    assert comparison.steps == 3
    assert comparison.many.first.saved_by == "Trainer.save and restore"


def test_correct_plain_loop_with_a_copy_has_no_finding(tmp_path: Path):
    text = (ROOT / "docs/examples/plain_accelerate.py").read_text()
    text = text.replace("for epoch", "import copy\ncopied = copy.deepcopy(accelerator.unwrap_model(model))\nfor epoch")
    text = text.replace("accelerator.backward", "copied(x[:1])\n        accelerator.backward")  # samples of no step
    (tmp_path / "loop.py").write_text(text)
    run = runner(tmp_path, tmp_path / "loop.py")
    comparison = assert_clean(run("one", 1), run("many", 2), run)
    assert comparison["expert counts"] in comparison.checks
    assert comparison.many.first.saved_by == "ExpertParallel.save and load"


def test_growing_rounding_errors_have_no_finding(tmp_path: Path):
    (tmp_path / "rounded.py").write_text(ROUNDED)
    run = runner(tmp_path, tmp_path / "rounded.py")
    one, many = run("one", 1), run("many", 2)
    assert not Comparison(one, many, 1e-6)["gradients"].ok, "errors are within the tolerance"
    assert_clean(one, many, run)


def test_small_fault_with_inactive_units_is_found(tmp_path: Path):
    (tmp_path / "inactive.py").write_text(INACTIVE)
    run = runner(tmp_path, tmp_path / "inactive.py")
    _, findings = judge(run("one", 1), run("many", 2), 1e-6, run)
    assert [finding.name for finding in findings] == ["gradients scaled"]

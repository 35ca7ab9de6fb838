"""No alarm on recipes that are in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doctor.watched import watched
from tests.support.helpers import ROOT
from toolkit.doctor.compare import Comparison, Evidence
from toolkit.doctor.examine import judge
from toolkit.doctor.recorder import Variant

RECIPE = ["debug", "--dataset", "digits", "--tracker", "none"]

ROUNDED = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

class Rounded(nn.Module):
    def forward(self, x):
        if accelerator.num_processes == 1:
            return x
        noise = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
        return x + 1e-7 * x.detach().square().mean().sqrt() * noise

set_seed(0)
accelerator = Accelerator()
layers = []
for _ in range(8):
    layers += [nn.Linear(16, 16), Rounded(), nn.Tanh()]
    nn.init.orthogonal_(layers[-3].weight, gain=3.0)
model = nn.Sequential(*layers, nn.Linear(16, 3)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(5):
    x, y = torch.randn(16, 16).double(), torch.randint(3, (16,))
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    accelerator.backward(nn.functional.cross_entropy(model(x[mine]), y[mine]))
    optimizer.step()
    optimizer.zero_grad()
"""
"""In order, but what a layer returns in several processes differs in float32's last bit, and the next layers make that
more. In float64, so that it is the same on every processor."""


def runner(folder: Path, script: str, *args: str) -> Callable[..., Evidence]:
    """Runs `script` when it is called with a name, processes and variant, and reads what they recorded."""

    def run(name: str, processes: int, variant: Variant = "as it is") -> Evidence:
        run_dir = ["--run-dir", str(folder / name / "run")] if args else []
        return watched(folder / name, processes, ROOT / script, *args, *run_dir, variant=variant)

    return run


@pytest.mark.parametrize(
    ("world", "args"),
    [
        (1, []),
        (2, ["--ep-size", "1", "--balance", "bias"]),
        (4, ["--ep-size", "2", "--gradient-accumulation-steps", "2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_recipe_in_order_raises_no_alarm(world: int, args: list[str], tmp_path: Path):
    run = runner(tmp_path, "recipes/mnist_moe.py", *RECIPE, *args)
    many = run("many", world)
    comparison, findings = judge(run("one", 1), many, 1e-6, run)
    assert comparison.steps == 3
    assert [check for check in comparison.checks if not check.ok] == []
    assert findings == []
    assert many.first.saved_by == "Trainer.save and restore"


def test_rounding_errors_that_grow_raise_no_alarm(tmp_path: Path):
    script = tmp_path / "rounded.py"
    script.write_text(ROUNDED)
    run = runner(tmp_path, str(script))
    one, many = run("one", 1), run("many", 2)
    assert not Comparison(one, many, 1e-6)["gradients"].ok, "this is about gradients beyond the tolerance"
    comparison, findings = judge(one, many, 1e-6, run)
    assert [check for check in comparison.checks if not check.ok] == []
    assert findings == []


DEAD = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

set_seed(0)
accelerator = Accelerator()
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 3))
model[0].bias.data[:500] = -10
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    x, y = torch.randn(16, 32) + 50 * (step > 0), torch.randint(3, (16,))
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    accelerator.backward(nn.functional.cross_entropy(model(x[mine]), y[mine]))
    if step == 1:
        for parameter in model.parameters():
            parameter.grad *= 1 + 2e-3 * (accelerator.num_processes > 1)
    optimizer.step()
    optimizer.zero_grad()
"""
"""A small fault, and units that ReLU switches off: where rounding moved those, they would move what comes after."""


def test_units_that_are_switched_off_do_not_hide_a_small_fault(tmp_path: Path):
    script = tmp_path / "dead.py"
    script.write_text(DEAD)
    run = runner(tmp_path, str(script))
    _, findings = judge(run("one", 1), run("many", 2), 1e-6, run)
    assert [finding.name for finding in findings] == ["gradients scaled"]


def test_the_example_of_a_plain_loop_raises_no_alarm(tmp_path: Path):
    def run(name: str, processes: int, _: Variant = "as it is") -> Evidence:
        return watched(tmp_path / name, processes, ROOT / "docs/examples/plain_accelerate.py")

    many = run("many", 2)
    comparison, findings = judge(run("one", 1), many, 1e-6, run)
    assert [check for check in comparison.checks if not check.ok] == []
    assert findings == []
    assert comparison["expert counts"] in comparison.checks
    assert many.first.saved_by == "ExpertParallel.save and load"

"""Expert parallelism in a loop on torch only: imports, the example script, and its changes for FSDP2 and Fabric."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.processes import ROOT, free_port, program_environment
from tests.support.forked_python import ForkedPython

EXAMPLE = ROOT / "docs" / "examples" / "torch_alone.py"
PAGE = ROOT / "docs" / "experts" / "torch_alone.md"


def test_public_names_of_experts_import_torch_only():
    code = (
        "import sys; from toolkit import experts; "
        "[getattr(experts, n) for n in experts.__all__];"
        "print(*{'torch', 'transformers', 'accelerate', 'datasets', 'wandb', 'peft'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], env=program_environment()) == b"torch\n"


def run_example(script: Path, folder: Path, world: int = 2) -> list[tuple[str, str]]:
    """Return the last loss of each rank, before and after loading."""
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    environments = [program_environment(**launched, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(world)]
    ranks = [ForkedPython(str(script), str(folder), env=environment) for environment in environments]
    try:
        outputs, errors = zip(*(rank.communicate(timeout=300) for rank in ranks), strict=True)
        assert [rank.returncode for rank in ranks] == [0] * world, "".join(errors)
    finally:
        for rank in ranks:
            rank.kill()
    return sorted(re.findall(r"loss ([\d.]+), again ([\d.]+)", "".join(outputs)))


def write_changed(script: Path, block: str) -> Path:
    """Write the example to `script`, changed by the page's block of this kind."""
    text = EXAMPLE.read_text()
    (diff,) = re.findall(rf"```{block}\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    for hunk in diff.split("\n\n"):
        before, after = ("\n".join(re.findall(f"^[{sign}](.*)", hunk, re.MULTILINE)) for sign in ("-", "+"))
        assert text.count(before) == 1
        text = text.replace(before, after)
    script.write_text(text)
    return script


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    return run_example(EXAMPLE, tmp_path_factory.mktemp("torch"))


def test_example_repeats_its_losses_after_loading(losses: list[tuple[str, str]]):
    assert len(losses) == 2
    assert all(before == after for before, after in losses)


def test_example_under_fabric_has_equal_losses(losses: list[tuple[str, str]], tmp_path: Path):
    pytest.importorskip("lightning.fabric")
    assert run_example(write_changed(tmp_path / "script.py", "diff"), tmp_path / "saved") == losses


def test_example_with_fsdp2_repeats_its_losses_after_loading(tmp_path: Path):
    losses = run_example(write_changed(tmp_path / "script.py", "diff fsdp2"), tmp_path / "saved", world=4)
    assert len(losses) == 4
    assert all(before == after for before, after in losses)

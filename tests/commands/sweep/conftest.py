"""The toy recipe as a file."""

from pathlib import Path

import pytest

from tests.commands.sweep.toy import RECIPE


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    script = tmp_path / "toy.py"
    script.write_text(RECIPE)
    return script

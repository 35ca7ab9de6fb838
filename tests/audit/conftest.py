from collections.abc import Callable
from pathlib import Path

import pytest

from tests.audit.adapters import save_adapter
from toolkit.audit.convert import convert
from toolkit.commands import main


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Equal adapters in each layout, and their base."""
    folder = tmp_path_factory.mktemp("layouts")
    save_adapter(folder, "qwen3_moe")
    for layout in ("vllm", "sglang"):
        convert(folder / "peft", folder / layout, layout, folder / "base")
    return folder


@pytest.fixture
def toolkit(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs a command in this process, and returns its exit code and printed text."""

    def run(*words: object) -> tuple[int, str]:
        code = main([*map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run

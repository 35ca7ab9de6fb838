from pathlib import Path

import pytest

from tests.audit.adapters import save_adapter
from toolkit.audit.convert import convert


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Equal adapters in each layout, and their base."""
    folder = tmp_path_factory.mktemp("layouts")
    save_adapter(folder, "qwen3_moe")
    for layout in ("vllm", "sglang"):
        convert(folder / "peft", folder / layout, layout, folder / "base")
    return folder

"""Every test here has its own cache folder, and neither the data nor the Hub of the machine it runs on."""

from pathlib import Path

import huggingface_hub.constants
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(folder / "tensors"))
    monkeypatch.delenv("TOOLKIT_DATA_DIR", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    return folder

"""Remote code in a model folder does not run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.tokenizer import Tokenizer
from toolkit.integrations.transformers import causal_lm
from toolkit.integrations.transformers.language_models import read_config

CODE = '__import__("pathlib").Path(__file__).with_name("ran").touch()'


@pytest.mark.parametrize("load", [causal_lm, read_config, Tokenizer])
def test_load_of_folder_with_custom_code_raises(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    names |= {"AutoTokenizer": ["code.Tokenizer", None]}
    config = {"model_type": "unknown", "auto_map": names, "tokenizer_class": "Unknown"}
    (tmp_path / "code.py").write_text(CODE)
    for file in ("config.json", "tokenizer_config.json"):
        (tmp_path / file).write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    with pytest.raises(ValueError, match="contains custom code"):
        load(str(tmp_path))
    assert questions == []
    assert not [*tmp_path.rglob("ran")]

"""The model card of a run, made from what its folder holds: the README.md that `toolkit push` uploads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.commands.report.comparison import metric_cell
from toolkit.commands.report.records import RunRecord
from toolkit.data.identity import describe
from toolkit.data.images import HUB_REPOS
from toolkit.run.folder import DATA
from toolkit.run.markdown import markdown_table
from toolkit.run.runs_table import is_number
from toolkit.run.summary import facts

THIS_FOLDER = '"this folder"'
"""Where the card that a run leaves beside its weights names no repository."""
LOAD = {
    "transformers": """from transformers import {architecture}

model = {architecture}.from_pretrained("{name}")""",
    "peft": """from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({base})  # what was adapted: a name of the Hub, or a folder
model = PeftModel.from_pretrained(base, "{name}")""",
    "toolkit": """from huggingface_hub import hf_hub_download
from safetensors.torch import load_file


def load(model):
    # model: what build_model of the recipe {recipe} makes in one process, with the settings of run/config.json
    model.load_state_dict(load_file(hf_hub_download("{name}", "model.safetensors")))
    return model.eval()""",
}
"""Library -> how its users load the weights."""


def model_card(
    run: RunRecord,
    folder: Path,
    name: str,
    *,
    library: str,
    pictures: Sequence[str],
    license_id: str | None,
    before: str | None,
) -> str:
    """The card of `run`, whose weights lie in `folder` as `library` reads them, for the repository `name`.

    `before` is the card that the run has left beside its weights: its metadata and text come first. Paths of the
    machine are cut to their last part.
    """
    from huggingface_hub import ModelCard, ModelCardData

    left = ModelCard(before) if before else None
    words = [run.results.get("recipe"), "mixture-of-experts" if run.results.get("expert_placement") else None]
    data = left.data.to_dict() if left else {"library_name": library}
    tags = [*data.pop("tags", []), "toolkit", *filter(None, words)]
    about: dict[str, Any] = {**data, "tags": list(dict.fromkeys(tags))}
    if license_id:
        about["license"] = license_id
    if (repo := HUB_REPOS.get(str(run.results.get("dataset")))) is not None:
        about["datasets"] = [repo]
    body = left.text.strip().replace(THIS_FOLDER, f'"{name}"') if left else _introduction(run, folder, name, library)
    parts = [body, *_figures(run), _training(run), *_pictures(pictures), _license(license_id)]
    return f"---\n{ModelCardData(**about).to_yaml()}\n---\n\n" + without_paths("\n\n".join(parts)) + "\n"


def without_paths(text: str) -> str:
    """`text`, which may be JSON, with each absolute path cut to its last part: folders are named after people."""
    text = re.sub(r'(?<=")/(?:[^"\n]*/)?([^"/\n]+)/?(?=")', r"\1", text)
    return re.sub(r"""(?<![\w.~:/<-])/(?:[^\s/"':;,()\[\]{}]+/)+([^\s/"':;,()\[\]{}]+)/?""", r"\1", text)


def _introduction(run: RunRecord, folder: Path, name: str, library: str) -> str:
    recipe, dataset = run.results.get("recipe"), run.results.get("dataset")
    about = _json(folder / ("adapter_config.json" if library == "peft" else "config.json"))
    architecture = next(iter(about.get("architectures") or ()), "AutoModel")
    base = json.dumps(about.get("base_model_name_or_path") or "the model that was adapted")
    code = LOAD[library].format(name=name, architecture=architecture, base=base, recipe=recipe)
    return f"# {recipe} on {dataset}\n\n```python\n{code}\n```"


def _figures(run: RunRecord) -> list[str]:
    tests = [
        (key, metric_cell(key, value))
        for key, value in run.results.items()
        if key.startswith("test_") and is_number(value)
    ]
    return [_section("Figures", _table(["on data that it was not trained on", ""], tests))] if tests else []


def _training(run: RunRecord) -> str:
    start = run.starts[-1] if run.starts else {}
    versions = [
        f"{package} {start[package]}" for package in ("toolkit", "torch", "accelerate", "python") if package in start
    ]
    noted = run.config.get(DATA)
    data = [f"{use}: {describe(of)}" for use, of in noted.items()] if isinstance(noted, Mapping) else []
    rows = [
        *facts(run.results),
        ("identity of the data", "; ".join(data)),
        ("command", f"`{start['command']}`" if "command" in start else ""),
        ("code", start.get("git revision", "")),
        ("versions", ", ".join(versions)),
        ("hardware", start.get("hardware", "")),
    ]
    table = _table(["", ""], [row for row in rows if row[1]])
    return _section("How it was trained", f"{table}\nAll settings, numbers and metrics of the run are in `run/`.")


def _pictures(names: Sequence[str]) -> list[str]:
    return [_section("Curves", "\n\n".join(f"![{Path(name).stem}]({name})" for name in names))] if names else []


def _license(license_id: str | None) -> str:
    return _section("Licence", license_id or "None was given: ask the owner before you use it.")


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text.rstrip()}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table([head, *rows], aligned=True)


def _json(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

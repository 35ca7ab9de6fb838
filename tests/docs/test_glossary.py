"""Words of all files: the glossary of CONTRIBUTING, terms of the field in prose, and names that exist."""

import ast
import pkgutil
import re
import subprocess
from functools import cache

from benchmarks.support.processes import ROOT

HISTORY = ("CHANGELOG.md", "docs/project/notes/")
GLOSSARY = {"CONTRIBUTING.md", "tests/docs/test_glossary.py"}
"""Files that list the words to avoid."""
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

TERMS = {
    r"mixtures?(?! ?-?of)": "MoE model, MoE layer",
    r"spread(?=s? (the )?experts)|experts (are )?spread": "shard",
    r"travels?": "is dispatched",
    r"refus\w+": "raises an error, is rejected",
    r"lines? of metrics": "log step",
    r"nobody|ours|anew|for want of|in place of|legs|contenders?|misfits?|oddit\w+": "a plain word",
    r"to the (last )?bit|bit for bit|the same bits": "bitwise identical",
    r"stock PEFT": "unmodified PEFT",
    r"balance penalty": "auxiliary load-balancing loss",
    r"so (is|are) (the|an?|its|those)": "a sentence that begins with its subject",
}
"""Pattern not used in pages, docstrings and messages -> replacement."""


@cache
def glossary() -> list[tuple[str, list[str]]]:
    """Return each term of the glossary with its synonyms to avoid."""
    rows = [line.strip().strip("|").split("|") for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()]
    return [(row[0].strip(), re.findall(r"`([^`]+)`", row[2])) for row in rows if len(row) == 3]


def misused(text: str) -> list[tuple[str, str]]:
    """Return (word, replacement) pairs; `rank_of_seat` and `RankOfSeat` are three words each."""
    words = f" {' '.join(WORDS.findall(text)).lower()} "
    return [(word, term) for term, avoided in glossary() for word in avoided if f" {word} " in words]


def texts() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ends = (".py", ".pyi", ".md", ".yaml", ".sh", ".sbatch", "Makefile")
    return sorted(n for n in set(listed) - GLOSSARY if n.endswith(ends) and not n.startswith(HISTORY))


def test_files_use_terms_of_the_glossary():
    found = set()
    for name in texts():
        lines = (ROOT / name).read_text().splitlines()
        # Two lines at a time, because a phrase may span a line break.
        for first, second in zip(lines, [*lines[1:], ""], strict=True) if lines else ():
            found |= {(name, *pair) for pair in misused(f"{first}\n{second}")}
    assert not found, "; ".join(f"{name}: {word!r}: use {term}" for name, word, term in sorted(found))


def test_prose_uses_terms_of_the_field():
    found = []
    for name in [*texts(), "CHANGELOG.md", "CONTRIBUTING.md"]:
        if name.endswith(".md") and not name.startswith("docs/project/upstream/"):
            code = r"```.*?```|`[^`]*`|<!--.*?-->|\]\([^)]*\)"
            passages = [re.sub(code, " ", (ROOT / name).read_text(), flags=re.DOTALL)]
        elif name.endswith(".py") and name.startswith(("toolkit/", "recipes/")):
            nodes = ast.walk(ast.parse((ROOT / name).read_text()))
            strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            passages = [re.sub(r"`[^`]*`", " ", text) for text in strings if text.count(" ") > 2]
        else:
            continue
        for text in passages:
            for term, better in TERMS.items():
                matches = re.finditer(rf"\b({term})\b", text, re.IGNORECASE)
                found += [f"{name}: {match[0]}: {better}" for match in matches]
    assert not found, "\n".join(found)


DOTTED = re.compile(r"(?<![\w./-])(?:toolkit|tk)((?:\.[A-Za-z]\w*)+)")


def exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def missing(text: str) -> list[str]:
    """Return the names below `toolkit` or `tk` in `text` that do not exist."""
    return sorted({name for rest in DOTTED.findall(text) if not exists(name := f"toolkit{rest}")})


def sources() -> list[str]:
    folders = ("toolkit/", "recipes/", "docs/", "README.md")
    return ["CONTRIBUTING.md", *(name for name in texts() if name.startswith(folders))]


def test_mentioned_test_files_exist():
    named = {file for name in sources() for file in re.findall(r"\btests/[\w/]+\.py", (ROOT / name).read_text())}
    assert len(named) > 20
    assert {file for file in named if not (ROOT / file).exists()} == set()


def test_mentioned_names_exist():
    found = {name: missing((ROOT / name).read_text()) for name in sources()}
    assert {name: names for name, names in found.items() if names} == {}

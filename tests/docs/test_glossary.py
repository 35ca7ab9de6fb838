"""The words of CONTRIBUTING's glossary hold in code, flags, metric names and docs, the terms of the field in texts."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache

from tests.support.helpers import ROOT

HISTORY = ("CHANGELOG.md", "docs/project/notes/")
"""Records of what was, in the words of their day."""
GLOSSARY = {"CONTRIBUTING.md", "tests/docs/test_glossary.py"}
"""Where the words to avoid are listed."""
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
"""A pattern that pages, docstrings and messages do not use -> what they say instead."""


@cache
def glossary() -> list[tuple[str, list[str]]]:
    """Each row of the glossary: what to say, and the words in code marks that are not to be used for it."""
    rows = [line.strip().strip("|").split("|") for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()]
    return [(row[0].strip(), re.findall(r"`([^`]+)`", row[2])) for row in rows if len(row) == 3]


def spoken(text: str) -> str:
    """The words of `text` in lower case, identifiers taken apart: `rank_of_seat`, `RankOfSeat` are three words each."""
    return " ".join(WORDS.findall(text)).lower()


def misused(text: str) -> list[tuple[str, str]]:
    """Pairs of what is written and what to say."""
    words = f" {spoken(text)} "
    return [(word, say) for say, avoided in glossary() for word in avoided if f" {word} " in words]


def texts() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ends = (".py", ".pyi", ".md", ".yaml", ".sh", ".sbatch", "Makefile")
    ours = [name for name in listed if name.endswith(ends)]
    return sorted(name for name in set(ours) - GLOSSARY if not name.startswith(HISTORY))


def test_every_file_uses_the_words_of_the_glossary():
    found = set()
    for name in texts():
        lines = (ROOT / name).read_text().splitlines()
        # Over the ends of lines too, so that a phrase that is broken there is found.
        for first, second in zip(lines, [*lines[1:], ""], strict=True) if lines else ():
            found |= {(name, *pair) for pair in misused(f"{first}\n{second}")}
    assert not found, "; ".join(f"{name}: {word!r}: say {say}" for name, word, say in sorted(found))


def test_texts_use_the_terms_of_the_field():
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

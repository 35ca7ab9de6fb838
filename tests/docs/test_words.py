"""Pages, docstrings and messages use the terms of the field."""

from __future__ import annotations

import ast
import re
import subprocess

from tests.support.helpers import ROOT

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


def test_texts_use_the_terms_of_the_field():
    found = []
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        if name.endswith(".md") and not name.startswith(("docs/project/notes/", "docs/project/upstream/")):
            texts = [
                re.sub(r"```.*?```|`[^`]*`|<!--.*?-->|\]\([^)]*\)", " ", (ROOT / name).read_text(), flags=re.DOTALL)
            ]
        elif name.endswith(".py") and name.startswith(("toolkit/", "recipes/")):
            strings = (
                node.value for node in ast.walk(ast.parse((ROOT / name).read_text())) if isinstance(node, ast.Constant)
            )
            texts = [re.sub(r"`[^`]*`", " ", text) for text in strings if isinstance(text, str) and text.count(" ") > 2]
        else:
            continue
        for text in texts:
            for term, better in TERMS.items():
                found += [
                    f"{name}: {match[0]}: {better}" for match in re.finditer(rf"\b({term})\b", text, re.IGNORECASE)
                ]
    assert not found, "\n".join(found)

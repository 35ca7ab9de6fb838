"""Compare the measured numbers of README.md, recipes/README.md and docs/ with the benchmark results.

    python benchmarks/figures.py            print each number without a benchmark result; exit code 1 if there is any

A comment on its own line names the source of the numbers in the next block (a paragraph, a list or a table):

    <!-- figures: mnist_accuracy.json -->
    <!-- figures: moe_layer.json[threads=2 and tokens=64] by experts; 1.27 = 41.55 / 32.78; given: 1.15, 1.5 -->
    <!-- figures: none -->

At the end of a page, the comment names the block by its first words:

    <!-- figures of "| what | figure": mnist_accuracy.json by epochs -->

Each table line has to match one row of the result, or one group of rows that are equal in the keys after `by`, and
shows each value at most once. Prose has to match all rows together. `[key=value and ...]` selects rows. A number
matches a value that rounds to it. `a = b / c` is a computed number: its operands with a decimal point have to be in the
result. `given` lists settings, targets and published figures; `none` marks a block of such numbers.

If a result is named, every number is checked. If none is named, prose may contain versions, numbers with one decimal or
one digit, and integers without a unit. Code, links and comments are ignored. "measured once, without a record" exempts
a block, or in the introduction the page.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
UNRECORDED = "measured once, without a record"

NOT_MEASURED = ("rows", "machine", "command", "commit", "sha256")
"""Entries of a result that are not figures; rows are read separately."""

COMMENT = re.compile(r"^ *<!-- figures: (?P<text>.*?) -->$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r'^<!-- figures of "(?P<words>[^"]+)": (?P<text>.*?) -->$', re.DOTALL | re.MULTILINE)
SOURCE = re.compile(r"^(?P<file>\w+\.json)(?:\[(?P<where>[^]]*)\])?(?: by (?P<keys>.+))?$")
NUMBER = re.compile(r"(?<![\w.=/^-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?=x\b|(?!\w))(?!\.\d)")
UNIT = re.compile(
    r" ?(%|ms\b|microseconds\b|points?\b|times (the|as|more|fewer|faster)|(samples|images|tokens) (per|a) "
    r"|bits per byte|nats\b|GB/s|MiB\b)|x\b"
)
VERSION = re.compile(
    r"\b(python|torch|transformers|accelerate|deepspeed|peft|\w*trainer|arxiv)\W+([\d.]+(, | or | to ))*$",
    re.IGNORECASE,
)
"""Prefix of a number that is a version."""
CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass
class Sources:
    """Contents of a comment."""

    groups: list[list[float]] = field(default_factory=list)
    """Values of each row, or group of rows, that a table line can show."""
    common: set[float] = field(default_factory=set)
    """Values that hold for all rows of a result, for example the number of rounds."""
    given: set[float] = field(default_factory=set)
    computed: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of a number and its formula."""

    @property
    def values(self) -> set[float]:
        return self.common.union(*self.groups)


def tolerance(shown: str) -> float:
    """Return half a unit of the last shown decimal."""
    decimals = len(shown.partition(".")[2]) if "e" not in shown else 9
    return 0.5 * 10**-decimals + 1e-9


def agrees(shown: str, values: set[float]) -> bool:
    """Return whether one of `values` rounds to the number `shown`, up to the sign."""
    number = abs(float(shown.replace(",", "")))
    return any(abs(abs(value) - number) <= tolerance(shown) for value in values)


def unaccounted(line: Sequence[str], group: Sequence[float], others: set[float]) -> list[str]:
    """Return the numbers of a table line that are neither in `others` nor in the group.

    Each value of the group counts once, so a number that was replaced by its neighbour is found.
    """
    left = list(group)
    missing = []
    for shown in sorted(line, key=tolerance):
        number = abs(float(shown.replace(",", "")))
        nearest = min(left, key=lambda value: abs(abs(value) - number), default=math.inf)
        if abs(abs(nearest) - number) <= tolerance(shown):
            left.remove(nearest)
        elif not agrees(shown, others):
            missing.append(shown)
    return missing


def numbers_in(value: Any) -> Iterator[float]:
    """Yield all numbers in a value of a result, including numbers in strings."""
    if isinstance(value, str):
        yield from (float(found.group().replace(",", "")) for found in re.finditer(r"[-+]?\d[\d,]*(?:\.\d+)?", value))
    elif isinstance(value, Mapping):
        yield from (number for one in value.values() for number in numbers_in(one))
    elif isinstance(value, Sequence):
        yield from (number for one in value for number in numbers_in(one))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


@cache
def record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@cache
def read_comment(text: str, records: Path) -> Sources:
    """Raises ValueError for unknown results and keys, and for wrong formulas."""
    sources = Sources()
    for part in (part.strip() for part in " ".join(text.split()).split(";")):
        if part.startswith("given: "):
            sources.given |= {float(number.replace(",", "")) for number in part.removeprefix("given: ").split(", ")}
        elif " = " in part:
            shown, _, formula = part.partition(" = ")
            sources.computed.append((shown, formula))
        elif match := SOURCE.match(part):
            groups, common = groups_of(match, records)
            sources.groups += groups
            sources.common |= common
        else:
            raise ValueError(f"cannot read {part!r}")
    for shown, formula in sources.computed:
        for operand in re.findall(r"\d+\.\d+", formula):
            if not agrees(operand, sources.values | sources.given):
                raise ValueError(f"{operand} of {shown} = {formula} is not in the record")
        if not agrees(shown, {result_of(formula)}):
            raise ValueError(f"{formula} is {result_of(formula):.6g}, not {shown}")
    return sources


def groups_of(match: re.Match[str], records: Path) -> tuple[list[list[float]], set[float]]:
    path = records / match["file"]
    if not path.exists():
        raise ValueError(f"there is no {match['file']}")
    found = record(path)
    rows = found["rows"]
    for pair in (match["where"] or "").split(" and "):
        if pair:
            key, _, value = pair.partition("=")
            rows = [row for row in rows if str(row.get(key)) == value]
    if not rows:
        raise ValueError(f"{match['file']} has no rows with {match['where']}")
    keys = match["keys"].split(" and ") if match["keys"] else []
    if missing := [key for key in keys if not any(key in row for row in rows)]:
        raise ValueError(f"{match['file']} has no key {missing[0]!r}")
    grouped: dict[Any, list[Any]] = {}
    for place, row in enumerate(rows):
        grouped.setdefault(tuple(row.get(key) for key in keys) if keys else place, []).append(row)
    common = set(numbers_in({name: value for name, value in found.items() if name not in NOT_MEASURED}))
    return [list(numbers_in(some)) for some in grouped.values()], common if len(common) < 100 else set()


def result_of(formula: str) -> float:
    """Return the value of a formula with numbers, + - * /, parentheses and `sd(...)`."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "sd":
            return statistics.stdev(map(value, node.args))
        raise ValueError(f"cannot compute {formula!r}")

    return value(ast.parse(formula, mode="eval").body)


def blocks(text: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield the first line number, the text and the comment of each block of a page, except code.

    Raises ValueError if a comment names a missing block.
    """
    named = {match["words"]: match["text"] for match in NAMED.finditer(text)}
    kept = re.sub(r"^ *```.*?^ *```$", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    kept = NAMED.sub(lambda m: "\n" * m.group().count("\n"), kept)
    for first, block, comment in _blocks_below_comments(kept):
        words = next((words for words in named if block.startswith(words)), None)
        yield first, block, comment if words is None else named.pop(words)
    if named:
        raise ValueError(f"no block begins with {next(iter(named))!r}")


def _blocks_below_comments(kept: str) -> Iterator[tuple[int, str, str | None]]:
    comment, lines, first = None, list[str](), 0
    number = 0
    rest = [*kept.split("\n"), ""]
    while number < len(rest):
        line = rest[number]
        opened = number
        if line.lstrip().startswith("<!-- figures:"):
            while not rest[number].rstrip().endswith("-->"):
                number += 1
            if lines:
                yield first, "\n".join(lines), comment
                lines = []
            matched = COMMENT.match("\n".join(rest[opened : number + 1]))
            comment = matched["text"] if matched else ""
        elif line.strip():
            first = first if lines else number + 1
            lines.append(line)
        elif lines:
            yield first, "\n".join(lines), comment
            lines, comment = [], None
        number += 1


def shown_in(line: str) -> list[str]:
    """Return the numbers of a line outside of code."""
    return NUMBER.findall(CODE.sub(" ", line))


def problems_of(block: str, comment: str | None, records: Path) -> Iterator[str]:
    """Yield a message for each number of a block without a benchmark result."""
    if comment == "none":
        return
    try:
        sources = read_comment(comment, records) if comment is not None else None
    except ValueError as error:
        yield str(error)
        return
    block = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code.group()), block)
    table = block.lstrip().startswith("|")
    if sources is None:
        lines = block.split("\n") if table else [" ".join(block.split())]
        if table or UNRECORDED not in " ".join(block.split()):
            shown = [number for line in lines for number in bare(line, table=table)]
            if shown:
                yield f"no record is named for {' '.join(shown)}"
        return
    allowed = sources.given | {float(shown.replace(",", "")) for shown, _ in sources.computed}
    if not table:
        for number in shown_in(" ".join(block.split("\n"))):
            if not agrees(number, sources.values | allowed):
                yield f"{number} is not in the record"
        return
    for line in block.split("\n")[2:]:
        shown = shown_in(line)
        others = allowed | sources.common
        least = min((unaccounted(shown, group, others) for group in sources.groups), key=len, default=shown)
        if least:
            yield f"{' '.join(least)}: no row of the record agrees with {line.strip()!r}"


def bare(line: str, *, table: bool) -> Iterator[str]:
    """Yield the numbers of a line that look measured.

    These are numbers of two or more digits with a unit, numbers with two or more decimals in prose except versions, and
    numbers with a decimal point in table cells that have only numbers.
    """
    for cell in line.split("|") if table else [line]:
        only_numbers = table and not re.search("[A-Za-z]", re.sub(r"\b(sd|seeds|times|to|ms|e)\b", "", cell))
        for found in NUMBER.finditer(cell):
            number, unit = found.group(), UNIT.match(cell, found.end())
            by_unit = unit and unit[1] != "MiB" and len(number.strip("+-")) > 1  # sizes in MiB are mostly settings
            is_precise = not table and re.search(r"\.\d\d", number) and not VERSION.search(cell[: found.start()])
            if by_unit or is_precise or (only_numbers and "." in number):
                yield number


def problems(text: str, records: Path = RECORDS) -> list[str]:
    """Return a line for each mismatch between a page and the benchmark results."""
    introduction = " ".join(re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0].split())
    if UNRECORDED in introduction:
        return []
    return [
        f"line {first}: {problem}"
        for first, block, comment in blocks(text)
        for problem in problems_of(block, comment, records)
    ]


if __name__ == "__main__":
    found = [f"{page.relative_to(ROOT)}, {line}" for page in PAGES for line in problems(page.read_text("utf-8"))]
    print("\n".join(found) or "every measured number matches its benchmark result")
    sys.exit(bool(found))

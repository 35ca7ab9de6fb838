"""The report of a benchmark: a table on the console, and a JSON file with the machine and the date."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """What a figure depends on, besides the code."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write_report(name: str, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Print `rows` as a Markdown table and write them, with `facts` and the machine, to results/<name>.json."""
    columns = list(rows[0])
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row[column]) for column in columns) + " |")
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    record = {"benchmark": name, **facts, "machine": machine(), "rows": list(rows)}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")

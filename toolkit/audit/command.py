"""`toolkit audit`: check an MoE checkpoint for experts that are missing, repeated, reordered, empty or broken."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from toolkit.errors import EXIT_BUG, EXIT_DONE, printable
from toolkit.run.arguments import Parser


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 no finding, 1 findings, 2 bad input."""
    parser = Parser("toolkit audit", __doc__)
    parser.add_argument(
        "path",
        type=Path,
        help="folder of a model, of torch.distributed.checkpoint, of a run or of adapters, or a file of weights",
    )
    parser.add_argument(
        "--against", type=Path, help="folder of the base model, whose order of experts (adapters: sizes) it should have"
    )
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    args = parser.parse_args(argv)

    from toolkit.audit.checks import audit

    found = audit(args.path, args.against)
    if args.json:
        sys.stdout.write(json.dumps(asdict(found), indent=1) + "\n")
    else:
        lines = [f"ok       {fact}" for fact in found.facts]
        lines += [f"finding  {each.check}: {each.message}" for each in found.findings]
        # A name with a line break would forge a line.
        sys.stdout.write("\n".join([*(printable(line.replace("\n", r"\n")) for line in lines), ""]))
    return EXIT_BUG if found.findings else EXIT_DONE

"""`toolkit checkpoint`: look at a checkpoint, and rewrite it, in one process and without the model's code."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit import manifest
from toolkit.commands.arguments import Parser
from toolkit.errors import EXIT_DONE, UserError


def main(argv: Sequence[str]) -> int:
    parser = Parser("toolkit checkpoint", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    of = "a checkpoint, or a run folder, whose newest one is taken"

    verify = commands.add_parser("verify", help="compare every file with its digest: exit code 0, or 2 and the file")
    verify.add_argument("checkpoint", type=Path, help=of)
    verify.set_defaults(run=lambda args: _verify(args.checkpoint))

    args = parser.parse_args(argv)
    args.run(args)
    return EXIT_DONE


def _verify(given: Path) -> None:
    folder = find_folder(given)
    if damage := manifest.find_damage(folder):
        raise UserError(f"checkpoint {folder} is damaged: {damage}: use an older one.")
    files = manifest.read_manifest(folder)["files"]
    total = sum(seal["bytes"] for seal in files.values())
    sys.stdout.write(f"{folder}: {len(files)} files, {total:,} bytes, all as they were written\n")


def find_folder(given: Path) -> Path:
    """The checkpoint that `given` is, or the newest in the run folder (or folder of checkpoints) that it is.

    Raises UserError where it is neither. Nothing is verified.
    """
    if (given / manifest.NAME).exists() or (re.fullmatch(r"step-\d{8,}", given.name) and given.is_dir()):
        return given
    for parent in (given / "checkpoints", given):
        steps = [path for path in parent.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
        if steps:
            return max(steps, key=lambda path: int(path.name.removeprefix("step-")))
    what = "holds no checkpoint" if given.exists() else "does not exist"
    raise UserError(f"{given} {what}: give a folder step-<number>, or the run folder above it.")

"""`toolkit checkpoint`: inspect, verify or export a checkpoint, in one process, without the model's code."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from toolkit.checkpoint import without_model
from toolkit.checkpoint.retention import best_or_newest
from toolkit.errors import EXIT_DONE, UserError, one_line
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.state import manifest
from toolkit.run.arguments import Parser

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str]) -> int:
    parser = Parser("toolkit checkpoint", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    of = "a checkpoint, or a run folder, whose best one is taken where one is kept, else the newest"

    command = commands.add_parser("inspect", help="show its tensors and the placement of experts")
    command.add_argument("checkpoint", type=Path, help=of)
    command.add_argument("--json", action="store_true", help="the same for programs")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("verify", help="compare every file with its digest: exit code 0, or 2 and the file")
    command.add_argument("checkpoint", type=Path, help=of)
    command.set_defaults(run=_verify)

    command = commands.add_parser("export", help="one safetensors file of the weights, experts stacked by id")
    command.add_argument("checkpoint", type=Path, help=of)
    command.add_argument("out", type=Path, help="a file *.safetensors, or a folder for model.safetensors")
    command.add_argument("--dtype", choices=DTYPES, help="type of floating point numbers; as they are without it")
    command.set_defaults(run=_export)

    args = parser.parse_args(argv)
    args.checkpoint = find_folder(args.checkpoint)
    args.run(args)
    return EXIT_DONE


def find_folder(given: Path) -> Path:
    """The checkpoint that `given` is, or the best, else the newest, in the run folder (or folder of checkpoints) that
    it is.

    Raises UserError where it is neither. Nothing is verified.
    """
    named_as_one = re.fullmatch(r"step-\d{8,}", given.name) is not None
    if (given / manifest.NAME).exists() or (named_as_one and given.is_dir()):
        return given
    for parent in (given / "checkpoints", given):
        if found := best_or_newest(parent):
            return found
    what = "holds no checkpoint" if given.exists() else "does not exist"
    raise UserError(f"{given} {what}: give a folder step-<number>, or the run folder above it.")


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _verify(args: argparse.Namespace) -> None:
    files = without_model.read_verified(args.checkpoint)["files"]
    total = sum(seal["bytes"] for seal in files.values())
    _say(f"{args.checkpoint}: {len(files)} files, {total:,} bytes, all as they were written")


def _inspect(args: argparse.Namespace) -> None:
    try:
        facts = without_model.describe(args.checkpoint, manifest.read_manifest(args.checkpoint))
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        damage = manifest.find_damage(args.checkpoint) or one_line(error)
        raise UserError(f"checkpoint {args.checkpoint} cannot be read: {damage}: use an older one.") from None
    if args.json:
        _say(json.dumps(facts))
        return
    step = "" if facts["step"] is None else f"step {facts['step']:,}, "
    _say(f"{args.checkpoint}", f"{step}written by {facts['processes']} process(es), format {facts['format']}", "")
    width = max(map(len, facts["files"]))
    _say(*(f"  {name:{width}}  {size:>15,} bytes" for name, size in facts["files"].items()), "")
    _say(f"{facts['replicated_tensors']} replicated tensors (parameters and buffers that every process has)")
    drawn: dict[str, str] = {}
    for layer, about in facts["layers"].items():
        rows = ", ".join(f"{name} {row}" for name, row in about["rows"].items())
        states = f", each with {', '.join(about['states'])}" if about["states"] else ""
        _say("", f"{layer or 'model'}: {about['experts']} experts on {len(about['slots'])} rank(s): {rows}{states}")
        picture = _draw(about["slots"])
        if picture in drawn:
            _say(f"  placed as in {drawn[picture]}")
        else:
            _say(*(f"  {line}" for line in picture.splitlines()))
        drawn.setdefault(picture, layer or "model")


def _draw(slots: list[list[int]]) -> str:
    try:
        return str(ExpertPlacement(tuple(map(tuple, slots))))
    except ValueError:  # rows that are not numbered through, which only experts are
        return "\n".join(f"rank {rank} | {' '.join(map(str, row))}" for rank, row in enumerate(slots))


def _export(args: argparse.Namespace) -> None:
    out = args.out if args.out.suffix == ".safetensors" else args.out / "model.safetensors"
    without_model.export(args.checkpoint, out, DTYPES.get(args.dtype))
    _say(f"{out}: written")

"""`toolkit checkpoint`: inspect or export a checkpoint, in one process, without the model's code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from toolkit.checkpoint import without_model
from toolkit.checkpoint.retention import find_folder
from toolkit.errors import EXIT_DONE, printable, reading
from toolkit.experts.state.tensor_files import SavedTensors
from toolkit.run.arguments import Parser

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str]) -> int:
    parser = Parser("toolkit checkpoint", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, summary in (
        ("inspect", _inspect, "print files, shapes of experts and their placement"),
        ("export", _export, "write the weights to one safetensors file, experts stacked by uid"),
    ):
        command = commands.add_parser(name, help=summary)
        command.add_argument("checkpoint", type=Path, help="checkpoint, or run folder with its best or newest one")
        command.set_defaults(run=run)
        if run is _export:
            command.add_argument("out", type=Path, help="file *.safetensors, or folder for model.safetensors")
            command.add_argument("--dtype", choices=DTYPES, help="type of floating point tensors. Default: as saved")
    args = parser.parse_args(argv)
    args.checkpoint = find_folder(args.checkpoint)
    args.run(args)
    return EXIT_DONE


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _inspect(args: argparse.Namespace) -> None:
    with reading(args.checkpoint, "Use an older checkpoint."):
        lines = list(_describe(args.checkpoint))
    _say(*map(printable, lines))


def _describe(checkpoint: Path) -> Iterator[str]:
    """Yield the lines of `inspect`."""
    about = without_model.read_verified(checkpoint)
    yield f"{checkpoint}: step {about['step']}, world size {about['world_size']}, format {about['format']}"
    yield from (f"  {name}  {seal['bytes']:,} bytes" for name, seal in sorted(about["files"].items()))
    parameters: dict[str, list[str]] = {}
    with SavedTensors() as tensors:
        tensors.open(checkpoint, about["files"])
        for name, place in about["placement"].items():
            row, count = f"{name}/{tensors.uids[name][0]}", len(tensors.uids[name])
            states = f", each with {', '.join(sorted(tensors.states[row]))}" if row in tensors.states else ""
            ranks = (" ".join("." if uid < 0 else str(uid) for uid in slots) for slots in place["slots"])
            drawing = "\n".join(f"  rank {rank} | {slots}" for rank, slots in enumerate(ranks))
            parameters.setdefault(drawing, []).append(f"{name}: {count} x {tensors.describe(row)}{states}")
    for drawing, names in parameters.items():
        yield from ("", *names, drawing)


def _export(args: argparse.Namespace) -> None:
    out = args.out if args.out.suffix == ".safetensors" else args.out / "model.safetensors"
    without_model.export(args.checkpoint, out, DTYPES.get(args.dtype))
    _say(f"{out}: written")

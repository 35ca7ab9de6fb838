"""`toolkit checkpoint`: inspect, verify, reshard, export or import one, in one process, without the model's code."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

import torch
from safetensors import SafetensorError

from toolkit.checkpoint import reshard as rewrite
from toolkit.checkpoint.dcp import export_dcp, import_dcp
from toolkit.checkpoint.retention import newest_first
from toolkit.commands.arguments import Parser
from toolkit.errors import EXIT_DONE, UserError, one_line
from toolkit.experts.placement.placement import ExpertPlacement, initial_placement
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.state import manifest
from toolkit.run.tracking.jsonl import from_json

FORMATS = "dcp: a folder of torch.distributed.checkpoint, with optimizer states; out is its name"
MOST_RANKS = 2**16
"""Of an EP group: each has an entry in the manifest, so that a mistyped number would take all time and memory."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str]) -> int:
    parser = Parser("toolkit checkpoint", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    of = "a checkpoint, or a run folder, whose newest one is taken"

    command = commands.add_parser("inspect", help="show its tensors and the placement of experts")
    command.add_argument("checkpoint", type=Path, help=of)
    command.add_argument("--json", action="store_true", help="the same for programs")
    command.set_defaults(run=_inspect)

    command = commands.add_parser("verify", help="compare every file with its digest: exit code 0, or 2 and the file")
    command.add_argument("checkpoint", type=Path, help=of)
    command.set_defaults(run=_verify)

    command = commands.add_parser("reshard", help="distribute its experts over another number of ranks")
    command.add_argument("checkpoint", type=Path, help=of)
    command.add_argument("out", type=Path, help="the new checkpoint")
    command.add_argument("--ep-size", type=int, required=True, help="ranks in an expert-parallel group")
    command.add_argument(
        "--placement",
        default="contiguous",
        help='contiguous, round_robin, or a file: {"num_experts": 4, "slots": [[0, 3], [1, 2]]}',
    )
    command.set_defaults(run=_reshard)

    command = commands.add_parser("export", help="one safetensors file of the weights, experts stacked by id")
    command.add_argument("checkpoint", type=Path, help=of)
    command.add_argument("out", type=Path, help="a file *.safetensors, or a folder for model.safetensors")
    command.add_argument("--dtype", choices=DTYPES, help="type of floating point numbers; as they are without it")
    command.add_argument("--format", choices=("safetensors", "dcp"), default="safetensors", help=FORMATS)
    command.set_defaults(run=_export)

    command = commands.add_parser("import", help="a checkpoint with the tensors of a torch.distributed.checkpoint")
    command.add_argument("source", type=Path, help="a folder that torch.distributed.checkpoint.save wrote, trusted")
    command.add_argument("checkpoint", metavar="like", type=Path, help=f"{of}: has the same tensors, and all else")
    command.add_argument("out", type=Path, help="the new checkpoint")
    command.set_defaults(run=_import)

    args = parser.parse_args(argv)
    args.checkpoint = find_folder(args.checkpoint)
    args.run(args)
    return EXIT_DONE


def find_folder(given: Path) -> Path:
    """The checkpoint that `given` is, or the newest in the run folder (or folder of checkpoints) that it is.

    Raises UserError where it is neither. Nothing is verified.
    """
    named_as_one = re.fullmatch(r"step-\d{8,}", given.name) is not None
    if (given / manifest.NAME).exists() or (named_as_one and given.is_dir()):
        return given
    for parent in (given / "checkpoints", given):
        if steps := newest_first(parent):
            return steps[0]
    what = "holds no checkpoint" if given.exists() else "does not exist"
    raise UserError(f"{given} {what}: give a folder step-<number>, or the run folder above it.")


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _verify(args: argparse.Namespace) -> None:
    files = rewrite.read_verified(args.checkpoint)["files"]
    total = sum(seal["bytes"] for seal in files.values())
    _say(f"{args.checkpoint}: {len(files)} files, {total:,} bytes, all as they were written")


def _inspect(args: argparse.Namespace) -> None:
    try:
        facts = rewrite.describe(args.checkpoint, manifest.read_manifest(args.checkpoint))
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


def _reshard(args: argparse.Namespace) -> None:
    if not 1 <= args.ep_size <= MOST_RANKS:
        raise UserError(f"--ep-size {args.ep_size}: take one to {MOST_RANKS}.")
    rewrite.reshard(args.checkpoint, args.out, lambda experts: _place(args.placement, experts, args.ep_size))
    _say(f"{args.out}: written")


def _place(name: str, experts: int, ranks: int) -> ExpertPlacement:
    if name in get_args(InitialPlacement):
        return initial_placement(experts, ranks, cast("InitialPlacement", name))
    try:
        placement = ExpertPlacement.from_dict(from_json(Path(name).read_text(encoding="utf-8")))
    except OSError:
        raise UserError(f"--placement {name}: take contiguous, round_robin, or a file that can be read.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--placement {name}: it holds no placement ({error}): see --help.") from None
    if (placement.num_experts, placement.ranks) != (experts, ranks):
        there = f"{placement.num_experts} experts on {placement.ranks} rank(s)"
        raise UserError(f"--placement {name}: it puts {there}, not {experts} on {ranks}: write another.")
    return placement


def _export(args: argparse.Namespace) -> None:
    if args.format == "dcp":
        if args.dtype is not None:
            raise UserError(
                f"--dtype {args.dtype}: --format dcp keeps the types that a run continues with: leave it out."
            )
        export_dcp(args.checkpoint, args.out)
        _say(f"{args.out}: written")
        return
    out = args.out if args.out.suffix == ".safetensors" else args.out / "model.safetensors"
    rewrite.export(args.checkpoint, out, DTYPES.get(args.dtype))
    _say(f"{out}: written")


def _import(args: argparse.Namespace) -> None:
    has_states = import_dcp(args.source, args.checkpoint, args.out)
    _say(f"{args.out}: written" + ("" if has_states else ", without optimizer states, of which there are none"))

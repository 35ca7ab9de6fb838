"""`toolkit adapter`: convert adapters of experts between the layouts of PEFT, vLLM and SGLang, or merge them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import EXIT_DONE
from toolkit.run.arguments import Parser


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 converted, 2 bad input."""
    parser = Parser("toolkit adapter", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "convert", help="write adapters in another layout, or merged with the base, and change no expert's update"
    )
    command.add_argument("folder", type=Path, help="with adapter_config.json and adapter_model.safetensors")
    command.add_argument("target", type=Path, help="folder to make")
    command.add_argument(
        "--to", choices=("peft", "vllm", "sglang", "merged"), required=True, help="layout, or merged model"
    )
    command.add_argument("--base", type=Path, help="folder of the base model (default: that of adapter_config.json)")
    command.add_argument("--json", action="store_true", help="print the target, the layout and the updates as JSON")
    args = parser.parse_args(argv)

    from toolkit.audit.convert import convert

    count = convert(args.folder, args.target, args.to, args.base)
    if args.json:
        sys.stdout.write(json.dumps({"target": str(args.target), "layout": args.to, "updates": count}) + "\n")
        return EXIT_DONE
    said = f"updates of {count:,} experts in the layout of {args.to}, bitwise equal"
    if args.to == "merged":
        said = f"the base model with {count:,} updates added"
    sys.stdout.write(f"{args.target}: {said}\n")
    return EXIT_DONE

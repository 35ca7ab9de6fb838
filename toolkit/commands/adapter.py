"""`toolkit adapter`: check a folder of PEFT's adapters, as `save_pretrained` wrote it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR, reading
from toolkit.run.arguments import Parser


def main(argv: Sequence[str]) -> int:
    """Return 0 without faults, 2 for faults (one line each) or bad input."""
    parser = Parser("toolkit adapter", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("verify", help="load it with stock PEFT, and look at each expert's rows: exit 0 or 2")
    command.add_argument("folder", type=Path, help="with adapter_config.json and adapter_model.safetensors")
    command.add_argument(
        "--base", help="folder or Hub name of the base model (default: base_model_name_or_path of adapter_config.json)"
    )
    command.add_argument(
        "--merged", type=Path, help="a folder that is said to hold the base with these adapters merged"
    )
    args = parser.parse_args(argv)

    from toolkit.data.hub import model_folder
    from toolkit.integrations.peft.verify import verify_adapter
    from toolkit.integrations.transformers import causal_lm

    with reading(args.folder, "Give the folder that save_pretrained of PEFT wrote."):
        found = verify_adapter(args.folder, args.base, args.merged, load=lambda name: causal_lm(model_folder(name)))
    sys.stdout.write("".join(f"{line}\n" for line in found.lines))
    sys.stdout.flush()
    sys.stderr.write("".join(f"fault: {fault}\n" for fault in found.faults))
    if not found.faults:
        sys.stdout.write(f"{args.folder}: no fault found\n")
    return EXIT_USER_ERROR if found.faults else EXIT_DONE

"""`toolkit push`: the weights of a finished run, with a model card made from it, to the Hugging Face Hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.commands.arguments import Parser
from toolkit.commands.report.compare import readable_runs
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR


def main(argv: Sequence[str]) -> int:
    """0 where the files are on the Hub, or written with --dry-run; 2 for bad input, or a Hub that can't be asked."""
    parser = Parser("toolkit push", __doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("name", metavar="owner/name", help="the repository, which is made where it is not there")
    parser.add_argument("--public", action="store_true", help="for everyone to see; without it, private")
    parser.add_argument("--license", help="of the weights, as the Hub names it: apache-2.0, cc-by-4.0, ...")
    parser.add_argument("--dry-run", action="store_true", help="write the folder push/ of the run, upload nothing")
    args = parser.parse_args(argv)

    from toolkit.commands.report.model_folder import write_model_folder
    from toolkit.data.hub import check_name, check_upload, upload_model

    check_name(args.name)
    runs = readable_runs([args.run])
    if runs is None:
        return EXIT_USER_ERROR
    if not args.dry_run:
        check_upload()
    folder = write_model_folder(runs[0], args.name, args.license)
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    if args.dry_run:
        sys.stdout.write(f"{folder}: {len(files)} files, {size:.1f} MB, not uploaded; README.md is the model card.\n")
        return EXIT_DONE
    address = upload_model(folder, args.name, public=args.public)
    sys.stdout.write(f"{address}: {len(files)} files, {size:.1f} MB, {'public' if args.public else 'private'}.\n")
    return EXIT_DONE

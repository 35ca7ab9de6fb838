"""`toolkit report`: runs side by side on one page that opens in a browser without a network."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.commands.arguments import Parser
from toolkit.commands.report.compare import readable_runs
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR, UserError


def main(argv: Sequence[str]) -> int:
    """0 where the page is written, 2 for bad input, a line for each folder that holds no run."""
    parser = Parser("toolkit report", __doc__)
    parser.add_argument("run", nargs="+", type=Path, help="the folder of a run, finished or not")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (report.html)")
    args = parser.parse_args(argv)

    from toolkit.commands.report.page import check_installed, make_page
    from toolkit.run.folder import write_text

    check_installed()
    runs = readable_runs(args.run)
    if runs is None:
        return EXIT_USER_ERROR
    if args.output.is_file() and not _is_page(args.output):
        raise UserError(f"--output {args.output}: is there, and no page: choose another, or remove it.")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.output, make_page(runs, args.output.parent))
    except OSError as error:
        raise UserError(f"--output {args.output}: cannot be written ({error.strerror}): choose another.") from None
    size = args.output.stat().st_size
    sys.stdout.write(f"{args.output}: {len(runs)} run(s), {size / 1e6:.1f} MB; open it in a browser.\n")
    return EXIT_DONE


def _is_page(path: Path) -> bool:
    """Whether a file begins as the pages that this command writes, or is empty."""
    try:
        with path.open("rb") as file:
            begin = file.read(64).strip().lower()
    except OSError:  # which writing will tell of
        return True
    return not begin or begin.startswith(b"<!doctype html")

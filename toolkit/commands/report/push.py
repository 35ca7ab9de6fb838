"""`toolkit push`: the weights of a finished run, with a model card made from it, to the Hugging Face Hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.commands.report.records import readable_runs
from toolkit.data.hub import ANSWER_S, why_out_of_reach
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, one_line
from toolkit.run.arguments import Parser


def main(argv: Sequence[str]) -> int:
    """0 where the files are on the Hub, or written with --dry-run; 2 for bad input, or a Hub that can't be asked."""
    parser = Parser("toolkit push", __doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("name", metavar="owner/name", help="the repository, which is made where it is not there")
    parser.add_argument("--public", action="store_true", help="for everyone to see; without it, private")
    parser.add_argument("--license", help="of the weights, as the Hub names it: apache-2.0, cc-by-4.0, ...")
    parser.add_argument("--dry-run", action="store_true", help="write the folder push/ of the run, upload nothing")
    args = parser.parse_args(argv)

    from toolkit.commands.report.model_folder import write_model_folder  # with torch

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


def check_name(name: str) -> None:
    """Raise UserError where `name` cannot be that of a repository, owner/name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        is_one = "/" in name
    except HFValidationError:
        is_one = False
    if not is_one:
        raise UserError(
            f"{name!r} names no repository of the Hub: write owner/name, of letters, digits, -, _ and dots."
        )


def check_upload() -> None:
    """Raise UserError, within seconds, without a token, or where the Hub can't be asked."""
    import huggingface_hub

    otherwise = "--dry-run writes the folder without uploading it"
    if huggingface_hub.get_token() is None:
        raise UserError(f"there is no token for the Hub: type hf auth login, or set HF_TOKEN; {otherwise}.")
    if reason := why_out_of_reach():
        raise UserError(f"{reason}: try again when it can be asked; {otherwise}.")


def upload_model(folder: Path, name: str, *, public: bool) -> str:
    """Put the files of `folder` into the model repository `name`, which is made where it is not there; its address.

    Raises UserError where the repository is there and is public but should be private, or the other way round, and
    where the Hub does not take the files.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    api = huggingface_hub.HfApi()
    try:
        try:
            is_private = bool(api.model_info(name, timeout=ANSWER_S).private)
        except RepositoryNotFoundError:
            is_private = not public
            api.create_repo(name, private=is_private)
        if is_private == public:
            remedy = "leave out --public" if is_private else "add --public"
            raise UserError(f"{name} is there, and {'private' if is_private else 'public'}: {remedy}, or take another.")
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a run with toolkit push")
    except UserError:
        raise
    except Exception as error:  # of the client, its HTTP library, or a card that the Hub refuses
        answer: BaseException | None = error
        while answer is not None and not isinstance(answer, HfHubHTTPError):
            answer = answer.__cause__
        reason = f"cannot be uploaded ({type(error).__name__}: {one_line(error)})"
        if answer is not None:
            code = answer.response.status_code
            remedy = (
                f"use a token that may write to {name.partition('/')[0]}" if code in (401, 403) else "try again later"
            )
            reason = f"the Hub answers {code}: {remedy}"
        raise UserError(f"{name}: {reason}; the files are in {folder}.") from error
    return f"{api.endpoint}/{name}"

"""The Hugging Face Hub: whether it can be asked, folders of models and tokenizers from it, and models to it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import UserError, one_line

ANSWER_S = 2.0
"""How long the Hub may take to connect, and then to answer, in seconds."""
PROBE_S = 3.0
"""How long both, and looking up its name, may take together, in seconds."""


def why_out_of_reach() -> str | None:
    """Why the Hub can't be asked, as part of a sentence; None where it answers.

    One question, because the Hub's client would repeat each of its own for minutes.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to ask the Hub"
    answers: list[int] = []

    def ask() -> None:
        try:
            answers.append(get_session().head(constants.ENDPOINT, timeout=ANSWER_S).status_code)
        except Exception:  # its client changed its HTTP library twice, and each raises its own kinds
            answers.append(0)

    # In a thread, because looking up a name has no time limit of its own.
    probe = threading.Thread(target=ask, daemon=True)
    probe.start()
    probe.join(PROBE_S)
    code = answers[0] if answers else 0
    if code == 0:
        return f"{constants.ENDPOINT} does not answer"
    return f"{constants.ENDPOINT} answers {code}" if code >= 500 else None


def pretrained_folder(what: str, name: str, *, wanted: Sequence[str], needed: Sequence[str]) -> str:
    """The folder of model repository `name` with the files that match `wanted`: itself a folder, or in the Hub's cache,
    or downloaded where the cache has no file that matches one of `needed`.

    Raises UserError, within seconds, downloads aside; `what`, the argument, begins its sentence.
    """
    if Path(name).is_dir():
        return name
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(name, allow_patterns=list(wanted), local_files_only=True)
        if any(match for pattern in needed for match in Path(folder).glob(pattern)):
            return folder
    except HFValidationError:
        raise UserError(f"{what}={name!r} is neither a folder nor a Hub name such as owner/model.") from None
    except LocalEntryNotFoundError:
        pass
    if reason := why_out_of_reach():
        raise UserError(f"{what}={name!r} is neither a folder nor in the Hub's cache, and {reason}: give a folder.")
    try:
        huggingface_hub.HfApi().model_info(name, timeout=ANSWER_S)  # for a name that is not there
        return huggingface_hub.snapshot_download(name, allow_patterns=list(wanted))
    except Exception as error:  # of the client, its HTTP library, or the disk
        raise UserError(
            f"{what}={name!r} cannot be downloaded ({type(error).__name__}): "
            "check its name and the network, or give a folder."
        ) from error


def model_folder(source: str | os.PathLike[str]) -> str:
    """Return the folder of a model's files, downloaded where they are neither here nor in the cache.

    Raises UserError, within seconds, downloads aside, where there is none.
    """
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt"]
    folder = pretrained_folder("model", os.fspath(source), wanted=wanted, needed=["config.json"])
    if not (Path(folder) / "config.json").is_file():
        raise UserError(
            f"model folder {source} has no config.json: give one that save_pretrained wrote, or a Hub name."
        )
    return folder


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

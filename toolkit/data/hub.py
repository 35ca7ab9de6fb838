"""Hugging Face Hub: reachability check, and downloads of data sets, models and tokenizers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from toolkit.data.files import NotFoundHere
from toolkit.errors import UserError, reading
from toolkit.progress_bar import ProgressBar

T = TypeVar("T")

ANSWER_S = 2.0
"""Timeout for connecting to the Hub, and for its response, in seconds."""
PROBE_S = 3.0
"""Timeout for name lookup, connection and response together, in seconds."""


def why_out_of_reach() -> str | None:
    """Return the reason why the Hub is unreachable, as a clause; None if it responds.

    Sends a single request, because the Hub's client retries its own for minutes.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids to ask the Hub"
    answers: list[int] = []

    def ask() -> None:
        with suppress(Exception):  # its client changed its HTTP library twice, and each raises its own kinds
            answers.append(get_session().head(constants.ENDPOINT, timeout=ANSWER_S).status_code)

    # In a thread, because name lookup has no timeout.
    probe = threading.Thread(target=ask, daemon=True)
    probe.start()
    probe.join(PROBE_S)
    if not answers:
        return f"{constants.ENDPOINT} does not answer"
    return f"{constants.ENDPOINT} answers {answers[0]}" if answers[0] >= 500 else None


def find_on_hub(repo: str, patterns: Sequence[str], find: Callable[[Path], T], *, ask: bool) -> T:
    """Call `find` on the folder of the files of data set `repo` that match `patterns`, and return its result.

    The files come from the Hub's cache, or with `ask` from the Hub. Raises NotFoundHere within seconds, not counting
    downloads.
    """
    import huggingface_hub
    from huggingface_hub import constants

    reason = f"{constants.ENDPOINT} does not give {repo}" if ask else f"{repo} is not in the Hub's cache"
    if ask and (unreachable := why_out_of_reach()):
        raise NotFoundHere(unreachable)
    try:
        if ask:  # a download itself waits long for a host that connects and then sends nothing
            huggingface_hub.HfApi().dataset_info(repo, timeout=ANSWER_S)
        folder = huggingface_hub.snapshot_download(
            repo,
            repo_type="dataset",
            allow_patterns=list(patterns),
            local_files_only=not ask,
            etag_timeout=ANSWER_S,
            tqdm_class=ProgressBar,
        )
        return find(Path(folder))
    # Whatever its client raises (errors of three HTTP libraries, of the disk, of a half-filled cache), the Hub is
    # one place among several.
    except Exception as error:
        raise NotFoundHere(f"{reason} ({type(error).__name__})") from error


def pretrained_folder(what: str, name: str, *, wanted: Sequence[str], needed: Sequence[str]) -> str:
    """Return the folder of model repository `name` with the files that match `wanted`: `name` itself, the Hub's cache,
    or a download if the cache has no file that matches one of `needed`.

    Raises UserError, within seconds except for downloads; its message begins with the argument `what`.
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
        raise UserError(
            f"{what}={name!r}: is not a folder. Give a folder, or a Hub name such as owner/model."
        ) from None
    except LocalEntryNotFoundError:
        pass
    if reason := why_out_of_reach():
        raise UserError(f"{what}={name!r}: is neither a folder nor in the Hub's cache, and {reason}. Give a folder.")
    with reading(f"{what}={name!r}", "Check its name and the network, or give a folder."):
        huggingface_hub.HfApi().model_info(name, timeout=ANSWER_S)  # for a name that is not there
        return huggingface_hub.snapshot_download(name, allow_patterns=list(wanted), tqdm_class=ProgressBar)


def model_folder(source: str | os.PathLike[str], *, weights: bool = True) -> str:
    """Return the folder of a model's files, downloaded if neither local nor cached; without `weights`, only JSON files.

    Raises UserError, within seconds except for downloads, if the model does not exist.
    """
    wanted = ["*.json", *(["*.safetensors", "*.model", "*.txt"] if weights else ())]
    return pretrained_folder("model", os.fspath(source), wanted=wanted, needed=["config.json"])

"""Finds a set of labelled images: in a folder, in the Hub's cache, or on the Hub."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from toolkit.data.hub import ANSWER_S, why_out_of_reach
from toolkit.errors import UserError

T = TypeVar("T")

HUB_REPOS = {"mnist": "ylecun/mnist", "fashion_mnist": "zalando-datasets/fashion_mnist"}
TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
SPLITS = ("train", "test")
_HUB_PATTERNS = ("*train-*.parquet", "*test-*.parquet")

_IDX_STEMS = (
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)


class NotFoundHere(Exception):
    """A place does not have the set; the message names the place and the reason, as part of a sentence."""


@dataclass(frozen=True)
class ImageFiles:
    """The files of one set: Parquet files per split, or per split an idx file of images and one of labels."""

    kind: Literal["parquet", "idx"]
    train: tuple[Path, ...]
    test: tuple[Path, ...]


def data_folder(data_dir: Path | None) -> Path:
    """`data_dir`, else the folder that $TOOLKIT_DATA_DIR names. Raises NotFoundHere where there is neither."""
    folder = data_dir or os.environ.get("TOOLKIT_DATA_DIR")
    if not folder:
        raise NotFoundHere("there is no data_dir and no $TOOLKIT_DATA_DIR")
    return Path(folder).expanduser()


def locate(name: str, data_dir: Path | None) -> ImageFiles:
    """The files of set `name` in the first place that has them: `data_dir` alone, if given; else
    $TOOLKIT_DATA_DIR, the Hub's cache, the Hub.

    Raises NotFoundHere naming every place that was searched. Answers within seconds, downloads aside.
    """
    if data_dir is not None:
        return find_in_folder(data_dir.expanduser(), name)
    reasons = []
    for look in (_in_environment_folder, _in_hub_cache, _on_hub):
        try:
            return look(name)
        except NotFoundHere as reason:
            reasons.append(str(reason))
    raise NotFoundHere("; ".join(reasons))


def find_in_folder(folder: Path, name: str) -> ImageFiles:
    """The files of `name` in `folder/name` or `folder` itself.

    Raises NotFoundHere where neither has them, and UserError for a folder that cannot be read.
    """
    # The sets share file names, so a folder that is called after one set is never taken for another.
    own = [] if folder.name in HUB_REPOS and folder.name != name else [folder]
    try:
        for place in (folder / name, *own):
            if files := _parquet_files(place) or _idx_files(place):
                return files
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read ({error.strerror}): check permissions.") from None
    raise NotFoundHere(f"{folder} holds neither train-*.parquet and test-*.parquet nor the idx files of {TITLES[name]}")


def _parquet_files(folder: Path) -> ImageFiles | None:
    train, test = (tuple(sorted(folder.glob(f"{split}-*.parquet"))) for split in SPLITS)
    return ImageFiles("parquet", train, test) if train and test else None


def _idx_files(folder: Path) -> ImageFiles | None:
    splits = []
    for stems in _IDX_STEMS:
        plain, packed = ([folder / f"{stem}{suffix}" for stem in stems] for suffix in ("", ".gz"))
        files = [a if a.is_file() else b for a, b in zip(plain, packed, strict=True)]
        if not all(path.is_file() for path in files):
            return None
        splits.append(tuple(files))
    return ImageFiles("idx", *splits)


def _in_environment_folder(name: str) -> ImageFiles:
    return find_in_folder(data_folder(None), name)


def _in_hub_cache(name: str) -> ImageFiles:
    return find_on_hub(HUB_REPOS[name], _HUB_PATTERNS, lambda folder: find_in_folder(folder, name), ask=False)


def _on_hub(name: str) -> ImageFiles:
    if importlib.util.find_spec("pyarrow") is None:
        raise NotFoundHere("what the Hub has cannot be read without the package pyarrow")
    return find_on_hub(HUB_REPOS[name], _HUB_PATTERNS, lambda folder: find_in_folder(folder, name), ask=True)


def find_on_hub(repo: str, patterns: Sequence[str], find: Callable[[Path], T], *, ask: bool) -> T:
    """Returns what `find` makes of the folder with the files of data set `repo` that match `patterns`: as the Hub's
    cache has them, or, with `ask`, as the Hub has them now. Raises NotFoundHere, within seconds, downloads aside.
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
        )
        return find(Path(folder))
    # Whatever its client raises (errors of three HTTP libraries, of the disk, of a half-filled cache), the Hub is
    # one place among several.
    except Exception as error:
        raise NotFoundHere(f"{reason} ({type(error).__name__})") from error

"""The argument parser of sub-commands: `argparse` with errors raised as `UserError`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from toolkit.errors import UserError, did_you_mean


def count(text: str) -> int:
    """Return an integer of at least 1, as the `type` of an argument."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: take one or more")
    return value


def positive(text: str) -> float:
    """Return a number above 0, as the `type` of an argument."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text}: take a number above 0")
    return value


def regular_file(text: str) -> Path:
    """Return the path of a regular file as the `type` of an argument. Reading a pipe could hang."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: not a file. Give an existing regular file")
    return Path(text)


class Parser(argparse.ArgumentParser):
    """An `argparse` parser that raises UserError instead of printing its usage and exiting."""

    def __init__(self, prog: str, description: str | None = None, **settings: object):
        super().__init__(prog=prog, description=description, allow_abbrev=False, **settings)  # type: ignore[arg-type]

    def parse_args(self, args: Sequence[str], namespace: argparse.Namespace | None = None) -> argparse.Namespace:  # type: ignore[override]
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = re.findall(r"--[\w-]+", self.format_help())
            remedy = did_you_mean(unknown[0].partition("=")[0], flags, f"See {self.prog} --help.")
            raise UserError(f"unexpected {unknown[0]!r}. {remedy}")
        return known

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice is None:
            raise UserError(f"{message}. See {self.prog} --help.")
        choices = [word.strip(" '") for word in choice[2].split(",")]
        remedy = did_you_mean(choice[1], choices, f"Take one of {', '.join(choices)}.")
        raise UserError(f"unknown {choice[1]!r}. {remedy}")

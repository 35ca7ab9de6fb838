"""The `toolkit` command: help and unknown subcommands."""

import subprocess
import sys

import pytest

from tests.support.helpers import ROOT
from toolkit.commands import COMMANDS, main


def test_help_lists_every_command_with_its_summary(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"{name} " in printed
        assert command.summary in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chekpoint"], "unknown command 'chekpoint'. Did you mean checkpoint?"),
        (["zzz"], f"unknown command 'zzz'. Take one of {', '.join(COMMANDS)}."),
        (["checkpoint", "inspct", "x"], "unknown 'inspct'. Did you mean inspect?"),
        (["checkpoint", "inspect", "x", "--quik"], "unexpected '--quik'. See toolkit checkpoint --help."),
    ],
)
def test_unknown_words_exit_with_code_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_python_m_toolkit_help_does_not_import_torch():
    code = "import sys, runpy; sys.argv = ['toolkit', '--help']; sys.exit = print; runpy.run_module('toolkit')"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("usage: toolkit COMMAND")
    assert done.stdout.endswith("\n0\nFalse\n")

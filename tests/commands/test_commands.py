"""The command that holds the sub-commands: what it lists, what it refuses, and how it leaves."""

import subprocess
import sys

import pytest

from tests.support.helpers import ROOT
from toolkit.commands import COMMANDS, main


def test_help_lists_every_command_with_what_it_does(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"{name} " in said
        assert command.summary in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chekpoint"], "unknown command 'chekpoint'. Did you mean checkpoint?"),
        (["zzz"], f"unknown command 'zzz'. Take one of {', '.join(COMMANDS)}."),
        (["checkpoint", "inspct", "x"], "unknown 'inspct'. Did you mean inspect?"),
        (["checkpoint", "inspect", "x", "--quik"], "unexpected '--quik'. See toolkit checkpoint --help."),
    ],
)
def test_what_it_does_not_know_costs_one_line_and_exit_code_two(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1


def test_python_m_toolkit_is_the_command_and_its_help_is_light():
    code = "import sys, runpy; sys.argv = ['toolkit', '--help']; sys.exit = print; runpy.run_module('toolkit')"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("usage: toolkit COMMAND")
    assert done.stdout.endswith("\n0\nFalse\n")

"""The `toolkit` command: help and unknown subcommands."""

import pytest

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

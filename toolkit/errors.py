"""What can go wrong for a user, and the exit code that each outcome has."""

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: run the same command again, it continues from a verified checkpoint."""
EXIT_INTERRUPTED = 130
"""Ctrl-C."""


class UserError(ValueError):
    """Bad input: one sentence that names the field, the value and the remedy.

    Raised alike on every rank (use `Run.on_main_and_share` for what only one rank can know), so that all of them
    leave with `EXIT_USER_ERROR`, nobody waits for a rank that is gone, and one line is printed.
    """


class Preempted(Exception):
    """The run was asked to stop, and left a verified checkpoint: `EXIT_PREEMPTED`."""

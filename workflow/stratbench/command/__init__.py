"""The command `stratbench`, whose subcommands run the workflow's rules or the modules behind them."""

from __future__ import annotations

#: Exit code of a subcommand: 0 after success.
ExitCode = int


class CommandError(Exception):
    """A subcommand failed; the message is one sentence for the user."""

"""The command `stratbench`, whose subcommands run the workflow's rules or the modules behind them."""

from __future__ import annotations


class CommandError(Exception):
    """A subcommand failed; the message is one sentence for the user."""

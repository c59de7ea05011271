"""The command `stratbench`: each subcommand drives the workflow's rules, or the modules behind them."""

from __future__ import annotations


class CommandError(Exception):
    """A subcommand cannot do what was requested; the message is one sentence."""

"""The command `stratbench`: each subcommand drives the workflow's rules, or the modules behind them."""

from __future__ import annotations


class CommandError(Exception):
    """The reason, in one sentence, why a subcommand cannot do what it was asked."""

"""One cell as a file for another trainer: a module per target, and a table of supported strategies."""

from __future__ import annotations


class EmitError(Exception):
    """A cell cannot be written for a target; the message is one sentence."""

"""One cell as a file for a trainer of the user's own: a module per target, and a table of who says what."""

from __future__ import annotations


class EmitError(Exception):
    """The reason, in one sentence, why a cell cannot be written for a target."""

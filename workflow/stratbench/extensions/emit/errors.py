"""Defines the error for cells that cannot be written for a target."""

from __future__ import annotations


class EmitError(Exception):
    """A cell cannot be written for a target, for the reason in the message."""

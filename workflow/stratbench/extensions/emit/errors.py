"""Defines the error for a cell that cannot be emitted in the requested file format."""

from __future__ import annotations


class EmitError(Exception):
    """A cell cannot be emitted in the requested file format; the message has the reason."""

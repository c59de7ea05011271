"""Builds addresses of entries in docs/troubleshooting.md, which are appended to error messages."""

from __future__ import annotations

import re

PAGE = "docs/troubleshooting.md"


def format_help_address(heading: str) -> str:
    """Return the address of an entry of docs/troubleshooting.md, in square brackets.

    Args:
        heading: Heading of the entry, which is a part of the message.
    """
    words = re.sub(r"[^\w\s-]", "", heading.lower())
    return f"[{PAGE}#{words.replace(' ', '-')}]"

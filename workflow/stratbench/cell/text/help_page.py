"""Addresses of entries in docs/troubleshooting.md, with which the messages they explain end."""

from __future__ import annotations

import re

PAGE = "docs/troubleshooting.md"


def help_address(heading: str) -> str:
    """Return the address of an entry, in square brackets.

    Args:
        heading: The entry's heading, which is a part of the message.
    """
    words = re.sub(r"[^\w\s-]", "", heading.lower())
    return f"[{PAGE}#{words.replace(' ', '-')}]"

"""docs/troubleshooting.md: its headings are parts of messages in the code, which end with its address."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from stratbench.cell.text.help_page import PAGE, format_help_address

ROOT = Path(__file__).parents[2]
#: Sections of the page whose headings are no messages of stratbench.
OTHERS = ("What records and reports say", "Messages of PyTorch, pip and Snakemake")


def headings() -> list[str]:
    """Return the headings that are parts of stratbench's messages."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    found = []
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        if title not in OTHERS:
            found += re.findall(r"^### (.*)$", body, re.MULTILINE)
    return found


@cache
def texts_and_addresses() -> tuple[str, tuple[str, ...]]:
    """Return the code's string constants, and the headings that `format_help_address` is called with."""
    texts, addresses = [], []
    for path in (ROOT / "workflow/stratbench").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = [
            node.args[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and getattr(node.func, "id", None) == "format_help_address"
        ]
        addresses += [ast.literal_eval(argument) for argument in called]
        texts += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in called
        ]
    return "\0".join(texts), tuple(addresses)


@pytest.mark.parametrize("heading", headings())
def test_a_heading_is_a_part_of_a_message_that_ends_with_its_address(heading):
    texts, addresses = texts_and_addresses()
    assert heading in texts
    assert heading in addresses


def test_every_address_in_a_message_is_of_an_entry():
    _, addresses = texts_and_addresses()
    assert sorted(set(addresses)) == sorted(headings())


def test_an_address_is_the_anchor_of_its_heading():
    assert format_help_address("SLURM's time, for now") == f"[{PAGE}#slurms-time-for-now]"

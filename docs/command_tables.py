"""Generates docs/reference/commands.md: every command of `stratbench` and its options, from the parser.

    PYTHONPATH=workflow python docs/command_tables.py

A test keeps the page current.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from config_tables import DOCS, fill
from stratbench.command.__main__ import build_parser

PAGE = DOCS / "reference" / "commands.md"


def command_tables() -> str:
    """Return a section per command: its help and a table of its arguments."""
    [commands] = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    helps = {action.dest: action.help for action in commands._choices_actions}
    sections = []
    for name, command in commands.choices.items():
        rows = "".join(f"| {argument} | {meaning} |\n" for argument, meaning in _arguments(command))
        table = f"| argument | meaning |\n| --- | --- |\n{rows}" if rows else ""
        sections.append(f"## stratbench {name}\n\n{_sentence(helps[name])}\n\n{table}".rstrip())
    return "\n\n".join(sections) + "\n"


def _arguments(command: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield each argument as it is written, and its meaning."""
    for action in command._actions:
        if action.dest == "help" or action.help == argparse.SUPPRESS:
            continue
        value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
        value = " ".join(value) if isinstance(value, tuple) else value
        written = [f"`{f'{flag} {value}'.strip()}`" for flag in action.option_strings] or [
            f"`{value}`"
        ]
        yield ", ".join(written), (action.help or "").replace("%%", "%").replace("|", "\\|")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")


def main() -> None:
    """Write the page."""
    PAGE.write_text(fill(PAGE, command_tables()), encoding="utf-8")


if __name__ == "__main__":
    main()

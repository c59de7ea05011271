"""`stratbench emit`: one cell as a file for a trainer of the user's own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from stratbench.cell.files import write_atomic
from stratbench.extensions.emit.errors import EmitError


def add_subcommand(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `emit` and its arguments; `add`: takes a name, a function and a help text."""
    from stratbench.extensions.emit.find import NAME
    from stratbench.extensions.emit.table import TARGETS

    emit = add("emit", run_emit, "a cell as a file for your own trainer", study=False)
    emit.add_argument(
        "cell",
        nargs="?",
        metavar="CELL",
        help=f"the path of a record, or a cell's name: {NAME}; default: what `decide` chose",
    )
    emit.add_argument(
        "--to",
        required=True,
        choices=TARGETS,
        metavar="TARGET",
        help="; ".join(f"{name}: {what}" for name, what in TARGETS.items()),
    )
    emit.add_argument("--output", type=Path, metavar="FILE", help="default: the terminal")
    emit.add_argument("--results", type=Path, default=Path("results"), help="default: results")
    emit.add_argument("--study", help="the study, where several have the cell")


def run_emit(args: argparse.Namespace, others: list[str]) -> int:
    """Print the file or write it; returns the exit code."""
    from stratbench.extensions.emit.choice import Choice
    from stratbench.extensions.emit.find import find_record
    from stratbench.extensions.emit.table import emit

    try:
        if others:
            raise EmitError(f"unknown: {' '.join(others)}; see stratbench emit --help")
        text = emit(Choice(find_record(args.results, args.study, args.cell)), args.to)
    except EmitError as error:
        print(f"stratbench emit: {error}", file=sys.stderr)
        return 2
    if args.output is None:
        print(text, end="")
    else:
        write_atomic(args.output, text)
        print(args.output)
    return 0

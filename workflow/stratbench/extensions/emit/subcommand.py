"""`stratbench emit` writes one cell as a file for your own trainer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from stratbench.cell.files import write_text_atomically
from stratbench.extensions.emit.errors import EmitError


def add_subcommand(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand `emit` and its arguments to the command line.

    Args:
        add_parser: Adds a subcommand with a name, a function and a help text, and returns the subcommand's
            parser.
    """
    from stratbench.extensions.emit.find import NAME
    from stratbench.extensions.emit.table import TARGETS

    emit = add_parser(
        "emit", run_emit_command, "write a cell as a file for your own trainer", study=False
    )
    emit.add_argument(
        "cell",
        nargs="?",
        metavar="CELL",
        help=f"path of a record, or name of a cell as {NAME}; default: the cell that `decide` chose",
    )
    emit.add_argument(
        "--to",
        required=True,
        choices=TARGETS,
        metavar="TARGET",
        help="; ".join(f"{name}: {what}" for name, what in TARGETS.items()),
    )
    emit.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write; default: print to the terminal"
    )
    emit.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        help="folder with the results of all studies; default: results",
    )
    emit.add_argument(
        "--study", help="name of the study; needed if several studies have a cell of this name"
    )


def run_emit_command(args: argparse.Namespace, unknown_arguments: list[str]) -> int:
    """Print the emitted file, or write it to `--output`. Return the process's exit code."""
    from stratbench.extensions.emit.choice import ChosenCell
    from stratbench.extensions.emit.find import read_record_to_emit
    from stratbench.extensions.emit.table import format_file_for_target

    try:
        if unknown_arguments:
            raise EmitError(
                f"unknown arguments: {' '.join(unknown_arguments)}; see stratbench emit --help"
            )
        text = format_file_for_target(
            ChosenCell(read_record_to_emit(args.results, args.study, args.cell)), args.to
        )
    except EmitError as error:
        print(f"stratbench emit: {error}", file=sys.stderr)
        return 2
    if args.output is None:
        print(text, end="")
    else:
        write_text_atomically(args.output, text)
        print(args.output)
    return 0

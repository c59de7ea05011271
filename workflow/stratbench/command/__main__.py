"""Parses the arguments of `stratbench`, or of `python -m stratbench.command`, and runs a subcommand.

Subcommands import their modules when they run, since only `run`, `plan` and the check of networks need
PyTorch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stratbench import __version__
from stratbench.cell.extensions import iter_imported_additions
from stratbench.cell.files import format_os_error
from stratbench.command import CommandError, ExitCode
from stratbench.command.init import create_study_files
from stratbench.command.subcommands import (
    SubcommandAdder,
    add_training_subcommand,
    check_no_unknown_arguments,
    print_rule_answer,
)

DESCRIPTION = """\
Measures distributed-training strategies against each other, and says which to choose.

In a folder with config.yaml a subcommand runs the rule of its name, and hands all other
options to Snakemake: `stratbench plan --config 'cluster={gpu: A100 40GB}'`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return its exit code, which is 2 after an error message."""
    args, others = build_parser().parse_known_args(argv)
    try:
        return args.run(args, others)
    except (CommandError, OSError) as error:
        reason = format_os_error(error) if isinstance(error, OSError) else error
        print(f"stratbench {args.command}: {reason}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. It has the subcommands of the core and of extensions."""
    whole = argparse.ArgumentParser(
        prog="stratbench",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"stratbench {__version__}")
    add = SubcommandAdder(whole)
    text = "create a new study: config.yaml, Snakefile, profiles"
    init = add("init", run_init, text, study=False)
    init.add_argument(
        "folder", type=Path, help="the folder to create; if it exists, it must be empty"
    )
    add_training_subcommand(add, "run", "train a study, and write its report")
    text = "write a report from the existing records of a study, and list the missing ones"
    add("partial", print_rule_answer, text)
    add("decide", print_rule_answer, "recommend a strategy from the records, with reasons")
    for _, add_subcommands in iter_imported_additions("commands"):
        add_subcommands(add)
    return whole


def run_init(args: argparse.Namespace, unknown_arguments: list[str]) -> ExitCode:
    """Run `stratbench init FOLDER`, and return its exit code."""
    check_no_unknown_arguments(unknown_arguments)
    for path in create_study_files(args.folder):
        print(path)
    print(f"\nNext: cd {args.folder} && stratbench run")
    return 0


if __name__ == "__main__":
    sys.exit(main())

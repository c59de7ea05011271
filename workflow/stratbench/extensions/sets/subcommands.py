"""Adds `compare`, `export` and `bundle`, and lets `decide`, `plan` and `check` take a result set."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stratbench.command import CommandError, ExitCode
from stratbench.command.in_folder import check_packages_installed
from stratbench.command.subcommands import (
    Run,
    SubcommandAdder,
    check_no_unknown_arguments,
    list_config_pairs,
    print_rule_answer,
)

SET = "a bundle, a folder results/STUDY, or paper:v2"


def add_subcommands(add: SubcommandAdder) -> None:
    """Add the commands `compare`, `export` and `bundle`, and the argument SET of other commands."""
    add_set_argument(add.find_subcommand_parser("decide"), run_decide_for_set, SET, "decision")
    add_set_argument(add.find_subcommand_parser("plan"), run_plan_for_bundle, "a bundle")
    check = add.find_subcommand_parser("check")
    check.description = (
        "check whether each strategy of a study can train each network, or whether a result set is "
        "valid"
    )
    add_set_argument(check, run_check_for_set, SET)
    add_compare_subcommand(add)
    export = add("export", run_export, "write the records for other tools")
    export.add_argument(
        "--to",
        nargs="+",
        default=["parquet"],
        metavar="FORMAT",
        help="formats to write: parquet, mlflow, tensorboard or wandb; default: parquet",
    )
    add_set_argument(export, run_export_for_set, SET, "export")
    bundle = add("bundle", run_bundle, "write the results of a study as one file")
    bundle.add_argument(
        "--replace-hosts",
        action="store_true",
        help="replace the names of hosts in the bundle, and remove those of users",
    )


def add_set_argument(
    command: argparse.ArgumentParser,
    run_for_set: Callable[[argparse.Namespace], ExitCode],
    allowed_sets: str,
    folder_suffix: str | None = None,
) -> None:
    """Add the argument SET to a command. Add the option --out if the command writes a folder.

    Args:
        command: The command's parser.
        run_for_set: Runs the command for a set.
        allowed_sets: Text on the sets that the command accepts.
        folder_suffix: Ending of STUDY.<folder_suffix>, the default output folder; None if there is none.
    """
    command.add_argument(
        "set",
        nargs="?",
        help=f"result set to use: {allowed_sets}; default: the study in the current folder",
    )
    if folder_suffix:
        command.add_argument(
            "--out",
            type=Path,
            help=f"folder to write to if you name a result set; default: STUDY.{folder_suffix}",
        )
    run_for_study = command.get_default("run")
    command.set_defaults(
        run=partial(run_for_set_or_study, run_for_set, run_for_study, bool(folder_suffix))
    )


def add_compare_subcommand(add: SubcommandAdder) -> None:
    """Add the command `compare`, which compares the named sets or those in config.yaml."""
    compare = add("compare", run_compare, "compare two or more result sets, side by side")
    compare.add_argument(
        "set",
        nargs="*",
        metavar="NAME=SET",
        help=f"name and source of each result set; SET is {SET}; default: the key `sets` of config.yaml",
    )
    compare.add_argument(
        "--out", type=Path, help="folder to write to if you name result sets; default: compare"
    )
    compare.add_argument(
        "--fail-above",
        type=float,
        metavar="SHARE",
        help="exit with code 1 if a strategy is slower than in the first set by more than this share and by "
        "more than noise, or has no usable times; 0.05 is 5 %%",
    )


def run_for_set_or_study(
    run_for_set: Callable[[argparse.Namespace], ExitCode],
    run_for_study: Run,
    out_is_for_sets: bool,
    args: argparse.Namespace,
    others: list[str],
) -> ExitCode:
    """Run a command on the named result set. Without a name, run it on this folder's study.

    Args:
        run_for_set: Function that runs the command on a set.
        run_for_study: Function that runs the command on the study.
        out_is_for_sets: Whether the option --out is allowed only with a set.
        args: Parsed arguments.
        others: Other arguments, which are options of Snakemake.
    """
    if args.set:
        # Without "=", the value of an option of Snakemake would be taken for the name of a set.
        if others:
            raise CommandError(
                f"{' '.join(others)}: is no option for a result set; write the value of an option of "
                "Snakemake with =, as in --jobs=4"
            )
        return run_for_set(args)
    if out_is_for_sets and args.out is not None:
        raise CommandError(
            "--out is only for a result set; to write a study's results elsewhere, set `results` in its "
            "config"
        )
    return run_for_study(args, others)


def run_decide_for_set(args: argparse.Namespace) -> ExitCode:
    """Run `stratbench decide SET`, and return the exit code."""
    from stratbench.extensions.sets import from_set

    return from_set.decide_from_set(args.set, list_config_pairs(args), args.out)


def run_plan_for_bundle(args: argparse.Namespace) -> ExitCode:
    """Run `stratbench plan BUNDLE`, and return the exit code."""
    check_packages_installed("torch")
    from stratbench.extensions.plan.subcommands import check_no_single_model_options
    from stratbench.extensions.sets import from_set

    if args.model is not None:
        check_no_unknown_arguments([args.set])
    check_no_single_model_options(args)
    return from_set.plan_from_bundle(args.set, list_config_pairs(args), args.out)


def run_check_for_set(args: argparse.Namespace) -> ExitCode:
    """Run `stratbench check SET`, and return the exit code."""
    from stratbench.extensions.sets import from_set

    check_no_unknown_arguments(list_config_pairs(args))
    return from_set.check_set_source(args.set)


def run_compare(args: argparse.Namespace, others: list[str]) -> ExitCode:
    """Run `stratbench compare` on named sets, or else the rule `compare`. Return the exit code."""
    # The share has no exponent, because YAML reads 1e-05 as text.
    limit = [] if args.fail_above is None else [f"compare={{fail_above: {args.fail_above:.9f}}}"]

    def compare_named_sets(args: argparse.Namespace) -> ExitCode:
        from stratbench.extensions.sets import from_set

        return from_set.compare_set_sources(args.set, [*list_config_pairs(args), *limit], args.out)

    return run_for_set_or_study(
        compare_named_sets, partial(print_rule_answer, config=limit), True, args, others
    )


def get_checked_formats(args: argparse.Namespace) -> list[str]:
    """Return the formats that the option --to names.

    Raises:
        CommandError: A format is unknown.
    """
    from stratbench.extensions.sets.export import EXPORTS

    if unknown := [name for name in args.to if name not in EXPORTS]:
        raise CommandError(f"--to {unknown[0]}: this is not a format; use {', '.join(EXPORTS)}")
    return args.to


def run_export_for_set(args: argparse.Namespace) -> ExitCode:
    """Run `stratbench export SET`, and return the exit code."""
    from stratbench.extensions.sets import from_set

    check_no_unknown_arguments(list_config_pairs(args))
    return from_set.export_set_source(args.set, get_checked_formats(args), args.out)


def run_export(args: argparse.Namespace, others: list[str]) -> ExitCode:
    """Run `stratbench export`, which runs the rule `export`. Return the exit code."""
    return print_rule_answer(args, others, [f"export=[{', '.join(get_checked_formats(args))}]"])


def run_bundle(args: argparse.Namespace, others: list[str]) -> ExitCode:
    """Run `stratbench bundle`, which runs the rule `bundle`. Return the exit code."""
    hosts = ["bundle={hosts: replaced}"] if args.replace_hosts else []
    return print_rule_answer(args, others, hosts)

"""Adds `compare`, `export` and `bundle`, and lets `decide`, `plan` and `check` take a result set."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stratbench.command import CommandError
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
    """Add the subcommands on result sets, and the argument SET of other subcommands."""
    add_set_argument(add.find_subcommand("decide"), decide_set, SET, "decision")
    add_set_argument(add.find_subcommand("plan"), plan_set, "a bundle")
    check = add.find_subcommand("check")
    check.description = (
        "check whether each strategy of a study can train each network, or whether a result set is "
        "valid"
    )
    add_set_argument(check, check_set, SET)
    add_compare(add)
    export = add("export", run_export, "write the records for other tools")
    export.add_argument(
        "--to",
        nargs="+",
        default=["parquet"],
        metavar="FORMAT",
        help="formats to write; default: parquet",
    )
    add_set_argument(export, export_set, SET, "export")
    bundle = add("bundle", run_bundle, "write the results of a study as one file")
    bundle.add_argument(
        "--replace-hosts",
        action="store_true",
        help="replace names of hosts and users in the bundle",
    )


def add_set_argument(
    command: argparse.ArgumentParser,
    of_set: Callable[[argparse.Namespace], int],
    sets: str,
    written: str | None = None,
) -> None:
    """Add the argument SET to a subcommand. If `written` is set, add the option --out too.

    Args:
        command: The subcommand's parser.
        of_set: Runs the subcommand on a set.
        sets: Text on the sets that it takes.
        written: Ending of the default folder that it writes, if any.
    """
    command.add_argument(
        "set", nargs="?", help=f"result set: {sets}; default: the study of this folder"
    )
    if written:
        command.add_argument(
            "--out", type=Path, help=f"folder to write for a set; default: STUDY.{written}"
        )
    of_study = command.get_default("run")
    command.set_defaults(run=partial(run_on_set, of_set, of_study, bool(written)))


def add_compare(add: SubcommandAdder) -> None:
    """Add the subcommand `compare`, for named sets or those of the config."""
    compare = add("compare", run_compare, "compare two or more result sets, side by side")
    compare.add_argument(
        "set",
        nargs="*",
        metavar="NAME=SET",
        help=f"{SET}; default: `sets` of this folder's config",
    )
    compare.add_argument(
        "--out", type=Path, help="folder to write for named sets; default: compare"
    )
    compare.add_argument(
        "--fail-above",
        type=float,
        metavar="SHARE",
        help="exit with code 1 if a strategy is slower by more than SHARE and noise, or has no usable times: "
        "0.05 is 5 %%",
    )


def run_on_set(
    of_set: Callable[[argparse.Namespace], int],
    of_study: Run,
    out_is_for_sets: bool,
    given: argparse.Namespace,
    others: list[str],
) -> int:
    """Run `of_set` if the user named a set, else `of_study`."""
    if given.set:
        if others:  # a value of one of Snakemake's options would be taken for a set
            raise CommandError(
                f"{' '.join(others)}: is no option for a set; write the value of an option of Snakemake "
                "with =, as in --jobs=4"
            )
        return of_set(given)
    if out_is_for_sets and given.out is not None:
        raise CommandError(
            "--out is only for a result set; to write a study's results elsewhere, set `results` in its "
            "config"
        )
    return of_study(given, others)


def decide_set(given: argparse.Namespace) -> int:
    """Run `stratbench decide SET`."""
    from stratbench.extensions.sets import from_set

    return from_set.decide_from_set(given.set, list_config_pairs(given), given.out)


def plan_set(given: argparse.Namespace) -> int:
    """Run `stratbench plan BUNDLE`."""
    check_packages_installed("torch")
    from stratbench.extensions.plan.subcommands import check_single_model_options
    from stratbench.extensions.sets import from_set

    if given.model is not None:
        check_no_unknown_arguments([given.set])
    check_single_model_options(given)
    return from_set.plan_from_bundle(given.set, list_config_pairs(given), given.out)


def check_set(given: argparse.Namespace) -> int:
    """Run `stratbench check SET`."""
    from stratbench.extensions.sets import from_set

    check_no_unknown_arguments(list_config_pairs(given))
    return from_set.check_set_source(given.set)


def run_compare(given: argparse.Namespace, others: list[str]) -> int:
    """Run `stratbench compare` on named sets, or else the rule `compare`."""
    # The number has no exponent, because YAML reads 1e-05 as text.
    limit = [] if given.fail_above is None else [f"compare={{fail_above: {given.fail_above:.9f}}}"]

    def compare_named(given: argparse.Namespace) -> int:
        from stratbench.extensions.sets import from_set

        return from_set.compare_set_sources(
            given.set, [*list_config_pairs(given), *limit], given.out
        )

    return run_on_set(compare_named, partial(print_rule_answer, config=limit), True, given, others)


def check_formats(given: argparse.Namespace) -> list[str]:
    """Return the formats of `--to`. Raises CommandError for an unknown format."""
    from stratbench.extensions.sets.export import EXPORTS

    if unknown := [name for name in given.to if name not in EXPORTS]:
        raise CommandError(f"--to {unknown[0]}: is not one of {', '.join(EXPORTS)}")
    return given.to


def export_set(given: argparse.Namespace) -> int:
    """Run `stratbench export SET`."""
    from stratbench.extensions.sets import from_set

    check_no_unknown_arguments(list_config_pairs(given))
    return from_set.export_set_source(given.set, check_formats(given), given.out)


def run_export(given: argparse.Namespace, others: list[str]) -> int:
    """Run `stratbench export`, which runs the rule `export`."""
    return print_rule_answer(given, others, [f"export=[{', '.join(check_formats(given))}]"])


def run_bundle(given: argparse.Namespace, others: list[str]) -> int:
    """Run `stratbench bundle`, which runs the rule `bundle`."""
    hosts = ["bundle={hosts: replaced}"] if given.replace_hosts else []
    return print_rule_answer(given, others, hosts)

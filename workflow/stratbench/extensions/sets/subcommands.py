"""Subcommands on result sets: `compare`, `export`, `bundle`; and a set for `decide`, `plan` and `check`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stratbench.command import CommandError
from stratbench.command.in_folder import require
from stratbench.command.subcommands import Adder, Run, answer_by_rule, pairs, refuse

SET = "a bundle, a folder results/STUDY, or paper:v2"


def add_subcommands(add: Adder) -> None:
    """Add the subcommands, and the sets that others take."""
    take_set(add.find("decide"), decide_set, SET, "decision")
    take_set(add.find("plan"), plan_set, "a bundle")
    check = add.find("check")
    check.description = (
        "of a study, whether each strategy can train each network; of a set, whether it is sound"
    )
    take_set(check, check_set, SET)
    add_compare(add)
    export = add("export", run_export, "the records for other tools")
    export.add_argument(
        "--to", nargs="+", default=["parquet"], metavar="FORMAT", help="default: parquet"
    )
    take_set(export, export_set, SET, "export")
    bundle = add("bundle", run_bundle, "the results of a study as one file")
    bundle.add_argument(
        "--replace-hosts", action="store_true", help="no host or user is named in it"
    )


def take_set(
    command: argparse.ArgumentParser,
    of_set: Callable[[argparse.Namespace], int],
    sets: str,
    written: str | None = None,
) -> None:
    """Let a subcommand take a set, and with `written` the folder that it then writes."""
    command.add_argument("set", nargs="?", help=f"{sets}; default: the study of this folder")
    if written:
        command.add_argument(
            "--out", type=Path, help=f"of a set: the folder to write; default: STUDY.{written}"
        )
    of_study = command.get_default("run")
    command.set_defaults(run=partial(run_on_set, of_set, of_study, bool(written)))


def add_compare(add: Adder) -> None:
    """Add `compare`: of the config's sets, or of those that are named."""
    compare = add("compare", run_compare, "two result sets or more, side by side")
    compare.add_argument(
        "set",
        nargs="*",
        metavar="NAME=SET",
        help=f"{SET}; default: `sets` of this folder's config",
    )
    compare.add_argument("--out", type=Path, help="of sets: the folder to write; default: compare")
    compare.add_argument(
        "--fail-above",
        type=float,
        metavar="SHARE",
        help="exit code 1 where a strategy is slower by more, beyond noise, or can no longer be judged: "
        "0.05 is 5 %%",
    )


def run_on_set(
    of_set: Callable[[argparse.Namespace], int],
    of_study: Run,
    out_is_for_sets: bool,
    given: argparse.Namespace,
    others: list[str],
) -> int:
    """Run `of_set` if a set is named, else `of_study`."""
    if given.set:
        if others:  # the value of an option that is not ours looks like a set
            raise CommandError(
                f"{' '.join(others)}: is no option for a set; an option of Snakemake gets its value by =: "
                "--jobs=4"
            )
        return of_set(given)
    if out_is_for_sets and given.out is not None:
        raise CommandError(
            "--out is for a set; a study's results are in the folder `results` of its config"
        )
    return of_study(given, others)


def decide_set(given: argparse.Namespace) -> int:
    """`stratbench decide SET`."""
    from stratbench.extensions.sets import from_set

    return from_set.decide(given.set, pairs(given), given.out)


def plan_set(given: argparse.Namespace) -> int:
    """`stratbench plan BUNDLE`."""
    require("torch")
    from stratbench.extensions.plan.subcommands import refuse_question
    from stratbench.extensions.sets import from_set

    if given.model is not None:
        refuse([given.set])
    refuse_question(given)
    return from_set.plan(given.set, pairs(given), given.out)


def check_set(given: argparse.Namespace) -> int:
    """`stratbench check SET`."""
    from stratbench.extensions.sets import from_set

    refuse(pairs(given))
    return from_set.check(given.set)


def run_compare(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench compare`: the rule `compare`, or of named sets the comparison."""
    # Without an exponent, because YAML would read that as text.
    limit = [] if given.fail_above is None else [f"compare={{fail_above: {given.fail_above:.9f}}}"]

    def compare_named(given: argparse.Namespace) -> int:
        from stratbench.extensions.sets import from_set

        return from_set.compare(given.set, [*pairs(given), *limit], given.out)

    return run_on_set(compare_named, partial(answer_by_rule, config=limit), True, given, others)


def checked_formats(given: argparse.Namespace) -> list[str]:
    """Return the formats of `--to`; CommandError for one that there is not."""
    from stratbench.extensions.sets.export import EXPORTS

    if unknown := [name for name in given.to if name not in EXPORTS]:
        raise CommandError(f"--to {unknown[0]}: is not one of {', '.join(EXPORTS)}")
    return given.to


def export_set(given: argparse.Namespace) -> int:
    """`stratbench export SET`."""
    from stratbench.extensions.sets import from_set

    refuse(pairs(given))
    return from_set.export(given.set, checked_formats(given), given.out)


def run_export(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench export`: the rule `export`."""
    return answer_by_rule(given, others, [f"export=[{', '.join(checked_formats(given))}]"])


def run_bundle(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench bundle`: the rule `bundle`."""
    hosts = ["bundle={hosts: replaced}"] if given.replace_hosts else []
    return answer_by_rule(given, others, hosts)

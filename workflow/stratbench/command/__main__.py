"""The subcommands of `stratbench` and their arguments; also `python -m stratbench.command`.

Each imports what it needs when it runs: only `run`, `plan` and the check of networks need PyTorch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from stratbench import __version__
from stratbench.cell.files import reason_of
from stratbench.command import CommandError
from stratbench.command.in_folder import QUIET, profile_folder, require, run_rules
from stratbench.command.init import lay_down
from stratbench.study.model_question import add_question, options_of

SET = "a bundle, a folder results/STUDY, or paper:v2"
FOR_SNAKEMAKE = """\
In a study's folder all other options go to Snakemake, with their values by `=`: -n, --jobs=4.
"""
DESCRIPTION = """\
Measures distributed-training strategies against each other, and says which to choose.

In a folder with config.yaml a subcommand runs the rule of its name, and hands all other
options to Snakemake: `stratbench plan --config 'cluster={gpu: A100 40GB}'`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code: 2 if it cannot do what it was asked."""
    given, others = parser().parse_known_args(argv)
    try:
        return given.run(given, others)
    except (CommandError, OSError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else error
        print(f"stratbench {given.command}: {reason}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    whole = argparse.ArgumentParser(
        prog="stratbench",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"stratbench {__version__}")
    subcommands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = partial(add_command, subcommands)
    text = "lay down a study of your own: config.yaml, Snakefile, profiles"
    init = add("init", run_init, text, study=False)
    init.add_argument("folder", type=Path, help="a folder that does not exist yet, or is empty")
    for name, text in (
        ("run", "train a study, and write its report"),
        ("verdict", "which strategy is fastest, from short blocks instead of whole trainings"),
        ("links", "measure what the exchange between workers costs here, for `project`"),
    ):
        trains = add(name, run_study, text)
        trains.add_argument(
            "--profile", default="local", help="local (default), slurm, or a folder"
        )
    add_plan(add)
    add(
        "partial",
        run_partial,
        "the report of a study so far: merge what is there, list what is missing",
    )
    add("project", run_project, "step times on more workers than were measured")
    decide = add("decide", run_decide, "which strategy to choose, and why")
    of_a_set(decide, SET, "decision")
    add_check(add)
    add_compare(add)
    export = add("export", run_export, "the records for other tools")
    of_a_set(export, SET, "export")
    export.add_argument(
        "--to", nargs="+", default=["parquet"], metavar="FORMAT", help="default: parquet"
    )
    bundle = add("bundle", run_bundle, "the results of a study as one file")
    bundle.add_argument(
        "--replace-hosts", action="store_true", help="no host or user is named in it"
    )
    for part in parts_with_subcommands():
        import_module(f"stratbench.{part}.subcommand").add_subcommand(add)
    return whole


def parts_with_subcommands() -> list[str]:
    """Return the parts of the package that add a subcommand of their own, from a module `subcommand`."""
    package = Path(__file__).parents[1]
    return sorted(path.parent.name for path in package.glob("*/subcommand.py"))


#: Adds a subcommand of a name, which calls a function and says what it does; returns its parser.
Add = Callable[[str, Callable[[argparse.Namespace, list[str]], int], str], argparse.ArgumentParser]


def add_command(
    subcommands: Any, name: str, run: Any, text: str, study: bool = True
) -> argparse.ArgumentParser:
    """Adds a subcommand; with `study` one that runs a rule, and hands options to Snakemake."""
    added = subcommands.add_parser(
        name,
        help=text,
        description=text,
        epilog=FOR_SNAKEMAKE if study else None,
        allow_abbrev=False,
    )
    added.set_defaults(run=run)
    if study:
        added.add_argument("--study", help="the study, where it is not the config's")
        added.add_argument(
            "--config", nargs="+", default=[], metavar="KEY=VALUE", help="values for the config's"
        )
    return added


def of_a_set(command: argparse.ArgumentParser, sets: str, written: str) -> None:
    """Adds the set that a subcommand may be given, and the folder that it then writes."""
    command.add_argument("set", nargs="?", help=f"{sets}; default: the study of this folder")
    command.add_argument(
        "--out", type=Path, help=f"of a set: the folder to write; default: STUDY.{written}"
    )


def add_plan(add: Add) -> None:
    """`plan`: of a study, of a bundle, of a network alone, or of one on so many GPUs."""
    plan = add("plan", run_plan, "what fits, how long it takes, what it costs")
    of_a_set(plan, "a bundle", "plan")
    plan.add_argument(
        "--model",
        metavar="NAME",
        help="what fits for a network alone, without a study: one of ours or of torchvision's, or "
        "one of the `models` of this folder's config.yaml",
    )
    plan.add_argument(
        "--dataset",
        metavar="NAME",
        help="with --model: what it is trained on; default: data of ImageNet's or GPT-2's shape",
    )
    add_question(plan)


def add_check(add: Add) -> None:
    """`check`: of a study's networks, or of a set."""
    text = "of a study, whether each strategy can train each network; of a set, whether it is sound"
    check = add("check", run_check, text)
    check.add_argument(
        "set", nargs="?", help=f"{SET}; default: the networks of this folder's study"
    )


def add_compare(add: Add) -> None:
    """`compare`: of the config's sets, or of those that are named."""
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


def run_init(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench init FOLDER`."""
    refuse(others)
    for path in lay_down(given.folder):
        print(path)
    print(f"\nNext: cd {given.folder} && stratbench run")
    return 0


def run_study(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench run`: the workflow's default target; of `verdict` and `links` the rule of the name."""
    require("torch")
    target = [] if given.command == "run" else [given.command]
    profile = profile_folder(given.profile)
    return run_rules(*target, "--profile", profile, *others, config=pairs(given))


def run_partial(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench partial`: the rule `partial`."""
    return answer_by_rule(given, others, [])


def run_project(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench project`: the rule `project`."""
    require("torch")
    return answer_by_rule(given, others, [])


def run_plan(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench plan`: the rule `plan`, for a bundle the module `from_set`, or a network alone."""
    require("torch")
    if given.model is not None:
        return plan_model(given, others)
    if given.dataset is not None:
        raise CommandError("--dataset is for --model")
    for option in options_of(given):
        raise CommandError(f"{option} is for --model NAME --gpus N")
    return of_set_or_study(given, others, lambda m: m.plan(given.set, pairs(given), given.out))


def plan_model(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench plan --model NAME`: with the config of this folder, if there is one."""
    import yaml

    from stratbench.command.from_set import changed
    from stratbench.plan.__main__ import main as make_plan
    from stratbench.study.config.messages import ConfigError
    from stratbench.study.config.yaml_traps import check_duplicate_keys, check_syntax

    refuse([*others, *([given.set] if given.set else []), *(["--study"] if given.study else [])])
    path, config = Path("config.yaml"), {}
    if path.is_file():
        try:
            check_syntax(path)
            check_duplicate_keys(path)
        except ConfigError as error:
            raise CommandError(str(error)) from None
        config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    arguments = ["--config", json.dumps(changed(config, given.config)), "--model", given.model]
    arguments += ["--dataset", given.dataset] if given.dataset else []
    arguments += ["--out", str(given.out)] if given.out else []
    options = options_of(given)
    if options and "--gpus" not in options:
        raise CommandError(f"{next(iter(options))} is for --model NAME --gpus N; add --gpus")
    if options and given.out:
        raise CommandError("--out is for a page, and --gpus prints a table; remove one of them")
    arguments += [text for option in options.items() for text in option]
    return make_plan(arguments)


def run_check(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench check`: the rule `check`, or for a set its check."""
    if given.set is not None:
        refuse(pairs(given))
    else:
        require("torch")
    return of_set_or_study(given, others, lambda m: m.check(given.set))


def run_decide(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench decide`: the rule `decide`, or for a set the module `from_set`."""
    return of_set_or_study(given, others, lambda m: m.decide(given.set, pairs(given), given.out))


def run_compare(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench compare`: the rule `compare`, or for named sets the module `from_set`."""
    # Without an exponent, because YAML would read that as text.
    limit = [] if given.fail_above is None else [f"compare={{fail_above: {given.fail_above:.9f}}}"]
    config = [*pairs(given), *limit]
    return of_set_or_study(given, others, lambda m: m.compare(given.set, config, given.out), limit)


def run_export(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench export`: the rule `export`, or for a set the module `from_set`."""
    from stratbench.sets.export import EXPORTS

    if unknown := [name for name in given.to if name not in EXPORTS]:
        raise CommandError(f"--to {unknown[0]}: is not one of {', '.join(EXPORTS)}")
    if given.set is not None:
        refuse(pairs(given))
    formats = [f"export=[{', '.join(given.to)}]"]
    return of_set_or_study(
        given, others, lambda m: m.export(given.set, given.to, given.out), formats
    )


def of_set_or_study(
    given: argparse.Namespace,
    others: list[str],
    of_set: Callable[[ModuleType], int],
    config: Sequence[str] = (),
) -> int:
    """Runs `of_set` with the module `from_set` if a set is named, else the rule of the subcommand's name.

    `config`: pairs that the rule gets in addition to those on the command line.
    """
    if given.set:
        from stratbench.command import from_set

        if others:  # the value of an option that is not ours looks like a set
            raise CommandError(
                f"{' '.join(others)}: is no option for a set; an option of Snakemake gets its value by =: "
                "--jobs=4"
            )
        return of_set(from_set)
    if getattr(given, "out", None) is not None:
        raise CommandError(
            "--out is for a set; a study's results are in the folder `results` of its config"
        )
    return answer_by_rule(given, others, config)


def run_bundle(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench bundle`: the rule `bundle`."""
    hosts = ["bundle={hosts: replaced}"] if given.replace_hosts else []
    return answer_by_rule(given, others, hosts)


def answer_by_rule(given: argparse.Namespace, others: list[str], config: Sequence[str]) -> int:
    """Runs the rule of the subcommand's name: prints its own text, and nothing of Snakemake's."""
    quiet = ("--cores", "1", "--quiet", "all")
    return run_rules(given.command, *quiet, *others, config=[*pairs(given), *config], program=QUIET)


def pairs(given: argparse.Namespace) -> list[str]:
    """The changes to the config, as KEY=VALUE."""
    return [*([f"study={given.study}"] if given.study else []), *given.config]


def refuse(others: list[str]) -> None:
    """Raises CommandError if there are unknown arguments."""
    if others:
        raise CommandError(f"unknown: {' '.join(others)}; see stratbench --help")


if __name__ == "__main__":
    sys.exit(main())

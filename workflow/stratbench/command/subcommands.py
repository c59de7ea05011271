"""Registration of subcommands of `stratbench` by core and extensions, and their common functions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratbench.command import CommandError
from stratbench.command.in_folder import QUIET, profile_folder, require, run_rules

#: Runs a subcommand, given its arguments and those for Snakemake; returns the exit code.
Run = Callable[[argparse.Namespace, list[str]], int]
FOR_SNAKEMAKE = """\
In a study's folder all other options go to Snakemake, with their values by `=`: -n, --jobs=4.
"""


class Adder:
    """Adds subcommands to a parser, and finds those that are there."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers: Any = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def __call__(
        self, name: str, run: Run, text: str, study: bool = True
    ) -> argparse.ArgumentParser:
        """Add a subcommand; with `study` one that runs a rule, and hands options to Snakemake."""
        added = self._parsers.add_parser(
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
                "--config",
                nargs="+",
                default=[],
                metavar="KEY=VALUE",
                help="values for the config's",
            )
        return added

    def find(self, name: str) -> argparse.ArgumentParser:
        """Return the subcommand of a name that was added."""
        return self._parsers.choices[name]


def add_training(add: Adder, name: str, text: str) -> None:
    """Add a subcommand that trains: it takes a profile.

    Args:
        add: Adds a subcommand.
        name: Its name.
        text: Its help.
    """
    add(name, run_training, text).add_argument(
        "--profile", default="local", help="local (default), slurm, or a folder"
    )


def run_training(args: argparse.Namespace, others: list[str]) -> int:
    """`stratbench run`: the workflow's default target; of other names the rule of the name."""
    require("torch")
    target = [] if args.command == "run" else [args.command]
    profile = profile_folder(args.profile)
    return run_rules(*target, "--profile", profile, *others, config=pairs(args))


def answer_by_rule(args: argparse.Namespace, others: list[str], config: Sequence[str] = ()) -> int:
    """Run the rule of the subcommand's name; print only its own text.

    Args:
        args: Parsed arguments.
        others: Further arguments for Snakemake.
        config: Further config pairs for the rule.
    """
    quiet = ("--cores", "1", "--quiet", "all")
    return run_rules(args.command, *quiet, *others, config=[*pairs(args), *config], program=QUIET)


def answer_with_torch(args: argparse.Namespace, others: list[str]) -> int:
    """Run the rule of the subcommand's name, which needs PyTorch."""
    require("torch")
    return answer_by_rule(args, others)


def pairs(args: argparse.Namespace) -> list[str]:
    """Return the changes to the config, as KEY=VALUE."""
    return [*([f"study={args.study}"] if args.study else []), *args.config]


def refuse(others: Sequence[str]) -> None:
    """Raise CommandError if there are unknown arguments."""
    if others:
        raise CommandError(f"unknown: {' '.join(others)}; see stratbench --help")


def changed(config: Mapping[str, Any], pairs: Sequence[str]) -> dict[str, Any]:
    """Return the config changed by pairs KEY=VALUE, as by Snakemake's `--config`: mappings are merged."""
    import yaml

    result = json.loads(json.dumps(config))
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise CommandError(f"--config {pair}: is not KEY=VALUE")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise CommandError(f"--config {pair}: {text} is not YAML") from error
        merge_config(result, {key: value})
    return result


def merge_config(config: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Merge `values` into `config`, mappings key by key."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            merge_config(config[key], value)
        else:
            config[key] = value

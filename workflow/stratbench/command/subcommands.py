"""Registers the subcommands of `stratbench`, for the core and extensions, and defines common functions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratbench.command import CommandError, ExitCode
from stratbench.command.in_folder import (
    QUIET,
    check_packages_installed,
    exec_snakemake,
    find_profile_folder,
)

#: A function that runs a subcommand, given its arguments and those for Snakemake, and returns the exit code.
Run = Callable[[argparse.Namespace, list[str]], ExitCode]
FOR_SNAKEMAKE = """\
In a study's folder all other options go to Snakemake, with their values by `=`: -n, --jobs=4.
"""


class SubcommandAdder:
    """Adds subcommands to a parser, and finds the parsers of those that were added."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers: Any = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def __call__(
        self, name: str, run: Run, text: str, study: bool = True
    ) -> argparse.ArgumentParser:
        """Add a subcommand to the parser of `stratbench`.

        Args:
            name: Name of the subcommand.
            run: Function that runs the subcommand.
            text: Help of the subcommand.
            study: Whether the subcommand runs a rule on a study and passes other options to Snakemake.
        """
        added = self._parsers.add_parser(
            name,
            help=text,
            description=text,
            epilog=FOR_SNAKEMAKE if study else None,
            allow_abbrev=False,
        )
        added.set_defaults(run=run)
        if study:
            added.add_argument(
                "--study", help="name of the study; by default `study` in config.yaml"
            )
            added.add_argument(
                "--config",
                nargs="+",
                default=[],
                metavar="KEY=VALUE",
                help="values that replace those of the same keys in config.yaml",
            )
        return added

    def find_subcommand_parser(self, name: str) -> argparse.ArgumentParser:
        """Return the parser of an added subcommand."""
        return self._parsers.choices[name]


def add_training_subcommand(add: SubcommandAdder, name: str, help_text: str) -> None:
    """Add a subcommand that trains cells, with the option `--profile`.

    Args:
        add: Adds a subcommand.
        name: Name of the subcommand.
        help_text: Help of the subcommand.
    """
    add(name, run_training_rule, help_text).add_argument(
        "--profile",
        default="local",
        help="Snakemake profile: local (default), slurm, or a folder with a config.yaml",
    )


def run_training_rule(args: argparse.Namespace, snakemake_arguments: list[str]) -> ExitCode:
    """Run the Snakemake rule with the subcommand's name, or the default target for `stratbench run`."""
    check_packages_installed("torch")
    target = [] if args.command == "run" else [args.command]
    profile = find_profile_folder(args.profile)
    config = list_config_pairs(args)
    return exec_snakemake(*target, "--profile", profile, *snakemake_arguments, config=config)


def print_rule_answer(
    args: argparse.Namespace, snakemake_arguments: list[str], config: Sequence[str] = ()
) -> ExitCode:
    """Run the Snakemake rule with the subcommand's name, and print only the rule's answer.

    Args:
        args: Parsed arguments.
        snakemake_arguments: Further arguments for Snakemake.
        config: Further pairs KEY=VALUE for the config.
    """
    quiet = ("--cores", "1", "--quiet", "all")
    return exec_snakemake(
        args.command,
        *quiet,
        *snakemake_arguments,
        config=[*list_config_pairs(args), *config],
        program=QUIET,
    )


def print_rule_answer_with_torch(
    args: argparse.Namespace, snakemake_arguments: list[str]
) -> ExitCode:
    """Run the Snakemake rule with the subcommand's name, after checking that PyTorch is installed."""
    check_packages_installed("torch")
    return print_rule_answer(args, snakemake_arguments)


def list_config_pairs(args: argparse.Namespace) -> list[str]:
    """Return the config changes that a subcommand's arguments request, each as KEY=VALUE.

    Raises:
        CommandError: A change has a mistake, on which Snakemake would end with a traceback.
    """
    for pair in args.config:
        parse_config_change(pair)
    return [*([f"study={args.study}"] if args.study else []), *args.config]


def parse_config_change(pair: str) -> tuple[str, Any]:
    """Return the key and the value of a config change KEY=VALUE, whose value is YAML.

    Raises:
        CommandError: The text is no such change, or config.yaml has no such key.
    """
    import yaml

    from stratbench.study.config.messages import suggest_closest_name
    from stratbench.study.config.schema import build_config_schema

    key, equals, value_text = pair.partition("=")
    where = f"--config {pair}"
    outer, *inner = key.split(".")
    if not equals or not key.isidentifier():
        example = "decide={gpus: 2}"
        if equals and inner and all(name.isidentifier() for name in (outer, *inner)):
            example = (
                f"{outer}={': '.join('{' + name for name in inner)}: {value_text}{'}' * len(inner)}"
            )
        raise CommandError(f"{where}: is not KEY=VALUE; write it as in --config '{example}'")
    allowed = build_config_schema()["properties"]
    if key not in allowed:
        raise CommandError(
            f"{where}: config.yaml has no key {key!r}.{suggest_closest_name(key, allowed)} "
            f"Allowed: {', '.join(allowed)}."
        )
    try:
        return key, yaml.safe_load(value_text)
    except yaml.YAMLError as error:
        raise CommandError(
            f"{where}: the value {value_text} is not YAML; put the pair in quotes and close its brackets, "
            "as in --config 'decide={gpus: 2}'"
        ) from error


def check_no_unknown_arguments(unknown_arguments: Sequence[str]) -> None:
    """Raise CommandError if a command line has unknown arguments."""
    if unknown_arguments:
        arguments = " ".join(unknown_arguments)
        raise CommandError(f"unknown arguments: {arguments}; see stratbench --help")


def apply_config_changes(config: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Return a changed copy of a config. Changes are KEY=VALUE, and merge mappings as `--config` does."""
    result = json.loads(json.dumps(config))
    for pair in changes:
        key, value = parse_config_change(pair)
        merge_into_config(result, {key: value})
    return result


def merge_into_config(config: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Merge changes into a config in place. Mappings are merged key by key."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            merge_into_config(config[key], value)
        else:
            config[key] = value

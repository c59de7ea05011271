"""Adds the command `stratbench tune`, which finds the fastest configuration of a model."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path

from stratbench.extensions.tune.paths import TUNING_CONFIG_PATH


def add_subcommand(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `tune` and its arguments to the command line.

    Args:
        add: Adds a subcommand with a name, a function and a help text, and returns the subcommand's parser.
    """
    tune = add(
        "tune", run_tune, "find the fastest configuration of one model, for your own trainer"
    )
    tune.add_argument(
        "--profile",
        default="local",
        help="Snakemake profile: local (default), slurm, or the folder of a profile of your own",
    )
    tune.add_argument(
        "--sieve-only",
        action="store_true",
        help="print the combinations that are worth measuring, and do not measure them",
    )


def run_tune(args: argparse.Namespace, others: list[str]) -> int:
    """Filter the combinations by their plan, then measure the remaining ones in a verdict's blocks.

    Returns:
        The exit code.
    """
    from stratbench.command.in_folder import (
        QUIET,
        build_snakemake_command,
        check_packages_installed,
        find_profile_folder,
    )
    from stratbench.command.subcommands import list_config_pairs

    check_packages_installed("torch")
    profile = find_profile_folder(args.profile)
    filter_command = build_snakemake_command(
        "tune", "-c1", "--quiet", "all", config=list_config_pairs(args), program=QUIET
    )
    code = subprocess.run(filter_command, check=False).returncode
    if code or args.sieve_only:
        return code
    tuned = get_tuned_config_path(args.study)
    own = [pair for pair in list_config_pairs(args) if not pair.startswith("study=")]
    arguments = (
        "verdict",
        "--profile",
        profile,
        *others,
        "--configfile",
        "config.yaml",
        str(tuned),
    )
    verdict_command = build_snakemake_command(*arguments, config=["verdict={rounds: all}", *own])
    while not code:
        measured = tuned.read_bytes()
        code = subprocess.run(verdict_command, check=False).returncode
        if code:
            break
        # The filters run again: if a combination ran out of memory in a block, others are kept in its place.
        code = subprocess.run(filter_command, check=False).returncode
        if tuned.read_bytes() == measured:
            break
    return code


def get_tuned_config_path(study: str | None) -> Path:
    """Return the path of the config that the rule `tune` writes for a study.

    Args:
        study: Name of the study; None for the study that config.yaml selects.
    """
    import yaml

    config = yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8"))
    return Path(config.get("results", "results"), study or config["study"], *TUNING_CONFIG_PATH)

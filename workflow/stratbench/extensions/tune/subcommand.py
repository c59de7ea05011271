"""`stratbench tune` finds the fastest configuration of a model: the plan filters, blocks measure."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path

from stratbench.extensions.tune.paths import TUNED


def add_subcommand(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `tune` and its arguments to the command line.

    Args:
        add: Adds a subcommand with a name, a function and a help text, and returns the subcommand's parser.
    """
    tune = add(
        "tune", run_tune, "find the fastest configuration of a network, for your own trainer"
    )
    tune.add_argument(
        "--profile",
        default="local",
        help="Snakemake profile: local (default), slurm, or a profile's folder",
    )
    tune.add_argument(
        "--sieve-only",
        action="store_true",
        help="print which combinations are worth measuring, without measuring them",
    )


def run_tune(args: argparse.Namespace, others: list[str]) -> int:
    """Filter the combinations by their plan, then measure the remaining ones by a verdict.

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
        # If a combination ran out of memory in a block, one that was dropped for it may be measured now.
        code = subprocess.run(filter_command, check=False).returncode
        if tuned.read_bytes() == measured:
            break
    return code


def get_tuned_config_path(study: str | None) -> Path:
    """Return the path of the config that the rule `tune` wrote for a study.

    Args:
        study: Name of the study; None for the one that config.yaml names.
    """
    import yaml

    config = yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8"))
    return Path(config.get("results", "results"), study or config["study"], *TUNED)

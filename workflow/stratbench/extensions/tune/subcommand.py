"""`stratbench tune`: the fastest configuration of a model, filtered by plan, measured by blocks."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from pathlib import Path

from stratbench.extensions.tune.paths import TUNED


def add_subcommand(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `tune` and its arguments; `add`: takes a name, a function and a help text."""
    tune = add("tune", run_tune, "the fastest configuration of a network, for your own trainer")
    tune.add_argument("--profile", default="local", help="local (default), slurm, or a folder")
    tune.add_argument(
        "--sieve-only", action="store_true", help="say what is worth measuring, and measure nothing"
    )


def run_tune(args: argparse.Namespace, others: list[str]) -> int:
    """Sieve the combinations, then measure what is left by the rounds of a verdict.

    Return the exit code.
    """
    from stratbench.command.in_folder import QUIET, command_line, profile_folder, require
    from stratbench.command.subcommands import pairs

    require("torch")
    profile = profile_folder(args.profile)
    sieve = command_line("tune", "-c1", "--quiet", "all", config=pairs(args), program=QUIET)
    code = subprocess.run(sieve, check=False).returncode
    if code or args.sieve_only:
        return code
    tuned = tuned_file(args.study)
    own = [pair for pair in pairs(args) if not pair.startswith("study=")]
    arguments = (
        "verdict",
        "--profile",
        profile,
        *others,
        "--configfile",
        "config.yaml",
        str(tuned),
    )
    rounds = command_line(*arguments, config=["verdict={rounds: all}", *own])
    while not code:
        measured = tuned.read_bytes()
        code = subprocess.run(rounds, check=False).returncode
        if code:
            break
        # What ran out of memory in a block may leave its place to others.
        code = subprocess.run(sieve, check=False).returncode
        if tuned.read_bytes() == measured:
            break
    return code


def tuned_file(study: str | None) -> Path:
    """Return the config that the rule `tune` wrote for a study of config.yaml.

    None: the config's own.
    """
    import yaml

    config = yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8"))
    return Path(config.get("results", "results"), study or config["study"], *TUNED)

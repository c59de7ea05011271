"""Runs the workflow's rules on the study in the current folder, with Snakemake."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from stratbench.cell.installation import ROOT, SNAKEFILE
from stratbench.command import CommandError, ExitCode

#: Arguments of `pip install` for optional packages that some rules need.
NEEDED = {"snakemake": "snakemake", "torch": "torch torchvision"}
#: The module that runs Snakemake and, even with `--quiet`, reports errors before the first rule.
QUIET = "stratbench.command.quietly"


def check_packages_installed(*modules: str) -> None:
    """Raise CommandError with installation instructions if any of the modules is not installed."""
    for module in modules:
        if is_module_missing(module):
            raise CommandError(
                f"needs the package {module}: pip install {NEEDED.get(module, module)}"
            )


def is_module_missing(name: str) -> bool:
    """Return whether a module is not installed, without importing the module."""
    try:
        return find_spec(name) is None
    except ImportError:  # `find_spec` imports parent packages, which may fail
        return True


def exec_snakemake(
    *arguments: str, config: Sequence[str] = (), program: str = "snakemake"
) -> ExitCode:
    """Replace this process by Snakemake in the current folder.

    Args:
        arguments: Arguments of Snakemake.
        config: Pairs KEY=VALUE for Snakemake's `--config`.
        program: The module that runs Snakemake: `snakemake` or QUIET.

    Raises:
        CommandError: The current folder has no study, or Snakemake is not installed.
    """
    command = build_snakemake_command(*arguments, config=config, program=program)
    sys.stdout.flush()
    os.execv(sys.executable, command)


def build_snakemake_command(
    *arguments: str, config: Sequence[str] = (), program: str = "snakemake"
) -> list[str]:
    """Return the Snakemake command for the study in the current folder.

    The folder's own Snakefile is used, if there is one. The parameters are those of `exec_snakemake`.

    Raises:
        CommandError: The current folder has no study, or Snakemake is not installed.
    """
    if not Path("config.yaml").is_file():
        raise CommandError(
            "no config.yaml is in this folder: change to the folder of a study, name a result set, or create "
            "a study with `stratbench init FOLDER`"
        )
    check_packages_installed("snakemake")
    snakefile = "Snakefile" if Path("Snakefile").is_file() else str(SNAKEFILE)
    command = [sys.executable, "-P", "-m", program, "--snakefile", snakefile, *arguments]
    return command + (["--config", *config] if config else [])


def find_profile_folder(name: str) -> str:
    """Return the folder of a Snakemake profile: a path, `profiles/<name>` here, or a built-in profile."""
    for folder in (Path(name), Path("profiles", name), ROOT / "profiles" / name):
        if (folder / "config.yaml").is_file():
            return str(folder)
    raise CommandError(
        f"--profile {name}: is not a profile; give local, slurm, or a folder with a config.yaml"
    )

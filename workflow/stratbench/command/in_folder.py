"""Runs the workflow's rules on the study in this folder, by Snakemake, as in a clone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from stratbench.cell.installation import ROOT, SNAKEFILE
from stratbench.command import CommandError

#: Packages that rules need besides those of the analysis, and how to install them.
NEEDED = {"snakemake": "snakemake", "torch": "torch torchvision"}
#: Snakemake that reports why no rule could begin, even with `--quiet`.
QUIET = "stratbench.command.quietly"


def require(*modules: str) -> None:
    """Raise CommandError with installation instructions if a package is missing."""
    for module in modules:
        if is_module_missing(module):
            raise CommandError(
                f"needs the package {module}: pip install {NEEDED.get(module, module)}"
            )


def is_module_missing(name: str) -> bool:
    """Return whether a module is missing, without importing it."""
    try:
        return find_spec(name) is None
    except ImportError:  # something blocks its import
        return True


def run_rules(*arguments: str, config: Sequence[str] = (), program: str = "snakemake") -> int:
    """Replaces this process by Snakemake, in this folder; `config`: pairs KEY=VALUE.

    `program`: the module that is Snakemake, or QUIET. CommandError if there is no study here.
    """
    command = command_line(*arguments, config=config, program=program)
    sys.stdout.flush()
    os.execv(sys.executable, command)


def command_line(
    *arguments: str, config: Sequence[str] = (), program: str = "snakemake"
) -> list[str]:
    """Return the Snakemake command for this folder, with the folder's own Snakefile if it has one.

    The parameters are those of `run_rules`.

    Raises:
        CommandError: No study is here, or Snakemake is missing.
    """
    if not Path("config.yaml").is_file():
        raise CommandError(
            "no config.yaml is in this folder: change to a study's folder, name a result set, or lay "
            "down a study with `stratbench init FOLDER`"
        )
    require("snakemake")
    snakefile = "Snakefile" if Path("Snakefile").is_file() else str(SNAKEFILE)
    command = [sys.executable, "-P", "-m", program, "--snakefile", snakefile, *arguments]
    return command + (["--config", *config] if config else [])


def profile_folder(name: str) -> str:
    """Return the folder of a profile: a path, `profiles/<name>` in this folder, or a built-in one."""
    for folder in (Path(name), Path("profiles", name), ROOT / "profiles" / name):
        if (folder / "config.yaml").is_file():
            return str(folder)
    raise CommandError(f"{name} is no profile: give local, slurm, or a folder with a config.yaml")

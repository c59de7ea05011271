"""Runs the workflow's rules on the study of this folder, by Snakemake, as from a clone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from stratbench.cell.places import ROOT, SNAKEFILE
from stratbench.command import CommandError

#: What rules need beside the packages of the analysis, and how it is installed.
NEEDED = {"snakemake": "snakemake", "torch": "torch torchvision"}
#: Snakemake that tells why no rule could begin, whatever `--quiet` says.
QUIET = "stratbench.command.quietly"


def require(*modules: str) -> None:
    """CommandError where a package is missing: before anything starts, and with what brings it."""
    for module in modules:
        if module_is_missing(module):
            raise CommandError(
                f"needs the package {module}: pip install {NEEDED.get(module, module)}"
            )


def module_is_missing(name: str) -> bool:
    """Whether a module cannot be found, without importing it."""
    try:
        return find_spec(name) is None
    except ImportError:  # it was put out of reach
        return True


def run_rules(*arguments: str, config: Sequence[str] = (), program: str = "snakemake") -> int:
    """Take this process' place by Snakemake, in this folder; `config`: pairs KEY=VALUE.

    `program`: the module that is Snakemake, or QUIET. The folder's own Snakefile counts, where there is one.
    CommandError where no study is here.
    """
    if not Path("config.yaml").is_file():
        raise CommandError(
            "no config.yaml is in this folder: change to a study's folder, name a result set, or lay "
            "down a study with `stratbench init FOLDER`"
        )
    require("snakemake")
    snakefile = "Snakefile" if Path("Snakefile").is_file() else str(SNAKEFILE)
    command = [sys.executable, "-P", "-m", program, "--snakefile", snakefile, *arguments]
    command += ["--config", *config] if config else []
    sys.stdout.flush()
    os.execv(sys.executable, command)


def profile_folder(name: str) -> str:
    """The folder of a profile: as named, or `profiles/<name>` of this folder, or that of stratbench."""
    for folder in (Path(name), Path("profiles", name), ROOT / "profiles" / name):
        if (folder / "config.yaml").is_file():
            return str(folder)
    raise CommandError(f"{name} is no profile: give local, slurm, or a folder with a config.yaml")

"""Sets environment variables of jobs: paths of the package, this Python, SLURM and data files."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.workload.data.own_data import PLACES_VARIABLE, format_data_paths_for_jobs
from stratbench.workload.users_code import CODE_VARIABLE


def add_cache_command(settings: Any, cache: Path) -> None:
    """Make jobs use the folder `cache` as XDG_CACHE_HOME on nodes without a writable home.

    Snakemake does not start without a folder for its cache. A user's own XDG_CACHE_HOME is kept.

    Args:
        settings: Snakemake's settings of remote jobs, with the profile's `precommand`, or None if jobs run
            on this machine.
        cache: Folder for Snakemake's cache.
    """
    if settings is None or "XDG_CACHE_HOME" in os.environ:
        return
    home, folder = (shlex.quote(str(p)) for p in (Path("~").expanduser(), cache.resolve()))
    command = f"{{ [ -w {home} ] || export XDG_CACHE_HOME={folder}; }}"
    precommand = settings.precommand
    # Snakemake may read the rules twice, but the command is added once.
    if precommand is None or not precommand.endswith(command):
        settings.precommand = " && ".join(filter(None, [precommand, command]))


def set_job_environment(config: Mapping[str, Any], package_root: str) -> None:
    """Set environment variables that jobs and this process need but that do not affect results.

    Jobs find the package in `package_root` and this interpreter, even if a rule activates a conda
    environment. They find data files in the folder that the config names. If that folder were a rule's
    parameter, Snakemake would train everything again when the folder moves.
    """
    os.environ["STRATBENCH_PACKAGE"] = package_root
    firsts = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": package_root}
    for variable, first in firsts.items():
        rest = [p for p in os.environ.get(variable, "").split(os.pathsep) if p and p != first]
        os.environ[variable] = os.pathsep.join([first, *rest])
    # A login shell may have set two variables that break jobs: the plot backend of notebooks, and
    # PYTHONOPTIMIZE, which drops the docstrings that explain the audit's rules.
    os.environ["MPLBACKEND"] = "agg"
    os.environ.pop("PYTHONOPTIMIZE", None)
    # Snakemake's SLURM plugin removes every SLURM_* variable from its jobs, but srun finds its cluster by
    # SLURM_CONF.
    if "SLURM_CONF" in os.environ:
        os.environ["STRATBENCH_SLURM_CONF"] = os.environ["SLURM_CONF"]
    folders = [str(Path(folder).expanduser().resolve()) for folder in config["code"]]
    os.environ[CODE_VARIABLE] = os.pathsep.join(folders)
    os.environ[PLACES_VARIABLE] = format_data_paths_for_jobs(config.get("datasets", {}))
    data = config["data"]
    if data["root"]:
        os.environ["STRATBENCH_DATA"] = str(Path(data["root"]).expanduser().resolve())
    if not data["download"]:
        os.environ["STRATBENCH_NO_DOWNLOAD"] = "1"

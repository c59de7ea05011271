"""Environment variables of jobs: paths of the package, this Python, SLURM and data files."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.workload.data.own_data import PLACES_VARIABLE, places_for_jobs
from stratbench.workload.users_code import CODE_VARIABLE


def add_cache_command(settings: Any, cache: Path) -> None:
    """Have each job use the folder `cache` if its node has no HOME.

    Snakemake does not start without one. `settings` are Snakemake's on remote jobs, with the profile's
    `precommand`, or None if it runs none. A user's XDG_CACHE_HOME stays.
    """
    if settings is None or "XDG_CACHE_HOME" in os.environ:
        return
    home, folder = (shlex.quote(str(p)) for p in (Path("~").expanduser(), cache.resolve()))
    command = f"{{ [ -w {home} ] || export XDG_CACHE_HOME={folder}; }}"
    precommand = settings.precommand
    if precommand is None or not precommand.endswith(command):  # as a module's rules are read again
        settings.precommand = " && ".join(filter(None, [precommand, command]))


def set_job_environment(config: Mapping[str, Any], package_root: str) -> None:
    """Set variables that this process and its jobs need and that do not affect results.

    Jobs find the package in `package_root` and this interpreter, even if a rule activates a conda
    environment. They find data files in the folder that the config names: were it a rule's parameter,
    Snakemake would make everything again when the folder moves.
    """
    os.environ["STRATBENCH_PACKAGE"] = package_root
    firsts = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": package_root}
    for variable, first in firsts.items():
        rest = [p for p in os.environ.get(variable, "").split(os.pathsep) if p and p != first]
        os.environ[variable] = os.pathsep.join([first, *rest])
    # A login shell may hold variables that no job can use: a notebook's backend, and Python's option that
    # drops docstrings, which explain the audit's rules.
    os.environ["MPLBACKEND"] = "agg"
    os.environ.pop("PYTHONOPTIMIZE", None)
    # SLURM's plugin removes every SLURM_* variable from its jobs; srun finds its cluster by this one.
    if "SLURM_CONF" in os.environ:
        os.environ["STRATBENCH_SLURM_CONF"] = os.environ["SLURM_CONF"]
    folders = [str(Path(folder).expanduser().resolve()) for folder in config["code"]]
    os.environ[CODE_VARIABLE] = os.pathsep.join(folders)
    os.environ[PLACES_VARIABLE] = places_for_jobs(config.get("datasets", {}))
    data = config["data"]
    if data["root"]:
        os.environ["STRATBENCH_DATA"] = str(Path(data["root"]).expanduser().resolve())
    if not data["download"]:
        os.environ["STRATBENCH_NO_DOWNLOAD"] = "1"

"""The environment variables of jobs: where they find the package, this Python, SLURM and data files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.workload.own import CODE_VARIABLE
from stratbench.workload.own_data import PLACES_VARIABLE, places_for_jobs


def set_job_environment(config: Mapping[str, Any], package_root: str) -> None:
    """Give this process and its jobs what they need that is not part of a result.

    The package and this interpreter are found whichever way Snakemake was started (a conda environment
    that a rule activates comes before it), and data files where the config says: as a rule's parameter
    their folder would make everything again when it moves.
    """
    for variable, first in (
        ("PYTHONPATH", package_root),
        ("PATH", str(Path(sys.executable).parent)),
    ):
        rest = [p for p in os.environ.get(variable, "").split(os.pathsep) if p and p != first]
        os.environ[variable] = os.pathsep.join([first, *rest])
    os.environ["STRATBENCH_PACKAGE"] = package_root
    # SLURM's plugin takes every SLURM_* variable from its jobs; with this one srun finds its cluster.
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

"""The environment variables of jobs: where they find the package, this Python, SLURM and data files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.study.messages import ConfigError
from stratbench.workload.own import CODE_VARIABLE
from stratbench.workload.own_data import PLACES_VARIABLE, places_for_jobs


def image_of_jobs(config: Mapping[str, Any], asked: bool) -> str | None:
    """The image that rules run in; None where the config names none.

    `asked`: whether Snakemake is to use it. Then a missing one is a ConfigError.
    """
    image = config["container"]
    if asked and image is None:
        raise ConfigError(
            "config: container = null: --sdm apptainer needs an image: a file that envs/apptainer.def makes, "
            "or a place such as docker://HOST/NAME:TAG"
        )
    if image is None:
        return None
    if bad := re.search(r"[^\w./:@+~-]", image, re.ASCII):
        raise ConfigError(
            f"config: container = {image!r}: holds {bad[0]!r}, which Snakemake cannot take here; rename it"
        )
    if "://" in image:
        return image
    path = Path(image).expanduser()
    if asked and not path.exists():
        raise ConfigError(
            f"config: container = {image!r}: there is no such file; build it by envs/apptainer.def"
        )
    return str(path)


def set_job_environment(config: Mapping[str, Any], package_root: str | None) -> None:
    """Give this process and its jobs what they need that is not part of a result.

    The package and this interpreter are found whichever way Snakemake was started (a conda environment
    that a rule activates comes before it), and data files where the config says: as a rule's parameter
    their folder would make everything again when it moves. `package_root`: None where jobs find the
    package by themselves.
    """
    firsts = {"PATH": str(Path(sys.executable).parent)}
    if package_root is not None:
        firsts["PYTHONPATH"] = os.environ["STRATBENCH_PACKAGE"] = package_root
    for variable, first in firsts.items():
        rest = [p for p in os.environ.get(variable, "").split(os.pathsep) if p and p != first]
        os.environ[variable] = os.pathsep.join([first, *rest])
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

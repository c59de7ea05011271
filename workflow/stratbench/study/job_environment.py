"""The environment variables of jobs: where they find the package, this Python, SLURM and data files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.study.config.messages import ConfigError
from stratbench.workload.data.own_data import PLACES_VARIABLE, places_for_jobs
from stratbench.workload.users_code import CODE_VARIABLE


def image_of_jobs(config: Mapping[str, Any], asked: bool) -> str | None:
    """The image that rules run in; None if the config names none.

    `asked`: whether Snakemake is to use it. Then a missing image is a ConfigError.
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
    """Sets variables that this process and its jobs need, but that are no part of a result.

    The package and this interpreter are found however Snakemake was started (a conda environment that
    a rule activates comes first). Data files are found in the folder that the config names: as a rule's
    parameter, that folder would cause everything to be made again when it moves. `package_root`: None if
    jobs find the package by themselves.
    """
    firsts = {"PATH": str(Path(sys.executable).parent)}
    if package_root is not None:
        firsts["PYTHONPATH"] = os.environ["STRATBENCH_PACKAGE"] = package_root
    for variable, first in firsts.items():
        rest = [p for p in os.environ.get(variable, "").split(os.pathsep) if p and p != first]
        os.environ[variable] = os.pathsep.join([first, *rest])
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

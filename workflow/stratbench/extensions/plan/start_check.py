"""Checks the user's models before the first cell is submitted.

A model that no strategy can train fails in every cell, and on a cluster each of these jobs waits in the
queue first. The check runs in a separate process, since PyTorch would stay in Snakemake's memory.

`python -m stratbench.extensions.plan.start_check < JSON` writes faults to stdout as JSON, and progress to
stderr.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.text.words import wrap_lines
from stratbench.strategies import get_strategy_class
from stratbench.study.config.config import Study

#: Pattern of errors that may not occur on another machine, which has a GPU or other files.
MAY_BE_MACHINES = re.compile(r"cuda|gpu|nvidia|triton|'CPU' backend|\w*OSError|FileNotFound", re.I)


def find_network_faults(
    config: Mapping[str, Any], study: Study, cells: Iterable[Cell], on_other_machines: bool
) -> list[str]:
    """Return why a user's models and tasks cannot be trained, one sentence per fault.

    A fault that may not occur on another machine is printed instead.

    Args:
        config: The validated config.
        study: The study.
        cells: The cells to train.
        on_other_machines: Whether other machines train the models.
    """
    keys = {_make_check_key(study, cell) for cell in cells} - {None}
    by_key: dict[tuple[str, ...], Cell] = {}
    # The first cell of the study, as in `snakemake check`: what that has found out is cached.
    for cell in study.cells if keys else ():
        if (key := _make_check_key(study, cell)) and key in keys:
            by_key.setdefault(key, cell)
    if not by_key or find_spec("torch") is None:
        return []
    request = {"config": config, "cells": [cell.as_dict() for cell in by_key.values()]}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(
        command, input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:  # the check failed; each job checks its model again
        print(
            "your models could not be checked before the start; their jobs check them",
            file=sys.stderr,
        )
        return []
    faults = []
    for reason, on_gpus in json.loads(done.stdout).items():
        if (on_other_machines or on_gpus) and MAY_BE_MACHINES.search(reason):
            print(
                wrap_lines(
                    [
                        f"cannot be trained here, but is started, since other machines may differ: {reason}"
                    ]
                ),
                file=sys.stderr,
            )
        else:
            faults.append(reason)
    return faults


def _make_check_key(study: Study, cell: Cell) -> tuple[str, ...] | None:
    """Return a key that is equal for cells whose models have the same check.

    Return None if there is nothing to check.
    """
    settings = study.settings(cell)
    own = settings.own_model or settings.own_task
    by_command = get_strategy_class(settings.strategy).kind == "own"
    # The metadata of a user's data set are unknown until a job has prepared it.
    if not own or by_command or not study.get_dataset(cell.dataset).has_known_metadata:
        return None
    return cell.experiment, cell.model


def main() -> int:
    """Check the models of the cells that stdin lists as JSON.

    Print the faults, and whether their cells train on GPUs.
    """
    # Imported here, since Snakemake imports this module often, and the check takes long to import.
    from stratbench.extensions.plan.check import Network, check_neural_networks
    from stratbench.extensions.plan.needs import make_cell_to_plan

    content = json.load(sys.stdin)
    config = content["config"]
    study = Study(config, config["study"])
    with redirect_stdout(sys.stderr):
        subjects = [make_cell_to_plan(config, study, Cell(**cell)) for cell in content["cells"]]
        requests = {s.request: s.settings.device != "cpu" for s in subjects}
        networks = check_neural_networks(requests, Path(config["results"]) / "plan-cache")
    faults = {
        networks[Network.from_request(request)].fault: on_gpus
        for request, on_gpus in requests.items()
    }
    print(json.dumps({fault: on_gpus for fault, on_gpus in faults.items() if fault is not None}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

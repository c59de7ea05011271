"""The order of training of a study's cells: repeat after repeat, shuffled within.

If a machine changes during a study, by heat or by its neighbours, all strategies then change equally.
"""

from __future__ import annotations

import hashlib
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.study.snakemake_internals import start_sorted

#: Repeats of a study at most, places of comparisons in a repeat, and places in a comparison; of a size that
#: the arithmetic of a solver holds (Snakemake without `scheduler: greedy`).
REPEATS, COMPARISONS, PLACES = 1000, 1000, 1000


def priority(cell: Cell) -> int:
    """Return Snakemake's priority of a cell's job, above 0; the highest is trained first.

    An earlier repeat comes first. Within a repeat, the compared cells (of one experiment and model) follow
    one another. Their order, and that of the comparisons, differs between repeats. It depends on the cell's
    names alone: it is always the same, also for a cell that is added later.
    """
    comparison = drawn(COMPARISONS, cell.study, cell.experiment, cell.model, cell.repeat)
    number = drawn(PLACES, cell.study, cell.path)
    return (max(0, REPEATS - cell.repeat) * COMPARISONS + comparison) * PLACES + number + 1


def drawn(below: int, *names: str | int) -> int:
    """Return a pseudo-random integer from 0 to `below` - 1 that depends on `names` alone."""
    digest = hashlib.sha256("\n".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % below


def start_by_priority(workflow: Any) -> None:
    """Makes Snakemake start jobs that it has chosen together in the order of their priorities.

    It chooses by priority and starts what it has chosen in any order, which on SLURM is that of the queue.
    `workflow` is Snakemake's, about to start its first job.
    """
    start_sorted(workflow, key=lambda job: -job.priority)

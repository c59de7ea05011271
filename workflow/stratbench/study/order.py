"""The order in which a study's cells are trained: repeat after repeat, shuffled within each repeat.

If a machine becomes slower during a study, by heat or other jobs, this affects all strategies equally.
"""

from __future__ import annotations

import hashlib

from stratbench.cell.coordinates import Cell

#: A priority combines three numbers: repeat, comparison and cell. These are their upper limits. Larger ones
#: would overflow the integers of the solver that Snakemake uses without `scheduler: greedy`.
REPEATS, COMPARISONS, PLACES = 1000, 1000, 1000


def compute_job_priority(cell: Cell) -> int:
    """Return Snakemake's priority of a cell's job, above 0; the highest priority is trained first.

    An earlier repeat comes first. Within a repeat, the cells that are compared (those of one experiment and
    model) follow one another. The order of these cells, and of the comparisons, differs between repeats. It
    depends on the cell's names alone, so it does not change when a cell is added.
    """
    comparison = hash_names_to_integer(
        COMPARISONS, cell.study, cell.experiment, cell.model, cell.repeat
    )
    number = hash_names_to_integer(PLACES, cell.study, cell.path)
    return (max(0, REPEATS - cell.repeat) * COMPARISONS + comparison) * PLACES + number + 1


def hash_names_to_integer(upper_limit: int, *names: str | int) -> int:
    """Return a pseudo-random integer below `upper_limit` that depends on `names` alone."""
    digest = hashlib.sha256("\n".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % upper_limit

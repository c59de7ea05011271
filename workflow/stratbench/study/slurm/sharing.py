"""Lets small cells share a SLURM job, one after the other, so that its start-up is paid once.

Snakemake goes on to see one job a cell: each succeeds, fails, is tried again and resumed by itself. Only the
executor of its SLURM plugin submits several together, and tells afterwards what became of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from stratbench.cell.coordinates import Cell
from stratbench.study.resources import JobRequest
from stratbench.study.slurm import nodes

Item = TypeVar("Item")
#: Set in a job that cells share.
VARIABLE = "STRATBENCH_SHARED_JOB"


def divide(
    items: Iterable[Item],
    kind: Callable[[Item], Hashable],
    minutes: Callable[[Item], int],
    most: int,
    longest_min: Callable[[Item], int | None],
) -> list[list[Item]]:
    """Items that share a job: `most` of one kind, in the order given, whose minutes the job's limit can hold.

    `longest_min`: the longest job that takes the item; None: of any length.
    """
    shares: list[list[Item]] = []
    open_: dict[Hashable, tuple[list[Item], int]] = {}
    for item in items:
        share, taken = open_.get(kind(item), ([], 0))
        longest = longest_min(item)
        full = len(share) >= most or (longest is not None and taken + minutes(item) > longest)
        if not share or full:
            share, taken = [], 0
            shares.append(share)
        share.append(item)
        open_[kind(item)] = share, taken + minutes(item)
    return shares


def longest_job_min(offered: Sequence[nodes.Node], partition: str | None) -> int | None:
    """The longest time limit of a partition's nodes, in minutes; None if there is none, or none is known."""
    limits = [node.limit_min for node in nodes.nodes_of_partition(offered, partition)]
    return None if not limits or None in limits else max(limits)


def count_jobs(
    asked: Mapping[Cell, JobRequest],
    cells_per_job: int,
    offered: Sequence[nodes.Node],
    partition: str | None,
) -> int:
    """The number of SLURM jobs that these cells make. `offered` and `partition`: of `longest_job_min`."""
    small = {cell: r for cell, r in asked.items() if r.nodes == 1 and not r.workers}
    longest = longest_job_min(offered, partition)
    shares = divide(
        small.items(),
        lambda item: (item[0].repeat, item[1].gpus, item[1].cpus),
        lambda item: item[1].runtime_min,
        cells_per_job,
        lambda item: longest,
    )
    return len(shares) + len(asked) - len(small)


def is_shared_job() -> bool:
    """Whether this process is the Snakemake of a job that cells share."""
    return VARIABLE in os.environ

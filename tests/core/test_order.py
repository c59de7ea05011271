"""The order in which cells are trained."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from types import SimpleNamespace

from stratbench.cell.coordinates import Cell, expand_cells
from stratbench.study.order import compute_job_priority
from stratbench.study.snakemake_internals import start_jobs_by_priority

STRATEGIES = [("single", 1), ("ddp", None), ("fsdp", None), ("ps-async", None)]


def in_order(repeats: int = 10) -> list[Cell]:
    """A study's cells in the order in which they are trained."""
    cells = [
        cell
        for experiment in ("cifar10", "mnist")
        for cell in expand_cells(
            "s", experiment, experiment, STRATEGIES, ["vgg16", "resnet50"], [1, 2, 4], repeats
        )
    ]
    return sorted(cells, key=compute_job_priority, reverse=True)


def test_every_cell_of_a_repeat_is_trained_before_the_next_repeat():
    cells = in_order()
    assert [cell.repeat for cell in cells] == sorted(cell.repeat for cell in cells)
    assert all(0 < compute_job_priority(cell) < 2**31 for cell in cells)


def test_cells_that_are_compared_follow_one_another_and_each_repeat_shuffles_anew():
    orders, firsts = set(), Counter()
    for _, cells in groupby(in_order(), key=lambda cell: cell.repeat):
        held = list(cells)
        blocks = [key for key, _ in groupby(held, key=lambda c: (c.experiment, c.model))]
        assert len(blocks) == 4
        orders.add(tuple((c.experiment, c.model, c.strategy, c.gpus) for c in held))
        firsts[held[0].strategy] += 1
    assert len(orders) == 10
    assert max(firsts.values()) < 10


def test_the_place_of_a_cell_depends_on_no_other_cell():
    few, all_of_them = in_order(2), in_order(10)
    assert [cell for cell in all_of_them if cell.repeat < 2] == few
    assert compute_job_priority(Cell("s", "e", "ddp", "m", "d", 2, 5000)) > 0


def test_jobs_that_snakemake_chose_together_start_by_priority():
    started: list[int] = []
    scheduler = SimpleNamespace(
        run=lambda jobs, executor=None: started.extend(job.priority for job in jobs)
    )
    start_jobs_by_priority(SimpleNamespace(scheduler=scheduler))
    scheduler.run([SimpleNamespace(priority=n) for n in (0, 7, 3)], executor=None)
    assert started == [7, 3, 0]

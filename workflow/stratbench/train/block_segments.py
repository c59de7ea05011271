"""The segments of a block: what is run in a block in which order, and the time of their steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from stratbench.cell.block_rules import disagreement_limit
from stratbench.cell.blocks import BURN_IN, FIRST, MIRROR, THIRD, BlockPlan, Segment
from stratbench.train.job import Job

#: Steps after those that are timed, of a strategy with servers: until the last timed push has come, no
#: worker may run out of tickets.
TAIL_STEPS = 3


def run_in_order(
    plan: BlockPlan, run: Callable[[str, str], Segment], burnt_in: Callable[[Segment], None]
) -> list[Segment]:
    """Run a block's segments by `run(pass, strategy)`, and return them in their order.

    A burn-in first, by the first strategy that ends one well; `burnt_in` is told of it. Then every
    strategy in the plan's order, in its mirror, and a third time where its two disagree. One that
    ends in another way drops out of what is left.
    """
    done: list[Segment] = []
    dropped: set[str] = set()

    def one(in_pass: str, strategy: str) -> Segment:
        done.append(segment := run(in_pass, strategy))
        if segment.status != "ok":
            dropped.add(strategy)
        return segment

    for strategy in plan.order:
        if (segment := one(BURN_IN, strategy)).status == "ok":
            burnt_in(segment)
            break
    for in_pass, order in ((FIRST, plan.order), (MIRROR, plan.order[::-1])):
        for strategy in order:
            if strategy not in dropped:
                one(in_pass, strategy)
    differences = differences_of(done)
    for strategy in plan.order:
        if differences.get(strategy, 0.0) > limit(plan, differences.values()):
            one(THIRD, strategy)
    return done


def differences_of(segments: Sequence[Segment]) -> dict[str, float]:
    """How far each strategy's two segments are apart: the natural logarithm of the ratio of their times.

    Of strategies whose two ended well.
    """
    times: dict[str, list[float]] = {}
    for s in segments:
        if s.in_pass in (FIRST, MIRROR) and s.mean_step_s is not None:
            times.setdefault(s.strategy, []).append(s.mean_step_s)
    return {name: abs(math.log(t[0] / t[1])) for name, t in times.items() if len(t) == 2}


def limit(plan: BlockPlan, differences: Iterable[float]) -> float:
    """From which difference of a strategy's two segments on it runs a third one in this block."""
    if plan.disagreement is not None:
        return plan.disagreement
    return disagreement_limit(list(differences))


def timed_steps(job: Job, discarded: int, timed: int) -> dict[str, Any]:
    """The record's `steps`: the time of each of the `timed` steps after `discarded` ones.

    Of a collective, as its slowest worker saw them. With servers, a step is as many pushes as a global
    batch has, and ends when the slowest server has taken them: no worker's own step says how fast
    all are together.
    """
    if job.has_servers:
        ends = [s["step_ends_s"] for s in job.folder.read_servers(job.n_servers)]
        by_process = [
            [after - before for before, after in pairwise(e[discarded - 1 : discarded + timed])]
            for e in ends
        ]
    else:
        workers = job.folder.read_workers(job.world_size).values()
        by_process = [
            [ms / 1e3 for ms in w["step_ms"][discarded : discarded + timed]] for w in workers
        ]
    slowest = max(by_process, key=sum)
    return {
        "discarded": discarded,
        "timed": len(slowest),
        "mean_s": fmean(slowest),
        "each_ms": [1e3 * s for s in slowest],
    }

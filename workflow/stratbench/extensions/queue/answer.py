"""The answer to `decide.queue`: time to result including the queue, by mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratbench.cell.text.words import counted, hours_text
from stratbench.extensions.queue.break_even import (
    ASYNCHRONOUS,
    GANG,
    MODES,
    SYNCHRONOUS,
    WORTHS,
    QueuedTraining,
    Times,
    TrainingQueue,
    at_worth,
    paired_times,
    poisson_queue,
    recorded_queue,
)
from stratbench.extensions.queue.history import AccountingHistory, WidthRow, read_history
from stratbench.extensions.queue.request import NODES, QueueRequest
from stratbench.extensions.queue.simulator import ALL, Arrival, Cluster, Rules
from stratbench.statistics.intervals import IntervalEstimate

#: Beyond this share of the GPUs a queue grows for as long as one looks, and a mean wait is no property of it.
STEADY_LOAD = 0.9
#: Nor where this share of the GPUs would have been busy with the work that came to wait in a history: jobs
#: that do not fit together leave GPUs idle in a queue that grows.
MAX_GROWTH = 0.1
#: Streams of others' jobs, and moments in each at which the training comes.
BLOCKS, MOMENTS = 8, 4
#: Maximum factor between simulated and recorded waits.
NEAR = 2.0
#: Source of synchronous workers' state when they resume, as text.
SOURCES = {"checkpoint": "from the last checkpoint", "peer": "from one that is there"}
NOT_MODELLED = (
    "Not modelled: fair-share and other priorities than the order of submission (where job size counts, "
    "gangs go first), limits of a QOS (MaxJobs and MaxSubmit bind many jobs first), maintenance, time limits "
    "of partitions, users who react; the servers' CPU job is taken to start at once and never to fail."
)


def answer(
    request: QueueRequest,
    gpus_per_node: int,
    margin: float,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Return the answer: `headline`, `lines`, `refused`, and numbers in `modes` and `even`.

    Args:
        request: The queue and the training.
        gpus_per_node: GPUs of a node.
        margin: Fraction by which modes may differ and still count as equal; of equals the simplest is
            named.
        progress: Called with the done and total number of submission times.

    Raises:
        ValueError: With a remedy, if the history is insufficient.
    """
    history = None
    if request.history is not None:
        history = read_history(Path(request.history).expanduser(), gpus_per_node, request.partition)
    nodes = request.nodes or (NODES if history is None else _nodes_of(history, gpus_per_node))
    capacity = nodes * gpus_per_node
    if request.num_gpus > capacity:
        raise ValueError(
            f"decide.queue.num_gpus = {request.num_gpus}: the history's jobs used {capacity} GPUs at once; "
            "where the cluster has more, give nodes"
        )
    load = request.load
    if history is not None:  # what it used, and what came to wait beside that
        load = (history.mean_gpus + history.growth_gpus) / capacity
    known = [] if history is None else list(history_lines(history, nodes, gpus_per_node))
    if reason := _refusal(history, load, capacity):
        return {
            "headline": f"With the queue: no answer. {reason}",
            "lines": [*known, NOT_MODELLED],
            "refused": reason,
            "mode": None,
            "modes": [],
            "even": {},
        }
    mtbf_days = request.node_mtbf_days
    if mtbf_days is None and history is not None:
        mtbf_days = history.node_mtbf_days(nodes)
    rules = Rules(
        reserve=ALL if request.reservations == "all" else 1,
        node_mtbf_s=math.inf if mtbf_days is None else mtbf_days * 86400,
        slow_share=request.slow_nodes,
        slow_factor=request.slow_factor,
    )
    work = QueuedTraining(
        request.num_gpus,
        request.training_hours,
        request.scaling_loss_per_worker,
        request.pause_s,
        request.recovery == "peer",
        request.preemptible,
    )
    # Where others preempt it, a training takes several times as long.
    lasting_h = request.training_hours * (3 if request.preemptible else 1)
    shape = (nodes, gpus_per_node, rules)
    if history is None:
        queue = poisson_queue(*shape, load, lasting_h, BLOCKS, MOMENTS)
    else:
        arrivals = history.arrivals()
        queue = recorded_queue(*shape, arrivals, lasting_h, BLOCKS, MOMENTS, history.settled_s)
        known.append(_against_record(history, arrivals, queue))
    worths = sorted({*WORTHS, *(request.sample_efficiency or ())}, reverse=True)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, BLOCKS * MOMENTS)

    times = paired_times(queue, work, worths, tick=tick)
    report = _Told(request, times, margin)
    basis = (
        f"From {BLOCKS * MOMENTS} moments in {'made' if history is None else 'recorded'} queues of "
        f"{counted(nodes, 'node')} of {counted(gpus_per_node, 'GPU')}, load {load:.2f} (GPUs in use until "
        f"then: {times.busy:.0%}); at each moment all modes met the same queue. Intervals are of means, 95 %."
    )
    return {
        "headline": report.headline(),
        "lines": [*report.lines(), basis, *known, NOT_MODELLED],
        "refused": None,
        "mode": report.choice,
        "modes": report.rows(),
        "even": {rival: _worth(report.even(rival)) for rival in MODES[:-1]},
    }


def _nodes_of(history: AccountingHistory, gpus_per_node: int) -> int:
    """Return the minimum number of nodes that could hold its jobs."""
    widest = max(e.gpus for e in history.entries)
    return -(-max(history.most_gpus, widest) // gpus_per_node)


def _refusal(history: AccountingHistory | None, load: float, capacity: int) -> str | None:
    if history is not None and history.one_user:
        return (
            "The history has jobs of one user alone, so that the load is unknown: ask sacct with -a, or an "
            "administrator where PrivateData hides others' jobs."
        )
    if history is not None and history.growth_gpus > MAX_GROWTH * capacity:
        waits_h = history.growth_gpus * history.days * 24
        return (
            f"The history's queue is not steady: in {history.days:.1f} days the work that waits grew by "
            f"{waits_h:,.0f} GPU-hours ({history.mean_gpus:.1f} GPUs in use of {capacity}). No mean wait "
            "describes a queue that grows; give the accounting of steadier days."
        )
    if load > STEADY_LOAD:
        return (
            f"At a load of {load:.2f} the queue is not steady: it grows for as long as the load stays above "
            f"{STEADY_LOAD}, and no mean wait describes it."
        )
    return None


def _against_record(
    history: AccountingHistory, arrivals: list[Arrival], queue: TrainingQueue
) -> str:
    """Return a comparison of the simulated waits of the history's jobs with the recorded ones."""
    sim = Cluster(queue.nodes, queue.gpus_per_node, arrivals, queue.rules)
    sim.run_until(arrivals[-1].submit_s)
    simulated = [wait_s for _, wait_s in sim.waits]
    begun = [e for e in history.entries if e.start_s is not None]
    recorded = [max(0.0, e.start_s - history.came_s(e)) for e in begun]
    ours, theirs = sum(simulated) / len(simulated) / 3600, sum(recorded) / len(recorded) / 3600
    text = (
        f"The history's jobs waited {hours_text(theirs)} h on average within it; simulated, "
        f"{hours_text(ours)} h"
    )
    if max(ours, theirs) > 0.1 and not 1 / NEAR <= (ours + 1e-9) / (theirs + 1e-9) <= NEAR:
        return (
            f"{text}: the simulator does not know this queue well (its size, priorities or limits), so "
            "that the answer is a rough one."
        )
    return f"{text}."


def history_lines(history: AccountingHistory, nodes: int, gpus_per_node: int) -> list[str]:
    """Return sentences on a history alone.

    Args:
        history: The history.
        nodes: Number of nodes.
        gpus_per_node: GPUs of a node.
    """
    capacity = nodes * gpus_per_node
    lines = [
        f"History of {history.days:.1f} days: {counted(len(history.entries), 'job')} with GPUs; on average "
        f"{history.mean_gpus:.1f} GPUs in use, at most {history.most_gpus}, of {capacity}."
    ]
    if history.gpus_by_nodes:
        lines.append(
            "It counts no GPUs (AccountingStorageTRES=gres/gpu would): each node is taken for "
            f"{gpus_per_node}."
        )
    mtbf_days = history.node_mtbf_days(nodes)
    if mtbf_days is not None:
        lines.append(
            f"A node failed under a job once in {mtbf_days:.0f} days of a node (NODE_FAIL)."
        )
    return [*lines, *map(_width_line, history.by_width())]


def _width_line(row: WidthRow) -> str:
    text = (
        f"{row.label} GPUs: {counted(row.jobs, 'job')}, wait {hours_text(row.mean_s / 3600)} h on average, "
        f"median {hours_text(row.median_s / 3600)}, one in ten above {hours_text(row.p90_s / 3600)} h"
    )
    if row.used is not None:
        text += f"; {row.used:.0%} of the wall time asked for was used"
    if row.backfilled is not None:
        text += f"; {row.backfilled:.0%} started by backfill"
    return f"{text}."


class _Told:
    """The modes' times in words."""

    def __init__(self, request: QueueRequest, times: Times, margin: float) -> None:
        self.request, self.times, self.margin = request, times, margin
        self.choice = self._choice()

    def even(self, rival: str) -> IntervalEstimate:
        return self.times.break_even(rival)

    def key(self, mode: str) -> str:
        """Return the simulated mode: asynchronous workers count at the low end of sample efficiency."""
        if mode != ASYNCHRONOUS:
            return mode
        return at_worth(min(self.request.sample_efficiency or (1.0,)))

    def _choice(self) -> str:
        """Return the simplest mode that no other one beats by more than the margin.

        Asynchronous workers are considered only if their sample efficiency is surely sufficient.
        """
        allowed = MODES if self._is_worth() else MODES[:-1]
        mean = {mode: self.times.mean(self.key(mode)).value for mode in allowed}
        best = min(mean.values())
        return next(mode for mode in allowed if mean[mode] <= best * (1 + self.margin))

    def headline(self) -> str:
        mean = self.times.mean(self.key(self.choice))
        text = (
            f"With the queue: {self.choice}, {_h(mean.value)} from submission to result"
            f" ({_h(mean.low)} to {_h(mean.high)}); one in ten takes longer than "
            f"{_h(self.times.late_h(self.key(self.choice)))}."
        )
        if self.choice == GANG:
            return text
        ratio = self.times.ratio(self.key(self.choice), GANG)
        text += f" That is {_ratio(ratio)} of a gang's {_h(self.times.mean(GANG).value)}"
        doubtful = ratio.high is not None and ratio.high > 1
        return f"{text}{', which is not told apart' if doubtful else ''}."

    def lines(self) -> list[str]:
        others = []
        for mode in MODES[1:]:
            mean, ratio = self.times.mean(self.key(mode)), self.times.ratio(self.key(mode), GANG)
            others.append(f"{mode} {_h(mean.value)}, {_ratio(ratio)}")
        worth = f"at a worth of {min(self.request.sample_efficiency or (1.0,)):g}"
        texts = [
            f"Mean time, and over a gang's: gang {_h(self.times.mean(GANG).value)}; "
            f"{'; '.join(others)} ({worth}).",
            self._on_worth(),
        ]
        if self.request.preemptible:
            texts.append("Split workers are preempted by all others here; gangs are not.")
        return texts

    def _is_worth(self) -> bool | None:
        """Return whether asynchronous samples suffice against elastic synchronous ones; None if open."""
        sync, worth = self.even(SYNCHRONOUS), self.request.sample_efficiency
        if worth and sync.high is not None and worth[0] >= sync.high:
            return True
        return False if worth and sync.low is not None and worth[1] <= sync.low else None

    def _on_worth(self) -> str:
        """Return whether asynchrony pays, over split synchronous workers and over a gang."""
        sync, gang = self.even(SYNCHRONOUS), self.even(GANG)
        text = (
            f"Asynchronous servers break even with split synchronous workers ({_stop_text(self.request)}) at "
            f"a worth of {_worth(sync)}, with a gang at {_worth(gang)}"
        )
        worth = self.request.sample_efficiency
        if worth is None:
            return (
                f"{text}; what their samples are worth was not given, so they are not recommended."
            )
        low, high = worth
        tested = f"{low:g} to {high:g}" if low < high else f"{low:g}"
        ranges = {
            True: "enough: of the split ones, asynchronous",
            False: "too little: of the split ones, synchronous",
            None: "which leaves it open: measure the worth more closely",
        }[self._is_worth()]
        return f"{text}; they are worth {tested}, {ranges}."

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each mode of the answer."""
        table = []
        for mode in MODES:
            mean = self.times.mean(self.key(mode))
            ratio = self.times.ratio(self.key(mode), GANG)
            names = ("hours", "hours_low", "hours_high", "ratio", "ratio_low", "ratio_high")
            table.append(
                {"mode": mode, "chosen": mode == self.choice}
                | dict(zip(names, (*mean, *ratio), strict=True))
                | {"late_hours": self.times.late_h(self.key(mode))}
            )
        return table


def _stop_text(request: QueueRequest) -> str:
    """Return a text on how synchronous workers stop when one joins or leaves."""
    return f"pause {request.pause_s:g} s, {SOURCES[request.recovery]}"


def _h(hours: float | None) -> str:
    return "?" if hours is None else f"{hours:.3g} h"


def _ratio(ratio: IntervalEstimate) -> str:
    return ratio.text(lambda r: f"{r:.2f}")


def _worth(even: IntervalEstimate) -> str:
    if even.value == 0:
        return f"less than {WORTHS[-1]:g}"
    if math.isinf(even.value):
        return "more than 1"
    return even.text(lambda w: f"{w:.2f}")

"""Answers `decide.queue`: which way to train has its result first, including the queue."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from stratbench.cell.text.words import format_count, format_hours
from stratbench.extensions.queue.break_even import (
    ASYNCHRONOUS,
    GANG,
    MODES,
    SYNCHRONOUS,
    WORTHS,
    ModeTimes,
    QueuedTraining,
    TrainingQueue,
    make_poisson_queue,
    make_recorded_queue,
    name_asynchronous_mode,
    simulate_modes,
)
from stratbench.extensions.queue.history import AccountingHistory, WaitsOfWidth, read_history
from stratbench.extensions.queue.request import NODES, QueueRequest
from stratbench.extensions.queue.simulator import ALL, Arrival, Cluster, Rules
from stratbench.statistics.intervals import IntervalEstimate

#: Maximum share of GPUs that other users' jobs use on average. Above it the queue has no stable mean wait.
MAX_STEADY_LOAD = 0.9
#: Maximum growth of the queue in a history, as the share of GPUs that the added jobs would keep busy. A queue
#: can grow although GPUs are idle, because jobs do not fit together.
MAX_GROWTH = 0.1
#: Number of simulated queues (blocks), and of submission times of the training in each queue.
BLOCKS, MOMENTS = 8, 4
#: Simulated and recorded mean waits agree if they differ by at most this factor.
MAX_WAIT_FACTOR = 2.0
#: Text on where synchronous workers get the model's state from, by value of the key `recovery`.
SOURCES = {"checkpoint": "state from the last checkpoint", "peer": "state from another worker"}
NOT_MODELLED = (
    "The simulation does not model fair-share and other priorities than the order of submission, limits "
    "of a QOS (MaxJobs and MaxSubmit), maintenance, time limits of partitions, or reactions of users. The "
    "servers' CPU job is assumed to start at once and never to fail."
)


def simulate_queue_and_answer(
    request: QueueRequest,
    gpus_per_node: int,
    equivalence_margin: float,
    on_progress: Callable[[int, int], None] = lambda num_simulated, total: None,
) -> dict[str, Any]:
    """Simulate the queue, and return the answer as values for answers.json.

    Args:
        request: The queue and the training.
        gpus_per_node: GPUs of a node.
        equivalence_margin: Fraction by which the times of modes may differ and still count as equal; the
            simplest of equal modes is chosen.
        on_progress: Called with the number of simulated submission times, and their total number.

    Raises:
        ValueError: If the history is insufficient; the message has the remedy.
    """
    history = None
    if request.history is not None:
        history = read_history(Path(request.history).expanduser(), gpus_per_node, request.partition)
    nodes = request.nodes or (
        NODES if history is None else _count_min_nodes(history, gpus_per_node)
    )
    capacity = nodes * gpus_per_node
    if request.num_gpus > capacity:
        raise ValueError(
            f"decide.queue.num_gpus = {request.num_gpus}: the history's jobs used at most {capacity} GPUs at "
            "once; if the cluster has more, set decide.queue.nodes"
        )
    load = request.load
    # The load also includes the GPUs that the additional work of a growing queue would use.
    if history is not None:
        load = (history.mean_gpus_in_use + history.queue_growth_gpus) / capacity
    known = (
        [] if history is None else list(describe_accounting_history(history, nodes, gpus_per_node))
    )
    if reason := _find_no_answer_reason(history, load, capacity):
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
        mtbf_days = history.compute_node_mtbf_days(nodes)
    rules = Rules(
        num_reservations=ALL if request.reservations == "all" else 1,
        node_mtbf_s=math.inf if mtbf_days is None else mtbf_days * 86400,
        slow_node_share=request.slow_nodes,
        slow_node_factor=request.slow_factor,
    )
    work = QueuedTraining(
        request.num_gpus,
        request.training_hours,
        request.scaling_loss_per_worker,
        request.pause_s,
        request.recovery == "peer",
        request.preemptible,
    )
    # The simulated queue must last longer than the training, which preemption makes longer.
    lasting_h = request.training_hours * (3 if request.preemptible else 1)
    shape = (nodes, gpus_per_node, rules)
    if history is None:
        queue = make_poisson_queue(*shape, load, lasting_h, BLOCKS, MOMENTS)
    else:
        arrivals = history.make_arrivals()
        queue = make_recorded_queue(
            *shape, arrivals, lasting_h, BLOCKS, MOMENTS, history.simulated_window_begin_s
        )
        known.append(_compare_simulated_with_recorded_waits(history, arrivals, queue))
    worths = sorted({*WORTHS, *(request.sample_efficiency or ())}, reverse=True)
    done = count(1)
    times = simulate_modes(
        queue, work, worths, on_submission_time=lambda: on_progress(next(done), BLOCKS * MOMENTS)
    )
    report = _AnswerText(request, times, equivalence_margin)
    basis = (
        f"Simulated at {BLOCKS * MOMENTS} submission times in "
        f"{'synthetic' if history is None else 'recorded'} queues of {format_count(nodes, 'node')} of "
        f"{format_count(gpus_per_node, 'GPU')}, with load {load:.2f} "
        f"({times.mean_busy_gpu_share:.0%} of the GPUs in use). At each submission time all modes have "
        "the same queue. Intervals are 95 % intervals of means."
    )
    return {
        "headline": report.make_headline(),
        "lines": [*report.make_sentences(), basis, *known, NOT_MODELLED],
        "refused": None,
        "mode": report.choice,
        "modes": report.make_mode_rows(),
        "even": {
            mode: _format_break_even_efficiency(times.compute_break_even_efficiency(mode))
            for mode in MODES[:-1]
        },
    }


def _count_min_nodes(history: AccountingHistory, gpus_per_node: int) -> int:
    """Return the smallest number of nodes that can run the history's jobs."""
    widest = max(e.gpus for e in history.entries)
    return -(-max(history.max_gpus_in_use, widest) // gpus_per_node)


def _find_no_answer_reason(
    history: AccountingHistory | None, load: float, capacity: int
) -> str | None:
    if history is not None and history.has_one_user:
        return (
            "The history has jobs of a single user, so that the load is unknown: run sacct with -a, or "
            "ask an administrator if PrivateData hides other users' jobs."
        )
    if history is not None and history.queue_growth_gpus > MAX_GROWTH * capacity:
        waits_h = history.queue_growth_gpus * history.window_days * 24
        return (
            f"The history's queue is not steady: in {history.window_days:.1f} days the waiting work grew by "
            f"{waits_h:,.0f} GPU-hours ({history.mean_gpus_in_use:.1f} of {capacity} GPUs in use). A growing "
            "queue has no mean wait; give the accounting of steadier days."
        )
    if load > MAX_STEADY_LOAD:
        return (
            f"At a load of {load:.2f} the queue is not steady: above a load of {MAX_STEADY_LOAD} it keeps "
            "growing, and has no mean wait."
        )
    return None


def _compare_simulated_with_recorded_waits(
    history: AccountingHistory, arrivals: list[Arrival], queue: TrainingQueue
) -> str:
    """Return a sentence that compares the history's mean wait of jobs with the simulated one."""
    sim = Cluster(queue.nodes, queue.gpus_per_node, arrivals, queue.rules)
    sim.simulate_until(arrivals[-1].submit_s)
    simulated = [wait_s for _, wait_s in sim.waits]
    begun = [e for e in history.entries if e.start_unix_s is not None]
    recorded = [max(0.0, e.start_unix_s - history.compute_queue_entry_unix_s(e)) for e in begun]
    ours, theirs = sum(simulated) / len(simulated) / 3600, sum(recorded) / len(recorded) / 3600
    text = (
        f"The history's jobs waited {format_hours(theirs)} h on average, and {format_hours(ours)} h in the "
        "simulation"
    )
    if (
        max(ours, theirs) > 0.1
        and not 1 / MAX_WAIT_FACTOR <= (ours + 1e-9) / (theirs + 1e-9) <= MAX_WAIT_FACTOR
    ):
        return (
            f"{text}: the simulator does not know this queue well (its size, priorities or limits), so "
            "that the answer is only approximate."
        )
    return f"{text}."


def describe_accounting_history(
    history: AccountingHistory, nodes: int, gpus_per_node: int
) -> list[str]:
    """Return sentences on a history: its jobs, GPUs in use, node failures and waits.

    Args:
        history: The history.
        nodes: Number of nodes.
        gpus_per_node: GPUs of a node.
    """
    capacity = nodes * gpus_per_node
    lines = [
        f"The history has {format_count(len(history.entries), 'job')} with GPUs in {history.window_days:.1f} "
        f"days. Of {capacity} GPUs, {history.mean_gpus_in_use:.1f} were in use on average, and at most "
        f"{history.max_gpus_in_use}."
    ]
    if history.are_gpus_counted_by_node:
        lines.append(
            "The accounting does not count GPUs (set AccountingStorageTRES=gres/gpu), so that each node of a "
            f"job counts as {gpus_per_node} GPUs."
        )
    mtbf_days = history.compute_node_mtbf_days(nodes)
    if mtbf_days is not None:
        lines.append(
            f"A node failed under a job once in {mtbf_days:.0f} node-days (state NODE_FAIL)."
        )
    return [*lines, *map(_describe_waits_of_width, history.iter_waits_by_width())]


def _describe_waits_of_width(row: WaitsOfWidth) -> str:
    mean_h, median_h, p90_h = (
        format_hours(wait_s / 3600)
        for wait_s in (row.mean_wait_s, row.median_wait_s, row.p90_wait_s)
    )
    jobs = format_count(row.num_jobs, "job")
    text = (
        f"{row.gpus_label} GPUs: {jobs} waited {mean_h} h on average, {median_h} h in the median, and one in "
        f"ten over {p90_h} h"
    )
    if row.used_wall_time_share is not None:
        text += f"; they used {row.used_wall_time_share:.0%} of their requested wall time"
    if row.backfilled_share is not None:
        text += f"; {row.backfilled_share:.0%} of them started by backfill"
    return f"{text}."


class _AnswerText:
    """Sentences and table rows on the simulated times of a training in all modes."""

    def __init__(self, request: QueueRequest, times: ModeTimes, equivalence_margin: float) -> None:
        self.request, self.times = request, times
        self.equivalence_margin = equivalence_margin
        self.choice = self._choose_mode()

    def get_simulated_mode_name(self, mode: str) -> str:
        """Return the name under which a mode was simulated.

        Asynchronous workers were simulated with several sample efficiencies. Their name has the lowest one.
        """
        if mode != ASYNCHRONOUS:
            return mode
        return name_asynchronous_mode(min(self.request.sample_efficiency or (1.0,)))

    def _choose_mode(self) -> str:
        """Return the simplest mode whose time is within the margin of the shortest time.

        Asynchronous workers are considered only if their sample efficiency is high enough with 95 %
        confidence.
        """
        allowed = MODES if self._is_asynchronous_better() else MODES[:-1]
        mean = {
            mode: self.times.compute_mean_hours(self.get_simulated_mode_name(mode)).value
            for mode in allowed
        }
        best = min(mean.values())
        return next(mode for mode in allowed if mean[mode] <= best * (1 + self.equivalence_margin))

    def make_headline(self) -> str:
        """Return a text that compares the time of the chosen mode with a gang's.

        A mode is a way to submit the workers. The workers of a gang start together, as one job.
        """
        mean = self.times.compute_mean_hours(self.get_simulated_mode_name(self.choice))
        text = (
            f"With the queue: {self.choice} takes {_format_hours(mean.value)} from submission to result"
            f" ({_format_hours(mean.low)} to {_format_hours(mean.high)}); one in ten takes longer than "
            f"{_format_hours(self.times.compute_p90_hours(self.get_simulated_mode_name(self.choice)))}."
        )
        if self.choice == GANG:
            return text
        ratio = self.times.compute_mode_time_ratio(self.get_simulated_mode_name(self.choice), GANG)
        gang_h = _format_hours(self.times.compute_mean_hours(GANG).value)
        text += f" That is {_format_time_ratio(ratio)} times as long as a gang takes ({gang_h})"
        doubtful = ratio.high is not None and ratio.high > 1
        return f"{text}{', but the difference is within the noise' if doubtful else ''}."

    def make_sentences(self) -> list[str]:
        """Return sentences on all modes' times, on the needed sample efficiency, and on preemption."""
        others = []
        for mode in MODES[1:]:
            mean, ratio = (
                self.times.compute_mean_hours(self.get_simulated_mode_name(mode)),
                self.times.compute_mode_time_ratio(self.get_simulated_mode_name(mode), GANG),
            )
            others.append(f"{mode} {_format_hours(mean.value)}, {_format_time_ratio(ratio)}")
        worth = f"at a sample efficiency of {min(self.request.sample_efficiency or (1.0,)):g}"
        texts = [
            f"Mean time from submission to result, and its ratio to a gang's: gang "
            f"{_format_hours(self.times.compute_mean_hours(GANG).value)}; {'; '.join(others)} ({worth}).",
            self._describe_break_even(),
        ]
        if self.request.preemptible:
            texts.append(
                "Workers that are separate jobs are preempted by all other jobs here; gangs are not."
            )
        return texts

    def _is_asynchronous_better(self) -> bool | None:
        """Return whether asynchronous workers are faster than split synchronous ones. None if uncertain."""
        sync, worth = (
            self.times.compute_break_even_efficiency(SYNCHRONOUS),
            self.request.sample_efficiency,
        )
        if worth and sync.high is not None and worth[0] >= sync.high:
            return True
        return False if worth and sync.low is not None and worth[1] <= sync.low else None

    def _describe_break_even(self) -> str:
        """Return a sentence on the sample efficiency that asynchronous workers need."""
        sync, gang = (
            self.times.compute_break_even_efficiency(SYNCHRONOUS),
            self.times.compute_break_even_efficiency(GANG),
        )
        text = (
            "Asynchronous workers break even with split synchronous workers "
            f"({_describe_synchronous_pause(self.request)}) at a sample efficiency of "
            f"{_format_break_even_efficiency(sync)}, and with a gang at {_format_break_even_efficiency(gang)}"
        )
        worth = self.request.sample_efficiency
        if worth is None:
            return (
                f"{text}; their sample efficiency is not given, so that they are not recommended."
            )
        low, high = worth
        tested = f"{low:g} to {high:g}" if low < high else f"{low:g}"
        ranges = {
            True: "which is enough: asynchronous workers are faster",
            False: "which is too little: synchronous workers are faster",
            None: "which leaves open which are faster: measure it more precisely",
        }[self._is_asynchronous_better()]
        return f"{text}; their sample efficiency is {tested}, {ranges}."

    def make_mode_rows(self) -> list[dict[str, Any]]:
        """Return a row of numbers for each mode, for answers.json and the report."""
        table = []
        for mode in MODES:
            mean = self.times.compute_mean_hours(self.get_simulated_mode_name(mode))
            ratio = self.times.compute_mode_time_ratio(self.get_simulated_mode_name(mode), GANG)
            names = ("hours", "hours_low", "hours_high", "ratio", "ratio_low", "ratio_high")
            table.append(
                {"mode": mode, "chosen": mode == self.choice}
                | dict(zip(names, (*mean, *ratio), strict=True))
                | {"late_hours": self.times.compute_p90_hours(self.get_simulated_mode_name(mode))}
            )
        return table


def _describe_synchronous_pause(request: QueueRequest) -> str:
    """Return a text on the pause of synchronous workers when one joins or leaves."""
    return f"pause {request.pause_s:g} s, {SOURCES[request.recovery]}"


def _format_hours(hours: float | None) -> str:
    return "?" if hours is None else f"{hours:.3g} h"


def _format_time_ratio(ratio: IntervalEstimate) -> str:
    return ratio.format_value_and_interval(lambda r: f"{r:.2f}")


def _format_break_even_efficiency(efficiency: IntervalEstimate) -> str:
    """Format the sample efficiency with which modes are equally fast, also beyond the simulated range."""
    if efficiency.value == 0:
        return f"less than {WORTHS[-1]:g}"
    if math.isinf(efficiency.value):
        return "more than 1"
    return efficiency.format_value_and_interval(lambda w: f"{w:.2f}")

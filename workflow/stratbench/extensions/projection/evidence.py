"""Gathers a strategy's measurements, and replays its steps with measured link times.

The measurements come from the records of a study and from `links.csv`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.extensions.links.collective_cost import LinkLayout
from stratbench.extensions.plan.device_rates import Device
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.plan.needs import Subject
from stratbench.extensions.projection.links import Unmeasured, read_links
from stratbench.extensions.projection.naive import MeasuredStep, Scaling
from stratbench.extensions.projection.project import StepReplay
from stratbench.extensions.projection.replay import Schedule, is_host_unblocked, simulate_step_s
from stratbench.extensions.projection.servers import (
    ServerQueue,
    compute_asynchronous_step_s,
    compute_synchronous_step_s,
)
from stratbench.extensions.projection.stragglers import Stragglers, fit_stragglers
from stratbench.strategies import get_traits
from stratbench.telemetry.collectives import CollectiveCall


@dataclass(frozen=True)
class ProjectionInputs:
    """Measurements of one strategy on one model, for all worker counts with a usable record.

    Attributes:
        gpu_name: Name of the GPU; "" for CPU processes.
        measured_steps: Seconds per global batch on each count, from the throughput of the whole
            training.
        cells: A cell of each count.
        records_by_count: The records of each count, one per repeat.
        unfit_reason: Why the measurements do not allow a projection, or "".
    """

    experiment: str
    strategy: str
    model: str
    scaling: Scaling
    gpu_name: str
    num_parameters: int | None
    measured_steps: tuple[MeasuredStep, ...]
    cells: tuple[Cell, ...]
    records_by_count: tuple[tuple[Mapping[str, Any], ...], ...]
    unfit_reason: str = ""

    @property
    def largest_cell(self) -> Cell:
        """Cell on the largest measured number of workers, the base of cells on more workers."""
        return self.cells[-1]

    @property
    def on_cpu(self) -> bool:
        return not self.gpu_name

    @property
    def stragglers(self) -> Stragglers | None:
        """Distribution of the workers' computation times on the largest count, or None if not recorded."""
        return fit_stragglers(self.records_by_count[-1])

    @property
    def host_issue_s(self) -> float | None:
        """Seconds that the slowest worker's host needs to issue a step, on the largest count.

        The value is the median of repeats. It is None if not recorded, or if the host waits within a step
        because it is slowed or stores model states.
        """
        host_times = []
        for record in self.records_by_count[-1]:
            issue_ms = [worker.get("issue_ms") for worker in record["workers"]]
            waits = record["settings"].get("slowdown") or record["strategy"]["traits"].get(
                "states_on_host"
            )
            if issue_ms and None not in issue_ms and not waits:
                host_times.append(max(issue_ms) / 1e3)
        return statistics.median(host_times) if host_times else None

    @property
    def repeat_half_width_ln(self) -> float:
        """Half-width of the interval around the middle repeat, in ln of time.

        The interval contains 80 of 100 repeats.

        The half-width follows from Student's t and the variance within counts, which are assumed to have
        equal variance. It is 0 without repeats.
        """
        from scipy.special import stdtrit

        logs = [
            [math.log(t) for t in compute_step_times_s(of_count)]
            for of_count in self.records_by_count
        ]
        degrees_of_freedom = sum(len(each) - 1 for each in logs)
        if not degrees_of_freedom:
            return 0.0
        squares = sum((x - statistics.fmean(each)) ** 2 for each in logs for x in each)
        return float(stdtrit(degrees_of_freedom, 0.9)) * math.sqrt(squares / degrees_of_freedom)


def gather_projection_inputs(records: Mapping[Cell, Mapping[str, Any]]) -> list[ProjectionInputs]:
    """Return the measurements in a study's records, per experiment, model and strategy.

    Repeats of a cell are represented by their median.
    """
    groups: dict[tuple[str, str, str], dict[int, list[tuple[Cell, Mapping[str, Any]]]]] = {}
    for cell, record in records.items():
        if record["status"] == "ok":
            counts = groups.setdefault((cell.experiment, cell.model, cell.strategy), {})
            counts.setdefault(cell.gpus, []).append((cell, record))
    return [_make_projection_inputs(*key, counts) for key, counts in sorted(groups.items())]


def _make_projection_inputs(
    experiment: str,
    model: str,
    strategy: str,
    counts: Mapping[int, list[tuple[Cell, Mapping[str, Any]]]],
) -> ProjectionInputs:
    points, cells, timed = [], [], []
    for workers, cells_of_count in sorted(counts.items()):
        if times := compute_step_times_s(r for _, r in cells_of_count):
            points.append(
                MeasuredStep(workers, statistics.median(times), _count_nodes(cells_of_count[0][1]))
            )
            cells.append(cells_of_count[0][0])
            timed.append(tuple(r for _, r in cells_of_count))
    records = [r for cells_of_count in counts.values() for _, r in cells_of_count]
    scaling = _detect_scaling(records)
    first = min(records, key=lambda r: r["cell"]["gpus"])
    unfit_reason = ""
    if scaling is None:
        unfit_reason = (
            "its records have neither the same global batch nor the same batch per worker"
        )
    elif len(points) < 2:
        unfit_reason = "it has records of a single worker count; train it on another"
    if "program" in first:
        unfit_reason = "it is your own command, whose steps are unknown"
    return ProjectionInputs(
        experiment,
        strategy,
        model,
        scaling or "strong",
        _read_gpu_name(first),
        first["model"]["parameters"],
        tuple(points),
        tuple(cells),
        tuple(timed),
        unfit_reason,
    )


def compute_step_times_s(records: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return seconds per global batch of each record that has a throughput."""
    return [
        r["batch"]["global_batch"] / r["time"]["throughput_samples_per_s"]
        for r in records
        if r["time"]["throughput_samples_per_s"]
    ]


def _detect_scaling(records: Iterable[Mapping[str, Any]]) -> Scaling | None:
    batches = [r["batch"] for r in records]
    if len({b["global_batch"] for b in batches}) == 1:
        return "strong"
    return "weak" if len({b["per_worker_batch"] for b in batches}) == 1 else None


def _count_nodes(record: Mapping[str, Any]) -> int | None:
    names = {_read_node_name(w["provenance"]) for w in record["workers"]}
    return None if None in names or not names else len(names)


def _read_node_name(provenance: Mapping[str, Any]) -> str | None:
    """Return the name of a worker's node, from SLURM or else from the host."""
    named = (provenance.get("slurm") or {}).get("SLURMD_NODENAME")
    return named or (provenance.get("host") or {}).get("name")


def read_node_cores(record: Mapping[str, Any]) -> float | None:
    """Return the number of CPU cores that processes of the first worker's node may use.

    Return None if it is not recorded.
    """
    if not record["workers"]:
        return None
    host = record["workers"][0]["provenance"].get("host") or {}
    return host.get("cpu_quota_cores") or host.get("cores_logical")


def _read_gpu_name(record: Mapping[str, Any]) -> str:
    gpu = record["workers"][0]["provenance"].get("gpu") if record["workers"] else None
    return (gpu or {}).get("name") or ""


@dataclass(frozen=True)
class LinkReplay:
    """Replays of a strategy's step with measured link times.

    Attributes:
        replay_step: Returns the seconds of a step for a worker count and seconds of computation.
        replay_step_slowed: As `replay_step`, with each link slower by the standard deviation of its fit.
        measured_levels: Levels of the measured links, "within" and "between" nodes.
        make_server_queue: Returns the queue at the servers for a worker count and seconds of
            computation.
        host_issue_s: Seconds in which the host issues a step on any count; 0 if unknown.
    """

    replay_step: StepReplay
    replay_step_slowed: StepReplay
    measured_levels: frozenset[str]
    make_server_queue: Callable[[int, float], ServerQueue] | None = None
    host_issue_s: float = 0.0


def make_link_replay(
    at: Callable[[int], Subject],
    evidence: ProjectionInputs,
    device: Device,
    path: Path,
    nodes_of: Callable[[int], int],
) -> LinkReplay | None:
    """Return the replay of a strategy's step on any worker count.

    Args:
        at: Returns the strategy's cell on a number of workers.
        evidence: Measurements of the strategy.
        device: The device.
        path: The file links.csv.
        nodes_of: Returns the number of nodes of a worker count.

    Returns:
        The replay. It is None without `links.csv`, and for a strategy that does not exchange in every
        step.

    Raises:
        ValueError: If the file is invalid.
        Unmeasured: If the file lacks a link that the strategy uses. A later call may raise it as well.
    """
    if not path.exists():
        return None
    last = evidence.measured_steps[-1]
    subject = at(last.workers)
    if subject.served:
        return _make_server_replay(at, subject, evidence, path, nodes_of)
    if subject.exchanging_share < 1:
        return None
    links = read_links(path, "nccl" if subject.request.is_on_cuda else "gloo")
    slowest_factor = _make_slowest_worker_factor(evidence.stragglers)

    @cache
    def trace_step_schedule(request: Request, samples: int) -> Schedule:
        # This import loads PyTorch.
        from stratbench.extensions.projection.traced import trace_schedule

        return trace_schedule(request, samples, device)

    def replay_step(workers: int, compute_s: float, spreads: float = 0.0) -> float:
        subject_there = at(workers)
        samples = subject_there.samples_per_step
        layout = LinkLayout(workers, nodes_of(workers))

        def compute_collective_s(call: CollectiveCall) -> float:
            log_sd = max(
                (link.log_sd for link in links.get_links_by_level(call.collective_name).values()),
                default=0.0,
            )
            return links.time_collective(call, layout, samples)[0] * math.exp(spreads * log_sd)

        slowest_s = compute_s * slowest_factor(workers, spreads)
        return simulate_step_s(
            trace_step_schedule(subject_there.request, samples),
            slowest_s,
            compute_collective_s,
            links.compute_slowdown,
        )

    host_issue_s = evidence.host_issue_s or 0.0
    if host_issue_s:
        schedule = trace_step_schedule(subject.request, subject.samples_per_step)
        if not is_host_unblocked(schedule.num_operations, host_issue_s, last.step_s):
            host_issue_s = 0.0
    return LinkReplay(
        replay_step,
        partial(replay_step, spreads=1.0),
        frozenset(level for kind in links.links_by_kind.values() for level in kind),
        # The host issued each measured step, so that it needs at most the shortest step time.
        host_issue_s=min(host_issue_s, *(p.step_s for p in evidence.measured_steps)),
    )


def _make_slowest_worker_factor(stragglers: Stragglers | None) -> Callable[[int, float], float]:
    """Return a function that computes the slowest worker's computation time over the mean.

    The function takes a worker count and by how many standard deviations the factor is raised.
    """
    if stragglers is None:
        return lambda workers, spreads: 1.0
    return cache(stragglers.compute_mean_slowest_factor)


def _make_server_replay(
    at: Callable[[int], Subject],
    subject: Subject,
    evidence: ProjectionInputs,
    path: Path,
    nodes_of: Callable[[int], int],
) -> LinkReplay | None:
    """Return a step's replay by a queueing model of the parameter servers.

    The servers have equal parts of the weights. Workers access the servers concurrently.

    Returns:
        The replay, or None if the number of parameters is not recorded.

    Raises:
        Unmeasured: If the file lacks the servers' links. The replay itself raises it for workers on
            several nodes.
    """
    parameters = evidence.num_parameters
    if not parameters:
        return None
    transport = subject.settings.options["transport"]
    links = read_links(path, f"servers-{'shm' if transport == 'auto' else transport}")
    link = links.get_links_by_level("push_pull")["within"]
    slowest_factor = _make_slowest_worker_factor(evidence.stragglers)

    @cache
    def compute_service_s(workers: int) -> float:
        there = at(workers)  # colocated servers are as many as the workers
        part_bytes = 4 * parameters / there.settings.options["servers"]
        links.check_size("push_pull", part_bytes)
        return there.steps_per_batch * part_bytes / link.bytes_per_s

    def make_server_queue(workers: int, compute_s: float, slower: float = 1.0) -> ServerQueue:
        # The links' fit lets all workers wait for the latency at the same time (`served`).
        latency_s = at(workers).steps_per_batch * link.latency_s
        return ServerQueue(compute_s + slower * latency_s, (slower * compute_service_s(workers),))

    @cache
    def is_waiting_for_slowest(workers: int) -> bool:
        settings = at(workers).settings
        return get_traits(settings.strategy, settings.options, workers).waits_for_slowest

    def replay_step(workers: int, compute_s: float, spreads: float = 0.0) -> float:
        if nodes_of(workers) > 1:
            raise Unmeasured("`links` does not measure push and pull between nodes")
        slower = math.exp(spreads * link.log_sd)
        if is_waiting_for_slowest(workers):
            each_s = compute_s * slowest_factor(workers, spreads)
            return compute_synchronous_step_s(make_server_queue(workers, each_s, slower), workers)
        return compute_asynchronous_step_s(make_server_queue(workers, compute_s, slower), workers)

    return LinkReplay(
        replay_step,
        partial(replay_step, spreads=1.0),
        frozenset({"within"}),
        make_server_queue,
    )

"""Collects a strategy's measured step times, and replays its steps with measured link times.

A replay simulates the collectives and the computation of a step on another number of workers. Step times come
from a study's records, and link times from `links.csv`.
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
from stratbench.extensions.plan.needs import CellToPlan
from stratbench.extensions.projection.links import Unmeasured, read_links
from stratbench.extensions.projection.naive import MeasuredStep, Scaling
from stratbench.extensions.projection.project import StepReplay
from stratbench.extensions.projection.replay import Schedule, is_host_unblocked, simulate_step_s
from stratbench.extensions.projection.servers import (
    ServerQueue,
    compute_asynchronous_step_s,
    compute_synchronous_step_s,
)
from stratbench.extensions.projection.stragglers import Stragglers, read_stragglers
from stratbench.strategies import get_traits
from stratbench.telemetry.collectives import CollectiveCall


@dataclass(frozen=True)
class ProjectionInputs:
    """Measurements of one strategy with one model, on all worker counts with a usable record.

    Tuples have an element per worker count, in ascending order.

    Attributes:
        experiment: Name of the experiment.
        strategy: Name of the strategy.
        model: Name of the model.
        scaling: Weak or strong scaling.
        gpu_name: Name of the GPU; "" for CPU processes.
        num_parameters: Number of the model's parameters, if recorded.
        measured_steps: Seconds per global batch on each count, from the throughput of the whole training.
        one_cell_per_worker_count: One cell on each count.
        records_per_worker_count: Records of each count, one per repeat.
        cannot_project_reason: Why the measurements do not allow a projection, or "".
    """

    experiment: str
    strategy: str
    model: str
    scaling: Scaling
    gpu_name: str
    num_parameters: int | None
    measured_steps: tuple[MeasuredStep, ...]
    one_cell_per_worker_count: tuple[Cell, ...]
    records_per_worker_count: tuple[tuple[Mapping[str, Any], ...], ...]
    cannot_project_reason: str = ""

    @property
    def largest_measured_cell(self) -> Cell:
        """Cell on the largest measured number of workers. Cells on more workers are copies of it."""
        return self.one_cell_per_worker_count[-1]

    @property
    def is_on_cpu(self) -> bool:
        return not self.gpu_name

    @property
    def stragglers(self) -> Stragglers | None:
        """Computation times of the workers on the largest worker count. None if not recorded."""
        return read_stragglers(self.records_per_worker_count[-1])

    @property
    def host_issue_s(self) -> float | None:
        """Seconds in which the slowest worker's host issues a step, on the largest worker count.

        The value is the median over repeats. It is None if not recorded, or if the host waits within a step
        because of the settings `slowdown` or `offload`.
        """
        host_times = []
        for record in self.records_per_worker_count[-1]:
            issue_ms = [worker.get("issue_ms") for worker in record["workers"]]
            waits = record["settings"].get("slowdown") or record["strategy"]["traits"].get(
                "states_on_host"
            )
            if issue_ms and None not in issue_ms and not waits:
                host_times.append(max(issue_ms) / 1e3)
        return statistics.median(host_times) if host_times else None

    @property
    def repeat_interval_half_width_ln(self) -> float:
        """Half-width, in ln of step time, of the interval that contains 80 of 100 repeats.

        It follows from Student's t and from the variance of repeats, which is assumed to be the same on all
        worker counts. It is 0 without repeats.
        """
        from scipy.special import stdtrit

        logs = [
            [math.log(t) for t in compute_step_times_s(of_count)]
            for of_count in self.records_per_worker_count
        ]
        degrees_of_freedom = sum(len(each) - 1 for each in logs)
        if not degrees_of_freedom:
            return 0.0
        squares = sum((x - statistics.fmean(each)) ** 2 for each in logs for x in each)
        return float(stdtrit(degrees_of_freedom, 0.9)) * math.sqrt(squares / degrees_of_freedom)


def gather_projection_inputs(records: Mapping[Cell, Mapping[str, Any]]) -> list[ProjectionInputs]:
    """Return the measurements in a study's records, one per experiment, model and strategy.

    A step time is the median over the repeats of a cell.
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
    cells_by_count: Mapping[int, list[tuple[Cell, Mapping[str, Any]]]],
) -> ProjectionInputs:
    points, cells, timed = [], [], []
    for workers, cells_of_count in sorted(cells_by_count.items()):
        if times := compute_step_times_s(r for _, r in cells_of_count):
            points.append(
                MeasuredStep(workers, statistics.median(times), _count_nodes(cells_of_count[0][1]))
            )
            cells.append(cells_of_count[0][0])
            timed.append(tuple(r for _, r in cells_of_count))
    records = [r for cells_of_count in cells_by_count.values() for _, r in cells_of_count]
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
    """Return the seconds per global batch, for each record with a throughput."""
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
    """Return the name of a worker's node by SLURM, or else by the host."""
    named = (provenance.get("slurm") or {}).get("SLURMD_NODENAME")
    return named or (provenance.get("host") or {}).get("name")


def read_node_cores(record: Mapping[str, Any]) -> float | None:
    """Return how many CPU cores processes on the first worker's node may use. None if unknown."""
    if not record["workers"]:
        return None
    host = record["workers"][0]["provenance"].get("host") or {}
    return host.get("cpu_quota_cores") or host.get("cores_logical")


def _read_gpu_name(record: Mapping[str, Any]) -> str:
    gpu = record["workers"][0]["provenance"].get("gpu") if record["workers"] else None
    return (gpu or {}).get("name") or ""


@dataclass(frozen=True)
class LinkReplay:
    """Functions that simulate (replay) a strategy's step with measured link times.

    Attributes:
        replay_step_s: Returns the seconds of a step, for a worker count and seconds of computation.
        replay_step_on_slower_links_s: Like `replay_step_s`, with each link slower by the standard deviation
            of its fit.
        measured_link_levels: Where links were measured: "within" and "between" nodes.
        make_server_queue: Returns the queue of the parameter servers, for a worker count and seconds of
            computation; None for a strategy without servers.
        host_issue_s: Seconds in which a worker's host issues a step, on any count; 0 if unknown.
    """

    replay_step_s: StepReplay
    replay_step_on_slower_links_s: StepReplay
    measured_link_levels: frozenset[str]
    make_server_queue: Callable[[int, float], ServerQueue] | None = None
    host_issue_s: float = 0.0


def make_link_replay(
    make_cell_at_count: Callable[[int], CellToPlan],
    evidence: ProjectionInputs,
    device: Device,
    links_path: Path,
    count_nodes_at: Callable[[int], int],
) -> LinkReplay | None:
    """Return the replay of a strategy's step with measured links, for any worker count.

    Args:
        make_cell_at_count: Returns the strategy's cell on a number of workers, as the plan needs it.
        evidence: Measurements of the strategy.
        device: Device of a worker.
        links_path: Path of the file links.csv.
        count_nodes_at: Returns the number of nodes of a worker count.

    Returns:
        The replay. None without `links.csv`, and for a strategy that does not communicate in every step.

    Raises:
        ValueError: If the file is invalid.
        Unmeasured: If the file lacks a link that the strategy uses. A later call may raise it as well.
    """
    if not links_path.exists():
        return None
    last = evidence.measured_steps[-1]
    planned_cell = make_cell_at_count(last.workers)
    if planned_cell.served:
        return _make_server_replay(
            make_cell_at_count, planned_cell, evidence, links_path, count_nodes_at
        )
    if planned_cell.share_of_exchanging_steps < 1:
        return None
    links = read_links(links_path, "nccl" if planned_cell.request.is_on_cuda else "gloo")
    slowest_factor = _make_slowest_to_mean_time_ratio(evidence.stragglers)

    @cache
    def trace_step_schedule(request: Request, samples: int) -> Schedule:
        # Imported here, because this module loads PyTorch, which takes seconds.
        from stratbench.extensions.projection.traced import trace_schedule

        return trace_schedule(request, samples, device)

    def replay_step_s(workers: int, compute_s: float, num_sd: float = 0.0) -> float:
        cell_there = make_cell_at_count(workers)
        samples = cell_there.samples_per_step
        layout = LinkLayout(workers, count_nodes_at(workers))

        def compute_collective_s(call: CollectiveCall) -> float:
            log_sd = max(
                (
                    link.log_error_sd
                    for link in links.get_links_by_level(call.collective_name).values()
                ),
                default=0.0,
            )
            return links.compute_collective_time(call, layout, samples).seconds * math.exp(
                num_sd * log_sd
            )

        slowest_s = compute_s * slowest_factor(workers, num_sd)
        return simulate_step_s(
            trace_step_schedule(cell_there.request, samples),
            slowest_s,
            compute_collective_s,
            links.computation_slowdown_factor,
        )

    host_issue_s = evidence.host_issue_s or 0.0
    if host_issue_s:
        schedule = trace_step_schedule(planned_cell.request, planned_cell.samples_per_step)
        if not is_host_unblocked(schedule.num_operations, host_issue_s, last.step_s):
            host_issue_s = 0.0
    return LinkReplay(
        replay_step_s,
        partial(replay_step_s, num_sd=1.0),
        frozenset(level for kind in links.links_by_kind.values() for level in kind),
        # The host issued every measured step, so its time is at most the shortest measured step time.
        host_issue_s=min(host_issue_s, *(p.step_s for p in evidence.measured_steps)),
    )


def _make_slowest_to_mean_time_ratio(
    stragglers: Stragglers | None,
) -> Callable[[int, float], float]:
    """Return a function for the ratio of the slowest worker's computation time to the mean.

    Its arguments are the number of workers, and the number of standard deviations by which the ratio is
    raised.
    """
    if stragglers is None:
        return lambda workers, num_sd: 1.0
    return cache(stragglers.compute_slowest_to_mean_time_ratio)


def _make_server_replay(
    make_cell_at_count: Callable[[int], CellToPlan],
    planned_cell: CellToPlan,
    evidence: ProjectionInputs,
    links_path: Path,
    count_nodes_at: Callable[[int], int],
) -> LinkReplay | None:
    """Return the replay of a step with parameter servers, by a queueing model.

    The servers have equal parts of the weights, and serve the workers concurrently.

    Returns:
        The replay, or None if the number of parameters is not recorded.

    Raises:
        Unmeasured: If the file lacks the servers' links. The replay itself raises it for workers on
            several nodes.
    """
    parameters = evidence.num_parameters
    if not parameters:
        return None
    transport = planned_cell.settings.options["transport"]
    links = read_links(links_path, f"servers-{'shm' if transport == 'auto' else transport}")
    link = links.get_links_by_level("push_pull")["within"]
    slowest_factor = _make_slowest_to_mean_time_ratio(evidence.stragglers)

    @cache
    def compute_server_service_s(workers: int) -> float:
        there = make_cell_at_count(workers)  # the number of servers may depend on that of workers
        part_bytes = 4 * parameters / there.settings.options["servers"]
        links.check_measured_size("push_pull", part_bytes)
        return there.steps_per_batch * part_bytes / link.bytes_per_s

    def make_server_queue(
        workers: int, compute_s: float, link_slowdown: float = 1.0
    ) -> ServerQueue:
        # All workers wait for the latency at the same time, so it is part of the think time.
        latency_s = make_cell_at_count(workers).steps_per_batch * link.latency_s
        service_s = link_slowdown * compute_server_service_s(workers)
        return ServerQueue(compute_s + link_slowdown * latency_s, service_s)

    @cache
    def is_strategy_waiting_for_slowest(workers: int) -> bool:
        """Return whether the cell's strategy, on a number of workers, waits for the slowest."""
        settings = make_cell_at_count(workers).settings
        return get_traits(settings.strategy, settings.options, workers).waits_for_slowest

    def replay_step_s(workers: int, compute_s: float, num_sd: float = 0.0) -> float:
        if count_nodes_at(workers) > 1:
            raise Unmeasured("`links` does not measure push and pull between nodes")
        link_slowdown = math.exp(num_sd * link.log_error_sd)
        if is_strategy_waiting_for_slowest(workers):
            slowest_s = compute_s * slowest_factor(workers, num_sd)
            queue = make_server_queue(workers, slowest_s, link_slowdown)
            return compute_synchronous_step_s(queue, workers)
        queue = make_server_queue(workers, compute_s, link_slowdown)
        return compute_asynchronous_step_s(queue, workers)

    return LinkReplay(
        replay_step_s,
        partial(replay_step_s, num_sd=1.0),
        frozenset({"within"}),
        make_server_queue,
    )

"""Measurements of a strategy on a model, from records and `links.csv`: its counts, and a replay."""

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
from stratbench.extensions.projection.naive import Measured, Scaling
from stratbench.extensions.projection.project import Replayed
from stratbench.extensions.projection.replay import Schedule, is_unhindered, replay
from stratbench.extensions.projection.servers import ServerQueue, asynchronous, synchronous
from stratbench.extensions.projection.stragglers import Stragglers, stragglers_of
from stratbench.strategies import traits_of
from stratbench.telemetry.collectives import CollectiveCall


@dataclass(frozen=True)
class ProjectionInputs:
    """One strategy on one model of an experiment, on all counts with a usable record.

    `step_s` of the points: of a global batch, by the throughput of the whole training. `unfit`: why nothing
    can be projected from it, or "".
    """

    experiment: str
    strategy: str
    model: str
    scaling: Scaling
    gpu: str  # its name; "" of CPU processes
    parameters: int | None
    points: tuple[Measured, ...]
    cells: tuple[Cell, ...]
    records: tuple[tuple[Mapping[str, Any], ...], ...]  # of each count
    unfit: str = ""

    @property
    def last(self) -> Cell:
        """The cell on the most workers, as which others on more of them are made."""
        return self.cells[-1]

    @property
    def on_cpu(self) -> bool:
        return not self.gpu

    @property
    def stragglers(self) -> Stragglers | None:
        """Distribution of the workers' computation time on the largest count, or None if not recorded."""
        return stragglers_of(self.records[-1])

    @property
    def host_s(self) -> float | None:
        """Seconds in which the slowest worker's host issues a step on the largest count.

        It is the median of repeats. None if not recorded, and if the host waits within a step: it is slowed,
        or has the states.
        """
        host_times = []
        for record in self.records[-1]:
            issue_ms = [worker.get("issue_ms") for worker in record["workers"]]
            waits = record["settings"].get("slowdown") or record["strategy"]["traits"].get(
                "states_on_host"
            )
            if issue_ms and None not in issue_ms and not waits:
                host_times.append(max(issue_ms) / 1e3)
        return statistics.median(host_times) if host_times else None

    @property
    def repeats_reach(self) -> float:
        """Half-width, in ln, around the middle repeat that contains 80 of 100; 0 without repeats.

        By Student's t from the variance within counts, which are assumed to have equal variance.
        """
        from scipy.special import stdtrit

        logs = [[math.log(t) for t in step_times(of_count)] for of_count in self.records]
        freedom = sum(len(each) - 1 for each in logs)
        if not freedom:
            return 0.0
        squares = sum((x - statistics.fmean(each)) ** 2 for each in logs for x in each)
        return float(stdtrit(freedom, 0.9)) * math.sqrt(squares / freedom)


def evidence_of(records: Mapping[Cell, Mapping[str, Any]]) -> list[ProjectionInputs]:
    """The evidence in a study's records, by experiment, model and strategy; repeats by their median."""
    groups: dict[tuple[str, str, str], dict[int, list[tuple[Cell, Mapping[str, Any]]]]] = {}
    for cell, record in records.items():
        if record["status"] == "ok":
            counts = groups.setdefault((cell.experiment, cell.model, cell.strategy), {})
            counts.setdefault(cell.gpus, []).append((cell, record))
    return [_evidence(*key, counts) for key, counts in sorted(groups.items())]


def _evidence(
    experiment: str,
    model: str,
    strategy: str,
    counts: Mapping[int, list[tuple[Cell, Mapping[str, Any]]]],
) -> ProjectionInputs:
    points, cells, timed = [], [], []
    for workers, cells_of_count in sorted(counts.items()):
        if times := step_times(r for _, r in cells_of_count):
            points.append(Measured(workers, statistics.median(times), _nodes(cells_of_count[0][1])))
            cells.append(cells_of_count[0][0])
            timed.append(tuple(r for _, r in cells_of_count))
    records = [r for cells_of_count in counts.values() for _, r in cells_of_count]
    scaling = _scaling(records)
    first = min(records, key=lambda r: r["cell"]["gpus"])
    unfit = ""
    if scaling is None:
        unfit = "its records have neither one global batch nor one batch a worker"
    elif len(points) < 2:
        unfit = "it has records of one count alone; train it on another"
    if "program" in first:
        unfit = "a command of yours has steps of which nothing is known"
    return ProjectionInputs(
        experiment,
        strategy,
        model,
        scaling or "strong",
        _gpu(first),
        first["model"]["parameters"],
        tuple(points),
        tuple(cells),
        tuple(timed),
        unfit,
    )


def step_times(records: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return seconds per global batch in each record that has a throughput."""
    return [
        r["batch"]["global_batch"] / r["time"]["throughput_samples_per_s"]
        for r in records
        if r["time"]["throughput_samples_per_s"]
    ]


def _scaling(records: Iterable[Mapping[str, Any]]) -> Scaling | None:
    batches = [r["batch"] for r in records]
    if len({b["global_batch"] for b in batches}) == 1:
        return "strong"
    return "weak" if len({b["per_worker_batch"] for b in batches}) == 1 else None


def _nodes(record: Mapping[str, Any]) -> int | None:
    names = {_node(w["provenance"]) for w in record["workers"]}
    return None if None in names or not names else len(names)


def _node(provenance: Mapping[str, Any]) -> str | None:
    """Return a worker's node: SLURM's name of it, else the host's."""
    named = (provenance.get("slurm") or {}).get("SLURMD_NODENAME")
    return named or (provenance.get("host") or {}).get("name")


def cores_of_node(record: Mapping[str, Any]) -> float | None:
    """Cores of the first worker's node, as far as its processes may use them.

    None: not recorded.
    """
    if not record["workers"]:
        return None
    host = record["workers"][0]["provenance"].get("host") or {}
    return host.get("cpu_quota_cores") or host.get("cores_logical")


def _gpu(record: Mapping[str, Any]) -> str:
    gpu = record["workers"][0]["provenance"].get("gpu") if record["workers"] else None
    return (gpu or {}).get("name") or ""


@dataclass(frozen=True)
class OnLinks:
    """A strategy's steps on measured links. `slowed`: each as much slower as it was off its fit.

    `queue`: of a strategy with servers, by workers and seconds of computing. `host_s`: in which the host
    issues a step, on any count; 0: not known.
    """

    replayed: Replayed
    slowed: Replayed
    levels: frozenset[str]
    queue: Callable[[int, float], ServerQueue] | None = None
    host_s: float = 0.0


def on_measured_links(
    at: Callable[[int], Subject],
    evidence: ProjectionInputs,
    device: Device,
    path: Path,
    nodes_of: Callable[[int], int],
) -> OnLinks | None:
    """Return the replay of a strategy's step on any count, or None without `links.csv`.

    None, too, for a strategy that does not exchange in every step. Raises ValueError for an invalid file, and
    Unmeasured (also on a call) for a link that is not in it.

    Args:
        at: Returns the strategy's cell on a number of workers.
        evidence: Measurements of the strategy.
        device: The device.
        path: The file links.csv.
        nodes_of: Returns the number of nodes of a count.
    """
    if not path.exists():
        return None
    last = evidence.points[-1]
    subject = at(last.workers)
    if subject.served:
        return _on_servers(at, subject, evidence, path, nodes_of)
    if subject.exchanging_share < 1:
        return None
    links = read_links(path, "nccl" if subject.request.on_cuda else "gloo")
    slowest = _slowest(evidence.stragglers)

    @cache
    def scheduled(request: Request, samples: int) -> Schedule:
        from stratbench.extensions.projection.traced import traced_schedule  # imports PyTorch

        return traced_schedule(request, samples, device)

    def replayed(workers: int, compute_s: float, spreads: float = 0.0) -> float:
        subject_there = at(workers)
        samples = subject_there.samples_per_step
        layout = LinkLayout(workers, nodes_of(workers))

        def seconds(call: CollectiveCall) -> float:
            log_sd = max((link.log_sd for link in links.of(call.kind).values()), default=0.0)
            return links.chosen(call, layout, samples)[0] * math.exp(spreads * log_sd)

        slowest_s = compute_s * slowest(workers, spreads)
        return replay(scheduled(subject_there.request, samples), slowest_s, seconds, links.kappa)

    host_s = evidence.host_s or 0.0
    if host_s:
        schedule = scheduled(subject.request, subject.samples_per_step)
        if not is_unhindered(schedule.operations, host_s, last.step_s):
            host_s = 0.0
    return OnLinks(
        replayed,
        partial(replayed, spreads=1.0),
        frozenset(level for kind in links.measured.values() for level in kind),
        # Each measured step was issued, too.
        host_s=min(host_s, *(p.step_s for p in evidence.points)),
    )


def _slowest(stragglers: Stragglers | None) -> Callable[[int, float], float]:
    """Return the factor of the slowest worker's computation over the mean, shifted by some spreads."""
    if stragglers is None:
        return lambda workers, spreads: 1.0
    return cache(stragglers.slowest)


def _on_servers(
    at: Callable[[int], Subject],
    subject: Subject,
    evidence: ProjectionInputs,
    path: Path,
    nodes_of: Callable[[int], int],
) -> OnLinks | None:
    """Return the replay by a queue at the servers, which have equal parts of the weights.

    Workers access them concurrently. None if the number of parameters is not recorded. A call raises
    Unmeasured for workers of several nodes.
    """
    parameters = evidence.parameters
    if not parameters:
        return None
    transport = subject.settings.options["transport"]
    links = read_links(path, f"servers-{'shm' if transport == 'auto' else transport}")
    link = links.of("push_pull")["within"]
    slowest = _slowest(evidence.stragglers)

    @cache
    def demand_s(workers: int) -> float:
        there = at(workers)  # colocated servers are as many as the workers
        part_bytes = 4 * parameters / there.settings.options["servers"]
        links.check_size("push_pull", part_bytes)
        return there.steps_per_batch * part_bytes / link.bytes_per_s

    def queue(workers: int, compute_s: float, slower: float = 1.0) -> ServerQueue:
        # The latency passes for all workers side by side, as in `served`, to which it was fitted.
        latency_s = at(workers).steps_per_batch * link.alpha_s
        return ServerQueue(compute_s + slower * latency_s, (slower * demand_s(workers),))

    @cache
    def waits(workers: int) -> bool:
        settings = at(workers).settings
        return traits_of(settings.strategy, settings.options, workers).waits_for_slowest

    def replayed(workers: int, compute_s: float, spreads: float = 0.0) -> float:
        if nodes_of(workers) > 1:
            raise Unmeasured("push and pull between nodes is not measured")
        slower = math.exp(spreads * link.log_sd)
        if waits(workers):
            each_s = compute_s * slowest(workers, spreads)
            return synchronous(queue(workers, each_s, slower), workers)
        return asynchronous(queue(workers, compute_s, slower), workers)

    return OnLinks(
        replayed,
        partial(replayed, spreads=1.0),
        frozenset({"within"}),
        queue,
    )

"""The projection of a study's strategy to other counts: from its records, and links if measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.text.progress import progress_bar
from stratbench.extensions.plan.device_rates import Device, cpu_device, gpu_device, named_gpus
from stratbench.extensions.plan.duration import ProjectedDuration, Span
from stratbench.extensions.plan.needs import Subject, subject_of
from stratbench.extensions.projection.evidence import (
    OnLinks,
    ProjectionInputs,
    cores_of_node,
    evidence_of,
    on_measured_links,
)
from stratbench.extensions.projection.limits import MAX_TIMES
from stratbench.extensions.projection.links import Unmeasured
from stratbench.extensions.projection.project import (
    Projection,
    basis_of,
    computing_at,
    computing_of,
    project,
)
from stratbench.extensions.projection.servers import ServerQueue
from stratbench.study.config.config import Study
from stratbench.study.resources import node_count


def projections_of(
    config: Mapping[str, Any], study: Study, evidence: ProjectionInputs, counts: Sequence[int]
) -> list[Projection]:
    """Return the projections of a strategy, in ascending order of worker counts.

    Args:
        config: The validated config.
        study: The study.
        evidence: Measurements of the strategy.
        counts: Worker counts.
    """

    @cache
    def at(workers: int) -> Subject:
        return subject_at(config, study, evidence, workers)

    last = at(evidence.points[-1].workers)
    nodes = {p.workers: p.nodes for p in evidence.points if p.nodes is not None}

    def nodes_of(workers: int) -> int:
        cell = replace(evidence.last, gpus=workers)
        return nodes.get(workers) or node_count(cell, config["cluster"])

    points = [replace(p, nodes=nodes_of(p.workers)) for p in evidence.points]
    places = [(n, nodes_of(n)) for n in counts]
    device = device_of(config, last)

    @cache
    def unsuited(workers: int) -> str | None:
        return why_unsuited(config, study, evidence, workers)

    on, queue, able = _on_links(config, study, evidence, at, device, counts, nodes_of)
    links = (on.replayed, on.slowed, on.levels, queue) if on else ()
    reach, host_s = evidence.repeats_reach, on.host_s if on else 0.0
    projected = partial(
        project,
        points,
        evidence.scaling,
        unsuited=unsuited,
        repeats_reach=reach,
        served=last.served,
    )
    made = [
        *projected([p for p in places if p[0] in able], *links, host_s=host_s),
        # Without a replay, of which those that are too far would take minutes to be refused.
        *projected([p for p in places if p[0] not in able]),
    ]
    return sorted(made, key=lambda p: p.workers)


def projected_trainings(
    config: Mapping[str, Any], study: Study, records: Mapping[Cell, Mapping[str, Any]]
) -> dict[Cell, ProjectedDuration]:
    """Return the trainings projected from records, on counts of the study and beyond: first repeats.

    Args:
        config: The validated config.
        study: The study.
        records: Its records.
    """
    trainings = {}
    for evidence in each_shown(evidence_of(records)):
        if evidence.unfit:
            continue
        measured = {p.workers for p in evidence.points}
        of_study = {
            c.gpus
            for c in study.cells
            if replace(c, gpus=0, repeat=0) == replace(evidence.last, gpus=0, repeat=0)
        }
        largest = max(measured)
        counts = sorted({*of_study, *counts_after(largest, MAX_TIMES * largest)} - measured)
        for p in projections_of(config, study, evidence, counts):
            if p.interval is not None:
                cell = replace(evidence.last, gpus=p.workers, repeat=0)
                subject = subject_of(config, study, cell)
                low_s, high_s = (s * subject.steps for s in (p.interval.low_s, p.interval.high_s))
                source = f"projected, 80 %: {basis_of(p, evidence.points)}"
                trainings[cell] = ProjectedDuration(
                    Span(low_s, high_s, source), subject.settings.global_batch
                )
    return trainings


def each_shown(evidences: Sequence[ProjectionInputs]) -> Iterator[ProjectionInputs]:
    """Yield each of them, with a progress bar, since a trace takes seconds."""
    with progress_bar(len(evidences), " strategies", "projected") as bar:
        for evidence in evidences:
            yield evidence
            bar.update(1)


def subject_at(
    config: Mapping[str, Any], study: Study, evidence: ProjectionInputs, workers: int
) -> Subject:
    """Return the strategy's cell on a number of workers.

    Args:
        config: The validated config.
        study: The study.
        evidence: Measurements of the strategy.
        workers: Worker count.
    """
    return subject_of(config, study, replace(evidence.last, gpus=workers))


def counts_after(largest: int, max_count: int) -> list[int]:
    """Doublings of the largest measured count, up to `max_count`."""
    return [largest << k for k in range(1, 1 + max(0, int(math.log2(max_count / largest))))]


def device_of(config: Mapping[str, Any], subject: Subject) -> Device:
    cluster = config["cluster"]
    if subject.request.on_cuda:
        return gpu_device(named_gpus(cluster)[0], subject.settings.precision, cluster)
    return cpu_device(cluster, subject.cell.gpus)


def why_unsuited(
    config: Mapping[str, Any], study: Study, evidence: ProjectionInputs, workers: int
) -> str | None:
    """Return why a strategy's cell on so many workers could not be trained, or would be useless.

    Otherwise, return None.

    Args:
        config: The validated config.
        study: The study.
        evidence: Measurements of the strategy.
        workers: Worker count.
    """
    if reason := study.why_refused(config, replace(evidence.last, gpus=workers)):
        return reason
    cores = cores_of_node(evidence.records[-1][0]) if evidence.on_cpu else None
    here = min(workers, config["cluster"]["gpus_per_node"])
    if cores is not None and here > cores:
        return (
            f"{here} CPU processes of a node would share its {cores:g} cores, and more of them are no more "
            "hardware"
        )
    return None


def _on_links(
    config: Mapping[str, Any],
    study: Study,
    evidence: ProjectionInputs,
    at: Callable[[int], Subject],
    device: Device,
    counts: Sequence[int],
    nodes_of: Callable[[int], int],
) -> tuple[OnLinks | None, Callable[[int], ServerQueue] | None, set[int]]:
    """Return the replay if all measured counts have measured links, and all counts that have them."""
    points, path = evidence.points, Path(config["results"]) / study.name / "links" / "links.csv"
    able: set[int] = set()
    try:
        on = on_measured_links(at, evidence, device, path, nodes_of)
        if on is None:
            return None, None, able
        for p in points:
            if computing_of(on.replayed, p.workers, p.step_s) == 0:
                print(
                    f"{evidence.strategy}: on the measured links its collectives alone would take "
                    f"longer than its whole step on {p.workers} workers did: measure links again on a quiet "
                    "machine; the counts alone are used"
                )
                return None, None, able
    except Unmeasured as error:
        print(f"{evidence.strategy}: {error}; the counts alone are used")
        return None, None, able
    for n in counts:
        suited = why_unsuited(config, study, evidence, n) is None
        if suited and n <= MAX_TIMES * points[-1].workers:
            with suppress(Unmeasured):
                on.replayed(n, 1.0)
                able.add(n)
    if on.queue is None:
        return on, None, able
    queue, computing = on.queue, computing_at(on.replayed, points, evidence.scaling)
    return on, lambda n: queue(n, computing(n)), able

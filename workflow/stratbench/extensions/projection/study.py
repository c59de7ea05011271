"""Projects a study's strategies to other worker counts, from records and measured links."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from stratbench.cell.coordinates import Cell
from stratbench.cell.text.progress import create_progress_bar
from stratbench.extensions.plan.device_rates import (
    Device,
    list_configured_gpus,
    make_cpu_device,
    make_gpu_device,
)
from stratbench.extensions.plan.duration import ProjectedDuration, Span
from stratbench.extensions.plan.needs import CellToPlan, make_cell_to_plan
from stratbench.extensions.projection.evidence import (
    LinkReplay,
    ProjectionInputs,
    gather_projection_inputs,
    make_link_replay,
    read_node_cores,
)
from stratbench.extensions.projection.limits import MAX_COUNT_RATIO
from stratbench.extensions.projection.links import Unmeasured
from stratbench.extensions.projection.project import (
    Projection,
    describe_projection_basis,
    fit_computation_s,
    project_step_times,
    solve_computation_s,
)
from stratbench.extensions.projection.servers import ServerQueue
from stratbench.study.config.config import Study
from stratbench.study.resources import count_nodes


def project_strategy(
    config: Mapping[str, Any], study: Study, evidence: ProjectionInputs, counts: Sequence[int]
) -> list[Projection]:
    """Return the projected step times of a strategy, in ascending order of worker counts.

    Args:
        config: The validated config.
        study: The study.
        evidence: Measurements of the strategy.
        counts: Worker counts to project to.
    """

    @cache
    def make_cell_at_count(workers: int) -> CellToPlan:
        """Make the projected cell with a number of workers."""
        return make_cell_to_project(config, study, evidence, workers)

    last = make_cell_at_count(evidence.measured_steps[-1].workers)
    nodes = {p.workers: p.nodes for p in evidence.measured_steps if p.nodes is not None}

    def count_nodes_at(workers: int) -> int:
        cell = replace(evidence.largest_measured_cell, gpus=workers)
        return nodes.get(workers) or count_nodes(cell, config["cluster"])

    points = [replace(p, nodes=count_nodes_at(p.workers)) for p in evidence.measured_steps]
    places = [(n, count_nodes_at(n)) for n in counts]
    device = make_device_of_cell(config, last)

    @cache
    def find_untrainable_reason(workers: int) -> str | None:
        return find_untrainable_cell_reason(config, study, evidence, workers)

    on, make_queue, replayable = _find_link_replay(
        config, study, evidence, make_cell_at_count, device, counts, count_nodes_at
    )
    links = (
        (on.replay_step_s, on.replay_step_on_slower_links_s, on.measured_link_levels, make_queue)
        if on
        else ()
    )
    host_issue_s = on.host_issue_s if on else 0.0
    projected = partial(
        project_step_times,
        points,
        evidence.scaling,
        find_untrainable_reason=find_untrainable_reason,
        repeat_half_width_ln=evidence.repeat_interval_half_width_ln,
        has_servers=last.served,
    )
    made = [
        *projected([p for p in places if p[0] in replayable], *links, host_issue_s=host_issue_s),
        # Without a replay: links that these counts need were not measured, or the replay would take minutes.
        *projected([p for p in places if p[0] not in replayable]),
    ]
    return sorted(made, key=lambda p: p.workers)


def project_training_durations(
    config: Mapping[str, Any], study: Study, records: Mapping[Cell, Mapping[str, Any]]
) -> dict[Cell, ProjectedDuration]:
    """Return the projected durations of trainings, by cell, on unmeasured worker counts.

    Worker counts are those of the study, and doublings of the largest measured one. Cells are first repeats.

    Args:
        config: The validated config.
        study: The study.
        records: The records of the study.
    """
    trainings = {}
    for evidence in iter_inputs_with_progress(gather_projection_inputs(records)):
        if evidence.cannot_project_reason:
            continue
        measured = {p.workers for p in evidence.measured_steps}
        of_study = {
            c.gpus
            for c in study.cells
            if replace(c, gpus=0, repeat=0)
            == replace(evidence.largest_measured_cell, gpus=0, repeat=0)
        }
        largest = max(measured)
        counts = sorted(
            {*of_study, *list_doubled_worker_counts(largest, MAX_COUNT_RATIO * largest)} - measured
        )
        for p in project_strategy(config, study, evidence, counts):
            if p.interval is not None:
                cell = replace(evidence.largest_measured_cell, gpus=p.workers, repeat=0)
                planned_cell = make_cell_to_plan(config, study, cell)
                low_s, high_s = (
                    s * planned_cell.steps for s in (p.interval.low_s, p.interval.high_s)
                )
                source = f"projected, 80 %: {describe_projection_basis(p, evidence.measured_steps)}"
                trainings[cell] = ProjectedDuration(
                    Span(low_s, high_s, source), planned_cell.settings.global_batch
                )
    return trainings


def iter_inputs_with_progress(evidences: Sequence[ProjectionInputs]) -> Iterator[ProjectionInputs]:
    """Yield each strategy's measurements, and show a progress bar."""
    with create_progress_bar(len(evidences), " strategies", "projected") as bar:
        for evidence in evidences:
            yield evidence
            bar.update(1)


def make_cell_to_project(
    config: Mapping[str, Any], study: Study, evidence: ProjectionInputs, workers: int
) -> CellToPlan:
    """Return a strategy's cell on a number of workers, as the plan needs it.

    Args:
        config: The validated config.
        study: The study.
        evidence: Measurements of the strategy.
        workers: Number of workers.
    """
    return make_cell_to_plan(config, study, replace(evidence.largest_measured_cell, gpus=workers))


def list_doubled_worker_counts(largest_measured: int, max_count: int) -> list[int]:
    """Return 2, 4, 8 ... times the largest measured worker count, up to `max_count`."""
    num_doublings = max(0, int(math.log2(max_count / largest_measured)))
    return [largest_measured << k for k in range(1, 1 + num_doublings)]


def make_device_of_cell(config: Mapping[str, Any], planned_cell: CellToPlan) -> Device:
    cluster = config["cluster"]
    if planned_cell.request.is_on_cuda:
        return make_gpu_device(
            list_configured_gpus(cluster)[0], planned_cell.settings.precision, cluster
        )
    return make_cpu_device(cluster, planned_cell.cell.gpus)


def find_untrainable_cell_reason(
    config: Mapping[str, Any], study: Study, evidence: ProjectionInputs, workers: int
) -> str | None:
    """Return why a strategy's cell cannot train on a number of workers. None if it can.

    Args:
        config: The validated config.
        study: The study.
        evidence: Measurements of the strategy.
        workers: Number of workers.

    Returns:
        The reason, or None if the cell can train.
    """
    if reason := study.explain_cell_refusal(
        config, replace(evidence.largest_measured_cell, gpus=workers)
    ):
        return reason
    cores = (
        read_node_cores(evidence.records_per_worker_count[-1][0]) if evidence.is_on_cpu else None
    )
    here = min(workers, config["cluster"]["gpus_per_node"])
    if cores is not None and here > cores:
        return f"{here} CPU processes per node would share its {cores:g} cores, which makes no step faster"
    return None


class UsableReplay(NamedTuple):
    """Replay of a strategy's steps on measured links, and where it can be used.

    Attributes:
        replay: The replay; None if a measured worker count needs links that were not measured.
        make_queue: Returns the queue of the parameter servers for a worker count; None without servers.
        replayable_counts: Worker counts to project to that need only measured links.
    """

    replay: LinkReplay | None
    make_queue: Callable[[int], ServerQueue] | None
    replayable_counts: set[int]


def _find_link_replay(
    config: Mapping[str, Any],
    study: Study,
    evidence: ProjectionInputs,
    make_cell_at_count: Callable[[int], CellToPlan],
    device: Device,
    counts: Sequence[int],
    count_nodes_at: Callable[[int], int],
) -> UsableReplay:
    """Return the replay of a strategy's steps on measured links, and its usable counts.

    The replay simulates a step on another number of workers, with the measured latency and bandwidth of the
    links.
    """
    points, path = (
        evidence.measured_steps,
        Path(config["results"]) / study.name / "links" / "links.csv",
    )
    replayable: set[int] = set()
    try:
        on = make_link_replay(make_cell_at_count, evidence, device, path, count_nodes_at)
        if on is None:
            return UsableReplay(None, None, replayable)
        for p in points:
            if solve_computation_s(on.replay_step_s, p.workers, p.step_s) == 0:
                print(
                    f"{evidence.strategy}: on the measured links its collectives alone would take longer "
                    f"than its measured step on {p.workers} workers; only the measured counts are used. "
                    "Measure links again on an idle machine"
                )
                return UsableReplay(None, None, replayable)
    except Unmeasured as error:
        print(f"{evidence.strategy}: {error}; only the measured counts are used")
        return UsableReplay(None, None, replayable)
    for n in counts:
        suited = find_untrainable_cell_reason(config, study, evidence, n) is None
        if suited and n <= MAX_COUNT_RATIO * points[-1].workers:
            with suppress(Unmeasured):
                on.replay_step_s(n, 1.0)
                replayable.add(n)
    if on.make_server_queue is None:
        return UsableReplay(on, None, replayable)
    queue, computing = (
        on.make_server_queue,
        fit_computation_s(on.replay_step_s, points, evidence.scaling),
    )
    return UsableReplay(on, lambda n: queue(n, computing(n)), replayable)

"""Makes the plan of a study: for each cell its state, memory, time, cost and request to the scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratbench.cell import record, software_gpu
from stratbench.cell.coordinates import Cell
from stratbench.cell.text.words import GIB, MIB
from stratbench.plan import duration
from stratbench.plan.device_rates import Device, cpu_device, fits, gpu_device, named_gpus
from stratbench.plan.duration import Span, Work
from stratbench.plan.footprint.cache import footprints_of
from stratbench.plan.footprint.footprint import Footprint, MemoryPeak
from stratbench.plan.footprint.request import Request
from stratbench.plan.needs import (
    Subject,
    data_bytes_of,
    host_bytes_of,
    link_bytes_of,
    peak_with_data,
    sent_bytes,
    server_bytes_of,
    snapshot_bytes_of,
    subject_of,
    work_of,
)
from stratbench.study import resources
from stratbench.study.config.config import Study
from stratbench.study.slurm import nodes, sharing
from stratbench.telemetry.machine.hardware import Datasheet


@dataclass(frozen=True)
class DeviceFit:
    """How a cell would run on one device. `cut_off` by the time limit: `no`, `possible` or `certain`."""

    device: str
    fits: bool
    largest_batch: int
    by_device: Span | None  # the training by what the device can do
    train: Span | None  # the same, or by records where there are any
    total: Span | None
    cut_off: str
    link_s: tuple[float, float]  # of a step's communication, at best and at worst


class Refusal(str):
    """Why a cell is not planned: it cannot be trained."""


@dataclass(frozen=True)
class Planned:
    """One cell's part of the plan. `footprint` is None if it could not be predicted; `why` says why."""

    subject: Subject
    state: str  # done, recorded, failed, refused, infeasible, to do
    why: str
    footprint: Footprint | None
    peak: MemoryPeak | None  # of training, data set included
    needed_bytes: int  # with warm-up and evaluation
    wire_bytes: float  # sent by a rank in a step
    collectives: int
    link_bytes: float  # a global batch, over the busiest link between nodes of servers and workers
    server_bytes: int  # memory of a server process
    host_bytes: int  # memory of a node's processes, as far as known
    snapshot_bytes: int  # disk, until they are evaluated
    fit: DeviceFit | None  # on the plan's device, or the CPU for a cell that trains there
    fits_on: dict[str, DeviceFit]  # by device
    asked: resources.JobRequest

    @property
    def cell(self) -> Cell:
        return self.subject.cell


@dataclass(frozen=True)
class Plan:
    """The plan of a study for `device`. `others`: devices that it is compared with."""

    study: str
    cluster: Mapping[str, Any]
    device: str
    #: That a GPU holds at once, on which the buffers of sums depend; footprints on CPUs have none.
    resident_threads: int
    gpu: str | None  # as the config or the command line names it; None: chosen for comparison
    others: list[str]
    cells: list[Planned]
    #: What a worker may use of the device's memory, the margin taken off.
    room_bytes: float
    #: On SLURM, for the cells without a record.
    jobs: int
    #: Why no node of the cluster can hold a cell, in words; empty without SLURM.
    unheld: list[str]
    #: FSDP with and without resharding: (experiment, model, gpus) -> option -> footprint.
    resharding: dict[tuple[str, str, int], dict[str, Footprint]]

    @property
    def named(self) -> bool:
        """Whether `device` is what the cells will run on, as far as the config says."""
        return self.gpu is not None or self.device == "CPU"


def make_plan(
    config: Mapping[str, Any],
    study: Study,
    gpu: str | None = None,
    partition: str | None = "*",
    refused: Mapping[Cell, str] | None = None,
) -> Plan:
    """The plan of a study. Missing footprints are made first, which takes minutes.

    `gpu` replaces `cluster.gpu`. `partition`: of SLURM, where cells will run (several: `a,b`; None:
    the default one; `*`: any). `refused`: cells that cannot be trained, and why; they are not planned.
    """
    refused = refused or {}
    cluster = config["cluster"]
    named = gpu or cluster["gpu"]
    gpus = named_gpus({**cluster, "gpu": named})
    primary = gpus[0] if named else gpus[-1]
    subjects = [subject_of(config, study, cell) for cell in study.cells]
    twins = {
        s.cell: _other_resharding(s.request)
        for s in subjects
        if s.request.may_reshard
        and s.cell.gpus == max(study.experiments[s.cell.experiment].matrix["gpus"])
    }
    for cell in refused:
        twins.pop(cell, None)
    wanted = [*(s.request for s in subjects if s.cell not in refused), *twins.values()]
    made = footprints_of(wanted, Path(config["results"]) / "plan-cache")
    records = records_by_cell(study, config["results"])
    planned = [
        _plan_cell(
            s,
            Refusal(refused[s.cell]) if s.cell in refused else made[s.request],
            records,
            gpus,
            primary,
            cluster,
            config["results"],
        )
        for s in subjects
    ]
    on_gpu = any(s.request.on_cuda for s in subjects)
    offered = nodes.cluster_nodes()
    return Plan(
        study=study.name,
        cluster=cluster,
        device=primary.name if on_gpu else "CPU",
        resident_threads=primary.resident_threads,
        gpu=named,
        others=_others(subjects, gpus, primary),
        cells=planned,
        room_bytes=(
            gpu_device(primary, "fp32", cluster) if on_gpu else cpu_device(cluster, 1)
        ).memory_bytes
        / (1 + cluster["memory_margin"]),
        jobs=sharing.count_jobs(
            {
                c.cell: c.asked
                for c in planned
                if c.cell not in records
                and not (cluster["skip_infeasible"] and c.state == "infeasible")
            },
            cluster["cells_per_job"],
            offered,
            partition,
        ),
        unheld=_unheld(planned, nodes.nodes_of_partition(offered, partition)),
        resharding=_resharding(subjects, twins, made),
    )


def _unheld(planned: list[Planned], offered: list[nodes.Node]) -> list[str]:
    """Why no node can hold cells that are still to be trained."""
    refusals = {
        c.cell: refusal
        for c in planned
        if c.state not in ("done", "recorded")
        and (refusal := nodes.refusal(c.cell, c.subject.settings, c.asked, offered))
    }
    return nodes.lines_of_refusals(refusals)


def _others(subjects: list[Subject], gpus: list[Datasheet], primary: Datasheet) -> list[str]:
    """The devices beside the plan's that some cell is judged on."""
    if not any(s.request.on_cuda for s in subjects):
        return []
    on_cpu = any(not s.request.on_cuda for s in subjects)
    return [g.name for g in gpus if g is not primary] + ["CPU"] * on_cpu


def records_by_cell(study: Study, results: str) -> dict[Cell, dict[str, Any]]:
    """The study's valid records by cell."""
    found = {}
    for cell in study.cells:
        path = cell.record_path(results)
        if os.path.lexists(path):
            try:
                found[cell] = record.read(path)
            except record.RecordError as error:
                print(f"left out: {error}")
    return found


def _plan_cell(
    s: Subject,
    made: Footprint | str,
    records: Mapping[Cell, Mapping[str, Any]],
    gpus: list[Datasheet],
    primary: Datasheet,
    cluster: Mapping[str, Any],
    results: str,
) -> Planned:
    footprint = made if isinstance(made, Footprint) else None
    peak, needed_bytes, wire, server_bytes = None, 0, 0.0, 0
    host_bytes, n_nodes = 0, resources.node_count(s.cell, cluster)
    fits_on: dict[str, DeviceFit] = {}
    if footprint is not None:
        threads = primary.resident_threads
        footprint = footprint.fullest(s.samples_per_step, threads)
        peak = peak_with_data(footprint.training_peak(s.samples_per_step, threads), s)
        needed_bytes = footprint.needed_bytes(s.samples_per_step, threads) + data_bytes_of(s)
        wire = sent_bytes(s, footprint)
        server_bytes = server_bytes_of(s, footprint, n_nodes)
        host_bytes = host_bytes_of(s, footprint, needed_bytes, server_bytes, n_nodes)
        work = work_of(s, footprint, wire, n_nodes)
        devices = (
            {g.name: gpu_device(g, s.settings.precision, cluster) for g in gpus}
            if s.request.on_cuda
            else {"CPU": cpu_device(cluster, s.cell.gpus)}
        )
        timed = [r for r in records.values() if not software_gpu.trained(r)]
        span = duration.span_by_records(s.cell, timed)
        for name, device in devices.items():
            measured = span if name in (primary.name, "CPU") else None
            fits_on[name] = _fit(s, footprint, work, device, measured, cluster)
    fit = fits_on.get(primary.name if s.request.on_cuda else "CPU")
    state, why = _state(s, made, records.get(s.cell), fit, needed_bytes, results)
    return Planned(
        subject=s,
        state=state,
        why=why,
        footprint=footprint,
        peak=peak,
        needed_bytes=needed_bytes,
        wire_bytes=wire,
        collectives=len(footprint.collectives) if footprint else 0,
        link_bytes=link_bytes_of(s, footprint, n_nodes) if footprint is not None else 0.0,
        server_bytes=server_bytes,
        host_bytes=host_bytes,
        snapshot_bytes=snapshot_bytes_of(s, footprint) if footprint is not None else 0,
        fit=fit,
        fits_on=fits_on,
        asked=resources.job_request(
            s.cell,
            s.settings,
            cluster,
            s.time_limit_s,
            -(-host_bytes // MIB),
            longest_time_s(fit),
        ),
    )


def _fit(
    s: Subject,
    footprint: Footprint,
    work: Work,
    device: Device,
    measured: Span | None,
    cluster: Mapping[str, Any],
) -> DeviceFit:
    margin = cluster["memory_margin"]
    fullest = footprint.fullest(s.samples_per_step, device.resident_threads)
    needed_bytes = fullest.needed_bytes(s.samples_per_step, device.resident_threads)
    needed_bytes += data_bytes_of(s)
    available_bytes = device.memory_bytes / (1 + margin) - data_bytes_of(s)
    by_device = duration.span_by_device(work, device)
    train = measured or by_device
    total = None if train is None else train + duration.overhead_span(work, device)
    cut_off = "no"
    if total is not None and s.time_limit_s is not None and total.high_s > s.time_limit_s:
        cut_off = "certain" if total.low_s > s.time_limit_s else "possible"
    return DeviceFit(
        device=device.name,
        fits=fits(needed_bytes, device, margin),
        largest_batch=s.steps_per_batch
        * footprint.largest_batch(available_bytes, device.resident_threads),
        by_device=by_device,
        train=train,
        total=total,
        cut_off=cut_off,
        link_s=(
            duration.communication_s(work, device, 0),
            duration.communication_s(work, device, 1),
        ),
    )


def _state(
    s: Subject,
    made: Footprint | str,
    found: Mapping[str, Any] | None,
    fit: DeviceFit | None,
    needed_bytes: int,
    results: str,
) -> tuple[str, str]:
    """The state of a cell and why it is so."""
    if found is not None:
        if software_gpu.trained(found):
            return "recorded", f"unusable: {software_gpu.WHY}"
        if found["status"] == "ok":
            return "done", ""
        if found["status"] == "refused":
            return "refused", found["reason"]
        return "recorded", f"{found['status']}: {found['reason']}"
    if isinstance(made, Refusal):
        return "refused", str(made)
    failed = record.failure_reason(s.cell.log_dir(results))
    if failed is not None:
        return "failed", failed
    if isinstance(made, str):
        return "to do", f"could not be predicted: {made}"
    if fit is not None and not fit.fits:
        return "infeasible", f"needs {needed_bytes / GIB:.1f} GiB{_share_of_data(s, needed_bytes)}"
    return "to do", ""


def _share_of_data(s: Subject, needed_bytes: int) -> str:
    """What keeps the data off the device, where they are a tenth or more of what a cell needs there."""
    n_bytes = data_bytes_of(s)
    if s.settings.placement == "host" or not s.request.on_cuda or n_bytes < needed_bytes / 10:
        return ""
    return f", {n_bytes / GIB:.1f} of it for the data (placement: host keeps them in host memory)"


def longest_time_s(fit: DeviceFit | None) -> int | None:
    """The longest time that a cell is expected to take, in whole seconds; None if not known."""
    return None if fit is None or fit.total is None else round(fit.total.high_s)


def _other_resharding(request: Request) -> Request:
    """The same with the other choice of `reshard_after_forward`."""
    other = {"always": "never", "never": "always"}[request.options["reshard_after_forward"]]
    return request.with_options(reshard_after_forward=other)


def _resharding(
    subjects: list[Subject],
    twins: Mapping[Cell, Request],
    made: Mapping[Request, Footprint | str],
) -> dict[tuple[str, str, int], dict[str, Footprint]]:
    found: dict[tuple[str, str, int], dict[str, Footprint]] = {}
    for s in subjects:
        if s.cell not in twins:
            continue
        for request in (s.request, twins[s.cell]):
            footprint = made[request]
            if isinstance(footprint, Footprint):
                key = (s.cell.experiment, s.cell.model, s.cell.gpus)
                choice = dict(request.options)["reshard_after_forward"]
                found.setdefault(key, {})[choice] = footprint
    return found

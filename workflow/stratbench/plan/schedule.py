"""Makes the plan of a study: for each cell its state, memory, time, cost and request to the scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stratbench.cell import record, software_gpu
from stratbench.cell.coordinates import Cell
from stratbench.cell.text.words import GIB, MIB, seconds_text
from stratbench.plan.check import Checked, Network, other_resharding, resharded
from stratbench.plan.device_rates import Device, devices_of, named_gpus
from stratbench.plan.duration import Projected, Span, Step, span_by_records, times_on
from stratbench.plan.footprint.footprint import Footprint, MemoryPeak
from stratbench.plan.footprint.traffic import PARTS
from stratbench.plan.needs import Needs, Subject, data_bytes_of, needs_of
from stratbench.strategies import acceptance
from stratbench.study import resources
from stratbench.study.config.config import Study
from stratbench.study.slurm import nodes, sharing

Records = Mapping[Cell, Mapping[str, Any]]


@dataclass(frozen=True)
class DeviceFit:
    """How a cell would run on one device. `cut_off` by the time limit: `no`, `possible` or `certain`.

    The times, and what follows from them, are None where the device's rates are not known; the cost also
    where no price is.
    """

    device: str
    peak: MemoryPeak  # of training, data set included
    needed_bytes: int  # with warm-up and evaluation
    fits: bool
    largest_batch: int
    by_device: Span | None  # the training by what the device can do
    train: Span | None  # the same, or by records where there are any
    total: Span | None
    gpu_hours: tuple[float, float] | None
    cost: tuple[float, float] | None
    cut_off: str
    link_s: tuple[float, float]  # of a step's communication, at best and at worst
    steps: tuple[Step, Step] | None  # at best and at worst
    link_bytes_per_s: float  # of the slowest link between its workers


@dataclass(frozen=True)
class Planned:
    """One cell's part of the plan. Without a footprint nothing is known of it; `why` says why.

    `least_samples`: that a worker must compute on at once.
    """

    subject: Subject
    state: str  # done, recorded, failed, refused, infeasible, to do
    why: str
    footprint: Footprint | None
    needs: Needs | None
    fits_on: dict[str, DeviceFit]  # by device, the plan's own first; of a cell on CPUs only the CPU
    asked: resources.JobRequest
    least_samples: int

    @property
    def cell(self) -> Cell:
        return self.subject.cell

    @property
    def fit(self) -> DeviceFit | None:
        """On the plan's device, or the CPU for a cell that trains there."""
        return next(iter(self.fits_on.values()), None)


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
    #: Trainings that the records were projected to: of the study's cells (first repeats), and beyond them.
    projected: Mapping[Cell, Projected]
    #: FSDP with and without resharding: (experiment, model, gpus) -> option -> footprint.
    resharding: dict[tuple[str, str, int], dict[str, Footprint]]

    @property
    def named(self) -> bool:
        """Whether `device` is what the cells will run on, as far as the config says."""
        return self.gpu is not None or self.device == "CPU"


def make_plan(
    config: Mapping[str, Any],
    checked: Checked,
    records: Records,
    gpu: str | None = None,
    partition: str | None = "*",
    projected: Mapping[Cell, Projected] | None = None,
) -> Plan:
    """The plan of a study that was checked and has these records.

    `gpu` replaces `cluster.gpu`. `partition`: of SLURM, where cells will run (several: `a,b`; None:
    the default one; `*`: any). `projected`: the times of trainings that records were projected to.
    """
    cluster, projected = config["cluster"], projected or {}
    named = gpu or cluster["gpu"]
    gpus = named_gpus({**cluster, "gpu": named})
    if not named:
        gpus = gpus[-1:] + gpus[:-1]
    offered = nodes.cluster_nodes()
    timed = [r for r in records.values() if not software_gpu.trained(r)]
    cells = []
    for s in checked.subjects:
        on_cuda, precision = s.request.on_cuda, s.settings.precision
        devices = devices_of(gpus, precision, on_cuda, s.cell.gpus, cluster)
        known = projected.get(replace(s.cell, repeat=0))
        span = known.span if known else span_by_records(s.cell, timed)
        record = records.get(s.cell)
        cells.append(_planned(s, checked, record, devices, span, cluster, config["results"]))
    on_gpu = any(s.request.on_cuda for s in checked.subjects)
    on_cpu = any(not s.request.on_cuda for s in checked.subjects)
    device, *_ = devices_of(gpus, "fp32", on_gpu, 1, cluster)
    skipped = ("infeasible",) if cluster["skip_infeasible"] else ()
    asked = {c.cell: c.asked for c in cells if c.cell not in records and c.state not in skipped}
    return Plan(
        study=checked.study.name,
        cluster=cluster,
        device=device.name,
        resident_threads=gpus[0].resident_threads,
        gpu=named,
        others=[g.name for g in gpus[1:]] + ["CPU"] * on_cpu if on_gpu else [],
        cells=cells,
        room_bytes=device.memory_bytes / (1 + cluster["memory_margin"]),
        jobs=sharing.count_jobs(asked, cluster["cells_per_job"], offered, partition),
        unheld=_unheld(cells, nodes.nodes_of_partition(offered, partition)),
        projected=projected,
        resharding=_resharding(checked),
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


def _planned(
    s: Subject,
    checked: Checked,
    record: Mapping[str, Any] | None,
    devices: list[Device],
    measured: Span | None,
    cluster: Mapping[str, Any],
    results: str,
) -> Planned:
    footprint = None if s.cell in checked.refused else checked.rehearsals[s.request].footprint
    needs, fits_on = None, {}
    if footprint is not None:
        footprint = footprint.fullest(s.samples_per_step, devices[0].resident_threads)
        needs = needs_of(s, footprint, resources.node_count(s.cell, s.settings, cluster))
        # Records are of the plan's own device.
        spans = [measured] + [None] * len(devices)
        fits_on = {
            device.name: _fit(s, footprint, needs, device, span, cluster)
            for device, span in zip(devices, spans, strict=False)
        }
    fit = next(iter(fits_on.values()), None)
    state, why = _state(s, checked, record, needs, fit, measured, results)
    return Planned(
        subject=s,
        state=state,
        why=why,
        footprint=footprint,
        needs=needs,
        fits_on=fits_on,
        asked=resources.job_request(
            s.cell,
            s.settings,
            cluster,
            s.time_limit_s,
            -(-needs.host_bytes // MIB) if needs else 0,
            longest_time_s(fit),
        ),
        least_samples=acceptance.least_samples(
            checked.networks[Network.of(s.request)].batchnorm, s.settings.accumulate
        ),
    )


def _fit(
    s: Subject,
    footprint: Footprint,
    needs: Needs,
    device: Device,
    measured: Span | None,
    cluster: Mapping[str, Any],
) -> DeviceFit:
    threads, data_bytes = device.resident_threads, needs.data_bytes
    fullest = footprint.fullest(s.samples_per_step, threads)
    peak = fullest.training_peak(s.samples_per_step, threads)
    needed_bytes = fullest.needed_bytes(s.samples_per_step, threads) + data_bytes
    # A margin is kept for what cannot be predicted.
    available_bytes = device.memory_bytes / (1 + cluster["memory_margin"])
    times = times_on(device, needs.work, measured)
    cut_off, gpu_hours, cost = "no", None, None
    if times.total is not None:
        low_s, high_s = times.total.low_s, times.total.high_s
        if s.time_limit_s is not None and high_s > s.time_limit_s:
            cut_off = "certain" if low_s > s.time_limit_s else "possible"
        gpu_hours = (low_s * s.cell.gpus / 3600, high_s * s.cell.gpus / 3600)
        price = cluster["price_per_gpu_hour"]
        if price is not None and device.is_gpu:
            cost = (gpu_hours[0] * price, gpu_hours[1] * price)
    return DeviceFit(
        device=device.name,
        peak=MemoryPeak(
            peak.n_bytes + data_bytes,
            peak.phase,
            dict.fromkeys(PARTS, 0) | peak.parts_bytes | {"data": data_bytes},
        ),
        needed_bytes=needed_bytes,
        fits=needed_bytes <= available_bytes,
        largest_batch=s.steps_per_batch
        * footprint.largest_batch(available_bytes, threads, partial(data_bytes_of, s)),
        by_device=times.by_device,
        train=times.train,
        total=times.total,
        gpu_hours=gpu_hours,
        cost=cost,
        cut_off=cut_off,
        link_s=times.link_s,
        steps=times.steps,
        link_bytes_per_s=device.link(needs.work.nodes),
    )


def _state(
    s: Subject,
    checked: Checked,
    found: Mapping[str, Any] | None,
    needs: Needs | None,
    fit: DeviceFit | None,
    measured: Span | None,
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
    if s.cell in checked.refused:
        return "refused", checked.refused[s.cell]
    failed = record.failure_reason(s.cell.log_dir(results))
    if failed is not None:
        return "failed", failed
    if fit is None:
        why = checked.rehearsals[s.request].unpredicted
        if s.request.by_command and measured is not None:
            span = seconds_text(measured.low_s), seconds_text(measured.high_s)
            why = f"{why}: {' to '.join(span)} by {measured.source}"
        return "to do", f"could not be predicted: {why}"
    if not fit.fits:
        return (
            "infeasible",
            f"needs {fit.needed_bytes / GIB:.1f} GiB{_share_of_data(s, needs, fit)}",
        )
    return "to do", ""


def _share_of_data(s: Subject, needs: Needs, fit: DeviceFit) -> str:
    """What keeps the data off the device, where they are a tenth or more of what a cell needs there."""
    n_bytes = needs.data_bytes
    if s.settings.placement == "host" or not s.request.on_cuda or n_bytes < fit.needed_bytes / 10:
        return ""
    return f", {n_bytes / GIB:.1f} of it for the data (placement: host keeps them in host memory)"


def longest_time_s(fit: DeviceFit | None) -> int | None:
    """The longest time that a cell is expected to take, in whole seconds; None if not known."""
    return None if fit is None or fit.total is None else round(fit.total.high_s)


def _resharding(checked: Checked) -> dict[tuple[str, str, int], dict[str, Footprint]]:
    """Footprints by choice, of what was followed: records beside their prediction need one choice alone."""
    found: dict[tuple[str, str, int], dict[str, Footprint]] = {}
    for s in resharded(checked.study, checked.subjects):
        for request in (s.request, other_resharding(s.request)):
            rehearsal = checked.rehearsals.get(request)
            footprint = rehearsal and rehearsal.footprint
            if s.cell not in checked.refused and footprint is not None:
                key = (s.cell.experiment, s.cell.model, s.cell.gpus)
                choice = dict(request.options)["reshard_after_forward"]
                found.setdefault(key, {})[choice] = footprint
    return found

"""Makes the plan of a study: each cell's state, memory, time and cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stratbench.cell import record
from stratbench.cell.coordinates import Cell
from stratbench.cell.text.words import format_bytes, format_count, format_seconds
from stratbench.extensions.plan.check import Network, StudyCheck
from stratbench.extensions.plan.device_rates import (
    Device,
    find_matching_datasheets,
    list_configured_gpus,
    make_cpu_device,
    make_gpu_device,
)
from stratbench.extensions.plan.duration import (
    BEST,
    USUAL,
    WORST,
    LowHigh,
    ProjectedDuration,
    Span,
    estimate_time_from_records,
    estimate_time_outside_steps,
    predict_step_duration,
)
from stratbench.extensions.plan.footprint.footprint import Footprint, MemoryPeak
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.plan.footprint.traffic import PARTS
from stratbench.extensions.plan.needs import (
    CellToPlan,
    Needs,
    compute_data_bytes_on_device,
    derive_needs,
)
from stratbench.extensions.plan.public_runs import estimate_time_from_public_runs
from stratbench.strategies import acceptance
from stratbench.study import resources
from stratbench.study.config.config import Study
from stratbench.study.slurm import nodes
from stratbench.telemetry.machine.hardware import find_datasheet

Records = Mapping[Cell, Mapping[str, Any]]

#: Verdicts on whether a cell fits a device. A tight cell fits only if no memory is kept in reserve.
FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"


@dataclass(frozen=True)
class DeviceFit:
    """Predicted memory, time and cost of a cell on one device.

    Times and values that follow from them are None if neither the device's rates nor records are known.
    Pairs are the values at best and at worst.
    """

    device: str
    peak: MemoryPeak  # peak of the training steps, including the data set
    stage_peaks_bytes: tuple[int, ...]  # peak of each pipeline stage; () without stages
    needed_bytes: int  # maximum bytes, also in warm-up and evaluation
    memory_verdict: str  # FITS, TIGHT or DOES_NOT_FIT
    largest_batch: int
    room_bytes: float  # largest predicted need that certainly fits, after reserve and margin
    #: Number of threads that the whole GPU can run at once; 0 on CPUs. Buffers of reductions depend on it.
    resident_threads: int
    sending_s: LowHigh  # seconds of communication per step, at best and at worst
    device_rate_span: Span | None  # time of training, from the device's rates
    usual_s: float | None  # one time of training in seconds, to compare cells by
    train_span: Span | None  # time of training, from records or else from the device's rates
    total_span: Span | None  # time of the whole cell, with start-up and evaluations
    time_limit_verdict: str  # whether the time limit ends the cell: no, possible or certain
    gpu_hours: LowHigh | None
    cost: LowHigh | None

    @property
    def may_run(self) -> bool:
        """Whether the cell fits at least without the reserve and the margin."""
        return self.memory_verdict != DOES_NOT_FIT


@dataclass(frozen=True)
class PlannedCell:
    """The plan of one cell: what it needs, and predictions per device.

    Without a footprint nothing is predicted, and `reason` says why.

    Attributes:
        state: done, recorded, failed, unsupported, infeasible or to do.
        has_record: Whether the cell has any record, so that it is not trained again.
        fits_on: Prediction by device, the plan's own device first; only the CPU for a cell on CPUs.
        job_request: Request to the scheduler.
        min_samples_per_worker: Minimum number of samples that a worker must compute at once.
    """

    subject: CellToPlan
    state: str  # one of: done, recorded, failed, unsupported, infeasible, to do
    reason: str
    has_record: bool
    footprint: Footprint | None
    needs: Needs | None
    # Predictions by device, of which the first is the plan's own device.
    fits_on: dict[str, DeviceFit]
    job_request: resources.JobRequest
    min_samples_per_worker: int

    @property
    def cell(self) -> Cell:
        return self.subject.cell

    @property
    def fit(self) -> DeviceFit | None:
        """Prediction for the plan's device, or for the CPU if the cell trains there."""
        return next(iter(self.fits_on.values()), None)


@dataclass(frozen=True)
class Plan:
    """Plan of a study for one device, with predictions for other devices to compare."""

    study: str
    cluster: Mapping[str, Any]
    device: str
    gpu: str | None  # GPU that the config names; None if it names none
    compared_devices: list[str]
    cells: list[PlannedCell]
    #: Sentences on cells whose job is too large for every node of the cluster; empty without SLURM.
    texts_on_too_large_cells: list[str]
    #: Warning that the nodes have different types of GPUs; None if all are alike, or if one type is chosen.
    text_on_mixed_gpu_types: str | None
    #: Durations that are projected from records: of the first repeats of the study's cells, and of other
    #: cells.
    projected_durations: Mapping[Cell, ProjectedDuration]
    #: Footprints by request, then by value of `reshard_after_forward`, for requests with this option.
    footprints_by_request_and_resharding: dict[Request, dict[str, Footprint]]

    @property
    def is_device_named(self) -> bool:
        """Whether the config says that the cells will run on `device`."""
        return self.gpu is not None or self.device == "CPU"


@dataclass(frozen=True)
class PlanAddition:
    """Functions by which an extension adds durations and questions to plans.

    Attributes:
        durations: Takes the config, the study and records, and returns durations of cells, also beyond
            the study. A ValueError ends the plan with its message.
        questions: Yields questions, each with the sentences that answer it.
    """

    durations: (
        Callable[[dict[str, Any], Study, Records], Mapping[Cell, ProjectedDuration]] | None
    ) = None
    questions: Callable[[Plan], Iterable[tuple[str, list[str]]]] | None = None


def make_plan(
    config: Mapping[str, Any],
    checked: StudyCheck,
    records: Records,
    partition: str | None = "*",
    projected_durations: Mapping[Cell, ProjectedDuration] | None = None,
) -> Plan:
    """Return the plan of a study, from the check of its models and strategies.

    Args:
        config: The validated config.
        checked: Check of the study.
        records: Records of the study.
        partition: Partition of SLURM; several as `a,b`, None for the default one, `*` for any.
        projected_durations: Durations of trainings that are projected from records.
    """
    cluster, projected_durations = config["cluster"], projected_durations or {}
    named, gpus = cluster["gpu"], list_configured_gpus(cluster)
    if not named:
        gpus = gpus[-1:] + gpus[:-1]
    timed = select_timed_records(records, named).values()
    cells = []
    for s in checked.cells_to_plan:
        if s.request.is_on_cuda:
            devices = [make_gpu_device(gpu, s.settings.precision, cluster) for gpu in gpus]
        else:
            devices = [make_cpu_device(cluster, s.cell.gpus)]
        known = projected_durations.get(replace(s.cell, repeat=0))
        span = known.span if known else estimate_time_from_records(s.cell, timed)
        cells.append(_plan_cell(s, checked, records.get(s.cell), devices, span, config))
    on_gpu = any(s.request.is_on_cuda for s in checked.cells_to_plan)
    on_cpu = any(not s.request.is_on_cuda for s in checked.cells_to_plan)
    skipped = ("infeasible",) if cluster["skip_infeasible"] else ()
    to_train = [c for c in cells if not c.has_record and c.state not in skipped]
    of_partition = nodes.select_partition_nodes(nodes.read_cluster_nodes(), partition)
    refusals = {
        c.cell: nodes.explain_oversized_job(c.cell, c.subject.settings, c.job_request, of_partition)
        for c in to_train
    }
    return Plan(
        study=checked.study.name,
        cluster=cluster,
        device=gpus[0].name if on_gpu else "CPU",
        gpu=named,
        compared_devices=[g.name for g in gpus[1:]] + ["CPU"] * on_cpu if on_gpu else [],
        cells=cells,
        texts_on_too_large_cells=nodes.format_refusals(
            {cell: reason for cell, reason in refusals.items() if reason}
        ),
        text_on_mixed_gpu_types=nodes.describe_mixed_gpu_types(
            of_partition, (c.job_request for c in to_train)
        ),
        projected_durations=projected_durations,
        footprints_by_request_and_resharding=checked.footprints_by_request_and_resharding,
    )


def read_records_by_cell(study: Study, results_folder: str) -> dict[Cell, dict[str, Any]]:
    """Return the study's usable records by cell.

    Print which records are left out, such as those of other settings.
    """
    records, others = {}, []
    for cell in study.cells:
        path = cell.record_path(results_folder)
        if os.path.lexists(path):
            try:
                of_cell = record.read_measured_record(path)
            except record.RecordError as error:
                print(f"left out: {error}")
                continue
            if reason := record.describe_settings_differences(of_cell, study.settings(cell)):
                others.append(f"{path} {reason}")
            else:
                records[cell] = of_cell
    if others:
        n = len(others) - 1
        more = f" (and {format_count(n, 'more record')} of other settings)" if n else ""
        print(f"left out: {others[0]}{more}")
    return records


def select_timed_records(records: Records, gpu: str | None) -> Records:
    """Return the records whose times apply to the GPU `gpu`, or all records for None."""
    named = find_matching_datasheets(gpu) if gpu else None

    def is_of_other_gpu(record: Mapping[str, Any]) -> bool:
        """Return whether the record names another GPU. Records of CPU cells name no GPU."""
        known = ((w.get("provenance") or {}).get("gpu") or {} for w in record.get("workers") or ())
        sheets = [find_datasheet(gpu.get("name") or "") for gpu in known]
        return named is not None and any(sheet and sheet not in named for sheet in sheets)

    return {cell: r for cell, r in records.items() if not is_of_other_gpu(r)}


def _plan_cell(
    s: CellToPlan,
    checked: StudyCheck,
    record: Mapping[str, Any] | None,
    devices: list[Device],
    recorded_time: Span | None,
    config: Mapping[str, Any],
) -> PlannedCell:
    """Return the plan of one cell for all of `devices`.

    The first device is the plan's own. `recorded_time` is the time of the cell's training by records.
    """
    cluster = config["cluster"]
    footprint = (
        None
        if s.cell in checked.refusal_reasons_by_cell
        else checked.dry_runs_by_request[s.request].footprint
    )
    needs, fits_on = None, {}
    if footprint is not None:
        footprint = footprint.find_fullest_rank_footprint(
            s.samples_per_step, devices[0].resident_threads
        )
        needs = derive_needs(s, footprint, resources.count_nodes(s.cell, cluster))
        spans = [recorded_time] + [None] * len(devices)
        fits_on = {
            device.name: _predict_device_fit(s, footprint, needs, device, span, cluster)
            for device, span in zip(devices, spans, strict=False)
        }
    fit = next(iter(fits_on.values()), None)
    state, reason = _find_cell_state(s, checked, record, fit, recorded_time, config["results"])
    return PlannedCell(
        subject=s,
        state=state,
        reason=reason,
        has_record=record is not None,
        footprint=footprint,
        needs=needs,
        fits_on=fits_on,
        job_request=resources.build_job_request(
            s.cell,
            s.settings,
            cluster,
            s.time_limit_s,
            resources.PlannedNeeds(
                host_mem_mib=needs.host_mib if needs else 0,
                servers_mem_mib=needs.servers_host_mib if needs else 0,
                max_time_s=get_max_cell_time_s(fit),
            ),
        ),
        min_samples_per_worker=acceptance.compute_min_samples_per_step(
            checked.checks_by_network[Network.from_request(s.request)].has_batchnorm,
            s.settings.gradient_accumulation_steps,
        ),
    )


def _predict_device_fit(
    s: CellToPlan,
    footprint: Footprint,
    needs: Needs,
    device: Device,
    recorded_time: Span | None,
    cluster: Mapping[str, Any],
) -> DeviceFit:
    """Predict memory, time and cost of a cell on one device.

    `recorded_time` is the time of its training by records.
    """
    batch, threads, data_bytes = s.samples_per_step, device.resident_threads, needs.data_bytes
    fullest = footprint.find_fullest_rank_footprint(batch, threads)
    peak = fullest.compute_training_peak(batch, threads)
    needed_bytes = fullest.compute_needed_bytes(batch, threads) + data_bytes
    margin = cluster["memory_margin"]
    room_bytes = device.compute_max_fitting_bytes(margin)
    steps = [predict_step_duration(device, s, needs, rates) for rates in (BEST, WORST, USUAL)]
    by_device = usual_s = None
    if device.flops_per_s is not None:
        source = (
            f"{device.name}'s peak rates" if device.is_gpu else "this host's CPU, all cells alike"
        )
        *ends, usual_s = (step.seconds * s.steps for step in steps)
        by_device = Span(*ends, source)
        seen = estimate_time_from_public_runs(
            device.name, s.settings, s.data.is_text, steps[USUAL], s.steps
        )
        by_device = seen or by_device
    train = recorded_time or by_device
    total = train and train + estimate_time_outside_steps(device, s, needs)
    gpu_hours = total and tuple(end_s * s.cell.gpus / 3600 for end_s in total)
    return DeviceFit(
        device=device.name,
        peak=MemoryPeak(
            peak.n_bytes + data_bytes,
            peak.phase,
            dict.fromkeys(PARTS, 0) | peak.parts_bytes | {"data": data_bytes},
        ),
        stage_peaks_bytes=tuple(
            f.compute_training_peak(batch, threads).n_bytes + data_bytes
            for f in footprint.stage_footprints
        ),
        needed_bytes=needed_bytes,
        memory_verdict=classify_memory_fit(needed_bytes, device, margin),
        largest_batch=s.steps_per_batch
        * footprint.largest_batch(room_bytes, threads, partial(compute_data_bytes_on_device, s)),
        room_bytes=room_bytes,
        resident_threads=threads,
        sending_s=(steps[0].sending_s, steps[1].sending_s),
        device_rate_span=by_device,
        usual_s=usual_s,
        train_span=train,
        total_span=total,
        time_limit_verdict=_classify_time_limit(total, s.time_limit_s),
        gpu_hours=gpu_hours,
        cost=gpu_hours and compute_cost_range(*gpu_hours, cluster, device.is_gpu),
    )


def classify_memory_fit(needed_bytes: float, device: Device, margin: float) -> str:
    """Return FITS, TIGHT or DOES_NOT_FIT, for a predicted memory on a device.

    Args:
        needed_bytes: Predicted need of a worker.
        device: The device.
        margin: Relative error that the prediction may have.
    """
    if needed_bytes <= device.compute_max_fitting_bytes(margin):
        return FITS
    return TIGHT if needed_bytes <= device.compute_max_bytes_that_may_fit(margin) else DOES_NOT_FIT


def _classify_time_limit(total_time: Span | None, limit_s: float | None) -> str:
    """Return whether the time limit ends a cell early: no, possible or certain."""
    if total_time is None or limit_s is None or total_time.high_s <= limit_s:
        return "no"
    return "certain" if total_time.low_s > limit_s else "possible"


def compute_cost_range(
    min_gpu_hours: float, max_gpu_hours: float, cluster: Mapping[str, Any], on_gpu: bool
) -> LowHigh | None:
    """Return the cost of GPU-hours at best and at worst, or None without a price.

    Args:
        min_gpu_hours: GPU-hours at best.
        max_gpu_hours: GPU-hours at worst.
        cluster: The block `cluster` of the config.
        on_gpu: Whether the cell trains on GPUs.
    """
    price = cluster["price_per_gpu_hour"]
    return None if price is None or not on_gpu else (min_gpu_hours * price, max_gpu_hours * price)


def _find_cell_state(
    s: CellToPlan,
    checked: StudyCheck,
    cell_record: Mapping[str, Any] | None,
    fit: DeviceFit | None,
    recorded_time: Span | None,
    results_folder: str,
) -> tuple[str, str]:
    """Return the state of a cell in the plan, and the reason for it."""
    if cell_record is not None:
        if cell_record["status"] == "ok":
            return "done", ""
        if cell_record["status"] == "unsupported":
            return "unsupported", cell_record["reason"]
        return "recorded", f"{cell_record['status']}: {cell_record['reason']}"
    if s.cell in checked.refusal_reasons_by_cell:
        return "unsupported", checked.refusal_reasons_by_cell[s.cell]
    failed = record.read_failure_reason(s.cell.log_dir(results_folder))
    if failed is not None:
        return "failed", failed
    if fit is None:
        reason = checked.dry_runs_by_request[s.request].unpredicted_reason
        if s.request.is_trained_by_command and recorded_time is not None:
            reason = f"{reason}: {' to '.join(map(format_seconds, recorded_time))} by {recorded_time.source}"
        return "to do", f"could not be predicted: {reason}"
    if not fit.may_run:
        return (
            "infeasible",
            f"needs {format_bytes(fit.needed_bytes)}{_describe_data_placement_remedy(s, fit)}",
        )
    return "to do", ""


def _describe_data_placement_remedy(s: CellToPlan, fit: DeviceFit) -> str:
    """Return a hint to store the data set in host memory instead of device memory.

    The hint is empty if that would save less than a tenth of the cell's need.

    Args:
        s: The planned cell.
        fit: Predicted memory of the cell on the device.
    """
    n_bytes = fit.peak.parts_bytes["data"]
    if (
        s.settings.data_placement == "host"
        or not s.request.is_on_cuda
        or n_bytes < fit.needed_bytes / 10
    ):
        return ""
    held = f", {format_bytes(n_bytes)} of it for the data"
    return f"{held} (data_placement: host stores them in host memory)"


def get_max_cell_time_s(fit: DeviceFit | None) -> int | None:
    """Return the upper end of a cell's predicted time in whole seconds, or None."""
    return None if fit is None or fit.total_span is None else round(fit.total_span.high_s)

"""Throughput in context: operations against the device's peak, traffic, energy.

Everything follows from the files of a finished cell's workers, servers and sampler. Unknown values are
absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stratbench.telemetry.machine.hardware import datasheet_of
from stratbench.telemetry.timeline import energy_within, read_phases
from stratbench.train.job import Job

#: Of each GPU, by its node and number, when it trained: (start_s, end_s).
Intervals = dict[tuple[str, str], list[tuple[float, float]]]
_RATES = ("sent_bytes_per_step", "received_bytes_per_step")
_TIMES = ("total_ms", "overlapped_ms", "exposed_ms", "server_wait_ms", "timed_steps")


def compute_figures(
    job: Job, workers: list[dict[str, Any]], run: dict[str, Any], is_gang: bool = True
) -> dict[str, Any] | None:
    """Return operations per second of all workers together, and their fraction of the devices' peak (MFU).

    Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B. These are the model's
    operations: recomputation by activation checkpointing does not count.

    Args:
        job: The cell's.
        workers: Results of the workers.
        run: Totals of the run.
        is_gang: Whether all workers are there from beginning to end. If not, there is no peak.
    """
    counted = next((w for w in workers if w.get("forward_flops_per_sample")), None)
    if counted is None:
        return None
    names = ("forward_flops_per_sample", "training_flops_per_sample")
    figures: dict[str, Any] = {name: counted[name] for name in names}
    samples, train_time_s = run.get("samples_seen"), run.get("train_time_s")
    if not samples or not train_time_s:
        return figures
    done = figures["training_flops_per_sample"] * samples
    figures["achieved_flops_per_s"] = done / train_time_s
    peak = peak_flops_per_s(job, workers) if is_gang else None
    if peak is not None:
        figures["peak_flops_per_s"] = peak
        figures["mfu"] = figures["achieved_flops_per_s"] / peak
    return figures


def peak_flops_per_s(job: Job, workers: list[dict[str, Any]]) -> float | None:
    """Datasheet peak of all workers' GPUs in the cell's precision.

    None if any is unknown.
    """
    if job.settings.precision == "fp64" or len(workers) < job.world_size:
        return None
    peaks = [datasheet_of(w["provenance"].get("gpu", {}).get("name", "")) for w in workers]
    tflops = [peak and peak.tflops(job.settings.precision) for peak in peaks]
    return None if None in tflops else 1e12 * sum(tflops)


def communication_figures(
    workers: list[dict[str, Any]], run: dict[str, Any], is_gang: bool = True
) -> dict[str, Any] | None:
    """Return the bytes that a worker sends and receives per step, with bandwidth and times.

    Return None if no worker reports its traffic.

    Args:
        workers: Results of the workers.
        run: Totals of the run.
        is_gang: Whether all workers are there from beginning to end.
    """
    reported = [(w["communication"], w["steps"]) for w in workers if w.get("communication")]
    steps = sum(n for _, n in reported)
    if not steps:
        return None
    figures: dict[str, Any] = {"method": reported[0][0]["method"]}
    for key in _RATES:
        figures[key] = sum(c[key] * n for c, n in reported) / steps
    for key in _TIMES:
        if all(key in c for c, _ in reported):
            figures[key] = sum(c[key] * n for c, n in reported) / steps
    if not is_gang:
        return figures  # how much per second depends on who was there
    if train_time_s := run.get("train_time_s"):
        steps_per_s = steps / len(reported) / train_time_s
        figures["implied_bytes_per_s"] = max(figures[key] for key in _RATES) * steps_per_s
    return figures


def mean_phases_ms(
    workers: list[dict[str, Any]], communication: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return mean time of each phase in a step over all workers, in ms.

    `communication`: the cell's.

    Exposed communication is taken out of backward, and the wait out of the exchange with the server.
    """
    communication = communication or {}
    names = dict.fromkeys(name for w in workers for name in w["breakdown_ms"])
    phases: dict[str, float] = {}
    for name in names:
        mean_ms = sum(w["breakdown_ms"].get(name, 0.0) for w in workers) / len(workers)
        match name:
            case "backward" if "exposed_ms" in communication:
                exposed_ms = min(communication["exposed_ms"], mean_ms)
                phases["backward"] = mean_ms - exposed_ms
                phases["exposed_communication"] = exposed_ms
            case "server" if "server_wait_ms" in communication:
                wait_ms = min(communication["server_wait_ms"], mean_ms)
                phases["push"] = mean_ms - wait_ms
                phases["server_wait"] = wait_ms
            case "other" if "server" not in names:  # what follows the last mark of a step
                phases["optimizer"] = phases.get("optimizer", 0.0) + mean_ms
            case _:
                phases[name] = mean_ms
    return phases or None


def bubble_figures(workers: list[dict[str, Any]]) -> dict[str, float]:
    """The share of a mean step in which workers waited for other stages.

    Nothing where there are none.
    """
    waits = [w["breakdown_ms"].get("bubble") for w in workers]
    if not waits or None in waits:
        return {}
    return {"bubble_share": sum(waits) / sum(sum(w["breakdown_ms"].values()) for w in workers)}


def intervals_of_workers(job: Job, workers: Sequence[Mapping[str, Any]]) -> Intervals | None:
    """Read when each GPU's worker trained.

    None where a worker was lost, or its GPU has no number.
    """
    if len(workers) < job.world_size:
        return None
    intervals: Intervals = {}
    for w in workers:
        index = w["provenance"].get("gpu", {}).get("index")
        if index is None:
            return None
        log = job.folder.phases(w["rank"])
        intervals[w["provenance"]["host"]["name"], str(index)] = [
            (i.start_s, i.end_s) for i in read_phases([log]) if i.phase == "train"
        ]
    return intervals


def energy_figures(
    job: Job, run: dict[str, Any], intervals: Intervals | None
) -> dict[str, float] | None:
    """Return the joules of the cell's GPUs during training steps, in total and per sample applied.

    CPUs, host memory and the rest of the machine are not included. None if a GPU's energy is unknown; that of
    attempts before the last is.

    Args:
        job: The cell's.
        run: Its totals.
        intervals: When each GPU trained, or None if not known for all.
    """
    if not run.get("samples_applied") or intervals is None or job.attempts:
        return None
    joules = energy_within(job.folder.sample_files(), intervals)
    if joules is None:
        return None
    return {"train_joules": joules, "joules_per_sample": joules / run["samples_applied"]}

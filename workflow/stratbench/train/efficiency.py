"""Computes a finished cell's operations per second, communication, time per phase and energy.

All values come from the files of the cell's processes and of the sampler. Values that are not known are
absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stratbench.telemetry.machine.hardware import find_datasheet
from stratbench.telemetry.timeline import compute_energy_joules, read_phase_intervals
from stratbench.train.job import Job

#: Time intervals (start_s, end_s) in which each GPU trained, by host name and GPU number.
Intervals = dict[tuple[str, str], list[tuple[float, float]]]
_RATES = ("sent_bytes_per_step", "received_bytes_per_step")
_TIMES = ("total_ms", "overlapped_ms", "exposed_ms", "server_wait_ms", "timed_steps")


def compute_flops_and_mfu(
    job: Job,
    workers: list[dict[str, Any]],
    totals: dict[str, Any],
    has_constant_workers: bool = True,
) -> dict[str, Any] | None:
    """Return the floating-point operations per second, and their share of the GPUs' peak (MFU).

    The total is over all workers. Operations are those of the model, without recomputation by activation
    checkpointing. Source: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B.

    Args:
        job: Job of the cell.
        workers: Results of the workers.
        totals: Totals over all workers.
        has_constant_workers: Whether the same workers train from beginning to end. If not, no peak is
            returned.
    """
    counted = next((w for w in workers if w.get("forward_flops_per_sample")), None)
    if counted is None:
        return None
    names = ("forward_flops_per_sample", "training_flops_per_sample")
    figures: dict[str, Any] = {name: counted[name] for name in names}
    samples, train_time_s = totals.get("samples_seen"), totals.get("train_time_s")
    if not samples or not train_time_s:
        return figures
    done = figures["training_flops_per_sample"] * samples
    figures["achieved_flops_per_s"] = done / train_time_s
    peak = sum_peak_flops_per_s(job, workers) if has_constant_workers else None
    if peak is not None:
        figures["peak_flops_per_s"] = peak
        figures["mfu"] = figures["achieved_flops_per_s"] / peak
    return figures


def sum_peak_flops_per_s(job: Job, workers: list[dict[str, Any]]) -> float | None:
    """Return the sum of all workers' GPUs' peak rates in the cell's precision, in FLOP/s.

    The rates are those of the datasheets. The result is None if one of them is unknown.
    """
    if job.settings.precision == "fp64" or len(workers) < job.world_size:
        return None
    peaks = [find_datasheet(w["provenance"].get("gpu", {}).get("name", "")) for w in workers]
    tflops = [peak and peak.get_peak_tflops(job.settings.precision) for peak in peaks]
    return None if None in tflops else 1e12 * sum(tflops)


def build_communication_entry(
    workers: list[dict[str, Any]], totals: dict[str, Any], has_constant_workers: bool = True
) -> dict[str, Any] | None:
    """Return a worker's mean communication per step: bytes sent, bytes received, and times in ms.

    The result is None if no worker reports its traffic.

    Args:
        workers: Results of the workers.
        totals: Totals over all workers.
        has_constant_workers: Whether the same workers train from beginning to end.
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
    if not has_constant_workers:
        # No rate in bytes per second is given, because the number of workers changes.
        return figures
    if train_time_s := totals.get("train_time_s"):
        steps_per_s = steps / len(reported) / train_time_s
        figures["implied_bytes_per_s"] = max(figures[key] for key in _RATES) * steps_per_s
    return figures


def compute_mean_phase_times_ms(
    workers: list[dict[str, Any]], communication: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the mean time in ms of each phase of a step, over all workers.

    Exposed communication becomes a phase of its own, taken out of backward. So does the wait for servers,
    taken out of the exchange with them.

    Args:
        workers: Results of the workers.
        communication: Entry `communication` of the record, or None.
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
            case "other" if "server" not in names:
                # The time after the last marked phase of a step is the optimizer's.
                phases["optimizer"] = phases.get("optimizer", 0.0) + mean_ms
            case _:
                phases[name] = mean_ms
    return phases or None


def compute_bubble_share(workers: list[dict[str, Any]]) -> dict[str, float]:
    """Return the measured share of a step in which workers waited for other pipeline stages.

    The dict has the key `bubble_share`. It is empty unless every worker has measured such waits.
    """
    waits = [w["breakdown_ms"].get("bubble") for w in workers]
    if not waits or None in waits:
        return {}
    return {"bubble_share": sum(waits) / sum(sum(w["breakdown_ms"].values()) for w in workers)}


def read_gpu_training_intervals(job: Job, workers: Sequence[Mapping[str, Any]]) -> Intervals | None:
    """Return the time intervals in which each GPU trained. None if those of any GPU are unknown."""
    if len(workers) < job.world_size:
        return None
    intervals: Intervals = {}
    for w in workers:
        index = w["provenance"].get("gpu", {}).get("index")
        if index is None:
            return None
        log = job.folder.get_phase_log_path(w["rank"])
        intervals[w["provenance"]["host"]["name"], str(index)] = [
            (i.start_s, i.end_s) for i in read_phase_intervals([log]) if i.phase == "train"
        ]
    return intervals


def build_energy_entry(
    job: Job, totals: dict[str, Any], intervals: Intervals | None
) -> dict[str, float] | None:
    """Return the joules that GPUs used during training steps, in total and per sample.

    Only applied samples count. CPUs, host memory and other parts of the machine are not included. The result
    is None if the energy of a GPU is not known, as after a restart.

    Args:
        job: Job of the cell.
        totals: Totals over all workers.
        intervals: Training intervals of each GPU, or None if those of a GPU are unknown.
    """
    if not totals.get("samples_applied") or intervals is None or job.earlier_attempts:
        return None
    joules = compute_energy_joules(job.folder.list_timeline_samples_paths(), intervals)
    if joules is None:
        return None
    return {"train_joules": joules, "joules_per_sample": joules / totals["samples_applied"]}

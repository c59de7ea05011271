"""Operations per second against the device's peak, traffic and energy of a finished cell.

All values are computed from the files of its processes and of the sampler. Values that are not known are
absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stratbench.telemetry.machine.hardware import find_datasheet
from stratbench.telemetry.timeline import compute_energy_joules, read_phases
from stratbench.train.job import Job

#: Training intervals (start_s, end_s) of each GPU, by host name and GPU number.
Intervals = dict[tuple[str, str], list[tuple[float, float]]]
_RATES = ("sent_bytes_per_step", "received_bytes_per_step")
_TIMES = ("total_ms", "overlapped_ms", "exposed_ms", "server_wait_ms", "timed_steps")


def compute_flops_and_mfu(
    job: Job, workers: list[dict[str, Any]], run: dict[str, Any], is_gang: bool = True
) -> dict[str, Any] | None:
    """Return the total operations per second, and their share of the devices' peak (MFU).

    The total is over all workers. Operations are those of the model, without recomputation by activation
    checkpointing. Source: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, appendix B.

    Args:
        job: Job of the cell.
        workers: Results of the workers.
        run: Totals over all workers.
        is_gang: Whether all workers are present from beginning to end. If not, no peak is returned.
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
    peak = sum_peak_flops_per_s(job, workers) if is_gang else None
    if peak is not None:
        figures["peak_flops_per_s"] = peak
        figures["mfu"] = figures["achieved_flops_per_s"] / peak
    return figures


def sum_peak_flops_per_s(job: Job, workers: list[dict[str, Any]]) -> float | None:
    """Return the sum of the GPUs' datasheet peaks in the cell's precision.

    The result is None if one of them is not known.
    """
    if job.settings.precision == "fp64" or len(workers) < job.world_size:
        return None
    peaks = [find_datasheet(w["provenance"].get("gpu", {}).get("name", "")) for w in workers]
    tflops = [peak and peak.get_peak_tflops(job.settings.precision) for peak in peaks]
    return None if None in tflops else 1e12 * sum(tflops)


def build_communication_entry(
    workers: list[dict[str, Any]], run: dict[str, Any], is_gang: bool = True
) -> dict[str, Any] | None:
    """Return a worker's mean bytes sent and received per step, with rates and times.

    The result is None if no worker reports its traffic.

    Args:
        workers: Results of the workers.
        run: Totals over all workers.
        is_gang: Whether all workers are present from beginning to end.
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
        return figures  # the rate depends on the number of workers, which changes
    if train_time_s := run.get("train_time_s"):
        steps_per_s = steps / len(reported) / train_time_s
        figures["implied_bytes_per_s"] = max(figures[key] for key in _RATES) * steps_per_s
    return figures


def compute_mean_phases_ms(
    workers: list[dict[str, Any]], communication: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the mean time of each phase of a step over all workers, in ms.

    Exposed communication is subtracted from backward, and waiting from the exchange with servers.

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
            case "other" if "server" not in names:  # the time after the last mark of a step
                phases["optimizer"] = phases.get("optimizer", 0.0) + mean_ms
            case _:
                phases[name] = mean_ms
    return phases or None


def compute_bubble_shares(workers: list[dict[str, Any]]) -> dict[str, float]:
    """Return the share of a step that workers waited for other pipeline stages.

    The dict is empty unless every worker has such a time.
    """
    waits = [w["breakdown_ms"].get("bubble") for w in workers]
    if not waits or None in waits:
        return {}
    return {"bubble_share": sum(waits) / sum(sum(w["breakdown_ms"].values()) for w in workers)}


def read_training_intervals(job: Job, workers: Sequence[Mapping[str, Any]]) -> Intervals | None:
    """Read the intervals in which each GPU trained. None if unknown for any GPU."""
    if len(workers) < job.world_size:
        return None
    intervals: Intervals = {}
    for w in workers:
        index = w["provenance"].get("gpu", {}).get("index")
        if index is None:
            return None
        log = job.folder.get_phase_log_path(w["rank"])
        intervals[w["provenance"]["host"]["name"], str(index)] = [
            (i.start_s, i.end_s) for i in read_phases([log]) if i.phase == "train"
        ]
    return intervals


def build_energy_entry(
    job: Job, run: dict[str, Any], intervals: Intervals | None
) -> dict[str, float] | None:
    """Return the energy in joules that the cell's GPUs used during training steps.

    The figures are the total and the energy per applied sample. CPUs, host memory and other parts of the
    machine are not included. The result is None if the energy of a GPU is not known, as after a restart.

    Args:
        job: Job of the cell.
        run: Totals over all workers.
        intervals: Training intervals of each GPU, or None if not known for all GPUs.
    """
    if not run.get("samples_applied") or intervals is None or job.earlier_attempts:
        return None
    joules = compute_energy_joules(job.folder.list_sample_paths(), intervals)
    if joules is None:
        return None
    return {"train_joules": joules, "joules_per_sample": joules / run["samples_applied"]}

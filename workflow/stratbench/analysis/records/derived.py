"""Functions that derive columns of cells.csv from several fields of a record, or from a timeline.

Every column's function takes a record and returns the value, or None if the record does not have it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from stratbench.analysis.records.samples import BUSY, read_timeline
from stratbench.cell.record import Record


def get_field_by_path(nested_dicts: Any, path: str) -> Any:
    """Return the value at a dotted path in nested dicts. Return None if a part of the path is absent."""
    for key in path.split("."):
        if not isinstance(nested_dicts, dict):
            return None
        nested_dicts = nested_dicts.get(key)
    return nested_dicts


# ---------------------------------------------------------------- columns on the score


def compute_time_to_result_s(record: Record) -> float | None:
    """Return the seconds from the submission of a cell's SLURM job to its end.

    None outside of SLURM.
    """
    wait_s, total_s = (
        get_field_by_path(record, "time.queue_wait_s"),
        get_field_by_path(record, "time.total_s"),
    )
    if wait_s is None or total_s is None:
        return None
    return wait_s + total_s + (get_field_by_path(record, "restarts.between_s") or 0.0)


def get_score_standard_error(record: Record) -> float | None:
    """Return the standard error of the last epoch's score. Return None if the cell did not finish."""
    entries = get_field_by_path(record, "score.per_epoch") or [{}]
    return (
        None if get_field_by_path(record, "score.final") is None else entries[-1].get("score_error")
    )


def compute_perplexity(record: Record) -> float | None:
    """Return the exponential of a score in nats per token. None for other or too large scores."""
    final = get_field_by_path(record, "score.final")
    if final is None or get_field_by_path(record, "task.unit") != "nats/token" or final > 700:
        return None
    return math.exp(final)


# ---------------------------------------------------------------- columns on the machine


def list_distinct_values_of_workers(record: Record, path: str) -> list[str]:
    """Return the distinct values that workers' provenances have for a field, as sorted texts."""
    values = (get_field_by_path(worker["provenance"], path) for worker in record["workers"])
    return sorted({str(value) for value in values if value is not None})


def join_texts_or_none(texts: list[str]) -> str | None:
    """Return the texts joined by `; `, or None without texts."""
    return "; ".join(texts) or None


def get_device_kind(record: Record) -> str | None:
    """Return `cuda` or `cpu`, as recorded by workers or else by the launcher."""
    kinds = {
        device.partition(":")[0] for device in list_distinct_values_of_workers(record, "device")
    }
    return join_texts_or_none(sorted(kinds)) or get_field_by_path(record, "provenance.device")


def format_device_names(record: Record) -> str | None:
    """Return the names of the GPUs, or of the CPUs if there are no GPUs."""
    return join_texts_or_none(
        list_distinct_values_of_workers(record, "gpu.name")
    ) or format_cpu_models(record)


def get_min_device_memory_bytes(record: Record) -> float | None:
    """Return the memory of the cell's smallest GPU in bytes, or None without a GPU."""
    sizes = list_distinct_values_of_workers(record, "gpu.memory_bytes")
    return min(map(float, sizes), default=None)


def format_host_names(record: Record) -> str | None:
    """Return the names of the hosts on which workers ran."""
    return join_texts_or_none(list_distinct_values_of_workers(record, "host.name"))


def format_cpu_models(record: Record) -> str | None:
    """Return the CPU models of the hosts."""
    return join_texts_or_none(list_distinct_values_of_workers(record, "host.cpu_model"))


def format_torch_versions(record: Record) -> str | None:
    """Return the versions of PyTorch; several only if workers differ."""
    return join_texts_or_none(list_distinct_values_of_workers(record, "software.torch"))


def format_driver_versions(record: Record) -> str | None:
    """Return the versions of the GPU driver; several only if hosts differ."""
    return join_texts_or_none(list_distinct_values_of_workers(record, "driver.driver_version"))


def count_usable_cpu_cores(record: Record) -> float | None:
    """Return the number of CPU cores that the workers may use, within quotas."""
    cores_of: dict[str, tuple[set[int], float]] = {}
    for worker in record["workers"]:
        name = get_field_by_path(worker["provenance"], "host.name")
        affinity = set(get_field_by_path(worker["provenance"], "host.affinity") or ())
        quota = get_field_by_path(worker["provenance"], "host.cpu_quota_cores") or math.inf
        cores_of[name] = (cores_of.get(name, (set(), 0.0))[0] | affinity, quota)
    total = sum(min(len(cores), quota) for cores, quota in cores_of.values())
    return round(total, 1) or None


def get_cores_used_by_other_processes(record: Record) -> float | None:
    """Return the number of CPU cores that other processes used when the cell started.

    The number is that of the busiest node.
    """
    nodes = (get_field_by_path(record, "provenance.busy_at_start") or {}).values()
    busy = [node["other_cpu_cores"] for node in nodes if "other_cpu_cores" in node]
    return max(busy, default=None)


def count_node_cores(record: Record) -> int | None:
    """Return the number of logical cores of the smallest node, whether usable or not."""
    counts = (
        get_field_by_path(worker["provenance"], "host.cores_logical")
        for worker in record["workers"]
    )
    return min((count for count in counts if count), default=None)


def format_git_revision(record: Record) -> str | None:
    """Return the git commit's first 12 digits, with `+changes` if files differed from it."""
    git = get_field_by_path(record, "provenance.git") or {}
    commit = git.get("revision")
    return commit and commit[:12] + ("+changes" if git.get("dirty") else "")


def describe_slowdown(record: Record) -> str | None:
    """Return a text on how workers were slowed down on purpose."""
    setting = get_field_by_path(record, "settings.slowdown")
    if not setting:
        return None
    parts = []
    if setting.get("workers") and setting.get("factor"):
        ranks = ", ".join(str(rank) for rank in setting["workers"])
        parts.append(f"rank {ranks} slowed {setting['factor']:g}-fold")
    if setting.get("sigma"):
        parts.append(f"random delays (sigma {setting['sigma']:g})")
    return "; ".join(parts) or None


# ---------------------------------------------------------------- columns on memory and time


def get_peak_memory_bytes(record: Record) -> int | None:
    """Return the peak memory in bytes of the rank that used most.

    On a GPU this is the allocator's peak, including model states. On a CPU it is the growth of the resident
    set over its base, which contains libraries, weights and momentum.
    """
    on_cpu = "cpu" in (get_device_kind(record) or "").split("; ")
    return get_field_by_path(record, f"memory.{'peak_over_base_bytes' if on_cpu else 'peak_bytes'}")


def get_model_states_bytes(record: Record) -> int | None:
    """Return the bytes of model states on the rank with most: parameters, gradients, optimizer, buffers."""
    states = get_field_by_path(record, "memory.model_states") or {}
    kinds = ("parameters", "gradients", "optimizer", "buffers")
    held = [states.get(f"{kind}_bytes") for kind in kinds]
    return sum(n_bytes or 0 for n_bytes in held) if any(held) else None


def get_max_start_skew_ms(record: Record) -> float | None:
    """Return the largest start skew of all epochs in ms.

    The start skew of an epoch is the time between the starts of the first and the last worker.
    """
    return max(get_field_by_path(record, "time.start_skew_ms") or (), default=None)


def format_step_breakdown_ms(record: Record) -> str | None:
    """Return the mean time per step of each phase in ms, as a JSON object."""
    phases = get_field_by_path(record, "time.breakdown_ms")
    return json.dumps(phases) if phases else None


# ---------------------------------------------------------------- columns on parameter servers


def list_server_entries(record: Record) -> list[dict[str, Any]]:
    """Return the record's entries on parameter servers. Empty without servers."""
    return get_field_by_path(record, "server.servers") or []


def count_processes(record: Record) -> int | None:
    """Return the number of workers plus servers, or None if the servers left no statistics."""
    servers = list_server_entries(record)
    if get_field_by_path(record, "strategy.kind") == "server" and not servers:
        return None
    return get_field_by_path(record, "cell.gpus") + len(servers)


def format_staleness_counts(record: Record) -> str | None:
    """Return the number of pushes with each staleness as a JSON list.

    The numbers are sums over all shards and servers. The index in the list is the staleness.
    The staleness of a push is the number of updates since the weights of its gradient.
    """
    total: list[int] = []
    for server in list_server_entries(record):
        counts = server.get("staleness_all_shards") or []
        total += [0] * (len(counts) - len(total))
        for i, count in enumerate(counts):
            total[i] += count
    return json.dumps(total) if total else None


# ---------------------------------------------------------------- columns from the timeline


def compute_timeline_columns(path: Path, device_kind: str | None) -> dict[str, float]:
    """Return the values of the columns that a cell's timeline determines. Empty without samples.

    `throttled_share` is the share of GPU samples in which heat or the power brake slowed a GPU.
    `utilisation_pct` is the mean over the samples during training: of the GPUs, or of the worker processes
    in percent of one core.
    """
    timeline = read_timeline(path)
    if timeline is None:
        return {}
    kind = "gpu" if device_kind == "cuda" else "process"
    figures: dict[str, float] = {}
    series = timeline.select_series_of_kind(kind)
    if kind == "gpu" and series:
        count = sum(one.num_samples for one in series.values())
        figures["throttled_share"] = (
            sum(one.num_throttled_samples for one in series.values()) / count
        )
    used = [
        one.training_summaries_by_column[BUSY[kind]]
        for (_, name), one in series.items()
        if BUSY[kind] in one.training_summaries_by_column
        and (kind == "gpu" or not name or name.startswith("rank"))
    ]
    if used:
        whole = sum(values.mean * values.count for values in used)
        figures["utilisation_pct"] = whole / sum(values.count for values in used)
    return figures

"""Rules of the audit on timelines: idle GPUs, low clocks, pauses, and other load on the machine."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from stratbench.analysis.records.derived import get_field_by_path
from stratbench.analysis.records.facts import Facts, compute_longest_pause_of_node_s, get_host_name
from stratbench.analysis.records.samples import BUSY, SampleSeries
from stratbench.cell.record import Record
from stratbench.extensions.audit.rule import (
    AuditData,
    Case,
    CellKey,
    make_cell_key,
    record_rule,
    rule,
)
from stratbench.telemetry.pauses import NEGLIGIBLE_PAUSE_SHARE

#: Fewest samples during training that a rule needs: 5 s at the sampler's period of 0.5 s.
MIN_SAMPLES = 10
#: Load per core above which the sampler and the workers may wait for a core for seconds.
MAX_LOAD_PER_CORE = 4.0
#: Smallest utilisation of a GPU that trains, as a share of its computing time; idle GPUs show 0 to 2 %.
MIN_UTILISATION = 0.03
#: Smallest utilisation of a GPU per step, relative to the median worker's.
MIN_RELATIVE_UTILISATION = 0.25
#: Relative difference of clocks above which a GPU counts as slow; consumer GPUs lose 5 % when they are warm.
MAX_CLOCK_DIFFERENCE = 0.1
#: A GPU counts as at its power limit if the driver says so in this share of samples, or if it draws this
#: share of the limit.
CAPPED_SAMPLES, CAPPED_POWER = 0.05, 0.9
#: A GPU that draws less than this share of its power limit is not limited by it, even if the driver says so.
UNCAPPED_POWER = 0.5
#: Time constant of the kernel's average `load_1m`, in seconds.
LOAD_TIME_CONSTANT_S = 60.0
#: Maximum share of `load_1m` that may come from before the cell. Above it, the cell's load is not computed.
MAX_EARLIER_LOAD_SHARE = 0.6
#: Load per core up to which a machine never counts as overloaded.
HARMLESS_LOAD_PER_CORE = 0.75
#: Cores that other processes may use during training: a number, plus a share of the host's cores.
MAX_OTHER_CORES, MAX_OTHER_CORES_SHARE = 0.5, 0.05


def is_cpu_overloaded(facts: Facts) -> bool:
    """Return whether the load was so high that processes may have waited for cores.

    A load far above the number of cores is the sign of waits, which may take seconds.
    """
    cores = [
        get_field_by_path(worker["provenance"], "host.cores_logical") or 0
        for worker in facts.workers
    ]
    loads = [get_field_by_path(worker["provenance"], "load_1m") or 0.0 for worker in facts.workers]
    if facts.timeline is not None:
        hosts = facts.timeline.select_series_of_kind("host").values()
        loads += [
            one.summaries_by_column["load_1m"].maximum
            for one in hosts
            if "load_1m" in one.summaries_by_column
        ]
    return bool(any(cores)) and max(loads, default=0.0) > MAX_LOAD_PER_CORE * max(cores)


@record_rule("paused-while-timed", "unusable", "time", of="both")
def find_pauses_in_training(facts: Facts) -> Iterator[str]:
    """The cell was paused while it trained: its job was suspended, its processes were stopped, or the machine
    slept. Its times include the pause; delete its record to train it again.
    """
    paused_s = compute_longest_pause_of_node_s(
        facts, lambda p: p["length_s"] if p["in_training"] else 0.0
    )
    trained_s = facts("time.train_time_s") or facts("time.total_s")
    if paused_s > NEGLIGIBLE_PAUSE_SHARE * trained_s:
        yield f"paused for {paused_s:.3g} s in {trained_s:.4g} s of training"


@record_rule("idle-worker", "unusable", "time")
def find_idle_workers(facts: Facts) -> Iterator[str]:
    """A worker's GPU, or its CPU process, was nearly idle, although the record says that it trained. The
    worker computed elsewhere, or not at all.
    """
    phases = facts("time.breakdown_ms") or {}
    if facts.status != "ok" or is_cpu_overloaded(facts):
        return
    computed = phases.get("forward", 0.0) + phases.get("backward", 0.0)
    share = computed / sum(phases.values()) if computed else 1.0
    busy: dict[int, float] = {}
    kind = ""
    for worker in facts.workers:
        kind, one = facts.find_device_kind_and_sample_series(worker)
        values = one and one.training_summaries_by_column.get(BUSY[kind])
        if values and values.count >= MIN_SAMPLES:
            busy[worker["rank"]] = values.mean
    # Workers are compared with each other only on GPUs without artificial delays. CPU processes share cores,
    # and a GPU that waits for a delayed one is busy in an NCCL kernel.
    are_alike = kind == "gpu" and not facts("settings.slowdown")
    steps = {worker["rank"]: worker["steps"] or 1 for worker in facts.workers}
    usual = median(mean / steps[rank] for rank, mean in busy.items()) if busy and are_alike else 0.0
    for rank, mean in busy.items():
        its = usual * steps[rank]
        if mean < max(100 * MIN_UTILISATION * share, MIN_RELATIVE_UTILISATION * its):
            others = f", others for as many steps in {its:.3g} %" if its else ""
            yield f"the {kind} of rank {rank} was busy in {mean:.3g} % of training{others}"


@rule("clock-low", "warning", "time")
def find_low_gpu_clocks(evidence: AuditData) -> Iterator[Case]:
    """A GPU had a lower clock than other GPUs of its kind in this study, or than its application clock,
    without being at its power limit: times differ because of clocks, and not because of strategies.
    """
    by_gpu: dict[str, list[tuple[CellKey, Record, dict[str, Any], SampleSeries]]] = defaultdict(
        list
    )
    for record in evidence.records:
        key = make_cell_key(record["cell"])
        facts = Facts(record, evidence.timelines.get(key))
        for worker in record["workers"] if facts.timeline else ():
            one, name = (
                facts.find_gpu_sample_series(worker),
                get_field_by_path(worker["provenance"], "gpu.name"),
            )
            if name and one and one.busy_clock_mhz and one.busy_clock_mhz.count >= MIN_SAMPLES:
                by_gpu[name].append((key, record, worker, one))
    for members in by_gpu.values():
        usual: dict[CellKey, list[float]] = defaultdict(list)
        for key, _, _, one in members:
            usual[key].append(one.busy_clock_mhz.mean)
        best = max(median(clocks) for clocks in usual.values())
        for _, record, worker, one in members:
            clock = one.busy_clock_mhz.mean
            allowed = get_field_by_path(worker["provenance"], "gpu.application_sm_clock_mhz") or 0
            usual, whose = max((best, "others at"), (allowed, "its application clock is"))
            if clock < (1 - MAX_CLOCK_DIFFERENCE) * usual and not is_gpu_at_power_limit(
                worker, one
            ):
                figures = (
                    f"rank {worker['rank']} worked at {clock:.0f} MHz, {whose} {usual:.0f} MHz"
                )
                yield record["cell"], figures


def is_gpu_at_power_limit(worker: dict[str, Any], gpu_samples: SampleSeries) -> bool:
    """Return whether a GPU was at its power limit, which explains a low clock."""
    limit_w, power = (
        get_field_by_path(worker["provenance"], "gpu.power_limit_w"),
        gpu_samples.training_summaries_by_column.get("power_w"),
    )
    share = power.mean / limit_w if limit_w and power else None
    if gpu_samples.share_of_samples_at_power_limit >= CAPPED_SAMPLES:
        return share is None or share >= UNCAPPED_POWER
    return share is not None and share >= CAPPED_POWER


@record_rule("loaded-machine", "warning", "time", of="both")
def find_loaded_machines(facts: Facts) -> Iterator[str]:
    """Other processes used the machine while the cell trained: the load was higher than the cell's own
    processes explain, or cores were busy without processes of the cell.
    """
    if facts.status != "ok":
        return
    by_host: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for worker in facts.workers:
        by_host[get_host_name(worker) or ""].append(worker)
    for host, workers in by_host.items():
        machine = workers[0]["provenance"] or {}
        cores = get_field_by_path(machine, "host.cores_logical")
        if not cores:
            continue
        own_cores = set().union(
            *(get_field_by_path(w["provenance"], "host.affinity") or () for w in workers)
        )
        node = facts.compute_node_number_of_rank(workers[0]["rank"])
        before = get_field_by_path(facts("provenance.busy_at_start"), f"{node}.load_1m")
        ends = [get_field_by_path(worker["provenance"], "load_1m") or 0.0 for worker in workers]
        one = facts.find_sample_series(workers[0], "host", host)
        threads = facts("provenance.threads_per_worker") or 1
        processes = len(workers) + len(facts.servers)
        # The record of a user's command has one entry for all of its processes.
        if facts("strategy.kind") == "own":
            processes = min(facts.workers_per_node, facts.gpus)
        maximum = max(
            (len(own_cores) or cores) + 2 * threads * processes, HARMLESS_LOAD_PER_CORE * cores
        )
        load = estimate_load_during_cell(facts("time.total_s"), before, max(ends), one)
        if load > maximum:
            yield (
                f"a load of {load:.3g} on {host}, where {processes} processes of the cell had "
                f"{len(own_cores) or cores} of {cores} cores"
            )
        others = estimate_cores_used_by_others(facts, host, one, cores)
        if others > MAX_OTHER_CORES + MAX_OTHER_CORES_SHARE * cores:
            yield f"other processes used {others:.2g} of the {cores} cores of {host} during training"


def estimate_load_during_cell(
    cell_duration_s: float,
    load_before: float | None,
    load_after: float,
    samples: SampleSeries | None,
) -> float:
    """Estimate the mean load during a cell from `load_1m`.

    The kernel's average has a time constant of one minute, so that the part of the load before the cell is
    subtracted. The result is 0 if that part is too large.

    Args:
        cell_duration_s: Time of the cell in seconds.
        load_before: Load at the cell's start, if known.
        load_after: Load at the cell's end.
        samples: Samples of the load, if any.
    """
    spans = [(load_before, load_after, cell_duration_s)]
    if samples is not None and "load_1m" in samples.first_values_by_column:
        first, last = (
            samples.first_values_by_column["load_1m"],
            samples.last_values_by_column["load_1m"],
        )
        spans.append((first, last, samples.last_sample_time_s - samples.first_sample_time_s))
    loads = [0.0]
    for begun, load, span_s in spans:
        retained = math.exp(-span_s / LOAD_TIME_CONSTANT_S)
        if retained < MAX_EARLIER_LOAD_SHARE:
            loads.append((load - retained * (load if begun is None else begun)) / (1 - retained))
    return max(loads)


def estimate_cores_used_by_others(
    facts: Facts, host: str, host_samples: SampleSeries | None, num_cores: int
) -> float:
    """Estimate how many cores of a host other processes used during training.

    Return 0 if unknown.

    Args:
        facts: A record.
        host: Name of the host.
        host_samples: Samples of the host, if any.
        num_cores: Number of the host's cores.
    """
    used = host_samples and host_samples.training_summaries_by_column.get("cpu_pct")
    if not used or used.count < MIN_SAMPLES:
        return 0.0
    own = [
        series.training_summaries_by_column["cpu_pct"].mean
        for (node, _), series in facts.timeline.select_series_of_kind("process").items()
        if node == host and "cpu_pct" in series.training_summaries_by_column
    ]
    return (num_cores * used.mean - sum(own)) / 100

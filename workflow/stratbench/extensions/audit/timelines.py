"""Rules on timelines: GPUs that were idle or slow, and other users of the machine."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from stratbench.analysis.records.derived import value_at
from stratbench.analysis.records.facts import Facts, host_of, longest_pauses_s
from stratbench.analysis.records.samples import BUSY, Series
from stratbench.cell.record import Record
from stratbench.extensions.audit.rule import AuditData, Case, Key, key_of, record_rule, rule
from stratbench.telemetry.pauses import NEGLIGIBLE

#: Minimum number of samples in training: 5 s at the sampler's period of 0.5 s.
SAMPLES = 10
#: The load, in multiples of the cores, from which the sampler and the workers may get no core for seconds.
CROWDED = 4.0
#: The utilisation of one that trained, as a share of its computing time; idle GPUs show 0 to 2 %.
IDLE = 0.03
#: The utilisation of a GPU for each step against the median worker's, which computes as much.
UNLIKE_OTHERS = 0.25
#: The share by which clocks of one kind of GPU differ under equal conditions; consumer GPUs lose 5 % warm.
SLOW_CLOCK = 0.1
#: A GPU is at its power limit where that many of its samples say so, or where it draws so much of it.
CAPPED_SAMPLES, CAPPED_POWER = 0.05, 0.9
#: A GPU below this fraction of its power limit is not limited, whatever the driver reports.
UNCAPPED_POWER = 0.5
#: The time in which the kernel's `load_1m` forgets, in s.
LOAD_S = 60.0
#: The share of an older load in `load_1m` up to which a later one is known well enough.
KEPT = 0.6
#: The load of a machine that is shared, as a share of its cores, from which its neighbours matter.
FULL = 0.75
#: Cores that others may use in training: some, and a share of the host's, for its own services.
OTHERS, OTHERS_SHARE = 0.5, 0.05


def is_crowded(facts: Facts) -> bool:
    """Return whether a process may have waited for a core for seconds."""
    cores = [value_at(worker["provenance"], "host.cores_logical") or 0 for worker in facts.workers]
    loads = [value_at(worker["provenance"], "load_1m") or 0.0 for worker in facts.workers]
    if facts.timeline is not None:
        hosts = facts.timeline.of_kind("host").values()
        loads += [one.overall["load_1m"].most for one in hosts if "load_1m" in one.overall]
    return bool(any(cores)) and max(loads, default=0.0) > CROWDED * max(cores)


@record_rule("paused-while-timed", "unusable", "time", of="both")
def paused_while_timed(facts: Facts) -> Iterator[str]:
    """The cell was paused while it trained: its job was suspended, its processes were stopped, or the
    machine slept. Its times are not those of its training; delete its record to train it again.
    """
    paused_s = longest_pauses_s(facts, lambda p: p["length_s"] if p["in_training"] else 0.0)
    trained_s = facts("time.train_time_s") or facts("time.total_s")
    if paused_s > NEGLIGIBLE * trained_s:
        yield f"paused for {paused_s:.3g} s in {trained_s:.4g} s of training"


@record_rule("idle-worker", "unusable", "time")
def idle_worker(facts: Facts) -> Iterator[str]:
    """A worker's GPU, or its process where it trains on the CPU, did next to nothing in the time in which it
    is said to have trained: it computed elsewhere, or not at all.
    """
    phases = facts("time.breakdown_ms") or {}
    if facts.status != "ok" or is_crowded(facts):
        return
    computed = phases.get("forward", 0.0) + phases.get("backward", 0.0)
    share = computed / sum(phases.values()) if computed else 1.0
    busy: dict[int, float] = {}
    kind = ""
    for worker in facts.workers:
        kind, one = facts.series_of(worker)
        values = one and one.training.get(BUSY[kind])
        if values and values.count >= SAMPLES:
            busy[worker["rank"]] = values.mean
    # Processes take turns on their cores; a GPU that waits for a slowed one is busy in a kernel of NCCL.
    are_alike = kind == "gpu" and not facts("settings.slowdown")
    steps = {worker["rank"]: worker["steps"] or 1 for worker in facts.workers}
    usual = median(mean / steps[rank] for rank, mean in busy.items()) if busy and are_alike else 0.0
    for rank, mean in busy.items():
        its = usual * steps[rank]
        if mean < max(100 * IDLE * share, UNLIKE_OTHERS * its):
            others = f", others for as many steps in {its:.3g} %" if its else ""
            yield f"the {kind} of rank {rank} was busy in {mean:.3g} % of training{others}"


@rule("clock-low", "warning", "time")
def clock_low(evidence: AuditData) -> Iterator[Case]:
    """A GPU worked at a lower clock than others of its kind in this study, or than its application clock, and
    was not at its power limit: the times are of a slowed GPU, or compare clocks, not strategies.
    """
    by_gpu: dict[str, list[tuple[Key, Record, dict[str, Any], Series]]] = defaultdict(list)
    for record in evidence.records:
        key = key_of(record["cell"])
        facts = Facts(record, evidence.timelines.get(key))
        for worker in record["workers"] if facts.timeline else ():
            one, name = facts.gpu_series(worker), value_at(worker["provenance"], "gpu.name")
            if name and one and one.working_clock and one.working_clock.count >= SAMPLES:
                by_gpu[name].append((key, record, worker, one))
    for members in by_gpu.values():
        usual: dict[Key, list[float]] = defaultdict(list)
        for key, _, _, one in members:
            usual[key].append(one.working_clock.mean)
        best = max(median(clocks) for clocks in usual.values())
        for _, record, worker, one in members:
            clock = one.working_clock.mean
            allowed = value_at(worker["provenance"], "gpu.application_sm_clock_mhz") or 0
            usual, whose = max((best, "others at"), (allowed, "its application clock is"))
            if clock < (1 - SLOW_CLOCK) * usual and not is_at_its_limit(worker, one):
                figures = (
                    f"rank {worker['rank']} worked at {clock:.0f} MHz, {whose} {usual:.0f} MHz"
                )
                yield record["cell"], figures


def is_at_its_limit(worker: dict[str, Any], one: Series) -> bool:
    """Return whether a GPU's power explains a low clock."""
    limit_w, power = (
        value_at(worker["provenance"], "gpu.power_limit_w"),
        one.training.get("power_w"),
    )
    share = power.mean / limit_w if limit_w and power else None
    if one.capped_share >= CAPPED_SAMPLES:
        return share is None or share >= UNCAPPED_POWER
    return share is not None and share >= CAPPED_POWER


@record_rule("loaded-machine", "warning", "time", of="both")
def loaded_machine(facts: Facts) -> Iterator[str]:
    """Others used the machine while the cell trained: more processes wanted a core than the cell's own and
    the cores explain, or cores were busy with none of the cell's processes.
    """
    if facts.status != "ok":
        return
    by_host: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for worker in facts.workers:
        by_host[host_of(worker) or ""].append(worker)
    for host, workers in by_host.items():
        machine = workers[0]["provenance"] or {}
        cores = value_at(machine, "host.cores_logical")
        if not cores:
            continue
        own_cores = set().union(
            *(value_at(w["provenance"], "host.affinity") or () for w in workers)
        )
        node = facts.node_of(workers[0]["rank"])
        before = value_at(facts("provenance.busy_at_start"), f"{node}.load_1m")
        ends = [value_at(worker["provenance"], "load_1m") or 0.0 for worker in workers]
        one = facts.samples_on(workers[0], "host", host)
        threads = facts("provenance.threads_per_worker") or 1
        processes = len(workers) + len(facts.servers)
        if facts("strategy.kind") == "own":  # whose processes have one entry
            processes = min(facts.workers_per_node, facts.gpus)
        maximum = max((len(own_cores) or cores) + 2 * threads * processes, FULL * cores)
        load = load_while_running(facts("time.total_s"), before, max(ends), one)
        if load > maximum:
            yield (
                f"a load of {load:.3g} on {host}, where {processes} processes of the cell had "
                f"{len(own_cores) or cores} of {cores} cores"
            )
        others = cores_of_others(facts, host, one, cores)
        if others > OTHERS + OTHERS_SHARE * cores:
            yield f"others used {others:.2g} of the {cores} cores of {host} in training"


def load_while_running(
    total_s: float, before: float | None, after: float, one: Series | None
) -> float:
    """Return the load average in the time of a cell, from `load_1m`.

    The kernel's average has a time constant of a minute, so the load before the cell is subtracted. 0 if most
    of it is from before.

    Args:
        total_s: Time of the cell.
        before: Load at its start, if known.
        after: Load at its end.
        one: Samples of the load.
    """
    spans = [(before, after, total_s)]
    if one is not None and "load_1m" in one.first:
        spans.append((one.first["load_1m"], one.last["load_1m"], one.last_s - one.first_s))
    loads = [0.0]
    for begun, load, span_s in spans:
        retained = math.exp(-span_s / LOAD_S)
        if retained < KEPT:
            loads.append((load - retained * (load if begun is None else begun)) / (1 - retained))
    return max(loads)


def cores_of_others(facts: Facts, host: str, one: Series | None, cores: int) -> float:
    """Return the busy cores of a host in training without the cell's processes.

    Return 0 if unknown.

    Args:
        facts: A record.
        host: Name of the host.
        one: Samples of the host.
        cores: Number of its cores.
    """
    used = one and one.training.get("cpu_pct")
    if not used or used.count < SAMPLES:
        return 0.0
    own = [
        series.training["cpu_pct"].mean
        for (node, _), series in facts.timeline.of_kind("process").items()
        if node == host and "cpu_pct" in series.training
    ]
    return (cores * used.mean - sum(own)) / 100

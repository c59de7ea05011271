"""Rules on timelines: what was sampled beside a cell, against its record and against other cells."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from stratbench.analysis.audit.checks import Facts, host_of, name_of_gpu, unless
from stratbench.analysis.audit.rule import Case, Evidence, Key, key_of, named, record_rule, rule
from stratbench.analysis.records.derived import value_at
from stratbench.analysis.records.samples import BUSY, Series, Timeline
from stratbench.cell.record import Record
from stratbench.cell.text.words import names_text

#: The fewest samples of training by which a cell is judged: 5 s at the sampler's period of 0.5 s.
SAMPLES = 10
#: The time without a sample that is believed: a share of the cell, and seconds. The sampler runs at the
#: lowest priority, and on crowded machines was seen to get no core for 4 s.
MISSING, MISSING_S = 0.1, 10.0
#: The time by which samples may go on after a cell's end; of measured ones the last is 0.1 s before it.
AFTER_S = 2.0
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
#: A GPU that draws less than this share of its limit is not at it, whatever the driver says.
UNCAPPED_POWER = 0.5
#: Columns of a GPU's samples, what cannot be exceeded, and by which factor for moments.
BOUNDS = (
    ("gpu_util_pct", 100.0, 1.0),
    ("mem_used_bytes", "gpu.memory_bytes", 1.0),
    ("sm_clock_mhz", "gpu.max_sm_clock_mhz", 1.0),
    ("power_w", "gpu.power_limit_w", 1.5),
)
#: The time in which the kernel's `load_1m` forgets, in s.
LOAD_S = 60.0
#: The share of an older load in `load_1m` up to which a later one is known well enough.
KEPT = 0.6
#: The load of a machine that is shared, as a share of its cores, from which its neighbours matter.
FULL = 0.75
#: Cores that others may use in training: some, and a share of the host's, for its own services.
OTHERS, OTHERS_SHARE = 0.5, 0.05


def is_crowded(facts: Facts) -> bool:
    """Whether so many processes wanted a core that one may have got none for seconds."""
    cores = [value_at(worker["provenance"], "host.cores_logical") or 0 for worker in facts.workers]
    loads = [value_at(worker["provenance"], "load_1m") or 0.0 for worker in facts.workers]
    if facts.timeline is not None:
        hosts = facts.timeline.of_kind("host").values()
        loads += [one.overall["load_1m"].most for one in hosts if "load_1m" in one.overall]
    return bool(any(cores)) and max(loads, default=0.0) > CROWDED * max(cores)


@record_rule("timeline-unlike-record", "doubtful", "time")
def timeline_unlike_record(facts: Facts) -> Iterator[str]:
    """The timeline is of another cell, or not of the whole cell: other hosts, GPUs or workers, a time without
    samples, more or less training than the record has.
    """
    timeline = facts.timeline
    if timeline is None or not facts.whole:
        return
    yield from faults_of_places(facts, timeline)
    if not is_crowded(facts):
        yield from faults_of_span(facts, timeline)


def faults_of_places(facts: Facts, timeline: Timeline) -> Iterator[str]:
    """Checks that the hosts, GPUs and workers of the samples are the record's."""
    used: dict[str, set[Any]] = defaultdict(set)
    for worker in facts.workers:
        host = host_of(worker)
        used["host"].add((host, host))
        used["process"].add((host, f"rank{worker['rank']}"))
        if facts("provenance.device") == "cuda":
            used["gpu"].add((host, name_of_gpu(worker)))
    trained = max((count_in_training(one) for one in timeline.of_kind("host").values()), default=0)
    for kind, its in used.items():
        if any(None in place for place in its):
            continue
        seen = {
            (node, name)
            for node, name in timeline.of_kind(kind)
            if kind != "process" or name.startswith("rank")
        }
        if others := seen - its:
            yield f"samples of {described(kind, others)}, which no worker of the record used"
        lacking = its - seen
        if kind == "gpu":  # without a number, NVML does not know it, or not as an instance
            lacking = {place for place in lacking if place[1].isdecimal()}
        # A worker that ended at once may never have been sampled.
        if lacking and (kind != "process" or trained >= SAMPLES):
            yield f"no samples of {described(kind, lacking)}"


def described(kind: str, places: set[Any]) -> str:
    """Up to three hosts, GPUs or processes in words."""
    names = [
        name if kind == "host" else f"{kind} {name}" + (f" of {node}" if node else "")
        for node, name in sorted(places)
    ]
    return names_text(names, 3)


def count_in_training(one: Series) -> int:
    """The number of samples in training, by the column that has most."""
    return max((values.count for values in one.training.values()), default=0)


def faults_of_span(facts: Facts, timeline: Timeline) -> Iterator[str]:
    """Checks that hosts and GPUs were sampled from start to end, and how long training was."""
    total_s = facts("time.total_s")
    slack_s = max(MISSING_S, MISSING * total_s)
    for (node, kind, name), one in timeline.series.items():
        if kind == "process":
            continue
        what = described(kind, {(node, name)})
        without_s = max(one.first_s, one.longest_gap_s, total_s - one.last_s)
        if without_s > slack_s:
            yield f"{without_s:.3g} of {total_s:.4g} s without a sample of {what}"
        # Each node's clock starts when its part of the cell does.
        if one.last_s > total_s + (AFTER_S if len(timeline.of_kind("host")) == 1 else slack_s):
            yield f"samples of {what} until {one.last_s:.4g} s, of a cell of {total_s:.4g} s"
    first = facts.workers[0]
    host = host_of(first)
    one, trained_s = facts.samples_on(first, "host", host), first["train_time_s"]
    if one is None or not trained_s or facts.status != "ok":
        return
    # Each stretch of training begins and ends between two samples.
    slack_s = MISSING * trained_s + 2 * one.longest_gap_s * (1 + len(facts("time.epoch_times_s")))
    if abs(one.train_s - trained_s) > slack_s:
        yield (
            f"{one.train_s:.4g} s of training in the samples of {host}; rank {first['rank']} "
            f"trained {trained_s:.4g} s"
        )


@rule("same-timeline-twice", "doubtful", "time")
def same_timeline_twice(evidence: Evidence) -> Iterator[Case]:
    """Two cells have the same samples to the last digit: one is a copy."""
    alike: dict[str, list[Record]] = defaultdict(list)
    for record in evidence.records:
        timeline = evidence.timelines.get(key_of(record["cell"]))
        counts = [one.count for one in timeline.series.values() if one.overall] if timeline else ()
        if sum(counts) >= SAMPLES:
            alike[timeline.digest].append(record)
    for records in alike.values():
        cells = [record["cell"] for record in records]
        for cell in cells if len(cells) > 1 else ():
            yield cell, f"the samples of {named(cells)}"


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


@record_rule("contradictory-timeline", "unusable", "time")
def contradictory_timeline(facts: Facts) -> Iterator[str]:
    """Samples of a GPU say more than it can do: memory, clock, power or utilisation."""
    for worker in facts.workers:
        one = facts.gpu_series(worker)
        for column, most, factor in BOUNDS if one else ():
            limit = value_at(worker["provenance"], most) if isinstance(most, str) else most
            if limit and column in one.overall:
                yield from unless(
                    f"{column} of rank {worker['rank']} in the timeline",
                    one.overall[column].most,
                    "<=",
                    "the GPU's most" + (f" x {factor:g}" if factor != 1 else ""),
                    factor * limit,
                )


@rule("clock-low", "doubtful", "time")
def clock_low(evidence: Evidence) -> Iterator[Case]:
    """A GPU worked at a lower clock than others of its kind in this study, and was not at its power limit:
    the times compare clocks, not strategies.
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
            if clock < (1 - SLOW_CLOCK) * best and not is_at_its_limit(worker, one):
                yield (
                    record["cell"],
                    f"rank {worker['rank']} worked at {clock:.0f} MHz, others at {best:.0f} MHz",
                )


def is_at_its_limit(worker: dict[str, Any], one: Series) -> bool:
    """Whether a GPU's power explains a low clock."""
    limit_w, power = (
        value_at(worker["provenance"], "gpu.power_limit_w"),
        one.training.get("power_w"),
    )
    share = power.mean / limit_w if limit_w and power else None
    if one.capped_share >= CAPPED_SAMPLES:
        return share is None or share >= UNCAPPED_POWER
    return share is not None and share >= CAPPED_POWER


@record_rule("loaded-machine", "doubtful", "time", of="both")
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
        place = workers[0]["provenance"] or {}
        cores = value_at(place, "host.cores_logical")
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
        most = max((len(own_cores) or cores) + 2 * threads * processes, FULL * cores)
        load = load_while_running(facts("time.total_s"), before, max(ends), one)
        if load > most:
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
    """The number of processes that wanted a core in the time of a cell, from `load_1m`.

    The kernel's average forgets with a time constant of a minute: what was before is taken out. 0 where
    most of it is from before.
    """
    spans = [(before, after, total_s)]
    if one is not None and "load_1m" in one.first:
        spans.append((one.first["load_1m"], one.last["load_1m"], one.last_s - one.first_s))
    loads = [0.0]
    for begun, load, span_s in spans:
        kept = math.exp(-span_s / LOAD_S)
        if kept < KEPT:
            loads.append((load - kept * (load if begun is None else begun)) / (1 - kept))
    return max(loads)


def cores_of_others(facts: Facts, host: str, one: Series | None, cores: int) -> float:
    """The cores of a host that were busy in training, without the cell's own processes; 0 if unknown."""
    used = one and one.training.get("cpu_pct")
    if not used or used.count < SAMPLES:
        return 0.0
    own = [
        series.training["cpu_pct"].mean
        for (node, _), series in facts.timeline.of_kind("process").items()
        if node == host and "cpu_pct" in series.training
    ]
    return (cores * used.mean - sum(own)) / 100

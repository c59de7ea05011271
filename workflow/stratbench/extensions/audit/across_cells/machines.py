"""Rules on the machine: other load, slowed clocks, shared cores and shared GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime

import pandas as pd

from stratbench.analysis.records.derived import value_at
from stratbench.analysis.records.facts import Facts, host_of
from stratbench.analysis.records.samples import HELD
from stratbench.cell.record import Record
from stratbench.cell.text.words import GIB, bytes_text, counted
from stratbench.extensions.audit.rule import AuditData, Case, named, record_rule, rows_of, rule
from stratbench.telemetry.machine.foreign_processes import OTHERS_BYTES

#: The share of the samples in which a GPU may be slowed.
THROTTLED = 0.01
#: Cores that others may use when a cell starts: some, and a share of the node's, for its services.
OTHERS, OTHERS_SHARE = 0.25, 0.05
#: GPU memory of a process' CUDA context, rounded up: 300 to 600 MiB.
CONTEXT_BYTES = GIB * 3 // 4
#: Maximum GPU memory of a context, NCCL and cuDNN beyond the allocator; some hundred MiB to 3 GiB.
LIBRARIES_BYTES = 4 * GIB
#: Start and end are recorded in whole seconds.
TOGETHER_S = 2.5


@rule("throttled", "warning", "time")
def throttled(evidence: AuditData) -> Iterator[Case]:
    """A GPU was slowed down by heat or by a lack of power in part of the samples."""
    for row in rows_of(evidence.ok[evidence.ok["throttled_share"] > THROTTLED]):
        yield row, f"throttled in {row.throttled_share:.0%} of the samples"


@rule("busy-machine", "warning", "time")
def busy_machine(evidence: AuditData) -> Iterator[Case]:
    """Other processes used the machine when the cell started: it measures them too."""
    for row in rows_of(evidence.of_any_loop[are_busy(evidence.of_any_loop)]):
        yield row, f"others used {row.other_cpu_cores:.2g} CPU cores"


def are_busy(cells: pd.DataFrame) -> pd.Series:
    """Return per cell whether the foreign CPU load at its start exceeded that of services."""
    allowed = (OTHERS_SHARE * cells["node_cores"]).clip(lower=OTHERS).fillna(OTHERS)
    return cells["other_cpu_cores"] > allowed


@rule("workers-are-processes", "note", "time")
def workers_are_processes(evidence: AuditData) -> Iterator[Case]:
    """Workers are CPU processes on shared cores: speedups, efficiencies and the cost of communication say
    nothing about GPUs.
    """
    for experiment, rows in evidence.ok.groupby("experiment", sort=False):
        cpu = rows[rows["device_kind"] == "cpu"]
        if len(cpu):
            cores = " or ".join(f"{n:g}" for n in sorted(set(cpu["cpu_cores"].dropna())))
            hosts = ", ".join(sorted(set(cpu["host"].dropna())))
            yield {"experiment": experiment}, f"CPU processes sharing {cores} cores of {hosts}"


@rule("processes-share-cores", "warning", "time")
def processes_share_cores(evidence: AuditData) -> Iterator[Case]:
    """There are more workers than cores: they take turns, and more workers bring no speed."""
    for experiment, rows in evidence.ok.groupby("experiment", sort=False):
        cpu = rows[(rows["device_kind"] == "cpu") & (rows["gpus"] > rows["cpu_cores"])]
        for gpus, crowded in cpu.groupby("gpus", sort=False):
            cores = crowded["cpu_cores"].max()
            where = {"experiment": experiment, "gpus": gpus}
            yield where, f"{gpus} processes on {cores:g} cores"


@record_rule("ranks-share-cores", "warning", "time")
def ranks_share_cores(facts: Facts) -> Iterator[str]:
    """The workers of a host with GPUs may use fewer cores than there are workers, as where SLURM binds all
    tasks to the first core: they take turns in issuing work to their GPUs. Ask for cores per task, or bind
    none.
    """
    by_host: dict[str | None, list[set[int]]] = defaultdict(list)
    for worker in (
        facts.workers if facts("provenance.device") == "cuda" and not facts.elastic else ()
    ):
        cores = value_at(worker["provenance"], "host.affinity")
        by_host[host_of(worker)].append(set(cores or ()))
    for host, bound in by_host.items():
        cores = set().union(*bound)
        if all(bound) and len(cores) < len(bound):
            yield f"{len(bound)} workers of {host} on {counted(len(cores), 'core')}: {sorted(cores)}"


@record_rule("contradictory-devices", "unusable", "all")
def contradictory_devices(facts: Facts) -> Iterator[str]:
    """The workers did not run where the record says: two of them on one GPU, none, or another kind."""
    places: dict[tuple[str, str], int] = {}
    for worker in facts.workers:
        recorded, name = worker["provenance"], f"rank {worker['rank']}"
        if not recorded:
            yield f"{name} does not say where it ran"
            continue
        device, host = recorded["device"], recorded["host"]["name"]
        if device.partition(":")[0] != facts("provenance.device"):
            yield f"{name} ran on {device}, and the cell on {facts('provenance.device')}"
        is_cuda = device.startswith("cuda")
        if is_cuda != ("gpu" in recorded):
            yield f"{name} ran on {device} and {'names a' if 'gpu' in recorded else 'names no'} GPU"
        if not is_cuda:
            continue
        uuid = value_at(recorded, "gpu.uuid")
        for what, value in (("GPU", uuid), ("device", f"{host} {device}")):
            if value is None:
                continue
            if (what, value) in places:
                yield f"ranks {places[what, value]} and {worker['rank']} both ran on {what} {value}"
            places[what, value] = worker["rank"]


@record_rule("foreign-process-on-gpu", "warning", "time", of="both")
def foreign_process_on_gpu(facts: Facts) -> Iterator[str]:
    """A process of somebody else computed on a GPU of the cell, or held memory there: what it did there
    slowed the cell.
    """
    if facts.status != "oom":
        yield from foreign_processes_in(facts)
        yield from memory_of_others(facts)


@record_rule("memory-held-by-others", "unusable", "all", of="both")
def memory_held_by_others(facts: Facts) -> Iterator[str]:
    """The cell ran out of memory while somebody else held a part of its GPU: alone it may not."""
    if facts.status == "oom":
        yield from foreign_processes_in(facts)


def foreign_processes_in(facts: Facts) -> Iterator[str]:
    """Yield the foreign processes on the cell's GPUs, at its start and during it."""
    own = own_gpus(facts)
    seen: dict[tuple[str, int], str] = {}
    for node, busy in (facts("provenance.busy_at_start") or {}).items():
        for index, pids in (busy.get("other_gpu_processes") or {}).items():
            for pid in pids if (int(node), int(index)) in own else ():
                seen[node, pid] = f"process {pid} on GPU {index} when the cell began"
    for node, foreign_processes in (facts("provenance.foreign_gpu_processes") or {}).items():
        for entry in foreign_processes:
            held = f" with up to {bytes_text(entry['bytes'])}" if entry["bytes"] else ""
            gpu = "a MIG instance" if entry["gpu"] is None else f"GPU {entry['gpu']}"
            when = f"from {entry['first_s']:.0f} to {entry['last_s']:.0f} s"
            seen[node, entry["pid"]] = f"process {entry['pid']} on {gpu}{held}, seen {when}"
    yield from seen.values()


def memory_of_others(facts: Facts) -> Iterator[str]:
    """Yield foreign memory on the cell's GPUs, as the worker and the timeline recorded it."""
    for worker in facts.workers:
        # PyTorch may open a context of each process of a node on the node's first GPU.
        is_first = worker["rank"] % facts.workers_per_node == 0
        workers = min(facts.workers_per_node, facts.gpus - worker["rank"])
        siblings = workers - 1 + len(facts.servers) if is_first else 0
        spare = OTHERS_BYTES + siblings * CONTEXT_BYTES
        own, one = worker["memory"] or {}, facts.gpu_series(worker)
        used, mine = (own.get(f"nvml_{which}used_bytes") for which in ("", "process_"))
        reserved, what = own.get("reserved_peak_bytes"), f"the GPU of rank {worker['rank']}"
        if None not in (used, mine) and used - mine > spare:
            yield f"{bytes_text(used - mine)} of {what} are not the worker's"
        sampled = one.training.get(HELD["gpu"]) if one else None
        most = max(used or 0, sampled.most if sampled else 0)
        if reserved is not None and most > max(mine or 0, reserved) + LIBRARIES_BYTES + spare:
            held = f"{bytes_text(most)} of {what} are in use"
            yield f"{held}, the worker reserved {bytes_text(reserved)}"
        before = one.first.get(HELD["gpu"], 0) if one and not one.first_phase else 0
        if before > OTHERS_BYTES:
            yield f"{bytes_text(before)} of {what} were in use before the cell began"


def own_gpus(facts: Facts) -> set[tuple[int, int]]:
    """Return the cell's GPUs, as the numbers of their node and NVML's number there."""
    gpus = {
        (gpu["node"], gpu["index"])
        for gpu in (facts("provenance.gpus") or {}).values()
        if gpu.get("index") is not None
    }
    for worker in facts.workers:
        index = value_at(worker["provenance"], "gpu.index")
        if index is not None:
            gpus.add((facts.node_of(worker["rank"]), index))
    return gpus


@record_rule("groups-cross-nodes", "warning", "time")
def groups_cross_nodes(facts: Facts) -> Iterator[str]:
    """Workers that divide layers between them were on several nodes, though a node could hold them: they
    exchanged activations over the slower link. Let the number of workers on a node be a multiple of
    tensor_parallel_size.
    """
    together = facts.mesh.tensor
    if together > facts.workers_per_node:
        return
    across = [
        first
        for first in range(0, facts.gpus, together)
        if facts.node_of(first) != facts.node_of(first + together - 1)
    ]
    if across:
        each = facts.workers_per_node
        yield f"{len(across)} groups of {together} workers, and {each} workers on a node"


@rule("shared-devices", "unusable", "time")
def shared_devices(evidence: AuditData) -> Iterator[Case]:
    """Two cells were on one GPU at the same time: each slowed the other."""

    def gpus_of(record: Record) -> Iterator[str]:
        uuids = {value_at(worker["provenance"], "gpu.uuid") for worker in record["workers"]}
        yield from uuids - {None}

    for uuid, together_s, one, later in stays_together(evidence, gpus_of):
        yield later["cell"], f"{uuid} {together_s:.0f} s together with {named([one['cell']])}"


@rule("shared-cores", "warning", "time")
def shared_cores(evidence: AuditData) -> Iterator[Case]:
    """Two cells trained on the CPU at the same time, and wanted more cores together than both could use: they
    took turns.
    """

    def hosts_on_cpu(record: Record) -> Iterator[str]:
        if record["provenance"].get("device") == "cpu":
            yield from {host_of(worker) for worker in record["workers"]} - {None}

    for host, together_s, one, later in stays_together(evidence, hosts_on_cpu):
        (cores, wanted), (others, more) = (cores_on(host, record) for record in (one, later))
        if cores & others and wanted + more > len(cores | others):
            yield (
                later["cell"],
                f"{wanted + more} threads on {len(cores | others)} cores of {host}, {together_s:.0f} s "
                f"together with {named([one['cell']])}",
            )


def cores_on(host: str, record: Record) -> tuple[set[int], int]:
    """Return the cores of a host for the cell's workers, and their number of threads."""
    on_host = [worker for worker in record["workers"] if host_of(worker) == host]
    cores = (value_at(worker["provenance"], "host.affinity") or () for worker in on_host)
    threads = value_at(record, "provenance.threads_per_worker") or 1
    return set().union(*cores), threads * len(on_host)


def stays_together(
    evidence: AuditData, places_of: Callable[[Record], Iterable[str]]
) -> Iterator[tuple[str, float, Record, Record]]:
    """Yield hosts or GPUs with two concurrent cells, the time in s, and both cells.

    Cells whose workers came and went, or that were restarted, are left out.
    """
    stays: dict[str, list[tuple[datetime, datetime, Record]]] = defaultdict(list)
    for record in evidence.records:
        begun, ended = (value_at(record, f"provenance.{end}") for end in ("started", "finished"))
        stayed = not record.get("elastic") and not value_at(record, "restarts.between_s")
        for place in places_of(record) if begun and ended and stayed else ():
            stay = (datetime.fromisoformat(begun), datetime.fromisoformat(ended), record)
            stays[place].append(stay)
    for place, listed in stays.items():
        (_, until, one), *rest = sorted(listed, key=lambda stay: stay[:2])
        for begun, ended, later in rest:
            together_s = (min(until, ended) - begun).total_seconds()
            if together_s > TOGETHER_S:
                yield place, together_s, one, later
            if ended > until:  # the one that stays longest meets those that come
                until, one = ended, later

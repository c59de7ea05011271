"""Rules of the audit on the machine: load of other processes, low clocks, shared cores and GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import NamedTuple

import pandas as pd

from stratbench.analysis.records.derived import get_field_by_path
from stratbench.analysis.records.facts import Facts, get_host_name
from stratbench.analysis.records.samples import HELD
from stratbench.cell.record import Record
from stratbench.cell.text.words import GIB, format_bytes, format_count
from stratbench.extensions.audit.rule import (
    AuditData,
    Case,
    describe_cells,
    is_elastic_cell,
    iter_table_rows,
    record_rule,
    rule,
)
from stratbench.telemetry.machine.foreign_processes import OTHERS_BYTES

#: Largest tolerated share of samples in which a GPU is throttled.
MAX_THROTTLED_SHARE = 0.01
#: Cores that other processes may use when a cell starts: the larger of a number and a share of all cores.
MAX_OTHER_CORES, MAX_OTHER_CORES_SHARE = 0.25, 0.05
#: Upper bound on the GPU memory of a process's CUDA context, which takes 300 to 600 MiB.
MAX_CONTEXT_BYTES = GIB * 3 // 4
#: Upper bound on GPU memory that a process has outside of the allocator: context, NCCL and cuDNN.
MAX_LIBRARY_BYTES = 4 * GIB
#: Shortest reported overlap of two cells in seconds. Starts and ends are recorded in whole seconds.
MIN_OVERLAP_S = 2.5


class ConcurrentCells(NamedTuple):
    """Records of two cells that used one host or GPU at the same time, for `overlap_s` seconds."""

    place: str
    overlap_s: float
    earlier: Record
    later: Record


@rule("throttled", "warning", "time")
def find_throttled_gpus(evidence: AuditData) -> Iterator[Case]:
    """A GPU was throttled by heat or by its power supply in a part of the samples."""
    for row in iter_table_rows(evidence.ok[evidence.ok["throttled_share"] > MAX_THROTTLED_SHARE]):
        yield row, f"throttled in {row.throttled_share:.0%} of the samples"


@rule("busy-machine", "warning", "time")
def find_busy_machines(evidence: AuditData) -> Iterator[Case]:
    """Other processes used the CPU when the cell started, and may have slowed it down."""
    for row in iter_table_rows(
        evidence.of_any_loop[flag_cells_on_busy_hosts(evidence.of_any_loop)]
    ):
        yield row, f"other processes used {row.other_cpu_cores:.2g} CPU cores"


def flag_cells_on_busy_hosts(cells: pd.DataFrame) -> pd.Series:
    """Return per cell whether other processes used more CPU cores than system services do.

    The use is that at the cell's start.
    """
    allowed = (
        (MAX_OTHER_CORES_SHARE * cells["node_cores"])
        .clip(lower=MAX_OTHER_CORES)
        .fillna(MAX_OTHER_CORES)
    )
    return cells["other_cpu_cores"] > allowed


@rule("workers-are-processes", "note", "time")
def find_cpu_workers(evidence: AuditData) -> Iterator[Case]:
    """Workers are CPU processes on shared cores: speedups, efficiencies and the cost of communication do not
    apply to GPUs.
    """
    for experiment, rows in evidence.ok.groupby("experiment", sort=False):
        cpu = rows[rows["device_kind"] == "cpu"]
        if len(cpu):
            cores = " or ".join(f"{n:g}" for n in sorted(set(cpu["cpu_cores"].dropna())))
            hosts = ", ".join(sorted(set(cpu["host"].dropna())))
            yield {"experiment": experiment}, f"CPU processes sharing {cores} cores of {hosts}"


@rule("processes-share-cores", "warning", "time")
def find_processes_that_share_cores(evidence: AuditData) -> Iterator[Case]:
    """There are more workers than cores, so that workers wait for each other."""
    for experiment, rows in evidence.ok.groupby("experiment", sort=False):
        cpu = rows[(rows["device_kind"] == "cpu") & (rows["gpus"] > rows["cpu_cores"])]
        for gpus, crowded in cpu.groupby("gpus", sort=False):
            cores = crowded["cpu_cores"].max()
            where = {"experiment": experiment, "gpus": gpus}
            yield where, f"{gpus} processes on {cores:g} cores"


@record_rule("ranks-share-cores", "warning", "time")
def find_ranks_that_share_cores(facts: Facts) -> Iterator[str]:
    """The workers of a host with GPUs have fewer CPU cores than workers, for example because SLURM binds all
    tasks to the first core: they wait for each other before they can start GPU kernels. Request CPUs per
    task, or disable binding.
    """
    by_host: dict[str | None, list[set[int]]] = defaultdict(list)
    for worker in (
        facts.workers if facts("provenance.device") == "cuda" and not is_elastic_cell(facts) else ()
    ):
        cores = get_field_by_path(worker["provenance"], "host.affinity")
        by_host[get_host_name(worker)].append(set(cores or ()))
    for host, bound in by_host.items():
        cores = set().union(*bound)
        if all(bound) and len(cores) < len(bound):
            yield f"{len(bound)} workers of {host} on {format_count(len(cores), 'core')}: {sorted(cores)}"


@record_rule("contradictory-devices", "unusable", "all")
def find_contradictory_devices(facts: Facts) -> Iterator[str]:
    """The devices of the workers contradict the record: two workers on one GPU, no GPU, or another kind."""
    places: dict[tuple[str, str], int] = {}
    for worker in facts.workers:
        recorded, name = worker["provenance"], f"rank {worker['rank']}"
        if not recorded:
            yield f"{name} has no record of its device"
            continue
        device, host = recorded["device"], recorded["host"]["name"]
        if device.partition(":")[0] != facts("provenance.device"):
            yield f"{name} ran on {device}, but the cell on {facts('provenance.device')}"
        is_cuda = device.startswith("cuda")
        if is_cuda != ("gpu" in recorded):
            yield f"{name} ran on {device}, but its record has {'a' if 'gpu' in recorded else 'no'} GPU"
        if not is_cuda:
            continue
        uuid = get_field_by_path(recorded, "gpu.uuid")
        for what, value in (("GPU", uuid), ("device", f"{host} {device}")):
            if value is None:
                continue
            if (what, value) in places:
                yield f"ranks {places[what, value]} and {worker['rank']} both ran on {what} {value}"
            places[what, value] = worker["rank"]


@record_rule("foreign-process-on-gpu", "warning", "time", of="both")
def find_foreign_processes_on_gpu(facts: Facts) -> Iterator[str]:
    """A process of another job computed on a GPU of the cell, or held memory there, and may have slowed the
    cell down.
    """
    if facts.status != "oom":
        yield from iter_foreign_gpu_process_texts(facts)
        yield from iter_foreign_gpu_memory_texts(facts)


@record_rule("memory-held-by-others", "unusable", "all", of="both")
def find_oom_next_to_foreign_processes(facts: Facts) -> Iterator[str]:
    """The cell ran out of memory while another process held a part of its GPU's memory. Without that process
    the cell might fit.
    """
    if facts.status == "oom":
        yield from iter_foreign_gpu_process_texts(facts)


def iter_foreign_gpu_process_texts(facts: Facts) -> Iterator[str]:
    """Yield a text per process of another job on the cell's GPUs.

    The process was there at the cell's start or during the cell.
    """
    own = list_gpus_of_cell(facts)
    seen: dict[tuple[str, int], str] = {}
    for node, busy in (facts("provenance.busy_at_start") or {}).items():
        for index, pids in (busy.get("other_gpu_processes") or {}).items():
            for pid in pids if (int(node), int(index)) in own else ():
                seen[node, pid] = f"process {pid} on GPU {index} when the cell began"
    for node, foreign_processes in (facts("provenance.foreign_gpu_processes") or {}).items():
        for entry in foreign_processes:
            held = f" with up to {format_bytes(entry['bytes'])}" if entry["bytes"] else ""
            gpu = "a MIG instance" if entry["gpu"] is None else f"GPU {entry['gpu']}"
            when = f"from {entry['first_s']:.0f} to {entry['last_s']:.0f} s"
            seen[node, entry["pid"]] = f"process {entry['pid']} on {gpu}{held}, seen {when}"
    yield from seen.values()


def iter_foreign_gpu_memory_texts(facts: Facts) -> Iterator[str]:
    """Yield texts on GPU memory of other processes, from worker measurements and timelines."""
    for worker in facts.workers:
        # PyTorch may open a CUDA context of each process of a node on the node's first GPU.
        is_first = worker["rank"] % facts.workers_per_node == 0
        workers = min(facts.workers_per_node, facts.gpus - worker["rank"])
        siblings = workers - 1 + len(facts.servers) if is_first else 0
        spare = OTHERS_BYTES + siblings * MAX_CONTEXT_BYTES
        own, one = worker["memory"] or {}, facts.find_gpu_sample_series(worker)
        used, mine = (own.get(f"nvml_{which}used_bytes") for which in ("", "process_"))
        reserved, what = own.get("reserved_peak_bytes"), f"the GPU of rank {worker['rank']}"
        if None not in (used, mine) and used - mine > spare:
            yield f"{format_bytes(used - mine)} of {what} belong to other processes"
        sampled = one.training_summaries_by_column.get(HELD["gpu"]) if one else None
        most = max(used or 0, sampled.maximum if sampled else 0)
        if reserved is not None and most > max(mine or 0, reserved) + MAX_LIBRARY_BYTES + spare:
            held = f"{format_bytes(most)} of {what} are in use"
            yield f"{held}, but the worker reserved only {format_bytes(reserved)}"
        before = (
            one.first_values_by_column.get(HELD["gpu"], 0)
            if one and not one.phase_of_first_sample
            else 0
        )
        if before > OTHERS_BYTES:
            yield f"{format_bytes(before)} of {what} were in use before the cell began"


def list_gpus_of_cell(facts: Facts) -> set[tuple[int, int]]:
    """Return the cell's GPUs, each with its node number and NVML's index on that node."""
    gpus = {
        (gpu["node"], gpu["index"])
        for gpu in (facts("provenance.gpus") or {}).values()
        if gpu.get("index") is not None
    }
    for worker in facts.workers:
        index = get_field_by_path(worker["provenance"], "gpu.index")
        if index is not None:
            gpus.add((facts.compute_node_number_of_rank(worker["rank"]), index))
    return gpus


@record_rule("groups-cross-nodes", "warning", "time")
def find_tensor_parallel_groups_across_nodes(facts: Facts) -> Iterator[str]:
    """Tensor-parallel workers of one group were on several nodes, although a node has room for the group:
    they exchanged activations over the slower network. Make the number of workers per node a multiple of
    tensor_parallel_size.
    """
    together = facts.mesh.tensor
    if together > facts.workers_per_node:
        return
    across = [
        first
        for first in range(0, facts.gpus, together)
        if facts.compute_node_number_of_rank(first)
        != facts.compute_node_number_of_rank(first + together - 1)
    ]
    if across:
        each = facts.workers_per_node
        yield f"{len(across)} groups of {together} workers span nodes, with {each} workers per node"


@rule("shared-devices", "unusable", "time")
def find_gpus_shared_by_cells(evidence: AuditData) -> Iterator[Case]:
    """Two cells used one GPU at the same time, and slowed each other down."""

    def iter_gpu_uuids(record: Record) -> Iterator[str]:
        uuids = {
            get_field_by_path(worker["provenance"], "gpu.uuid") for worker in record["workers"]
        }
        yield from uuids - {None}

    for uuid, together_s, one, later in iter_concurrent_cells(evidence, iter_gpu_uuids):
        yield (
            later["cell"],
            f"{uuid} {together_s:.0f} s together with {describe_cells([one['cell']])}",
        )


@rule("shared-cores", "warning", "time")
def find_cpu_cores_shared_by_cells(evidence: AuditData) -> Iterator[Case]:
    """Two cells trained on the CPU at the same time, and together had more threads than cores, so that they
    waited for each other.
    """

    def iter_hosts_of_cpu_cell(record: Record) -> Iterator[str]:
        if record["provenance"].get("device") == "cpu":
            yield from {get_host_name(worker) for worker in record["workers"]} - {None}

    for host, together_s, one, later in iter_concurrent_cells(evidence, iter_hosts_of_cpu_cell):
        (cores, wanted), (others, more) = (
            list_cores_and_count_threads(host, record) for record in (one, later)
        )
        if cores & others and wanted + more > len(cores | others):
            yield (
                later["cell"],
                f"{wanted + more} threads on {len(cores | others)} cores of {host}, {together_s:.0f} s "
                f"together with {describe_cells([one['cell']])}",
            )


def list_cores_and_count_threads(host: str, record: Record) -> tuple[set[int], int]:
    """Return the cores and number of threads of a cell's workers on a host.

    The cores are those that the workers may use.
    """
    on_host = [worker for worker in record["workers"] if get_host_name(worker) == host]
    cores = (get_field_by_path(worker["provenance"], "host.affinity") or () for worker in on_host)
    threads = get_field_by_path(record, "provenance.threads_per_worker") or 1
    return set().union(*cores), threads * len(on_host)


def iter_concurrent_cells(
    evidence: AuditData, list_hosts_or_gpus: Callable[[Record], Iterable[str]]
) -> Iterator[ConcurrentCells]:
    """Yield pairs of cells that used one host or GPU at the same time.

    Elastic cells and cells that were restarted are left out.

    Args:
        evidence: Data of the audit.
        list_hosts_or_gpus: Returns the hosts or GPUs of a record.
    """
    stays: dict[str, list[tuple[datetime, datetime, Record]]] = defaultdict(list)
    for record in evidence.records:
        begun, ended = (
            get_field_by_path(record, f"provenance.{end}") for end in ("started", "finished")
        )
        stayed = not record.get("elastic") and not get_field_by_path(record, "restarts.between_s")
        for place in list_hosts_or_gpus(record) if begun and ended and stayed else ():
            stay = (datetime.fromisoformat(begun), datetime.fromisoformat(ended), record)
            stays[place].append(stay)
    for place, listed in stays.items():
        (_, until, one), *rest = sorted(listed, key=lambda stay: stay[:2])
        for begun, ended, later in rest:
            together_s = (min(until, ended) - begun).total_seconds()
            if together_s > MIN_OVERLAP_S:
                yield ConcurrentCells(place, together_s, one, later)
            if ended > until:  # later cells are compared with the cell that ends last
                until, one = ended, later

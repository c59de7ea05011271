"""Rules on the machine: other load, slowed clocks, shared cores and shared GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise

from stratbench.analysis.audit.checks import Facts, unless_same
from stratbench.analysis.audit.rule import (
    Evidence,
    Found,
    coordinates_of_cell,
    coordinates_of_row,
    record_rule,
    rows_of,
    rule,
)
from stratbench.analysis.derived import value_at
from stratbench.cell.record import Record

#: Limits: a share of the samples, and a number of CPU cores.
THROTTLED, OTHERS = 0.01, 0.25
#: Start and end are recorded in whole seconds.
TOGETHER_S = 2.5


@rule(
    "throttled",
    "doubtful",
    "time",
    "A GPU was slowed down by heat or by a lack of power in part of the samples.",
)
def throttled(evidence: Evidence) -> Iterator[Found]:
    for row in rows_of(evidence.ok[evidence.ok["throttled_share"] > THROTTLED]):
        yield Found(
            coordinates_of_row(row), f"throttled in {row.throttled_share:.0%} of the samples"
        )


@rule(
    "busy-machine",
    "doubtful",
    "time",
    "Other processes used the machine when the cell started: it measures them too.",
)
def busy_machine(evidence: Evidence) -> Iterator[Found]:
    for row in rows_of(evidence.ok[evidence.ok["other_cpu_cores"] > OTHERS]):
        yield Found(coordinates_of_row(row), f"others used {row.other_cpu_cores:.2g} CPU cores")


@rule(
    "software-gpu",
    "unusable",
    "all",
    "The cell was trained on the software GPU of the tests, which runs no kernel: its times, its memory "
    "and its scores are no measurements, and stand in no table.",
)
def on_software_gpu(evidence: Evidence) -> Iterator[Found]:
    for row in rows_of(evidence.cells[evidence.cells["status"] == "unusable"]):
        yield Found(coordinates_of_row(row), row.reason)


@rule(
    "workers-are-processes",
    "note",
    "time",
    "Workers are CPU processes on shared cores: speedups, efficiencies and the cost of communication "
    "say nothing about GPUs.",
)
def workers_are_processes(evidence: Evidence) -> Iterator[Found]:
    for experiment, rows in evidence.ok.groupby("experiment", sort=False):
        cpu = rows[rows["device_kind"] == "cpu"]
        if len(cpu):
            cores = " or ".join(f"{n:g}" for n in sorted(set(cpu["cpu_cores"].dropna())))
            hosts = ", ".join(sorted(set(cpu["host"].dropna())))
            yield Found(
                {"experiment": experiment}, f"CPU processes sharing {cores} cores of {hosts}"
            )


@rule(
    "processes-share-cores",
    "doubtful",
    "time",
    "There are more workers than cores: they take turns, and more workers bring no speed.",
)
def processes_share_cores(evidence: Evidence) -> Iterator[Found]:
    for experiment, rows in evidence.ok.groupby("experiment", sort=False):
        cpu = rows[(rows["device_kind"] == "cpu") & (rows["gpus"] > rows["cpu_cores"])]
        for gpus, crowded in cpu.groupby("gpus", sort=False):
            cores = crowded["cpu_cores"].max()
            where = {"experiment": experiment, "gpus": gpus}
            yield Found(where, f"{gpus} processes on {cores:g} cores")


@record_rule(
    "contradictory-devices",
    "unusable",
    "all",
    "The workers did not run where the record says: two of them on one GPU, none, or another kind.",
)
def contradictory_devices(facts: Facts) -> Iterator[str]:
    places: dict[tuple[str, str], int] = {}
    for worker in facts.workers:
        place, name = worker["provenance"], f"rank {worker['rank']}"
        if not place:
            yield f"{name} does not say where it ran"
            continue
        device, host = place["device"], place["host"]["name"]
        yield from unless_same(
            f"device of {name}",
            device.partition(":")[0],
            "provenance.device",
            facts("provenance.device"),
        )
        is_cuda = device.startswith("cuda")
        if is_cuda != ("gpu" in place):
            yield f"{name} ran on {device} and {'names a' if 'gpu' in place else 'names no'} GPU"
        if not is_cuda:
            continue
        uuid = value_at(place, "gpu.uuid")
        for what, value in (("GPU", uuid), ("device", f"{host} {device}")):
            if value is None:
                continue
            if (what, value) in places:
                yield f"ranks {places[what, value]} and {worker['rank']} both ran on {what} {value}"
            places[what, value] = worker["rank"]


@rule(
    "shared-devices",
    "unusable",
    "time",
    "Two cells were on one GPU at the same time: each slowed the other.",
)
def shared_devices(evidence: Evidence) -> Iterator[Found]:
    stays: dict[str, list[tuple[datetime, datetime, Record]]] = defaultdict(list)
    for record in evidence.records:
        begun, ended = (value_at(record, f"provenance.{end}") for end in ("started", "finished"))
        if not begun or not ended:
            continue
        uuids = {value_at(worker["provenance"], "gpu.uuid") for worker in record["workers"]} - {
            None
        }
        for uuid in uuids:
            stay = (datetime.fromisoformat(begun), datetime.fromisoformat(ended), record)
            stays[uuid].append(stay)
    for uuid, listed in stays.items():
        listed.sort(key=lambda stay: stay[:2])
        for (_, until, one), (begun, _, other_one) in pairwise(listed):
            together_s = (until - begun).total_seconds()
            if together_s > TOGETHER_S:
                first, second = one["cell"], other_one["cell"]
                where = coordinates_of_cell(second)
                named = f"{first['strategy']} on {first['gpus']}, repeat {first['repeat']}"
                yield Found(where, f"{uuid} {together_s:.0f} s together with {named}")

"""Honest studies of many kinds with their timelines, and whole lies: records and samples that fit each other.

A lie changes all that one telling it would change, not a single figure.
"""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import fixture_records as fixture
import pandas as pd
from planted import faster, started_again

from stratbench.analysis.records.columns import COLUMNS, build_row_from_record
from stratbench.analysis.records.samples import Timeline, parse_timeline
from stratbench.extensions.audit import audit
from stratbench.extensions.audit.rule import make_cell_key

Record = dict[str, Any]
Rows = list[dict[str, Any]]
#: strategy, workers, repeat
Place = tuple[str, int, int]
STRATEGIES = ("single", "ddp", "fsdp", "ps-sync", "ps-async")
DDP, ASYNC = ("ddp", 4, 0), ("ps-async", 4, 2)
GIB = 2**30


@dataclass
class Study:
    """Records and samples of a study; samples are None where a cell has no timeline."""

    records: dict[Place, Record]
    samples: dict[Place, Rows | None]

    def copied(self) -> Study:
        return Study(dict(self.records), dict(self.samples))

    def open(self, place: Place) -> tuple[Record, Rows]:
        """The record and the samples of a cell, to be changed."""
        self.records[place] = copy.deepcopy(self.records[place])
        self.samples[place] = [dict(row) for row in self.samples[place] or ()]
        return self.records[place], self.samples[place]

    def sample(self, place: Place, **how: Any) -> None:
        """Take the samples anew, to fit the record."""
        self.samples[place] = fixture.timeline_of(self.records[place], **how)

    def places(self, strategy: str, gpus: int) -> list[Place]:
        return [place for place in self.records if place[:2] == (strategy, gpus)]


#: What a lie does, and the name of the honest study that it is told in.
Lie = tuple[Callable[[Study], None], str]
_PARSED: dict[int, tuple[Rows, Timeline]] = {}


def parsed(rows: Rows) -> Timeline:
    """The timeline in samples; each list is read once."""
    if id(rows) not in _PARSED:
        _PARSED[id(rows)] = rows, parse_timeline(io.StringIO(fixture.timeline_text(rows)))
    return _PARSED[id(rows)][1]


def findings(study: Study) -> list[dict[str, Any]]:
    """What the audit finds, but notes."""
    rows, timelines = [], {}
    for place, record in study.records.items():
        row = record["cell"] | build_row_from_record(record, Path("no timeline"))
        if study.samples[place] is not None:
            timelines[make_cell_key(record["cell"])] = parsed(study.samples[place])
        rows.append(row)
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    found = audit.audit_cells(frame, list(study.records.values()), timelines=timelines)
    return [finding for finding in found if finding["severity"] != "note"]


# ---------------------------------------------------------------- honest studies


def study_of(
    change: Callable[[Record], None] = lambda record: None,
    gpus: Iterable[int] = (1, 2, 4),
    repeats: int = 3,
    model: str = "resnet50",
    device: str = "cuda",
    study: str = "constructed",
    period_s: float = 1.0,
    **how: Any,
) -> Study:
    """An honest study whose records `change` alters before the samples are taken."""
    cells = fixture.expand(STRATEGIES, (model,), tuple(gpus), repeats=repeats, study=study)
    made = Study({}, {})
    for cell in cells:
        record = copy.deepcopy(fixture.make_record(cell, "ok", device))
        change(record)
        place = cell.strategy, cell.gpus, cell.repeat
        made.records[place] = record
        made.sample(place, period_s=period_s, **how)
    return made


def scaled_time(factor: float) -> Callable[[Record], None]:
    """A cell that trains faster, and is over sooner."""

    def change(record: Record) -> None:
        before_s = record["time"]["train_time_s"]
        faster(factor)(record)
        gone_s = before_s - record["time"]["train_time_s"]
        record["time"]["total_s"] -= gone_s
        shift_end(record, -gone_s)

    return change


def shift_end(record: Record, by_s: float) -> None:
    """Move the end of a cell."""
    place = record["provenance"]
    end = datetime.fromisoformat(place["finished"]) + timedelta(seconds=by_s)
    place["finished"] = end.isoformat(timespec="seconds")


def quick(record: Record) -> None:
    """An epoch of a small network takes 140 ms on one worker; start-up stays."""
    scaled_time(15)(record)
    for server in (record["server"] or {"servers": ()})["servers"]:
        for link in server["workers"]:
            link["wait_s"] = 0.01


def on_hosts(names: tuple[str, ...]) -> Callable[[Record], None]:
    """Workers of a cell on one host or, with more than two workers, on all of these in blocks."""

    def change(record: Record) -> None:
        gpus, repeat = record["cell"]["gpus"], record["cell"]["repeat"]
        own = names if gpus > 2 else (names[repeat % len(names)],)
        each = gpus // len(own)
        record["provenance"] |= {"nodes": len(own), "workers_per_node": each}
        for worker in record["workers"]:
            place, host = worker["provenance"], own[worker["rank"] // each]
            place["host"]["name"] = host
            place["device"] = f"cuda:{worker['rank'] % each}"
            place["gpu"]["index"] = worker["rank"] % each
            place["gpu"]["uuid"] = f"GPU-{host}-{worker['rank'] % each}"
        if record[
            "server"
        ]:  # half of the bytes cross, as the formulas of docs/strategies.md have it
            moved = record["communication"]
            if len(own) > 1:
                sent = moved["sent_bytes_per_step"]
                moved["local_bytes_per_step"] = sent
                moved["busiest_link_bytes_per_batch"] = sent * gpus / len(own)

    return change


def one_cluster_each(record: Record) -> None:
    """Repeats on one or the other of two clusters."""
    on_hosts(("alpha",) if record["cell"]["repeat"] % 2 else ("beta",))(record)


def slowed(record: Record) -> None:
    """A worker that the study slows, where there are several; the others wait or go on."""
    record["settings"]["slowdown"] = {"workers": [0], "factor": 3.0}
    step_ms = 2.0
    record["strategy"]["details"]["slowdown"] = {
        "factor": 3.0,
        "sigma": 0.0,
        "mean_factor": 3.0,
        "step_without_ms": step_ms,
    }
    phases = record["time"]["breakdown_ms"]
    phases["slowdown"] = 2 * step_ms / record["cell"]["gpus"]
    phases[max(phases, key=phases.get)] -= phases["slowdown"]


def as_instances(record: Record) -> None:
    """GPUs are MIG instances, which have no number, no power and no energy."""
    for worker in record["workers"]:
        worker["provenance"]["gpu"].pop("index")
        worker["provenance"]["gpu"]["uuid"] = f"MIG-{worker['rank']}"
    record["energy"] = dict.fromkeys(record["energy"])


def at_the_limit(record: Record) -> None:
    """GPUs that draw all they may."""
    energy = record["energy"]
    factor = 0.97 * 400 / 300
    record["energy"] = {name: factor * value for name, value in energy.items()}


def in_a_container(record: Record) -> None:
    """NVML does not know the worker's number; NCCL and cuDNN take 2 GiB."""
    for worker in record["workers"]:
        worker["memory"] = dict(worker["memory"])
        worker["memory"]["nvml_used_bytes"] = worker["memory"]["reserved_peak_bytes"] + 2 * GIB


def known_to_nvml(record: Record) -> None:
    for worker in record["workers"]:
        used = worker["memory"]["nvml_used_bytes"]
        worker["memory"] = worker["memory"] | {
            "nvml_process_used_bytes": used,
        }
        if worker["rank"] == 0:  # the others' contexts
            worker["memory"]["nvml_used_bytes"] = used + (len(record["workers"]) - 1) * 500 * 2**20


def small_test_set(record: Record) -> None:
    """360 images of ten easy classes: scores of many cells agree."""
    record["data"]["test_samples"] = 360
    entries = record["score"]["per_epoch"]
    noise = fixture.random_of("easy", *record["cell"].values())
    for i, entry in enumerate(entries):
        entry["score"] = (round(360 * (0.97 - 0.3 * 2.0**-i)) + noise.randint(-2, 2)) / 360
        loss = fixture.random_of("a", record["cell"]["repeat"], i).uniform(0.99, 1.01)
        entry["test_loss"] = loss * (0.1 + 0.6 * 2.0**-i) + noise.uniform(0, 1e-3)
    scores = [entry["score"] for entry in entries]
    record["score"] |= {"final": scores[-1], "best": max(scores)}


def no_batchnorm(record: Record) -> None:
    """Equal arithmetic on any number of workers, but for rounding."""
    record["model"] |= {"batchnorm": False, "dropout": False}
    record["memory"]["model_states"]["buffers_bytes"] = 0
    sent = record["communication"]
    if record["server"] is None and record["cell"]["gpus"] > 1:
        over = (record["cell"]["gpus"] - 1) / record["cell"]["gpus"] * 53_120
        share = sent["implied_bytes_per_s"] / sent["sent_bytes_per_step"]
        for way in ("sent", "received"):
            sent[f"{way}_bytes_per_step"] -= over
        sent["implied_bytes_per_s"] -= over * share
    noise = fixture.random_of("rounding", *record["cell"].values())
    for entry in record["score"]["per_epoch"]:
        for name in ("train_loss", "test_loss"):
            entry[name] *= noise.uniform(0.95, 1.05)


def moved_by_zeros(record: Record) -> None:
    """A network that calls a layer in some steps only: replicas and servers agree, and not with `single`."""
    if record["strategy"]["name"] in ("single", "fsdp"):
        for entry in record["score"]["per_epoch"]:
            for name in ("train_loss", "test_loss"):
                entry[name] *= 0.97
        return
    record["strategy"]["traits"] |= {"equals_ddp": False, "is_synchronous_on_one_worker": False}
    record["strategy"]["details"]["moved_by_zeros"] = ["blocks.0.weight"]


def mostly_waiting(record: Record) -> None:
    """Workers of servers over a slow link: a hundredth of a step is computation."""
    if record["server"] and record["cell"]["gpus"] > 1:
        step_ms = record["time"]["step_ms"]["mean"]
        record["time"]["breakdown_ms"] = {
            "data": 0.001 * step_ms,
            "forward": 0.004 * step_ms,
            "backward": 0.006 * step_ms,
            "push": 0.049 * step_ms,
            "server_wait": 0.94 * step_ms,
        }
        record["communication"]["server_wait_ms"] = 0.94 * step_ms


def compiled(record: Record) -> None:
    """Each cell keeps its compiled code in a folder of its own, as `train/worker.py` has it."""
    folder = f"/tmp/job-{'-'.join(map(str, record['cell'].values()))}/compiled"
    for worker in record["workers"]:
        worker["provenance"]["environment"]["TORCHINDUCTOR_CACHE_DIR"] = folder


def resumed(record: Record) -> None:
    """A preempted cell, which was resumed from a checkpoint: the timeline is the last attempt's."""
    started_again(record)
    if not record["cell"]["repeat"]:
        shift_end(record, -record["restarts"]["between_s"])
        record["restarts"] |= {"count": 0, "from_steps": [], "repeated_s": 0.0, "between_s": 0.0}


def after_a_busy_minute(record: Record) -> None:
    """What ran before is over when the cell begins, and still in its load."""
    record["provenance"]["busy_at_start"] = {"0": {"other_cpu_cores": 0.02, "load_1m": 90.0}}
    left = 90.0 * 2.718281828 ** (-record["time"]["total_s"] / 60)
    for worker in record["workers"]:
        worker["provenance"]["load_1m"] = left + 2.0
        worker["provenance"]["host"] |= {"cores_logical": 64}


def some_neighbours(record: Record) -> None:
    """A shared node with a load that its many cores take."""
    for worker in record["workers"]:
        worker["provenance"]["load_1m"] = 40.0


def monitored(record: Record) -> None:
    """Exporters and file systems take a core of 128 while cells start."""
    record["provenance"]["busy_at_start"] = {"0": {"other_cpu_cores": 1.0, "load_1m": 1.0}}
    for worker in record["workers"]:
        worker["provenance"]["host"]["cores_logical"] = 128


def power_capped() -> Study:
    """GPUs at their limit, whose clocks differ with what they compute, as the driver says."""
    found = study_of(at_the_limit)
    for place, rows in found.samples.items():
        for row in of_kind(rows, "gpu", phase="train"):
            row |= {"throttle": "sw_power_cap", "sm_clock_mhz": 1500 if place[0] == "ddp" else 1755}
    return found


def instances() -> Study:
    """MIG instances, of which NVML tells no power."""
    found = study_of(as_instances, gpus=(1,))
    for rows in found.samples.values():
        for row in rows:
            row.pop("power_w", None)
    return found


def waiting() -> Study:
    """Workers that push over a slow link compute in a hundredth of the time; one alone does not wait."""
    found = study_of(mostly_waiting, busy=0.02, period_s=1.0)
    for place, record in found.records.items():
        if not (record["server"] and place[1] > 1):
            found.sample(place, period_s=1.0)
    return found


def preempted() -> Study:
    """Two of three repeats were resumed, and were sampled from then on."""
    found = study_of(resumed, gpus=(1, 2))
    for place in found.records:
        if place[2]:
            record, rows = found.open(place)
            found.samples[place] = [r for r in rows if r["t_s"] > 0.6 * record["time"]["total_s"]]
    return found


def without_timelines() -> Study:
    found = honest("plain").copied()
    found.samples = dict.fromkeys(found.samples)
    return found


def starved() -> Study:
    """A crowded machine: the sampler and the load say so, and the audit may; it must find nothing else."""
    found = honest("plain").copied()
    for place in found.records:
        record, rows = found.open(place)
        for worker in record["workers"]:
            worker["provenance"]["load_1m"] = 300.0
        found.samples[place] = [row for row in rows if int(row["t_s"]) % 20 < 8]
    return found


#: Honest studies by name.
HONEST: dict[str, Callable[[], Study]] = {
    "plain": study_of,
    "ten repeats": lambda: study_of(gpus=(1, 4), repeats=10, study="ten", period_s=2.0),
    "cells of milliseconds": lambda: study_of(quick, model="tiny"),
    "two clusters": lambda: study_of(one_cluster_each),
    "two nodes a cell": lambda: study_of(on_hosts(("n1", "n2")), gpus=(2, 4)),
    "slowed workers": lambda: study_of(slowed, busy=0.35),
    "CPU processes": lambda: study_of(device="cpu", gpus=(1, 2)),
    "quick CPU processes": lambda: study_of(quick, model="tiny", device="cpu", gpus=(1, 2)),
    "MIG instances": instances,
    "GPUs at their limit": power_capped,
    "at the application clock": lambda: at_the_application_clock(),
    "in a container": lambda: study_of(in_a_container),
    "known to NVML": lambda: study_of(known_to_nvml),
    "a small test set": lambda: study_of(small_test_set, repeats=5, period_s=2.0),
    "no BatchNorm": lambda: study_of(no_batchnorm, period_s=2.0),
    "a layer that not every step calls": lambda: study_of(moved_by_zeros, gpus=(1, 2)),
    "servers over a slow link": waiting,
    "after a busy minute": lambda: study_of(after_a_busy_minute),
    "neighbours": lambda: study_of(some_neighbours),
    "no timelines": without_timelines,
    "a node that is monitored": lambda: study_of(monitored, period_s=5.0),
    "compiled": lambda: study_of(compiled, period_s=5.0),
    "preempted and resumed": preempted,
    "a starved sampler": starved,
} | {f"seed {n}": lambda n=n: study_of(study=f"seed{n}", period_s=1.0) for n in range(3)}


@cache
def honest(name: str) -> Study:
    """An honest study, which nobody changes."""
    return HONEST[name]()


#: What may be found in an honest study, since it is so.
SO = {
    "CPU processes": {"processes-share-cores"},
    "quick CPU processes": {"processes-share-cores"},
    "two clusters": {"mixed-cores"},
    "two nodes a cell": {"mixed-cores"},
    "a starved sampler": {"loaded-machine"},
}


# ---------------------------------------------------------------- lies


def of_kind(rows: Rows, kind: str, name: Any = None, phase: str | None = None) -> Rows:
    """Samples of a kind, of one GPU or process, in one phase."""
    return [
        row
        for row in rows
        if row["kind"] == kind
        and (name is None or row["id"] == name)
        and (phase is None or row["phase"] == phase)
    ]


def energy(record: Record, factor: float) -> None:
    record["energy"] = {name: factor * value for name, value in record["energy"].items()}


def fallback(util: float, watts: float) -> Callable[[Study], None]:
    """A strategy that computes on the CPU without a word, 12 times as slow."""

    def plant(study: Study) -> None:
        for place in study.places("ddp", 4):
            record, _ = study.open(place)
            scaled_time(1 / 12)(record)
            energy(record, watts / 300)
            study.sample(place)
            for row in of_kind(study.samples[place], "gpu"):
                row |= {"gpu_util_pct": util * (int(row["t_s"]) % 2), "power_w": watts}

    return plant


def idle_gpu(util: float, place: Place = DDP) -> Callable[[Study], None]:
    """One GPU of four that never works."""

    def plant(study: Study) -> None:
        record, rows = study.open(place)
        energy(record, (3 * 300 + 62) / 1200)
        for row in of_kind(rows, "gpu", 2):
            row |= {"gpu_util_pct": util, "power_w": 62.0}

    return plant


def slow_clock(
    share: float, slower: float, gpu: int | None = None, **also: Any
) -> Callable[[Study], None]:
    """A strategy's GPUs, or one of them, at a part of their clock."""

    def plant(study: Study) -> None:
        for place in study.places("fsdp", 4):
            scaled_time(1 / slower)(study.open(place)[0])
            study.sample(place)
            for row in of_kind(study.samples[place], "gpu", gpu):
                row |= {"sm_clock_mhz": round(1980 * share), "temperature_c": 93} | also

    return plant


def at_clock(mhz: int) -> Callable[[Study], None]:
    """All GPUs of a study at a clock, of 1,410 MHz that applications are allowed and 1,980 MHz at most."""

    def plant(study: Study) -> None:
        for place in study.records:
            record, rows = study.open(place)
            for worker in record["workers"]:
                worker["provenance"]["gpu"]["application_sm_clock_mhz"] = 1410
            for row in of_kind(rows, "gpu"):
                row["sm_clock_mhz"] = mhz

    return plant


def at_the_application_clock() -> Study:
    found = study_of(period_s=1.0)
    at_clock(1410)(found)
    return found


def capped_at_low_power(study: Study) -> None:
    """The driver is made to say that power is short, where it is not."""
    slow_clock(0.5, 1.9, throttle="sw_power_cap")(study)
    for place in study.places("fsdp", 4):
        energy(study.records[place], 0.5)
        for row in of_kind(study.samples[place], "gpu"):
            row["power_w"] *= 0.5


def changed_rows(
    change: Callable[[dict[str, Any]], Any], place: Place = DDP
) -> Callable[[Study], None]:
    """Samples that all say something else."""

    def plant(study: Study) -> None:
        for row in study.open(place)[1]:
            change(row)

    return plant


def sample_gpus(
    place: Place = DDP, gpu: int | None = None, **values: Any
) -> Callable[[Study], None]:
    """GPU samples in training that say something else; a function is given the old value."""

    def plant(study: Study) -> None:
        for row in of_kind(study.open(place)[1], "gpu", gpu, "train"):
            for name, value in values.items():
                row[name] = value(row[name]) if callable(value) else value

    return plant


def told_energy(factor: float) -> Callable[[Study], None]:
    """Another energy in one cell."""
    return lambda study: energy(study.open(DDP)[0], factor)


def tenant(place: Place = DDP, **what: Any) -> Callable[[Study], None]:
    """Somebody else on the machine, as far as one kind of evidence tells."""

    def plant(study: Study) -> None:
        record, rows = study.open(place)
        if "start" in what:
            record["provenance"]["busy_at_start"] = {"0": {"other_gpu_processes": what["start"]}}
        for worker in record["workers"][1:2] if {"nvml", "unnamed"} & what.keys() else ():
            own = worker["memory"] = dict(worker["memory"])
            if "nvml" in what:
                own["nvml_process_used_bytes"] = own["nvml_used_bytes"]
            own["nvml_used_bytes"] += what.get("nvml", what.get("unnamed"))
        for row in of_kind(rows, "gpu", 1):
            if row["phase"] == "train":
                row["mem_used_bytes"] += what.get("training", 0)
            row["mem_used_bytes"] += what.get("always", 0)
        for row in of_kind(rows, "host", phase="train"):
            cores = record["workers"][0]["provenance"]["host"]["cores_logical"]
            row["cpu_pct"] = min(100.0, row["cpu_pct"] + 100 * what.get("cores", 0) / cores)
        for worker in record["workers"] if "load" in what else ():
            worker["provenance"]["load_1m"] = what["load"]
        if "load" in what or "sampled_load" in what:
            for row in of_kind(rows, "host"):
                row["load_1m"] = what.get("load", what.get("sampled_load"))

    return plant


def lagging(strategy: str, gpus: int, epochs: int = 2) -> Callable[[Study], None]:
    """Accuracies of some epochs before, at the losses of the epoch."""

    def plant(study: Study) -> None:
        record, _ = study.open((strategy, gpus, 0))
        entries = record["score"]["per_epoch"]
        scores = [0.1 + 0.01 * i for i in range(epochs)] + [e["score"] for e in entries]
        for entry, score in zip(entries, scores, strict=False):
            entry["score"] = round(score * 10_000) / 10_000
        record["score"] |= {"final": entries[-1]["score"], "best": max(e["score"] for e in entries)}

    return plant


def in_bits(place: Place, *names: str, alone: tuple[str, ...] = ()) -> Callable[[Study], None]:
    """Losses in bits that are told as nats; only strategies in `alone` stay beside it, if any are given."""

    def plant(study: Study) -> None:
        record, _ = study.open(place)
        for entry in record["score"]["per_epoch"]:
            for name in names:
                entry[name] *= 1.4427
        for other in list(study.records) if alone else ():
            if other[0] not in alone:
                del study.records[other]

    return plant


def peak(place: Place, new: Callable[[int, Record], float]) -> Callable[[Study], None]:
    """Another peak, with all that follows from it, samples included."""

    def plant(study: Study) -> None:
        record, _ = study.open(place)
        told, old = record["memory"], record["memory"]["peak_bytes"]
        by = round(new(old, record)) - old
        for name in ("peak_bytes", "peak_over_base_bytes", "requested_peak_bytes"):
            told[name] += by
        for worker in record["workers"]:
            own = worker["memory"] = dict(worker["memory"])
            for name in own:
                if name.endswith("_bytes") and name not in ("base_bytes", "cublas_bytes"):
                    own[name] += by
        told["peak_over_base_bytes"] = max(0, told["peak_over_base_bytes"])
        study.sample(place)

    return plant


def repeats_of_peaks(*factors: float) -> Callable[[Study], None]:
    def plant(study: Study) -> None:
        for repeat, factor in enumerate(factors):
            peak(("ddp", 4, repeat), lambda old, record, by=factor: by * old)(study)

    return plant


CPU = "CPU processes"
#: The rules that are there for each class of lies.
RULES_OF = {
    "timeline": {"idle-worker", "clock-low"},
    "energy": {"unlike-itself"},
    "tenants": {"foreign-process-on-gpu", "loaded-machine"},
    "load": {"loaded-machine"},
    "scores": {"equal-arithmetic-unequal-loss"},
    "memory": {"repeats-uneven-memory"},
}
#: By class: each lie's name, what it does, and the honest study that it is told in.
LIES: dict[str, dict[str, Lie]] = {
    "timeline": {
        "a strategy that fell back to the CPU": (fallback(0, 62.0), "plain"),
        "the same on GPUs that blink": (fallback(2, 66.0), "plain"),
        "a GPU that never works": (idle_gpu(0), "plain"),
        "a GPU that works a tenth": (idle_gpu(9), "plain"),
        "a GPU of a server's worker that hardly works": (idle_gpu(6, ASYNC), "plain"),
        "half of the clock, hot, without a reason": (slow_clock(0.5, 1.9), "plain"),
        "a clock that is a fifth lower": (slow_clock(0.8, 1.2), "plain"),
        "one GPU at half of its clock": (slow_clock(0.5, 1.9, gpu=3), "plain"),
        "a whole study at 1,005 of 1,410 MHz": (at_clock(1005), "plain"),
        "half of the clock by a cap that is none": (capped_at_low_power, "plain"),
        "a process that never runs": (
            changed_rows(
                lambda row: row.update(cpu_pct=0.1) if row["id"] == "rank1" else None, ("ddp", 2, 0)
            ),
            CPU,
        ),
    },
    "energy": {
        "2.6 times": (told_energy(2.6), "plain"),
        "in other units": (told_energy(1e-3), "plain"),
    },
    "tenants": {
        "processes at the start": (tenant(start={"1": [4711]}), "plain"),
        "65 GiB that are not the worker's": (tenant(nvml=65 * GIB), "plain"),
        "2 GiB that are not the worker's": (tenant(nvml=2 * GIB), "plain"),
        "20 GiB, in a container": (tenant(unnamed=20 * GIB), "in a container"),
        "20 GiB in the samples of training": (tenant(training=20 * GIB), "plain"),
        "5 GiB before the cell began": (tenant(always=5 * GIB), "plain"),
        "6 cores in training": (tenant(cores=6), "plain"),
        "4 of 64 cores in training": (tenant(cores=4), "plain"),
    },
    "load": {
        "300 on 64 cores": (tenant(load=300.0), "plain"),
        "150 on 64 cores in the samples alone": (tenant(sampled_load=150.0), "plain"),
        "220 after training, on CPUs": (tenant(("ddp", 2, 0), load=220.0), CPU),
    },
    "scores": {
        "two epochs behind": (lagging("fsdp", 4), "plain"),
        "two epochs behind, by worker counts": (lagging("ddp", 2), "no BatchNorm"),
        "one worker's in bits": (
            in_bits(("single", 1, 0), "test_loss", alone=("single", "ps-async")),
            "no BatchNorm",
        ),
        "bits for nats beside one other": (
            in_bits(("ddp", 4, 0), "train_loss", "test_loss", alone=("ddp", "ps-sync")),
            "plain",
        ),
        "bits for nats beside one worker": (
            in_bits(("ddp", 2, 0), "test_loss", alone=("ddp", "single")),
            "no BatchNorm",
        ),
    },
    "memory": {
        "1, 2 and 4 times in repeats": (repeats_of_peaks(1, 2, 4), "plain"),
        "a tenth more in a repeat": (repeats_of_peaks(1, 1, 1.1), "plain"),
    },
}


def false_findings(name: str) -> Counter[str]:
    """What is found in an honest study, though it is not so, by rule."""
    return Counter(
        f["rule"] for f in findings(honest(name)) if f["rule"] not in SO.get(name, set())
    )


def run_rule(lie: Lie) -> set[str]:
    """The rules that find something because of a lie."""
    plant, name = lie
    study = honest(name).copied()
    plant(study)
    return {finding["rule"] for finding in findings(study)} - SO.get(name, set())

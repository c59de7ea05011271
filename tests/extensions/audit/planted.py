"""Constructed studies in memory, and faults planted in their records."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import fixture_records as fixture
import pandas as pd

from stratbench.analysis.records.columns import COLUMNS, build_row_from_record
from stratbench.cell import record as record_module
from stratbench.cell.coordinates import Cell
from stratbench.extensions.audit.rule import AuditData
from stratbench.strategies import get_option_defaults, get_traits

Record = dict[str, Any]
#: experiment, strategy, workers, repeat
Place = tuple[str, str, int, int]
Records = dict[Place, Record]
STRATEGIES = ("single", "ddp", "fsdp", "ps-sync", "ps-async", "ps-async-modified")
#: Cells that did not finish, in an experiment of their own.
ENDS = {
    ("ddp", 1): "oom",
    ("ddp", 2): "timeout",
    ("ps-async", 2): "diverged",
    ("fsdp", 2): "diverged",
}


@cache
def sound(device: str) -> Records:
    """A study without a fault: two repeats of some strategies, and cells that did not finish."""
    found: Records = {}
    for cell in fixture.expand(STRATEGIES, ("resnet50",), (1, 2), repeats=2):
        found["main", cell.strategy, cell.gpus, cell.repeat] = fixture.make_record(
            cell, "ok", device
        )
    for (strategy, gpus), status in ENDS.items():
        cell = Cell("constructed", "ends", strategy, "resnet50", "cifar10", gpus, 0)
        found["ends", strategy, gpus, 0] = fixture.make_record(cell, status, device)
    return found


@cache
def sound_row(device: str, place: Place) -> dict[str, Any]:
    """A sound record's row of cells.csv."""
    return row(sound(device)[place])


def row(record: Record) -> dict[str, Any]:
    """The record's row of cells.csv; RecordError where it is no record."""
    record_module.validate_record(record)
    return record["cell"] | build_row_from_record(record, Path("no timeline"))


def study(records: Records, device: str) -> AuditData:
    """What the rules are given; RecordError where the merge would refuse a record."""
    sound_ones = sound(device)
    rows = [
        sound_row(device, place) if record is sound_ones.get(place) else row(record)
        for place, record in records.items()
    ]
    return AuditData(pd.DataFrame(rows, columns=list(COLUMNS)), list(records.values()))


def by_command(record: Record) -> None:
    """Make a sound record of workers that step together one of a command of the user's, as sound."""
    options = get_option_defaults("command") | {"command": ["torchrun", "train.py"]}
    gpus, worker, times = record["cell"]["gpus"], record["workers"][0], record["time"]
    record["settings"] |= {"strategy": "command", "options": options}
    record["strategy"] |= {
        "name": "command",
        "kind": "own",
        "options": options,
        "traits": asdict(get_traits("command", options, gpus)),
        "wrap_groups": [],
        "details": {"engine": "command"},
    }
    record["workers"] = [worker]
    worker |= {"train_time_s": times["train_time_s"], "samples": record["batch"]["samples_seen"]}
    peak_bytes = worker["memory"]["peak_bytes"]
    record["memory"] = {
        "method": "maxrss-since-process-start",
        "peak_bytes": peak_bytes,
        "peak_over_base_bytes": None,
        "model_states": None,
    }
    steps, train_s = worker["steps"], times["train_time_s"]
    times |= {"breakdown_ms": None, "start_skew_ms": None, "data_s": None, "warmup_s": None}
    times["step_ms"] |= {"count": steps, "mean": 1e3 * train_s / steps}
    record |= {"communication": None, "compute": None}
    record["model"] |= {"trainable_parameters": None, "initial_weights_sha256": None}
    ended_s = times["total_s"] - 0.1
    record["program"] = {
        "files": ["train.py"],
        "git": None,
        "external": {
            "exit_code": 0,
            "begun_s": 0.5,
            "ended_s": ended_s,
            "cpu_time_s": 0.9 * gpus * train_s,
            "largest_process_bytes": peak_bytes,
            "node_rss_bytes": gpus * peak_bytes,
            "gpu_bytes": None,
        },
        "self_reported": {
            "workers": gpus,
            "parameters": record["model"]["parameters"],
            "batch": record["batch"]["global_batch"],
            "batches_differ": False,
            "steps": steps,
            "samples": record["batch"]["samples_seen"],
            "first_s": 1.0,
            "last_s": ended_s - 0.1,
            "evaluations": len(record["score"]["per_epoch"]),
            "facts": {"torch": "0.0.0+constructed"},
        },
    }


@dataclass(frozen=True)
class Fault:
    """Something wrong in the record at `place`, that `rule` must find; `says` stands in the figures."""

    name: str
    place: Place
    plant: Callable[[Record], None]
    rule: str
    says: str = ""
    device: str = "cuda"

    def planted(self) -> Records:
        """The sound study with the fault."""
        records = dict(sound(self.device))
        records[self.place] = copy.deepcopy(records[self.place])
        self.plant(records[self.place])
        return records


def put(path: str, value: Any) -> Callable[[Record], None]:
    """A fault: another value; in a path, a number is a place in a list and * all of them."""
    return change(path, lambda old: value)


def times(path: str, factor: float) -> Callable[[Record], None]:
    """A fault: a figure multiplied, a whole number staying one."""
    return change(path, lambda old: type(old)(old * factor))


def started_again(record: Record) -> None:
    """As an honest record would be of a cell that kept checkpoints, and went on from one."""
    steps = record["settings"]["epochs"] * record["batch"]["steps_per_epoch"]
    record["settings"]["more"] = {"checkpoints": {"checkpoint_every": 10}}
    record["restarts"] = {
        "count": 1, "from_steps": [10], "repeated_s": 0.5, "between_s": 20.0, "until_step_s": 4.0,
        "checkpoints": {
            "every": 10, "count": (steps - 1) // 10, "bytes": 1000, "held_up_s": 0.1, "written_s": 0.2,
        },
    }  # fmt: skip
    finished = datetime.fromisoformat(record["provenance"]["finished"]) + timedelta(seconds=20)
    record["provenance"]["finished"] = finished.isoformat(timespec="seconds")


def both(*plants: Callable[[Record], None]) -> Callable[[Record], None]:
    """Several changes that make one fault."""

    def plant(record: Record) -> None:
        for one in plants:
            one(record)

    return plant


def change(path: str, new: Callable[[Any], Any]) -> Callable[[Record], None]:
    """A fault: what `new` makes of the value at `path`."""

    def at(place: Any, keys: list[str]) -> None:
        key, *rest = keys
        if key == "*":
            for i in range(len(place)):
                at(place, [str(i), *rest])
            return
        where = int(key) if isinstance(place, list) else key
        if rest:
            at(place[where], rest)
        else:
            old = place.get(where) if isinstance(place, dict) else place[where]
            place[where] = new(old)

    return lambda record: at(record, path.split("."))


def swap(path: str, one: int = 0, other: int = 1) -> Callable[[Record], None]:
    """A fault: two entries of a list exchanged."""

    def exchanged(values: list[Any]) -> list[Any]:
        values = list(values)
        values[one], values[other] = values[other], values[one]
        return values

    return change(path, exchanged)


def faster(factor: float):
    """Training time and all that follows from it, so that the record agrees with itself."""

    def plant(record: dict[str, Any]) -> None:
        t, c = record["time"], record["communication"]
        for key in ("train_time_s",):
            t[key] /= factor
        t["epoch_times_s"] = [s / factor for s in t["epoch_times_s"]]
        t["step_ms"] = {k: v if k == "count" else v / factor for k, v in t["step_ms"].items()}
        t["breakdown_ms"] = {k: v / factor for k, v in t["breakdown_ms"].items()}
        t["throughput_samples_per_s"] *= factor
        for entry in record["score"]["per_epoch"]:
            entry["train_time_s"] /= factor
        for worker in record["workers"]:
            worker["train_time_s"] /= factor
        for key in {"achieved_flops_per_s", "mfu"} & record["compute"].keys():
            record["compute"][key] *= factor
        for key in c:
            if key.endswith("_per_s"):
                c[key] *= factor
            elif key.endswith("_ms"):
                c[key] /= factor
        for key in record["energy"] or ():
            record["energy"][key] /= factor
        for server in (record["server"] or {"servers": ()})["servers"]:
            server["train_time_s"] /= factor
            server["apply_s"] /= factor
            for epoch in server["epochs"]:
                epoch["end_s"] /= factor

    return plant

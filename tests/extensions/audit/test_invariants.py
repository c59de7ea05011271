"""The invariants of records: honest records of all kinds keep them, and planted faults break them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import fixture_records as fixture
import pytest
from planted import (
    Place,
    both,
    by_command,
    change,
    put,
    row,
    sound,
    started_again,
    swap,
    times,
)

import invariants
from stratbench.cell.coordinates import Cell
from stratbench.cell.record import RecordError
from stratbench.strategies import REGISTRY, get_strategy_class
from stratbench.telemetry.machine.hardware import find_datasheet

Record = dict[str, Any]
Change = Callable[[Record], None]
DDP, FSDP, SINGLE = ("main", "ddp", 2, 0), ("main", "fsdp", 2, 0), ("main", "single", 1, 0)
ASYNC, SYNC, ALONE = (
    ("main", "ps-async", 2, 0),
    ("main", "ps-sync", 2, 0),
    ("main", "ps-async", 1, 0),
)
OOM, TIMEOUT = ("ends", "ddp", 1, 0), ("ends", "ddp", 2, 0)
DIVERGED, SERVED_DIVERGED = ("ends", "fsdp", 2, 0), ("ends", "ps-async", 2, 0)
SERVER, LINK = "server.servers.0", "server.servers.0.workers.1"
KNOWN_GPU = "NVIDIA A100-SXM4-40GB"


def changed(place: Place, change: Change, device: str = "cuda") -> Record:
    """A sound record with a change."""
    record = copy.deepcopy(sound(device)[place])
    change(record)
    return record


# ---------------------------------------------------------------- honest records


def for_steps(record: Record) -> None:
    """A cell that trained a number of steps, and was not evaluated."""
    record["settings"] |= {"steps": 6 * record["batch"]["steps_per_epoch"]}
    record["score"] |= {"per_epoch": [], "final": None, "best": None}
    record["time"]["eval_s"] = 1e-9


def stopped_late(record: Record) -> None:
    """A cell that was stopped after some epochs."""
    record["score"] |= {"per_epoch": copy.deepcopy(sound("cuda")[DDP]["score"]["per_epoch"][:2])}
    record["score"]["best"] = max(entry["score"] for entry in record["score"]["per_epoch"])


def slowed(record: Record) -> None:
    """A cell with a slowed worker, whose steps are not longer for it."""
    record["settings"]["slowdown"] = {"workers": [0], "factor": 3}
    stated = {"factor": 3, "sigma": 0.0, "mean_factor": 3, "step_without_ms": 4.0}
    record["strategy"]["details"]["slowdown"] = stated
    record["time"]["breakdown_ms"]["slowdown"] = 4.1
    record["time"]["breakdown_ms"]["forward"] -= 4.1


def as_pipeline(record: Record) -> None:
    """Workers that are the stages of one network, and wait for each other in a tenth of a step."""
    gpus, phases = record["cell"]["gpus"], record["time"]["breakdown_ms"]
    record["strategy"]["mesh"] = {"replicas": 1, "tensor": 1, "stages": gpus}
    record["batch"]["per_worker_batch"] = record["batch"]["global_batch"]
    record["settings"]["per_worker_batch"] = record["batch"]["global_batch"]
    record["batch"]["samples_per_step"] = record["batch"]["global_batch"]
    phases["bubble"] = 0.1 * sum(phases.values())
    phases["forward"] -= phases["bubble"]
    record["time"]["bubble_share"] = 0.1
    for worker in record["workers"]:
        worker["samples"] = record["batch"]["samples_seen"]
        worker["memory"] = own = dict(worker["memory"])
        for name in ("peak_bytes", "allocated_peak_bytes", "peak_over_base_bytes"):
            own[name] -= 1000 * worker["rank"]
        own["requested_peak_bytes"] -= 1000 * worker["rank"]
    record["memory"]["stages"] = [
        {name: worker["memory"][name] for name in ("peak_bytes", "peak_over_base_bytes")}
        for worker in record["workers"]
    ]


def on_known_gpus(record: Record) -> None:
    """A cell on GPUs with a datasheet, whose NVML tells all that it can."""
    peak = find_datasheet(KNOWN_GPU).get_peak_tflops("fp32") * 1e12
    for worker in record["workers"]:
        worker["provenance"]["gpu"]["name"] = KNOWN_GPU
        own = worker["memory"]
        own |= {"idle_bytes": own["base_bytes"], "nvml_process_used_bytes": own["nvml_used_bytes"]}
    compute = record["compute"]
    compute["peak_flops_per_s"] = len(record["workers"]) * peak
    compute["mfu"] = compute["achieved_flops_per_s"] / compute["peak_flops_per_s"]


def adamw(record: Record) -> None:
    """AdamW keeps two moments, and a count for each tensor."""
    record["settings"] |= {
        "optimizer": "adamw",
        "momentum": 0.0,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
    }
    states = record["memory"]["model_states"]
    states["optimizer_bytes"] = 2 * states["optimizer_bytes"] + 4 * 161
    for where in (record["memory"], record["workers"][0]["memory"]):  # which all workers share
        for name in where:
            if name.endswith("_bytes") and name not in ("base_bytes", "cublas_bytes"):
                where[name] += 2**30


def elastic(**block: Any) -> Change:
    """A change to a cell whose two workers were jobs of their own; its training was resumed once."""

    def change(record: Record) -> None:
        record["settings"]["more"] = {"elastic": {"elastic": True}}
        record["strategy"]["traits"]["ends_with_a_worker"] = False
        dates = {"joined_s": 14.5, "first_step_s": 15.0, "allocated_s": 61.0, "reason": "COMPLETED"}
        jobs = [
            {"number": n, "slot": n, "id": str(n), "submitted_s": 10.5, "started_s": 11.0 + n}
            | {"ended_s": 72.0 + n, **dates}
            for n in range(2)
        ]
        record["elastic"] = {
            "incarnations": 2, "queue_wait_s": 0.5, "first_step_s": 15.0, "allocated_s": 122.0,
            "idle_s": 24.0,
            "joins": 2, "leaves": 0, "losses": 0, "restarts": 1, "steps_repeated": 10,
            "pauses": {"count": 0, "median_s": None, "longest_s": None, "total_s": 0.0},
            "checkpoints": {"count": 9, "held_up_s": 0.1}, "jobs": jobs, "generations": [],
        } | copy.deepcopy(block)  # fmt: skip
        record["communication"] = record["energy"] = None

    return change


def generation(
    incarnation: int, steps: tuple[int, int], dates: tuple[float, float], **more: Any
) -> Record:
    own = {
        "incarnation": incarnation,
        "number": 0,
        "members": [0, 1],
        "cause": "",
        "broken": False,
        "pause_s": None,
    }
    own |= {"from_step": steps[0], "to_step": steps[1], "began_s": dates[0], "ended_s": dates[1]}
    return own | {"from_checkpoint": incarnation > 0} | more


#: Synchronous workers: all stop for a change, and later resume from a checkpoint.
SPLIT = elastic(
    generations=[
        generation(0, (0, 1000), (15.0, 35.0)),
        generation(0, (1000, 1200), (37.0, 41.0), number=1, pause_s=1.5),
        generation(1, (1190, 2340), (45.0, 70.0)),
    ],
    pauses={"count": 1, "median_s": 1.5, "longest_s": 1.5, "total_s": 1.5},
)


def served_elastic(record: Record) -> None:
    """Servers that were started again twice; forty tickets were done twice."""
    incarnations = [(1, 0.2, 0, 0), (2, 30.0, 2000, 10), (3, 40.0, 1990, 30)]
    keys = ("incarnation", "began_s", "tickets_before", "tickets_done_twice")
    of_servers = {
        "tickets_done_twice": 40, "tickets_handed_on": 0, "returns": 2, "evaluations": 6,
        "last_epoch": None, "most_at_a_time": 2,
        "incarnations": [dict(zip(keys, incarnation, strict=True)) for incarnation in incarnations],
    }  # fmt: skip
    elastic(servers=of_servers, steps_repeated=20, incarnations=3, restarts=2)(record)
    (server,) = record["server"]["servers"]
    server["elastic"] = {"settled_before": 1990, "after_the_end": 0}
    for link in server["workers"]:
        link["tickets"] = 1345


def on_two_nodes(server_placement: str) -> Change:
    """Two workers of servers on two nodes, by the formulas of docs/strategies.md."""

    def change(record: Record) -> None:
        record["strategy"]["options"]["server_placement"] = server_placement
        record["settings"]["options"]["server_placement"] = server_placement
        record["provenance"] |= {"nodes": 2, "workers_per_node": 1}
        # Central: the second worker's bytes cross. Colocated: half of everybody's, and of each server's.
        moved = record["communication"]
        each = moved["sent_bytes_per_step"]
        moved |= {"local_bytes_per_step": each, "busiest_link_bytes_per_batch": each}
        if server_placement == "colocated":
            moved["busiest_server_bytes_per_s"] /= 2
            (first,) = record["server"]["servers"]
            for link in first["workers"]:
                link |= {way: link[way] // 2 for way in ("bytes_in", "bytes_out")}
            first |= {"n_servers": 2, "shard_numel": first["shard_numel"] // 2 + 1}
            record["server"]["servers"].append(copy.deepcopy(first) | {"server": 1})
            for options in (record["strategy"]["options"], record["settings"]["options"]):
                options["servers"] = 2

    return change


#: Kinds of honest records: the sound record each is made of, and what is changed.
HONEST: dict[str, tuple[Place, Change]] = {
    "steps": (DDP, for_steps),
    "diverged in steps": (DIVERGED, for_steps),
    "stopped": (TIMEOUT, stopped_late),
    "slowed": (DDP, slowed),
    "own times": (DDP, put("workers.1.own_ms", [1.0, 2.0])),
    "issue times": (DDP, put("workers.1.issue_ms", 1.0)),
    "pipeline": (DDP, as_pipeline),
    "adamw": (DDP, adamw),
    "buffers of no BatchNorm": (
        DDP,
        both(put("settings.own_model", {"call": "own.Net"}), put("model.batchnorm", False)),
    ),
    "skipped": (ASYNC, put(f"{LINK}.skips", 0)),
    "known GPUs": (DDP, on_known_gpus),
    "command": (DDP, by_command),
    "command in steps": (DDP, both(by_command, for_steps)),
    "started again": (DDP, started_again),
    "split": (DDP, SPLIT),
    "served by three incarnations": (ASYNC, served_elastic),
    "servers on one of two nodes": (ASYNC, on_two_nodes("central")),
    "servers on two nodes": (ASYNC, on_two_nodes("colocated")),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_records_of_many_kinds_keep_them(name):
    assert invariants.broken(changed(*HONEST[name])) == []


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_constructed_records_of_every_strategy_and_end_keep_them(device):
    """Those are what most tests of the analysis are made of."""
    for record in sound(device).values():
        assert invariants.broken(record) == []
    for strategy in fixture.STRATEGIES:
        for gpus in (1, 2, 4, 8):
            cell = Cell("s", "e", strategy, "vgg16", "cifar10", gpus, 0)
            assert invariants.broken(fixture.make_record(cell, device=device)) == []


@pytest.mark.parametrize("name", [n for n in REGISTRY if get_strategy_class(n).kind == "server"])
def test_a_push_has_the_learning_rate_that_its_policy_gives_it(name):
    record = fixture.make_record(Cell("s", "main", name, "resnet50", "cifar10", 2, 0))
    options = get_strategy_class(name).Options(**record["strategy"]["options"])
    for factor in (1, 2):
        rate = factor * record["settings"]["lr"] * options.lr_factor(2)
        record["strategy"]["details"]["push_lr"] = rate
        assert ("push_lr" in "".join(invariants.broken(record))) == (factor == 2)


# ---------------------------------------------------------------- broken ones


def stale(record: Record) -> None:
    for server in record["server"]["servers"]:
        total = sum(server["staleness"][0])
        server |= {"staleness": [[total - 9, 9]], "staleness_all_shards": [total - 9, 9]}


def sent(factor: float) -> Change:
    """Other bytes, with all that follows from them."""
    names = ("sent_bytes_per_step", "received_bytes_per_step", "implied_bytes_per_s")
    return both(*(times(f"communication.{name}", factor) for name in names))


def of_peaks(factor: float) -> Change:
    names = ("memory", "workers.*.memory")
    peaks = [times(f"{name}.peak_bytes", factor) for name in names]
    return both(*peaks, times("workers.*.memory.allocated_peak_bytes", factor))


#: Faults that stand for bugs: the record, what is wrong, and what the sentence must hold.
BROKEN: dict[str, tuple[Place, Change, str]] = {
    "ok with a reason": (DDP, put("reason", "killed"), "reason"),
    "ok without a time": (DDP, put("time.train_time_s", None), "time.train_time_s is None"),
    "ok with a loss that is not finite": (FSDP, put("score.per_epoch.3.test_loss", None), "finite"),
    "out of memory, with a time": (OOM, put("time.train_time_s", 12.0), "train_time_s"),
    "stopped, with a score": (TIMEOUT, put("score.final", 0.5), "score.final"),
    "stopped without a limit": (TIMEOUT, put("time.time_limit_s", None), "limit"),
    "diverged, with a score": (SERVED_DIVERGED, put("score.final", 0.5), "score.final"),
    "epochs exchanged": (DDP, swap("time.epoch_times_s"), "epoch 1"),
    "set-up longer than the cell": (DDP, times("time.setup_s", 1000), "time.setup_s"),
    "evaluation took no time": (FSDP, put("time.eval_s", 0.0), "time.eval_s"),
    "no number": (DDP, put("time.start_skew_ms.1", float("nan")), "start_skew_ms.1 is nan"),
    "less than nothing": (DDP, put("workers.1.memory.reserved_peak_bytes", -1), "less than nothing"),
    "own times above the training": (DDP, put("workers.1.own_ms", [20.0] * 3000), "own_ms"),
    "ranks exchanged": (DDP, swap("workers"), "ranks"),
    "another precision": (DDP, put("strategy.details.compute_dtype", "float16"), "compute_dtype"),
    "another strategy": (FSDP, put("strategy.name", "ddp"), "strategy.name"),
    "nodes for fewer workers": (DDP, put("provenance.workers_per_node", 1), "1 at most"),
    "updates by push": (SYNC, both(times("batch.updates_applied", 2), times(f"{SERVER}.updates.0", 2)),
                        "updates_applied"),
    "stale alone": (ALONE, stale, "nothing can be stale"),
    "stale under a barrier": (SYNC, stale, "nothing can be stale"),
    "hardly stale without waiting": (ASYNC, stale, "the least staleness"),
    "a server that failed": (SYNC, put(f"{SERVER}.status", "lost"), "status"),
    "a link that lost bytes": (ASYNC, times(f"{SERVER}.workers.0.bytes_in", 0.5), "bytes_in"),
    "half the gradients sent": (DDP, sent(0.5), "2 copies"),
    "three times the shards gathered": (FSDP, sent(3), "2 copies, padded"),
    "pushes of half a model": (ASYNC, times("communication.sent_bytes_per_step", 0.4), "sent"),
    "an all-reduce in no time": (DDP, put("communication.total_ms", 0.0), "fastest link"),
    "no traffic told": (DDP, put("communication", None), "communication is absent"),
    "local bytes on two nodes": (
        ASYNC, both(on_two_nodes("central"), times("communication.local_bytes_per_step", 2)), "local_bytes"),
    "peak below the states": (DDP, of_peaks(0.1), "memory.model_states"),
    "replica of half a model": (DDP, times("memory.model_states.parameters_bytes", 0.5), "parameters"),
    "shard of the whole model": (FSDP, times("memory.model_states.gradients_bytes", 2), "gradients"),
    "AdamW with the states of SGD": (DDP, put("settings.optimizer", "adamw"), "optimizer_bytes"),
    "momentum nobody asked for": (ASYNC, put("memory.model_states.optimizer_bytes", 94_000_000),
                                  "optimizer_bytes"),
    "the final score of no epoch": (DDP, put("score.final", 0.9612), "score.final"),
    "half a sample right": (DDP, change("score.per_epoch.1.score", lambda a: a + 5e-5), "no share"),
    "too small a loss": (DDP, put("score.per_epoch.0.test_loss", 0.01), "least loss"),
    "slowed by nobody": (DDP, put("time.breakdown_ms.slowdown", 1.0), "slowdown"),
    "a slowdown that never was": (
        DDP, put("settings.slowdown", {"workers": [0], "factor": 3}), "slowdown is None"),
    "a restart that went nowhere": (DDP, both(started_again, put("restarts.count", 2)), "restarts.count"),
    "a restart between checkpoints": (
        DDP, both(started_again, put("restarts.from_steps.0", 11)), "checkpoints after each 10"),
    "elastic without jobs": (
        DDP, put("settings.more", {"elastic": {"elastic": True}}), "settings.more.elastic"),
    "a generation that skips steps": (DDP, both(SPLIT, put("elastic.generations.1.from_step", 1005)),
                                      "the one before stopped"),
    "a pause left out": (DDP, both(SPLIT, put("elastic.pauses.count", 0)), "pauses.count"),
    "an incarnation left out": (ASYNC, both(served_elastic, put("elastic.incarnations", 1)),
    "elastic.incarnations"),
    "more MFU than there is": (DDP, both(on_known_gpus, times("compute.mfu", 2)), "compute.mfu"),
    "half the flops of training": (DDP, times("compute.training_flops_per_sample", 0.5), "flops"),
    "ten times the energy": (DDP, both(*(times(f"energy.{x}", 10) for x in
                                         ("train_joules", "joules_per_sample"))), "train_joules"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_planted_fault_breaks_one_that_names_it(name):
    place, fault, says = BROKEN[name]
    assert any(says in sentence for sentence in invariants.broken(changed(place, fault)))


#: Figures that nothing else in a record tells, up to a factor of two: start of the path.
UNGUARDED = {
    "time.start_skew_ms": "the fixture has no workers' starts to compare it with",
    "time.step_ms.std": "any spread within the range of the steps may be",
    "time.step_ms.min": "no other figure knows the shortest step",
    "time.step_ms.max": "no other figure knows the longest step",
    "time.step_ms.p": "no other figure knows more than their order",
    "time.breakdown_ms": "what workers wait for a core has room in the sum of all phases",
    "time.setup_s": "only their sum is bounded, by the whole",
    "time.data_s": "only their sum is bounded, by the whole",
    "time.warmup_s": "only their sum is bounded, by the whole",
    "time.eval_s": "only their sum is bounded, by the whole",
    "time.time_limit_s": "it is no part of the settings",
    "communication.timed_steps": "DDP times only some steps",
    "communication.overlapped_ms": "only the sum of what is hidden and exposed is bounded",
    "communication.total_ms": "only the sum of what is hidden and exposed is bounded",
    "score.per_epoch": "of epochs but the last nothing else is told, and whole samples stay whole",
    "workers.0.memory.reserved_peak_bytes": "the allocator may keep anything",
    "workers.0.memory.requested_peak_bytes": "how much of its blocks was asked for, none else knows",
    "workers.0.memory.nvml_used_bytes": "others may be on the device",
    "server.servers.0.workers": "how long a server let a worker wait, it alone knows",
    "server.servers.0.apply_s": "how long a server worked, it alone knows",
    "energy": "GPUs draw between 5 W and their limit",
    "memory.model_states.buffers_bytes": "how many a network has, it alone knows",
}


#: The blocks of a record that are measured, or counted.
MEASURED = (
    "batch",
    "time",
    "score",
    "memory",
    "workers",
    "server",
    "communication",
    "compute",
    "energy",
)


@pytest.mark.parametrize("place", [DDP, ASYNC], ids=["ddp", "ps-async"])
def test_every_number_that_is_measured_is_guarded_or_it_is_said_why_not(place):
    base, passed, tried = sound("cuda")[place], set(), 0
    for path, value in invariants.numbers(base):
        if not path.startswith(MEASURED) or path.startswith(("workers.1", "workers.0.provenance")):
            continue
        for factor in (0.5, 2):
            if type(value)(value * factor) == value:
                continue
            tried += 1
            record = copy.deepcopy(base)
            times(path, factor)(record)
            if not invariants.broken(record) and not refused(record):
                passed.add(path)
    print(f"{tried - len(passed)} of {tried} changes by a factor of two found")
    assert tried > 150
    assert {path for path in passed if not path.startswith(tuple(UNGUARDED))} == set()


def refused(record: Record) -> bool:
    """Whether the merge takes it for no record."""
    try:
        row(record)
    except RecordError:
        return True
    return False


def test_the_command_line_names_records_that_break_one(tmp_path, monkeypatch):
    cells = fixture.expand(("ddp",), ("vgg16",), (1, 2))
    study = fixture.write_study(tmp_path, cells)
    assert invariants.broken_below(study) == []
    study = fixture.write_study(tmp_path, cells, change=lambda cell, r: r | {"reason": "odd"})
    found = invariants.broken_below(study)
    assert len(found) == len(cells)
    assert all("record.json: reason is 'odd'" in line for line in found)

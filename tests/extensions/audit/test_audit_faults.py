"""The audit against planted faults: each is found by a rule that names it, sound records by none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import fixture_records as fixture
import planted
import pytest
from planted import (
    ENDS,
    Fault,
    both,
    by_command,
    change,
    faster,
    put,
    sound,
    started_again,
    times,
)
from test_analysis_audit import ELSEWHERE, PLANTED
from test_invariants import (
    ALONE,
    ASYNC,
    DDP,
    FSDP,
    OOM,
    SINGLE,
    SPLIT,
    SYNC,
    TIMEOUT,
    served_elastic,
)

from stratbench.analysis.records.findings import SEVERITIES
from stratbench.cell.coordinates import Cell
from stratbench.extensions.audit.audit import RULES

#: As telemetry/machine/foreign_processes.py notes one.
STRANGER = {"gpu": 1, "pid": 4711, "bytes": int(79.5 * 2**30), "first_s": 30.2, "last_s": 95.1}


def without_worker(record: dict[str, Any]) -> None:
    del record["workers"][1]


def lost_to_the_server(record: dict[str, Any]) -> None:
    record["server"]["servers"][0]["lost"] = [
        {"worker": 1, "step": 40, "reason": "closed", "own_reason": "uncorrectable ECC error"}
    ]


def stale(record: dict[str, Any]) -> None:
    for server in record["server"]["servers"]:
        total = sum(server["staleness"][0])
        server |= {"staleness": [[total - 9, 9]], "staleness_all_shards": [total - 9, 9]}


def over_links(ms: float, links: int = 12) -> Callable[[dict[str, Any]], None]:
    """An all-reduce on GPUs with NVLink 3 that takes so many ms of a longer step, half of it in backward."""

    def plant(record: dict[str, Any]) -> None:
        faster(1 / (1 + ms / 2 / record["time"]["step_ms"]["mean"]))(record)
        record["communication"] |= {"total_ms": ms, "overlapped_ms": ms / 2, "exposed_ms": ms / 2}
        for own in record["workers"]:
            own["provenance"]["gpu"] |= {"name": "NVIDIA A100-SXM4-80GB", "nvlinks_active": links}

    return plant


def waited(share: float) -> Callable[[dict[str, Any]], None]:
    """The last worker's wait for a core, as a share of its training."""

    def plant(record: dict[str, Any]) -> None:
        last = record["workers"][-1]
        last["core_wait_s"] = share * last["train_time_s"]

    return plant


def ended(status: str) -> Callable[[dict[str, Any]], None]:
    def plant(record: dict[str, Any]) -> None:
        record |= fixture.make_record(Cell(**record["cell"]), status)

    return plant


def beside(place: planted.Place) -> Callable[[dict[str, Any]], None]:
    begun = sound("cuda")[place]["provenance"]["started"]

    def plant(record: dict[str, Any]) -> None:
        end = datetime.fromisoformat(begun) + timedelta(seconds=record["time"]["total_s"])
        record["provenance"] |= {"started": begun, "finished": end.isoformat(timespec="seconds")}

    return plant


def worker(path: str) -> str:
    return f"workers.*.provenance.{path}"


#: Figures multiplied in a sound record, as by a bug in the program that writes them, and the cell.
UNLIKE = {
    "time.throughput_samples_per_s": (2, DDP),
    "time.train_time_s": (3, FSDP),
    "time.epoch_times_s.2": (2, DDP),
    "time.step_ms.mean": (1.5, ASYNC),
    "time.step_ms.count": (0.5, DDP),
    "time.breakdown_ms.forward": (3, DDP),
    "time.total_s": (0.3, DDP),
    "workers.1.train_time_s": (0.1, DDP),
    "batch.samples_seen": (0.5, ASYNC),
    "batch.samples_applied": (1.1, SYNC),
    "batch.updates_applied": (2, FSDP),
    "batch.global_batch": (2, DDP),
    "batch.steps_per_epoch": (0.5, DDP),
    "score.final": (0.9, DDP),
    "communication.sent_bytes_per_step": (0, ASYNC),
    "energy.train_joules": (10, DDP),
    "memory.peak_bytes": (0.1, DDP),
    "memory.model_states.parameters_bytes": (0.5, DDP),
    "workers.0.memory.peak_bytes": (1000, FSDP),
}

FAULTS = [
    # Commands of the user's.
    Fault(
        "steps after a command's end",
        DDP,
        both(by_command, times("program.self_reported.last_s", 10)),
        "contradictory-report",
        "program.self_reported.last_s",
    ),
    Fault(
        "a command that tells more time than it lived",
        DDP,
        both(
            by_command,
            put("program.external.begun_s", 100.0),
            put("program.self_reported.first_s", 101.0),
        ),
        "contradictory-report",
        "time.train_time_s",
    ),
    Fault(
        "a command's samples are no multiple of its batch",
        DDP,
        both(by_command, times("program.self_reported.batch", 2)),
        "contradictory-report",
        "program.self_reported.batch",
    ),
    Fault(
        "a command that trained with one process",
        DDP,
        both(by_command, put("program.self_reported.workers", 1)),
        "unlike-its-cell",
        "cell.gpus",
    ),
    Fault(
        "a command that trained an epoch less",
        DDP,
        both(by_command, times("settings.epochs", 2)),
        "unlike-its-cell",
        "program.self_reported.samples",
    ),
    Fault(
        "a command that slept",
        DDP,
        both(by_command, put("program.external.cpu_time_s", 0.01)),
        "contradictory-cpu-time",
        "cpu_time_s",
    ),
    # What a record says of itself.
    *(Fault(path, place, times(path, by), "unlike-itself") for path, (by, place) in UNLIKE.items()),
    Fault(
        "a hundredth of the energy", DDP, times("energy.train_joules", 0.01), "unlike-itself", "5%"
    ),
    Fault("more operations than there are", DDP, put("compute.mfu", 1.2), "unlike-itself", "mfu"),
    Fault(
        "energy without a GPU",
        DDP,
        put("energy", {"train_joules": 1e4, "joules_per_sample": 1e4 / 299520}),
        "unlike-itself",
        "limits, 0",
        "cpu",
    ),
    Fault("ok with a reason", DDP, put("reason", "killed"), "unlike-itself", "'killed'"),
    Fault("out of memory without a reason", OOM, put("reason", None), "unlike-itself", "as oom"),
    *(
        Fault(f"ok without {path}", FSDP, put(path, None), "unlike-itself", f"{path} is absent")
        for path in ("time.train_time_s", "batch.samples_seen", "memory.peak_bytes", "score.final")
    ),
    Fault(
        "ok with a loss that is not finite",
        FSDP,
        put("score.per_epoch.3.test_loss", None),
        "unlike-itself",
        "not finite",
    ),
    Fault(
        "no number",
        DDP,
        put("time.breakdown_ms.forward", float("nan")),
        "unlike-itself",
        "breakdown_ms is nan",
    ),
    Fault("stale under a barrier", SYNC, stale, "unlike-itself", "pushes are stale"),
    Fault(
        "a step that lost skips",
        DDP,
        put("strategy.details.skipped_steps", 9),
        "unlike-itself",
        "updates_applied",
    ),
    Fault(
        "an end before the start",
        DDP,
        put("provenance.finished", "1999-12-31T00:00:00+00:00"),
        "unlike-itself",
        "before it began",
    ),
    # Attempts and checkpoints.
    Fault(
        "checkpoints beside the training", DDP, started_again, "keeps-checkpoints", "checkpoints"
    ),
    # Times.
    Fault(
        "more processes than cores, after training",
        DDP,
        put(worker("load_1m"), 64.0),
        "loaded-machine",
        "a load of 64",
        "cpu",
    ),
    Fault(
        "memory of others on a GPU",
        DDP,
        both(
            put("workers.1.memory.nvml_process_used_bytes", 2**30),
            put("workers.1.memory.nvml_used_bytes", 66 * 2**30),
        ),
        "foreign-process-on-gpu",
        "65.0 GiB of the GPU of rank 1",
    ),
    # Workers.
    Fault("a worker left no result", DDP, without_worker, "lost-workers", "ranks 1"),
    Fault("a server's worker left no result", ASYNC, without_worker, "lost-workers", "ranks 1"),
    Fault(
        "a worker was lost",
        ASYNC,
        lost_to_the_server,
        "lost-workers",
        "1 of 2 workers were lost to the servers: uncorrectable ECC error",
    ),
    Fault(
        "a worker without samples",
        ASYNC,
        both(put("workers.1.samples", 0), put("workers.1.steps", 0)),
        "lost-workers",
        "rank 1",
    ),
    Fault(
        "two ranks on one GPU",
        DDP,
        put("workers.1.provenance.gpu.uuid", "GPU-constructed-0"),
        "contradictory-devices",
        "GPU-constructed-0",
    ),
    Fault(
        "two ranks on one device",
        DDP,
        put("workers.1.provenance.device", "cuda:0"),
        "contradictory-devices",
        "cuda:0",
    ),
    Fault(
        "a worker on a CPU",
        FSDP,
        put("workers.1.provenance.device", "cpu"),
        "contradictory-devices",
        "rank 1",
    ),
    # Accuracy.
    Fault(
        "a loss that nothing can reach",
        DDP,
        both(put("task.unit", "nats/token"), put("task.least_loss", 9.0)),
        "loss-below-least",
        "the least possible 9.0000",
    ),
    Fault("another task", DDP, put("task.name", "mine:Task"), "mixed-tasks", "task.name"),
    Fault(
        "losses unlike equal strategies'",
        DDP,
        times("score.per_epoch.4.train_loss", 3),
        "equal-arithmetic-unequal-loss",
        "train_loss",
    ),
    # Speed.
    Fault("superlinear against single only", SINGLE, faster(1 / 9), "superlinear", "single"),
    # Cells of a comparison.
    Fault(
        "TF32 in one cell",
        DDP,
        put(worker("flags.matmul_tf32"), True),
        "mixed-precision",
        "matmul_tf32",
    ),
    Fault("another cuDNN", FSDP, put(worker("software.cudnn"), 99), "mixed-versions", "cudnn"),
    Fault(
        "another torch on one rank",
        DDP,
        put("workers.1.provenance.software.torch", "9.9"),
        "mixed-versions",
        "torch",
    ),
    Fault(
        "another resolution",
        DDP,
        put("model.input_shape", [3, 224, 224]),
        "mixed-models",
        "input_shape",
    ),
    Fault("a smaller test set", DDP, put("data.test_samples", 5000), "mixed-data", "test_samples"),
    Fault(
        "other data of one name",
        FSDP,
        put("settings.data_spec", {"source": "synthetic", "train_samples": 128}),
        "mixed-data",
        "settings.data_spec.train_samples",
    ),
    Fault("generated data", FSDP, put("data.synthetic", True), "mixed-data", "synthetic"),
    Fault("another learning rate", DDP, put("settings.lr", 0.1), "mixed-settings", "settings.lr"),
    Fault(
        "more parts on more workers",
        DDP,
        put("settings.gradient_accumulation_steps", 2),
        "mixed-variants",
        "settings.gradient_accumulation_steps",
    ),
    Fault(
        "another optimizer",
        DDP,
        put("settings.optimizer", "adamw"),
        "mixed-optimizers",
        "settings.optimizer: sgd, adamw (ddp on 2)",
    ),
    Fault(
        "the optimizer's states in half the bytes",
        SYNC,
        put("strategy.details.optimizer_dtype", "bfloat16"),
        "mixed-optimizers",
        "optimizer_dtype: float32, bfloat16 (ps-sync on 2)",
    ),
    Fault("another batch", FSDP, times("batch.global_batch", 2), "mixed-batches", "global_batch"),
    Fault("another seed", DDP, put("settings.seed", 7), "mixed-seeds", "seed"),
    Fault(
        "a GPU of another type within a cell",
        DDP,
        put("workers.1.provenance.gpu.name", "Another GPU"),
        "mixed-devices",
        "gpu.name",
    ),
    Fault(
        "clocks capped",
        FSDP,
        put(worker("gpu.application_sm_clock_mhz"), 900),
        "mixed-clocks",
        "application_sm_clock",
    ),
    Fault(
        "power capped", FSDP, put(worker("gpu.power_limit_w"), 350.0), "mixed-clocks", "power_limit"
    ),
    Fault("fewer cores", DDP, put(worker("host.affinity"), [0]), "mixed-cores", "cores"),
    Fault(
        "NCCL on sockets", DDP, over_links(30.0), "nvlink-unused", "3.13 GB/s sent over 12 active"
    ),
    Fault(
        "all on core 0", FSDP, put(worker("host.affinity"), [0]), "ranks-share-cores", "1 core: [0]"
    ),
    Fault(
        "others on its core",
        DDP,
        waited(0.3),
        "waits-for-cores",
        "rank 1 waited for a core in 30% of ",
        "cpu",
    ),
    Fault(
        "another environment",
        DDP,
        put(worker("environment.KMP_AFFINITY"), "compact"),
        "mixed-environments",
        "KMP",
    ),
    Fault(
        "other threads of libraries",
        DDP,
        put(worker("environment.OMP_NUM_THREADS"), "8"),
        "mixed-cores",
        "OMP",
    ),
    Fault(
        "more work a sample",
        FSDP,
        both(
            times("compute.forward_flops_per_sample", 2),
            times("compute.training_flops_per_sample", 2),
            times("compute.achieved_flops_per_s", 2),
            times("compute.mfu", 2),
        ),
        "mixed-models",
        "forward_flops",
    ),
    # What only some cells state.
    Fault(
        "a variable set in one cell",
        DDP,
        put(worker("environment.NCCL_P2P_DISABLE"), "1"),
        "mixed-environments",
        "not stated",
    ),
    Fault(
        "a variable set for one worker",
        ("main", "ddp", 2, 1),
        put("workers.1.provenance.environment.NCCL_ALGO", "Tree"),
        "mixed-environments",
        "NCCL_ALGO",
    ),
    Fault(
        "flags not stated",
        FSDP,
        change("workers.*.provenance", lambda old: {k: v for k, v in old.items() if k != "flags"}),
        "mixed-precision",
        "not stated (fsdp on 2)",
    ),
    Fault(
        "slowed in one cell",
        DDP,
        put("settings.slowdown", {"workers": [0], "factor": 2.0}),
        "mixed-settings",
        "slowdown",
    ),
    Fault("one repeat out of memory", DDP, ended("oom"), "repeats-end-differently", "1 oom"),
    Fault("one repeat too slow", DDP, ended("timeout"), "repeats-end-differently", "1 timeout"),
    Fault(
        "a shorter limit",
        TIMEOUT,
        put("time.time_limit_s", 600.0),
        "mixed-limits",
        "other cells had 3000",
    ),
    Fault(
        "a foreign process who came later",
        ASYNC,
        put("provenance.foreign_gpu_processes", {"0": [STRANGER]}),
        "foreign-process-on-gpu",
        "process 4711 on GPU 1 with up to 79.5 GiB, seen from 30 to 95 s",
    ),
    Fault(
        "out of memory beside a foreign process",
        OOM,
        both(
            put("workers", []),  # as of a worker that could tell nothing
            put("provenance.gpus", {"rank0": {"node": 0, "index": 1, "uuid": "GPU-1"}}),
            put("provenance.busy_at_start", {"0": {"other_gpu_processes": {"1": [4711]}}}),
        ),
        "memory-held-by-others",
        "process 4711 on GPU 1",
    ),
    Fault("two cells on one GPU", FSDP, beside(DDP), "shared-devices", "together with ddp on 2"),
    Fault(
        "a trait denied",
        ALONE,
        put("strategy.traits.is_synchronous_on_one_worker", False),
        "traits-unlike-strategy",
        "is_synchronous_on_one_worker",
    ),
    Fault(
        "moved by zeros, and said to equal DDP",
        DDP,
        put("strategy.details.moved_by_zeros", ["spare.weight"]),
        "traits-unlike-strategy",
        "equals_ddp is True, but ddp declares False",
    ),
    # CPU processes.
    Fault(
        "a method of another system",
        FSDP,
        put("memory.method", "maxrss-since-process-start"),
        "mixed-methods",
        "maxrss",
        "cpu",
    ),
    Fault(
        "a GPU among processes",
        DDP,
        put("workers.0.provenance.gpu", {"name": "Another GPU"}),
        "contradictory-devices",
        "GPU",
        "cpu",
    ),
]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_sound_records_of_every_end_trip_no_rule_that_is_not_about_cpus(device):
    whole = planted.study(sound(device), device)
    rules = {rule.id for rule in RULES if any(rule.check(whole))}
    assert rules == ({"workers-are-processes"} if device == "cpu" else set())
    ends = {record["status"] for record in sound(device).values()}
    assert ends == {"ok", *ENDS.values()}


def test_strangers_on_gpus_of_other_cells_are_none():
    """A cell on GPUs 0 and 1 beside another one on 2 and 3, which its check of the node saw."""
    records = dict(sound("cuda"))
    for place in (DDP, OOM):
        records[place] = copy.deepcopy(records[place])
        records[place]["provenance"] |= {
            "busy_at_start": {"0": {"other_gpu_processes": {"2": [4711], "3": [4712]}}},
            "gpus": {f"rank{i}": {"node": 0, "index": i, "uuid": f"GPU-{i}"} for i in (0, 1)},
            "foreign_gpu_processes": {},
        }
    evidence = planted.study(records, "cuda")
    assert {rule.id for rule in RULES if any(rule.check(evidence))} == set()


@pytest.mark.parametrize(("lost_ms", "believed"), [(40.0, True), (1e4, False)])
def test_a_worker_may_wait_for_a_core_on_a_busy_machine(lost_ms, believed):
    """Four steps of 2.8 ms per worker, and some time that no step holds."""
    record = copy.deepcopy(sound("cuda")[DDP])
    for own in record["workers"]:
        own |= {"steps": 4, "train_time_s": (4 * 2.8 + lost_ms) / 1e3}
    record["time"]["step_ms"] |= {"mean": 2.8, "count": 4 * len(record["workers"])}
    found = [
        f.values_text for f in RULE["unlike-itself"].check(planted.study({DDP: record}, "cuda"))
    ]
    assert ("the sum of all steps" not in "".join(found)) == believed


def test_a_network_that_is_moved_by_zeros_is_believed_to_equal_no_ddp():
    records = copy.deepcopy(sound("cpu"))
    record = records[DDP]
    record["strategy"]["details"]["moved_by_zeros"] = ["spare.weight"]
    record["strategy"]["traits"] |= {"equals_ddp": False, "is_synchronous_on_one_worker": False}
    assert not any(RULE["traits-unlike-strategy"].check(planted.study(records, "cpu")))


def test_a_counter_that_has_not_moved_in_a_short_training_is_believed():
    record = copy.deepcopy(sound("cuda")[DDP])
    faster(1000)(record)
    record["energy"] = {"train_joules": 0.0, "joules_per_sample": 0.0}
    found = [
        f.values_text for f in RULE["unlike-itself"].check(planted.study({DDP: record}, "cuda"))
    ]
    assert not any("power limits" in figures for figures in found)


@pytest.mark.parametrize(
    ("ms", "links", "change"),
    [
        (0.5, 12, put("reason", None)),  # over NVLink
        (3.0, 12, put("reason", None)),  # it spans a part of backward
        (30.0, 0, put("reason", None)),  # there are no NVLinks
        (30.0, 12, put("provenance.nodes", 2)),
        (30.0, 12, put("settings.slowdown", {"workers": [0], "factor": 2.0})),
        (30.0, 12, put("communication.sent_bytes_per_step", 1e6)),  # a small network: latency
    ],
)
def test_links_that_carried_what_they_can_are_believed(ms, links, change):
    record = copy.deepcopy(sound("cuda")[DDP])
    both(over_links(ms, links), change)(record)
    assert not any(RULE["nvlink-unused"].check(planted.study({DDP: record}, "cuda")))


@pytest.mark.parametrize("share", [None, 0.0, 0.16])
def test_a_cell_that_is_slow_by_itself_does_not_wait_for_cores(share):
    """Twice as slow as its repeat, and of its time it had a core."""
    record = copy.deepcopy(sound("cpu")[DDP])
    faster(0.5)(record)
    if share is not None:
        waited(share)(record)
    assert not any(RULE["waits-for-cores"].check(planted.study({DDP: record}, "cpu")))


def test_a_cell_of_more_processes_than_cores_waits_for_its_own():
    record = copy.deepcopy(sound("cpu")[DDP])
    waited(0.5)(record)
    assert any(RULE["waits-for-cores"].check(planted.study({DDP: record}, "cpu")))
    for one in record["workers"]:
        one["provenance"]["host"]["affinity"] = [0]
    assert not any(RULE["waits-for-cores"].check(planted.study({DDP: record}, "cpu")))


def test_workers_with_a_core_of_their_own_or_all_cores_share_none():
    for cores in ([[0], [1]], [[0, 1], [0, 1]], [[0, 1], [1]]):
        records = {DDP: copy.deepcopy(sound("cuda")[DDP])}
        for one, own in zip(records[DDP]["workers"], cores, strict=True):
            one["provenance"]["host"]["affinity"] = own
        assert not any(RULE["ranks-share-cores"].check(planted.study(records, "cuda")))


def test_workers_may_have_other_threads_where_there_are_more_of_them():
    """The launcher divides a machine's cores among the cell's workers, and tells libraries so."""
    records = copy.deepcopy(sound("cpu"))
    for record in records.values():
        for one in record["workers"]:
            threads = str(8 // record["cell"]["gpus"])
            one["provenance"]["environment"]["OMP_NUM_THREADS"] = threads
    study = planted.study(records, "cpu")
    assert len({record["cell"]["gpus"] for record in records.values()}) > 1
    for rule in ("mixed-environments", "mixed-cores"):
        assert [f.values_text for f in RULE[rule].check(study)] == []


def test_a_strategy_that_does_not_say_how_it_communicates_is_not_held_to_it():
    record = copy.deepcopy(sound("cuda")[DDP])
    record["cell"]["strategy"] = record["strategy"]["name"] = "of-a-user"
    record["settings"]["strategy"] = "of-a-user"
    record["strategy"]["traits"]["ring_copies"] = None
    for communication in (None, record["communication"] | {"method": "measured"}):
        record["communication"] = communication
        alone = planted.study({("main", "of-a-user", 2, 0): record}, "cuda")
        assert {rule.id for rule in RULES if any(rule.check(alone))} == set()


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize(("place", "change"), [(DDP, SPLIT), (ASYNC, served_elastic)])
def test_an_elastic_cell_with_fewer_workers_than_were_asked_for_is_doubtful(place, change, most):
    record = copy.deepcopy(sound("cuda")[place])
    change(record)
    for together in record["elastic"]["generations"]:
        together["members"] = list(range(most))
    if place is ASYNC:
        record["elastic"]["servers"]["most_at_a_time"] = most
    rule = RULE["fewer-workers-than-asked"]
    said = [found.values_text for found in rule.check(planted.study({place: record}, "cuda"))]
    assert said == ([] if most == 2 else ["at most 1 of 2 workers trained at the same time"])


@pytest.mark.slow
def test_planted_faults_are_found_by_rules_that_name_them():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    missed = [fault.name for fault in FAULTS if not named(fault)]
    print(f"{len(FAULTS) - len(missed)} of {len(FAULTS)} planted faults found")
    assert missed == []


def test_every_rule_has_a_planted_fault_and_says_what_it_is_about():
    ids = [rule.id for rule in RULES]
    assert set(ids) == {fault.rule for fault in FAULTS} | set(PLANTED) | ELSEWHERE
    assert len(set(ids)) == len(ids)
    for rule in RULES:
        assert rule.severity in SEVERITIES
        assert len(rule.explanation) > 40


RULE = {rule.id: rule for rule in RULES}


def named(fault: Fault) -> bool:
    """Whether the rule of the fault finds it, and its figures say what it is."""
    study = planted.study(fault.planted(), fault.device)
    return any(fault.says in found.values_text for found in RULE[fault.rule].check(study))

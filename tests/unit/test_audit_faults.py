"""The audit against planted faults: each is found by a rule that names it, sound records by none.

Faults in one figure of a relation are made from the relations (test_audit_relations.py).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import fixture_records as fixture
import pandas as pd
import planted
import pytest
from planted import (
    ENDS,
    Fault,
    both,
    by_command,
    change,
    faster,
    on_unequal_nodes,
    put,
    sound,
    started_again,
    swap,
    times,
)
from test_analysis_audit import ELSEWHERE, PLANTED

from stratbench.analysis.audit import RULES
from stratbench.analysis.audit.across_cells.mixed import MIXED
from stratbench.analysis.audit.checks import Facts, numbers_by_path
from stratbench.analysis.audit.rule import SEVERITIES, Evidence, Rule
from stratbench.analysis.audit.times import faults_of_workers
from stratbench.analysis.records.columns import COLUMNS
from stratbench.cell.coordinates import Cell
from stratbench.cell.record import RecordError
from stratbench.strategies import REGISTRY, strategy_class

DDP, FSDP = ("main", "ddp", 2, 0), ("main", "fsdp", 2, 0)
SINGLE, ASYNC, SYNC = (
    ("main", "single", 1, 0),
    ("main", "ps-async", 2, 0),
    ("main", "ps-sync", 2, 0),
)
ALONE, MODIFIED = ("main", "ps-async", 1, 0), ("main", "ps-async-modified", 2, 0)
OOM, TIMEOUT = ("ends", "ddp", 1, 0), ("ends", "ddp", 2, 0)
#: As telemetry/machine/tenants.py notes one.
STRANGER = {"gpu": 1, "pid": 4711, "bytes": int(79.5 * 2**30), "first_s": 30.2, "last_s": 95.1}
DIVERGED, SERVED_DIVERGED = ("ends", "fsdp", 2, 0), ("ends", "ps-async", 2, 0)
SERVER = "server.servers.0"


def less_accurate(record: dict[str, Any]) -> None:
    for entry in record["score"]["per_epoch"]:
        entry["score"] = 0.5
    record["score"] |= {"final": 0.5, "best": 0.5}


def without_worker(record: dict[str, Any]) -> None:
    del record["workers"][1]


def lost_to_the_server(record: dict[str, Any]) -> None:
    record["server"]["servers"][0]["lost"] = [
        {"worker": 1, "step": 40, "reason": "closed", "own_reason": "uncorrectable ECC error"}
    ]


def stale(record: dict[str, Any]) -> None:
    for server in record["server"]["servers"]:
        total = sum(server["staleness"][0])
        server["staleness"] = [[total - 9, 9]]
        server["staleness_all_shards"] = [total - 9, 9]


def losses_of(place: planted.Place) -> Callable[[dict[str, Any]], None]:
    theirs = sound("cuda")[place]["score"]["per_epoch"]

    def plant(record: dict[str, Any]) -> None:
        for mine, other in zip(record["score"]["per_epoch"], theirs, strict=True):
            mine |= {name: other[name] for name in ("train_loss", "test_loss")}

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


def aged(counts: Callable[[int], list[int]]) -> Callable[[dict[str, Any]], None]:
    """All pushes with the staleness that `counts` makes of their number."""

    def plant(record: dict[str, Any]) -> None:
        for server in record["server"]["servers"]:
            made = counts(sum(server["staleness"][0]))
            server |= {"staleness": [made], "staleness_all_shards": made}

    return plant


def worker(path: str) -> str:
    return f"workers.*.provenance.{path}"


FAULTS = [
    Fault(
        "elastic without worker jobs",
        DDP,
        put("settings.elastic", True),
        "contradictory-elastic",
        "settings.elastic is True",
    ),
    # Commands of the user's.
    Fault(
        "steps after a command's end",
        DDP,
        both(by_command, times("program.said.last_s", 10)),
        "contradictory-report",
        "program.said.last_s",
    ),
    Fault(
        "a command that tells more time than it lived",
        DDP,
        both(by_command, put("program.outside.begun_s", 100.0), put("program.said.first_s", 101.0)),
        "contradictory-report",
        "time.train_time_s",
    ),
    Fault(
        "a command's samples are no multiple of its batch",
        DDP,
        both(by_command, times("program.said.batch", 2)),
        "contradictory-report",
        "program.said.batch",
    ),
    Fault(
        "a command that trained with one process",
        DDP,
        both(by_command, put("program.said.workers", 1)),
        "unlike-its-cell",
        "cell.gpus",
    ),
    Fault(
        "a command that trained an epoch less",
        DDP,
        both(by_command, times("settings.epochs", 2)),
        "unlike-its-cell",
        "program.said.samples",
    ),
    Fault(
        "a command that slept",
        DDP,
        both(by_command, put("program.outside.cpu_time_s", 0.01)),
        "contradictory-cpu-time",
        "cpu_time_s",
    ),
    # Attempts and checkpoints.
    Fault(
        "checkpoints beside the training", DDP, started_again, "keeps-checkpoints", "checkpoints"
    ),
    Fault(
        "checkpoints of which nothing is told",
        DDP,
        put("settings.checkpoint_every", 10),
        "contradictory-restarts",
        "restarts None",
    ),
    *(
        Fault(name, DDP, both(started_again, spoil), "contradictory-restarts", part)
        for name, spoil, part in (
            ("a restart that went nowhere", put("restarts.count", 2), "restarts.count"),
            ("one after a step without a checkpoint", put("restarts.from_steps.0", 11), "11 steps"),
            ("one after more steps than there are", put("restarts.from_steps.0", 10**6), "of "),
            ("one checkpoint too many", put("restarts.checkpoints.count", 10**4), "count"),
            ("more work lost than time was spent", put("restarts.repeated_s", 1e6), "repeated_s"),
            ("other checkpoints than asked for", put("restarts.checkpoints.every", 9), "every"),
        )
    ),
    Fault(
        "time between attempts that the dates do not have",
        DDP,
        both(started_again, put("restarts.between_s", 1000.0)),
        "contradictory-time",
        "total_s",
    ),
    Fault(
        "more nodes than there were",
        DDP,
        put("provenance.nodes", 3),
        "contradictory-counts",
        "3 nodes",
    ),
    # Times.
    Fault("an epoch doubled", DDP, times("time.epoch_times_s.2", 2), "contradictory-time", "epoch"),
    Fault("epochs exchanged", DDP, swap("time.epoch_times_s"), "contradictory-time", "epoch"),
    Fault(
        "an epoch ends before the one before",
        FSDP,
        swap("score.per_epoch", 1, 2),
        "contradictory-time",
        "ascending",
    ),
    Fault(
        "training longer than the cell",
        DDP,
        times("time.total_s", 0.3),
        "contradictory-time",
        "total_s",
    ),
    Fault(
        "set-up longer than the cell",
        DDP,
        times("time.setup_s", 1000),
        "contradictory-time",
        "setup_s",
    ),
    Fault("evaluation took no time", FSDP, put("time.eval_s", 0.0), "contradictory-time", "eval_s"),
    Fault(
        "median above the longest step",
        DDP,
        times("time.step_ms.p50", 3),
        "contradictory-time",
        "ascending",
    ),
    Fault(
        "ranks with one clock",
        DDP,
        put("workers.*.train_time_s", sound("cuda")[DDP]["time"]["train_time_s"]),
        "contradictory-time",
        "the same train_time_s",
    ),
    Fault(
        "steps that take equally long",
        DDP,
        put("time.step_ms.p10", sound("cuda")[DDP]["time"]["step_ms"]["p90"]),
        "contradictory-time",
        "to the last digit",
    ),
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
        "stranger-on-gpu",
        "65 GiB of the GPU of rank 1",
    ),
    # Counts.
    Fault(
        "synchronous updates by push",
        SYNC,
        both(times("batch.updates_applied", 2), times(f"{SERVER}.updates.0", 2)),
        "contradictory-counts",
        "updates_per_step",
    ),
    Fault("ranks exchanged", DDP, swap("workers"), "contradictory-counts", "ranks"),
    Fault("a rank twice", DDP, put("workers.1.rank", 0), "contradictory-counts", "ranks"),
    Fault(
        "other precision computed",
        DDP,
        put("strategy.details.compute_dtype", "float16 (autocast)"),
        "contradictory-counts",
        "compute_dtype",
    ),
    Fault(
        "nodes for fewer workers",
        DDP,
        put("provenance.workers_per_node", 1),
        "contradictory-counts",
        "nodes",
    ),
    Fault(
        "a figure that is no number",
        DDP,
        put("time.breakdown_ms.forward", float("nan")),
        "contradictory-counts",
        "no number",
    ),
    Fault(
        "less than nothing",
        ASYNC,
        put("strategy.details.skipped_steps", -1),
        "contradictory-counts",
        "less than nothing",
    ),
    Fault(
        "less than nothing of a worker",
        DDP,
        put("workers.1.memory.reserved_peak_bytes", -1),
        "contradictory-counts",
        "workers[1].memory.reserved_peak_bytes is -1, less than nothing",
    ),
    Fault(
        "a figure in a list that is no number",
        DDP,
        put("time.start_skew_ms.1", float("nan")),
        "contradictory-counts",
        "time.start_skew_ms[1] is nan, which is no number",
    ),
    Fault(
        "a worker's own time above any step's",
        DDP,
        put("workers.1.own_ms", [1e6]),
        "contradictory-time",
        "rank 1: max(worker.own_ms) is 1e+06, more than time.step_ms.max",
    ),
    Fault(
        "more of a worker's own times than steps",
        DDP,
        put("workers.1.own_ms", [1e-3] * 100_000),
        "contradictory-time",
        "rank 1: len(worker.own_ms) is 100000, more than worker.steps",
    ),
    Fault(
        "a worker's own times above its training",
        DDP,
        lambda record: put(
            "workers.1.own_ms", [record["time"]["step_ms"]["max"]] * record["workers"][1]["steps"]
        )(record),
        "contradictory-time",
        "rank 1: sum(worker.own_ms) / 1e3 is",
    ),
    Fault(
        "a step that took the host longer to issue than any step",
        DDP,
        put("workers.1.issue_ms", 1e6),
        "contradictory-time",
        "rank 1: worker.issue_ms is 1e+06, more than time.step_ms.max",
    ),
    Fault(
        "steps of a CPU that were issued to a device",
        DDP,
        both(put("workers.1.provenance.device", "cpu"), put("workers.1.issue_ms", 1.0)),
        "contradictory-time",
        "rank 1: worker.issue_ms is 1, although on a CPU host and device are one",
    ),
    Fault(
        "a CPU's record among GPUs",
        DDP,
        put("provenance.device", "cpu"),
        "contradictory-counts",
        "device",
    ),
    # Ends.
    Fault(
        "ok with a reason",
        DDP,
        put("reason", "rank 1 was killed"),
        "contradictory-status",
        "reason",
    ),
    Fault(
        "ok without a time",
        DDP,
        put("time.train_time_s", None),
        "contradictory-status",
        "train_time_s",
    ),
    Fault(
        "ok with a loss that is not finite",
        FSDP,
        put("score.per_epoch.3.test_loss", None),
        "contradictory-status",
        "finite",
    ),
    Fault(
        "out of memory, with a time",
        OOM,
        put("time.train_time_s", 12.0),
        "contradictory-status",
        "train_time_s",
    ),
    Fault(
        "out of memory without a reason",
        OOM,
        put("reason", None),
        "contradictory-status",
        "no reason",
    ),
    Fault(
        "stopped, with a final accuracy",
        TIMEOUT,
        put("score.final", 0.5),
        "contradictory-status",
        "final",
    ),
    Fault(
        "stopped without a limit",
        TIMEOUT,
        put("time.time_limit_s", None),
        "contradictory-time",
        "limit",
    ),
    Fault(
        "diverged, and every loss is finite",
        DIVERGED,
        both(put("score.per_epoch.0.train_loss", 2.0), put("score.per_epoch.0.test_loss", 2.0)),
        "contradictory-status",
        "finite",
    ),
    Fault(
        "diverged, with a final accuracy",
        SERVED_DIVERGED,
        put("score.final", 0.5),
        "contradictory-status",
        "final",
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
    # Servers.
    Fault("stale with one worker", ALONE, stale, "contradictory-server", "stale"),
    Fault("stale under a barrier", SYNC, stale, "contradictory-server", "stale"),
    Fault(
        "a server that failed",
        SYNC,
        put(f"{SERVER}.status", "lost"),
        "contradictory-server",
        "lost",
    ),
    # Traffic.
    Fault(
        "half the gradients sent",
        DDP,
        both(
            times("communication.sent_bytes_per_step", 0.5),
            times("communication.received_bytes_per_step", 0.5),
            times("communication.implied_bytes_per_s", 0.5),
        ),
        "contradictory-traffic",
        "copies",
    ),
    Fault(
        "three times the shards gathered",
        FSDP,
        both(
            times("communication.sent_bytes_per_step", 3),
            times("communication.received_bytes_per_step", 3),
            times("communication.implied_bytes_per_s", 3),
        ),
        "contradictory-traffic",
        "copies",
    ),
    Fault(
        "bytes that the server did not get",
        ASYNC,
        times(f"{SERVER}.workers.0.bytes_in", 0.5),
        "contradictory-traffic",
        "bytes_in",
    ),
    Fault(
        "pushes of half a model",
        ASYNC,
        times("communication.sent_bytes_per_step", 0.4),
        "contradictory-traffic",
        "sent",
    ),
    # Memory.
    Fault(
        "peak below the model states",
        DDP,
        both(
            times("memory.peak_bytes", 0.1),
            times("workers.*.memory.peak_bytes", 0.1),
            times("workers.*.memory.allocated_peak_bytes", 0.1),
        ),
        "contradictory-memory",
        "model states",
    ),
    Fault(
        "replica of half a model",
        DDP,
        times("memory.model_states.parameters_bytes", 0.5),
        "contradictory-memory",
        "parameters_bytes",
    ),
    Fault(
        "shard of the whole model",
        FSDP,
        times("memory.model_states.gradients_bytes", 2),
        "contradictory-memory",
        "gradients_bytes",
    ),
    Fault(
        "AdamW with the states of SGD",
        DDP,
        both(put("settings.optimizer", "adamw"), put("settings.momentum", 0.0)),
        "contradictory-memory",
        "less than what the whole model takes",
    ),
    Fault(
        "momentum nobody asked for",
        ASYNC,
        put("memory.model_states.optimizer_bytes", 94_000_000),
        "contradictory-memory",
        "optimizer_bytes",
    ),
    Fault(
        "a CPU's method on a GPU",
        DDP,
        put("memory.method", "vmhwm"),
        "contradictory-memory",
        "method",
    ),
    # Operations and energy.
    # Accuracy.
    Fault(
        "final accuracy of no epoch",
        DDP,
        put("score.final", 0.9612),
        "contradictory-score",
        "final",
    ),
    Fault(
        "the best below an epoch",
        FSDP,
        times("score.best", 0.5),
        "contradictory-score",
        "best",
    ),
    Fault(
        "half a sample right",
        DDP,
        change("score.per_epoch.1.score", lambda a: a + 5e-5),
        "contradictory-score",
        "whole",
    ),
    Fault(
        "too small a loss",
        DDP,
        put("score.per_epoch.0.test_loss", 0.01),
        "contradictory-score",
        "test_loss",
    ),
    Fault(
        "a loss that nothing can reach",
        DDP,
        put("task.least_loss", 9.0),
        "loss-below-least",
        "the least possible 9.0000",
    ),
    Fault("another task", DDP, put("task.name", "mine:Task"), "mixed-tasks", "task.name"),
    Fault(
        "epochs numbered twice",
        DDP,
        put("score.per_epoch.2.epoch", 2),
        "contradictory-score",
        "epochs",
    ),
    Fault(
        "losses unlike equal strategies'",
        DDP,
        times("score.per_epoch.4.train_loss", 3),
        "equal-arithmetic-unequal-loss",
        "train_loss",
    ),
    Fault("did not learn", ("main", "ps-async", 2, 1), less_accurate, "score-below-floor", "50.0%"),
    Fault("alone unlike synchronous", ALONE, less_accurate, "async-alone-unlike-sync", "ps-sync"),
    # Speed.
    Fault("superlinear against itself", DDP, faster(3), "superlinear", "on 2 as on 1"),
    Fault("superlinear against single only", SINGLE, faster(1 / 9), "superlinear", "single"),
    Fault("faster than memory moves", SYNC, faster(9000), "bandwidth-impossible", "GB/s"),
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
    Fault("other data", FSDP, put("data.sha256", "0" * 64), "mixed-data", "sha256"),
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
        "a repeat told twice",
        ("main", "ddp", 2, 1),
        put("model.initial_weights_sha256", sound("cuda")[DDP]["model"]["initial_weights_sha256"]),
        "repeats-alike",
        "0, 1",
    ),
    Fault(
        "other weights",
        FSDP,
        put("model.initial_weights_sha256", "0" * 64),
        "unequal-start",
        "fsdp",
    ),
    Fault("another GPU", DDP, put(worker("gpu.name"), "Another GPU"), "mixed-devices", "gpu.name"),
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
    Fault("another host", DDP, put(worker("host.name"), "other-host"), "mixed-hosts", "host.name"),
    Fault(
        "another driver",
        DDP,
        put(worker("driver.driver_version"), "999"),
        "mixed-drivers",
        "driver",
    ),
    Fault("changed code", DDP, put("provenance.git.dirty", True), "mixed-revisions", "dirty"),
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
    Fault(
        "a repeat sharded otherwise",
        FSDP,
        change("strategy.wrap_groups", lambda old: old[:3]),
        "repeats-differ",
        "wrap_groups",
    ),
    # Copies, and what only some cells state.
    Fault(
        "epochs of another repeat, a hundredth slower",
        ("main", "ddp", 2, 1),
        put("time.epoch_times_s", [1.01 * s for s in sound("cuda")[DDP]["time"]["epoch_times_s"]]),
        "same-value-twice",
        "in one proportion",
    ),
    Fault(
        "epochs all equal",
        DDP,
        put("time.epoch_times_s", [8.0] * 6),
        "contradictory-time",
        "equally long",
    ),
    Fault(
        "losses of another repeat",
        ("main", "ddp", 2, 1),
        losses_of(DDP),
        "same-losses-twice",
        "repeat 0",
    ),
    Fault("losses of a barrier", ASYNC, losses_of(SYNC), "same-losses-twice", "ps-sync on 2"),
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
        "a shorter limit", TIMEOUT, put("time.time_limit_s", 600.0), "mixed-limits", "others 3000"
    ),
    Fault(
        "a stranger at the start",
        DDP,
        put("provenance.busy_at_start", {"0": {"other_gpu_processes": {"1": [4711]}}}),
        "stranger-on-gpu",
        "process 4711 on GPU 1 when the cell began",
    ),
    Fault(
        "a stranger who came later",
        ASYNC,
        put("provenance.gpu_strangers", {"0": [STRANGER]}),
        "stranger-on-gpu",
        "process 4711 on GPU 1 with up to 79.5 GiB, seen from 30 to 95 s",
    ),
    Fault(
        "out of memory beside a stranger",
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
        "nine stale pushes of thousands without waiting",
        ASYNC,
        aged(lambda n: [n - 9, 9]),
        "contradictory-server",
        "cannot avoid",
    ),
    Fault(
        "an all-reduce in no time",
        DDP,
        both(
            *(put(f"communication.{name}_ms", 0.0) for name in ("total", "overlapped", "exposed")),
            put("time.breakdown_ms.exposed_communication", 0.0),
        ),
        "contradictory-traffic",
        "fastest link",
    ),
    Fault(
        "gathered in 32 bits, sent in 16",
        FSDP,
        both(
            put("settings.precision", "bf16"),
            times("communication.sent_bytes_per_step", 0.75),
            times("communication.received_bytes_per_step", 0.75),
            times("communication.implied_bytes_per_s", 0.75),
        ),
        "contradictory-traffic",
        "less than 2 copies",
    ),
    Fault(
        "a slowdown that never happened",
        DDP,
        put("settings.slowdown", {"workers": [0], "factor": 3}),
        "contradictory-time",
        "slowdown is None",
    ),
    Fault(
        "never stale without waiting",
        ASYNC,
        aged(lambda n: [n]),
        "contradictory-server",
        "cannot avoid",
    ),
    Fault(
        "staler than updates make it",
        ASYNC,
        aged(lambda n: [0] * 9 + [n]),
        "contradictory-server",
        "sum_of_staleness",
    ),
    Fault(
        "a record of another strategy",
        FSDP,
        put("strategy.name", "ddp"),
        "unlike-its-strategy",
        "strategy.name is ddp",
    ),
    Fault(
        "a trait denied",
        ALONE,
        put("strategy.traits.synchronous_alone", False),
        "traits-unlike-strategy",
        "synchronous_alone",
    ),
    Fault(
        "moved by zeros, and said to equal DDP",
        DDP,
        put("strategy.details.moved_by_zeros", ["spare.weight"]),
        "traits-unlike-strategy",
        "equals_ddp is True, but that of ddp is False",
    ),
    Fault(
        "no traffic told",
        DDP,
        put("communication", None),
        "contradictory-traffic",
        "communication is absent",
    ),
    Fault(
        "a worker without memory",
        DDP,
        put("workers.1.memory", None),
        "contradictory-memory",
        "1 workers have no",
    ),
    # CPU processes.
    Fault(
        "energy without a GPU",
        DDP,
        put("energy", {"train_joules": 1e4, "joules_per_sample": 1e4 / 299520}),
        "contradictory-energy",
        "no GPUs",
        "cpu",
    ),
    Fault(
        "faster than cores",
        DDP,
        both(
            times("compute.forward_flops_per_sample", 300),
            times("compute.training_flops_per_sample", 300),
            times("compute.achieved_flops_per_s", 300),
        ),
        "contradictory-efficiency",
        "cores",
        "cpu",
    ),
    Fault(
        "a process without its host's memory",
        DDP,
        put(worker("host.memory_bytes"), 2**20),
        "contradictory-memory",
        "host",
        "cpu",
    ),
    Fault(
        "a method of another system",
        FSDP,
        put("memory.method", "maxrss-since-process-start"),
        "mixed-methods",
        "maxrss",
        "cpu",
    ),
    Fault(
        "throughput of a CPU doubled",
        FSDP,
        times("time.throughput_samples_per_s", 2),
        "contradictory-time",
        "throughput",
        "cpu",
    ),
    Fault(
        "a CPU's epoch doubled",
        ASYNC,
        times("time.epoch_times_s.0", 2),
        "contradictory-time",
        "epoch",
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
            "gpu_strangers": {},
        }
    evidence = planted.study(records, "cuda")
    assert {rule.id for rule in RULES if any(rule.check(evidence))} == set()


def test_sound_records_of_adamw_and_older_records_trip_no_rule():
    """AdamW keeps two moments and a count for each tensor; older records do not name an optimizer."""
    adamw, older = {}, dict(sound("cuda"))
    for place, record in sound("cuda").items():
        adamw[place] = with_adamw = copy.deepcopy(record)
        with_adamw["settings"] |= {
            "optimizer": "adamw", "momentum": 0.0, "betas": [0.9, 0.999], "eps": 1e-8
        }  # fmt: skip
        states = with_adamw["memory"]["model_states"]
        if states and states["optimizer_bytes"]:
            states["optimizer_bytes"] = 2 * states["optimizer_bytes"] + 4 * 161
    older[DDP] = copy.deepcopy(older[DDP])
    older[DDP]["strategy"]["details"].pop("optimizer_dtype")
    older[SINGLE] = copy.deepcopy(older[SINGLE])
    older[SINGLE]["settings"] |= {"optimizer": "sgd", "betas": None, "eps": None}
    for records in (adamw, older):
        evidence = planted.study(records, "cuda")
        found = [(r.id, f.figures) for r in RULES for f in r.check(evidence)]
        assert [
            x
            for x in found
            if x[0] in ("contradictory-memory", "mixed-optimizers", "mixed-settings")
        ] == []


def test_a_flat_optimizers_state_may_have_room_between_tensors_and_no_more():
    """The state of `zero1` covers the padding of its buckets, also on one worker."""
    place = ("main", "ddp", 1, 0)
    found = []
    for held, padded in ((1.0001, True), (1.0001, False), (0.99, True), (1.5, True)):
        records = dict(sound("cuda"))
        records[place] = record = copy.deepcopy(records[place])
        record["strategy"]["traits"]["optimizer_padded"] = padded
        record["memory"]["model_states"]["optimizer_bytes"] *= held
        evidence = planted.study(records, "cuda")
        rule = next(r for r in RULES if r.id == "contradictory-memory")
        found.append(any("optimizer_bytes" in f.figures for f in rule.check(evidence)))
    assert found == [False, True, True, True]


@pytest.mark.parametrize("name", [n for n in REGISTRY if strategy_class(n).kind == "server"])
def test_a_push_has_the_learning_rate_that_its_policy_gives_it(name):
    record = fixture.make_record(Cell("constructed", "main", name, "resnet50", "cifar10", 2, 0))
    options = strategy_class(name).Options(**record["strategy"]["options"])
    for factor in (1, 2):
        rate = factor * record["settings"]["lr"] * options.lr_factor(2)
        record["strategy"]["details"]["push_lr"] = rate
        evidence = planted.study({("main", name, 2, 0): record}, "cuda")
        found = [f.figures for f in RULE["contradictory-counts"].check(evidence)]
        assert any("push_lr" in figures for figures in found) == (factor == 2), found


def test_late_pushes_that_are_dropped_leave_none_that_is_stale():
    """`ps-backup` with one backup of two workers takes the first push of each step."""
    record = copy.deepcopy(sound("cuda")[ASYNC])
    aged(lambda n: [n // 2])(record)
    for dropped in (0, 1):
        for server in record["server"]["servers"]:
            made = sum(server["staleness"][0])
            server |= {"updates": [made], "dropped": [made * dropped]}
        found = RULE["contradictory-server"].check(planted.study({ASYNC: record}, "cuda"))
        assert any("cannot avoid" in f.figures for f in found) == (not dropped)


@pytest.mark.parametrize(("lost_ms", "believed"), [(1.6, True), (40.0, False)])
def test_a_short_training_may_lose_its_core_before_its_first_step(lost_ms, believed):
    """Of four steps of 2.8 ms a worker, a few ms that no step holds are more than STEPS."""
    record = copy.deepcopy(sound("cuda")[DDP])
    count = len(record["workers"])
    for own in record["workers"]:
        own |= {"steps": 4, "train_time_s": (4 * 2.8 + lost_ms) / 1e3}
    record["time"]["step_ms"] |= {"mean": 2.8, "count": 4 * count}
    record["time"]["breakdown_ms"] = {"step": 2.8}
    assert (not list(faults_of_workers(Facts(record)))) == believed


@pytest.mark.parametrize(("times_s", "believed"), [((0.054, 0.117), True), ((4.0, 11.7), False)])
def test_a_worker_may_wait_for_a_core_before_its_clock_ends(times_s, believed):
    """As two workers of a cell have on a machine with twenty processes a core."""
    record = copy.deepcopy(sound("cuda")[DDP])
    for own, time_s in zip(record["workers"], times_s, strict=True):
        own["train_time_s"] = time_s
    found = any(
        "rank 0: worker.train_time_s" in fault for fault in faults_of_workers(Facts(record))
    )
    assert found != believed


@pytest.mark.parametrize(("waited", "believed"), [(1.25, True), (1.5, False)])
def test_a_worker_may_wait_for_the_word_that_the_last_update_is_made(waited, believed):
    """On a busy machine it comes late, and the worker's own time ends with it; the server's does not."""
    record = copy.deepcopy(sound("cuda")[SYNC])
    ends_s = record["server"]["servers"][0]["train_time_s"]
    record["workers"][1]["train_time_s"] = 1.3 * ends_s
    record["server"]["servers"][0]["workers"][1]["wait_s"] = waited * ends_s
    found = RULE["contradictory-server"].check(planted.study({SYNC: record}, "cuda"))
    assert any("worker 1 at server 0: link.wait_s" in f.figures for f in found) != believed


GANG = ("main", "ddp", 4, 0)


@pytest.mark.parametrize("spoil", [None, "sum", "hosts"])
@pytest.mark.parametrize("change", [started_again, on_unequal_nodes])
def test_honest_records_of_gangs_as_people_run_them(change, spoil):
    record = fixture.make_record(Cell("s", *GANG[:2], "resnet50", "cifar10", *GANG[2:]))
    if change is started_again and spoil:
        pytest.skip("planted faults above")
    change(record)
    match spoil:
        case "sum":
            record["provenance"]["workers_per_node"] = 2
            record["provenance"]["nodes"] = 3
        case "hosts":
            record["workers"][0]["provenance"]["host"] = {"name": "another-node"}
    alone = planted.study({GANG: record}, "cuda")
    found = {
        name: list(RULE[name].check(alone))
        for name in ("contradictory-restarts", "contradictory-counts", "contradictory-time")
    }
    assert {name for name, faults in found.items() if faults} == (
        {"contradictory-counts"} if spoil else set()
    ), found
    assert bool(list(RULE["keeps-checkpoints"].check(alone))) == (change is started_again)


def test_a_record_that_cannot_be_counted_keeps_no_other_from_being_judged():
    """Two nodes, and a worker on neither: the finding is on that record, and not on the study."""
    broken = on_two_nodes("central")
    broken["server"]["servers"][0]["workers"][0]["worker"] = 7
    other = copy.deepcopy(sound("cuda")[SYNC])
    other["communication"]["busiest_link_bytes_per_batch"] = 1e6
    found = RULE["contradictory-traffic"].check(planted.study({ASYNC: broken, SYNC: other}, "cuda"))
    assert {f.where["strategy"] for f in found} == {"ps-async", "ps-sync"}


def on_two_nodes(placement: str) -> dict[str, Any]:
    """A sound record of two workers as it would be on two nodes, by the formulas of docs/strategies.md."""
    record = copy.deepcopy(sound("cuda")[ASYNC])
    record["strategy"]["options"]["placement"] = placement
    record["provenance"] |= {"nodes": 2, "workers_per_node": 1}
    moved = record["communication"]
    # Central: the second worker's bytes cross. Colocated: half of everybody's do, and of each server's.
    each = moved["sent_bytes_per_step"]
    moved |= {"local_bytes_per_step": each, "busiest_link_bytes_per_batch": each}
    if placement == "colocated":
        moved["busiest_server_bytes_per_s"] /= 2
        first = record["server"]["servers"][0]
        for link in first["workers"]:
            link |= {way: link[way] // 2 for way in ("bytes_in", "bytes_out")}
        record["server"]["servers"].append(copy.deepcopy(first) | {"server": 1})
    return record


@pytest.mark.parametrize("placement", ["central", "colocated"])
def test_bytes_over_links_are_held_against_what_the_servers_counted(placement):
    rule = next(r for r in RULES if r.id == "contradictory-traffic")
    for field in (None, "local_bytes_per_step", "busiest_link_bytes_per_batch"):
        for factor in (0.5, 2) if field else (1,):
            record = on_two_nodes(placement)
            if field:
                record["communication"][field] *= factor
            evidence = planted.study({ASYNC: record}, "cuda")
            figures = [found.figures for found in rule.check(evidence)]
            assert len(figures) == bool(field), figures
            assert all(field in found for found in figures)


def test_a_network_that_is_moved_by_zeros_is_believed_to_equal_no_ddp():
    records = copy.deepcopy(sound("cpu"))
    record = records[DDP]
    record["strategy"]["details"]["moved_by_zeros"] = ["spare.weight"]
    record["strategy"]["traits"] |= {"equals_ddp": False, "synchronous_alone": False}
    assert not any(RULE["traits-unlike-strategy"].check(planted.study(records, "cpu")))


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
        assert [f.figures for f in RULE[rule].check(study)] == []


def test_a_strategy_that_does_not_say_how_it_communicates_is_not_held_to_it():
    record = copy.deepcopy(sound("cuda")[DDP])
    record["cell"]["strategy"] = record["strategy"]["name"] = "of-a-user"
    record["settings"]["strategy"] = "of-a-user"
    record["strategy"]["traits"]["ring_copies"] = None
    for communication in (None, record["communication"] | {"method": "measured"}):
        record["communication"] = communication
        alone = planted.study({("main", "of-a-user", 2, 0): record}, "cuda")
        assert {rule.id for rule in RULES if any(rule.check(alone))} == set()


def test_planted_faults_are_found_by_rules_that_name_them():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 80
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
    return any(fault.says in found.figures for found in RULE[fault.rule].check(study))


#: Figures that nothing else in a record or beside it tells, up to a factor of two: start of the path.
UNGUARDED = {
    "time.start_skew_ms": "the fixture has no workers' starts to compare it with",
    "time.step_ms.std": "any spread within the range of the steps may be",
    "time.step_ms.min": "no other figure knows the shortest step",
    "time.step_ms.max": "no other figure knows the longest step",
    "time.breakdown_ms.data": "a hundredth of the step, within what two clocks may differ by",
    "time.breakdown_ms.push": "less than the clocks may differ by",
    "time.setup_s": "only their sum is bounded, by the whole",
    "time.data_s": "only their sum is bounded, by the whole",
    "time.warmup_s": "only their sum is bounded, by the whole",
    "time.eval_s": "only their sum is bounded, by the whole",
    "time.time_limit_s": "it is no part of the settings",
    "communication.timed_steps": "DDP times only some steps",
    "score.per_epoch": "of epochs but the last nothing else is told, and whole samples stay whole",
    "workers[0].memory.reserved_peak_bytes": "the allocator may keep anything",
    "workers[0].memory.requested_peak_bytes": "how much of its blocks was asked for, none else knows",
    "workers[0].memory.nvml_used_bytes": "others may be on the device",
    "workers[0].provenance.load_1m": "it is of the moment",
    "server.servers[0].workers": "how long a server let a worker wait, it alone knows",
    "server.servers[0].apply_s": "how long a server worked, it alone knows",
}


@pytest.mark.slow
@pytest.mark.parametrize("place", [DDP, ASYNC], ids=["ddp", "ps-async"])
def test_every_number_of_a_record_is_guarded_or_it_is_said_why_not(place):
    base = sound("cuda")[place]
    rules = [r for r in RULES if r.id.startswith(("contradictory", "lost", "mixed", "repeats-d"))]
    passed, tried = set(), 0
    for path, value in numbers_by_path(base):
        if path.startswith("workers[1]") or ".affinity" in path:
            continue
        for factor in (0.5, 2):
            if type(value)(value * factor) == value:
                continue
            tried += 1
            record = copy.deepcopy(base)
            times(re.sub(r"\[(\d+)\]", r".\1", path), factor)(record)
            if not refused(record) and not found_in(record, place, rules):
                passed.add(path)
    print(f"{tried - len(passed)} of {tried} changes by a factor of two found")
    assert tried > 150
    assert {path for path in passed if not path.startswith(tuple(UNGUARDED))} == set()


def refused(record: dict[str, Any]) -> bool:
    """Whether the merge takes it for no record."""
    try:
        planted.row(record)
    except RecordError:
        return True
    return False


def found_in(record: dict[str, Any], place: planted.Place, rules: list[Rule]) -> bool:
    """Whether any of the rules finds something with this record in the place of the sound one."""
    alone = Evidence(NO_CELLS, [record])
    if any(any(rule.check(alone)) for rule in rules if rule not in MIXED):
        return True
    # The others look at one record by itself, and find nothing in the sound ones.
    beside = Evidence(NO_CELLS, list((sound("cuda") | {place: record}).values()))
    return any(any(rule.check(beside)) for rule in rules if rule in MIXED)


NO_CELLS = pd.DataFrame(columns=list(COLUMNS))

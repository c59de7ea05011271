"""What every record keeps that the product writes: how its figures follow from each other.

The tests hold each record that they make against it, and `benchmarks/gpu/check.py` those of a GPU. By hand:

    PYTHONPATH=workflow python tests/invariants.py results/demo

prints a line for each figure in the records below that folder that does not agree, and exits with 1 if any
does not. Where clocks of several processes are compared, a busy machine has room.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from stratbench.analysis.records.derived import get_field_by_path
from stratbench.analysis.records.facts import Facts, compute_longest_pause_of_node_s
from stratbench.strategies import REGISTRY, get_strategy_class
from stratbench.telemetry.flops import TRAINING_FLOPS
from stratbench.telemetry.machine.hardware import find_datasheet

Record = dict[str, Any]
#: Figures that are rounded in a record, and clocks of several processes (a share, seconds).
ROUNDED, CLOCKS, CLOCKS_S = 1e-3, 0.1, 0.5
#: Dates of two hosts, and those that are kept in whole seconds.
DATES_S = 3.0
#: More bytes per second than hardware moves, and operations per second than a core makes.
LINK_BYTES_PER_S, CORE_FLOPS = 900e9, 5e11
#: Shards are padded to a multiple of the workers, which matters in small layers.
PADDED = 1.3
#: The results of a cell that ended well.
RESULTS = ("time.train_time_s", "batch.samples_seen", "batch.samples_applied")
#: Fields that are equal in every record of our loop.
EQUAL = (
    ("settings.model", "cell.model"), ("settings.dataset", "cell.dataset"),
    ("settings.gpus", "cell.gpus"), ("settings.strategy", "strategy.name"),
    ("settings.options", "strategy.options"), ("data.name", "cell.dataset"),
    ("settings.global_batch", "batch.global_batch"),
    ("settings.per_worker_batch", "batch.per_worker_batch"),
    ("restarts.checkpoints.every", "settings.more.checkpoints.checkpoint_every"),
)  # fmt: skip
#: Figures that may be less than 0: options, scores, and the exit code of a process that a signal ended.
SIGNED = ("settings.", "strategy.options.", "score.", "program.external.exit_code")
PARTS = ("setup_s", "data_s", "warmup_s", "eval_s", "train_time_s")
PERCENTILES = ("min", "p10", "p50", "p90", "p99", "max")
#: The format in which a precision computes.
FORMATS = {
    "fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16", "tf32": "tf32",
    "bf16-true": "bfloat16",
}  # fmt: skip
DTYPES = FORMATS | {"tf32": "float32"}


class Told(Facts):
    """A record, and a sentence for each invariant that it breaks: a figure that is absent breaks none."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.broken: list[str] = []
        kind = self("strategy.kind")
        self.ours, self.served, self.collective = (
            kind != "own", kind == "server", kind == "collective"
        )  # fmt: skip
        #: Whether no worker was lost, and every worker states its totals.
        #: Whether the number of workers varied.
        self.elastic = self("elastic") is not None
        self.whole = self.finished and not self.elastic and not self.lost
        self.whole = self.whole and len(self.workers) == self.gpus
        #: Whether workers of servers trained on while the epoch was evaluated that ended the cell.
        self.ended_early = self("elastic.servers.last_epoch") is not None
        self.trainable_bytes = self.compute_parameter_bytes(self("model.trainable_parameters"))

    def wrong(self, sentence: str) -> None:
        self.broken.append(sentence)

    def same(
        self, what: str, one: float | None, other: float | None, relative: float = 1e-6,
        absolute: float = 0.0,
    ) -> None:  # fmt: skip
        """Two figures are equal, but for a share of the larger one and an absolute difference."""
        if None not in (one, other):
            slack = absolute + relative * max(abs(one), abs(other))
            if not abs(one - other) <= slack:  # so written, NaN is equal to nothing
                self.wrong(f"{what}: {one:.9g}, {other:.9g}")

    def clocks(
        self, what: str, one: float | None, other: float | None, slack: float = CLOCKS_S
    ) -> None:
        """Two spans of clocks of different processes are equal."""
        self.same(what, one, other, CLOCKS, slack)

    def most(
        self, what: str, one: float | None, other: float | None, relative: float = 1e-6,
        absolute: float = 0.0,
    ) -> None:  # fmt: skip
        """The first figure is at most the other one."""
        if None not in (one, other) and not one <= other + absolute + relative * abs(other):
            self.wrong(f"{what}: {one:.9g}, {other:.9g}")

    def alike(self, what: str, one: Any, other: Any) -> None:
        """Two values that are no figures are equal."""
        if None not in (one, other) and one != other:
            self.wrong(f"{what}: {one!r:.200}, {other!r:.200}")

    def given(self, what: str, value: Any, must_be: bool, reason: str) -> None:
        """There is a value where there must be one, and only there."""
        if (value is not None) != must_be:
            self.wrong(f"{what} is {value!r:.60}, {reason}")

    def rising(self, what: str, values: Iterable[float | None]) -> None:
        listed = [value for value in values if value is not None]
        if any(not a <= b for a, b in pairwise(listed)):
            self.wrong(f"{what} are not in ascending order: {listed}")


def broken(record: Record) -> list[str]:
    """Return a sentence for each invariant that a record, valid by its schema, breaks."""
    told = Told(record)
    checks = (*OF_EVERY, *(OF_OURS if told.ours else ()))
    for check in checks if not told("provenance.software_gpu") else COUNTED:
        try:
            check(told)
        except (ArithmeticError, LookupError, TypeError, ValueError) as e:
            told.wrong(f"a field has a form that no cell writes: {type(e).__name__}: {e}")
    return told.broken


def broken_below(folder: Path) -> list[str]:
    """Return the invariants that the records below a folder break, each with the record's path."""
    return [
        f"{path}: {sentence}"
        for path in sorted(folder.rglob("record.json"))
        for sentence in broken(json.loads(path.read_text()))
    ]


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a record with its path."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in inner:
        if isinstance(entry, (dict, list)):
            yield from numbers(entry, f"{path}{key}.")
        elif isinstance(entry, (int, float)) and not isinstance(entry, bool):
            yield f"{path}{key}", entry


# ---------------------------------------------------------------- of every record


def end(told: Told) -> None:
    """A cell that ended well has its results and no reason, another one a reason and no final score."""
    status, reason = told.status, f"although the cell ended as {told.status}"
    is_ok, entries = status == "ok", told("score.per_epoch")
    told.given("reason", told("reason") or None, not is_ok, reason)
    if is_ok or status in ("oom", "timeout", "unsupported"):
        for path in RESULTS:
            told.given(path, told(path), is_ok, reason)
    if not told.ours:
        return
    evaluated = not told("settings.steps")
    # The tests' software GPU computes nothing: none of its answers counts.
    drivers = (get_field_by_path(w["provenance"], "driver.driver_version") for w in told.workers)
    if not any("software GPU" in str(driver) for driver in drivers):
        told.given("score.final", told("score.final"), is_ok and evaluated, reason)
    # The losses of a worker that was lost are not known.
    names = ("test_loss",) if told.elastic else ("train_loss", "test_loss")
    finite = all(entry[name] is not None for entry in entries for name in names)
    if is_ok:
        for path in ("batch.updates_applied", "time.step_ms", "model.parameters"):
            told.given(path, told(path), True, reason)
        for path in ("memory.peak_bytes", "memory.model_states"):
            told.given(path, told(path), True, reason)
        told.given("workers", told.workers or None, True, reason)
    if evaluated and (is_ok or (status == "diverged" and told.finished)) and finite != is_ok:
        told.wrong(f"losses are {('' if finite else 'not ')}finite, {reason}")


def span(told: Told) -> None:
    """The parts of a cell lie within it, and the cell between its dates and within its limit."""
    total_s, limit_s = told("time.total_s"), told("time.time_limit_s")
    parts = {name: told(f"time.{name}") or 0.0 for name in PARTS}
    for name, value in parts.items():
        told.most(f"time.{name}, at most time.total_s", value, total_s)
        if told.status == "ok" and told(f"time.{name}") is not None and not value > 0:
            told.wrong(f"time.{name} is {value}")
    told.most("the parts, at most time.total_s", sum(parts.values()), total_s, CLOCKS)
    begun, ended = (told(f"provenance.{name}") for name in ("started", "finished"))
    if begun and ended:
        between = datetime.fromisoformat(ended) - datetime.fromisoformat(begun)
        # The record's clock stands still while the machine sleeps.
        asleep_s = compute_longest_pause_of_node_s(told, lambda pause: pause["asleep_s"])
        ran_s = between.total_seconds() - (told("restarts.between_s") or 0.0) - asleep_s
        told.same("time.total_s and from start to finish", total_s, ran_s, 0.01, DATES_S)
    if told.status == "timeout":
        told.given("time.time_limit_s", limit_s, True, "although the cell reached it")
        if not told.elastic:  # an elastic cell's limit counts from its first step
            told.most("the limit, at most time.total_s", limit_s, total_s, 0.02)
        for entry in told("score.per_epoch")[-1:]:
            told.most("the last epoch's end, at most time.total_s", entry["train_time_s"], total_s)


def training(told: Told) -> None:
    """The training time is that of the epochs, and of the slowest worker."""
    train_s, spans = told("time.train_time_s"), told("time.epoch_times_s")
    ends = [entry["train_time_s"] for entry in told("score.per_epoch")]
    told.rising("train_time_s of epochs", ends)
    # The servers' short last pass over the data may end with the one before.
    if not told("settings.steps") or not told.servers:
        if any(not s > 0 for s in spans):
            told.wrong(f"epochs took {spans}")
        total = 0.0
        for i, (took_s, end_s) in enumerate(zip(spans, ends, strict=False), 1):
            total += took_s
            if told.finished:
                told.same(f"the end of epoch {i} and the sum until it", end_s, total)
        if told.status == "ok":
            told.clocks("the sum of epochs and time.train_time_s", sum(spans), train_s)
    if not told.finished or not train_s:
        return
    applied = told("batch.samples_applied")
    if applied is not None:
        told.same(
            "time.throughput_samples_per_s and samples / time",
            told("time.throughput_samples_per_s"),
            applied / train_s,
        )
    own = [w["train_time_s"] for w in told.workers if w["train_time_s"]]
    if told.elastic or not own:
        return
    room = (CLOCKS, CLOCKS_S) if told.served else (1e-6, 0.0)
    told.same("time.train_time_s and the slowest worker's", train_s, max(own), *room)
    for server in told.servers:
        told.clocks("time.train_time_s and a server's", train_s, server["train_time_s"])
    if told.collective:
        told.most("half of it, at most each", max(own) / 2, min(own), 0.0, CLOCKS_S)
        if told.whole:
            first = told.workers[0]["train_time_s"]
            told.same("the sum of epochs and rank 0's time", sum(spans), first)


def finite_numbers(told: Told) -> None:
    """Every figure is a number, and at least 0."""
    for path, value in numbers(told.record):
        if not math.isfinite(value):
            told.wrong(f"{path} is {value}")
        elif value < 0 and not path.startswith(SIGNED):
            told.wrong(f"{path} is {value:.6g}, less than nothing")


OF_EVERY = (end, span, training, finite_numbers)

# ---------------------------------------------------------------- of our loop's


def settings(told: Told) -> None:
    """The record is of its cell's settings, of its strategy, and of the formats that the settings ask for."""
    for path, other in EQUAL:
        told.alike(f"{path} and {other}", told(path), told(other))
    if told("settings.device") != "auto":
        device = told("provenance.device")
        told.alike("settings.device and that used", told("settings.device"), device)
    name, precision = told("strategy.name"), told("settings.precision")
    if told("cell.strategy") in REGISTRY:  # and no variant
        told.alike("cell.strategy and strategy.name", told("cell.strategy"), name)
    if name in REGISTRY:
        cls = get_strategy_class(name)
        told.alike("strategy.kind and the class's", told("strategy.kind"), cls.kind)
        rings = told("strategy.traits.ring_copies") is not None
        method = "measured" if cls.kind == "server" else "ring" if rings else None
        told.alike(
            "communication.method and that of its kind", told("communication.method"), method
        )
        if (rate := told("strategy.details.push_lr")) is not None:
            factor = cls.Options(**told("strategy.options")).lr_factor(told.gpus)
            told.same("push_lr and its policy's", rate, told("settings.lr") * factor)
    computed = told("strategy.details.compute_dtype")
    if computed is not None and computed.split()[0] not in (FORMATS[precision], DTYPES[precision]):
        told.wrong(
            f"strategy.details.compute_dtype is {computed}, but the precision is {precision}"
        )
    kept = told("strategy.details.weights_dtype")
    wanted = FORMATS[precision] if precision in ("fp64", "bf16-true") else "float32"
    told.alike("strategy.details.weights_dtype and that of the precision", kept, wanted)
    threads = told("provenance.threads_per_worker")
    for worker in told.workers:
        own = get_field_by_path(worker["provenance"], "host.threads")
        told.alike(f"threads of rank {worker['rank']} and the cell's", own, threads)


def batches(told: Told) -> None:
    """Batches divide over workers, and make the steps of an epoch and the epochs that were asked for."""
    batch, each = told("batch.global_batch"), told("batch.per_worker_batch")
    replicas = told.mesh.replicas
    told.same("batch.global_batch and replicas x each", batch, replicas * each)
    size = replicas * told.mesh.tensor * told.mesh.stages
    told.same("the size of the mesh and cell.gpus", size, told.gpus)
    steps, samples = told("batch.steps_per_epoch"), told("data.train_samples")
    if None not in (steps, samples):
        told.same("batch.steps_per_epoch and samples", steps, samples // batch)
    per_step = told("batch.samples_per_step")
    if per_step is not None and (not per_step or each % per_step):
        told.wrong(f"batch.samples_per_step is {per_step}, of a worker's batch of {each}")
    entries, asked = len(told("score.per_epoch")), told("settings.epochs")
    passes = len(told("time.epoch_times_s"))
    if limit := told("settings.steps"):
        told.same("the epochs with a score and none", entries, 0)
        if told.status == "ok" and steps:
            told.same("the passes and its steps'", passes, math.ceil(limit / steps))
        return
    if told.finished:
        told.same("len(time.epoch_times_s) and the number of scores", passes, entries)
    told.most("the number of scores, at most settings.epochs", entries, asked)
    if told.status == "ok" and told("settings.more.elastic.ends_at") is None:
        told.same("the number of scores and settings.epochs", entries, asked)


def samples(told: Told) -> None:
    """Samples and updates are those of the steps."""
    if not told.finished:
        return
    batch, steps = told("batch.global_batch"), told.num_steps_trained
    if told.served and not told.elastic and told.status == "diverged" and told("settings.epochs"):
        # Its workers wait for no epoch, and have trained all when a loss is looked at.
        steps = told("settings.epochs") * (told("batch.steps_per_epoch") or 0)
    seen, applied = (told(f"batch.samples_{which}") for which in ("seen", "applied"))
    made = told("batch.updates_applied")
    told.same("batch.samples_seen and steps x batch", seen, steps * batch)
    told.most("batch.samples_applied, at most batch.samples_seen", applied, seen)
    speaking = [w["samples"] for w in told.workers if told.mesh.reports_replica_results(w["rank"])]
    if told.whole and None not in speaking:
        told.same("batch.samples_seen and the workers'", seen, sum(speaking))
    each = told("strategy.traits.updates_per_step")
    if told.collective:
        told.same(
            "batch.updates_applied and steps", made, told.num_steps_trained - told.num_skipped_steps
        )
        if made is not None:
            told.same("batch.samples_applied and updates", applied, made * batch)
    if told.status == "ok" and not told.ended_early and each is not None:
        # A step that overflowed makes no update; the last update may be of fewer pushes.
        most = told.num_steps_trained * each + 1
        told.most("batch.updates_applied, at most those of all steps", made, most)
        if not told.num_skipped_steps and not told.lost:
            told.most("updates of all steps, at most updates_applied", most - 2, made)
    for worker in told.workers:
        if (waited_s := worker.get("core_wait_s")) is not None and worker["train_time_s"]:
            # The count is read before the clock starts and after it stops.
            what = "a worker's wait for a core, at most its training"
            told.most(what, waited_s, worker["train_time_s"], absolute=10.0)
    for worker in () if told.elastic else told.workers:
        of, taken = f"rank {worker['rank']}", worker["steps"]
        if taken is not None and told("batch.samples_per_step") is not None:
            own = taken * told("batch.samples_per_step")
            told.same(f"{of}: samples and its steps'", worker["samples"], own)
        if told.collective:
            told.same(f"{of}: steps and the cell's", taken, told.num_steps_trained)


def places(told: Told) -> None:
    """The workers are those of the cell, on the nodes that the record states."""
    if told.elastic:
        return
    ranks = [worker["rank"] for worker in told.workers]
    if ranks != sorted(set(ranks)) or any(not 0 <= rank < told.gpus for rank in ranks):
        told.wrong(f"the workers' ranks are {ranks}, of {told.gpus} workers")
    if told.status == "ok" and told.collective:
        told.same("the number of workers and cell.gpus", len(ranks), told.gpus)
    if told.finished and told.served != bool(told.servers):
        told.wrong(
            f"the strategy's kind is {told('strategy.kind')}, with {len(told.servers)} servers"
        )
    nodes, most = told("provenance.nodes"), told("provenance.workers_per_node")
    if None in (nodes, most):
        return
    if not nodes * most >= told.gpus > (nodes - 1) * most:
        told.wrong(f"{told.gpus} workers do not fit {nodes} nodes with {most} at most")


def model(told: Told) -> None:
    """Parameters, groups and operations are those of one model."""
    count, trained = told("model.parameters"), told("model.trainable_parameters")
    groups = sum(group["parameters"] for group in told("strategy.wrap_groups") or ())
    told.most("parameters in groups, at most model.parameters", groups, count)
    told.most("model.trainable_parameters, at most model.parameters", trained, count)
    forward, each = (told(f"compute.{name}_flops_per_sample") for name in ("forward", "training"))
    if told("settings.own_model") is None and count is not None:
        # Nothing is frozen, and most is in a group; each weight makes two operations at least.
        told.same("model.trainable_parameters and all", trained, count)
        if groups:
            told.most("model.parameters, at most twice the groups'", count, 2 * groups)
        told.most("model.parameters, at most forward_flops_per_sample", count, forward)
    if forward is None:
        return
    most = TRAINING_FLOPS * forward
    # Frozen parameters have no gradients, of which each takes as much as the forward.
    told.most(f"training_flops_per_sample, at most {TRAINING_FLOPS} x", each, most)
    told.most("forward_flops_per_sample, at most training's", forward, each)
    if trained == count:
        told.same("training_flops_per_sample and forward's", each, most)


def operations(told: Told) -> None:
    """Operations per second follow from samples and time, and are no more than the devices can make."""
    forward, each = (told(f"compute.{name}_flops_per_sample") for name in ("forward", "training"))
    if forward is None:
        return
    most = TRAINING_FLOPS * forward
    made, train_s = told("compute.achieved_flops_per_s"), told("time.train_time_s")
    seen = told("batch.samples_seen")
    if train_s and seen is not None:
        per_s = (most if each is None else each) * seen / train_s
        told.same("compute.achieved_flops_per_s and samples x flops", made, per_s)
    peak = told("compute.peak_flops_per_s")
    if peak and made is not None:
        told.same("compute.mfu and made / peak", told("compute.mfu"), made / peak)
        told.most("compute.mfu, at most all", told("compute.mfu"), 1.0)
    names = [get_field_by_path(worker["provenance"], "gpu.name") for worker in told.workers]
    if told.whole and None not in names and told("settings.precision") != "fp64":
        sheets = [
            sheet and sheet.get_peak_tflops(told("settings.precision"))
            for sheet in map(find_datasheet, names)
        ]
        if None not in sheets:
            known = 1e12 * sum(sheets)
            told.same("compute.peak_flops_per_s and the datasheets'", peak, known)
    if told("provenance.device") == "cpu":
        cores = [
            get_field_by_path(w["provenance"], "host.cores_logical") or 0 for w in told.workers
        ]
        able = max(cores, default=0) * (told("provenance.nodes") or 1) * CORE_FLOPS
        told.most("achieved_flops_per_s, at most all cores'", made, able or None)


def steps(told: Told) -> None:
    """Steps and their phases make up the workers' times."""
    ms, phases = told("time.step_ms"), told("time.breakdown_ms")
    if not ms:
        return
    told.rising("the percentiles of steps", (ms.get(name) for name in PERCENTILES))
    told.most("the shortest step, at most the mean", ms["min"], ms["mean"])
    told.most("the mean step, at most the longest", ms["mean"], ms["max"])
    told.most("their deviation, at most their range", ms["std"], ms["max"] - ms["min"])
    own = [w["train_time_s"] for w in told.workers]
    taken = [w["steps"] for w in told.workers]
    if not told.finished or None in own or None in taken or told.elastic:
        return  # a broken step takes time and is none
    told.same("time.step_ms.count and the workers'", ms["count"], sum(taken))
    spent_s, slack_s = ms["mean"] * ms["count"] / 1e3, CLOCKS_S * len(own)
    told.clocks("all steps and the workers' times", spent_s, sum(own), slack_s)
    if phases and all(taken):
        mean = sum(1e3 * t / n for t, n in zip(own, taken, strict=True)) / len(own)
        slack_ms = 1e3 * CLOCKS_S / min(taken)
        told.clocks("all phases and a step", sum(phases.values()), mean, slack_ms)
        if told("time.bubble_share") is not None:
            share = phases["bubble"] / sum(phases.values())
            told.same("time.bubble_share and that of its phase", told("time.bubble_share"), share)
    for w in told.workers:
        of, mine = f"rank {w['rank']}", w.get("own_ms") or [0.0]
        told.most(f"{of}: own_ms, at most steps", len(w.get("own_ms") or ()), w["steps"])
        told.most(f"{of}: own_ms, at most the longest step", max(mine), ms["max"], ROUNDED)
        its_s = w["train_time_s"]
        for what, took_s in (
            ("own_ms", sum(mine) / 1e3),
            ("issue_ms", (w.get("issue_ms") or 0.0) / 1e3 * len(told("time.epoch_times_s"))),
        ):
            told.most(f"{of}: {what}, at most its time", took_s, its_s, ROUNDED, CLOCKS_S)
        if get_field_by_path(w["provenance"], "device") == "cpu":
            reason = "although on a CPU host and device are one"
            told.given(f"{of}: issue_ms", w.get("issue_ms"), False, reason)


def slowdown(told: Told) -> None:
    """Workers were slowed where the settings ask for it, and only there."""
    asked, phases = told("settings.slowdown"), told("time.breakdown_ms")
    if not phases:
        return
    slept_ms, stated = phases.get("slowdown"), told("strategy.details.slowdown")
    if asked is None:
        told.given("breakdown_ms.slowdown", slept_ms, False, "and no worker was to be slowed")
        return
    slowed = [rank for rank in asked.get("workers", ()) if rank < told.gpus]
    if (slowed and asked.get("factor", 1) > 1) or asked.get("sigma", 0) > 0:
        if not slept_ms:
            told.wrong(
                f"breakdown_ms.slowdown is {slept_ms}, although workers were slowed: {asked}"
            )
        # Each attempt and each incarnation of a worker measures anew what it sleeps.
        elif stated and not (told("restarts.count") or told("elastic.incarnations")):
            least_ms = (stated["mean_factor"] - 1) * stated["step_without_ms"] / told.gpus
            told.most("what one slept, at most all", least_ms, slept_ms, CLOCKS)
            told.same("sigma and asked", stated["sigma"], asked.get("sigma", 0))
            if stated["factor"] not in (1, asked.get("factor", 1)):
                told.wrong(
                    f"the factor of a slowdown is {stated['factor']}, but {asked} was asked for"
                )


def restarts(told: Told) -> None:
    """Attempts and checkpoints are those of the steps."""
    every, stated = told("settings.more.checkpoints.checkpoint_every"), told("restarts")
    if (stated is None) != (every is None):
        told.wrong(f"checkpoint_every is {every}, with restarts {stated!r:.60}")
    if stated is None or every is None:
        return
    starts, total_s, count = stated["from_steps"], told("time.total_s"), stated["count"]
    told.same("restarts.count and len(from_steps)", count, len(starts))
    held_s = stated["checkpoints"]["held_up_s"]
    told.most("checkpoints.held_up_s, at most time.total_s", held_s, total_s)
    until_s = stated.get("until_step_s")
    told.most("until_step_s, at most total_s", until_s, total_s, absolute=DATES_S)
    if any(step % every for step in starts):
        told.wrong(f"attempts began after {starts} steps, with checkpoints after each {every}")
    if told.finished:
        spent_s = told("time.train_time_s") + stated["repeated_s"]
        slack_s = DATES_S * (1 + count)  # each attempt is known to a few seconds
        told.most("training, at most total_s", spent_s, total_s, absolute=slack_s)
        # There is one after so many steps, but for the last.
        kept = (told.num_steps_trained - 1) // every
        told.same("checkpoints and steps", stated["checkpoints"]["count"], kept)
        if any(step >= told.num_steps_trained for step in starts):
            told.wrong(f"attempts began after {starts} steps, of {told.num_steps_trained}")


def scores(told: Told) -> None:
    """The final and the best score are epochs' scores, and a score is one of its task."""
    entries, task = told("score.per_epoch"), told("task.name")
    numbered = [entry["epoch"] for entry in entries]
    if numbered != list(range(1, len(entries) + 1)):
        told.wrong(f"the epochs have the numbers {numbered}")
    values = [entry["score"] for entry in entries if entry["score"] is not None]
    if not values:
        return
    best = (max if told("task.better") == "higher" else min)(values)
    told.same("score.best and the best of all epochs", told("score.best"), best)
    told.same("score.final and the last", told("score.final"), entries[-1]["score"])
    n = told.multiply_fields("data.test_samples", "task.counts_per_sample")
    for entry in entries:
        of, score, loss = f"the score of epoch {entry['epoch']}", entry["score"], entry["test_loss"]
        if task == "next-token":
            told.same(f"{of} and its test loss", score, loss)
        if score is None or task != "classification":
            continue
        if not 0 <= score <= 1 or (n and abs(score * n - round(score * n)) > 1e-3):
            told.wrong(f"{of} is {score}, which is no share of {n} answers")
        # A wrong answer gives the right class a probability of at most one half.
        least = math.log(2) * (1 - score)
        told.most(f"the least loss of so many errors, at most {of}", least, loss, ROUNDED)


def memory(told: Told) -> None:
    """Peaks are those of the workers, and hold the model's states."""
    peak, method = told("memory.peak_bytes"), told("memory.method")
    peaks = [get_field_by_path(worker, "memory.peak_bytes") for worker in told.workers]
    if peaks and None not in peaks:
        told.same("memory.peak_bytes and the most of workers", peak, max(peaks))
        worst = told.workers[peaks.index(max(peaks))]["memory"]
        for name in ("peak_over_base_bytes", "requested_peak_bytes", "cublas_bytes"):
            if peak == max(peaks):
                here = told(f"memory.{name}")
                told.same(f"memory.{name} and that worker's", here, worst.get(name))
        for stage, entry in enumerate(told("memory.stages") or ()):
            of = [
                p
                for w, p in zip(told.workers, peaks, strict=True)
                if told.mesh.get_coordinate(w["rank"]).stage == stage
            ]
            told.same(f"stage {stage} and its workers'", entry["peak_bytes"], max(of))
    elif told.whole and peak is not None:
        told.wrong("workers have no peak_bytes, although the cell has one")
    on_cuda = told("provenance.device") == "cuda"
    if method is not None and (method == "cuda-allocator") != on_cuda:
        told.wrong(f"memory.method is {method} on {told('provenance.device')}")
    for worker in told.workers:
        of, own, place = f"rank {worker['rank']}", worker["memory"] or {}, worker["provenance"]
        told.alike(f"{of}: method and memory.method", own.get("method"), method)
        gpu, host = (get_field_by_path(place, f"{it}.memory_bytes") for it in ("gpu", "host"))
        device = gpu if on_cuda else host
        held = [own.get(f"{name}_bytes") for name in ORDER_OF_BYTES]
        told.rising(f"{of}: {', '.join(ORDER_OF_BYTES)}", held)
        told.most(f"{of}: peak_bytes, at most its device's", own.get("peak_bytes"), device)
        if gpu:
            for name in ("reserved_peak", "nvml_used", "nvml_process_used"):
                most = own.get(f"{name}_bytes")
                told.most(f"{of}: {name}_bytes, at most its GPU's", most, gpu)
            base, used = own.get("base_bytes"), own.get("nvml_used_bytes")
            told.most(f"{of}: base_bytes, at most nvml_used_bytes", base, used)
        if None not in (own.get("peak_bytes"), own.get("base_bytes")):
            over = max(0, own["peak_bytes"] - own["base_bytes"])
            stated = own.get("peak_over_base_bytes")
            told.same(f"{of}: peak_over_base_bytes and peak - base", stated, over)
        allocated = own.get("allocated_peak_bytes")
        told.same(f"{of}: allocated and its peak", allocated, own.get("peak_bytes"))


#: Bytes of a worker that no later one of these is less than.
ORDER_OF_BYTES = ("cublas", "requested_peak", "peak", "reserved_peak")


def states(told: Told) -> None:
    """Parameters, gradients and optimizer states have the size of the model, or of a part of it."""
    held, size, trained = told("memory.model_states"), told.parameter_bytes, told.trainable_bytes
    if not held or size is None or trained is None:
        return
    on_host = told("strategy.traits.states_on_host") and told("memory.method") == "cuda-allocator"
    if not on_host:
        whole, peak = sum(held.values()), told("memory.peak_bytes")
        told.most("memory.model_states, at most memory.peak_bytes", whole, peak)
    if told("model.batchnorm") is False and told("settings.own_model") is None:
        told.same("buffers of a network without BatchNorm", held.get("buffers_bytes"), 0)
    adamw = told("settings.optimizer") == "adamw"
    # SGD with momentum keeps one moment of each parameter, AdamW two, a served worker none.
    moments = 0 if told.served else 2 if adamw else bool(told("settings.momentum"))
    copies = 0 if told.served else told("strategy.traits.kept_copies")
    # AdamW counts the steps of each tensor in 4 bytes.
    counts = 4 * 4096 if adamw and not told.served else 0
    state_of(told, "parameters", held, size, size, "weight", 0)
    state_of(told, "gradients", held, trained, trained, "weight", 0)
    least, kept = moments * trained, math.inf if copies is None else copies * trained
    state_of(
        told,
        "optimizer",
        held,
        least + (0 if copies is None else kept),
        least + kept,
        "optimizer",
        counts,
    )


def state_of(
    told: Told, name: str, held: Record, least: float, most: float, kind: str, counts: int
) -> None:
    """One of the states: the whole of it, or one of as many parts as the strategy says, padded."""
    what, value = f"memory.model_states.{name}_bytes", held.get(f"{name}_bytes")
    parts, padded = told(f"strategy.traits.{kind}_parts"), told("strategy.traits.optimizer_padded")
    spare = 0.0 if parts == 1 and not (kind == "optimizer" and padded) else 4096
    share = 1 if parts in (1, None) or not spare else 1.25 / parts  # None: uneven, or not known
    top = most * share + spare + counts
    told.most(
        f"its part of the model, at most {what}", least / (parts or told.gpus), value, ROUNDED
    )
    told.most(f"{what}, at most its part of the model", value, top)


def energy(told: Told) -> None:
    """Energy is what the GPUs may have drawn."""
    joules, time_s = told("energy.train_joules"), told("time.train_time_s")
    applied = told("batch.samples_applied")
    if joules is None:
        return
    if applied:
        each = told("energy.joules_per_sample")
        told.same("energy.joules_per_sample and its part", each, joules / applied)
    if told("provenance.device") == "cpu":
        told.wrong(f"energy.train_joules is {joules:.6g}, although the workers had no GPUs")
    elif time_s:
        limits = [
            get_field_by_path(w["provenance"], "gpu.power_limit_w") or 2000 for w in told.workers
        ]
        most = sum(limits) * time_s
        told.most("energy.train_joules, at most the limits'", joules, most, CLOCKS)
        least = 5.0 * sum(w["train_time_s"] or 0.0 for w in told.workers)
        told.most("5 W of each GPU, at most energy.train_joules", least, joules)


def traffic(told: Told) -> None:
    """Bytes and waits agree, and are those of the model and of the strategy's algorithm."""
    moved, rings = told("communication"), told("strategy.traits.ring_copies")
    if not moved:
        if told.status == "ok" and not told.elastic and (rings is not None or told.servers):
            told.wrong("communication is absent, although the cell ended well")
        return
    sent, received = moved["sent_bytes_per_step"], moved["received_bytes_per_step"]
    taken, train_s = [worker["steps"] for worker in told.workers], told("time.train_time_s")
    known = told.finished and None not in taken and bool(train_s)
    if moved["method"] == "ring":
        told.same("bytes sent and those received", sent, received)
        if told.gpus == 1:
            told.same("bytes sent and nothing, by one worker", sent, 0)
    if known:
        per_s = max(sent, received) * sum(taken) / len(taken) / train_s
        told.same(
            "implied_bytes_per_s and bytes per step / time", moved.get("implied_bytes_per_s"), per_s
        )
    if known and told.servers:
        links = [[e["bytes_in"] + e["bytes_out"] for e in s["workers"]] for s in told.servers]
        per_s = max(map(sum, links)) / train_s
        stated = moved.get("busiest_server_bytes_per_s")
        told.same("busiest_server_bytes_per_s and its links'", stated, per_s)
    phases = told("time.breakdown_ms") or {}
    # Where more is exposed than backward took, all of backward is that phase.
    if phases.get("backward") != 0:
        shown = phases.get("exposed_communication")
        told.same("communication.exposed_ms and its phase", moved.get("exposed_ms"), shown)
    # Likewise of the wait in the exchange with servers: the phase is a mean of timed steps, the wait of all.
    if phases.get("push") != 0:
        waited = phases.get("server_wait")
        told.same("communication.server_wait_ms and its phase", moved.get("server_wait_ms"), waited)
    total, hidden, shown = (moved.get(f"{name}_ms") for name in ("total", "overlapped", "exposed"))
    longest = told("time.step_ms.max")
    # Communication is timed in steps of its own choice, which on a busy machine may be longer ones.
    longest = None if longest is None else 1.5 * longest + 1.0
    for what, value, most in (
        ("exposed_ms", shown, total), ("overlapped_ms", hidden, total), ("total_ms", total, longest),
        ("server_wait_ms", moved.get("server_wait_ms"), longest),
        ("timed_steps", moved.get("timed_steps"), max(filter(None, taken), default=None)),
    ):  # fmt: skip
        told.most(f"communication.{what}, at most its most", value, most)
    if None not in (total, hidden):
        told.most("total - overlapped, at most exposed_ms", total - hidden, shown)
    if moved["method"] == "ring" and told.gpus > 1 and told.trainable_bytes is not None:
        rings_of(told, sent, total)
    if told.servers and told.whole and told.trainable_bytes is not None and sum(taken):
        links_of(told, sent, received, sum(taken))


def rings_of(told: Told, sent: float, total_ms: float | None) -> None:
    """A ring sends as many copies of the parameters as its strategy states, and the buffers."""
    share = (told.gpus - 1) / told.gpus
    buffers = told("memory.model_states.buffers_bytes") or 0
    # Buffers are broadcast beside what is timed.
    least_ms = 1e3 * max(0.0, sent - buffers) / LINK_BYTES_PER_S
    told.most("the fastest link's time, at most total_ms", least_ms, total_ms)
    copies, trained = told("strategy.traits.ring_copies"), share * told.trainable_bytes
    if copies is None:
        return
    shards = copies and told("strategy.traits.shards_states")
    # All parameters are gathered; of those that are trained, gradients are reduced.
    gathered = share * told.parameter_bytes if shards else trained
    least = whole = (copies - 1) * gathered + trained if shards else copies * trained
    # By policy parameters are gathered in 16 bits; gradients are reduced in their own format.
    by_policy = told("strategy.options.mixed_precision") == "policy"
    if shards and by_policy and told("settings.precision") in ("fp16", "bf16"):
        least -= (copies - 1) * max(0.0, gathered - 2 * share * told("model.parameters"))
    told.most(f"{copies} copies, at most sent_bytes_per_step", least, sent, 0.01)
    # A sharded one may gather twice, and reduce, for each part of a batch; one that divides gradients
    # alone may reduce each. A training ends with an exchange, even if the next one is not due yet.
    parts, more = told("settings.gradient_accumulation_steps") or 1, 0.0
    if shards:
        more = (3 * parts - 2) * gathered
    elif told("strategy.traits.weight_parts") is None:
        more = 2 * (parts - 1) * gathered
    last = 2 * trained / max(1, told.num_steps_trained)
    most = PADDED * (whole + more + last) + 4 * buffers + 4096
    told.most(f"sent_bytes_per_step, at most {copies} copies, padded", sent, most)


def links_of(told: Told, sent: float, received: float, taken: int) -> None:
    """A worker of servers sends and receives what is trained, and the servers count the same bytes."""
    size, buffers = told.trainable_bytes, told("memory.model_states.buffers_bytes") or 0
    pushed = (0.5 if told("strategy.options.wire") == "bfloat16" else 1.0) * (
        1 - told.num_skipped_steps / taken
    )
    for way, each, least in (("sent", sent, pushed), ("received", received, 0.9)):
        told.most(f"bytes {way}, at most a model's", each, 1.1 * (size + buffers) + 65536)
        told.most(f"a model's bytes, at most those {way}", least * size, each, 0.02)
    links = [link for server in told.servers for link in server["workers"]]
    # The servers' sums hold warm-up exchanges, and first and last reads.
    extra = told.gpus * ((told("settings.warmup_steps") or 0) + 4)
    for way, each in (("bytes_in", sent), ("bytes_out", received)):
        counted, most = sum(link[way] for link in links), (taken + extra) * max(each, size)
        told.most(f"the workers' bytes, at most servers' {way}", taken * each, counted, 0.01)
        told.most(f"servers' {way}, at most the workers' bytes", counted, most, 0.01)
    local = told("communication.local_bytes_per_step")
    busiest = told("communication.busiest_link_bytes_per_batch")
    nodes = told("provenance.nodes")
    if None in (local, busiest, nodes) or told("strategy.name") not in REGISTRY:
        return
    if nodes == 1:
        told.same("local_bytes_per_step and all", local, sent + received)
        told.same("busiest_link_bytes_per_batch and nothing", busiest, 0)
        return
    within, across = counted_by_servers(told, nodes)
    for what, total, counted, each in (
        ("local_bytes_per_step", local * taken, within, sent + received),
        ("busiest_link_bytes_per_batch", busiest * taken / told.gpus, across, max(sent, received)),
    ):
        told.most(f"{what}, summed up,, at most the servers'", total, counted, 0.01)
        least = counted - extra * each
        told.most(f"the servers', at most {what}, summed up,", least, total, 0.01)


def counted_by_servers(told: Told, nodes: int) -> tuple[int, int]:
    """Bytes within nodes, and over the busiest link between nodes (one way), by the servers' count."""
    out, back, local = [0] * nodes, [0] * nodes, 0
    for k, server in enumerate(told.servers):
        colocated = told("strategy.options.server_placement") == "colocated"
        here = told.compute_node_number_of_rank(k) if colocated else k % nodes
        for link in server["workers"]:
            there, pushed, pulled = (
                told.compute_node_number_of_rank(link["worker"]),
                link["bytes_in"],
                link["bytes_out"],
            )
            if here == there:
                local += pushed + pulled
                continue
            for node, gone, come in ((there, pushed, pulled), (here, pulled, pushed)):
                out[node] += gone
                back[node] += come
    return local, max(*out, *back)


# ---------------------------------------------------------------- of servers


def servers(told: Told) -> None:
    """What the servers counted agrees with the workers and with the policy."""
    if not told.servers:
        return
    asked, name = told("strategy.options.servers"), told("strategy.name")
    told.same("the number of servers and asked for", len(told.servers), asked)
    policy = get_strategy_class(name).policy if name in REGISTRY else None
    shards = [(s.get("shard_numel"), len(s.get("updates") or ())) for s in told.servers]
    trained, total = told("model.trainable_parameters"), sum(n for _, n in shards)
    if trained and all(numel is not None for numel, _ in shards):
        # Shards are padded, and the last one may be almost empty.
        numel = shards[0][0]
        told.most("what is trained, at most all shards", trained, numel * total)
        most, full = 1.1 * trained + 4096, max(1, total - 1)
        told.most("all shards but one, at most what is trained", numel * full, most)
    tickets(told)
    for i, server in enumerate(told.servers):
        of = f"server {i}"
        told.same(f"{of}: server and its place", server["server"], i)
        told.same(f"{of}: n_servers and asked for", server["n_servers"], asked)
        told.alike(f"{of}: policy and its strategy's", server["policy"], policy)
        if told.status == "ok":
            told.alike(f"{of}: status and the cell's", server.get("status"), "ok")
        pushes(told, server, of)
        if not told.ended_early:  # else others trained on while one evaluated
            time_of_server(told, server, of, i)
    if told.status == "ok" and not told.ended_early:
        made = max(n for s in told.servers for n in s["updates"])
        told.same("updates_applied and a shard's", told("batch.updates_applied"), made)
        counts = [sum(count) for s in told.servers for count in s["staleness"]]
        applied = sum(counts) / len(counts) * told("batch.samples_per_step")
        stated, slack = told("batch.samples_applied"), 1.0
        told.same("samples_applied and all pushes", stated, applied, 1e-06, slack)


def tickets(told: Told) -> None:
    """Every batch that was handed out was settled once, by the worker that counts it."""
    first = told.servers[0]
    own = first.get("elastic") or {}
    settled, each = first["tickets_settled"], told("batch.samples_per_step")
    counted = settled - own.get("after_the_end", 0)
    if told.finished:
        told.same("samples_seen and tickets", told("batch.samples_seen"), counted * each)
    links = {link["worker"]: link for link in first["workers"] if "tickets" in link}
    complete = not told.lost and not first.get("reassigned")
    if links and complete and (not told.elastic or "settled_before" in own):
        done = own.get("settled_before", 0) + sum(link["tickets"] for link in links.values())
        told.same("tickets_settled and the workers'", settled, done)
    for worker in told.workers if complete or told.elastic else ():
        of, link = f"rank {worker['rank']}", links.get(worker["rank"])
        if (
            link is None
        ):  # of an elastic cell: it was there in an earlier incarnation of the servers
            if not told.elastic and links:
                told.wrong(f"{of} is unknown to its server")
            continue
        told.most(f"{of}: tickets, at most its steps", link["tickets"], worker["steps"])
        told.most(f"{of}: skips, at most tickets", link.get("skips"), link["tickets"])
        if not told.elastic:  # one that goes may have taken a step that settled none
            told.same(f"{of}: tickets and its steps", link["tickets"], worker["steps"])
    if told.elastic and told.status == "ok" and not told.ended_early:
        work = told.num_steps_trained * told("batch.global_batch")
        told.same("tickets and steps x batch", settled * each, work)


def pushes(told: Told, server: Record, of: str) -> None:
    """Pushes, staleness and updates of each shard follow from the tickets."""
    counts, updates = server.get("staleness"), server.get("updates")
    total = server.get("staleness_all_shards")
    if counts is None or updates is None:
        return
    dropped = server.get("dropped") or [0] * len(updates)
    if not len(counts) == len(updates) == len(dropped):
        told.wrong(
            f"{of} has {len(updates)} shards, {len(counts)} staleness, {len(dropped)} dropped"
        )
        return
    width = max(map(len, counts), default=0)
    summed = [sum(c[i] if i < len(c) else 0 for c in counts) for i in range(width)]
    if total is not None and trimmed(summed) != trimmed(total):
        told.wrong(f"{of}: staleness_all_shards is {total}, but its shards make {summed}")
    waiting = told.gpus == 1 or told.averages_gradients_of_all_workers
    if waiting and len(trimmed(summed)) > 1:
        told.wrong(f"{of}: staleness is {summed}, although nothing can be stale")
    skips = sum(link.get("skips") or 0 for link in server["workers"])
    asked = sum(link.get("tickets") or 0 for link in server["workers"])
    busy = sum((link.get("tickets") or 0) >= 50 for link in server["workers"])
    whole = not told.lost and not server.get("reassigned")
    for i, (count, made, late) in enumerate(zip(counts, updates, dropped, strict=True)):
        shard, pushed = f"{of}, shard {i}", sum(count)
        if None in (made, late):
            told.wrong(f"{shard} counted {made} updates, {late} dropped pushes")
            continue
        if asked and whole and not told.elastic:
            told.same(f"{shard}: pushes and tickets", pushed, asked - skips - late)
        if told.elastic and told.status == "ok" and not told.ended_early and not skips:
            settled = told.servers[0]["tickets_settled"]
            told.same(f"{shard}: pushes and tickets", pushed + late, settled)
        told.most(f"{shard}: updates, at most pushes", made, pushed)
        # An update makes every batch in progress older by one, and a worker has one at a time.
        ages, age = sum(n * count[n] for n in range(len(count))), len(trimmed(count)) - 1
        told.most(f"{shard}: the highest staleness, at most updates", age, made)
        told.most(f"{shard}: staleness, at most updates x workers", ages, made * told.gpus)
        each = told("strategy.traits.updates_per_step")
        if (
            told.status == "ok"
            and each is not None
            and whole
            and not skips
            and not told.ended_early
        ):
            due = told.num_steps_trained * each
            told.same(f"{shard}: updates and steps", made, due, 1e-06, 1.0)
        # Where nobody waits, N - 1 batches are in progress, and half of that where all wait for all.
        if made == pushed and not waiting and not late and whole and not told.elastic:
            least = 0.25 * max(0, busy - 1) * pushed
            told.most(f"the least staleness, at most {shard}: staleness", least, ages)


def trimmed(counts: list[int]) -> list[int]:
    """A histogram without its trailing zeros."""
    last = max((i for i, count in enumerate(counts) if count), default=-1)
    return counts[: last + 1]


def time_of_server(told: Told, server: Record, of: str, i: int) -> None:
    """Epochs, waits and work of a server lie within its training time."""
    train_s, epochs = server.get("train_time_s"), server.get("epochs") or []
    ends = [epoch["end_s"] for epoch in epochs]
    told.rising(f"{of}: end_s", ends)
    if told.status == "ok" and [e["epoch"] for e in epochs] != list(range(told.num_data_passes)):
        told.wrong(f"{of}: epochs are {[e['epoch'] for e in epochs]}, of {told.num_data_passes}")
    if i == 0 and told.finished and len(ends) == len(told("time.epoch_times_s")):
        for end_s, entry in zip(ends, told("score.per_epoch"), strict=False):
            told.same(f"{of}: end_s and the epoch's", end_s, entry["train_time_s"])
    if train_s is None:
        return
    if ends:
        told.clocks(f"{of}: the last epoch's end and train_time_s", ends[-1], train_s)
    told.most(f"{of}: apply_s, at most its time", server["apply_s"], told.gpus * train_s)
    own = {w["rank"]: w.get("train_time_s") for w in told.workers}
    for link in server["workers"]:
        # A worker also waits from the last update until it hears of it.
        its_s, waited = own.get(link["worker"]) or train_s, f"{of}: wait_s of {link['worker']}"
        told.most(f"{waited}, at most its time", link["wait_s"], its_s, CLOCKS, CLOCKS_S)


# ---------------------------------------------------------------- of workers that come and go


def elastic(told: Told) -> None:
    """Jobs, generations, pauses and the seconds that were used agree."""
    if told.elastic != bool(told("settings.more.elastic.elastic")):
        told.wrong(
            f"settings.more.elastic is {told('settings.more.elastic')}, with elastic {told('elastic')!r:.40}"
        )
    if not told.elastic:
        return
    block = told("elastic")
    jobs, pauses, train_s = block["jobs"], block["pauses"], told("time.train_time_s")
    jobs_of(told, jobs)
    held = [job["allocated_s"] for job in jobs]
    if None not in held:
        told.same("elastic.allocated_s and the jobs'", block["allocated_s"], sum(held))
    told.most("idle_s, at most allocated_s", block["idle_s"], block["allocated_s"])
    longest, total = pauses["longest_s"], pauses["total_s"]
    told.most("pauses.longest_s, at most pauses.total_s", longest, total)
    told.most("pauses.median_s, at most pauses.longest_s", pauses["median_s"], longest)
    told.most("pauses.total_s, at most time.train_time_s", total, train_s)
    firsts = [job["first_step_s"] for job in jobs if job["first_step_s"] is not None]
    first = min(firsts, default=None)
    told.same("elastic.joins and jobs with a step", block["joins"], len(firsts))
    told.same("elastic.first_step_s and a job's", block["first_step_s"], first)
    resumed = sum(g["from_checkpoint"] for g in block["generations"])
    if told.served:
        incarnations = told("elastic.servers.incarnations") or []
        resumed = sum(incarnation["tickets_before"] > 0 for incarnation in incarnations[1:])
        check_incarnations(told, incarnations)
    told.same("elastic.restarts and from checkpoints", block["restarts"], resumed)
    if told.collective and told.finished:
        generations_of(told, jobs, block["generations"])


def jobs_of(told: Told, jobs: list[Record]) -> None:
    """Each worker job goes from its submission to its end, one at a time in each slot."""
    listed = [job["number"] for job in jobs]
    if listed != sorted(set(listed)):
        told.wrong(f"the worker jobs have the numbers {listed}")
    dates = ("submitted_s", "started_s", "joined_s", "first_step_s", "ended_s")
    for job in jobs:
        known = [(name, job[name]) for name in dates if job[name] is not None]
        for (one, before_s), (other, after_s) in pairwise(known):
            of = f"worker {job['number']}: {one}"
            told.most(f"{of}, at most {other}", before_s, after_s, absolute=DATES_S)
        if None not in (job["ended_s"], job["started_s"]):
            span_s, of = job["ended_s"] - job["started_s"], f"worker {job['number']}: allocated_s"
            told.same(f"{of} and from start to end", job["allocated_s"], span_s)
        if not 0 <= job["slot"] < told.gpus:
            told.wrong(f"a worker job has slot {job['slot']} of {told.gpus}")
    for slot in {job["slot"] for job in jobs}:
        for one, other in pairwise(job for job in jobs if job["slot"] == slot):
            if one["ended_s"] is None or other["submitted_s"] < one["ended_s"] - DATES_S:
                told.wrong(
                    f"workers {one['number']} and {other['number']} had slot {slot} together"
                )


def check_incarnations(told: Told, incarnations: list[Record]) -> None:
    """The incarnations of the servers follow one another."""
    block, stated = told("elastic.servers"), told("elastic.incarnations")
    if [incarnation["incarnation"] for incarnation in incarnations] != list(
        range(1, len(incarnations) + 1)
    ):
        told.wrong(
            f"the servers' incarnations have the numbers "
            f"{[incarnation['incarnation'] for incarnation in incarnations]}"
        )
    told.same("elastic.incarnations and the servers' incarnations", stated, len(incarnations))
    twice = sum(incarnation["tickets_done_twice"] for incarnation in incarnations)
    told.same("tickets_done_twice and all incarnations'", block["tickets_done_twice"], twice)
    if not 1 <= block["most_at_a_time"] <= told.gpus:
        told.wrong(f"most_at_a_time is {block['most_at_a_time']}, of {told.gpus} workers")
    evaluated, entries = block["evaluations"], len(told("score.per_epoch"))
    told.most("the number of scores, at most evaluations", entries, evaluated)
    for one, other in pairwise(incarnations):
        of, began_s = f"incarnation {other['incarnation']}: began_s", other["began_s"]
        told.most(
            f"the incarnation before, at most {of}", one["began_s"], began_s, absolute=DATES_S
        )
        done = other["tickets_before"] + other["tickets_done_twice"]
        told.most("tickets before, at most later ones", one["tickets_before"], done)


def generations_of(told: Told, jobs: list[Record], generations: list[Record]) -> None:
    """Each generation of workers goes on where the one before stopped."""
    by_number, taken, inside_s = {job["number"]: job for job in jobs}, 0, 0.0
    steps_of: dict[int, int] = {}
    for g in generations:
        of, members = f"generation {g['number']} of incarnation {g['incarnation']}", g["members"]
        made = (g["to_step"] or g["from_step"]) - g["from_step"]
        taken += made
        if not 1 <= len(set(members)) == len(members) <= told.gpus:
            told.wrong(f"{of} has the members {members}, of {told.gpus} workers at most")
        if None not in (g["began_s"], g["ended_s"]):
            inside_s += len(members) * (g["ended_s"] - g["began_s"])
        for number in members:
            # A step that broke counts at those who had taken it.
            steps_of[number] = steps_of.get(number, 0) + made + g["broken"]
            if number not in by_number:
                told.wrong(f"{of} has member {number}, which no job was")
                continue
            ended_s = by_number[number]["ended_s"]
            told.most(f"{of}, at most a member's", g["ended_s"], ended_s, 0.0, DATES_S)
    for one, other in pairwise(generations):
        of, stopped = f"generation {other['number']}", one["to_step"] or one["from_step"]
        again = (
            one["broken"] or other["from_checkpoint"] or other["incarnation"] > one["incarnation"]
        )
        if other["from_step"] > stopped or (other["from_step"] < stopped and not again):
            told.wrong(
                f"{of} begins at step {other['from_step']}, the one before stopped at {stopped}"
            )
        if None not in (other["pause_s"], one["ended_s"], other["began_s"]):
            between_s, pause_s = other["began_s"] - one["ended_s"], other["pause_s"]
            told.most(f"{of}: pause_s, at most since", pause_s, between_s, 0.0, DATES_S)
    block = told("elastic")
    pauses = [g["pause_s"] for g in generations if g["pause_s"] is not None]
    told.same("pauses.count and theirs", block["pauses"]["count"], len(pauses))
    told.same(
        "pauses.total_s and the sum of all", block["pauses"]["total_s"], sum(pauses), 1e-06, 1e-09
    )
    if None not in (block["idle_s"], block["allocated_s"]):
        idle_s = block["allocated_s"] - inside_s
        told.same("elastic.idle_s and what no generation used", block["idle_s"], idle_s, 1e-06, 1.0)
    work = told.num_steps_trained + block["steps_repeated"]
    told.same("steps of generations and steps run and repeated", taken, work)
    for worker in told.workers:
        most = steps_of.get(worker["rank"])
        told.most(f"steps of {worker['rank']}, at most its generations'", worker["steps"], most)


OF_OURS = (
    settings, batches, samples, places, model, operations, steps, slowdown, restarts, scores,
    memory, states, energy, traffic, servers, elastic,
)  # fmt: skip


#: Those of a cell on the software GPU of the tests, which measures nothing and computes no network.
COUNTED = (
    end, settings, batches, samples, places, model, restarts, memory, states, traffic, servers,
)  # fmt: skip


if __name__ == "__main__":
    found = [line for folder in sys.argv[1:] for line in broken_below(Path(folder))]
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))

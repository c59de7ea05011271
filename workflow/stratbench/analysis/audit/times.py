"""Rules on the times of one record: epochs, steps, phases and the whole must agree."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from stratbench.analysis.audit.checks import ROUNDING, Facts, unless, unless_absent, unless_rising
from stratbench.analysis.audit.relations import relations, unless_hold
from stratbench.analysis.audit.rule import record_rule
from stratbench.analysis.records.derived import value_at
from stratbench.cell.text.words import shortened

#: The share by which the sum of the steps (the device's clock) may miss the time around them (the host's).
STEPS = 0.05
#: The same in seconds per worker, which may lose its core between the start of its clock and a step: a few
#: of the kernel's time slices, of 3 ms each. For trainings of 0.2 s and more STEPS is wider.
SPARE_S = 0.01
#: The time that a worker may lose between the last step of all and the end of its own clock, in s: on a busy
#: machine it waits for a core there.
LATE_S = 0.5
#: A server's training ends with its last push, its workers' training with the reply.
SERVED, SERVED_S = 0.1, 0.5
#: The most that two processes' clocks may differ at one moment, in s; start and end are in whole seconds.
READINGS_S = 2.5
PARTS = ("setup_s", "data_s", "warmup_s", "eval_s", "train_time_s")
#: The number of steps from which they differ, and the least standard deviation as a share of their mean:
#: clocks have a resolution of 0.5 us (events of a GPU) or 1 ns, and no step takes exactly as long.
EVEN_STEPS, EVEN = 20, 1e-6
ORDER = ("min", "p10", "p50", "p90", "p99", "max")

# What follows from what; the rule below says which holds when.
TRAINING = relations(
    "time.throughput_samples_per_s == batch.samples_applied / time.train_time_s",
    "time.train_time_s == slowest_worker_s if not elastic and strategy.kind != 'server'",
    (
        "time.train_time_s == slowest_worker_s if not elastic and strategy.kind == 'server'",
        SERVED,
        SERVED_S,
    ),
    "time.train_time_s == slowest_server_s if not elastic",
)
STEPS_OF_WORKERS = relations(
    "time.step_ms.count == sum(workers.steps)",
    (
        "time.step_ms.mean * time.step_ms.count / 1e3 == sum(workers.train_time_s)",
        STEPS,
        f"{SPARE_S} * len(workers)",
    ),
)
# Figures of four digits.
OWN_TIMES = relations(
    "len(worker.own_ms) <= worker.steps",
    ("max(worker.own_ms) <= time.step_ms.max", 1e-3),
    ("sum(worker.own_ms) / 1e3 <= worker.train_time_s", 1e-3, SPARE_S),
    # The shortest of the steps that begin an epoch, each of which ends on the device after its issue.
    ("worker.issue_ms <= time.step_ms.max", 1e-3, 1e3 * SPARE_S),
    (
        "worker.issue_ms / 1e3 * len(time.epoch_times_s) <= worker.train_time_s",
        1e-3,
        SPARE_S,
    ),
    # They make each step together.
    (
        "worker.train_time_s >= slowest_worker_s / 2 if strategy.kind == 'collective'",
        ROUNDING,
        LATE_S,
    ),
)
PHASES = relations(
    ("sum_of_breakdown_ms == mean_step_of_workers_ms", STEPS, f"{1e3 * SPARE_S} / fewest_steps")
)
SPANS_OF_A_RANK = relations("sum(time.epoch_times_s) == worker.train_time_s")
SPANS = relations(("sum(time.epoch_times_s) == time.train_time_s", 0.02, 0.1))
STEP_MS = relations(
    "ms.mean >= ms.min",
    "ms.mean <= ms.max",
    "ms.p50 >= ms.min",
    "ms.p50 <= ms.max",
    # Upper bound of Bhatia and Davis (2000), times n / (n - 1) for a sample's variance.
    ("ms.std ** 2 <= max(0, (ms.max - ms.mean) * (ms.mean - ms.min)) * n / (n - 1)", 1e-3),
    # A single step as far from the mean as the longest gives at least this spread.
    ("ms.std ** 2 >= max(ms.max - ms.mean, ms.mean - ms.min) ** 2 / (n - 1)", 1e-3),
)
# The mean of each part between two percentiles lies between them.
PERCENTILES = relations(
    ("ms.mean >= 0.1*ms.min + 0.4*ms.p10 + 0.4*ms.p50 + 0.09*ms.p90 + 0.01*ms.p99", 0.02),
    ("ms.mean <= 0.1*ms.p10 + 0.4*ms.p50 + 0.4*ms.p90 + 0.09*ms.p99 + 0.01*ms.max", 0.02),
)
SPREAD = relations(f"time.step_ms.std >= {EVEN} * time.step_ms.mean")
WAITED = relations(
    "time.breakdown_ms.exposed_communication == communication.exposed_ms if time.breakdown_ms.backward",
    "time.breakdown_ms.server_wait == communication.server_wait_ms if time.breakdown_ms.push",
    "time.bubble_share == time.breakdown_ms.bubble / sum_of_breakdown_ms",
)
SLOWED = relations(
    "strategy.details.slowdown.sigma == asked_sigma",
    "strategy.details.slowdown.mean_factor >= strategy.details.slowdown.factor",
    ("time.breakdown_ms.slowdown >= slept_ms", 0.05),
)
WHOLE = relations(
    *(f"time.{part} <= time.total_s" for part in PARTS),
    ("time.total_s == from_started_to_finished_s", 0.01, READINGS_S),
    # An elastic cell's limit counts from its first step.
    ("time.total_s <= time.time_limit_s if status == 'ok' and not elastic", 0.05),
    ("time.total_s >= time.time_limit_s if status == 'timeout' and not elastic", 0.02),
    "last_epoch.train_time_s <= time.total_s if status == 'timeout'",
)
THREADS = relations("threads_of_a_worker == provenance.threads_per_worker")


@record_rule("contradictory-time", "unusable", "time", of="both")
def contradictory_time(facts: Facts) -> Iterator[str]:
    """Times of the record that follow from each other do not agree: throughput and training time, epochs and
    their sum, steps and phases, training and the whole.
    """
    if facts.finished:
        yield from faults_of_training(facts)
        yield from faults_of_workers(facts)
    yield from faults_of_spread(facts)
    yield from faults_of_epochs(facts)
    yield from faults_of_starts(facts)
    yield from faults_of_steps(facts)
    yield from faults_of_phases(facts)
    yield from faults_of_the_whole(facts)


def faults_of_training(facts: Facts) -> Iterator[str]:
    """Checks the training time against samples, workers and servers."""
    train_time_s = facts("time.train_time_s")
    slowest = max((w["train_time_s"] for w in facts.workers if w["train_time_s"]), default=None)
    served = max((s["train_time_s"] for s in facts.servers), default=None)
    yield from unless_hold(facts, TRAINING, slowest_worker_s=slowest, slowest_server_s=served)
    if train_time_s is not None and not train_time_s > 0:
        yield f"time.train_time_s is {train_time_s}"


def faults_of_workers(facts: Facts) -> Iterator[str]:
    """Checks each worker's own time, and the steps of all together."""
    own = [w["train_time_s"] for w in facts.workers]
    steps = [w["steps"] for w in facts.workers]
    if None in own or None in steps or facts.elastic:
        return  # a broken step takes time and is none
    yield from unless_hold(facts, STEPS_OF_WORKERS)
    for worker in facts.workers:
        of = f"rank {worker['rank']}"
        yield from unless_hold(facts, OWN_TIMES, of, worker=worker, slowest_worker_s=max(own))
        if value_at(worker["provenance"], "device") == "cpu":
            why = "although on a CPU host and device are one"
            yield from unless_absent(f"{of}: worker.issue_ms", worker.get("issue_ms"), why)
    phases = facts("time.breakdown_ms")
    if phases and all(steps):
        yield from unless_hold(
            facts,
            PHASES,
            sum_of_breakdown_ms=sum(phases.values()),
            mean_step_of_workers_ms=sum(1e3 * t / n for t, n in zip(own, steps, strict=True))
            / len(own),
            fewest_steps=min(steps),
        )


def faults_of_epochs(facts: Facts) -> Iterator[str]:
    """Checks that epochs follow one another, and their sum."""
    spans = facts("time.epoch_times_s")
    ends = [entry["train_time_s"] for entry in facts("score.per_epoch")]
    yield from unless_rising("score.per_epoch's train_time_s", ends)
    if facts("settings.steps") and facts.servers:
        return  # a short last pass may have ended with the one before
    if any(not span > 0 for span in spans):
        yield f"time.epoch_times_s holds {min(spans):.6g}"
    if len(set(spans)) < len(spans):
        yield "epochs of time.epoch_times_s took equally long to the last digit"
    if not facts.finished or len(spans) != len(ends):
        return
    total = 0.0
    for i, (span, end) in enumerate(zip(spans, ends, strict=True), 1):
        total += span
        yield from unless(
            f"train_time_s after epoch {i}", end, "==", "the sum of time.epoch_times_s", total
        )
    if facts.whole and facts("strategy.kind") == "collective":
        first = facts.workers[0]
        yield from unless_hold(facts, SPANS_OF_A_RANK, f"rank {first['rank']}", worker=first)
    elif facts.status == "ok":
        yield from unless_hold(facts, SPANS)


def faults_of_starts(facts: Facts) -> Iterator[str]:
    """Checks how far apart the workers of one node began each epoch."""
    skews, starts = facts("time.start_skew_ms"), [w.get("epoch_starts_s") for w in facts.workers]
    hosts = {value_at(worker["provenance"], "host.name") for worker in facts.workers}
    if not skews or None in starts or len(hosts) != 1 or not facts.whole:
        return
    for i, (skew_ms, begun) in enumerate(zip(skews, zip(*starts, strict=False), strict=False), 1):
        apart_ms = 1e3 * (max(begun) - min(begun))
        what, formula = f"start_skew_ms of epoch {i}", "what epoch_starts_s say"
        yield from unless(what, skew_ms, "==", formula, apart_ms, 1e-3, 0.01)


def faults_of_steps(facts: Facts) -> Iterator[str]:
    """Checks that percentiles ascend, and that mean and spread agree with them."""
    steps = facts("time.step_ms")
    if not steps:
        return
    yield from unless_rising(
        f"time.step_ms's {', '.join(ORDER)}", (steps.get(name) for name in ORDER)
    )
    count = steps.get("count") or 0
    n = max(2, count) if "count" in steps else None
    yield from unless_hold(facts, STEP_MS, ms=steps, n=n)
    if count > 50:
        yield from unless_hold(facts, PERCENTILES, ms=steps)


def faults_of_spread(facts: Facts) -> Iterator[str]:
    """Checks that what a clock has measured often differs in its last digits."""
    steps = facts("time.step_ms") or {}
    if (steps.get("count") or 0) >= EVEN_STEPS:
        for one, other in (("min", "max"), ("p10", "p90")):
            if one in steps and steps[one] == steps.get(other):
                yield f"time.step_ms.{one} is {other}, {steps[one]:.6g}, to the last digit"
        yield from unless_hold(facts, SPREAD)
    skews = [skew for skew in facts("time.start_skew_ms") or () if skew]
    if len(set(skews)) == 1 < len(skews):
        yield f"the workers began {len(skews)} epochs {skews[0]:.6g} ms apart, to the last digit"
    for name in ("train_time_s", "epoch_starts_s"):
        texts = [str(worker[name]) for worker in facts.workers if worker.get(name)]
        if len(set(texts)) < len(texts):
            yield f"ranks have the same {name} to the last digit: {shortened(max(texts, key=texts.count))}"


def faults_of_phases(facts: Facts) -> Iterator[str]:
    """Checks the phases of a step against its waits."""
    phases = facts("time.breakdown_ms")
    yield from unless_hold(facts, WAITED, sum_of_breakdown_ms=phases and sum(phases.values()))
    if phases:
        yield from faults_of_slowdown(facts, phases)


def faults_of_slowdown(facts: Facts, phases: dict[str, float]) -> Iterator[str]:
    """Checks that workers were slowed where the settings ask for it, and only there."""
    asked, phase_ms = facts("settings.slowdown"), phases.get("slowdown")
    if asked is None:
        yield from unless_absent(
            "time.breakdown_ms.slowdown", phase_ms, "although no worker was to be slowed"
        )
        return
    slowed = [rank for rank in asked.get("workers", ()) if rank < facts.gpus]
    if not ((slowed and asked["factor"] > 1) or asked.get("sigma", 0) > 0):
        return
    if not phase_ms or not phase_ms > 0:
        yield f"time.breakdown_ms.slowdown is {phase_ms}, although workers were to be slowed: {asked}"
        return
    # What one worker says that it slept; a phase is the mean over all workers.
    if stated := facts("strategy.details.slowdown"):
        if stated["factor"] not in (1, asked.get("factor", 1)):
            yield f"the factor of a slowdown is {stated['factor']:g}, but the settings say {asked}"
        if facts("restarts.count"):
            return  # each attempt measures anew what it sleeps
        slept_ms = (stated["mean_factor"] - 1) * stated["step_without_ms"] / facts.gpus
        yield from unless_hold(facts, SLOWED, asked_sigma=asked.get("sigma", 0), slept_ms=slept_ms)


def faults_of_the_whole(facts: Facts) -> Iterator[str]:
    """Checks the cell from its start to its end, and against its limit."""
    total_s = facts("time.total_s")
    parts = {name: facts(f"time.{name}") for name in PARTS}
    known = {name: value for name, value in parts.items() if value is not None}
    for name, value in known.items():
        if facts.status == "ok" and not value > 0:
            yield f"time.{name} is {value}"
    yield from unless(
        f"the sum of {', '.join(known)}", sum(known.values()), "<=", "time.total_s", total_s, 0.1
    )
    started, finished, ran_s = facts("provenance.started"), facts("provenance.finished"), None
    if started and finished:
        span = datetime.fromisoformat(finished) - datetime.fromisoformat(started)
        ran_s = span.total_seconds() - (facts("restarts.between_s") or 0.0)
    last = facts("score.per_epoch")[-1] if facts.epochs_run else None
    yield from unless_hold(facts, WHOLE, from_started_to_finished_s=ran_s, last_epoch=last)
    if facts.status == "timeout" and facts("time.time_limit_s") is None:
        yield "the cell ended at its time limit, but time.time_limit_s is absent"
    threads = {w["provenance"]["host"].get("threads") for w in facts.workers if w["provenance"]}
    for count in threads - {None}:
        yield from unless_hold(facts, THREADS, threads_of_a_worker=count)

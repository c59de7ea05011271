"""Audit rules that compare a user command's report with external measurements."""

from __future__ import annotations

from collections.abc import Iterator

from stratbench.analysis.records.facts import Facts, iter_excess_messages, iter_mismatch_messages
from stratbench.extensions.audit.rule import record_rule

#: Tolerance in seconds between the times of the command and of its supervisor, which read the same clock.
READ_S = 0.001
#: Smallest plausible CPU time per second of training. Even on a busy machine, a training process gets more.
MIN_CPU_SHARE = 0.005
#: Pairs of record fields that must be equal. The command or the kernel gave the second.
EQUAL = (
    ("time.step_ms.count", "program.self_reported.steps"),
    ("batch.updates_applied", "program.self_reported.steps"),
    ("batch.samples_seen", "program.self_reported.samples"),
    ("batch.samples_applied", "program.self_reported.samples"),
    ("model.parameters", "program.self_reported.parameters"),
    ("memory.peak_bytes", "program.external.largest_process_bytes"),
)
#: Pairs of record fields with times in seconds. The first time must not be later than the second.
WITHIN = (
    ("program.external.begun_s", "program.self_reported.first_s"),
    ("program.self_reported.last_s", "program.external.ended_s"),
    ("program.external.ended_s", "time.total_s"),
)


@record_rule("contradictory-report", "unusable", "all", of="commands")
def find_contradictory_reports(facts: Facts) -> Iterator[str]:
    """A command's report contradicts itself or the measurements of its processes.

    Steps lie outside of the processes' lifetime, or counts do not add up.
    """
    reported, outside = facts("program.self_reported"), facts("program.external")
    if not facts.finished or not reported:
        return
    for path, other in EQUAL:
        yield from iter_mismatch_messages(path, facts(path), other, facts(other))
    for path, other in WITHIN:
        yield from iter_excess_messages(
            path, facts(path), other, facts(other), absolute_tolerance=READ_S
        )
    spans = {"the span of program.self_reported": reported["last_s"] - reported["first_s"]}
    if None not in (outside["begun_s"], outside["ended_s"]):
        spans["the span of program.external"] = outside["ended_s"] - outside["begun_s"]
    train_s = facts("time.train_time_s")
    for of, span_s in spans.items():
        yield from iter_excess_messages(
            "time.train_time_s", train_s, of, span_s, absolute_tolerance=READ_S
        )
    batches, formula = (
        reported["steps"] * reported["batch"],
        "program.self_reported.steps x program.self_reported.batch",
    )
    yield from iter_excess_messages(
        "program.self_reported.samples", reported["samples"], formula, batches
    )
    if not reported["batches_differ"]:
        yield from iter_mismatch_messages(
            "program.self_reported.samples", reported["samples"], formula, batches
        )


@record_rule("unlike-its-cell", "warning", "all", of="commands")
def find_reports_with_unrequested_counts(facts: Facts) -> Iterator[str]:
    """A command reports another number of processes or samples than its cell requests.

    The cell is not ranked with cells that have the requested numbers.
    """
    if facts.status != "ok":
        return
    workers, samples = (facts(f"program.self_reported.{name}") for name in ("workers", "samples"))
    yield from iter_mismatch_messages(
        "program.self_reported.workers", workers, "cell.gpus", facts.gpus
    )
    steps = facts("settings.steps")
    if not steps:
        steps = facts.multiply_fields("batch.steps_per_epoch", "settings.epochs")
    if steps is not None:
        expected = steps * facts("batch.global_batch")
        yield from iter_mismatch_messages(
            "program.self_reported.samples", samples, "those of the cell", expected
        )


@record_rule("contradictory-cpu-time", "unusable", "time", of="commands")
def find_contradictory_cpu_time(facts: Facts) -> Iterator[str]:
    """A command reports training steps, but its processes used hardly any CPU time for them."""
    train_s, used_s = facts("time.train_time_s"), facts("program.external.cpu_time_s")
    if facts.finished and train_s is not None:
        least_s = MIN_CPU_SHARE * train_s
        what = f"{MIN_CPU_SHARE:.1%} of time.train_time_s"
        yield from iter_excess_messages(what, least_s, "program.external.cpu_time_s", used_s)

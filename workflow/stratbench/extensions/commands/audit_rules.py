"""Rules on cells that a user's command trains: its own report against external measurements."""

from __future__ import annotations

from collections.abc import Iterator

from stratbench.analysis.records.facts import Facts, unless_at_most, unless_equal
from stratbench.extensions.audit.rule import record_rule

#: The error of a clock that is read in two processes of one node, in s: it is the kernel's, and the same.
READ_S = 0.001
#: The least CPU time per second of steps, in s: the busiest machine gives a process that much, and one that
#: trains takes all that it gets.
WORKED = 0.005
#: Values of the command's report that the record has taken over, or that were measured externally.
EQUAL = (
    ("time.step_ms.count", "program.self_reported.steps"),
    ("batch.updates_applied", "program.self_reported.steps"),
    ("batch.samples_seen", "program.self_reported.samples"),
    ("batch.samples_applied", "program.self_reported.samples"),
    ("model.parameters", "program.self_reported.parameters"),
    ("memory.peak_bytes", "program.external.largest_process_bytes"),
)
#: Moments and spans in s, each of which is no later or longer than the other.
WITHIN = (
    ("program.external.begun_s", "program.self_reported.first_s"),
    ("program.self_reported.last_s", "program.external.ended_s"),
    ("program.external.ended_s", "time.total_s"),
)


@record_rule("contradictory-report", "unusable", "all", of="commands")
def contradictory_report(facts: Facts) -> Iterator[str]:
    """What a command says of its training cannot be, by what was measured of its processes from outside, or
    by its own other figures: its steps lie outside of its life, or its counts do not add up.
    """
    reported, outside = facts("program.self_reported"), facts("program.external")
    if not facts.finished or not reported:
        return
    for path, other in EQUAL:
        yield from unless_equal(path, facts(path), other, facts(other))
    for path, other in WITHIN:
        yield from unless_at_most(path, facts(path), other, facts(other), absolute=READ_S)
    spans = {"the span of program.self_reported": reported["last_s"] - reported["first_s"]}
    if None not in (outside["begun_s"], outside["ended_s"]):
        spans["the span of program.external"] = outside["ended_s"] - outside["begun_s"]
    train_s = facts("time.train_time_s")
    for of, span_s in spans.items():
        yield from unless_at_most("time.train_time_s", train_s, of, span_s, absolute=READ_S)
    batches, formula = (
        reported["steps"] * reported["batch"],
        "program.self_reported.steps x program.self_reported.batch",
    )
    yield from unless_at_most(
        "program.self_reported.samples", reported["samples"], formula, batches
    )
    if not reported["batches_differ"]:
        yield from unless_equal(
            "program.self_reported.samples", reported["samples"], formula, batches
        )


@record_rule("unlike-its-cell", "warning", "all", of="commands")
def unlike_its_cell(facts: Facts) -> Iterator[str]:
    """A command says that it trained with other processes or on other samples than its cell asks for. It is
    not ranked beside those that did.
    """
    if facts.status != "ok":
        return
    workers, samples = (facts(f"program.self_reported.{name}") for name in ("workers", "samples"))
    yield from unless_equal("program.self_reported.workers", workers, "cell.gpus", facts.gpus)
    steps = facts("settings.steps")
    if not steps:
        steps = facts.product("batch.steps_per_epoch", "settings.epochs")
    if steps is not None:
        expected = steps * facts("batch.global_batch")
        yield from unless_equal(
            "program.self_reported.samples", samples, "those of the cell", expected
        )


@record_rule("contradictory-cpu-time", "unusable", "time", of="commands")
def contradictory_cpu_time(facts: Facts) -> Iterator[str]:
    """A command's processes used hardly any CPU time while it says that they trained."""
    train_s, used_s = facts("time.train_time_s"), facts("program.external.cpu_time_s")
    if facts.finished and train_s is not None:
        least_s = WORKED * train_s
        what = f"{WORKED:.1%} of time.train_time_s"
        yield from unless_at_most(what, least_s, "program.external.cpu_time_s", used_s)

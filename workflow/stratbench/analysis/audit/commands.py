"""Rules on cells that a user's command trains: its word against what was measured from outside."""

from __future__ import annotations

from collections.abc import Iterator

from stratbench.analysis.audit.checks import ROUNDING, Facts
from stratbench.analysis.audit.relations import relations, unless_hold
from stratbench.analysis.audit.rule import record_rule

#: The error of a clock that is read in two processes of one node, in s: it is the kernel's, and the same.
READ_S = 0.001
#: The least CPU time for an hour of steps, in s: the busiest machine gives a process so much, and one that
#: trains takes all that it gets.
WORKED = 0.005

# What follows from what; the rules below say which holds when.
REPORT = relations(
    ("program.said.first_s >= program.outside.begun_s", ROUNDING, READ_S),
    ("program.said.last_s <= program.outside.ended_s", ROUNDING, READ_S),
    ("time.train_time_s <= program.outside.ended_s - program.outside.begun_s", ROUNDING, READ_S),
    ("time.train_time_s <= program.said.last_s - program.said.first_s", ROUNDING, READ_S),
    ("program.outside.ended_s <= time.total_s", ROUNDING, READ_S),
    "time.step_ms.count == program.said.steps",
    "batch.updates_applied == program.said.steps",
    "batch.samples_seen == program.said.samples",
    "batch.samples_applied == program.said.samples",
    "program.said.samples <= program.said.steps * program.said.batch",
    "model.parameters == program.said.parameters",
    "memory.peak_bytes == program.outside.largest_process_bytes",
    "program.said.samples == program.said.steps * program.said.batch "
    "if program.said.batches_differ is False",
)
OPTIONS = relations(
    "settings.options == strategy.options",
    "settings.gpus == cell.gpus",
    "settings.strategy == strategy.name",
    "strategy.details.engine == strategy.name",
)
CELL = relations(
    "program.said.workers == cell.gpus",
    "program.said.samples == batch.steps_per_epoch * batch.global_batch * settings.epochs "
    "if not settings.steps",
    "program.said.samples == batch.global_batch * settings.steps if settings.steps",
)
CPU_TIME = relations(f"program.outside.cpu_time_s >= {WORKED} * time.train_time_s")


@record_rule("contradictory-report", "unusable", "all", of="commands")
def contradictory_report(facts: Facts) -> Iterator[str]:
    """What a command says of its training cannot be, by what was measured of its processes from outside, or
    by its own other figures: its steps lie outside of its life, or its counts do not add up.
    """
    yield from unless_hold(facts, OPTIONS)
    if facts.finished:
        yield from unless_hold(facts, REPORT)


@record_rule("unlike-its-cell", "doubtful", "all", of="commands")
def unlike_its_cell(facts: Facts) -> Iterator[str]:
    """A command says that it trained with other processes or on other samples than its cell asks for. It is
    not ranked beside those that did.
    """
    if facts.status == "ok":
        yield from unless_hold(facts, CELL)


@record_rule("contradictory-cpu-time", "unusable", "time", of="commands")
def contradictory_cpu_time(facts: Facts) -> Iterator[str]:
    """A command's processes used hardly any CPU time while it says that they trained."""
    if facts.finished:
        yield from unless_hold(facts, CPU_TIME)

"""Rules on cells whose workers came and went, or that were started again: their accounts must agree."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from stratbench.analysis.audit.checks import ROUNDING, Facts, unless
from stratbench.analysis.audit.relations import relations, unless_hold
from stratbench.analysis.audit.rule import record_rule

#: By how much dates of two hosts, or of SLURM in whole seconds, may miss each other.
DATES_S = 3.0
JOB = relations(
    ("job.started_s >= job.submitted_s", ROUNDING, DATES_S),
    ("job.joined_s >= job.started_s", ROUNDING, DATES_S),
    ("job.first_step_s >= job.joined_s", ROUNDING, DATES_S),
    ("job.ended_s >= job.first_step_s", ROUNDING, DATES_S),
    "job.allocated_s == job.ended_s - job.started_s",
)
ACCOUNTS = relations(
    "elastic.allocated_s == sum(elastic.jobs.allocated_s)",
    "elastic.idle_s <= elastic.allocated_s",
    "elastic.pauses.longest_s <= elastic.pauses.total_s",
    "elastic.pauses.median_s <= elastic.pauses.longest_s",
    "elastic.pauses.total_s <= time.train_time_s",
    "elastic.joins == joined",
    "elastic.first_step_s == first_step_s",
    "elastic.restarts == from_checkpoints",
)
GENERATIONS = relations(
    "elastic.pauses.count == len(pauses)",
    ("elastic.pauses.total_s == sum(pauses)", ROUNDING, 1e-9),
    ("elastic.idle_s == elastic.allocated_s - inside_s", ROUNDING, 1.0),
    "steps_taken == steps_run + elastic.steps_repeated",
)
OF_WORKER = relations("worker.steps <= steps_of_generations")
LIVES = relations(
    "elastic.lives == len_lives",
    "elastic.servers.tickets_done_twice == done_twice",
    "elastic.servers.most_at_a_time <= cell.gpus",
    "elastic.servers.most_at_a_time >= 1",
    "elastic.servers.evaluations >= len(score.per_epoch)",
)
LIFE = relations(
    ("later.began_s >= earlier.began_s", ROUNDING, DATES_S),
    "later.tickets_before + later.tickets_done_twice >= earlier.tickets_before",
)
PAUSE = relations(("later.pause_s <= between_s", ROUNDING, DATES_S))

RESTARTS = relations(
    "restarts.count == len(restarts.from_steps)",
    "restarts.checkpoints.every == settings.checkpoint_every",
    "restarts.checkpoints.held_up_s <= time.total_s",
    ("restarts.until_step_s <= time.total_s", ROUNDING, DATES_S),
    # Each attempt is known to a few seconds.
    (
        "time.total_s >= time.train_time_s + restarts.repeated_s if finished",
        ROUNDING,
        f"{DATES_S} * (1 + restarts.count)",
    ),
    # There is one after so many steps, but for the last.
    "restarts.checkpoints.count == (steps_run - 1) // settings.checkpoint_every if finished",
)


@record_rule("contradictory-restarts", "unusable", "all")
def contradictory_restarts(facts: Facts) -> Iterator[str]:
    """What the record says of a cell's attempts and checkpoints does not agree with its steps and times."""
    every, stated = facts("settings.checkpoint_every"), facts("restarts")
    if (stated is None) != (every is None):
        yield f"settings.checkpoint_every is {every}, with restarts {stated!r:.60}"
    if stated is None or every is None:
        return
    yield from unless_hold(facts, RESTARTS)
    if odd := [step for step in stated["from_steps"] if step % every]:
        yield f"an attempt went on after {odd[0]} steps, but there is a checkpoint each {every} steps"
    if not facts.finished:
        return
    if late := [step for step in stated["from_steps"] if step >= facts.steps_run]:
        yield f"an attempt went on after {late[0]} steps, of {facts.steps_run}"


@record_rule("keeps-checkpoints", "note", "time")
def keeps_checkpoints(facts: Facts) -> Iterator[str]:
    """The cell kept checkpoints, and may have been started again. Its training time has neither the copying
    of checkpoints nor what was lost, but they were written beside the training, and attempts may have run on
    different nodes: cells that keep none are what measures a strategy's speed.
    """
    stated = facts("restarts")
    if stated is not None and (stated["count"] or stated["checkpoints"]["count"]):
        kept = stated["checkpoints"]
        yield (
            f"{kept['count']} checkpoints of {kept['bytes'] / 1e6:.3g} MB held the training up for "
            f"{kept['held_up_s']:.3g} s; started again {stated['count']} times, "
            f"{stated['repeated_s']:.3g} s of work done again"
        )


@record_rule("contradictory-elastic", "unusable", "all")
def contradictory_elastic(facts: Facts) -> Iterator[str]:
    """What the record of a cell with elastic workers says of them does not agree: jobs, who trained together
    and when, steps, pauses, or the seconds that were used.
    """
    if facts.elastic != bool(facts("settings.elastic")):
        yield f"settings.elastic is {facts('settings.elastic')}, with elastic {facts('elastic')!r:.40}"
    if not facts.elastic:
        return
    jobs, generations = facts("elastic.jobs"), facts("elastic.generations")
    yield from _faults_of_jobs(facts, jobs)
    first_steps = [j["first_step_s"] for j in jobs if j["first_step_s"] is not None]
    yield from unless_hold(
        facts,
        ACCOUNTS,
        joined=len(first_steps),
        first_step_s=min(first_steps, default=None),
        from_checkpoints=_times_gone_on(facts, generations),
    )
    if facts("strategy.kind") == "server":
        yield from _faults_of_lives(facts)
    if facts("strategy.kind") == "collective" and facts.finished:
        yield from _faults_of_generations(facts, jobs, generations)


def _times_gone_on(facts: Facts, generations: list[dict[str, Any]]) -> int:
    """How often training went on from a checkpoint, or from the servers' saved state."""
    if facts("strategy.kind") != "server":
        return sum(g["from_checkpoint"] for g in generations)
    return sum(life["tickets_before"] > 0 for life in (facts("elastic.servers.lives") or ())[1:])


def _faults_of_lives(facts: Facts) -> Iterator[str]:
    """Checks what is said of each life of the servers."""
    lives = facts("elastic.servers.lives") or []
    if [life["life"] for life in lives] != list(range(1, len(lives) + 1)):
        yield f"the servers' lives have the numbers {[life['life'] for life in lives]}"
    for earlier, later in pairwise(lives):
        of = f"life {later['life']}"
        yield from unless_hold(facts, LIFE, of, earlier=earlier, later=later)
    yield from unless_hold(
        facts, LIVES, len_lives=len(lives), done_twice=sum(x["tickets_done_twice"] for x in lives)
    )


def _faults_of_jobs(facts: Facts, jobs: list[dict[str, Any]]) -> Iterator[str]:
    """Checks each worker job by itself, and that no more ran at a time than the cell has workers."""
    numbers = [job["number"] for job in jobs]
    if numbers != sorted(set(numbers)):
        yield f"the worker jobs have the numbers {numbers}"
    for job in jobs:
        yield from unless_hold(facts, JOB, f"worker {job['number']}", job=job)
    for slot in {job["slot"] for job in jobs}:
        if not 0 <= slot < facts.gpus:
            yield f"a worker job has slot {slot} of {facts.gpus}"
        for one, other in pairwise(job for job in jobs if job["slot"] == slot):
            if one["ended_s"] is None or other["submitted_s"] < one["ended_s"] - DATES_S:
                yield f"workers {one['number']} and {other['number']} had slot {slot} at the same time"


def _faults_of_generations(
    facts: Facts, jobs: list[dict[str, Any]], generations: list[dict[str, Any]]
) -> Iterator[str]:
    """Checks who trained together, from step to step."""
    by_number = {job["number"]: job for job in jobs}
    taken = 0
    steps_of: dict[int, int] = {}
    for g in generations:
        of = f"generation {g['number']} of life {g['life']}"
        steps = (g["to_step"] or g["from_step"]) - g["from_step"]
        taken += steps
        if not 1 <= len(set(g["members"])) == len(g["members"]) <= facts.gpus:
            yield f"{of} has the members {g['members']}, of {facts.gpus} workers at most"
        for number in g["members"]:
            # A step that broke counts at those who had taken it.
            steps_of[number] = steps_of.get(number, 0) + steps + g["broken"]
            if number not in by_number:
                yield f"{of} has member {number}, which no job was"
            elif g["ended_s"] is not None and (ended := by_number[number]["ended_s"]) is not None:
                what, formula = f"the end of {of}", f"that of its worker {number}"
                yield from unless(what, g["ended_s"], "<=", formula, ended + DATES_S)
    for earlier, later in pairwise(generations):
        yield from _faults_of_change(facts, earlier, later)
    pauses = [g["pause_s"] for g in generations if g["pause_s"] is not None]
    inside_s = sum(
        len(g["members"]) * (g["ended_s"] - g["began_s"])
        for g in generations
        if g["began_s"] is not None and g["ended_s"] is not None
    )
    named = {"pauses": pauses, "inside_s": inside_s, "steps_taken": taken}
    yield from unless_hold(facts, GENERATIONS, **named)
    for worker in facts.workers:
        most = steps_of.get(worker["rank"])
        of = f"rank {worker['rank']}"
        yield from unless_hold(facts, OF_WORKER, of, worker=worker, steps_of_generations=most)


def _faults_of_change(
    facts: Facts, earlier: dict[str, Any], later: dict[str, Any]
) -> Iterator[str]:
    """Checks that a generation goes on where the one before stopped."""
    of = f"generation {later['number']} of life {later['life']}"
    stopped = earlier["to_step"] or earlier["from_step"]
    if later["from_step"] > stopped:
        yield f"{of} begins at step {later['from_step']}, but the one before stopped at {stopped}"
    may_repeat = earlier["broken"] or later["from_checkpoint"] or later["life"] > earlier["life"]
    if later["from_step"] < stopped and not may_repeat:
        yield f"{of} repeats steps from {later['from_step']} to {stopped}, and nobody was lost"
    if later["pause_s"] is not None and earlier["ended_s"] and later["began_s"]:
        between_s = later["began_s"] - earlier["ended_s"]
        yield from unless_hold(facts, PAUSE, of, later=later, between_s=between_s)

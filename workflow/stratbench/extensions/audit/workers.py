"""Rules on a cell's workers: their strategy, lost ones, and earlier attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from stratbench.analysis.records.derived import cpu_cores, value_at
from stratbench.analysis.records.facts import Facts
from stratbench.extensions.audit.rule import record_rule
from stratbench.strategies import REGISTRY, mesh_of, traits_of

#: Fraction of its training in which a worker may wait for a core: three processes on two idle cores wait for
#: 14 %, and two workers next to one busy foreign process for 26 % and more.
WAITED = 0.2


@record_rule("traits-unlike-strategy", "warning", "all")
def traits_unlike_strategy(facts: Facts) -> Iterator[str]:
    """The record says of its strategy what this version of the strategy does not say of itself, and the audit
    and the decision go by what the record says. Train the cell again.
    """
    name = facts("strategy.name")
    if name not in REGISTRY:
        return
    by_zeros = bool(facts("strategy.details.moved_by_zeros"))
    strategy = (name, facts("strategy.options"), facts.gpus)
    adds_up = facts("task.loss_adds_up") is not False
    traits = asdict(traits_of(*strategy, by_zeros, facts.elastic, adds_up))
    for trait, recorded in (facts("strategy.traits") or {}).items():
        if recorded != traits.get(trait):
            yield f"strategy.traits.{trait} is {recorded}, but that of {name} is {traits.get(trait)}"
    if (mesh := mesh_of(name, facts("strategy.options"), facts.gpus)) != facts.mesh:
        yield f"strategy.mesh is {facts.mesh}, but that of {name} is {mesh}"


@record_rule("lost-workers", "unusable", "all")
def lost_workers(facts: Facts) -> Iterator[str]:
    """Workers were lost, or did nothing, and the others finished without them: it is ranked as if it had been
    trained by all of them.
    """
    if facts.status != "ok":
        return
    if facts.lost and not facts.elastic:
        entries = (w for server in facts.servers for w in server.get("lost") or ())
        reasons = {value_at(w, "own_reason") for w in entries} - {None}
        reason = f": {'; '.join(sorted(reasons))}" if reasons else ""
        yield f"{len(facts.lost)} of {facts.gpus} workers were lost to the servers{reason}"
    missing = sorted(set(range(facts.gpus)) - {worker["rank"] for worker in facts.workers})
    if facts.elastic:
        return  # each that was lost has been replaced
    if missing:
        yield f"of {facts.gpus} workers, ranks {', '.join(map(str, missing))} left no result"
    for worker in facts.workers:
        if not worker["samples"] or not worker["steps"]:
            yield f"rank {worker['rank']} trained no sample, or made no step"


@record_rule("waits-for-cores", "warning", "time")
def waits_for_cores(facts: Facts) -> Iterator[str]:
    """A worker could have computed and waited for a core, since others computed on its cores. Its times are
    those of a crowded machine.
    """
    cores = cpu_cores({"workers": facts.workers})
    if facts.status != "ok" or (cores and cores < len(facts.workers) + len(facts.servers)):
        return  # a cell of more processes than cores waits for its own: see `processes-share-cores`
    shares = [
        (w["core_wait_s"] / w["train_time_s"], w)
        for w in facts.workers
        if w.get("core_wait_s") and w.get("train_time_s")
    ]
    share, worker = max(shares, key=lambda pair: pair[0], default=(0.0, {}))
    if share > WAITED:
        yield (
            f"rank {worker['rank']} waited for a core in {min(1.0, share):.0%} of "
            f"{worker['train_time_s']:.3g} s of training"
        )


@record_rule("fewer-workers-than-asked", "warning", "time")
def fewer_workers_than_asked(facts: Facts) -> Iterator[str]:
    """The workers of an elastic cell never trained all at the same time: some waited in the queue, as for
    whole nodes, until the training was over. Its times are those of fewer workers.
    """
    together = [len(g["members"]) for g in facts("elastic.generations") or ()]
    most = facts("elastic.servers.most_at_a_time") or max(together, default=None)
    if facts.status == "ok" and most is not None and most < facts.gpus:
        yield f"at most {most} of {facts.gpus} workers trained at the same time"


@record_rule("keeps-checkpoints", "note", "time")
def keeps_checkpoints(facts: Facts) -> Iterator[str]:
    """The cell kept checkpoints, and may have been started again. Its training time has neither the copying
    of checkpoints nor what was lost, but they were written beside the training, and attempts may have run on
    different nodes: cells that keep none are what measures a strategy's speed.
    """
    restarts = facts("restarts")
    if restarts is not None and (restarts["count"] or restarts["checkpoints"]["count"]):
        checkpoints = restarts["checkpoints"]
        yield (
            f"{checkpoints['count']} checkpoints of {checkpoints['bytes'] / 1e6:.3g} MB held the training up "
            f"for {checkpoints['held_up_s']:.3g} s; started again {restarts['count']} times, "
            f"{restarts['repeated_s']:.3g} s of work done again"
        )

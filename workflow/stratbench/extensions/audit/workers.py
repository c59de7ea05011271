"""Rules of the audit on a cell's workers: traits of the strategy, lost workers, waits and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from stratbench.analysis.records.derived import count_usable_cpu_cores, get_field_by_path
from stratbench.analysis.records.facts import Facts
from stratbench.extensions.audit.rule import is_elastic_cell, record_rule
from stratbench.strategies import REGISTRY, get_mesh, get_traits

#: Largest tolerated share of its training time for which a worker waits for a core. Three processes on two
#: idle cores wait for 14 %, and two workers beside a busy foreign process for at least 26 %.
MAX_CORE_WAIT_SHARE = 0.2


@record_rule("traits-unlike-strategy", "warning", "all")
def find_traits_that_strategy_does_not_declare(facts: Facts) -> Iterator[str]:
    """The traits of the strategy in the record differ from those that this version of stratbench declares.
    The audit and the decision use the traits in the record. Train the cell again.
    """
    name = facts("strategy.name")
    if name not in REGISTRY:
        return
    by_zeros = bool(facts("strategy.details.moved_by_zeros"))
    strategy = (name, facts("strategy.options"), facts.gpus)
    adds_up = facts("task.loss_adds_up") is not False
    traits = asdict(get_traits(*strategy, by_zeros, is_elastic_cell(facts), adds_up))
    for trait, recorded in (facts("strategy.traits") or {}).items():
        if recorded != traits.get(trait):
            yield f"strategy.traits.{trait} is {recorded}, but {name} declares {traits.get(trait)}"
    if (mesh := get_mesh(name, facts("strategy.options"), facts.gpus)) != facts.mesh:
        yield f"strategy.mesh is {facts.mesh}, but {name} has {mesh}"


@record_rule("lost-workers", "unusable", "all")
def find_lost_workers(facts: Facts) -> Iterator[str]:
    """Workers were lost or did nothing, and the others finished without them, although the cell is ranked as
    if all of them had trained.
    """
    if facts.status != "ok":
        return
    if facts.lost and not is_elastic_cell(facts):
        entries = (w for server in facts.servers for w in server.get("lost") or ())
        reasons = {get_field_by_path(w, "own_reason") for w in entries} - {None}
        reason = f": {'; '.join(sorted(reasons))}" if reasons else ""
        yield f"{len(facts.lost)} of {facts.gpus} workers were lost to the servers{reason}"
    missing = sorted(set(range(facts.gpus)) - {worker["rank"] for worker in facts.workers})
    if is_elastic_cell(facts):
        return  # in an elastic cell, lost workers are replaced
    if missing:
        yield f"ranks {', '.join(map(str, missing))} of {facts.gpus} workers left no result"
    for worker in facts.workers:
        if not worker["samples"] or not worker["steps"]:
            yield f"rank {worker['rank']} trained no sample or took no step"


@record_rule("waits-for-cores", "warning", "time")
def find_workers_that_wait_for_cores(facts: Facts) -> Iterator[str]:
    """A worker waited for a core while other processes computed on its cores, so that its times are those of
    an overloaded machine.
    """
    cores = count_usable_cpu_cores({"workers": facts.workers})
    if facts.status != "ok" or (cores and cores < len(facts.workers) + len(facts.servers)):
        return  # the cell's own processes share cores, which the rule processes-share-cores reports
    shares = [
        (w["core_wait_s"] / w["train_time_s"], w)
        for w in facts.workers
        if w.get("core_wait_s") and w.get("train_time_s")
    ]
    share, worker = max(shares, key=lambda pair: pair[0], default=(0.0, {}))
    if share > MAX_CORE_WAIT_SHARE:
        yield (
            f"rank {worker['rank']} waited for a core in {min(1.0, share):.0%} of "
            f"{worker['train_time_s']:.3g} s of training"
        )


@record_rule("fewer-workers-than-asked", "warning", "time")
def find_fewer_workers_than_requested(facts: Facts) -> Iterator[str]:
    """The workers of an elastic cell never all trained at the same time, because some waited in the queue
    until the training was over. Its times are those of fewer workers.
    """
    together = [len(g["members"]) for g in facts("elastic.generations") or ()]
    most = facts("elastic.servers.most_at_a_time") or max(together, default=None)
    if facts.status == "ok" and most is not None and most < facts.gpus:
        yield f"at most {most} of {facts.gpus} workers trained at the same time"


@record_rule("keeps-checkpoints", "note", "time")
def find_cells_with_checkpoints(facts: Facts) -> Iterator[str]:
    """The cell wrote checkpoints, and may have been restarted. Its training time excludes the copying of
    checkpoints and lost work, but writing them may have slowed the training, and attempts may have run on
    different nodes. Measure a strategy's speed with cells without checkpoints.
    """
    restarts = facts("restarts")
    if restarts is not None and (restarts["count"] or restarts["checkpoints"]["count"]):
        checkpoints = restarts["checkpoints"]
        yield (
            f"{checkpoints['count']} checkpoints of {checkpoints['bytes'] / 1e6:.3g} MB blocked the training "
            f"for {checkpoints['held_up_s']:.3g} s; {restarts['count']} restarts repeated "
            f"{restarts['repeated_s']:.3g} s of work"
        )

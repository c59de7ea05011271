"""Rules on counts: the samples, steps, updates and workers of a record must agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from stratbench.analysis.audit.checks import (
    ROUNDING,
    Facts,
    numbers_by_path,
    unless_absent,
    unless_given,
)
from stratbench.analysis.audit.relations import relations, unless_hold
from stratbench.analysis.audit.rule import record_rule
from stratbench.analysis.records.derived import value_at
from stratbench.strategies import REGISTRY, mesh_of, strategy_class, traits_of

#: Figures that only a cell with a result has.
RESULTS = ("score.final", "time.train_time_s", "batch.samples_seen", "batch.samples_applied")

# What follows from what; the rules below say which holds when.
SETTINGS = relations(
    "settings.model == cell.model",
    "settings.dataset == cell.dataset",
    "settings.gpus == cell.gpus",
    "settings.strategy == strategy.name",
    "settings.options == strategy.options",
    "data.name == cell.dataset",
    "batch.global_batch == settings.global_batch",
    "batch.per_worker_batch == settings.per_worker_batch",
    "provenance.device == settings.device if settings.device != 'auto'",
    "batch.global_batch == strategy.mesh.replicas * batch.per_worker_batch",
    "batch.steps_per_epoch == data.train_samples // max(1, batch.global_batch)",
)
EPOCHS = relations(
    "len(score.per_epoch) == settings.epochs if status == 'ok' and settings.ends_at is None",
    "len(score.per_epoch) <= settings.epochs if status != 'ok' or settings.ends_at is not None",
    "len(time.epoch_times_s) == len(score.per_epoch) if finished",
)
#: Of a cell that trained a number of steps, and was not evaluated.
STEPS = relations(
    "len(score.per_epoch) == 0",
    "passes_run == ceil(settings.steps / max(1, batch.steps_per_epoch)) if status == 'ok'",
)
SAMPLES = relations(
    "batch.samples_seen == steps * batch.global_batch",
    "batch.samples_applied <= batch.samples_seen",
    "batch.samples_seen == samples_of_workers",
)
OF_WORKER = relations(
    "worker.samples == worker.steps * batch.samples_per_step",
    "worker.steps == steps_run if strategy.kind == 'collective'",
)
UPDATES = relations(
    "batch.updates_applied == steps_run - skips if strategy.kind == 'collective'",
    "batch.samples_applied == batch.updates_applied * batch.global_batch "
    "if strategy.kind == 'collective'",
    # A step that overflowed makes no update; the last update may be of fewer pushes.
    (
        "batch.updates_applied == steps_run * strategy.traits.updates_per_step "
        "if status == 'ok' and not ended_early and not skips and not lost",
        ROUNDING,
        1.0,
    ),
    "batch.updates_applied <= steps_run * strategy.traits.updates_per_step + 1 "
    "if status == 'ok' and not ended_early",
    "strategy.details.push_lr == settings.lr * lr_factor",
)
WORKERS = relations(
    "strategy.mesh.replicas * strategy.mesh.tensor * strategy.mesh.stages == cell.gpus",
    "len(workers) == cell.gpus if status == 'ok' and strategy.kind == 'collective'",
)
NODES = relations("provenance.nodes == hosts_of_workers")
MODEL = relations(
    "sum(strategy.wrap_groups.parameters) <= model.parameters",
    "model.trainable_parameters <= model.parameters",
    # Nothing is frozen. The rest, such as the head, is in no group; in a user's model both may differ.
    "model.trainable_parameters == model.parameters if settings.own_model is None",
    "model.parameters <= 2 * sum(strategy.wrap_groups.parameters) "
    "if settings.own_model is None and sum(strategy.wrap_groups.parameters)",
    "strategy.details.weights_dtype == dtype_by_precision",
)
STRATEGY = relations(
    "strategy.name == cell.strategy if is_registered",  # any other name is that of a variant
    "strategy.kind == registered_kind",
    "communication.method == registered_method",
)


@record_rule("contradictory-status", "unusable", "all", of="both")
def contradictory_status(facts: Facts) -> Iterator[str]:
    """What the record says of its end does not go with what it holds: a cell that finished has all its
    results and no reason, one that did not has a reason and no final score.
    """
    status, entries = facts.status, facts("score.per_epoch")
    if facts("strategy.kind") == "own":  # which need not tell its losses, parameters or score
        yield from faults_of_end(facts)
        return
    # What a lost worker's losses were is not known.
    losses = ("test_loss",) if facts.elastic else ("train_loss", "test_loss")
    finite = all(entry[name] is not None for entry in entries for name in losses)
    if status == "ok":
        why = "although the cell ended well"
        if facts("reason") is not None:
            yield f"the reason is {facts('reason')!r}, {why}"
        # A cell trained for `steps` was not evaluated.
        results = RESULTS[1:] if facts("settings.steps") else RESULTS
        for path in (*results, "batch.updates_applied", "time.step_ms", "model.parameters"):
            yield from unless_given(path, facts(path), why)
        yield from unless_given("workers", facts.workers or None, why)
        if not finite:
            yield f"a loss is not finite, {why}"
    else:
        if not facts("reason"):
            yield f"no reason is given, although the cell ended as {status}"
        yield from unless_absent("score.final", facts("score.final"), "although it did not finish")
    if status in ("oom", "timeout", "refused"):
        why = f"although the cell ended as {status}"
        for path in RESULTS[1:]:
            yield from unless_absent(path, facts(path), why)
    evaluated = not facts("settings.steps")  # else its loss after an epoch is not in the record
    if status == "diverged" and facts.finished and finite and evaluated:
        yield "the cell ended as diverged, although every loss is finite"


def faults_of_end(facts: Facts) -> Iterator[str]:
    """Checks what a command's cell must state by how it ended."""
    status = facts.status
    if (status == "ok") == bool(facts("reason")):
        yield f"the reason is {facts('reason')!r}, although the cell ended as {status}"
    for path in RESULTS[1:]:
        if status == "ok":
            yield from unless_given(path, facts(path), "although the cell ended well")
        elif status in ("oom", "timeout"):
            yield from unless_absent(path, facts(path), f"although the cell ended as {status}")


@record_rule("contradictory-counts", "unusable", "all")
def contradictory_counts(facts: Facts) -> Iterator[str]:
    """Counts of the record that follow from each other do not agree: batches, steps, samples, updates,
    epochs, workers, and the settings that they come from.
    """
    yield from faults_of_settings(facts)
    yield from unless_hold(facts, EPOCHS if facts("settings.steps") is None else STEPS)
    if facts.finished:
        yield from faults_of_samples(facts)
        yield from faults_of_updates(facts)
    yield from faults_of_workers(facts)
    yield from faults_of_models(facts)
    # Paths take longer than all else here, and hardly a record needs one.
    if are_plausible(facts.record.values()):
        return
    for path, value in numbers_by_path(facts.record):
        if not math.isfinite(value):
            yield f"{path} is {value}, which is no number"
        elif value < 0 and not path.startswith(("settings.", "strategy.options.")):
            yield f"{path} is {value:.6g}, less than nothing"


def are_plausible(values: Iterable[Any]) -> bool:
    """Whether all numbers in values are finite and none is negative."""
    for value in values:
        if isinstance(value, (int, float)):
            if not math.isfinite(value) or value < 0:
                return False
        elif isinstance(value, dict):
            if not are_plausible(value.values()):
                return False
        elif isinstance(value, list) and not are_plausible(value):
            return False
    return True


def faults_of_settings(facts: Facts) -> Iterator[str]:
    """Checks the settings against other fields, and how the training set divides into steps."""
    yield from unless_hold(facts, SETTINGS)
    if (facts("strategy.kind") == "server") != bool(facts.servers) and facts.finished:
        yield f"the strategy's kind is {facts('strategy.kind')}, with {len(facts.servers)} servers"
    each, per_step = facts("batch.per_worker_batch"), facts("batch.samples_per_step")
    if per_step is not None and (not per_step or each % per_step):
        yield f"batch.samples_per_step is {per_step}, which does not divide a worker's batch of {each}"


def faults_of_samples(facts: Facts) -> Iterator[str]:
    """Checks the samples of the cell and of its workers."""
    steps, epochs = facts.steps_run, facts("settings.epochs")
    ends_after_all = facts("strategy.kind") == "server" and not facts.elastic
    if ends_after_all and facts.status == "diverged" and epochs:
        steps = epochs * (facts("batch.steps_per_epoch") or 0)
    each = [worker["samples"] for worker in facts.workers if facts.mesh.speaks(worker["rank"])]
    seen = sum(each) if facts.whole and None not in each else None
    yield from unless_hold(facts, SAMPLES, steps=steps, samples_of_workers=seen)
    if facts.elastic:
        return  # `audit.elastic` follows each worker through its generations
    for worker in facts.workers:
        yield from unless_hold(facts, OF_WORKER, f"rank {worker['rank']}", worker=worker)


def faults_of_updates(facts: Facts) -> Iterator[str]:
    """Checks the number of updates against what the strategy states of them."""
    name, lr_factor = facts("strategy.name"), None
    if facts("strategy.details.push_lr") is not None and name in REGISTRY:
        options = strategy_class(name).Options(**facts("strategy.options"))
        lr_factor = options.lr_factor(facts.gpus)
    yield from unless_hold(facts, UPDATES, lr_factor=lr_factor)


def faults_of_workers(facts: Facts) -> Iterator[str]:
    """Checks which workers took part."""
    ranks = [worker["rank"] for worker in facts.workers]
    if facts.elastic:
        return
    if ranks != sorted(set(ranks)) or any(not 0 <= rank < facts.gpus for rank in ranks):
        yield f"the workers' ranks are {ranks}, of {facts.gpus} workers"
    yield from unless_hold(facts, WORKERS)
    yield from faults_of_nodes(facts)


def faults_of_nodes(facts: Facts) -> Iterator[str]:
    """Checks how many workers each node is said to have had: the numbers, and the workers' hosts."""
    nodes, most = facts("provenance.nodes"), facts("provenance.workers_per_node")
    if nodes is None or most is None:
        return
    if not nodes * most >= facts.gpus > (nodes - 1) * most:
        yield f"{nodes} nodes with {most} workers each do not make {facts.gpus} workers"
    if facts.whole:
        hosts = {
            (facts.node_of(worker["rank"]), worker["provenance"]["host"]["name"])
            for worker in facts.workers
            if worker["provenance"]
        }
        names = {name for _, name in hosts}
        yield from unless_hold(facts, NODES, hosts_of_workers=len(names))
        if len(hosts) > len(names) == nodes:
            yield f"workers of one node name several hosts: {sorted(hosts)}"


def faults_of_models(facts: Facts) -> Iterator[str]:
    """Checks the model's size against its sharding groups, and its formats against the precision."""
    precision, computed = facts("settings.precision"), facts("strategy.details.compute_dtype")
    formats = {
        "fp32": ("float32",), "fp64": ("float64",), "fp16": ("float16",), "bf16": ("bfloat16",),
        "tf32": ("tf32", "float32"),
    }  # fmt: skip
    if (
        computed is not None
        and precision in formats
        and computed.split()[0] not in formats[precision]
    ):
        yield f"strategy.details.compute_dtype is {computed}, but settings.precision is {precision}"
    dtype = precision and ("float64" if precision == "fp64" else "float32")
    yield from unless_hold(facts, MODEL, dtype_by_precision=dtype)


@record_rule("unlike-its-strategy", "unusable", "all")
def unlike_its_strategy(facts: Facts) -> Iterator[str]:
    """The record is of another strategy than its cell names, or of another kind than that strategy."""
    name, kind, method = facts("strategy.name"), None, None
    if name in REGISTRY:
        kind = strategy_class(name).kind
        # A collective that is silent on its copies may send by rings, too.
        method = "measured" if kind == "server" else None
        method = "ring" if facts("strategy.traits.ring_copies") is not None else method
    yield from unless_hold(
        facts,
        STRATEGY,
        is_registered=facts("cell.strategy") in REGISTRY,
        registered_kind=kind,
        registered_method=method,
    )


@record_rule("traits-unlike-strategy", "doubtful", "all")
def traits_unlike_strategy(facts: Facts) -> Iterator[str]:
    """The record says of its strategy what this version of the strategy does not say of itself, and the audit
    and the decision go by what the record says. Train the cell again.
    """
    name = facts("strategy.name")
    if name not in REGISTRY:
        return
    by_zeros = bool(facts("strategy.details.moved_by_zeros"))
    given = (name, facts("strategy.options"), facts.gpus)
    traits = asdict(traits_of(*given, by_zeros, facts.elastic))
    for trait, said in (facts("strategy.traits") or {}).items():
        if said != traits.get(trait):
            yield f"strategy.traits.{trait} is {said}, but that of {name} is {traits.get(trait)}"
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
        said = {value_at(w, "own_reason") for w in entries} - {None}
        why = f": {'; '.join(sorted(said))}" if said else ""
        yield f"{len(facts.lost)} of {facts.gpus} workers were lost to the servers{why}"
    missing = sorted(set(range(facts.gpus)) - {worker["rank"] for worker in facts.workers})
    if facts.elastic:
        return  # each that was lost has been replaced
    if missing:
        yield f"of {facts.gpus} workers, ranks {', '.join(map(str, missing))} left no result"
    for worker in facts.workers:
        if not worker["samples"] or not worker["steps"]:
            yield f"rank {worker['rank']} trained no sample, or made no step"

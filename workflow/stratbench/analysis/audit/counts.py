"""Rules on counts: the samples, steps, updates and workers of a record must agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from stratbench.analysis.audit.checks import (
    Facts,
    numbers_by_path,
    unless_absent,
    unless_at_most,
    unless_equal,
    unless_given,
    unless_same,
)
from stratbench.analysis.audit.rule import record_rule
from stratbench.analysis.records.derived import value_at
from stratbench.strategies import REGISTRY, mesh_of, strategy_class, traits_of

#: Settings that also stand in the cell's coordinates.
REPEATED = ("model", "dataset", "gpus")
#: Figures that only a cell with a result has.
RESULTS = ("score.final", "time.train_time_s", "batch.samples_seen", "batch.samples_applied")


@record_rule(
    "contradictory-status",
    "unusable",
    "all",
    "What the record says of its end does not go with what it holds: a cell that finished has all "
    "its results and no reason, one that did not has a reason and no final score.",
)
def contradictory_status(facts: Facts) -> Iterator[str]:
    status, entries = facts.status, facts("score.per_epoch")
    finite = all(e["train_loss"] is not None and e["test_loss"] is not None for e in entries)
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
    if status == "diverged" and facts.finished and finite:
        yield "the cell ended as diverged, although every loss is finite"


@record_rule(
    "contradictory-counts",
    "unusable",
    "all",
    "Counts of the record that follow from each other do not agree: batches, steps, samples, "
    "updates, epochs, workers, and the settings that they come from.",
)
def contradictory_counts(facts: Facts) -> Iterator[str]:
    yield from faults_of_settings(facts)
    yield from faults_of_batches(facts)
    yield from faults_of_epochs(facts)
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
    """Checks the settings against other fields that state the same."""
    for name in REPEATED:
        yield from unless_same(
            f"settings.{name}", facts(f"settings.{name}"), "the cell's", facts(f"cell.{name}")
        )
    yield from unless_same(
        "settings.strategy", facts("settings.strategy"), "strategy.name", facts("strategy.name")
    )
    stated, used = facts("settings.options"), facts("strategy.options")
    yield from unless_same("settings.options", stated, "strategy.options", used)
    yield from unless_same(
        "data.name", facts("data.name"), "the cell's data set", facts("cell.dataset")
    )
    if (facts("strategy.kind") == "server") != bool(facts.servers) and facts.finished:
        yield f"the strategy's kind is {facts('strategy.kind')}, with {len(facts.servers)} servers"
    for name in ("global_batch", "per_worker_batch"):
        yield from unless_equal(
            f"batch.{name}", facts(f"batch.{name}"), "the settings'", facts(f"settings.{name}")
        )
    device = facts("settings.device")
    if device in ("cpu", "cuda"):
        yield from unless_same(
            "provenance.device", facts("provenance.device"), "settings.device", device
        )


def faults_of_batches(facts: Facts) -> Iterator[str]:
    """Checks how the training set divides into steps and workers."""
    each, per_step = facts("batch.per_worker_batch"), facts("batch.samples_per_step")
    yield from unless_equal(
        "batch.global_batch",
        facts("batch.global_batch"),
        "replicas x per_worker_batch",
        facts.mesh.replicas * each,
    )
    yield from unless_equal(
        "batch.steps_per_epoch",
        facts("batch.steps_per_epoch"),
        "train_samples / global_batch, rounded down,",
        facts("data.train_samples") // max(1, facts("batch.global_batch")),
    )
    if per_step is not None and (not per_step or each % per_step):
        yield f"batch.samples_per_step is {per_step}, which does not divide a worker's batch of {each}"


def faults_of_epochs(facts: Facts) -> Iterator[str]:
    """Checks the number of epochs."""
    asked, run = facts("settings.epochs"), facts.epochs_run
    if (steps := facts("settings.steps")) is not None:
        yield from unless_equal("the number of score.per_epoch", run, "that of no evaluation", 0)
        if facts.status == "ok":
            yield from unless_equal(
                "the passes of time.epoch_times_s",
                facts.passes_run,
                "those of settings.steps",
                -(-steps // max(1, facts("batch.steps_per_epoch"))),
            )
        return
    if facts.status == "ok":
        yield from unless_equal("the number of score.per_epoch", run, "settings.epochs", asked)
    else:
        yield from unless_at_most("the number of score.per_epoch", run, "settings.epochs", asked)
    if facts.finished:
        timed = len(facts("time.epoch_times_s"))
        yield from unless_equal(
            "the number of time.epoch_times_s", timed, "that of score.per_epoch", run
        )


def faults_of_samples(facts: Facts) -> Iterator[str]:
    """Checks the samples of the cell and of its workers."""
    seen, applied = facts("batch.samples_seen"), facts("batch.samples_applied")
    steps_run = facts.steps_run
    if (
        facts("strategy.kind") == "server"
        and facts.status == "diverged"
        and facts("settings.epochs")
    ):
        steps_run = facts("settings.epochs") * (facts("batch.steps_per_epoch") or 0)
    yield from unless_equal(
        "batch.samples_seen", seen, "steps x global_batch", steps_run * facts("batch.global_batch")
    )
    yield from unless_at_most("batch.samples_applied", applied, "samples_seen", seen)
    each = [worker["samples"] for worker in facts.workers if facts.mesh.speaks(worker["rank"])]
    if facts.whole and None not in each:
        yield from unless_equal("batch.samples_seen", seen, "the sum over its workers", sum(each))
    per_step = facts("batch.samples_per_step")
    for worker in facts.workers:
        steps = worker["steps"]
        if per_step is not None and steps is not None:
            yield from unless_equal(
                f"samples of rank {worker['rank']}",
                worker["samples"],
                "steps x samples_per_step",
                steps * per_step,
            )
        if facts("strategy.kind") == "collective":
            yield from unless_equal(
                f"steps of rank {worker['rank']}", steps, "the steps of all epochs", facts.steps_run
            )


def faults_of_updates(facts: Facts) -> Iterator[str]:
    """Checks the number of updates against what the strategy states of them."""
    updates, applied = facts("batch.updates_applied"), facts("batch.samples_applied")
    steps = facts.steps_run
    if facts("strategy.kind") == "collective":
        yield from unless_equal(
            "batch.updates_applied", updates, "steps - skipped_steps", steps - facts.skips
        )
        if updates is not None:
            whole = updates * facts("batch.global_batch")
            yield from unless_equal(
                "batch.samples_applied", applied, "updates x global_batch", whole
            )
    per_step = facts("strategy.traits.updates_per_step")
    if per_step is not None and facts.status == "ok":
        # A step that overflowed makes no update; the last update may be of fewer pushes.
        if not facts.skips and not facts.lost:
            yield from unless_equal(
                "batch.updates_applied",
                updates,
                "steps x the strategy's updates_per_step",
                steps * per_step,
                absolute=1.0,
            )
        yield from unless_at_most(
            "batch.updates_applied",
            updates,
            "steps x the strategy's updates_per_step",
            steps * per_step + 1,
        )
    yield from faults_of_push_rate(facts)


def faults_of_push_rate(facts: Facts) -> Iterator[str]:
    """Checks the learning rate of a push, if the strategy states it."""
    lr, pushed = facts("settings.lr"), facts("strategy.details.push_lr")
    name = facts("strategy.name")
    if lr is None or pushed is None or name not in REGISTRY:
        return
    factor = strategy_class(name).Options(**facts("strategy.options")).lr_factor(facts.gpus)
    yield from unless_equal(
        "strategy.details.push_lr", pushed, "settings.lr by its rule", lr * factor
    )


def faults_of_workers(facts: Facts) -> Iterator[str]:
    """Checks which workers took part."""
    ranks = [worker["rank"] for worker in facts.workers]
    if ranks != sorted(set(ranks)) or any(not 0 <= rank < facts.gpus for rank in ranks):
        yield f"the workers' ranks are {ranks}, of {facts.gpus} workers"
    yield from unless_equal("strategy.mesh's workers", facts.mesh.workers, "the cell's", facts.gpus)
    if facts.status == "ok" and facts("strategy.kind") == "collective":
        yield from unless_equal(
            "the number of workers with results", len(ranks), "the cell's", facts.gpus
        )
    nodes, each = facts("provenance.nodes"), facts("provenance.workers_per_node")
    if nodes is not None and each is not None:
        if not nodes * each >= facts.gpus > (nodes - 1) * each:
            yield f"{nodes} nodes with {each} workers each do not make {facts.gpus} workers"
        hosts = {
            worker["provenance"]["host"]["name"] for worker in facts.workers if worker["provenance"]
        }
        if facts.whole:
            yield from unless_equal(
                "provenance.nodes", nodes, "the number of the workers' hosts", len(hosts)
            )


def faults_of_models(facts: Facts) -> Iterator[str]:
    """Checks the model's size against its sharding groups, and its formats against the precision."""
    groups = sum(group["parameters"] for group in facts("strategy.wrap_groups"))
    yield from unless_at_most(
        "the sum over strategy.wrap_groups", groups, "model.parameters", facts("model.parameters")
    )
    yield from unless_at_most(
        "model.trainable_parameters",
        facts("model.trainable_parameters"),
        "model.parameters",
        facts("model.parameters"),
    )
    if facts("settings.own_model") is None:
        yield from unless_equal(
            "model.trainable_parameters",
            facts("model.trainable_parameters"),
            "model.parameters, of which nothing is frozen,",
            facts("model.parameters"),
        )
    # The rest, such as the head, is in no group. How much that is in a user's model is unknown.
    if groups and facts("settings.own_model") is None:
        yield from unless_at_most(
            "model.parameters", facts("model.parameters"), "twice its wrap_groups", 2 * groups
        )
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
    weights = "float64" if precision == "fp64" else "float32"
    if precision is not None:
        yield from unless_same(
            "strategy.details.weights_dtype",
            facts("strategy.details.weights_dtype"),
            "by the precision it",
            weights,
        )


@record_rule(
    "contradictory-partition",
    "unusable",
    "score",
    "Each worker was to have its own classes (partition: by-class), and the samples that it trained on "
    "are not of such a part: what unequal data cost cannot be told from this cell.",
)
def contradictory_partition(facts: Facts) -> Iterator[str]:
    stated = [w for w in facts.workers if "class_samples" in w and facts.mesh.speaks(w["rank"])]
    if facts("settings.partition") != "by-class":
        yield from (
            f"rank {w['rank']} says what it saw of each class, without a partition" for w in stated
        )
        return
    for worker in stated:
        yield from unless_equal(
            f"the sum over class_samples of rank {worker['rank']}",
            sum(worker["class_samples"]),
            "its samples",
            worker["samples"],
        )
    # Parts are cut from the samples sorted by label: two neighbours may share one class.
    known = [(w["rank"], [c for c, n in enumerate(w["class_samples"]) if n]) for w in stated]
    for (one, ones), (other, others) in pairwise(entry for entry in known if entry[1]):
        if ones[-1] > others[0]:
            yield (
                f"rank {one} trained on classes {ones[0]} to {ones[-1]}, and rank {other} on "
                f"{others[0]} to {others[-1]}"
            )


@record_rule(
    "unlike-its-strategy",
    "unusable",
    "all",
    "The record is of another strategy than its cell names, or of another kind than that strategy.",
)
def unlike_its_strategy(facts: Facts) -> Iterator[str]:
    listed, name = facts("cell.strategy"), facts("strategy.name")
    if listed in REGISTRY:  # any other name is that of a variant
        yield from unless_same("strategy.name", name, "the cell's strategy", listed)
    if name not in REGISTRY:
        return
    kind = strategy_class(name).kind
    yield from unless_same("strategy.kind", facts("strategy.kind"), f"that of {name}", kind)
    ring = facts("strategy.traits.ring_copies") is not None
    if kind == "server" or ring:  # a collective silent on its copies may send by rings too
        yield from unless_same(
            "communication.method",
            facts("communication.method"),
            f"of {name}",
            "ring" if ring else "measured",
        )


@record_rule(
    "traits-unlike-strategy",
    "doubtful",
    "all",
    "The record says of its strategy what this version of the strategy does not say of itself, and "
    "the audit and the decision go by what the record says. Train the cell again.",
)
def traits_unlike_strategy(facts: Facts) -> Iterator[str]:
    name = facts("strategy.name")
    if name not in REGISTRY:
        return
    by_zeros = bool(facts("strategy.details.moved_by_zeros"))
    traits = asdict(traits_of(name, facts("strategy.options"), facts.gpus, by_zeros))
    for trait, said in (facts("strategy.traits") or {}).items():
        if said != traits.get(trait):
            yield f"strategy.traits.{trait} is {said}, but that of {name} is {traits.get(trait)}"
    if (mesh := mesh_of(name, facts("strategy.options"), facts.gpus)) != facts.mesh:
        yield f"strategy.mesh is {facts.mesh}, but that of {name} is {mesh}"


@record_rule(
    "lost-workers",
    "unusable",
    "all",
    "Workers were lost, or did nothing, and the others finished without them: it is ranked as if "
    "it had been trained by all of them.",
)
def lost_workers(facts: Facts) -> Iterator[str]:
    if facts.status != "ok":
        return
    if facts.lost:
        entries = (w for server in facts.servers for w in server.get("lost") or ())
        said = {value_at(w, "own_reason") for w in entries} - {None}
        why = f": {'; '.join(sorted(said))}" if said else ""
        yield f"{len(facts.lost)} of {facts.gpus} workers were lost to the servers{why}"
    missing = sorted(set(range(facts.gpus)) - {worker["rank"] for worker in facts.workers})
    if missing:
        yield f"of {facts.gpus} workers, ranks {', '.join(map(str, missing))} left no result"
    for worker in facts.workers:
        if not worker["samples"] or not worker["steps"]:
            yield f"rank {worker['rank']} trained no sample, or made no step"

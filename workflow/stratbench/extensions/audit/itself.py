"""Audit rule that checks whether the values of a single record are consistent and possible."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from stratbench.analysis.records.derived import get_field_by_path
from stratbench.analysis.records.facts import Facts, iter_excess_messages, iter_mismatch_messages
from stratbench.extensions.audit.rule import is_elastic_cell, record_rule

#: Paths of the record fields that a cell with the status `ok` must have.
REQUIRED_FIELDS = ("time.train_time_s", "batch.samples_seen", "memory.peak_bytes", "score.final")
#: Smallest and largest credible power of a training GPU, as shares of its power limit.
MIN_POWER, MAX_POWER = 0.05, 1.1
#: Longest delay of the driver's energy counter in seconds.
MAX_COUNTER_DELAY_S = 0.5
#: Largest tolerated difference between times that several processes measure: relative, and in seconds.
MAX_TIME_DIFFERENCE, MAX_TIME_DIFFERENCE_S = 0.1, 0.5


@record_rule("unlike-itself", "unusable", "all", of="both")
def find_contradictory_values(facts: Facts) -> Iterator[str]:
    """Values of the record contradict each other, or are impossible: the program that wrote the record has a
    fault, or the file was changed.
    """
    yield from iter_contradictions_in_status_and_results(facts)
    if facts.finished:
        yield from iter_contradictions_in_times(facts)
    # A cell of the kind `own` ran a user's command, whose record has one entry for all workers.
    if facts("strategy.kind") != "own":
        if facts.finished and not is_elastic_cell(facts):
            yield from iter_contradictions_in_steps(facts)
        yield from iter_values_impossible_for_devices(facts)


def iter_contradictions_in_status_and_results(facts: Facts) -> Iterator[str]:
    """Yield contradictions between a cell's status, reason, dates and results."""
    is_ok, entries = facts.status == "ok", facts("score.per_epoch")
    if is_ok == bool(facts("reason")):
        yield f"the reason is {facts('reason')!r}, although the cell ended as {facts.status}"
    started, finished = (facts(f"provenance.{end}") for end in ("started", "finished"))
    if started and finished and datetime.fromisoformat(finished) < datetime.fromisoformat(started):
        yield f"the cell ended at {finished}, before it began at {started}"
    if not is_ok or facts("strategy.kind") == "own":
        return
    for path in REQUIRED_FIELDS[:-1] if facts("settings.steps") else REQUIRED_FIELDS:
        if facts(path) is None:
            yield f"{path} is absent, although the cell ended well"
    if any(entry["test_loss"] is None for entry in entries):
        yield "a test loss is not finite, although the cell ended well"
    if entries:
        last = f"the score of epoch {len(entries)}"
        yield from iter_mismatch_messages(
            "score.final", facts("score.final"), last, entries[-1]["score"]
        )


def iter_contradictions_in_times(facts: Facts) -> Iterator[str]:
    """Yield contradictions between the training time and the times of cell, epochs, samples and workers."""
    train_s, applied = facts("time.train_time_s"), facts("batch.samples_applied")
    yield from iter_excess_messages(
        "time.train_time_s", train_s, "time.total_s", facts("time.total_s")
    )
    if not train_s:
        return
    yield from iter_mismatch_messages(
        "time.throughput_samples_per_s", facts("time.throughput_samples_per_s"),
        "samples_applied / train_time_s", None if applied is None else applied / train_s,
    )  # fmt: skip
    # With servers and the setting `steps`, the last two epochs may end at the same time.
    if not is_elastic_cell(facts) and not (facts.servers and facts("settings.steps")):
        spans = sum(facts("time.epoch_times_s"))
        yield from iter_mismatch_messages(
            "the sum of time.epoch_times_s",
            spans,
            "time.train_time_s",
            train_s,
            0.02,
            MAX_TIME_DIFFERENCE_S,
        )
    own = [w["train_time_s"] for w in facts.workers if w["train_time_s"]]
    if own and not is_elastic_cell(facts):
        yield from iter_mismatch_messages(
            "time.train_time_s",
            train_s,
            "the slowest worker's",
            max(own),
            MAX_TIME_DIFFERENCE,
            MAX_TIME_DIFFERENCE_S,
        )
        # Workers of a collective strategy make each step together. Their times must therefore be similar.
        if facts("strategy.kind") == "collective":
            yield from iter_excess_messages(
                "half of the slowest worker's time", max(own) / 2, "the fastest one's", min(own),
                absolute_tolerance=MAX_TIME_DIFFERENCE_S,
            )  # fmt: skip


def iter_contradictions_in_steps(facts: Facts) -> Iterator[str]:
    """Yield contradictions between steps, samples and updates."""
    own = [w["train_time_s"] for w in facts.workers]
    steps, phases = facts("time.step_ms"), facts("time.breakdown_ms")
    if steps and own and None not in own:
        spent_s = steps["mean"] * steps["count"] / 1e3
        yield from iter_mismatch_messages(
            "the sum of all steps", spent_s, "that of the workers' times", sum(own), MAX_TIME_DIFFERENCE,
            MAX_TIME_DIFFERENCE_S * len(own),
        )  # fmt: skip
    is_collective = facts("strategy.kind") == "collective"
    # Workers of parameter servers may take different numbers of steps.
    if steps and phases and is_collective:
        yield from iter_mismatch_messages(
            "the sum of time.breakdown_ms", sum(phases.values()), "time.step_ms.mean",
            steps["mean"], 2 * MAX_TIME_DIFFERENCE, 1.0,
        )  # fmt: skip
    seen, applied = (facts(f"batch.samples_{which}") for which in ("seen", "applied"))
    batch = facts("batch.global_batch")
    yield from iter_excess_messages("batch.samples_applied", applied, "batch.samples_seen", seen)
    each = facts.mesh.replicas * facts("batch.per_worker_batch")
    yield from iter_mismatch_messages("batch.global_batch", batch, "what the workers take", each)
    if facts.status == "ok":
        work = "steps x global_batch"
        yield from iter_mismatch_messages(
            "batch.samples_seen", seen, work, facts.num_steps_trained * batch, 0.02
        )
    if is_collective:
        made, done = (
            facts("batch.updates_applied"),
            facts.num_steps_trained - facts.num_skipped_steps,
        )
        yield from iter_mismatch_messages(
            "batch.updates_applied", made, "the number of steps", done
        )
    # If each update waits for all workers, no gradient can be stale.
    if facts.averages_gradients_of_all_workers and any(
        sum(s["staleness_all_shards"][1:]) for s in facts.servers
    ):
        yield "pushes are stale, although every update waits for all workers"
    rings = facts("strategy.traits.ring_copies") if facts.gpus > 1 else 0
    if (rings or facts.servers) and facts("communication.sent_bytes_per_step") == 0:
        yield "communication.sent_bytes_per_step is 0, although the strategy exchanges gradients"


def iter_values_impossible_for_devices(facts: Facts) -> Iterator[str]:
    """Yield values of memory, operations and energy that the model or the devices make impossible."""
    yield from iter_excess_messages("compute.mfu", facts("compute.mfu"), "all operations", 1.0)
    joules, time_s = facts("energy.train_joules"), facts("time.train_time_s")
    limits = [
        get_field_by_path(w["provenance"], "gpu.power_limit_w")
        if get_field_by_path(w["provenance"], "gpu")
        else 0.0
        for w in facts.workers
    ]
    if joules is not None and time_s and None not in limits:
        allowed, of = sum(limits) * time_s, "of the GPUs' power limits"
        late = MAX_COUNTER_DELAY_S * sum(limits)
        for what, one, other, most in (
            ("energy.train_joules", joules, f"{MAX_POWER:.0%} {of}", MAX_POWER * allowed),
            (f"{MIN_POWER:.0%} {of}", MIN_POWER * allowed, "energy.train_joules", joules),
        ):
            yield from iter_excess_messages(what, one, other, most, absolute_tolerance=late)
    states, size = facts("memory.model_states"), facts.parameter_bytes
    if states:
        if not facts("strategy.traits.states_on_host"):
            peak = facts("memory.peak_bytes")
            yield from iter_excess_messages(
                "memory.model_states, in all,", sum(states.values()), "memory.peak_bytes", peak
            )
        if size and (parts := facts("strategy.traits.weight_parts")):
            # The tolerance of 30 % is for small layers, whose shards are padded.
            yield from iter_mismatch_messages(
                "memory.model_states.parameters_bytes", states["parameters_bytes"],
                f"a part of {parts} of the model", size / parts, 0.3, 8192,
            )  # fmt: skip
    for worker in facts.workers:
        peak, device = get_field_by_path(worker, "memory.peak_bytes"), worker["provenance"]
        held = f"the peak of rank {worker['rank']}"
        yield from iter_excess_messages(
            held, peak, "its GPU's", get_field_by_path(device, "gpu.memory_bytes")
        )

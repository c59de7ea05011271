"""Rules on memory: peaks and model states that are impossible or contradict each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from stratbench.analysis.audit.checks import ROUNDING, Facts, unless, unless_given
from stratbench.analysis.audit.relations import relations, unless_hold
from stratbench.analysis.audit.rule import Case, Evidence, record_rule, rows_of, rule
from stratbench.analysis.audit.timelines import SAMPLES, is_crowded
from stratbench.analysis.records.derived import value_at
from stratbench.analysis.records.groups import GROUP, Group
from stratbench.analysis.records.samples import HELD
from stratbench.cell.text.words import MIB

#: A reduction by more than this times the number of workers cannot come from sharding alone.
REDUCED = 1.05
#: How much of a sharded model a rank may hold, as a multiple of its part.
PADDED = 1.25
#: The most that AdamW's step counts may take: 4 bytes for each of 4096 tensors.
STEP_COUNTS_BYTES = 4 * 4096
#: The share by which the peaks of repeats on GPUs differ at most, and bytes: cuDNN may choose an
#: algorithm with another workspace, and allocates it in blocks.
UNEVEN_REPEATS, UNEVEN_BYTES = 0.05, 32 * MIB
#: The share of a peak that samples show at least; on CPUs, memory is given back between them.
SAMPLED = {"gpu": 0.98, "process": 0.5}
#: The method of measuring on CUDA devices.
ALLOCATOR = "cuda-allocator"

# What follows from what; the rule below says which holds when.
PEAKS = relations(
    "memory.peak_bytes == most_of_workers",
    "memory.peak_over_base_bytes == worst_rank.memory.peak_over_base_bytes",
    "memory.peak_over_base_bytes <= memory.peak_bytes",
    "memory.requested_peak_bytes <= memory.peak_bytes",
    "memory.requested_peak_bytes == worst_rank.memory.requested_peak_bytes",
    "memory.cublas_bytes == worst_rank.memory.cublas_bytes",
)
OWN = relations(
    "worker.memory.peak_over_base_bytes == max(0, worker.memory.peak_bytes - worker.memory.base_bytes)",
    ("worker.memory.idle_bytes <= worker.memory.base_bytes", 0.1),
    "worker.memory.allocated_peak_bytes == worker.memory.peak_bytes",
    "worker.memory.peak_bytes <= worker.memory.reserved_peak_bytes",
    "worker.memory.requested_peak_bytes <= worker.memory.peak_bytes",
    "worker.memory.cublas_bytes <= worker.memory.requested_peak_bytes",
    "worker.memory.nvml_process_used_bytes <= worker.memory.nvml_used_bytes",
    "worker.memory.method == memory.method",
    *(
        f"worker.memory.{held}_bytes <= worker.provenance.gpu.memory_bytes"
        for held in ("peak", "reserved_peak", "nvml_used", "nvml_process_used")
    ),
    "worker.memory.nvml_used_bytes >= worker.memory.base_bytes if worker.provenance.gpu.memory_bytes",
    "worker.memory.peak_bytes <= worker.provenance.host.memory_bytes "
    "if not worker.provenance.gpu.memory_bytes",
)


@rule("memory-reduced-too-much", "doubtful", "memory")
def memory_reduced_too_much(evidence: Evidence) -> Iterator[Case]:
    """Sharding over N workers divides memory by N at most. Something else differs."""
    columns = {"model_states_bytes": "model states", "peak_memory_bytes": "peak memory"}
    for group, rows in evidence.groups.items():
        other = evidence.unsharded_rival_of(group)
        if other is None or evidence.value_of(group, "strategy_kind") == "server":
            continue  # its servers hold the rest
        # A CPU's resident set holds more than the tensors: only model states can be compared.
        on_cpu = (rows["device_kind"] == "cpu").any()
        for column, name in columns.items():
            whole, held = (evidence.median(k, column) for k in (other, group))
            if column == "peak_memory_bytes" and whole and held:  # cuBLAS's part nobody divides
                whole, held = (
                    n - (evidence.median(k, "cublas_bytes") or 0)
                    for n, k in ((whole, other), (held, group))
                )
            if not whole or not held or (on_cpu and column != "model_states_bytes"):
                continue
            if whole / held > REDUCED * group.gpus:
                sizes = (
                    f"{other.strategy} {whole / MIB:.4g} MiB, {group.strategy} {held / MIB:.4g} MiB"
                )
                yield group, f"{name}: {sizes}: {whole / held:.2f} times on {group.gpus}"


@rule("oom-with-more-workers", "doubtful", "memory")
def oom_with_more_workers(evidence: Evidence) -> Iterator[Case]:
    """With more workers each computes on less of a global batch, so what fits one fits one of several.
    Something else was in the GPU's memory.
    """
    failed = evidence.cells[
        evidence.cells["status"].eq("oom") & evidence.cells["device_kind"].eq("cuda")
    ]
    for row in rows_of(failed.drop_duplicates(GROUP)):
        group = Group(row.experiment, row.strategy, row.model, row.gpus)
        # With a batch that grows with the workers each computes on as much, and exchanges it besides.
        fewer = [
            k
            for k in evidence.on_any_count(group)
            if k.gpus < row.gpus
            and not (evidence.median(k, "global_batch") or math.inf) < row.global_batch
        ]
        if fewer:
            yield group, f"out of memory on {row.gpus}, but not on {fewer[-1].gpus}"


@rule("repeats-uneven-memory", "doubtful", "memory")
def repeats_uneven_memory(evidence: Evidence) -> Iterator[Case]:
    """The allocator's peak is all but the same in each repeat of a cell on GPUs. Look for other batches,
    other algorithms of cuDNN, or a figure of another cell.
    """
    for group, rows in evidence.groups.items():
        peaks = rows["peak_memory_bytes"].dropna()
        if rows["device_kind"].ne("cuda").any() or rows["device_name"].nunique() > 1:
            continue
        if len(peaks) > 1 and peaks.max() - peaks.min() > max(
            UNEVEN_REPEATS * peaks.median(), UNEVEN_BYTES
        ):
            yield (
                group,
                f"{peaks.min() / MIB:.4g} to {peaks.max() / MIB:.4g} MiB over {len(peaks)} repeats",
            )


@rule("same-memory-twice", "doubtful", "memory")
def same_memory_twice(evidence: Evidence) -> Iterator[Case]:
    """A strategy never has the same peak on a GPU, to the byte, with batches of two sizes: one is a copy."""
    seen: dict[tuple[Any, ...], Any] = {}
    for row in evidence.rows:
        peak, batch = row.peak_memory_bytes, row.per_worker_batch
        if row.device_kind != "cuda" or not peak > 0 or not batch > 0:
            continue
        other = seen.setdefault((row.experiment, row.strategy, row.model, peak), row)
        if other.per_worker_batch != batch:
            for one in (other, row):
                yield (
                    one,
                    f"{peak:.0f} bytes with batches of {other.per_worker_batch:.0f} and {batch:.0f}",
                )


@record_rule("contradictory-memory", "unusable", "memory")
def contradictory_memory(facts: Facts) -> Iterator[str]:
    """Memory of the record does not agree with itself, with the model's size, or with the device's: peaks,
    model states, capacity.
    """
    yield from faults_of_states(facts)
    yield from faults_of_peaks(facts)
    for worker in facts.workers:
        yield from unless_hold(facts, OWN, f"rank {worker['rank']}", worker=worker)
        yield from faults_of_samples(facts, worker)


def faults_of_states(facts: Facts) -> Iterator[str]:
    """Checks model states against the model's size; with sharding a rank holds at least the N-th part."""
    states, size = facts("memory.model_states"), facts.parameter_bytes
    trained = facts.trainable_bytes  # frozen parameters have neither gradients nor moments
    if not states or size is None or trained is None:
        return
    is_served = facts("strategy.kind") == "server"
    expected = {"parameters": size, "gradients": trained}
    adamw = facts("settings.optimizer") == "adamw"
    if adamw or facts("settings.momentum") is not None:
        # A moment is as large as the parameters: SGD with momentum has one, AdamW two, a served worker none.
        moments = 2 if adamw else bool(facts("settings.momentum"))
        kept = 0 if is_served else facts("strategy.traits.kept_copies")
        held, least = states.get("optimizer_bytes"), 0 if is_served else moments * trained
        if kept is None:
            parts = facts("strategy.traits.optimizer_parts") or facts.gpus
            what = "memory.model_states.optimizer_bytes"
            yield from unless(what, held, ">=", "its moments", least / parts, 1e-3)
        else:
            expected["optimizer"] = least + kept * trained
    for name, whole in expected.items():
        # AdamW keeps a step count of four bytes for each tensor.
        counts_bytes = STEP_COUNTS_BYTES if adamw and name == "optimizer" and not is_served else 0
        held, what = states.get(f"{name}_bytes"), f"memory.model_states.{name}_bytes"
        kind = "optimizer" if name == "optimizer" else "weight"
        parts = facts(f"strategy.traits.{kind}_parts")  # None: uneven or unknown
        is_padded = name == "optimizer" and bool(facts("strategy.traits.optimizer_padded"))
        if parts == 1 and not is_padded:
            formula = "what the whole model takes"
            if counts_bytes:
                yield from unless(what, held, ">=", formula, whole)
                yield from unless(
                    what, held, "<=", f"{formula} with counts of steps", whole + counts_bytes
                )
            else:
                yield from unless(what, held, "==", formula, whole)
            continue
        if parts is None:
            most, formula = whole + counts_bytes, "the whole of it"
        else:
            # Division may be along each tensor's first dimension, so small layers divide less evenly.
            most = PADDED * whole / parts + 4096 + counts_bytes
            formula = f"a part of {parts} of it, padded"
        least = parts or facts.gpus
        yield from unless(what, held, ">=", f"a part of {least} of it", whole / least, 1e-3)
        yield from unless(what, held, "<=", formula, most)
    if facts("model.batchnorm") is False:
        what, held = "memory.model_states.buffers_bytes", states.get("buffers_bytes")
        yield from unless(what, held, "<=", "a model without BatchNorm has", 0)


def faults_of_peaks(facts: Facts) -> Iterator[str]:
    """Checks that the cell's peak is the highest of its ranks, and holds its model states."""
    peak, method = facts("memory.peak_bytes"), facts("memory.method")
    peaks = [value_at(worker, "memory.peak_bytes") for worker in facts.workers]
    known = [value for value in peaks if value is not None]
    if facts.whole and peak is not None and len(known) < len(peaks):
        yield f"{len(peaks) - len(known)} workers have no peak_bytes, although the cell has one"
    most = max(known) if known and len(known) == len(peaks) else None
    worst = next((w for w in facts.workers if value_at(w, "memory.peak_bytes") == peak), None)
    yield from unless_hold(facts, PEAKS, most_of_workers=most, worst_rank=worst)
    for stage, entry in enumerate(facts("memory.stages") or ()):
        of_stage = [
            value
            for worker, value in zip(facts.workers, peaks, strict=True)
            if facts.mesh.place(worker["rank"]).stage == stage and value is not None
        ]
        what, most = f"the peak of stage {stage}", max(of_stage, default=None)
        yield from unless(what, entry["peak_bytes"], "==", "the most of its workers", most)
    states = facts("memory.model_states") or {}
    if facts("strategy.traits.states_on_host") and method == ALLOCATOR:
        states = {"buffers_bytes": states.get("buffers_bytes", 0)}
    if states:
        inputs = facts("model.input_shape") if method == ALLOCATOR else None
        # On a GPU at least a step's samples are beside them, of a byte for each value.
        beside = (facts("batch.samples_per_step") or 0) * math.prod(inputs) if inputs else 0
        yield from unless(
            "memory.peak_bytes",
            peak,
            ">=",
            "its model states and a step's samples" if beside else "its model states",
            sum(states.values()) + beside,
            0.0 if beside else ROUNDING,
        )
    if facts.status == "ok":
        yield from unless_given("memory.peak_bytes", peak, "although the cell ended well")
        yield from unless_given(
            "memory.model_states", facts("memory.model_states"), "although the cell ended well"
        )
    device = facts("provenance.device")
    if method is not None and device is not None and (method == ALLOCATOR) != (device == "cuda"):
        yield f"memory.method is {method} on a device of kind {device}"


def faults_of_samples(facts: Facts, worker: dict[str, Any]) -> Iterator[str]:
    """Checks a worker's peak against the samples: the allocator keeps what it once took."""
    kind, one = facts.series_of(worker)
    held = one and one.training.get(HELD[kind])
    if not held or held.count < SAMPLES or is_crowded(facts):
        return
    for name in ("peak_bytes", "nvml_used_bytes") if kind == "gpu" else ("peak_bytes",):
        value = value_at(worker["memory"], name)
        yield from unless(
            f"the memory of rank {worker['rank']} in the timeline",
            held.most,
            ">=",
            f"{SAMPLED[kind]:.0%} of its {name}",
            None if value is None else SAMPLED[kind] * value,
        )

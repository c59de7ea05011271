"""Rules on memory: reductions and peaks that what the cells computed does not explain."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stratbench.analysis.records.groups import GROUP, Group
from stratbench.cell.text.words import MIB, bytes_text
from stratbench.extensions.audit.rule import AuditData, Case, rows_of, rule

#: A reduction by more than this times the number of workers cannot come from sharding alone.
REDUCED = 1.05
#: The share by which the peaks of repeats on GPUs differ at most, and bytes: cuDNN may choose an
#: algorithm with another workspace, and allocates it in blocks.
UNEVEN_REPEATS, UNEVEN_BYTES = 0.05, 32 * MIB


@rule("memory-reduced-too-much", "warning", "memory")
def memory_reduced_too_much(evidence: AuditData) -> Iterator[Case]:
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
            if column == "peak_memory_bytes" and whole and held:  # cuBLAS's part is never sharded
                whole, held = (
                    n - (evidence.median(k, "cublas_bytes") or 0)
                    for n, k in ((whole, other), (held, group))
                )
            if not whole or not held or (on_cpu and column != "model_states_bytes"):
                continue
            if whole / held > REDUCED * group.gpus:
                sizes = f"{other.strategy} {bytes_text(whole)}, {group.strategy} {bytes_text(held)}"
                yield group, f"{name}: {sizes}: {whole / held:.2f} times on {group.gpus}"


@rule("oom-with-more-workers", "warning", "memory")
def oom_with_more_workers(evidence: AuditData) -> Iterator[Case]:
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


@rule("repeats-uneven-memory", "warning", "memory")
def repeats_uneven_memory(evidence: AuditData) -> Iterator[Case]:
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
                f"{bytes_text(peaks.min())} to {bytes_text(peaks.max())} over {len(peaks)} repeats",
            )

"""Rules of the audit on memory: reductions and peaks that the computation does not explain."""

from __future__ import annotations

import math
from collections.abc import Iterator

from stratbench.analysis.records.groups import GROUP, Group
from stratbench.cell.text.words import MIB, format_bytes
from stratbench.extensions.audit.rule import AuditData, Case, iter_table_rows, rule

#: Largest credible reduction of memory by sharding, as a multiple of the number of workers.
MAX_REDUCTION = 1.05
#: Largest tolerated difference between the peak memory of repeats: relative, and in bytes. In some repeats
#: cuDNN may choose an algorithm that needs more memory.
MAX_PEAK_DIFFERENCE_SHARE, MAX_PEAK_DIFFERENCE_BYTES = 0.05, 32 * MIB


@rule("memory-reduced-too-much", "warning", "memory")
def find_too_large_memory_reduction(evidence: AuditData) -> Iterator[Case]:
    """Memory is reduced more than sharding over the workers can explain: something else differs."""
    columns = {"model_states_bytes": "model states", "peak_memory_bytes": "peak memory"}
    for group, rows in evidence.groups.items():
        other = evidence.find_unsharded_rival(group)
        if other is None or evidence.get_common_value(group, "strategy_kind") == "server":
            continue  # a part of the model states is on parameter servers, not on workers
        # On CPUs only model states are compared, because the peak memory contains more than tensors.
        on_cpu = (rows["device_kind"] == "cpu").any()
        for column, name in columns.items():
            whole, held = (evidence.compute_median(k, column) for k in (other, group))
            # The workspace of cuBLAS is subtracted from both peaks, because it is never sharded.
            if column == "peak_memory_bytes" and whole and held:
                whole, held = (
                    n - (evidence.compute_median(k, "cublas_bytes") or 0)
                    for n, k in ((whole, other), (held, group))
                )
            if not whole or not held or (on_cpu and column != "model_states_bytes"):
                continue
            if whole / held > MAX_REDUCTION * group.gpus:
                sizes = (
                    f"{other.strategy} {format_bytes(whole)}, {group.strategy} {format_bytes(held)}"
                )
                yield group, f"{name}: {sizes}: {whole / held:.2f} times on {group.gpus}"


@rule("oom-with-more-workers", "warning", "memory")
def find_oom_with_more_workers(evidence: AuditData) -> Iterator[Case]:
    """The cell ran out of memory although it fits with fewer workers, where each has a larger part of the
    batch. Something else was in the GPU's memory.
    """
    failed = evidence.cells[
        evidence.cells["status"].eq("oom") & evidence.cells["device_kind"].eq("cuda")
    ]
    for row in iter_table_rows(failed.drop_duplicates(GROUP)):
        group = Group(row.experiment, row.strategy, row.model, row.gpus)
        # With weak scaling, fewer workers have a smaller global batch, and each worker needs no more
        # memory. Such groups are left out.
        fewer = [
            k
            for k in evidence.list_groups_with_any_worker_count(group)
            if k.gpus < row.gpus
            and not (evidence.compute_median(k, "global_batch") or math.inf) < row.global_batch
        ]
        if fewer:
            yield group, f"out of memory on {row.gpus}, but not on {fewer[-1].gpus}"


@rule("repeats-uneven-memory", "warning", "memory")
def find_uneven_memory_of_repeats(evidence: AuditData) -> Iterator[Case]:
    """The peaks of memory of a cell's repeats on GPUs differ, although they should be nearly equal. Look for
    different batches, different cuDNN algorithms, or a value that belongs to another cell.
    """
    for group, rows in evidence.groups.items():
        peaks = rows["peak_memory_bytes"].dropna()
        if rows["device_kind"].ne("cuda").any() or rows["device_name"].nunique() > 1:
            continue
        if len(peaks) > 1 and peaks.max() - peaks.min() > max(
            MAX_PEAK_DIFFERENCE_SHARE * peaks.median(), MAX_PEAK_DIFFERENCE_BYTES
        ):
            yield (
                group,
                f"{format_bytes(peaks.min())} to {format_bytes(peaks.max())} over {len(peaks)} repeats",
            )

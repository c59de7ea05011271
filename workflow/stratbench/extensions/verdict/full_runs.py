"""Audit rule: full runs and a verdict's blocks must give the same step time."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from stratbench.cell.record import Record
from stratbench.extensions.audit.rule import AuditData, Case, rule
from stratbench.extensions.verdict import blocks
from stratbench.extensions.verdict.block_rules import MAX_LOG_DEVIATION
from stratbench.extensions.verdict.blocks import ComparisonKey, PairedBlock, hash_trained_settings


@rule("full-run-against-steps", "warning", "time")
def find_full_runs_contradicting_blocks(evidence: AuditData) -> Iterator[Case]:
    """The time of a full run should be its number of steps times the step time in a verdict's blocks.

    It differs by more than 3 %. Possible causes: the device slows down over minutes, the input is too slow,
    other jobs use the node, or the segments are too short.
    """
    by_place: dict[ComparisonKey, list[PairedBlock]] = {}
    for block in () if evidence.study_dir is None else read_complete_blocks(evidence.study_dir):
        by_place.setdefault(block.comparison_key, []).append(block)
    for record in evidence.records:
        if record["status"] != "ok" or not record["time"]["train_time_s"]:
            continue
        logs = list_log_step_times_in_blocks(
            by_place.get(ComparisonKey.from_cell(record["cell"]), []), record
        )
        steps = count_trained_steps(record)
        if not logs or not steps:
            continue
        by_steps_s = steps * math.exp(statistics.fmean(logs))
        deviation = math.log(record["time"]["train_time_s"] / by_steps_s)
        if abs(deviation) > MAX_LOG_DEVIATION:
            yield (
                record["cell"],
                f"{record['time']['train_time_s']:.4g} s; {steps} steps of "
                f"{1e3 * by_steps_s / steps:.4g} ms in {len(logs)} blocks make {by_steps_s:.4g} s: "
                f"{math.expm1(deviation):+.1%}",
            )


def count_trained_steps(record: Record) -> int:
    """Return the number of steps that a cell trained."""
    steps = record["settings"].get("steps")
    return steps or record["batch"]["steps_per_epoch"] * len(record["time"]["epoch_times_s"])


def list_log_step_times_in_blocks(
    blocks_of_comparison: list[PairedBlock], record: Record
) -> list[float]:
    """Return the log step time of a record's strategy per block with equal settings.

    Blocks in which the strategy failed are left out.
    """
    if not blocks_of_comparison:
        return []
    strategy, trained = record["cell"]["strategy"], hash_trained_settings(record["settings"])
    logs = [
        block.compute_log_step_time(strategy)
        for block in blocks_of_comparison
        if block.settings_hashes.get(strategy) == trained
    ]
    return [log for log in logs if math.isfinite(log)]


def read_complete_blocks(study_dir: Path) -> list[PairedBlock]:
    """Read the complete blocks below the folder results/<study>.

    Unreadable blocks are left out, because the verdict reports them.
    """
    complete = []
    for path in blocks.list_block_files(study_dir.parent, study_dir.name):
        with contextlib.suppress(blocks.BlockError):
            complete.append(blocks.read_block(path))
    return complete

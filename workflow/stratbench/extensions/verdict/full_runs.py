"""Rules on full runs of strategies that a verdict timed, too: both must give the same time."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from stratbench.cell.record import Record
from stratbench.extensions.audit.rule import AuditData, Case, rule
from stratbench.extensions.verdict import blocks
from stratbench.extensions.verdict.block_rules import MAX_OFF
from stratbench.extensions.verdict.blocks import ComparisonKey, PairedBlock, trained_digest


@rule("full-run-against-steps", "warning", "time")
def full_run_against_steps(evidence: AuditData) -> Iterator[Case]:
    """A full run should take as long as its steps do in the blocks of the verdict. A difference of more than
    3 % means that one of them is no measure of the other: a device that heats up or slows down over minutes,
    input that runs dry, other load, or segments that are too short.
    """
    by_place: dict[ComparisonKey, list[PairedBlock]] = {}
    for block in () if evidence.study_dir is None else read_blocks(evidence.study_dir):
        by_place.setdefault(block.place, []).append(block)
    for record in evidence.records:
        if record["status"] != "ok" or not record["time"]["train_time_s"]:
            continue
        logs = logs_of_steps(by_place.get(ComparisonKey.of(record["cell"]), []), record)
        steps = steps_of(record)
        if not logs or not steps:
            continue
        by_steps_s = steps * math.exp(statistics.fmean(logs))
        deviation = math.log(record["time"]["train_time_s"] / by_steps_s)
        if abs(deviation) > MAX_OFF:
            yield (
                record["cell"],
                f"{record['time']['train_time_s']:.4g} s; {steps} steps of "
                f"{1e3 * by_steps_s / steps:.4g} ms in {len(logs)} blocks make {by_steps_s:.4g} s: "
                f"{math.expm1(deviation):+.1%}",
            )


def steps_of(record: Record) -> int:
    """Return the number of steps that a cell trained."""
    steps = record["settings"].get("steps")
    return steps or record["batch"]["steps_per_epoch"] * len(record["time"]["epoch_times_s"])


def logs_of_steps(timed: list[PairedBlock], record: Record) -> list[float]:
    """Return log step times of the record's cell in blocks with the same settings."""
    if not timed:
        return []
    strategy, trained = record["cell"]["strategy"], trained_digest(record["settings"])
    logs = [block.value(strategy) for block in timed if block.trained.get(strategy) == trained]
    return [log for log in logs if math.isfinite(log)]


def read_blocks(study_dir: Path) -> list[PairedBlock]:
    """The complete blocks of a verdict below results/<study>; unreadable ones are left to the verdict."""
    complete = []
    for path in blocks.block_files(study_dir.parent, study_dir.name):
        with contextlib.suppress(blocks.BlockError):
            complete.append(blocks.read_block(path))
    return complete

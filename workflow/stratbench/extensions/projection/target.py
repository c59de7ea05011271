"""Computes the fraction of a training until the target score, for other worker counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratbench.extensions.projection.evidence import ProjectionInputs


def compute_share_to_target(
    target: float | None, evidence: ProjectionInputs
) -> tuple[tuple[float, float] | None, str]:
    """Return the fraction of training time until the target score, as a range.

    The range applies to other worker counts if updates stay the same: with DDP's arithmetic and one global
    batch.

    Args:
        target: Target score, or None if the config has none.
        evidence: Measurements of the strategy.

    Returns:
        The minimum and maximum over records, or None and the reason why they are unknown.
    """
    if target is None:
        return None, ""
    records = [r for count in evidence.records_by_count for r in count]
    if evidence.scaling == "weak":
        return (
            None,
            "the global batch grows with the workers, so that the number of epochs may change",
        )
    if not all(r["strategy"]["traits"]["equals_ddp"] for r in records):
        return (
            None,
            "its updates depend on the number of workers, so that the number of epochs may change",
        )
    if any(r["task"].get("loss_adds_up") is False for r in records):
        return (
            None,
            "its loss depends on the number of workers, so that the number of epochs may change",
        )
    shares = [_compute_training_share(r, target) for r in records]
    if None in shares:
        return None, f"not all of its trainings reached {target:g}"
    return (min(shares), max(shares)), ""


def _compute_training_share(record: Mapping[str, Any], target: float) -> float | None:
    sign = 1 if record["task"]["better"] == "higher" else -1
    whole_s = record["time"]["train_time_s"]
    for epoch in record["score"]["per_epoch"]:
        if epoch["score"] is not None and sign * epoch["score"] >= sign * target:
            return epoch["train_time_s"] / whole_s if whole_s else None
    return None

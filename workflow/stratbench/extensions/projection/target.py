"""Computes the share of a training's time until the target score, for unmeasured worker counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stratbench.extensions.projection.evidence import ProjectionInputs


class TargetShare(NamedTuple):
    """Share of a training's time until the target score.

    Attributes:
        share_range: Minimum and maximum over records; None if unknown.
        unknown_reason: Reason for an unknown share, if the config has a target; else "".
    """

    share_range: tuple[float, float] | None
    unknown_reason: str


def compute_time_share_to_target_score(
    target_score: float | None, evidence: ProjectionInputs
) -> TargetShare:
    """Return the share of a training's time until the target score, over the strategy's records.

    The share applies to other worker counts only if these make the same updates: by DDP's arithmetic with the
    same global batch.

    Args:
        target_score: Target score, or None if the config has none.
        evidence: Measurements of the strategy.
    """
    if target_score is None:
        return TargetShare(None, "")
    records = [r for count in evidence.records_per_worker_count for r in count]
    if evidence.scaling == "weak":
        return TargetShare(
            None,
            "the global batch grows with the workers, so that the number of epochs may change",
        )
    if not all(r["strategy"]["traits"]["equals_ddp"] for r in records):
        return TargetShare(
            None,
            "its updates depend on the number of workers, so that the number of epochs may change",
        )
    if any(r["task"].get("loss_adds_up") is False for r in records):
        return TargetShare(
            None,
            "its loss depends on the number of workers, so that the number of epochs may change",
        )
    shares = [_compute_time_share_to_target(r, target_score) for r in records]
    known_shares = [share for share in shares if share is not None]
    if len(known_shares) < len(shares):
        return TargetShare(None, f"not all of its trainings reached {target_score:g}")
    return TargetShare((min(known_shares), max(known_shares)), "")


def _compute_time_share_to_target(record: Mapping[str, Any], target_score: float) -> float | None:
    sign = 1 if record["task"]["better"] == "higher" else -1
    whole_s = record["time"]["train_time_s"]
    for epoch in record["score"]["per_epoch"]:
        if epoch["score"] is not None and sign * epoch["score"] >= sign * target_score:
            return epoch["train_time_s"] / whole_s if whole_s else None
    return None

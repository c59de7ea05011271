"""Fraction of a training until the configured score, if it does not depend on the count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratbench.extensions.projection.evidence import ProjectionInputs


def share_to_target(
    target: float | None, evidence: ProjectionInputs
) -> tuple[tuple[float, float] | None, str]:
    """Return the range of the fraction of training time until the target, or why there is none.

    It holds on other counts if updates stay the same: with DDP's arithmetic and one global batch.
    """
    if target is None:
        return None, ""
    records = [r for count in evidence.records for r in count]
    if evidence.scaling == "weak":
        return None, "the global batch grows with the workers, and so may the epochs that it takes"
    if not all(r["strategy"]["traits"]["equals_ddp"] for r in records):
        return (
            None,
            "its updates depend on the number of workers, and so may the epochs that it takes",
        )
    if any(r["task"].get("loss_adds_up") is False for r in records):
        return (
            None,
            "its loss depends on the number of workers, and so may the epochs that it takes",
        )
    shares = [_share(r, target) for r in records]
    if None in shares:
        return None, f"not all of its trainings reached {target:g}"
    return (min(shares), max(shares)), ""


def _share(record: Mapping[str, Any], target: float) -> float | None:
    sign = 1 if record["task"]["better"] == "higher" else -1
    whole_s = record["time"]["train_time_s"]
    for epoch in record["score"]["per_epoch"]:
        if epoch["score"] is not None and sign * epoch["score"] >= sign * target:
            return epoch["train_time_s"] / whole_s if whole_s else None
    return None

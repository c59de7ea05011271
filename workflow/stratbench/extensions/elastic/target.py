"""Whether an evaluation reaches the score at which a training ends."""

from __future__ import annotations


def is_target_score_reached(
    score: float | None, target_score: float | None, higher_is_better: bool
) -> bool:
    """Return whether a score reaches the target score. False if one of them is None.

    Args:
        score: The score, if known.
        target_score: The target score, if there is one.
        higher_is_better: Whether a higher score is better.
    """
    if score is None or target_score is None:
        return False
    return score >= target_score if higher_is_better else score <= target_score

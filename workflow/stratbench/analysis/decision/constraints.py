"""The constraints of a decision: the `decide` block of config.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stratbench.analysis.records.score import Score
from stratbench.cell.text.words import format_count


@dataclass(frozen=True)
class Constraints:
    """The values of `decide` in config.yaml, with defaults filled in; None means no constraint."""

    #: The memory of one GPU that training may use.
    gpu_memory_gib: float | None = None
    #: The number of available GPUs; None for the measured numbers.
    gpus: int | None = None
    #: The only model to decide on; None for all measured models.
    model: str | None = None
    #: The maximum training time, for the number of epochs in the records.
    deadline_s: float | None = None
    #: The price of a GPU-hour; if set, candidates are ranked by cost instead of time.
    price_per_gpu_hour: float | None = None
    #: How much worse than the best a score may be, by the score's name, in the shown unit (points of
    #: accuracy). Scores that are not named here have the tolerance of their task.
    score_tolerance: Mapping[str, float] = field(default_factory=dict)
    #: The fraction by which two times (or costs) may differ and still count as equal.
    equivalence_margin: float = 0.03
    #: The memory to reserve beyond a measured peak, as a fraction of the peak (`cluster.memory_margin`).
    memory_margin: float = 0.1
    #: Whether the workers are equally fast.
    homogeneous: bool = True
    #: Whether all workers start together and stay until the end.
    gang_scheduled: bool = True
    #: Values of the keys that extensions add to `decide`, by the extension's name.
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, constraints_json: str) -> Constraints:
        """Return the constraints in a JSON object, with defaults for missing keys."""
        return cls(**json.loads(constraints_json))

    def find_score_tolerance(self, score: Score) -> float:
        """Return the tolerated distance of a score from the best score, in the shown unit."""
        return self.score_tolerance.get(score.name, score.tolerance)

    @property
    def ranking_criterion_text(self) -> str:
        """The criterion by which candidates are ranked, as text: `ranked by training time`."""
        if self.price_per_gpu_hour is None:
            return "ranked by training time"
        return f"ranked by cost at {self.price_per_gpu_hour:g} per GPU-hour"

    def iter_constraint_texts(self, other_criterion: str = "") -> Iterator[str]:
        """Yield a text for each constraint, including important defaults.

        Args:
            other_criterion: Text on the criterion of the ranking; `ranking_criterion_text` if empty.
        """
        if self.gpus is not None:
            yield f"at most {format_count(self.gpus, 'worker')}"
        if self.gpu_memory_gib is not None:
            reserve = (
                f", {100 * self.memory_margin:g} % kept in reserve" if self.memory_margin else ""
            )
            yield f"{self.gpu_memory_gib:g} GiB of memory each{reserve}"
        if self.deadline_s is not None:
            yield f"trained within {self.deadline_s:g} s"
        for name, most in self.score_tolerance.items():
            unit = f" {'point' if most == 1 else 'points'}" if name == "accuracy" else ""
            yield f"{name} at most {most:g}{unit} worse than the best"
        if not self.score_tolerance:
            yield "scores at most their task's tolerance worse than the best"
        yield f"strategies within {100 * self.equivalence_margin:g} % of each other are equals"
        yield "equally fast workers" if self.homogeneous else "workers of unequal speed"
        yield (
            "all workers present from start to end"
            if self.gang_scheduled
            else "workers that may join and leave"
        )
        yield other_criterion or self.ranking_criterion_text

"""The constraints of a decision: the `decide` block of config.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stratbench.analysis.records.score import Score
from stratbench.cell.text.words import counted


@dataclass(frozen=True)
class Constraints:
    """`decide` of config.yaml with defaults filled in; None means no constraint."""

    #: The memory of one GPU that training may use.
    gpu_memory_gib: float | None = None
    #: The number of GPUs at hand; None: the counts that were measured.
    gpus: int | None = None
    #: Only this model; None: each measured model.
    model: str | None = None
    #: The longest training time, for the epochs that the records trained.
    deadline_s: float | None = None
    #: The price; if set, candidates are ranked by cost instead of time.
    price_per_gpu_hour: float | None = None
    #: How much worse than the best strategy's a score may be, by the score's name, as shown (points of
    #: accuracy); a score that is not named here has its task's tolerance.
    score_tolerance: Mapping[str, float] = field(default_factory=dict)
    #: The share by which strategies may differ in time (or cost) and still count as equal.
    equivalence_margin: float = 0.03
    #: The reserve, as a fraction of a peak: `cluster.memory_margin`.
    memory_margin: float = 0.1
    #: Whether the workers are equally fast.
    homogeneous: bool = True
    #: Whether all workers start together and stay until the end.
    gang_scheduled: bool = True
    #: By extension, what the config gives for its keys of `decide`.
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Constraints:
        """Return the constraints in a JSON object with these keys; `{}` gives the defaults."""
        return cls(**json.loads(text))

    def tolerance_of(self, score: Score) -> float:
        """Return by how much a score may be worse, as shown."""
        return self.score_tolerance.get(score.name, score.tolerance)

    @property
    def ranking(self) -> str:
        """Text on the criterion of the ranking."""
        if self.price_per_gpu_hour is None:
            return "ranked by training time"
        return f"ranked by cost at {self.price_per_gpu_hour:g} per GPU-hour"

    def sentences(self, ranking: str = "") -> Iterator[str]:
        """Yield sentences on the constraints, including important defaults.

        `ranking` is the default text, to be shown, too.
        """
        if self.gpus is not None:
            yield f"at most {counted(self.gpus, 'worker')}"
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
            "all workers there from start to end"
            if self.gang_scheduled
            else ("workers that may come and go")
        )
        yield ranking or self.ranking

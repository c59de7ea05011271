"""Evidence from extensions in addition to the records: other times, or unmeasured worker counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratbench.analysis.decision.candidate import Candidate
    from stratbench.analysis.decision.constraints import Constraints
    from stratbench.analysis.records.groups import Group, Repeats

#: Experiment and model, for which one decision is made.
Question = tuple[str, str]


class Evidence:
    """Evidence of an extension; the methods are called in this order, and each is optional."""

    def measure(self, candidate: Candidate, groups: Repeats, group: Group) -> None:
        """Replace the times of a measured candidate, or exclude it.

        Args:
            candidate: The candidate, changed in place.
            groups: All repeats of the experiment and model.
            group: The repeats of the candidate.
        """

    def extend(
        self, question: Question, candidates: Sequence[Candidate], constraints: Constraints
    ) -> Iterable[Candidate]:
        """Yield candidates on unmeasured numbers of workers.

        Args:
            question: Experiment and model.
            candidates: Measured candidates.
            constraints: Constraints of the decision.
        """
        return ()

    def exclude(self, question: Question, candidates: Sequence[Candidate]) -> None:
        """Exclude candidates, after constraints and scores were applied."""

    def changes(self, question: Question, choice: Candidate) -> Iterable[str]:
        """Yield sentences on what would change the choice."""
        return ()

    def answer(self) -> Mapping[str, Any] | None:
        """Return a separate answer with `headline` and `lines` as texts, or None if not requested."""
        return None

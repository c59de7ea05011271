"""Defines evidence that extensions add to the records for decisions, such as projected times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratbench.analysis.decision.candidate import Candidate
    from stratbench.analysis.decision.constraints import Constraints
    from stratbench.analysis.records.groups import Group, Repeats

#: The experiment and the model for which a decision is made.
Question = tuple[str, str]


class Evidence:
    """Base class of an extension's evidence. All methods are optional, and called in this order."""

    def replace_measured_times(self, candidate: Candidate, groups: Repeats, group: Group) -> None:
        """Replace the training times of a measured candidate by other ones, or exclude the candidate.

        Args:
            candidate: The candidate, changed in place.
            groups: All repeats of the experiment and model.
            group: The repeats of the candidate.
        """

    def iter_unmeasured_candidates(
        self, question: Question, candidates: Sequence[Candidate], constraints: Constraints
    ) -> Iterable[Candidate]:
        """Yield candidates with numbers of workers that no record has measured.

        Args:
            question: Experiment and model.
            candidates: Measured candidates.
            constraints: Constraints of the decision.
        """
        return ()

    def exclude_candidates(self, question: Question, candidates: Sequence[Candidate]) -> None:
        """Exclude further candidates, after those that violate constraints or the score tolerance."""

    def iter_answer_changes(self, question: Question, choice: Candidate) -> Iterable[str]:
        """Yield sentences on what would change the choice."""
        return ()

    def build_separate_answer(self) -> Mapping[str, Any] | None:
        """Return an additional answer with texts `headline` and `lines`. None if not requested."""
        return None

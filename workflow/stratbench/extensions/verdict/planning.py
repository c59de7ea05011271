"""Has the plan say what a verdict would cost."""

from __future__ import annotations

from collections.abc import Iterator

from stratbench.extensions.plan.schedule import Plan, PlanAddition
from stratbench.extensions.verdict.verdict_cost import sentences_on_a_verdict


def ask_for_cost(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Yield the question on a verdict's cost, with its answer."""
    question = "What would a verdict by short paired blocks cost (`snakemake verdict`)?"
    yield question, list(sentences_on_a_verdict(plan))


ADDITION = PlanAddition(questions=ask_for_cost)

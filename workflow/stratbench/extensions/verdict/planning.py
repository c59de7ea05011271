"""Adds to the plan's page what a verdict would cost."""

from __future__ import annotations

from collections.abc import Iterator

from stratbench.extensions.plan.schedule import Plan, PlanAddition
from stratbench.extensions.verdict.verdict_cost import iter_cost_sentences


def answer_cost_question(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Yield the question what a verdict would cost, with the sentences that answer it."""
    question = "What would a verdict by short paired blocks cost (`snakemake verdict`)?"
    yield question, list(iter_cost_sentences(plan))


ADDITION = PlanAddition(questions=answer_cost_question)

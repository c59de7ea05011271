"""Adds the estimated cost of a verdict to the plan's page."""

from __future__ import annotations

from collections.abc import Iterator

from stratbench.extensions.plan.schedule import Plan, PlanAddition
from stratbench.extensions.verdict.verdict_cost import iter_verdict_cost_sentences


def answer_verdict_cost_question(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Yield the question of what a verdict costs, with the sentences that answer it."""
    question = "What would a verdict by short paired blocks cost (`snakemake verdict`)?"
    yield question, list(iter_verdict_cost_sentences(plan))


ADDITION = PlanAddition(questions=answer_verdict_cost_question)

"""Lets the plan use durations that are projected from a study's records."""

from __future__ import annotations

from stratbench.extensions.plan.schedule import PlanAddition
from stratbench.extensions.projection.study import project_trainings

ADDITION = PlanAddition(durations=project_trainings)

"""Adds training durations that are projected from a study's records to the plan."""

from __future__ import annotations

from stratbench.extensions.plan.schedule import PlanAddition
from stratbench.extensions.projection.study import project_trainings

ADDITION = PlanAddition(durations=project_trainings)

"""Adds training durations that are projected from a study's records to the plan."""

from __future__ import annotations

from stratbench.extensions.plan.schedule import PlanAddition
from stratbench.extensions.projection.study import project_training_durations

ADDITION = PlanAddition(durations=project_training_durations)

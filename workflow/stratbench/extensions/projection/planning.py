"""Has the plan take durations from the projection of a study's records."""

from __future__ import annotations

from stratbench.extensions.plan.schedule import PlanAddition
from stratbench.extensions.projection.study import projected_trainings

ADDITION = PlanAddition(durations=projected_trainings)

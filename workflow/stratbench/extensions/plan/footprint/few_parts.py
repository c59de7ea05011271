"""Extrapolates the footprint of a step with many micro-batches from steps with few.

Counts are linear in the number of parts. Memory is linear in the number of waiting micro-batches, and in
the size of the batch. Lines through traces of few parts therefore give the memory of many, if the same
moments are highest in all of them. Pipeline stages with equal work differ only in waiting micro-batches,
and share the traces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from stratbench.extensions.plan.footprint.drawn_out import (
    TraceMismatchError,
    make_footprint_from_few_blocks,
    repeat_added_entries,
    sum_weighted_numbers,
)
from stratbench.extensions.plan.footprint.footprint import (
    Affine,
    Footprint,
    make_footprint,
    trace_two_steps,
)
from stratbench.extensions.plan.footprint.request import MicrobatchCounts, Request
from stratbench.strategies import get_mesh
from stratbench.workload.users_code import ModelError

if TYPE_CHECKING:
    from stratbench.extensions.plan.footprint.equal_blocks import Blocks
    from stratbench.workload.network.trial import Trial

log = logging.getLogger(__name__)

#: Numbers of accumulated parts of the two steps that are traced in place of a step with more parts than both
#: together.
FEW, MORE = 3, 4
#: Pipeline schedules with one stage per worker. Their memory is linear in the number of micro-batches.
PLAIN_SCHEDULES = ("gpipe", "1f1b")
#: Type of a function that returns a stage's footprint for two numbers: micro-batches per step, and how many
#: of them wait for backward at once.
MakeStageFootprint = Callable[[int, int], Footprint]


def make_footprint_from_few_parts(
    request: Request, trial: Trial | None = None, blocks: Blocks | None = None
) -> Footprint:
    """Return a request's footprint, from traces with few parts of a batch if possible.

    The result equals that of `make_footprint`.

    Args:
        request: The request.
        trial: Trial of the model, by which the strategy may reject it; None skips that.
        blocks: Equal blocks of the model, if any.
    """
    make = partial(_make_footprint_from_few_microbatches, trial=trial, blocks=blocks)
    steps = request.gradient_accumulation_steps
    if steps > FEW + MORE:
        try:
            return extrapolate_gradient_accumulation(request, make)
        # The error is dropped, since the trace of all parts below either raises it again or succeeds.
        except (
            TraceMismatchError,
            ModelError,
        ):
            pass
        except Exception:
            log.exception("the step could not be extrapolated from few parts; all parts are traced")
    return make(request)


def extrapolate_gradient_accumulation(
    request: Request, make_footprint: Callable[[Request], Footprint]
) -> Footprint:
    """Extrapolate the footprint of a step to many accumulated parts of a batch.

    Raises:
        TraceMismatchError: If steps in few parts differ in more than numbers.
    """
    steps = request.gradient_accumulation_steps

    def make_footprint_of_parts(num_parts: int) -> Footprint:
        settings = replace(request.settings, gradient_accumulation_steps=num_parts)
        return make_footprint(replace(request, settings=settings))

    each = [make_footprint_of_parts(n) for n in (FEW, MORE)]
    parts = [request.num_accumulated_parts // steps * n for n in (FEW, MORE, steps)]
    return sum_weighted_footprints(each, parts, (FEW - steps + 1, steps - FEW))


def _make_footprint_from_few_microbatches(
    request: Request, trial: Trial | None, blocks: Blocks | None
) -> Footprint:
    mesh = get_mesh(request.strategy, dict(request.options), request.world_size)
    if mesh.stages == 1:
        return make_footprint_from_few_blocks(request, trial, blocks)
    if request.options.get("schedule") in PLAIN_SCHEDULES:
        try:
            return extrapolate_pipeline_microbatches(request, mesh.stages, trial)
        except (TraceMismatchError, ModelError):
            pass
        except Exception:
            log.exception("stages could not be extrapolated; all micro-batches are traced")
    return make_footprint(request, trial)


def extrapolate_pipeline_microbatches(
    request: Request, num_stages: int, trial: Trial | None = None
) -> Footprint:
    """Extrapolate the footprint of a pipeline from traces with few micro-batches.

    Raises:
        TraceMismatchError: If few micro-batches are not scheduled like many.
    """
    from stratbench.extensions.plan.footprint import fake

    strategy, units = fake.cut_model_into_stages(request, trial)
    # Stages of one kind have equal layers. The first stage differs, since it takes samples, and the last,
    # since it returns the loss.
    kinds = [(tuple(each), i == 0, i == num_stages - 1) for i, each in enumerate(units)]

    @cache
    def trace_stage_footprint(
        stage_kind: Any, microbatches: int, num_waiting_for_backward: int
    ) -> Footprint:
        turns = MicrobatchCounts(microbatches, num_waiting_for_backward)
        return trace_two_steps(
            request, kinds.index(stage_kind), trial, microbatch_counts=turns
        ).make_footprint()

    many, steps = request.options["microbatches"], request.gradient_accumulation_steps
    found = [
        extrapolate_stage_microbatches(partial(trace_stage_footprint, kind), many, waits, steps)
        for kind, waits in zip(
            kinds, strategy.count_pending_microbatches_by_stage(num_stages), strict=True
        )
    ]
    return replace(found[0], stage_footprints=found)


def extrapolate_stage_microbatches(
    make_stage_footprint: MakeStageFootprint,
    microbatches: int,
    num_waiting_for_backward: int,
    num_accumulated_parts: int = 1,
) -> Footprint:
    """Extrapolate the footprint of one pipeline stage to many micro-batches.

    Args:
        make_stage_footprint: Traces the stage with few micro-batches, some of which wait.
        microbatches: Number of micro-batches of a step.
        num_waiting_for_backward: Number of micro-batches that wait for their backward at once.
        num_accumulated_parts: Number of accumulated parts of a batch, each of `microbatches` micro-batches.
    """
    if microbatches <= FEW + 1:
        return make_stage_footprint(microbatches, num_waiting_for_backward)
    if 1 < num_waiting_for_backward < microbatches:
        few = [(4, 3), (3, 2), (4, 2)]
        weights = [
            num_waiting_for_backward - 2,
            4 - microbatches,
            microbatches - num_waiting_for_backward - 1,
        ]
    else:  # either one micro-batch waits at a time, or all of them do
        few = [(2, 1), (3, 1)] if num_waiting_for_backward == 1 else [(2, 2), (3, 3)]
        weights = [3 - microbatches, microbatches - 2]
    parts = [num_accumulated_parts * n for n in (*(n for n, _ in few), microbatches)]
    return sum_weighted_footprints([make_stage_footprint(*each) for each in few], parts, weights)


def sum_weighted_footprints(
    footprints: Sequence[Footprint], part_counts: Sequence[int], weights: Sequence[int]
) -> Footprint:
    """Extrapolate a step's footprint as a weighted sum of footprints with few parts.

    Args:
        footprints: The footprints; the last two differ only in the number of parts.
        part_counts: Number of parts of each footprint, and last of the result.
        weights: Weight of each footprint; the weights add up to one.

    Raises:
        TraceMismatchError: If the footprints have other moments or collectives.
    """
    if any(f.stage_footprints for f in footprints):
        alike = zip(*(f.stage_footprints for f in footprints), strict=True)
        stages = [sum_weighted_footprints(of_stage, part_counts, weights) for of_stage in alike]
        return replace(stages[0], stage_footprints=stages)
    of_parts = [
        _scale_bytes_per_sample(f, n) for f, n in zip(footprints, part_counts, strict=False)
    ]
    few, more = of_parts[-2:]
    further = (part_counts[-1] - part_counts[-2]) // (part_counts[-2] - part_counts[-3])
    collectives = extrapolate_collective_entries(few.collectives, more.collectives, further)
    plain = [replace(f, collectives=[]) for f in of_parts]
    drawn = replace(sum_weighted_numbers(plain, weights), collectives=collectives)
    return _scale_bytes_per_sample(drawn, 1 / part_counts[-1])


def extrapolate_collective_entries(
    few_collectives: Sequence[tuple[Any, ...]],
    more_collectives: Sequence[tuple[Any, ...]],
    num_further_parts: int,
) -> list[tuple[Any, ...]]:
    """Extrapolate a step's collectives to a batch that is divided into more parts.

    Args:
        few_collectives: Collectives of a step with few parts.
        more_collectives: Collectives of a step with more parts.
        num_further_parts: How often the difference of these two steps is added.

    Raises:
        TraceMismatchError: If collectives are not repeated from part to part.
    """
    a, b = (
        [tuple(map(_round_off_division_error, call)) for call in each]
        for each in (few_collectives, more_collectives)
    )
    return repeat_added_entries(a, b, num_further_parts)


def _round_off_division_error(value: Any) -> Any:
    """Remove the rounding error of a division from a number of bytes."""
    return round(value, 6) if isinstance(value, float) else value


def _scale_bytes_per_sample(footprint: Footprint, factor: float) -> Footprint:
    """Return the footprint with all its bytes per sample multiplied by a factor.

    Bytes per sample of a part become bytes per sample of a batch.
    """

    def scale_slope(line: Affine) -> Affine:
        return replace(line, per_sample=line.per_sample * factor)

    return replace(
        footprint,
        touched_bytes=scale_slope(footprint.touched_bytes),
        peak_moments=[
            replace(
                m,
                total_bytes=scale_slope(m.total_bytes),
                parts_bytes={part: scale_slope(line) for part, line in m.parts_bytes.items()},
                reduction_sums=m.reduction_sums
                and replace(
                    m.reduction_sums,
                    outputs=scale_slope(m.reduction_sums.outputs),
                    inputs=scale_slope(m.reduction_sums.inputs),
                ),
            )
            for m in footprint.peak_moments
        ],
        collectives=[
            (*c[:3], c[3] * factor, *c[4:]) if len(c) > 3 else c for c in footprint.collectives
        ],
    )

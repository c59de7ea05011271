"""Extrapolates the footprint of a step in many parts from steps in few parts.

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
    UnlikeError,
    make_footprint_by_blocks,
    sum_weighted_numbers,
)
from stratbench.extensions.plan.footprint.footprint import (
    Affine,
    Footprint,
    make_footprint,
    trace_two_steps,
)
from stratbench.extensions.plan.footprint.request import Request, Turns
from stratbench.strategies import get_mesh
from stratbench.workload.users_code import ModelError

if TYPE_CHECKING:
    from stratbench.extensions.plan.footprint.equal_blocks import Blocks
    from stratbench.workload.network.trial import Trial

log = logging.getLogger(__name__)

#: Number of accumulated parts of the two traced steps, which replace a step with more parts than both
#: together.
FEW, MORE = 3, 4
#: Schedules with one stage per worker, whose memory is linear in the micro-batches.
PLAIN_SCHEDULES = ("gpipe", "1f1b")
#: Returns a footprint for a number of micro-batches per step, and how many of them wait at once.
ByMicrobatches = Callable[[int, int], Footprint]


def make_footprint_by_few_parts(
    request: Request, trial: Trial | None = None, blocks: Blocks | None = None
) -> Footprint:
    """Return the footprint of a request, traced with few parts and blocks if possible.

    The result equals that of `make_footprint`.

    Args:
        request: The request.
        trial: Trial of the model, by which the strategy may reject it; None skips that.
        blocks: Equal blocks of the model, if any.
    """
    make = partial(_make_footprint_by_stages, trial=trial, blocks=blocks)
    steps = request.gradient_accumulation_steps
    if steps > FEW + MORE:
        try:
            return extrapolate_steps(request, make)
        # A trace of all parts raises the error again, or succeeds.
        except (
            UnlikeError,
            ModelError,
        ):
            pass
        except Exception:
            log.exception("the step could not be extrapolated from few parts; all parts are traced")
    return make(request)


def extrapolate_steps(request: Request, make: Callable[[Request], Footprint]) -> Footprint:
    """Return the footprint of a step in many accumulated parts.

    Raises:
        UnlikeError: If steps in few parts differ in more than numbers.
    """
    steps = request.gradient_accumulation_steps

    def make_for_parts(n: int) -> Footprint:
        settings = replace(request.settings, gradient_accumulation_steps=n)
        return make(replace(request, settings=settings))

    each = [make_for_parts(n) for n in (FEW, MORE)]
    parts = [request.num_accumulated_parts // steps * n for n in (FEW, MORE, steps)]
    return extrapolate_parts(each, parts, (FEW - steps + 1, steps - FEW))


def _make_footprint_by_stages(
    request: Request, trial: Trial | None, blocks: Blocks | None
) -> Footprint:
    mesh = get_mesh(request.strategy, dict(request.options), request.world_size)
    if mesh.stages == 1:
        return make_footprint_by_blocks(request, trial, blocks)
    if request.options.get("schedule") in PLAIN_SCHEDULES:
        try:
            return extrapolate_stages(request, mesh.stages, trial)
        except (UnlikeError, ModelError):
            pass
        except Exception:
            log.exception("stages could not be extrapolated; all micro-batches are traced")
    return make_footprint(request, trial)


def extrapolate_stages(request: Request, stages: int, trial: Trial | None = None) -> Footprint:
    """Return the footprint of a pipeline with `stages` stages, from few micro-batches.

    Raises:
        UnlikeError: If few micro-batches are not scheduled like many.
    """
    from stratbench.extensions.plan.footprint import fake

    strategy, units = fake.cut_into_stages(request, trial)
    # A kind is the work of a stage, and whether the stage takes samples or returns a loss.
    kinds = [(tuple(each), i == 0, i == stages - 1) for i, each in enumerate(units)]

    @cache
    def follow_stage(kind: Any, microbatches: int, waiting: int) -> Footprint:
        turns = Turns(microbatches, waiting)
        return trace_two_steps(request, kinds.index(kind), trial, turns=turns).make_footprint()

    many, steps = request.options["microbatches"], request.gradient_accumulation_steps
    found = [
        extrapolate_microbatches(partial(follow_stage, kind), many, waits, steps)
        for kind, waits in zip(kinds, strategy.count_pending_microbatches(stages), strict=True)
    ]
    return replace(found[0], stage_footprints=found)


def extrapolate_microbatches(
    followed: ByMicrobatches, microbatches: int, waiting: int, steps: int = 1
) -> Footprint:
    """Return the footprint of a stage with many micro-batches.

    Args:
        followed: Traces the stage with few micro-batches, some of which wait.
        microbatches: Number of micro-batches of a step.
        waiting: Number of micro-batches that wait for their backward at once.
        steps: Number of accumulated parts of a batch, each of `microbatches` micro-batches.
    """
    if microbatches <= FEW + 1:
        return followed(microbatches, waiting)
    if 1 < waiting < microbatches:
        few = [(4, 3), (3, 2), (4, 2)]
        weights = [waiting - 2, 4 - microbatches, microbatches - waiting - 1]
    else:  # each backward follows its forward, or all backwards follow all forwards
        few = [(2, 1), (3, 1)] if waiting == 1 else [(2, 2), (3, 3)]
        weights = [3 - microbatches, microbatches - 2]
    parts = [steps * n for n in (*(n for n, _ in few), microbatches)]
    return extrapolate_parts([followed(*each) for each in few], parts, weights)


def extrapolate_parts(
    each: Sequence[Footprint], parts: Sequence[int], weights: Sequence[int]
) -> Footprint:
    """Return the weighted sum of the footprints of steps in few parts.

    Args:
        each: The footprints; the last two differ only in the number of parts.
        parts: Number of parts of each footprint, and last of the result.
        weights: Weight of each footprint; the weights add up to one.

    Raises:
        UnlikeError: If the footprints have other moments or collectives.
    """
    if any(f.stage_footprints for f in each):
        alike = zip(*(f.stage_footprints for f in each), strict=True)
        stages = [extrapolate_parts(of_stage, parts, weights) for of_stage in alike]
        return replace(stages[0], stage_footprints=stages)
    of_parts = [_scale_lines(f, n) for f, n in zip(each, parts, strict=False)]
    few, more = of_parts[-2:]
    further = (parts[-1] - parts[-2]) // (parts[-2] - parts[-3])
    collectives = extrapolate_collective_entries(few.collectives, more.collectives, further)
    plain = [replace(f, collectives=[]) for f in of_parts]
    drawn = replace(sum_weighted_numbers(plain, weights), collectives=collectives)
    return _scale_lines(drawn, 1 / parts[-1])


def extrapolate_collective_entries(
    few: Sequence[tuple[Any, ...]], more: Sequence[tuple[Any, ...]], further: int
) -> list[tuple[Any, ...]]:
    """Return the collectives of a step with `further` more parts.

    Raises:
        UnlikeError: If collectives are not repeated from part to part.
    """
    a, b = ([tuple(map(_round_bytes, call)) for call in each] for each in (few, more))
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    added = len(b) - len(a)
    if added < 0 or b[same + added :] != a[same:]:
        raise UnlikeError("the collectives of both traces differ")
    return b[:same] + b[same : same + added] * (further + 1) + b[same + added :]


def _round_bytes(value: Any) -> Any:
    """Return a number of bytes without the rounding error of a division."""
    return round(value, 6) if isinstance(value, float) else value


def _scale_lines(f: Footprint, times: float) -> Footprint:
    """Return the footprint with the slope of each line over the batch multiplied by `times`.

    Lines per part of a batch become lines per batch.
    """

    def scale_line(line: Affine) -> Affine:
        return replace(line, per_sample=line.per_sample * times)

    return replace(
        f,
        touched_bytes=scale_line(f.touched_bytes),
        peak_moments=[
            replace(
                m,
                total_bytes=scale_line(m.total_bytes),
                parts_bytes={part: scale_line(line) for part, line in m.parts_bytes.items()},
                reduction_sums=m.reduction_sums
                and replace(
                    m.reduction_sums,
                    outputs=scale_line(m.reduction_sums.outputs),
                    inputs=scale_line(m.reduction_sums.inputs),
                ),
            )
            for m in f.peak_moments
        ],
        collectives=[(*c[:3], c[3] * times, *c[4:]) if len(c) > 3 else c for c in f.collectives],
    )

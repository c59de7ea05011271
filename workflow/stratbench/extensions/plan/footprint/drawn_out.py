"""Extrapolates the footprint of a model with many equal blocks from a few traced blocks.

Counts are linear in the number of blocks. Memory is not, since its peak is the maximum of many moments. So
the moments are matched, by the marks of blocks in a trace. The first blocks are matched from the start, the
last ones from the end. Each pair gives a line, and the highest line is the peak.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from stratbench.extensions.plan.footprint.footprint import (
    Affine,
    Followed,
    Footprint,
    MemoryPeak,
    Moment,
    Sums,
    drop_zeros,
    find_upper_envelope,
    list_reductions,
    make_footprint,
    trace_two_steps,
)
from stratbench.strategies import get_mesh
from stratbench.telemetry.collectives import CollectiveCall

if TYPE_CHECKING:
    from stratbench.extensions.plan.footprint.equal_blocks import Blocks
    from stratbench.extensions.plan.footprint.request import Request
    from stratbench.extensions.plan.footprint.trace import OperatorTrace
    from stratbench.workload.network.trial import Trial

log = logging.getLogger(__name__)

#: Number of blocks of the two traced networks. The second has an additional block in the middle, which is
#: repeated.
FEW, MORE = 5, 6
#: Number of blocks that are counted from the start; the others are counted from the end.
FROM_START = 2


def make_footprint_by_blocks(
    request: Request, trial: Trial | None, blocks: Blocks | None
) -> Footprint:
    """Return the footprint of a request, traced with few equal blocks if possible.

    The result equals that of `make_footprint`.

    Args:
        request: The request.
        trial: Trial of the request's model.
        blocks: Equal blocks of the model, if any.
    """
    mesh = get_mesh(request.strategy, dict(request.options), request.world_size)
    # With checkpointing `every-N`, the few blocks might not include one that is computed again.
    is_uniform = not str(request.settings.activation_checkpointing).startswith("every-")
    if blocks is not None and mesh.stages == 1 and is_uniform:
        try:
            return extrapolate_footprint(partial(trace_two_steps, request, 0, trial), blocks)
        except UnlikeError:
            pass
        except Exception:
            log.exception("the footprint could not be extrapolated; all blocks are traced")
    return make_footprint(request, trial)


def extrapolate_footprint(follow: Callable[..., Followed], blocks: Blocks) -> Footprint:
    """Return the footprint of a model with equal `blocks`, of which only few are traced.

    Args:
        follow: Traces the model with a number of its blocks, its keyword `blocks`.
        blocks: All blocks.

    Raises:
        UnlikeError: If the blocks are not called equally, so that all must be traced.
    """
    try:
        few, more = (follow(blocks=blocks._replace(count=n)) for n in (FEW, MORE))
    except Exception as error:  # a trace of all blocks may succeed, or gives a better error
        raise UnlikeError("the model fails with fewer blocks") from error
    if few.other_moments or more.other_moments:
        raise UnlikeError("the training has several kinds of steps")
    further, parts = blocks.count - MORE, few.parts
    both = (few, more)
    phases = len(more.step_phases[0])
    steps = [[_split_step(f, 1 + i * phases, 1 + (i + 1) * phases) for i in (0, 1)] for f in both]
    for f, each in zip(both, steps, strict=True):
        if each[0] != each[1] or len(f.step_phases[0]) != phases:
            raise UnlikeError("the steps with two batch sizes differ in their marks")
    (a, _), (b, _) = steps
    lives = few.live_bytes_by_batch, more.live_bytes_by_batch
    check_blocks_are_equal(b, lives[1], more.collective_calls)
    footprints = few.make_footprint(), more.make_footprint()
    pairs = match_segments(a, b)
    candidates = [(i, j, None) for x, y in pairs for i, j in zip(x.moments, y.moments, strict=True)]
    sums = [_list_reductions_in_order(f, parts) for f in both]
    for x, y in pairs:
        for i, j in zip(range(*x.reduction_range), range(*y.reduction_range), strict=True):
            if sums[0][i][1] != sums[1][j][1]:
                raise UnlikeError("the reductions of both traces differ")
            candidates.append((sums[0][i][0], sums[1][j][0], sums[1][j][1]))
    evaluation = _extrapolate_evaluation(both, 1 + 2 * phases, further)
    flops = extrapolate_numbers(few.forward_flops, more.forward_flops, further)
    counted = extrapolate_numbers(
        few.counted_flops_per_sample, more.counted_flops_per_sample, further
    )
    plain = [
        replace(f, peak_moments=[], evaluation_peak=evaluation, collectives=[], attention_share=0.0)
        for f in footprints
    ]
    return replace(
        extrapolate_numbers(plain[0], plain[1], further),
        peak_moments=_extrapolate_moments(both, lives, candidates, further),
        evaluation_peak=evaluation,
        collectives=[
            c.as_tuple
            for c in extrapolate_collectives(
                a, b, (few.collective_calls, more.collective_calls), further
            )
        ],
        training_flops_per_sample=more.compute_training_flops(counted, flops[0]),
        attention_share=flops[1] / flops[0] if flops[0] else 0.0,
    )


def _split_step(followed: Followed, first: int, stop: int) -> list[EventSegment]:
    return split_into_segments(followed.trace, followed.blocks.count, first, stop)


def _list_reductions_in_order(followed: Followed, parts: int) -> list[tuple[int, Sums]]:
    """Return a step's reductions in order, each with the number of events before it."""
    by_sums = list_reductions(followed.step_phases, followed.event_edges, parts)
    return sorted(((at, sums) for sums, each in by_sums.items() for at in each), key=itemgetter(0))


def _extrapolate_moments(
    both: tuple[Followed, Followed],
    lives: Sequence[Sequence[Sequence[int]]],
    candidates: Sequence[tuple[int, int, Sums | None]],
    further: int,
) -> list[Moment]:
    """Return the moments that may be a step's peak for some batch."""
    parts = both[0].parts

    def fit_line(i: int, j: int) -> Affine:
        pair = (
            extrapolate_numbers(few[i], more[j], further) for few, more in zip(*lives, strict=True)
        )
        return Affine.from_two_values(tuple(pair), parts)

    moments = []
    for kind in dict.fromkeys(sums for _, _, sums in candidates):
        same_kind = [(i, j) for i, j, sums in candidates if sums == kind]
        lines = [fit_line(i, j) for i, j in same_kind]
        for number in find_upper_envelope(lines, parts):
            at = same_kind[number]
            held = [
                extrapolate_numbers(
                    *(
                        f.trace.get_device_bytes_by_purpose(f.event_edges[batch] + n)
                        for f, n in zip(both, at, strict=True)
                    ),
                    further,
                )
                for batch in (0, 1)
            ]
            used = {k: Affine.from_two_values((held[0][k], held[1][k]), parts) for k in held[0]}
            phase = both[1].trace.get_phase_of_event(both[1].event_edges[1] + max(at[1] - 1, 0))
            used = {k: v for k, v in used.items() if v.fixed or v.per_sample}
            moments.append(Moment(phase, lines[number], used, kind))
    return moments


def _extrapolate_evaluation(
    both: tuple[Followed, Followed], first: int, further: int
) -> MemoryPeak:
    """Return the peak of the evaluation, which has a single batch."""
    a, b = (_split_step(f, first, first + 1) for f in both)
    start = [f.event_edges[2] for f in both]
    lives = [
        f.trace.list_live_bytes(at, len(f.trace.events)) for f, at in zip(both, start, strict=True)
    ]
    best, where = -1, (0, 0)
    for x, y in match_segments(a, b):
        for i, j in zip(x.moments, y.moments, strict=True):
            n_bytes = extrapolate_numbers(lives[0][i], lives[1][j], further)
            if n_bytes > best:
                best, where = n_bytes, (i, j)
    held = [
        f.trace.get_device_bytes_by_purpose(at + n)
        for f, at, n in zip(both, start, where, strict=True)
    ]
    return MemoryPeak(best, "evaluation", drop_zeros(extrapolate_numbers(*held, further)))


class UnlikeError(Exception):
    """Two traces do not match, so that all blocks have to be traced."""


@dataclass(frozen=True)
class EventSegment:
    """Events of a traced step between two marks.

    Attributes:
        key: The mark's label, its block's number from the start or (negative) from the end, and how
            often this mark occurred before.
        moments: Numbers of events since the step's start after which memory may be highest.
        collective_range: Index of the first of its collectives in the step, and of the first one after it.
        reduction_range: Index of the first of its reductions, and of the first one after it.
    """

    key: tuple[Any, ...]
    moments: list[int]
    collective_range: tuple[int, int]
    reduction_range: tuple[int, int]

    @property
    def block(self) -> int | None:
        """Number of the segment's block; None between blocks."""
        return self.key[1]

    @property
    def is_middle(self) -> bool:
        """Whether the segment belongs to the additional block of the longer trace."""
        return self.block == FROM_START - MORE


def split_into_segments(
    trace: OperatorTrace, blocks: int, first: int, stop: int
) -> list[EventSegment]:
    """Return the segments of a traced step, between the trace's marks.

    Args:
        trace: The trace with its marks.
        blocks: Number of blocks of the traced network.
        first: Number of the step's first phase in the trace.
        stop: Number of the first phase after it; the number of phases for the last step.
    """
    starts = [i for i, mark in enumerate(trace.marks) if mark.label == "phase"]
    end = trace.make_mark()
    marks = trace.marks[starts[first - 1] : starts[stop - 1] if stop <= len(starts) else None]
    after = trace.marks[starts[stop - 1]] if stop <= len(starts) else end
    begin = marks[0]
    seen: dict[tuple[Any, ...], int] = {}
    segments = []
    for mark, following in zip(marks, [*marks[1:], after], strict=True):
        block = mark.block
        if block is not None and block >= FROM_START:
            block -= blocks
        occurrence = seen[mark.label, block] = seen.get((mark.label, block), -1) + 1
        allocations = [
            i + 1 - begin.events
            for i in range(mark.events, following.events)
            if trace.events[i][1] > 0
        ]
        segments.append(
            EventSegment(
                (mark.label, block, occurrence),
                [mark.events - begin.events, *allocations],
                (mark.calls - begin.calls, following.calls - begin.calls),
                (mark.sums - begin.sums, following.sums - begin.sums),
            )
        )
    return segments


def match_segments(
    few: Sequence[EventSegment], more: Sequence[EventSegment]
) -> list[tuple[EventSegment, EventSegment]]:
    """Return pairs of matching segments of a longer and a shorter model.

    The longer model's additional block in the middle is left out.

    Raises:
        UnlikeError: If the segments do not match.
    """
    rest = [s for s in more if not s.is_middle]
    if [s.key for s in few] != [s.key for s in rest]:
        raise UnlikeError("the marks of both traces differ")
    pairs = list(zip(few, rest, strict=True))
    for a, b in pairs:
        if len(a.moments) != len(b.moments) or _count_items(a.reduction_range) != _count_items(
            b.reduction_range
        ):
            raise UnlikeError(f"the numbers of events after mark {a.key} differ")
    return pairs


def check_blocks_are_equal(
    segments: Sequence[EventSegment],
    lives: Sequence[Sequence[int]],
    calls: Sequence[CollectiveCall],
) -> None:
    """Raise UnlikeError if a block differs from its neighbours.

    Args:
        segments: Segments of a step of the longer trace.
        lives: Bytes after each event of the step, for each batch.
        calls: Collectives of the step.
    """
    middle = FROM_START - MORE
    inner = (middle, middle + 1, middle + 2)
    by_key = {s.key: s for s in segments}
    some_calls = any(
        s.collective_range[1] > s.collective_range[0] for s in segments if s.key[0] == "backward"
    )
    for label, block, occurrence in by_key:
        if block != middle:
            continue
        three = [by_key.get((label, i, occurrence)) for i in inner]
        if None in three or len({len(s.moments) for s in three}) > 1:
            raise UnlikeError(f"neighbouring blocks differ in events at {label}")
        for live in lives:
            for x, y, z in zip(*(s.moments for s in three), strict=True):
                if live[z] - live[y] != live[y] - live[x]:
                    raise UnlikeError(f"neighbouring blocks differ in memory at {label}")
        each = [[calls[i] for i in range(*s.collective_range)] for s in three]
        if each[0] != each[1] or each[1] != each[2]:
            raise UnlikeError(f"neighbouring blocks differ in collectives at {label}")
        # Buckets that a single block does not fill end at other places in each block.
        if label == "backward" and some_calls and not each[0]:
            raise UnlikeError("a bucket holds gradients of several blocks")


def extrapolate_collectives(
    few: Sequence[EventSegment],
    more: Sequence[EventSegment],
    calls: tuple[Sequence[CollectiveCall], Sequence[CollectiveCall]],
    further: int,
) -> list[CollectiveCall]:
    """Return the collectives of a step with `further` more blocks than the longer trace.

    Args:
        few: Segments of the shorter trace.
        more: Segments of the longer trace.
        calls: Collectives of both traces.
        further: Number of further blocks.
    """
    by_key = {s.key: s for s in few}
    drawn: list[CollectiveCall] = []
    for is_middle, run in groupby(more, key=lambda s: s.is_middle):
        segments = list(run)
        if is_middle:
            first, stop = segments[0].collective_range[0], segments[-1].collective_range[1]
            drawn += list(calls[1][first:stop]) * (further + 1)
            continue
        for s in segments:
            a, b = (
                calls[0][slice(*by_key[s.key].collective_range)],
                calls[1][slice(*s.collective_range)],
            )
            drawn += _extrapolate_segment_collectives(a, b, further)
    return drawn


def _extrapolate_segment_collectives(
    a: Sequence[CollectiveCall], b: Sequence[CollectiveCall], further: int
) -> Iterator[CollectiveCall]:
    if len(a) == len(b):
        for x, y in zip(a, b, strict=True):
            if replace(x, n_bytes=0, bytes_per_sample=0) != replace(
                y, n_bytes=0, bytes_per_sample=0
            ):
                raise UnlikeError("the collectives of both traces differ")
            n_bytes, sample_bytes = extrapolate_numbers(
                (x.n_bytes, x.bytes_per_sample), (y.n_bytes, y.bytes_per_sample), further
            )
            yield replace(y, n_bytes=n_bytes, bytes_per_sample=sample_bytes)
        return
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    added = len(b) - len(a)
    if added < 0 or list(b[same + added :]) != list(a[same:]):
        raise UnlikeError("the collectives of both traces differ")
    yield from b[:same]
    yield from list(b[same : same + added]) * (further + 1)
    yield from b[same + added :]


def extrapolate_numbers(few: Any, more: Any, further: int) -> Any:
    """Return numbers extrapolated to `further` more blocks than in the longer trace.

    Numbers may be in dicts, tuples and dataclasses; all other values must be equal.

    Args:
        few: Values of the shorter trace.
        more: Values of the longer trace.
        further: Number of further blocks.
    """
    return sum_weighted_numbers((few, more), (-further, 1 + further))


def sum_weighted_numbers(each: Sequence[Any], weights: Sequence[int]) -> Any:
    """Return the sum of weighted numbers, which may be in dicts, tuples and dataclasses.

    Args:
        each: Values that are equal except for their numbers.
        weights: A weight for each value; the weights add up to one.

    Raises:
        UnlikeError: If the values differ in more than their numbers.
    """
    *others, last = each
    if any(type(x) is not type(last) and not isinstance(x, int | float) for x in others):
        raise UnlikeError("footprints of few and of more blocks have values of different types")
    if isinstance(last, bool | str) or last is None:
        if any(x != last for x in others):
            raise UnlikeError("values to combine differ in more than numbers")
        return last
    if isinstance(last, int | float):
        return last + sum((x - last) * w for x, w in zip(others, weights, strict=False))
    if isinstance(last, dict):
        keys = dict.fromkeys(key for x in each for key in x)
        return {k: sum_weighted_numbers([x.get(k, 0) for x in each], weights) for k in keys}
    if is_dataclass(last):
        names = [f.name for f in fields(last)]
        return replace(
            last, **{n: sum_weighted_numbers([getattr(x, n) for x in each], weights) for n in names}
        )
    if any(len(x) != len(last) for x in others):
        raise UnlikeError("values to combine have different lengths")
    return type(last)(sum_weighted_numbers(numbers, weights) for numbers in zip(*each, strict=True))


def _count_items(ends: tuple[int, int]) -> int:
    return ends[1] - ends[0]

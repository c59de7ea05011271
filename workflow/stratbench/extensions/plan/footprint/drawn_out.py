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
    Footprint,
    MemoryPeak,
    Moment,
    ReductionSize,
    TracedSteps,
    drop_purposes_without_bytes,
    find_highest_line_indices,
    make_footprint,
    trace_two_steps,
)
from stratbench.strategies import get_mesh
from stratbench.telemetry.collectives import CollectiveCall

if TYPE_CHECKING:
    from stratbench.extensions.plan.footprint.equal_blocks import Blocks
    from stratbench.extensions.plan.footprint.request import Request
    from stratbench.workload.network.trial import Trial

log = logging.getLogger(__name__)

#: Numbers of blocks of the two traced models. The second model has one more block in its middle, which stands
#: for all blocks that are left out.
FEW, MORE = 5, 6
#: Number of first blocks, which are matched by their number from the start. All other blocks are matched by
#: their number from the end.
FROM_START = 2
#: Numbers of events of the shorter and of the longer trace up to a possible peak, and its reduction, if any.
PossiblePeak = tuple[int, int, ReductionSize | None]


def make_footprint_from_few_blocks(
    request: Request, trial: Trial | None, blocks: Blocks | None
) -> Footprint:
    """Return a request's footprint, from traces with few of the equal blocks if possible.

    The result equals that of `make_footprint`.

    Args:
        request: The request.
        trial: Trial of the request's model.
        blocks: Equal blocks of the model, if any.
    """
    mesh = get_mesh(request.strategy, dict(request.options), request.world_size)
    # With checkpointing `every-N`, blocks are not equal: backward computes only some of them again.
    is_uniform = not str(request.settings.activation_checkpointing).startswith("every-")
    if blocks is not None and mesh.stages == 1 and is_uniform:
        try:
            return extrapolate_footprint_to_all_blocks(
                partial(trace_two_steps, request, 0, trial), blocks
            )
        except TraceMismatchError:
            pass
        except Exception:
            log.exception("the footprint could not be extrapolated; all blocks are traced")
    return make_footprint(request, trial)


def extrapolate_footprint_to_all_blocks(
    trace_blocks: Callable[..., TracedSteps], blocks: Blocks
) -> Footprint:
    """Return the footprint of a model with many equal blocks, from traces with few.

    Args:
        trace_blocks: Traces the model with a number of its blocks, its keyword `blocks`.
        blocks: All blocks.

    Raises:
        TraceMismatchError: If the blocks are not called equally, so that all must be traced.
    """
    try:
        few, more = (trace_blocks(blocks=blocks._replace(count=n)) for n in (FEW, MORE))
    except Exception as error:  # the trace of all blocks may succeed
        raise TraceMismatchError("the model cannot be traced with fewer blocks") from error
    if few.moments_of_other_steps or more.moments_of_other_steps:
        raise TraceMismatchError(
            "blocks are not extrapolated, since the training has several kinds of steps"
        )
    further, both = blocks.count - MORE, (few, more)
    phases = len(more.phases_of_both_steps[0])
    steps = [
        [split_trace_into_segments(f, 1 + i * phases, 1 + (i + 1) * phases) for i in (0, 1)]
        for f in both
    ]
    for f, each in zip(both, steps, strict=True):
        if each[0] != each[1] or len(f.phases_of_both_steps[0]) != phases:
            raise TraceMismatchError("the traced steps of the two batch sizes have different marks")
    (a, _), (b, _) = steps
    lives = few.live_bytes_of_both_steps, more.live_bytes_of_both_steps
    check_blocks_are_equal(b, lives[1], more.collectives_of_step)
    footprints = few.make_footprint(), more.make_footprint()
    pairs = pair_matching_segments(a, b)
    candidates = [(i, j, None) for x, y in pairs for i, j in zip(x.moments, y.moments, strict=True)]
    sums = [_list_reduction_positions_and_sizes(f) for f in both]
    for x, y in pairs:
        for i, j in zip(range(*x.reduction_range), range(*y.reduction_range), strict=True):
            if sums[0][i][1] != sums[1][j][1]:
                raise TraceMismatchError(
                    "the traces with few and with more blocks have different reductions"
                )
            candidates.append((sums[0][i][0], sums[1][j][0], sums[1][j][1]))
    evaluation = _extrapolate_evaluation_peak(both, 1 + 2 * phases, further)
    flops = extrapolate_numbers(
        few.forward_and_attention_flops, more.forward_and_attention_flops, further
    )
    counted = extrapolate_numbers(few.model_flops_per_sample, more.model_flops_per_sample, further)
    plain = [
        replace(f, peak_moments=[], evaluation_peak=evaluation, collectives=[], attention_share=0.0)
        for f in footprints
    ]
    return replace(
        extrapolate_numbers(plain[0], plain[1], further),
        peak_moments=_extrapolate_peak_moments(both, lives, candidates, further),
        evaluation_peak=evaluation,
        collectives=[
            c.as_tuple
            for c in extrapolate_collectives(
                a, b, (few.collectives_of_step, more.collectives_of_step), further
            )
        ],
        training_flops_per_sample=more.compute_rank_training_flops(counted, flops[0]),
        attention_share=flops[1] / flops[0] if flops[0] else 0.0,
    )


def _list_reduction_positions_and_sizes(
    traced_steps: TracedSteps,
) -> list[tuple[int, ReductionSize]]:
    """Return the position and the size of each CUDA reduction of a step."""
    by_sums = traced_steps.list_positions_by_reduction_size()
    return sorted(((at, sums) for sums, each in by_sums.items() for at in each), key=itemgetter(0))


def _extrapolate_peak_moments(
    both_traces: tuple[TracedSteps, TracedSteps],
    live_bytes: Sequence[Sequence[Sequence[int]]],
    possible_peaks: Sequence[PossiblePeak],
    num_further_blocks: int,
) -> list[Moment]:
    """Return the moments of a step at which memory may peak for some batch size."""
    parts = both_traces[0].parts

    def extrapolate_bytes_line(few_events: int, more_events: int) -> Affine:
        pair = (
            extrapolate_numbers(few[few_events], more[more_events], num_further_blocks)
            for few, more in zip(*live_bytes, strict=True)
        )
        return Affine.fit_two_values(tuple(pair), parts)

    moments = []
    for kind in dict.fromkeys(sums for _, _, sums in possible_peaks):
        same_kind = [(i, j) for i, j, sums in possible_peaks if sums == kind]
        lines = [extrapolate_bytes_line(i, j) for i, j in same_kind]
        for number in find_highest_line_indices(lines, parts):
            at = same_kind[number]
            held = [
                extrapolate_numbers(
                    *(
                        f.trace.get_device_bytes_by_purpose(f.first_event_numbers[batch] + n)
                        for f, n in zip(both_traces, at, strict=True)
                    ),
                    num_further_blocks,
                )
                for batch in (0, 1)
            ]
            moments.append(both_traces[1].make_moment(lines[number], held, at[1], kind))
    return moments


def _extrapolate_evaluation_peak(
    both_traces: tuple[TracedSteps, TracedSteps], first_phase: int, num_further_blocks: int
) -> MemoryPeak:
    """Extrapolate the peak memory of an evaluation to all blocks of the model.

    An evaluation has a single batch size.
    """
    a, b = (split_trace_into_segments(f, first_phase, first_phase + 1) for f in both_traces)
    start = [f.first_event_numbers[2] for f in both_traces]
    lives = [
        f.trace.list_live_bytes_after_events(at, len(f.trace.events))
        for f, at in zip(both_traces, start, strict=True)
    ]
    best, where = -1, (0, 0)
    for x, y in pair_matching_segments(a, b):
        for i, j in zip(x.moments, y.moments, strict=True):
            n_bytes = extrapolate_numbers(lives[0][i], lives[1][j], num_further_blocks)
            if n_bytes > best:
                best, where = n_bytes, (i, j)
    held = [
        f.trace.get_device_bytes_by_purpose(at + n)
        for f, at, n in zip(both_traces, start, where, strict=True)
    ]
    return MemoryPeak(
        best,
        "evaluation",
        drop_purposes_without_bytes(extrapolate_numbers(*held, num_further_blocks)),
    )


class TraceMismatchError(Exception):
    """Two traces do not match, so that all blocks have to be traced."""


@dataclass(frozen=True)
class EventSegment:
    """Events of a traced step between two marks, such as the start and end of a block.

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
        """Number of the block to which the segment belongs; None between blocks."""
        return self.key[1]

    @property
    def is_in_added_block(self) -> bool:
        """Whether the segment belongs to the block that only the longer trace has."""
        return self.block == FROM_START - MORE


def split_trace_into_segments(
    traced_steps: TracedSteps, first_phase: int, stop_phase: int
) -> list[EventSegment]:
    """Return the segments of a traced step: the events between neighbouring marks.

    Args:
        traced_steps: The steps, traced with few blocks.
        first_phase: Number of the step's first phase in the trace.
        stop_phase: Number of the first phase after it; the number of phases for the last step.
    """
    trace = traced_steps.trace
    starts = [i for i, mark in enumerate(trace.marks) if mark.label == "phase"]
    end = trace.make_mark()
    marks = trace.marks[
        starts[first_phase - 1] : starts[stop_phase - 1] if stop_phase <= len(starts) else None
    ]
    after = trace.marks[starts[stop_phase - 1]] if stop_phase <= len(starts) else end
    begin = marks[0]
    seen: dict[tuple[Any, ...], int] = {}
    segments = []
    for mark, following in zip(marks, [*marks[1:], after], strict=True):
        block = mark.block
        if block is not None and block >= FROM_START:
            block -= traced_steps.blocks.count
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


def pair_matching_segments(
    few_segments: Sequence[EventSegment], more_segments: Sequence[EventSegment]
) -> list[tuple[EventSegment, EventSegment]]:
    """Pair the segments of a trace with those of a trace of a longer model.

    The longer model has one more block in the middle, whose segments are left out.

    Args:
        few_segments: Segments of the trace of the model with few blocks.
        more_segments: Segments of the trace of the model with one more block.

    Raises:
        TraceMismatchError: If the segments do not match.
    """
    rest = [s for s in more_segments if not s.is_in_added_block]
    if [s.key for s in few_segments] != [s.key for s in rest]:
        raise TraceMismatchError("the traces with few and with more blocks have different marks")
    pairs = list(zip(few_segments, rest, strict=True))
    for a, b in pairs:
        if len(a.moments) != len(b.moments) or len(range(*a.reduction_range)) != len(
            range(*b.reduction_range)
        ):
            raise TraceMismatchError(
                "all blocks must be traced: with few and with more blocks, the traced steps have "
                f"different numbers of events after the mark {a.key} (label, block, occurrence)"
            )
    return pairs


def check_blocks_are_equal(
    segments: Sequence[EventSegment],
    live_bytes: Sequence[Sequence[int]],
    collectives: Sequence[CollectiveCall],
) -> None:
    """Raise TraceMismatchError if a block differs from its neighbours.

    Args:
        segments: Segments of a step of the longer trace.
        live_bytes: Bytes after each event of the step, for each batch.
        collectives: Collectives of the step.
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
            raise TraceMismatchError(
                f"neighbouring blocks have different numbers of events at the mark {label}"
            )
        for live in live_bytes:
            for x, y, z in zip(*(s.moments for s in three), strict=True):
                if live[z] - live[y] != live[y] - live[x]:
                    raise TraceMismatchError(
                        "all blocks must be traced: neighbouring blocks of the model use different amounts "
                        f"of memory at the same place ({label})"
                    )
        each = [[collectives[i] for i in range(*s.collective_range)] for s in three]
        if each[0] != each[1] or each[1] != each[2]:
            raise TraceMismatchError(
                f"neighbouring blocks call different collectives at the mark {label}"
            )
        # A bucket may hold gradients of several blocks. Its all-reduce then starts in only some blocks.
        if label == "backward" and some_calls and not each[0]:
            raise TraceMismatchError("a bucket holds gradients of several blocks")


def extrapolate_collectives(
    few_segments: Sequence[EventSegment],
    more_segments: Sequence[EventSegment],
    collectives_of_traces: tuple[Sequence[CollectiveCall], Sequence[CollectiveCall]],
    num_further_blocks: int,
) -> list[CollectiveCall]:
    """Extrapolate a step's collectives to a model with more blocks.

    Args:
        few_segments: Segments of the shorter trace.
        more_segments: Segments of the longer trace.
        collectives_of_traces: Collectives of both traces.
        num_further_blocks: Number of further blocks.
    """
    by_key = {s.key: s for s in few_segments}
    drawn: list[CollectiveCall] = []
    for is_middle, run in groupby(more_segments, key=lambda s: s.is_in_added_block):
        segments = list(run)
        if is_middle:
            first, stop = segments[0].collective_range[0], segments[-1].collective_range[1]
            drawn += list(collectives_of_traces[1][first:stop]) * (num_further_blocks + 1)
            continue
        for s in segments:
            a, b = (
                collectives_of_traces[0][slice(*by_key[s.key].collective_range)],
                collectives_of_traces[1][slice(*s.collective_range)],
            )
            drawn += _extrapolate_segment_collectives(a, b, num_further_blocks)
    return drawn


def _extrapolate_segment_collectives(
    few_calls: Sequence[CollectiveCall],
    more_calls: Sequence[CollectiveCall],
    num_further_blocks: int,
) -> Iterator[CollectiveCall]:
    if len(few_calls) == len(more_calls):
        for x, y in zip(few_calls, more_calls, strict=True):
            if replace(x, n_bytes=0, bytes_per_sample=0) != replace(
                y, n_bytes=0, bytes_per_sample=0
            ):
                raise TraceMismatchError(
                    "the traces with few and with more blocks have different collectives"
                )
            n_bytes, sample_bytes = extrapolate_numbers(
                (x.n_bytes, x.bytes_per_sample), (y.n_bytes, y.bytes_per_sample), num_further_blocks
            )
            yield replace(y, n_bytes=n_bytes, bytes_per_sample=sample_bytes)
        return
    yield from repeat_added_entries(few_calls, more_calls, num_further_blocks)


def repeat_added_entries(few: Sequence[Any], more: Sequence[Any], num_repeats: int) -> list[Any]:
    """Return the entries of a longer trace, with those that a shorter one lacks repeated.

    Args:
        few: Entries of the shorter trace.
        more: Entries of the longer trace.
        num_repeats: How often the added entries are repeated.

    Raises:
        TraceMismatchError: If the longer trace does not have added entries at one place alone.
    """
    few, more = list(few), list(more)
    same = next((i for i, (x, y) in enumerate(zip(few, more, strict=False)) if x != y), len(few))
    added = len(more) - len(few)
    if added < 0 or more[same + added :] != few[same:]:
        raise TraceMismatchError(
            "the traces with few and with more blocks or parts have different collectives"
        )
    return more[:same] + more[same : same + added] * (num_repeats + 1) + more[same + added :]


def extrapolate_numbers(few_values: Any, more_values: Any, num_further_blocks: int) -> Any:
    """Extrapolate numbers of two traces to a model with more blocks.

    Numbers may be in dicts, tuples and dataclasses; all other values must be equal.

    Args:
        few_values: Values of the shorter trace.
        more_values: Values of the longer trace.
        num_further_blocks: Number of blocks that the longer trace lacks.
    """
    return sum_weighted_numbers(
        (few_values, more_values), (-num_further_blocks, 1 + num_further_blocks)
    )


def sum_weighted_numbers(values: Sequence[Any], weights: Sequence[int]) -> Any:
    """Return the weighted sum of values that contain numbers.

    The numbers may be in dicts, tuples and dataclasses.

    Args:
        values: Values that are equal except for their numbers.
        weights: A weight for each value; the weights add up to one.

    Raises:
        TraceMismatchError: If the values differ in more than their numbers.
    """
    *others, last = values
    if any(type(x) is not type(last) and not isinstance(x, int | float) for x in others):
        raise TraceMismatchError(
            "footprints of different traces cannot be combined: a value has different types in them"
        )
    if isinstance(last, bool | str) or last is None:
        if any(x != last for x in others):
            raise TraceMismatchError(
                "footprints of different traces differ in more than their numbers"
            )
        return last
    if isinstance(last, int | float):
        return last + sum((x - last) * w for x, w in zip(others, weights, strict=False))
    if isinstance(last, dict):
        keys = dict.fromkeys(key for x in values for key in x)
        return {k: sum_weighted_numbers([x.get(k, 0) for x in values], weights) for k in keys}
    if is_dataclass(last):
        names = [f.name for f in fields(last)]
        return replace(
            last,
            **{n: sum_weighted_numbers([getattr(x, n) for x in values], weights) for n in names},
        )
    if any(len(x) != len(last) for x in others):
        raise TraceMismatchError("footprints of different traces have lists of different lengths")
    return type(last)(
        sum_weighted_numbers(numbers, weights) for numbers in zip(*values, strict=True)
    )

"""Many parts of a step are drawn out from few: what comes of it is the full trace's, to the byte."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from test_plan_footprint import ADAMW, changed, request_for

from stratbench.extensions.plan.footprint import fake, few_parts
from stratbench.extensions.plan.footprint.drawn_out import TraceMismatchError
from stratbench.extensions.plan.footprint.few_parts import (
    extrapolate_collective_entries,
    make_footprint_from_few_parts,
    sum_weighted_footprints,
)
from stratbench.extensions.plan.footprint.footprint import Affine, Footprint, make_footprint
from stratbench.extensions.plan.footprint.request import Request
from stratbench.strategies import get_strategy_class

pytestmark = pytest.mark.timeout(300)

ON_CUDA = {"device": "cuda", "precision": "bf16"} | ADAMW
#: Its two middle stages compute the same.
FOUR_STAGES = {"pipeline_parallel_size": 4, "schedule": "1f1b"}


def request_of(strategy: str, workers: int, options: dict, **changes) -> Request:
    model = "gpt-compact" if strategy == "pipeline" else "small text"
    request = request_for(strategy, model, workers, options=options, **ON_CUDA | changes)
    return replace(request, input_shape=(32,))


def list_attributes(code: object, name: str) -> set[str]:
    """The attributes that a module or class reads of a variable, or sets (of `self`)."""
    found = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(code)))
        if isinstance(node, ast.Attribute)
    ]
    return {
        node.attr for node in found if isinstance(node.value, ast.Name) and node.value.id == name
    }


def test_a_pipeline_has_what_the_plan_calls_of_it():
    """What it lacked would cost a full trace and no more, so that nobody would miss it."""
    pipeline = get_strategy_class("pipeline")
    own = set(dir(pipeline)).union(*(list_attributes(c, "self") for c in pipeline.__mro__[:-1]))
    called = list_attributes(fake, "strategy") | list_attributes(few_parts, "strategy")
    assert called <= own, called - own


@pytest.mark.slow
def test_the_units_of_a_pipeline_are_measured_once(monkeypatch):
    """They are measured on all layers, which takes longer than a stage's steps."""
    from stratbench.extensions.splitting import stages

    measure, models = stages.measure_unit_costs, []

    def count(model, *rest):
        models.append(model)
        return measure(model, *rest)

    monkeypatch.setattr(stages, "measure_unit_costs", count)
    monkeypatch.setattr(fake, "_measured", {})
    request = request_of("pipeline", 2, {"pipeline_parallel_size": 2, "microbatches": 2})
    assert make_footprint_from_few_parts(request).stage_footprints
    assert len(models) == 1


def record_calls(calls: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: calls.append(given) or function(*given, **named)


def assert_same(drawn: Footprint, full: Footprint, parts: int) -> None:
    """Numbers of bytes and operations are equal; lines in the batch, but for what a division leaves."""
    lines = ("peak_moments", "collectives", "touched_bytes", "stage_footprints")
    for name in (f.name for f in fields(Footprint) if f.name not in lines):
        assert getattr(drawn, name) == getattr(full, name), name
    assert len(drawn.collectives) == len(full.collectives)
    for one, other in zip(drawn.collectives, full.collectives, strict=True):
        assert one == pytest.approx(other) if len(other) > 2 and other[2] else one == other
    for samples in (parts, 100 * parts):
        assert drawn.touched_bytes.evaluate_at(samples) == pytest.approx(
            full.touched_bytes.evaluate_at(samples)
        )
    for samples in (1, 2, 3, 16, 1000):
        for threads in (0, 270336):
            peaks = [f.compute_training_peak(samples * parts, threads) for f in (drawn, full)]
            assert peaks[0] == peaks[1], (samples, threads)
    for one, other in zip(drawn.stage_footprints, full.stage_footprints, strict=True):
        assert_same(one, other, parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options", "changes"),
    [
        (
            "pipeline",
            FOUR_STAGES | {"microbatches": 6},
            {"precision": "fp16", "activation_checkpointing": True},
        ),
        ("pipeline", {"schedule": "gpipe", "microbatches": 5, "pipeline_parallel_size": 2}, {}),
        ("fsdp", {"mixed_precision": "policy"}, {"gradient_accumulation_steps": 9}),
    ],
)
def test_a_step_drawn_out_from_few_parts_is_the_one_that_is_followed(
    monkeypatch, strategy, options, changes
):
    request = request_of(strategy, 4, options, **changes)
    full = make_footprint(request)
    followed, drawn = [], []
    for calls, name in ((followed, "trace_two_steps"), (drawn, "sum_weighted_footprints")):
        monkeypatch.setattr(few_parts, name, record_calls(calls, getattr(few_parts, name)))
    monkeypatch.setattr(few_parts, "make_footprint", None)
    assert_same(make_footprint_from_few_parts(request), full, request.num_accumulated_parts)
    assert drawn
    if options.get("pipeline_parallel_size") == 4:
        # Three of the first stage, three that the middle ones share, and two of the last.
        assert len(followed) == 8


@pytest.mark.parametrize(
    ("strategy", "options", "changes"),
    [
        ("pipeline", {"microbatches": 6, "pipeline_parallel_size": 2}, {}),
        ("single", {}, {"gradient_accumulation_steps": 8}),
    ],
)
def test_what_few_parts_do_not_tell_is_followed_whole(monkeypatch, strategy, options, changes):
    asked = []

    def raise_unlike(*_: object, **__: object) -> None:
        asked.append("few")
        raise TraceMismatchError("moments")

    monkeypatch.setattr(few_parts, "trace_two_steps", raise_unlike)
    monkeypatch.setattr(few_parts, "extrapolate_gradient_accumulation", raise_unlike)
    monkeypatch.setattr(few_parts, "make_footprint", lambda *whole: whole)
    monkeypatch.setattr(few_parts, "make_footprint_from_few_blocks", lambda *whole: whole[:2])
    request = request_of(strategy, 2 if options else 1, options, **changes)
    assert make_footprint_from_few_parts(request) == (request, None)
    assert asked == ["few"]


def test_collectives_of_more_parts_are_repeated_where_the_longer_step_has_them():
    few = [("gather", 8.0), ("send", 0.0, 2, 4.0), ("all_reduce", 16)]
    more = [
        ("gather", 8.0),
        ("send", 0.0, 2, 4.0),
        ("send", 0.0, 2, 4.0 + 1e-9),
        ("all_reduce", 16),
    ]
    assert extrapolate_collective_entries(few, more, 3) == [few[0], *[few[1]] * 5, few[2]]
    assert extrapolate_collective_entries(few, few, 3) == few
    for unlike in ([few[0], few[1], ("all_reduce", 17)], [*few[1:], few[0], few[0]], few[:1]):
        with pytest.raises(TraceMismatchError):
            extrapolate_collective_entries(few, unlike, 3)


@pytest.mark.slow
def test_footprints_with_other_moments_are_not_drawn_out():
    request = request_for("single", "small text", 1, gradient_accumulation_steps=3, **ON_CUDA)
    few, more = (make_footprint(changed(request, gradient_accumulation_steps=n)) for n in (3, 4))
    sum_weighted_footprints([few, more], [3, 4, 12], (-8, 9))
    other = replace(more.peak_moments[0], total_bytes=Affine(1.0, 1.0))
    with pytest.raises(TraceMismatchError):
        sum_weighted_footprints(
            [few, replace(more, peak_moments=[*more.peak_moments, other])], [3, 4, 12], (-8, 9)
        )

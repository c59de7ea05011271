"""How far planned ratios may be off, by what configurations differ in: evidence, and what it drops."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratbench.extensions.tune import differences
from stratbench.extensions.tune.differences import (
    KINDS,
    Margin,
    compute_margin_between,
    compute_upper_prediction_bound,
    find_configurations_to_drop,
    fit_margins_to_sweeps,
)
from stratbench.strategies import REGISTRY, get_strategy_class

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "prediction"
PLAIN = dict.fromkeys(KINDS, 0.0) | {"micro-batch": 1.0, "tensor": 1.0, "pipeline": 1.0}


def row(sweep: str, measured: float, planned: float, source: str = "", **amounts: float) -> dict:
    own = {kind: str(amounts.get(kind.replace("-", "_"), PLAIN[kind])) for kind in KINDS}
    times = {"measured": str(measured), "planned": str(planned)}
    return {"sweep": sweep, "source": source or sweep, **own, **times}


def sweeps_of(wrong: dict[str, float]) -> list[dict]:
    """Sweeps in which compiled code was faster and planned so many times slower."""
    rows = [row(name, 1.0, 1.0) for name in wrong]
    return rows + [row(name, 0.8, ratio, compile=1) for name, ratio in wrong.items()]


def test_a_margin_is_the_largest_ratio_by_which_the_plan_was_wrong():
    margins = fit_margins_to_sweeps(sweeps_of({"a": 1.6, "b": 1.9, "c": 1.7}))
    assert margins == {("compile", True): Margin(1.9, 3, 3)}
    # A few sweeps do not show rarer errors.
    nearly_right = fit_margins_to_sweeps(sweeps_of({"a": 1.01, "b": 1.02, "c": 1.03}))
    assert nearly_right["compile", True].ratio == differences.MIN_MARGIN
    # Pairs that are alike, or that the plan orders well, say that it was not wrong.
    alike = [row("d", 1.0, 1.0), row("d", 0.99, 3.0, compile=1)]
    right = [row("e", 1.0, 1.0), row("e", 2.0, 5.0, compile=1)]
    more = fit_margins_to_sweeps(sweeps_of({"a": 1.6, "b": 1.9, "c": 1.7}) + alike + right)
    assert more["compile", True] == Margin(1.9, 5, 5)


def test_too_little_evidence_is_none():
    assert not fit_margins_to_sweeps(sweeps_of({"a": 1.6, "b": 1.9}))
    one_source = [r | {"source": "s"} for r in sweeps_of({"a": 1.6, "b": 1.9, "c": 1.7})]
    assert not fit_margins_to_sweeps(one_source)
    out_of_memory = sweeps_of({"a": 1.6, "b": 1.9, "c": 1.7})
    assert not fit_margins_to_sweeps(r | {"measured": ""} for r in out_of_memory)


def test_pairs_that_differ_in_two_kinds_say_nothing_of_either():
    rows = [row(name, 1.0, 1.0) for name in "abc"]
    rows += [row(name, 0.8, 1.5, compile=1, micro_batch=2) for name in "abc"]
    assert not fit_margins_to_sweeps(rows)


def test_one_of_twenty_sweeps_may_be_beyond_a_margin():
    assert compute_upper_prediction_bound([1.0, 1.2, 1.1]) == 1.2
    assert compute_upper_prediction_bound([1.0] * 18 + [2.0]) == 2.0
    assert compute_upper_prediction_bound([1.0] * 38 + [2.0]) == 1.0


MARGINS = {
    ("compile", True): Margin(1.2, 5, 3),
    ("micro-batch", False): Margin(1.1, 9, 4),
    ("sharding", True): Margin(1.5, 9, 4),
}


def test_margins_of_several_kinds_are_multiplied_and_none_is_unknown():
    compiled = PLAIN | {"compile": 1.0}
    assert compute_margin_between(compiled, PLAIN, MARGINS) == 1.2
    both = PLAIN | {"compile": 1.0, "micro-batch": 0.5}
    assert compute_margin_between(both, PLAIN, MARGINS) == pytest.approx(1.32)
    assert compute_margin_between(PLAIN, compiled, MARGINS) is None  # less of it: no evidence
    assert compute_margin_between(both | {"offload": 1.0}, PLAIN, MARGINS) is None
    assert (
        compute_margin_between(PLAIN, PLAIN, MARGINS) is None
    )  # they differ in no kind that is known


def test_what_no_evidence_compares_is_kept_however_slow_it_is():
    amounts = {
        "plain": PLAIN,
        "compiled": PLAIN | {"compile": 1.0},
        "offload": PLAIN | {"offload": 1.0},
    }
    found = find_configurations_to_drop(
        {"plain": 1.0, "compiled": 1.21, "offload": 50.0}, amounts, MARGINS
    )
    assert set(found) == {"compiled"}
    assert found["compiled"] == ("plain", 1.21, 1.2)
    assert not find_configurations_to_drop({"plain": 1.0, "compiled": 1.19}, amounts, MARGINS)


def test_every_row_of_the_table_names_its_source_and_licence():
    rows = differences.read_public_sweeps()
    assert len(rows) > 100
    for each in rows:
        assert all((each["source"], each["licence"], each["url"], float(each["planned"]) > 0)), each
    sentences = list(differences.describe_margins(differences.fit_public_margins()))
    assert len(sentences) == len(KINDS)
    assert any("public sweeps" in line for line in sentences)


@pytest.mark.parametrize("strategy", REGISTRY)
def test_options_name_kinds_that_there_are(strategy):
    from dataclasses import fields

    for option in fields(get_strategy_class(strategy).Options):
        assert option.metadata.get("kind") in (None, *KINDS), option.name


def test_the_page_says_what_the_sieve_leaves_of_each_source_by_the_others(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import public_sweeps

    rows = differences.read_public_sweeps()
    page = public_sweeps.page(rows)
    recorded = BENCHMARKS.parent / "results" / "public-sweeps.md"
    assert page == recorded.read_text(encoding="utf-8")

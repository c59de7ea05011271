"""What a projection.csv says of more workers in words: crossings, costs, the report's section."""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import pytest

from stratbench.cell.text import pages
from stratbench.extensions.projection.shown import section as report
from stratbench.extensions.projection.shown.crossings import (
    CountStepTime,
    describe_crossings,
    find_crossings,
)
from stratbench.extensions.projection.table import Row, write_projection_csv


def line(*steps: float, measured: int = 2, spread: float = 1.1) -> list[CountStepTime]:
    """A strategy's steps on 1, 2, 4 ..., of which the first are measured."""
    return [
        CountStepTime(2**i, s / spread, s, s * spread, False)
        if i >= measured
        else CountStepTime(2**i, s, s, s, True)
        for i, s in enumerate(steps)
    ]


def test_lines_meet_where_their_ratio_is_one():
    # The ratio goes from 2 at 4 to 1/2 at 16: it is 1 at 8, between two doublings.
    lines = {"one": line(8, 4, 2, 2, 2), "other": line(16, 8, 4, 2.2, 1)}
    [found] = find_crossings(lines)
    assert (found.strategy_before, found.strategy_after) == ("one", "other")
    assert 8 < found.workers_at_crossing < 16
    assert (
        found.largest_workers_without_overlap_below,
        found.smallest_workers_without_overlap_above,
    ) == (4, 16)
    assert found.describe_crossing("GPU").startswith(
        f"From about {found.workers_at_crossing:.0f} GPUs on, other is faster than one"
    )
    # At 2 the other takes 5/4, at 4 a half: ln 1.25 / (ln 1.25 + ln 2) of the way.
    exact = {"one": line(4, 4, 4), "other": line(16, 5, 2)}
    assert find_crossings(exact)[0].workers_at_crossing == pytest.approx(2 * 2**0.2436, rel=1e-3)


def test_a_crossing_within_overlapping_fans_is_said_to_be_open():
    lines = {"one": line(8, 4, 2.1, 1.2), "other": line(8.1, 4.1, 2.1, 1.1, spread=1.5)}
    [found] = find_crossings(lines)
    assert found.smallest_workers_without_overlap_above is None
    assert "one is clearly faster on 2" in found.describe_crossing("GPU")
    wide = {"one": line(8, 4, measured=1, spread=2), "other": line(9, 3.9, measured=0, spread=2)}
    assert "so that either may be faster" in find_crossings(wide)[0].describe_crossing("GPU")


def test_a_leader_that_ends_is_no_crossing():
    lines = {"one": line(4, 2), "other": line(8, 4, 2, 1)}
    assert find_crossings(lines) == []
    assert describe_crossings(lines, "GPU") == []  # only one of them is projected


def test_without_a_crossing_the_leader_is_named_and_what_is_open():
    lines = {"one": line(8, 4, 2), "near": line(8.5, 4.2, 2.1), "far": line(16, 8, 5)}
    [told] = describe_crossings(lines, "CPU process")
    assert told.startswith("one is the fastest on all counts up to 4 CPU processes")
    assert "on 4 its interval of 80 % overlaps that of near" in told


def row(strategy: str, workers: int, kind: str, step_s: float, **more) -> Row:
    names = ("step", "train", "gpu_hours", "cost", "efficiency")
    ends = {"_low": 0.9, "": 1.0, "_high": 1.2}
    values = {
        f"{name}{end}{'_s' if name in ('step', 'train') else ''}": step_s * share
        for name in names
        for end, share in ends.items()
    }
    values = values if kind != "refused" else {}
    return Row("one", "net", strategy, "ddp", "strong", "A100", workers, 1, kind, **(values | more))


@pytest.fixture
def table(tmp_path) -> Path:
    path = tmp_path / "projection.csv"
    by = {"rule": "a + b/N", "evidence": "steps measured on 1 and 2 workers"}
    write_projection_csv(
        path,
        [
            row("ddp", 1, "measured", 4), row("ddp", 2, "measured", 2.0),
            row("ddp", 4, "projected", 1.4, a_plus_b_s=1.5, **by),
            row("ddp", 8, "refused", 0, reason="no <b>link</b> was measured"),
            row("mine<script>", 1, "measured", 5), row("mine<script>", 2, "measured", 2.4),
            row("mine<script>", 4, "projected", 1.1, **by),
            row("mine<script>", 8, "refused", 0, reason="no <b>link</b> was measured"),
        ],
    )  # fmt: skip
    return path


def test_the_section_says_who_leads_what_it_costs_and_what_is_refused(table, capsys):
    assert report.main(["--table", str(table)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "mine<script> is faster than ddp" in told
    assert "mine<script> on 4 (projected) needs the least time for the whole training" in told
    assert "1.1 s (80 %: 990 ms to 1.32 s)" in told
    assert "at a cost of 1.1; the best measured one is ddp on 2, 2 s." in told
    values = {"projections": report.make_section_entries(table)}
    page = pages.render_page(report.TEMPLATE.name, report.TEMPLATE.parent, values=values)
    assert "mine<script>" not in page
    assert "Not projected: ddp, mine&lt;script&gt;, 8: no &lt;b&gt;link&lt;/b&gt; was" in page
    chart = b64decode(re.search(r'base64,([^"]+)', page)[1]).decode()
    assert chart.count("fill-opacity: 0.16") == 2  # the fans of what is projected
    assert (
        chart.count("stroke-dasharray") == 3
    )  # what is projected, and what perfect scaling would be
    assert {"ddp", "mine&lt;script&gt;", "perfect scaling"} <= set(
        re.findall(">([^<]+)</text>", chart)
    )


def test_a_count_that_is_refused_between_others_is_told_by_itself(tmp_path):
    path = tmp_path / "projection.csv"
    by = {"rule": "replay on measured links", "evidence": "steps, by links"}
    write_projection_csv(
        path,
        [
            row("ddp", 2, "measured", 4), row("ddp", 6, "refused", 0, reason="6 does not divide it"),
            row("ddp", 8, "projected", 2, **by), row("ddp", 16, "projected", 1, **by | {"evidence": "steps"}),
            row("ddp", 32, "refused", 0, reason="too far"), row("ddp", 64, "refused", 0, reason="farther"),
        ],
    )  # fmt: skip
    [found] = report.make_section_entries(path)
    assert found["refused"] == [
        "Not projected: ddp, 6: 6 does not divide it.",
        "Not projected: ddp, from 32 on: too far.",
    ]
    assert found["evidence"] == ["ddp on 8: steps, by links.", "ddp on 16: steps."]


@pytest.mark.parametrize(("steps", "told"), [((8, 8, 8), False), ((8, 4, 2), True)])
def test_trainings_that_see_more_samples_on_more_workers_are_not_compared(tmp_path, steps, told):
    path = tmp_path / "projection.csv"
    counts = zip((1, 2, 4), steps, ("measured", "measured", "projected"), strict=True)
    write_projection_csv(
        path,
        [
            replace(row("ddp", n, kind, 1.0), scaling="weak", train_s=float(s))
            for n, s, kind in counts
        ],
    )
    [found] = report.make_section_entries(path)
    assert any("least time for the whole training" in line for line in found["cheapest"]) == told
    assert any("see more samples" in line for line in found["cheapest"]) != told


def test_a_table_that_lacks_a_record_says_so(table):
    have = {("one", "net", "ddp", 1), ("one", "net", "ddp", 2), ("one", "net", "single", 1)}
    assert not report.make_section_entries(table, have)[0]["lacks"]
    assert report.make_section_entries(table, have | {("one", "net", "ddp", 4)})[0]["lacks"]


def test_a_file_that_is_no_projection_is_named(tmp_path, capsys):
    path = tmp_path / "projection.csv"
    assert report.main(["--table", str(path)]) == 1
    path.write_text("a,b\n1,2\n")
    assert report.main(["--table", str(path)]) == 1
    assert "is not a valid projection.csv" in capsys.readouterr().err

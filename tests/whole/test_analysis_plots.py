"""Figures: every cell is drawn or told in words, the choice stands out, nothing leaves the sheet."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import fixture_records as fixture
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image
from test_marks import EYES, THEMES, contrast, linear, oklab

from stratbench.analysis.decision import decide
from stratbench.analysis.figures import axes, curves, marks, measured, plots, rows, sheet
from stratbench.analysis.figures.figure_list import INDEX, PLOTS
from stratbench.analysis.figures.tradeoffs import (
    ABOVE,
    NAME,
    PARTS,
    REST,
    draw_tradeoff,
    find_free_box_for_name,
)
from stratbench.analysis.records import collect
from stratbench.analysis.records.columns import read_cells
from stratbench.analysis.records.findings import read_audit_findings
from stratbench.analysis.records.score import Score
from stratbench.analysis.tables.summary import build_summary_table
from stratbench.extensions.audit import audit

#: Of studies without a change of their own: what `analysed` has made of them.
ANALYSED = {}


def analysed(root, cells, statuses=None, device="cuda", change=None):
    """The figures' data of constructed records of one model, and the study's folder, which is only read."""
    if change is not None:
        return analyse(root, cells, statuses, device, change)
    key = (*cells, *(statuses or {}).items(), device)
    if key not in ANALYSED:
        ANALYSED[key] = analyse(root, cells, statuses, device)
    return copy.deepcopy(ANALYSED[key])


def analyse(root, cells, statuses=None, device="cuda", change=None):
    study_dir = fixture.write_study(root, cells, statuses, device, change)
    collect.collect_records(cells, study_dir, study_dir / "cells.csv", study_dir / "epochs.csv")
    given = ["--cells", str(study_dir / "cells.csv")]
    audit.main([*given, "--out", str(study_dir / "audit.csv")])
    audited = [*given, "--audit", str(study_dir / "audit.csv"), "--out", str(study_dir / "d.csv")]
    decide.main([*audited, "--answers-out", str(study_dir / "answers.json")])
    findings = read_audit_findings(study_dir / "audit.csv")
    summary = build_summary_table(read_cells(study_dir / "cells.csv"), findings)
    summary.to_csv(study_dir / "summary.csv", index=False)
    tables = (study_dir / f"{name}.csv" for name in ("cells", "epochs", "summary"))
    return plots.read_figure_data(*tables, study_dir / "answers.json", None)[0], study_dir


def texts_of(figure):
    """Whatever is written in a figure: names, values, and the texts of ticks and axes."""
    shown = (t for t in figure.findobj(Text) if t.get_visible())
    return [t for t in shown if t.get_text()]


@pytest.fixture
def draw():
    figures = []

    def of(data, name, count=None):
        with plt.rc_context(sheet.RC):
            drawn = plots.draw_figure(name, data, count)
        figures.append(drawn.figure)
        return SimpleNamespace(
            axes=drawn.figure.axes[0],
            figure=drawn.figure,
            caption=drawn.caption,
            texts=[t.get_text() for t in texts_of(drawn.figure)],
        )

    yield of
    for figure in figures:
        plt.close(figure)


def all_figures(data):
    return list(plots.iter_figure_names_and_worker_counts(data))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["training_time", "memory"])
def test_every_cell_is_a_point_or_told_in_words(tmp_path, draw, name):
    cells = fixture.expand(models=("vgg16",))
    data, _ = analysed(tmp_path, cells, fixture.DEMO_STATUSES)
    found = draw(data, name)
    points = sum(t.get_zorder() == 6 for t in found.axes.texts)  # the numbers in marks
    measured = data.select_summary_rows(name)["value"].notna().sum()
    assert points == measured < len(cells)
    words = "; ".join(t for t in found.texts if " on " in t)
    told = sum(len(part.rpartition(" on ")[2].split(", ")) for part in words.split("; "))
    assert told == len(data.select_summary_rows(name)) - measured


def test_a_card_that_nothing_fits_is_told_in_words_in_every_row(tmp_path, draw):
    cells = fixture.expand(strategies=("ddp", "fsdp"), models=("vgg16",))
    statuses = {(s, "vgg16", n): "oom" for s in ("ddp", "fsdp") for n in (1, 2, 4)}
    data, _ = analysed(tmp_path, cells, statuses)
    assert data.chosen_strategy_and_gpus is None
    found = draw(data, "training_time")
    assert found.texts.count("OOM on 1, 2, 4") == 2
    assert not any(text.endswith(" s") for text in found.texts)  # no axis without data
    assert "No strategy has a value" in found.caption
    assert "Logarithmic" not in found.caption


@pytest.mark.parametrize(("device", "told"), [("cuda", True), ("cpu", False)])
def test_model_states_are_marked_only_where_the_peak_holds_them(tmp_path, draw, device, told):
    cells = fixture.expand(strategies=("ddp",), models=("vgg16",))
    data, _ = analysed(tmp_path, cells, device=device)
    assert ("model states" in draw(data, "memory").caption) == told


@pytest.mark.slow
def test_the_choice_is_full_thick_and_bold_and_all_others_are_quiet(tmp_path, draw):
    data, _ = analysed(tmp_path, fixture.expand(models=("vgg16",)))
    chosen = data.chosen_strategy_and_gpus[0]
    families = {
        s: marks.FAMILIES[data.marks_by_strategy[s].family].full_and_quiet_light_colours
        for s in data.strategies
    }
    for name in ("training_time", "speedup"):
        found = draw(data, name)
        bold = {t.get_text() for t in found.axes.texts if t.get_fontweight() == "bold"}
        assert {chosen} == bold & set(data.strategies), name
        drawn = {line.get_color() for line in found.axes.lines}
        drawn |= {to_hex(patch.get_facecolor()) for patch in found.axes.patches}
        assert families[chosen][0] in drawn
        rivals = [s for s in data.strategies if families[s] != families[chosen]]
        assert not drawn & {families[s][0] for s in rivals}
    lines = draw(data, "speedup").axes.lines
    widths = {line.get_color(): line.get_linewidth() for line in lines if len(line.get_xdata()) > 2}
    thick = widths.pop(families[chosen][0])
    assert thick >= 2 * max(w for c, w in widths.items() if c in {q for _, q in families.values()})


def test_a_caption_tells_of_intervals_that_are_wider_than_their_mark(tmp_path, draw):
    """Neither of one repeat's, nor of a spread that the mark covers."""
    cells = fixture.expand(strategies=("ddp",), models=("vgg16",), repeats=3)
    data, _ = analysed(tmp_path, cells)
    value = data.summary["value"]
    for spread, told in ((None, False), (0.001, False), (0.3, True)):
        low, high = (float("nan") if spread is None else value * (1 + s * spread) for s in (-1, 1))
        scattered = replace(data, summary=data.summary.assign(low=low, high=high))
        assert ("Lines: from the lowest" in draw(scattered, "training_time").caption) == told
        assert ("Bars: 95 % intervals" in draw(scattered, "speedup").caption) == told


def test_the_ideal_line_ends_where_the_data_end(tmp_path, draw):
    data, _ = analysed(tmp_path, fixture.expand(models=("vgg16",)))
    for name in ("speedup", "speedup_vs_single"):
        found = draw(data, name)
        best = data.select_summary_rows(name)["value"].max()
        (ideal,) = (line for line in found.axes.lines if line.get_color() == sheet.RULE)
        assert list(ideal.get_xdata()) == list(ideal.get_ydata())
        assert max(ideal.get_ydata()) == min(best, data.worker_counts[-1])
        assert "ideal" in found.texts
        assert f"The maximum is {best:.2f}" in found.caption


def points_of(axes):
    """The points of all lines and marks of a figure that are at values."""
    lines = [line for line in axes.lines if line.get_transform() == axes.transData]
    return {
        (round(float(x), 6), round(float(y), 6))
        for line in lines
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }


@pytest.mark.parametrize("name", ["training_time", "memory"])
def test_figures_of_rows_show_the_numbers_of_the_table(tmp_path, draw, name):
    """Values, the ends of intervals and the parts of peaks as they are, and each strategy's best in words."""
    data, _ = analysed(tmp_path, fixture.expand(models=("vgg16",), repeats=3))
    table = data.select_summary_rows(name)
    found = draw(data, name)
    shown = {x for x, _ in points_of(found.axes)}
    columns = ["value", "low", "high"]
    expected = table[columns].to_numpy(dtype=float)
    assert {round(v, 6) for v in expected[~np.isnan(expected)]} <= shown
    if name == "memory":
        parts = {float(path[0][0]) for c in found.axes.collections for path in c.get_segments()}
        states = data.select_summary_rows("model_states")["value"].dropna()
        assert sorted(parts) == pytest.approx(sorted(set(states)))
    assert set(data.strategies) & set(table["strategy"]) <= set(found.texts)
    chosen = table[
        (table["strategy"] == data.chosen_strategy_and_gpus[0])
        & (table["gpus"] == data.chosen_strategy_and_gpus[1])
    ]
    best = measured.format_number(chosen["value"].iloc[0], None)
    assert any(text.startswith(f"{best} ") for text in found.texts)


def test_figures_of_lines_show_the_numbers_of_the_table(tmp_path, draw):
    data, _ = analysed(tmp_path, fixture.expand(models=("vgg16",), repeats=3))
    for name in ("throughput", "speedup", "speedup_vs_single"):
        table = data.select_summary_rows(name)
        table = table[
            table["value"].notna() & ~((table["strategy"] == "single") & (name != "throughput"))
        ]
        shown = points_of(draw(data, name).axes)
        for column in ("value", "low", "high"):
            known = table[table[column].notna()]
            expected = {
                (float(n), round(v, 6)) for n, v in zip(known["gpus"], known[column], strict=True)
            }
            assert expected <= shown, (name, column)
    scored = data.epochs[data.epochs["gpus"] == 4]
    medians = scored.groupby(["strategy", "epoch"])["score"].median() * data.score.display_factor
    expected = {(float(epoch), round(v, 6)) for (_, epoch), v in medians.items()}
    assert expected <= points_of(draw(data, "score", 4).axes)


def test_figures_of_two_measures_show_the_numbers_of_the_table(tmp_path, draw):
    data, _ = analysed(tmp_path, fixture.expand(models=("vgg16",)))
    both = [
        data.select_summary_rows(n).set_index(["strategy", "gpus"])["value"]
        for n in ("training_time", "score")
    ]
    known = pd.concat(both, axis=1).dropna().to_numpy(dtype=float)
    expected = {(round(t, 6), round(round(v, data.score.shown_decimals), 6)) for t, v in known}
    assert expected <= points_of(draw(data, "tradeoff").axes)
    cells = data.cells[data.cells["gpus"] == data.shown_worker_count].dropna(
        subset=["breakdown_ms"]
    )
    found = draw(data, "breakdown")
    bars = pd.DataFrame([bar.get_width() for bar in of] for of in found.axes.containers).sum()
    steps = {
        name: sum(json.loads(text).values())
        for name, text in zip(cells["strategy"], cells["breakdown_ms"], strict=True)
    }
    assert sorted(bars) == pytest.approx(sorted(steps.values()))
    for name, value in steps.items():
        assert {name, f"{measured.format_number(value, None)} ms"} <= set(found.texts)
    pushes = data.cells[data.cells["gpus"] == data.shown_worker_count].dropna(subset=["staleness"])
    shown = points_of(draw(data, "staleness").axes)
    assert len(pushes) > 1
    for counts in map(json.loads, pushes["staleness"]):
        share = 100 * counts[0] / sum(counts)
        assert any(x == 0 and y == pytest.approx(share, abs=1e-5) for x, y in shown)


def test_scores_that_round_to_one_value_are_drawn_as_one(tmp_path, draw):
    """Differences of 0.001 points: no two ticks with one text, and the line joins only the fastest."""

    def all_but_equal(cell, record):
        last = record["score"]["per_epoch"][-1]
        record["score"]["final"] = last["score"] = 0.97 + 1e-5 * (cell.strategy == "fsdp")
        return record

    cells = fixture.expand(strategies=("ddp", "fsdp"), models=("vgg16",))
    data, _ = analysed(tmp_path, cells, change=all_but_equal)
    found = draw(data, "tradeoff")
    assert len(found.texts) == len(set(found.texts))
    assert sum(" × " in text for text in found.texts) == 1


def test_a_name_lies_over_no_point_and_no_other_name():
    page, point = Bbox([[0, 0], [300, 240]]), Bbox([[195, 115], [205, 125]])
    above, below = Bbox([[196, 128], [206, 138]]), Bbox([[150, 100], [250, 112]])
    free = find_free_box_for_name((200, 120), 60, [point], page)
    assert (free.x0, free.y0) == (196, 120 + ABOVE - NAME / 2)
    for taken in ([above], [above, below]):
        found = find_free_box_for_name((200, 120), 60, [point, *taken], page)
        assert not any(found.overlaps(other) for other in (point, *taken))
    # At the right edge it stays on the page, and where all is taken it lies somewhere all the same.
    assert find_free_box_for_name((295, 120), 60, [], page).x1 == page.x1
    found = find_free_box_for_name((200, 120), 60, [page], page)
    assert Bbox.intersection(found, page).bounds == pytest.approx(found.bounds)


def test_a_name_lies_over_no_number_of_an_axis(tmp_path):
    """The choice lies beside the highest number of the axis, with many points to its right."""
    cells = fixture.expand(strategies=("ddp", "fsdp"), models=("vgg16",))
    data, _ = analysed(tmp_path, cells)
    times = {("ddp", 2): (0.93, 94.0, True), ("fsdp", 2): (1.3, 96.0, True)}
    times |= {("ddp", n): (0.93 + n / 10, 93.0, False) for n in range(3, 9)}
    times |= {("fsdp", 4): (3.9, 97.0, True), ("fsdp", 8): (12.0, 17.0, False)}
    columns = ["training_time", "score", "unbeaten"]
    points = pd.DataFrame.from_dict(times, orient="index", columns=columns)
    with plt.rc_context(sheet.RC):
        figure = draw_tradeoff(replace(data, chosen_strategy_and_gpus=("ddp", 2)), points, {})
        figure.draw_without_rendering()
        axes = figure.axes[0]
        numbers = [t for t in (*axes.get_xticklabels(), *axes.get_yticklabels()) if t.get_text()]
        names = [t for t in axes.texts if " × " in t.get_text()]
        assert len(names) == 3
        for name, number in product(names, numbers):
            over = name.get_window_extent().overlaps(number.get_window_extent())
            assert not over, (name.get_text(), number.get_text())
    plt.close(figure)


def test_points_without_a_result_are_named_below_the_lines(tmp_path, draw):
    cells = fixture.expand(strategies=("ddp", "fsdp"), models=("vgg16",))
    data, _ = analysed(tmp_path, cells, {("ddp", "vgg16", 1): "oom"})
    assert "ddp: OOM on 1; 1 worker: OOM on 2, 4" in draw(data, "speedup").texts
    assert "ddp: OOM on 1" in draw(data, "throughput").texts
    assert "ddp: OOM" in draw(data, "score", 1).texts


def test_a_list_of_many_cells_without_a_score_is_cut():
    assert curves.limit_number_of_notes(["a"]) == ["a"]
    many = curves.limit_number_of_notes([f"s{i}: missing" for i in range(26)])
    assert len(many) == curves.MAX_NOTES
    assert many[-1] == "and 21 more: see the table"


@pytest.mark.slow
def test_figures_have_one_width_and_nothing_leaves_the_sheet(tmp_path, draw):
    """Whatever names are; no title and no hatch, a key of phases alone; no text below 12 pixels."""
    cells = fixture.expand(models=("vgg16",), repeats=2)
    data, _ = analysed(tmp_path, cells, fixture.DEMO_STATUSES)
    long = {"ddp": "a-variant-of-ddp-with-quite-a-long-name-of-its-own"}
    renamed = {
        name: getattr(data, name).replace({"strategy": long})
        for name in ("cells", "epochs", "summary")
    }
    variant = data.marks_by_strategy | {long["ddp"]: data.marks_by_strategy["ddp"]}
    data = plots.FigureData(
        **renamed, marks_by_strategy=variant, chosen_strategy_and_gpus=(long["ddp"], 2)
    )
    for name, count in all_figures(data):
        found = draw(data, name, count)
        assert found.figure.get_figwidth() * 96 == sheet.WIDTH
        assert bool(found.figure.legends) == (name == "breakdown")
        assert found.axes.get_title() == ""
        found.figure.draw_without_rendering()
        pixels = found.figure.bbox
        for text in texts_of(found.figure):
            assert text.get_fontsize() >= 12 * sheet.PX, name
            box = text.get_window_extent()
            assert box.x0 >= -2, (name, text.get_text())
            assert box.x1 <= pixels.x1 + 2, (name, text.get_text())
            assert box.y0 >= -2, (name, text.get_text())
            assert box.y1 <= pixels.y1 + 2, (name, text.get_text())
        assert not any(patch.get_hatch() for patch in found.axes.patches)


def test_names_beside_lines_keep_their_distance():
    wanted = [100.0, 101.0, 102.0, 20.0, 158.0, 160.0]
    places = axes.spread_overlapping_positions(wanted, 8, 160, curves.APART)
    assert all(b - a >= curves.APART - 1e-9 for a, b in pairwise(sorted(places)))
    assert min(places) >= 8
    assert max(places) <= 160
    assert sorted(wanted, key=lambda w: places[wanted.index(w)]) == sorted(wanted)
    assert axes.spread_overlapping_positions([50.0, 50.0], 0, 100, 14) == [43.0, 57.0]


def test_however_many_strategies_each_is_named():
    lines = [
        curves.Curve(f"s{i}", [1.0, 2.0], [1.0, 1.0 + i / 99], is_chosen_strategy=i == 5)
        for i in range(60)
    ]
    shown = curves.CurveChart(
        lines, {c.strategy: marks.create_mark("other", 0) for c in lines}, "workers"
    )
    with plt.rc_context(sheet.RC):
        figure = curves.draw_curves(shown)
    names = {t.get_text(): t.get_window_extent() for t in figure.axes[0].texts}
    plt.close(figure)
    assert set(names) == {f"s{i}" for i in range(60)}
    in_order = sorted(box.y0 for box in names.values())
    assert all(b - a >= curves.APART - 1 for a, b in pairwise(in_order))


def test_only_a_long_name_is_cut_and_in_its_middle():
    for name in ("ps-async-modified", "a", "n" * axes.MAX_LETTERS):
        assert axes.shorten_name(name) == name
    cut = axes.shorten_name("start" + "n" * axes.MAX_LETTERS + "end")
    assert len(cut) == axes.MAX_LETTERS
    assert cut.startswith("start")
    assert cut.endswith("end")


def test_marks_that_would_overlap_stand_in_lanes_of_their_row():
    row = rows.FigureRow("a", [rows.Point(v, workers_text="1") for v in (1.0, 1.01, 1.02, 5.0)])
    lanes = list(rows.iter_non_overlapping_lane_indices(row, rows.RowScale((1, 6), True, 200)))
    assert lanes == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("low", "high", "log"), [(0.8, 14, True), (211, 372, True), (0.97, 1.04, True), (0, 0.031, False)]
)  # fmt: skip
def test_ticks_are_few_round_and_apart(low, high, log):
    with plt.rc_context(sheet.RC):
        drawn = axes.create_figure_axes(60)
        axes.set_ticks(drawn.xaxis, axes.compute_axis_limits([low, high], 0.05, log), log, unit="s")
        axes.apply_layout(drawn)
        boxes = [t.get_window_extent() for t in drawn.get_xticklabels() if t.get_text()]
    plt.close(drawn.figure)
    assert 2 <= len(boxes) <= 7
    assert all(a.x1 <= b.x0 for a, b in pairwise(boxes))
    assert drawn.get_xticklabels()[-1].get_text().endswith(" s")


def test_names_from_records_are_no_formulas(tmp_path, draw):
    data, _ = analysed(tmp_path, fixture.expand(("ddp",), ("vgg16",), (1, 2)))
    name = r"a $\frac{$"
    changed = {
        n: getattr(data, n).replace({"strategy": {"ddp": name}}) for n in ("cells", "summary")
    }
    data = plots.FigureData(
        epochs=data.epochs, marks_by_strategy={name: data.marks_by_strategy["ddp"]}, **changed
    )
    figure = draw(data, "training_time").figure
    with plt.rc_context(sheet.RC):
        assert r"\frac{$" in sheet.render_svg(figure)


#: Figures of constructed records of `ddp` alone: none of servers, of `single` or of samplers.
OF_DDP = {
    *("training_time", "throughput", "speedup", "memory", "breakdown", "score_over_time"),
    *("tradeoff", "score_on_1", "score_on_2", "score_on_4"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statuses", "left"),
    [({}, OF_DDP), ({("ddp", "vgg16", n): "oom" for n in (1, 2, 4)}, {"training_time"})],
)
def test_figures_with_data_are_written_and_are_the_same_each_time(
    tmp_path, monkeypatch, statuses, left
):
    """Also where no cell of an experiment has a result; one of an earlier run does not stay."""
    cells = fixture.expand(strategies=("ddp",), models=("vgg16",))
    _, study_dir = analysed(tmp_path, cells, statuses)
    inputs = [f"--{n}={study_dir}/{n}.csv" for n in ("cells", "epochs", "summary")]
    inputs.append(f"--answers={study_dir}/answers.json")
    stale = tmp_path / "a" / "main" / "vgg16" / "staleness.svg"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert plots.main([*inputs, "--out-dir", str(tmp_path / "a")]) == 0
    drawn = {path.stem for path in stale.parent.iterdir()}
    assert drawn == left
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    assert {figure["file"] for figure in index} == {f"main/vgg16/{name}.svg" for name in left}
    for figure in index:
        with Image.open((tmp_path / "a" / figure["file"]).with_suffix(".png")) as image:
            assert image.size[0] == 2 * sheet.WIDTH
    # Each figure as the page shows it; in the other formats, which have one writer for all, the only one.
    formats = sheet.FORMATS if len(left) == 1 else {".svg": sheet.FORMATS[".svg"]}
    monkeypatch.setattr(sheet, "FORMATS", formats)
    assert plots.main([*inputs, "--out-dir", str(tmp_path / "b")]) == 0
    assert {path.suffix for path in (tmp_path / "b").rglob("*.*")} == {*formats, ".json"}
    for path in (tmp_path / "b").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "a" / path.relative_to(tmp_path / "b")).read_bytes()


@pytest.mark.parametrize("count", ["4", "128"])
def test_a_mark_with_a_number_is_in_the_picture_too(tmp_path, count):
    """Matplotlib leaves out of pictures what it takes to have no length."""
    own = rows.FigureRow(
        "ddp",
        [
            rows.Point(2.0, workers_text=count, is_chosen_candidate=True),
            rows.Point(9.0, workers_text="1"),
        ],
    )
    shown = rows.RowChart([own], {"ddp": marks.create_mark("replicas", 0)})
    with plt.rc_context(sheet.RC):
        figure = rows.draw_row_chart(shown)
        at = figure.axes[0].transData.transform
        numbered = [
            (line, t)
            for t in own.points
            for line in figure.axes[0].lines
            if t.value in line.get_xdata() and line.get_zorder() == 5
        ]
        (disc, ring) = [
            (*at(line.get_xydata()[0]), rows.compute_point_mark_width_px(t)) for line, t in numbered
        ]
        sheet.save_figure(figure, tmp_path / "f")
    with Image.open(tmp_path / "f.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    full, quiet = (
        tuple(round(255 * part) for part in to_rgb(c))
        for c in marks.FAMILIES["replicas"].full_and_quiet_light_colours
    )
    for (middle, bottom, width), colour in ((disc, full), (ring, quiet)):
        x, y = 2 * (middle - width / 2) + 2, pixels.shape[0] - 2 * bottom  # two dots a pixel
        near = pixels[int(y) - 2 : int(y) + 3, int(x) - 3 : int(x) + 4].reshape(-1, 3)
        assert np.abs(near - colour).sum(axis=1).min() < 30


@pytest.mark.slow
def test_one_svg_serves_both_themes(tmp_path, draw):
    """Every colour in it is a variable, which has a value for light and one for dark paper."""
    data, _ = analysed(tmp_path, fixture.expand(models=("vgg16",)))
    for name, count in all_figures(data):
        with plt.rc_context(sheet.RC):
            svg = sheet.render_svg(draw(data, name, count).figure)
        style, body = re.search(r"<style>(.*?)</style>(.*)", svg, re.DOTALL).groups()
        assert not re.search(r"#[0-9a-f]{6}", body), name
        light, dark = style.split("@media")
        used = set(re.findall(r"var\(--([a-z0-9-]+)\)", body))
        for theme in (light, dark):
            assert used <= set(re.findall(r"--([a-z0-9-]+):", theme)), name
        assert f'width="{sheet.WIDTH}"' in svg


def test_numbers_in_texts_keep_their_digits():
    """Places in the picture need two; a time of 0.819 s is none of 0.81 s."""
    assert (
        sheet.shorten_svg('<text x="1.23456">0.819 s</text> <!-- no -->')
        == '<text x="1.23">0.819 s</text> '
    )


def test_texts_and_areas_stand_out_from_both_papers():
    """Texts with 4.5 : 1, areas and outlines with 3 : 1; grid lines and bands carry nothing alone."""
    parts = {name for _, name, *_ in PARTS} | {REST[1]}
    for at, paper in enumerate(THEMES.values()):
        for name, least in {
            "ink": 4.5,
            "muted": 4.5,
            "bad": 4.5,
            **dict.fromkeys(parts, 3.0),
        }.items():
            assert contrast(sheet.THEME[name][at], paper) >= least, (name, at)


@pytest.mark.parametrize("eyes", EYES)
def test_the_filled_phases_of_a_step_are_told_apart_whoever_looks(eyes):
    filled = [name for _, name, is_filled, _ in PARTS if is_filled]
    for at in range(len(THEMES)):
        seen = [oklab(EYES[eyes] @ linear(sheet.THEME[name][at])) for name in filled]
        for one, other in pairwise(seen):  # of bars beside each other
            assert np.linalg.norm(one - other) >= 0.08


def test_a_light_colour_has_one_dark_counterpart():
    light = list(sheet.THEME.values())
    light += [
        pair
        for hue in marks.FAMILIES.values()
        for pair in zip(
            hue.full_and_quiet_light_colours, hue.full_and_quiet_dark_colours, strict=True
        )
    ]
    known = {}
    for one, dark in light:
        assert known.setdefault(one, dark) == dark


def test_many_worker_counts_are_drawn_on_logarithmic_axes(tmp_path, draw):
    cells = fixture.expand(strategies=("ddp",), models=("vgg16",), gpus=(1, 4, 16, 64))
    data, _ = analysed(tmp_path, cells)
    found = draw(data, "speedup")
    assert found.axes.get_xscale() == found.axes.get_yscale() == "log"
    assert [t.get_text() for t in found.axes.get_xticklabels()] == ["1", "4", "16", "64"]


@pytest.mark.slow
def test_a_doubted_figure_has_a_dagger_and_the_caption_says_what_it_means(tmp_path, draw):
    cells = fixture.expand(strategies=("ddp", "fsdp"), models=("vgg16",))
    data, _ = analysed(tmp_path, cells)
    names = (("training_time", None), ("throughput", None), ("score", 2))
    data.summary["flags"] = ""
    for name, count in names:
        found = draw(data, name, count)
        assert not any("†" in text for text in (*found.texts, found.caption)), name
    at = (data.summary["strategy"] == "fsdp") & data.summary["value"].notna()
    data.summary.loc[at, "flags"] = "warning: some-rule"
    for name, count in names:
        found = draw(data, name, count)
        assert sum("†" in text for text in found.texts) == 1, name
        assert "†: the audit has a finding on the value (warning)." in found.caption
    data.summary.loc[at, "flags"] = "warning: some-rule; unusable: same-value-twice"
    assert (
        "†: the audit has a finding on the value (unusable or warning)."
        in draw(data, "training_time").caption
    )


def test_the_card_is_drawn_where_peaks_come_near_it_and_else_told(tmp_path, draw):
    data, _ = analysed(tmp_path, fixture.expand(("ddp",), ("vgg16",)))
    peak = data.cells["peak_memory_bytes"].max()
    for card, drawn in ((1.2 * peak, True), (40 * peak, False)):
        data.cells["device_memory_bytes"] = card
        found = draw(data, "memory")
        assert ("the card" in found.texts) == drawn
        assert "The GPU has" in found.caption


def test_numbers_of_updates_and_epochs_have_whole_ticks():
    assert all(t == int(t) for t in axes.compute_round_ticks((1, 3), False, integers_only=True))


def test_a_new_strategy_needs_nothing_to_be_drawn(tmp_path, draw):
    """Nobody knows it: it is drawn as another one, with its name."""
    data, _ = analysed(tmp_path, fixture.expand(("ddp",), ("vgg16",)))
    own = {name: getattr(data, name).assign(strategy="mine") for name in ("epochs", "summary")}
    own["cells"] = data.cells.assign(strategy="mine", strategy_base="mine")
    (data,) = plots.build_figure_data(**own)
    assert data.marks_by_strategy["mine"].family == "other"
    for name, count in all_figures(data):
        assert any("mine" in text for text in draw(data, name, count).texts), name


@pytest.mark.slow
def test_captions_speak_of_what_is_drawn_alone(tmp_path, draw):
    """On GPUs, without failures and repeats: no CPU, no loss, no median, no servers."""
    data, _ = analysed(tmp_path, fixture.expand(("ddp",), ("vgg16",)))
    for name, count in all_figures(data):
        caption = draw(data, name, count).caption
        for absent in ("cross", "CPU", "Dotted", "median", "server", "Lines", "†"):
            assert absent not in caption, (name, absent)
    on_cpu, _ = analysed(tmp_path / "c", fixture.expand(("ddp",), ("vgg16",)), device="cpu")
    assert "CPU" in draw(on_cpu, "training_time").caption


def test_a_figure_over_epochs_is_not_called_by_the_last_one():
    assert PLOTS["score"].format_title(Score()) == "Accuracy by epoch"
    assert PLOTS["throughput"].format_title(Score()) == "Training throughput (samples/s)"


def test_tables_of_no_epochs_draw_no_scores(tmp_path):
    data, _ = analysed(tmp_path, fixture.expand(("ddp",), ("vgg16",)))
    empty = plots.FigureData(data.cells, data.epochs.iloc[:0], data.summary, data.marks_by_strategy)
    assert not {name for name, _ in all_figures(empty)} & {"score", "score_over_time"}
    assert isinstance(empty.epochs, pd.DataFrame)


def test_repeats_without_a_score_are_named_below_the_curves_of_the_others():
    rows = pd.DataFrame(
        [
            {"strategy": "ddp", "gpus": 4, "cells": 3, "ok": 3, "value": 0.9, "outcome": ""},
            {
                "strategy": "fsdp",
                "gpus": 4,
                "cells": 3,
                "ok": 1,
                "value": 0.9,
                "outcome": "2 × div.",
            },
            {"strategy": "ps-sync", "gpus": 4, "cells": 3, "ok": 0, "value": float("nan")}
            | {"outcome": "3 × OOM", "text": "OOM"},
        ]
    )
    assert list(measured.iter_notes_on_missing_values(rows)) == [
        "fsdp: 2 of 3 div.",
        "ps-sync: OOM",
    ]

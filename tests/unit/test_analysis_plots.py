"""Figures: everything has its mark, a strategy looks the same everywhere, files are stable."""

from __future__ import annotations

from itertools import combinations

import fixture_records as fixture
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import rgb_to_hsv, to_rgb
from PIL import Image

from stratbench.analysis import audit
from stratbench.analysis.figures import plots, style
from stratbench.analysis.figures.figure_list import PLOTS
from stratbench.analysis.figures.timelines import COLOURS
from stratbench.analysis.figures.tradeoffs import OTHER_PHASE_LOOKS, PHASE_LOOKS
from stratbench.analysis.records import collect
from stratbench.analysis.records.columns import COLUMNS, read_cells
from stratbench.analysis.records.findings import read_audit
from stratbench.analysis.records.score import Score
from stratbench.analysis.tables.summary import read_summary, summarise
from stratbench.strategies import REGISTRY, strategy_class

pytestmark = pytest.mark.slow


def analysed(root, cells, statuses=None, device="cuda"):
    """The experiment `main` of constructed records, ready to draw, and the study's folder."""
    study_dir = fixture.write_study(root, cells, statuses, device)
    collect.collect(cells, study_dir, study_dir / "cells.csv", study_dir / "epochs.csv")
    read = read_cells(study_dir / "cells.csv")
    audit.main(["--cells", str(study_dir / "cells.csv"), "--out", str(study_dir / "audit.csv")])
    findings = read_audit(study_dir / "audit.csv")
    summarise(read, findings).to_csv(study_dir / "summary.csv", index=False)
    found = plots.figure_data_by_experiment(
        read,
        pd.read_csv(study_dir / "epochs.csv"),
        read_summary(study_dir / "summary.csv"),
    )
    return found["main"], study_dir


@pytest.fixture
def draw():
    figures = []

    def of(experiment, name):
        with plt.rc_context(style.RC):
            figures.append(plots.draw_figure(name, experiment))
        return figures[-1]

    yield of
    for figure in figures:
        plt.close(figure)


def texts(figure):
    return [text.get_text() for axis in figure.axes for text in axis.texts]


@pytest.mark.parametrize("name", ["training_time", "memory"])
def test_every_cell_is_a_bar_or_a_labelled_mark(tmp_path, draw, name):
    cells = fixture.expand(models=("vgg16", "convnext_large"))
    experiment, _ = analysed(tmp_path, cells, fixture.DEMO_STATUSES)
    figure = draw(experiment, name)
    bars = sum(len(axis.patches) for axis in figure.axes)
    labels = [text for text in texts(figure) if text != "×"]
    assert sorted(labels) == ["OOM", "OOM", "div.", "error", "missing"]
    assert texts(figure).count("×") == len(labels)
    assert bars + len(labels) == len(cells)


@pytest.mark.parametrize(("device", "lines"), [("cuda", 3), ("cpu", 0)])
def test_model_states_are_marked_only_where_the_peak_holds_them(tmp_path, draw, device, lines):
    cells = fixture.expand(strategies=("ddp",), models=("vgg16",))
    experiment, _ = analysed(tmp_path, cells, device=device)
    figure = draw(experiment, "memory")
    assert len(figure.axes[0].collections) == lines
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert ("model states (part of the peak)" in legend) == bool(lines)


def test_points_without_a_result_are_crossed_and_named(tmp_path, draw):
    cells = fixture.expand(strategies=("ddp", "fsdp"), models=("vgg16",))
    experiment, _ = analysed(tmp_path, cells, {("ddp", "vgg16", 1): "oom"})
    found = texts(draw(experiment, "speedup"))
    assert "ddp, 1: OOM" in found
    assert "ddp, 2, 4: n/a (1 worker: OOM)" in found
    assert (
        found.count("×") == 3 + 2
    )  # one on the axis for each point, one for each line of the list
    assert "ddp, 1: OOM" in texts(draw(experiment, "throughput"))
    assert "× ddp: OOM" in texts(draw(experiment, "score"))


def test_a_list_of_many_cells_without_a_score_leaves_room_for_the_lines():
    figure, axis = plt.subplots()
    plots.score_notes(axis, [f"× s{i}: missing" for i in range(26)])
    plots.score_notes(axis, ["× ddp: OOM"])
    many, one = (text.split("\n") for text in texts(figure))
    plt.close(figure)
    assert one == ["× ddp: OOM"]
    assert len(many) == 7
    assert many[-2:] == ["× s5: missing", "and 20 more strategies: see the table"]


def test_repeats_give_error_bars_and_one_repeat_none(tmp_path, draw):
    for repeats, bars in ((1, 0), (3, 3)):
        cells = fixture.expand(strategies=("ddp",), models=("vgg16",), repeats=repeats)
        experiment, _ = analysed(tmp_path / str(repeats), cells)
        axis = draw(experiment, "training_time").axes[0]
        containers = [c for c in axis.containers if hasattr(c, "has_yerr")]
        assert len(containers) == bars


def test_speedups_have_the_ideal_line(tmp_path, draw):
    experiment, _ = analysed(tmp_path, fixture.expand(models=("vgg16",)))
    for name in ("speedup", "speedup_vs_single"):
        first = draw(experiment, name).axes[0].lines[0]
        assert list(first.get_xdata()) == list(first.get_ydata()) == [1, 4]


def test_every_figure_says_what_a_worker_is(tmp_path, draw):
    cells = fixture.expand(strategies=("single", "ddp"), models=("vgg16",))
    experiment, _ = analysed(tmp_path, cells, device="cpu")
    drawn = [name for name in PLOTS if plots.has_data(name, experiment)]
    assert len(drawn) > 6
    for name in drawn:
        figure = draw(experiment, name)
        note = figure.get_supxlabel().replace("\n", " ")
        assert "CPU process; the processes of a cell share 2 cores" in note


#: Figures of constructed records of `ddp` alone: none of servers, of `single` or of samplers.
OF_DDP = {
    *("training_time", "throughput", "speedup", "memory", "score", "breakdown"),
    *("score_over_time", "tradeoff"),
}


def test_names_from_records_are_no_formulas(tmp_path, draw):
    experiment, _ = analysed(tmp_path, fixture.expand(("ddp",), ("vgg16",), (1, 2)))
    experiment.cells["device_name"] = r"GPU $\frac{$"
    figure = draw(experiment, "training_time")
    figure.savefig(tmp_path / "figure.svg")
    assert r"$\frac{$" in figure.get_supxlabel()


@pytest.mark.parametrize(
    ("statuses", "without"),
    [({}, set()), ({("ddp", "vgg16", n): "oom" for n in (1, 2, 4)}, {"speedup", "breakdown"})],
)
def test_figures_with_data_are_written_and_are_the_same_each_time(
    tmp_path, monkeypatch, statuses, without
):
    """Also where no cell of an experiment has a result; one of an earlier run does not stay.

    Those of a bar chart and of lines are drawn again.
    """
    cells = fixture.expand(strategies=("ddp",), models=("vgg16",))
    _, study_dir = analysed(tmp_path, cells, statuses)
    inputs = ["--cells", str(study_dir / "cells.csv"), "--epochs", str(study_dir / "epochs.csv")]
    inputs += ["--summary", str(study_dir / "summary.csv")]
    stale = tmp_path / "a" / "main" / "staleness.svg"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert plots.main([*inputs, "--out-dir", str(tmp_path / "a")]) == 0
    drawn = {path.stem for path in (tmp_path / "a" / "main").iterdir()}
    assert drawn == OF_DDP - without
    for name in drawn:
        with Image.open(tmp_path / "a" / "main" / f"{name}.png") as image:
            assert min(image.size) > 300
    if without:
        return
    again = {name: plots.PLOTS[name] for name in ("training_time", "throughput")}
    monkeypatch.setattr(plots, "PLOTS", again)
    assert plots.main([*inputs, "--out-dir", str(tmp_path / "b")]) == 0
    for name in again:
        for kind in ("svg", "png", "pdf"):
            one = (tmp_path / "a" / "main" / f"{name}.{kind}").read_bytes()
            assert one == (tmp_path / "b" / "main" / f"{name}.{kind}").read_bytes()


def test_lines_start_at_zero_and_leave_room_above(tmp_path, draw):
    cells = fixture.expand(strategies=("ddp",), models=("vgg16",), gpus=(2,))
    experiment, _ = analysed(tmp_path, cells)
    axis = draw(experiment, "throughput").axes[0]
    low, high = axis.get_ylim()
    highest = axis.lines[0].get_ydata().max()
    assert low == 0
    assert 1.04 * highest < high < 1.2 * highest


def test_many_worker_counts_are_drawn_on_logarithmic_axes(tmp_path, draw):
    cells = fixture.expand(strategies=("ddp",), models=("vgg16",), gpus=(1, 4, 16, 64))
    experiment, _ = analysed(tmp_path, cells)
    axis = draw(experiment, "speedup").axes[0]
    assert axis.get_xscale() == axis.get_yscale() == "log"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "4", "16", "64"]


def test_a_doubted_figure_has_a_dagger_and_the_note_says_what_it_means(tmp_path, draw):
    cells = fixture.expand(strategies=("ddp", "fsdp"), models=("vgg16",))
    experiment, _ = analysed(tmp_path, cells)
    names = ("training_time", "throughput", "memory", "score", "tradeoff")
    for name in names:
        figure = draw(experiment, name)
        assert not any("†" in text for text in texts(figure)), name
        assert "†" not in figure.get_supxlabel()
    doubted = experiment.summary
    doubted.loc[(doubted["strategy"] == "fsdp") & (doubted["gpus"] == 2), "flags"] = "some-rule"
    for name in names:
        figure = draw(experiment, name)
        assert sum("†" in text for text in texts(figure)) == 1, name
        assert "†: doubtful, says the audit" in figure.get_supxlabel().replace("\n", " ")
    doubted.loc[doubted["flags"] != "", "flags"] = "some-rule; same-value-twice"
    note = draw(experiment, "training_time").get_supxlabel().replace("\n", " ")
    assert "†: unusable or doubtful, says the audit" in note


def test_numbers_of_updates_and_epochs_have_whole_ticks(tmp_path, draw):
    experiment, _ = analysed(tmp_path, fixture.expand(models=("vgg16",)))
    for name in ("staleness", "score"):
        figure = draw(experiment, name)
        figure.draw_without_rendering()
        for axis in figure.axes:
            assert all(float(tick).is_integer() for tick in axis.get_xticks()), name


def test_phases_and_workers_have_none_of_the_strategies_colours():
    def distance(a, b):
        return sum((x - y) ** 2 for x, y in zip(to_rgb(a), to_rgb(b), strict=True)) ** 0.5

    of_strategies = {known.colour for known in style.known_styles().values()}
    others = {*(c for c, _ in (*PHASE_LOOKS.values(), *OTHER_PHASE_LOOKS)), *COLOURS}
    assert min(distance(a, b) for a in others for b in of_strategies) > 0.15


#: What someone without green cones sees of linear RGB: Machado et al., A physiologically-based model
#: for simulation of color vision deficiency, 2009.
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
)
#: sRGB to XYZ, relative to the white point D65.
TO_XYZ = np.array(
    [[0.412456, 0.357576, 0.180437], [0.212673, 0.715152, 0.072175], [0.019334, 0.119192, 0.950304]]
) / np.array([[0.95047], [1.0], [1.08883]])


def difference(one: str, other: str) -> float:
    """CIE 1976 difference of two colours, the smaller of what people with and without deuteranopia see.

    From about 2 on it is noticed side by side, 10 is seen at a glance.
    """

    def lab(colour: str, seen: np.ndarray) -> np.ndarray:
        rgb = np.array(to_rgb(colour))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        xyz = TO_XYZ @ np.clip(seen @ linear, 0, 1)
        f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    views = (np.eye(3), DEUTERANOPIA)
    return min(float(np.linalg.norm(lab(one, v) - lab(other, v))) for v in views)


def test_the_difference_of_colours_is_what_it_is_known_to_be():
    assert difference("#000000", "#ffffff") == pytest.approx(100, abs=0.1)
    # Red and green of one lightness: far apart for most people, and not for some.
    assert difference("#c04000", "#5c7200") < 20


def test_thirty_strategies_can_be_told_apart_also_without_green_cones():
    """By colour, or else by marker and hatch at once."""
    variants = [(f"{base}-{i}", base) for base in ("ddp", "fsdp", "ps-async") for i in range(4)]
    looks = style.styles_by_strategy([*((name, name) for name in REGISTRY), *variants])
    assert len(looks) >= 30
    for (one, a), (other, b) in combinations(looks.items(), 2):
        apart = a.marker != b.marker and a.hatch != b.hatch
        assert apart or difference(a.colour, b.colour) > 12, (one, other)
    hues = [hue for hue, _ in style.FAMILIES.values()]
    assert min(difference(a, b) for a, b in combinations(hues, 2)) > 12


def test_a_family_shares_a_hue_and_no_marks():
    families: dict[str, list[str]] = {}
    for name in REGISTRY:
        families.setdefault(strategy_class(name).family, []).append(name)
    assert set(families) == set(style.FAMILIES) - {"other"}
    known = style.known_styles()
    for family, names in families.items():
        looks = [known[name] for name in names]
        assert (
            len({look.marker for look in looks})
            == len({look.hatch for look in looks})
            == len(names)
        )
        hue = rgb_to_hsv(to_rgb(style.FAMILIES[family][0]))[0]
        for look in looks:
            assert rgb_to_hsv(to_rgb(look.colour))[0] == pytest.approx(hue, abs=0.02)


def test_a_known_strategy_looks_the_same_whatever_else_the_study_has():
    alone = style.styles_by_strategy([("ddp", "ddp")])
    among = style.styles_by_strategy([("a", "ddp"), ("ddp", "ddp"), ("fsdp", "fsdp"), ("b", None)])
    assert alone["ddp"] == among["ddp"] == style.known_styles()["ddp"]


def test_variants_are_of_their_strategys_family_in_any_order():
    names = [("b", "fsdp"), ("a", "fsdp"), ("c", None)]
    found = style.styles_by_strategy(names)
    assert style.styles_by_strategy(reversed(names)) == found
    registered = sum(strategy_class(name).family == "shards" for name in REGISTRY)
    assert found["a"] == style.style_of("shards", registered)
    assert found["b"] == style.style_of("shards", registered + 1)
    assert found["c"] == style.style_of("other", 0)


def test_a_legend_fits_its_figure():
    from stratbench.analysis.figures.panels import legend_columns

    names = list(style.known_styles())
    for width_in in (4.2, 6.6, 9.9):
        columns = legend_columns(names, width_in)
        widest = max(0.68 + 0.073 * len(name) for name in names)
        assert columns == 1 or columns * widest <= width_in * 2
    assert legend_columns(names, 9.9) > legend_columns(names, 4.2)
    assert legend_columns(["ddp"], 1.0) == 1


def test_a_caption_speaks_of_what_is_drawn_alone():
    """A report of GPUs without failures and repeats: no cross, no CPU, no loss, no median."""
    row = dict.fromkeys(COLUMNS) | {
        "status": "ok", "repeat": 0, "strategy": "ddp", "gpus": 2, "device_kind": "cuda",
        "score_name": "accuracy", "strategy_kind": "collective",
    }  # fmt: skip
    rows = pd.DataFrame([row])
    captions = {name: plot.caption_of(rows) for name, plot in PLOTS.items()}
    for name, caption in captions.items():
        for absent in ("A cross", "CPU", "Dotted", "median", "servers"):
            if (name, absent) not in {("training_time", "CPU"), ("utilisation", "CPU")}:
                assert absent not in caption, (name, absent)
    assert "entropy" not in captions["score"]
    other = pd.DataFrame([
        row | {"device_kind": "cpu", "score_name": "loss", "least_loss": 1.0},
        row | {"status": "oom", "repeat": 1},
    ])  # fmt: skip
    assert "Dotted: the least possible loss." in PLOTS["score"].caption_of(other)
    assert "high-water mark" in PLOTS["memory"].caption_of(other)
    assert "cross" in PLOTS["training_time"].caption_of(other)


def test_a_figure_over_epochs_is_not_called_by_the_last_one():
    assert PLOTS["score"].title_of(Score()) == "Test accuracy by epoch (%)"

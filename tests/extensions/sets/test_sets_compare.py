"""Sets beside each other: ratios, what differs, what has no ratio, the decision and the regression watch."""

from __future__ import annotations

import csv
import json
import math
import random
import re
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import fixture_records as fixture
import numpy as np
import pytest
from scipy import stats

from regression_watch import two_sets
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.records.groups import Group
from stratbench.extensions.audit.across_cells.mixed import TABLE
from stratbench.extensions.sets.__main__ import main
from stratbench.extensions.sets.comparing import comparison, page, regression, tables
from stratbench.extensions.sets.comparing.compare import make_comparison_folder_name
from stratbench.extensions.sets.comparing.comparison import compare_result_sets, describe_comparison
from stratbench.extensions.sets.comparing.matching import classify_field_difference
from stratbench.extensions.sets.comparing.union import decide_over_sets
from stratbench.extensions.sets.keys import list_existing_sets
from stratbench.extensions.sets.reading import read_set
from stratbench.statistics import unpaired
from stratbench.study.config import validation
from stratbench.study.config.messages import ConfigError

EXAMPLE = Path(__file__).parents[3] / "benchmarks/results/paper-v1-v2"
NOISE = 0.01
CELLS = {
    "strategies": ("ddp", "fsdp"),
    "models": ("vgg16", "resnet50"),
    "gpus": (1, 2),
    "repeats": 3,
}


def slowed(record, factor: float) -> None:
    """Scale everything in a record that is a time of training, or follows from one."""
    time = record["time"]
    time["train_time_s"] *= factor
    time["throughput_samples_per_s"] /= factor
    time["epoch_times_s"] = [t * factor for t in time["epoch_times_s"]]
    for part in ("step_ms", "breakdown_ms"):
        time[part] = {k: v if k == "count" else v * factor for k, v in time[part].items()}
    for entry in (*record["score"]["per_epoch"], *record["workers"]):
        entry["train_time_s"] *= factor
    for key in ("achieved_flops_per_s", "mfu"):
        record["compute"][key] /= factor
    record["communication"]["implied_bytes_per_s"] /= factor
    for key in ("total_ms", "overlapped_ms", "exposed_ms"):
        if key in record["communication"]:
            record["communication"][key] *= factor
    record["energy"] = None
    time["total_s"] += time["train_time_s"] * (1 - 1 / factor)
    told = record["provenance"]
    end = datetime.fromisoformat(told["started"]) + timedelta(seconds=time["total_s"])
    told["finished"] = end.isoformat(timespec="seconds")


def a_set(folder: Path, name: str, slower=lambda cell: 1.0, change=None, **cells):
    """A study whose times scatter by NOISE, slower by a factor of each cell."""

    def changed(cell, record):
        noise = random.Random(f"{name}{cell}").gauss(0, NOISE)
        slowed(record, slower(cell) * math.exp(noise))
        if change:
            change(cell, record)
        return record

    expanded = fixture.expand(**CELLS | cells)
    return fixture.write_study(folder / name, expanded, change=changed)


def on_another_machine(cell, record):
    for worker in record["workers"]:
        worker["provenance"]["gpu"]["name"] = "<script>alert(1)</script>\u202eUPG"
        worker["provenance"]["software"]["torch"] = "=cmd|' /C calc'!A0"
    record["settings"]["threads"] = 4
    if cell.model == "resnet50":
        record["settings"]["lr"] = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`old`; `same`, measured again; `fast`, another machine, other rates of learning for one model."""
    root = tmp_path_factory.mktemp("sets")
    a_set(root, "old")
    a_set(root, "same")
    a_set(root, "fast", lambda cell: 0.5 if cell.strategy == "ddp" else 0.3, on_another_machine)
    a_set(root, "slow", lambda cell: 1.2 if cell.strategy == "ddp" else 1.0)
    return root


@pytest.fixture(scope="module")
def sets(folder):
    return {p.name: read_set(str(p / "constructed"), p.name) for p in folder.iterdir()}


def test_each_field_that_the_audit_compares_has_a_kind():
    """Without one, a comparison of sets that differ in the field would raise an error."""
    for entry in TABLE:
        for path in entry.field_path_prefixes:
            classify_field_difference(path)


def test_a_cells_ratio_has_welchs_interval():
    found = unpaired.compute_time_ratio([2.0, 2.2, 2.1], [1.0, 1.1])
    assert found.value == pytest.approx((2.0 * 2.2 * 2.1) ** (1 / 3) / 1.1**0.5)
    new, old = np.log([2.0, 2.2, 2.1]), np.log([1.0, 1.1])
    ends = stats.ttest_ind(new, old, equal_var=False).confidence_interval(0.95)
    assert found[1:] == pytest.approx(tuple(np.exp(ends)))
    assert unpaired.compute_time_ratio([2.0], [1.0, 1.1]) == (
        pytest.approx(2 / 1.1**0.5),
        None,
        None,
    )
    assert unpaired.compute_time_ratio([2.0, 2.0], [1.0, 1.0]).low is None


# Not of what other tests have left open, which may be collected here.
@pytest.mark.filterwarnings("error::RuntimeWarning", "error::FutureWarning")
def test_times_that_are_all_but_equal_have_an_interval_and_print_no_warning():
    found = unpaired.compute_time_ratio([3.0, 3.0 + 4e-15], [3.0, 3.0])
    assert found.value == pytest.approx(1)
    assert found.low < found.value < found.high
    assert unpaired.compute_geometric_mean_with_interval(
        [0.1, 0.1 + 2e-16, 0.1]
    ).value == pytest.approx(math.exp(0.1))
    lost = unpaired.compute_mean_slowdown([((3.0, 3.0 + 4e-15), (3.0, 3.0))], 0.025)
    assert lost.low == pytest.approx(0, abs=1e-12)


def test_the_intervals_are_those_of_scipy():
    chance = np.random.default_rng(3)
    new, old = chance.normal(1, 0.1, 4), chance.normal(1.2, 0.3, 7)
    low, high = stats.ttest_ind(new, old, equal_var=False).confidence_interval(0.95)
    assert unpaired.compute_score_difference(new, old)[1:] == pytest.approx((low, high))
    ends = stats.ttest_1samp(new, 0.0).confidence_interval(0.95)
    assert unpaired.compute_geometric_mean_with_interval(new)[1:] == pytest.approx(
        tuple(np.exp(ends))
    )


def test_two_sets_measured_alike_differ_by_nothing_but_noise(sets):
    found = compare_result_sets(sets["old"], sets["same"])
    assert len(found.cells_with_ratio) == 8
    assert [d.kind for d in found.machine_differences] == []
    assert "do not differ in the hardware, versions and flags" in describe_comparison(found)
    inside = [cell.time_ratio.low < 1 < cell.time_ratio.high for cell in found.cells_with_ratio]
    assert sum(inside) >= 7
    assert describe_comparison(found).startswith("Training in same takes ")
    assert (
        "times as long as in old, depending on the strategy. No ratio differs from 1 by more"
        in (describe_comparison(found))
    )
    single = [
        replace(
            c,
            first_measurements=replace(
                c.first_measurements, train_times_s=c.first_measurements.train_times_s[:1]
            ),
        )
        for c in found.cells_with_ratio
    ]
    told = describe_comparison(
        replace(found, strategy_means=tuple(comparison.average_ratios_by_strategy(single)))
    )
    assert (
        "depending on the strategy. The noise is unknown, because a set has only one repeat" in told
    )
    for mean in found.strategy_means:
        assert mean.time_ratio.value == pytest.approx(1, abs=0.02)
        assert mean.model_count == 2
    assert [(m.strategy, m.gpus) for m in found.strategy_means][:3] == [
        ("ddp", None),
        ("ddp", 1),
        ("ddp", 2),
    ]
    assert not (sets["old"].findings["severity"] == "unusable").any(), (
        "the times must be believable"
    )


def test_what_came_out_comes_first_then_what_differs_and_other_work_has_no_ratio(sets):
    found = compare_result_sets(sets["old"], sets["fast"])
    text = describe_comparison(found)
    assert text.startswith("Training in fast takes 0.30 times as long as in old with fsdp, 0.5")
    assert "hardware, cores, threads and nodes, versions" in text
    assert "No single one of these explains a ratio." in text
    assert {cell.group.model for cell in found.cells_with_ratio} == {"vgg16"}
    assert [c.no_ratio_reason for c in found.cells_without_ratio] == ["lr 0.01 against 0.5"] * 4
    cell = found.cells_without_ratio[0]
    untimed = replace(cell, other_measurements=replace(cell.other_measurements, train_times_s=()))
    assert untimed.no_ratio_reason == cell.no_ratio_reason, (
        "other work is the reason, whatever was measured"
    )
    assert text.endswith(" 4 of 8 common cells have no ratio; their strategies are ddp, fsdp.")
    assert [(d.field_path, d.first_value, d.other_value) for d in found.work_differences] == [
        ("settings.lr", "0.01", "0.5")
    ]
    assert {d.field_path for d in found.machine_differences} == {
        "settings.threads", "worker.gpu.name", "worker.software.torch"
    }  # fmt: skip
    ddp, fsdp = (m for m in found.strategy_means if m.gpus is None)
    assert ddp.time_ratio.value == pytest.approx(0.5, rel=0.02)
    assert fsdp.time_ratio.value == pytest.approx(0.3, rel=0.02)
    assert ddp.time_ratio.low < ddp.time_ratio.value < ddp.time_ratio.high < 1, (
        "of one model, by its repeats"
    )
    # fsdp took 1.05 times as long as ddp, and takes 0.63 times as long.
    change = found.rank_changes[0]
    assert (change.faster_in_first, change.faster_in_other) == ("ddp", "fsdp")
    assert change.ratio_in_first.value > 1 > change.ratio_in_other.value


def test_a_change_of_places_is_sure_only_where_both_intervals_leave_out_equality(sets):
    sure = [
        r for r in compare_result_sets(sets["old"], sets["fast"]).rank_changes if r.is_beyond_noise
    ]
    assert sure[0].ratio_in_first.low > 1 > sure[0].ratio_in_other.high
    chance = replace(sure[0], ratio_in_first=unpaired.IntervalEstimate(1.1, 0.9, 1.3))
    assert not chance.is_beyond_noise
    assert not replace(sure[0], ratio_in_first=unpaired.IntervalEstimate(1.1)).is_beyond_noise
    section = page.collect_comparison_section_values(
        replace(compare_result_sets(sets["old"], sets["fast"]), rank_changes=(chance,)), {}
    )
    shown = page.render_comparison_page(
        page.collect_comparison_page_values(
            [sets["old"]], [section], None, None, [], [], Constraints()
        )
    )
    assert "it may be chance</td>" in shown
    assert "both intervals leave out 1" not in shown
    assert " more</b> are not shown" not in shown


def test_of_many_changes_of_places_the_sure_ones_are_shown_and_the_rest_counted(sets):
    found = compare_result_sets(sets["old"], sets["fast"])
    sure = next(r for r in found.rank_changes if r.is_beyond_noise)
    chance = replace(sure, ratio_in_first=unpaired.IntervalEstimate(1.1, 0.9, 1.3))
    for changes, more, more_sure in (
        ((*[chance] * 13, sure), 2, 0),
        ((*[sure] * 13, chance), 2, 1),
        ([chance] * 12, 0, 0),
    ):
        section = page.collect_comparison_section_values(replace(found, rank_changes=changes), {})
        assert len(section["ranks"]) == 12
        assert section["ranks"][0].is_beyond_noise == (sure in changes)
        assert (section["more_ranks"], section["more_sure"]) == (more, more_sure)


def test_what_the_audit_doubts_is_said_beside_the_ratio(sets, tmp_path):
    def busy(cell, record):
        record["provenance"]["busy_at_start"] = {"0": {"other_cpu_cores": 20.0}}

    found = compare_result_sets(
        sets["old"], read_set(str(a_set(tmp_path, "busy", change=busy)), "busy")
    )
    assert all(cell.doubtful_rules == ("busy-machine",) for cell in found.cells_with_ratio)
    assert (
        "The audit doubts the times of 8 of 8 ratios by these rules: busy-machine."
        in describe_comparison(found)
    )
    assert (
        "the audit doubts these times: busy-machine"
        in regression.find_regressions([found], 0.5)[0].outcome_sentence
    )


def test_threads_and_what_follows_from_them_are_one_difference(sets, tmp_path):
    def threads(cell, record):
        record["settings"]["threads"] = record["provenance"]["threads_per_worker"] = 2
        for worker in record["workers"]:
            worker["provenance"]["environment"]["OMP_NUM_THREADS"] = "2"

    found = compare_result_sets(
        sets["old"], read_set(str(a_set(tmp_path, "two", change=threads)), "two")
    )
    assert "old and two differ in one condition" in describe_comparison(found)


def test_stand_ins_of_hosts_are_not_compared(sets):
    found, other = sets["old"], sets["same"]
    renamed = read_set(other.source, "renamed")
    for record in renamed.records:
        record["workers"][0]["provenance"]["host"]["name"] = "node1"
    assert {d.kind for d in compare_result_sets(found, renamed).machine_differences} == {"hosts"}
    again = read_set(other.source, "again")
    for record in again.records:
        record["workers"][0]["provenance"]["host"]["name"] = "node1"
    object.__setattr__(again, "manifest", {"hosts": "replaced"})
    assert compare_result_sets(found, again).machine_differences == ()


@pytest.mark.slow
def test_the_committed_example_is_what_a_comparison_writes(tmp_path):
    found = compare_result_sets(read_set("paper:v1", "v1"), read_set("paper:v2", "v2"))
    tables.write_comparison_tables(found, tmp_path)
    committed = sorted(p.relative_to(EXAMPLE) for p in EXAMPLE.rglob("*.*"))
    assert len(committed) == 5
    for name in committed:
        assert (tmp_path / "v2" / name).read_text() == (EXAMPLE / name).read_text(), (
            f"write {EXAMPLE / name} anew, by the command in docs/comparing.md"
        )


@pytest.mark.slow
def test_the_paper_says_how_little_its_versions_can_be_compared():
    found = compare_result_sets(read_set("paper:v1", "v1"), read_set("paper:v2", "v2"))
    assert len(found.cells_with_ratio) == 12
    assert all(cell.time_ratio == (1.0, None, None) for cell in found.cells_with_ratio)
    assert {c.no_ratio_reason for c in found.cells_without_ratio} == {
        "epochs 100 against not stated"
    }
    assert describe_comparison(found).startswith(
        "12 of 12 times in v2 equal those in v1 to the last digit, so they were measured only once. "
    )
    assert "Only one of the two sets states these values: precision" in describe_comparison(found)
    assert "22 cells finished only in v2." in describe_comparison(found)
    assert "0 kinds" not in describe_comparison(found)


@pytest.mark.slow
def test_the_decision_goes_over_all_sets_by_time_or_by_cost(sets):
    pair = [sets["old"], sets["same"]]
    by_time = decide_over_sets([sets["old"], sets["slow"]], {}, Constraints(gpus=2))
    assert [d.model for d in by_time] == ["vgg16", "resnet50"]
    assert {d.choice.strategy for d in by_time} <= {"ddp (old)", "fsdp (old)", "fsdp (slow)"}
    dear = decide_over_sets(pair, {"old": 10.0, "same": 1.0}, Constraints())
    assert all(d.choice.strategy.endswith("(same)") for d in dear)
    cheap = decide_over_sets(pair, {"old": 1.0, "same": 10.0}, Constraints())
    assert all(d.choice.strategy.endswith("(old)") for d in cheap)
    # Nothing in common: no job of the one is a job of the other.
    assert decide_over_sets([sets["old"], read_set("paper:v1")], {}, Constraints()) == []


@pytest.mark.slow
def test_two_experiments_of_one_job_are_told_apart(tmp_path):
    cells = [c for name in ("first", "second") for c in fixture.expand(**CELLS, experiment=name)]
    sets = [
        read_set(str(fixture.write_study(tmp_path / name, cells)), name) for name in ("old", "new")
    ]
    for decision in decide_over_sets(sets, {}, Constraints()):
        assert re.fullmatch(r"\w+ \((old|new), (first|second)\)", decision.choice.strategy)


@pytest.mark.slow
def test_the_page_and_its_tables_hold_foreign_texts_as_texts(folder, tmp_path, capsys):
    named = {"old": str(folder / "old/constructed"), "fast": str(folder / "fast/constructed")}
    assert main(["compare", "--sets", json.dumps(named), "--out", str(tmp_path)]) == 0
    assert "differ in several conditions: " in " ".join(capsys.readouterr().out.split())
    out = tmp_path / "old+fast"
    page = (out / "index.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    explored = (out / "explore.html").read_text()
    assert "<script>alert" not in explored
    assert '"levels":["old","fast"]' in explored
    assert (
        page.index(">By strategy<")
        < page.index(">Not comparable<")
        < page.index('<h2 id="differs"')
    )
    for name in ("differences", "strategies", "main/time_ratio"):
        assert all((out / f"fast/{name}.{kind}").stat().st_size for kind in ("csv", "md", "tex"))
    assert "<script>" not in (out / "fast/differences.md").read_text()
    turned = [p for p in out.rglob("*") if p.is_file() and b"\xe2\x80\xae" in p.read_bytes()]
    assert not turned, "U+202E turns round what follows it"
    assert "\\u202e" not in explored
    assert "alert(1)&lt;/script&gt;?UPG" in page
    for path in out.rglob("*.csv"):
        with open(path, newline="") as file:
            for cell in (cell for row in csv.reader(file) for cell in row):
                is_number = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", cell)
                assert is_number or not cell.startswith(("=", "+", "-", "@")), (path, cell)
    assert len(list(out.rglob("*.svg"))) == 1


# ---------------------------------------------------------------- the regression watch


@pytest.mark.parametrize(
    ("repeats", "slower", "where", "allowed", "least", "most"),
    [
        (3, 0.0, "strategy", 0.0, 0, 3),  # A/A: 5 % of 20 at most, by simulation 3.5 %
        (3, 0.0, "strategy", 0.05, 0, 0),
        (3, 0.02, "strategy", 0.0, 19, 20),
        (3, 0.02, "strategy", 0.05, 0, 0),
        (3, 0.05, "strategy", 0.01, 20, 20),
        (3, 0.05, "strategy", 0.05, 0, 2),  # just what is allowed
        (3, 0.20, "strategy", 0.05, 20, 20),
        (5, 0.20, "cell", 0.05, 20, 20),  # a mean over cells hides it: 3 %
    ],
)
def test_planted_slowdowns_are_found_and_noise_is_not(repeats, slower, where, allowed, least, most):
    chance = np.random.default_rng(7)
    found = 0
    for _ in range(20):
        watched = regression.find_regressions([two_sets(chance, repeats, slower, where)], allowed)
        found += regression.has_failing_outcome(watched)
    assert least <= found <= most


@pytest.mark.parametrize(
    ("other", "allowed", "code", "told"),
    [
        ("same", 0.05, 0, "nothing slower"),
        ("slow", 0.05, 1, "slow: ddp: slower, +"),
        ("slow", 0.5, 0, "nothing slower"),
        ("fast", 0.0, 0, "fast: fsdp: within, -"),
    ],
)
def test_compare_fails_where_a_strategy_is_slower(
    folder, sets, tmp_path, capsys, monkeypatch, other, allowed, code, told
):
    monkeypatch.setattr(
        "stratbench.extensions.sets.comparing.compare.read_set", lambda _, name: sets[name]
    )
    monkeypatch.setattr(
        "stratbench.extensions.sets.comparing.figures.draw_ratio_figures", lambda *_: {}
    )
    named = {name: str(folder / name / "constructed") for name in ("old", other)}
    judge = ["--compare", json.dumps({"fail_above": allowed})]
    assert main(["compare", "--sets", json.dumps(named), "--out", str(tmp_path), *judge]) == code
    assert told in capsys.readouterr().out
    assert "Regression watch" in (tmp_path / f"old+{other}/index.html").read_text()


def test_no_two_comparisons_share_a_folder():
    names = [["a-b", "c"], ["a", "b-c"], ["c", "a-b"]]
    names += [[100 * "a", "b" * 100], [100 * "a", "c" * 100]]
    folders = [make_comparison_folder_name(sets) for sets in names]
    assert len(set(folders)) == len(folders)
    assert max(map(len, folders)) < 120


@pytest.mark.slow
def test_a_comparison_of_other_sets_in_the_same_folder_is_told(tmp_path, capsys):
    def compared(*sources):
        named = json.dumps(dict(zip("ab", sources, strict=True)))
        assert main(["compare", "--sets", named, "--out", str(tmp_path)]) == 0
        return [
            line for line in capsys.readouterr().err.splitlines() if "which is now replaced" in line
        ]

    assert compared("paper:v1", "paper:v2") == []
    (tmp_path / "a+b" / "notes.txt").write_text("mine")
    assert compared("paper:v1", "paper:v2") == [], "the same sets, made again"
    [line] = compared("paper:v2", "paper:v1")
    assert (
        line
        == f"{tmp_path}/a+b had the comparison of a=paper:v1, b=paper:v2, which is now replaced"
    )
    assert (tmp_path / "a+b" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("there", ["a file", "a folder"])
def test_a_comparison_overwrites_nothing_of_others(tmp_path, capsys, there):
    out = tmp_path / "out"
    if there == "a file":
        out.write_text("mine")
    else:
        (out / "a+b").mkdir(parents=True)
        (out / "a+b" / "index.html").write_text("mine")
    sets = json.dumps({"a": "paper:v1", "b": "paper:v2"})
    assert main(["compare", "--sets", sets, "--out", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert str(out) in error
    assert "mine" in {path.read_text() for path in (out, out / "a+b/index.html") if path.is_file()}
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 1


def test_a_set_called_as_a_page_is_refused(capsys):
    named = {"a": "paper:v1", "index.html": "paper:v2"}
    assert main(["compare", "--sets", json.dumps(named), "--out", "none"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: 'index.html' cannot be the name of a set")
    assert told.count("\n") == 1


def test_one_repeat_cannot_tell(tmp_path):
    old = read_set(str(a_set(tmp_path, "one", repeats=1)), "one")
    new = read_set(str(a_set(tmp_path, "two", lambda _: 2.0, repeats=1)), "two")
    watched = regression.find_regressions([compare_result_sets(old, new)], 0.05)
    assert [w.outcome for w in watched] == ["cannot tell"] * 2
    assert "noise is unknown" in watched[0].outcome_sentence
    told = list(regression.describe_regressions(watched, 0.05))
    assert (
        told[0]
        == "Regressions (5.0% slower is allowed): the repeats do not show whether anything is slower; "
        "unknown for 2 strategies, because of too few repeats."
    )


def contradictory(cell, record):
    """What the audit calls unusable: other times of the workers than the cell's."""
    if cell.strategy == "ddp":
        for worker in record["workers"]:
            worker["train_time_s"] *= 0.5


@pytest.mark.slow
def test_a_strategy_without_a_record_in_one_set_looks_as_in_the_other(sets, tmp_path):
    """Its rows of cells.csv name no base strategy there."""
    gone = {("fsdp", model, gpus): "missing" for model in CELLS["models"] for gpus in CELLS["gpus"]}
    part = fixture.write_study(tmp_path / "part", fixture.expand(**CELLS), gone)
    named = {"old": sets["old"].source, "part": str(part)}
    assert main(["compare", "--sets", json.dumps(named), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/old+part/part/main/vgg16_time_ratio.svg").is_file()


def test_what_is_no_longer_usable_or_gone_fails_the_watch(sets, tmp_path, capsys):
    new = read_set(str(a_set(tmp_path, "new", change=contradictory)), "new")
    watched = regression.find_regressions([compare_result_sets(sets["old"], new)], 0.05)
    assert [w.outcome_sentence for w in watched if w.is_failure] == [
        "new: ddp, 4 cells rejected by the audit: vgg16 on 1 (main), vgg16 on 2 (main), "
        "resnet50 on 1 (main), resnet50 on 2 (main): no longer judged"
    ]
    assert regression.has_failing_outcome(watched)
    told = list(regression.describe_regressions(watched, 0.05))
    assert told[0].endswith("nothing slower, 4 cells no longer judged.")
    assert told[1] == f"  {watched[0].outcome_sentence}"
    fewer = read_set(str(a_set(tmp_path, "fewer", strategies=("ddp",), gpus=(1,))), "fewer")
    watched = regression.find_regressions([compare_result_sets(sets["old"], fewer)], 0.05)
    assert [w.subject.partition(":")[0] for w in watched if w.is_failure] == [
        "ddp, 2 cells without a record",
        "fsdp, 4 cells without a record",
    ]
    # A record that is no measurement is none that could have ended otherwise.
    software = {"change": lambda cell, record: record["provenance"].update(software_gpu=True)}
    none = read_set(str(a_set(tmp_path, "none", **software)), "none")
    watched = regression.find_regressions([compare_result_sets(sets["old"], none)], 0.05)
    assert {w.outcome for w in watched if w.is_failure} == {"no longer judged"}
    # What the first set cannot be held against either was never judged.
    for first in (new, fewer):
        assert not regression.has_failing_outcome(
            regression.find_regressions([compare_result_sets(first, sets["old"])], 0.5)
        )


def test_other_work_is_named_and_fails_nothing(sets):
    """A learning rate was changed on purpose."""
    watched = regression.find_regressions([compare_result_sets(sets["old"], sets["fast"])], 0.0)
    assert not regression.has_failing_outcome(watched)
    assert [w.outcome_sentence for w in watched if w.outcome == "not judged"] == [
        f"fast: {s}, 2 cells other work: resnet50 on 1 (main), resnet50 on 2 (main): not judged"
        for s in ("ddp", "fsdp")
    ]


@pytest.mark.slow
def test_a_cell_that_no_longer_finishes_fails_the_watch(sets, tmp_path):
    cells = fixture.expand(**CELLS)
    folder = fixture.write_study(tmp_path, cells, {("fsdp", "vgg16", 2): "oom"})
    found = compare_result_sets(sets["old"], read_set(str(folder), "new"))
    watched = regression.find_regressions([found], 1.0)
    assert [w.outcome_sentence for w in watched if w.is_failure] == [
        "new: fsdp on 2, vgg16 (main), OOM: no longer finishes"
    ]
    assert regression.has_failing_outcome(watched)
    # The other way round nothing is lost.
    back = compare_result_sets(read_set(str(folder), "new"), sets["old"])
    assert not regression.has_failing_outcome(regression.find_regressions([back], 1.0))


def test_a_cell_of_which_some_repeats_no_longer_finish_is_named(sets, tmp_path):
    def change(cell, record):
        key = (cell.strategy, cell.model, cell.gpus)
        if cell.repeat != 1 and key == ("fsdp", "vgg16", 2):
            return fixture.make_record(cell, "oom")
        return record

    folder = fixture.write_study(tmp_path, fixture.expand(**CELLS), change=change)
    new = read_set(str(folder), "new")
    watched = regression.find_regressions([compare_result_sets(sets["old"], new)], 1.0)
    told = "new: fsdp on 2, vgg16 (main), OOM: finishes less often"
    assert [w.outcome_sentence for w in watched if w.outcome == "finishes less often"] == [told]
    assert not regression.has_failing_outcome(watched)
    first, *lines = regression.describe_regressions(watched, 1.0)
    assert "1 finishing less often" in first
    assert f"  {told}" in lines
    back = regression.find_regressions([compare_result_sets(new, sets["old"])], 1.0)
    assert not any(w.outcome == "finishes less often" for w in back)


def test_a_repeat_without_a_record_neither_saves_a_cell_nor_loses_one(sets, tmp_path):
    """Of fsdp's two cells, one is out of memory where it ran; of ddp's, the audit rejects what ran."""
    lost, rejected = ("fsdp", "vgg16", 2), ("ddp", "vgg16", 2)

    def change(cell, record):
        key = (cell.strategy, cell.model, cell.gpus)
        if cell.repeat == 2 and key in (lost, rejected):
            return None
        if key == rejected:
            slowed(record, 1e-6)
        return record

    cells = fixture.expand(**CELLS)
    folder = fixture.write_study(tmp_path, cells, {lost: "oom"}, change=change)
    found = compare_result_sets(sets["old"], read_set(str(folder), "new"))
    assert [
        w.outcome_sentence for w in regression.find_regressions([found], 1.0) if w.is_failure
    ] == [
        "new: fsdp on 2, vgg16 (main), OOM: no longer finishes",
        "new: ddp, 1 cell rejected by the audit: vgg16 on 2 (main): no longer judged",
    ]
    [cell] = [c for c in found.common_cells if c.group == Group("main", *rejected)]
    assert cell.no_ratio_reason == "measured in one set, rejected by the audit in the other"
    assert cell.other_measurements.failure_text == ""


def test_other_data_of_the_same_name_are_no_match(tmp_path):
    """Told by what decides the samples, too, where the bytes alone would not show what differs."""
    one = {"strategies": ("ddp",), "models": ("vgg16",), "gpus": (1,), "dataset": "made"}

    def of(samples: int, sha256: str):
        def change(cell, record):
            record["settings"]["data_spec"] = {"source": "synthetic", "train_samples": samples}
            record["data"]["sha256"] = sha256

        return change

    first, same, other = (
        read_set(str(a_set(tmp_path, name, change=of(*made), **one)), name)
        for name, made in {"a": (64, "1" * 64), "b": (64, "1" * 64), "c": (32, "2" * 64)}.items()
    )
    assert [c.no_ratio_reason for c in compare_result_sets(first, same).common_cells] == [""]
    found = compare_result_sets(first, other)
    [cell] = found.cells_without_ratio
    assert cell.no_ratio_reason.startswith("data_spec.train_samples 64 against 32; ")
    told = {d.field_path: (d.kind, d.first_value, d.other_value) for d in found.work_differences}
    assert told["settings.data_spec.train_samples"] == ("data", "64", "32")
    assert told["data.sha256"][0] == "data"


# ---------------------------------------------------------------- the config


def config_with(**keys):
    first = {"dataset": "digits", "strategies": ["ddp"], "models": ["vgg-compact"], "gpus": [1]}
    first |= {"epochs": 1, "global_batch": 64, "lr": 0.1}
    return {"study": "demo", "studies": {"demo": {"experiments": {"first": first}}}} | keys


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"sets": "a.zip"}, "sets = 'a.zip': must be a mapping"),
        ({"sets": ["a.zip"]}, "sets = ['a.zip']: must be a mapping"),
        ({"sets": {"a": "a.zip"}}, "has a single set; name two or more"),
        ({"sets": {"a": "x.zip", "b": "./x.zip"}}, "sets.b = './x.zip': is the same set as sets.a"),
        ({"sets": {"a": "paper:v1", "b": "paper:v1"}}, "is the same set as sets.a"),
        ({"sets": {"a": "paper:v3", "b": "x"}}, "Allowed: paper:v1, paper:v2"),
        ({"sets": {"a": 3.5, "b": "x"}}, "sets.a = 3.5: must be text"),
        ({"sets": {"../a": "y", "b": "x"}}, "the name '../a' is part of paths"),
        ({"sets": {"a": "y", "Index.html": "x"}}, "Index.html: is the name of a page"),
        ({"compare": {"fail_above": -0.1}}, "must be at least 0"),
        ({"compare": {"fail_above": 5}}, "must be at most 1"),
        ({"compare": {"fail_abov": 0.1}}, "Did you mean 'fail_above'?"),
        ({"compare": {"prices": {"a": 0}}}, "must be greater than 0"),
        ({"sets": {"a": "x", "b": "y"}, "compare": {"prices": {"c": 1}}}, "Allowed: a, b"),
        ({"sets": {"a": "x", "b": "y"}, "compare": {"prices": {"a": 1}}}, "no price for b"),
        ({"bundle": {"hosts": "hidden"}}, "Allowed: named, replaced"),
    ],
)  # fmt: skip
def test_mistakes_in_the_config_end_in_one_sentence(keys, told):
    with pytest.raises(ConfigError) as error:
        validation.validate_config(config_with(**keys))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_set_that_is_not_there_is_told_before_anything_runs(tmp_path):
    found = validation.validate_config(
        config_with(sets={"a": str(tmp_path), "b": str(tmp_path / "no")})
    )
    with pytest.raises(ConfigError, match=r"sets\.b = .*no': there is no such file or folder"):
        list_existing_sets(found)
    with pytest.raises(ConfigError, match="sets: is missing"):
        list_existing_sets(validation.validate_config(config_with()))

"""The benchmark that holds a + b/N to published step times: its figures, and odd files."""

from __future__ import annotations

import gzip
import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from launching import LIMIT_S

ROOT = Path(__file__).parents[3]
#: Step times of seven trainings on 1 to 64 A100s (ElasticFlow, Apache-2.0; its README says more).
PUBLISHED = ROOT / "benchmarks/results/projection/elasticflow.csv"


def run(path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/prediction/projection.py"), str(path), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_published_table_has_the_figures_of_this_code(tmp_path):
    done = run(PUBLISHED, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    made, kept = (
        pd.read_csv(folder / "projection.csv").set_index(["source", "factor"])
        for folder in (tmp_path, PUBLISHED.parent)
    )
    for factor in ("x2", "x4", "x8"):
        row, told = made.loc[("elasticflow", factor)], kept.loc[("elasticflow", factor)]
        for column in ("cells", "median_percent", "p90_percent", "coverage_percent", "refused"):
            assert row[column] == pytest.approx(told[column], abs=0.01, nan_ok=True), (
                factor,
                column,
            )
    # What the collection's own program gives for a + b/N on the same cells.
    assert made.loc[("elasticflow", "x2")].median_percent == pytest.approx(4.74, abs=0.01)


def test_a_file_with_holes_is_read_as_far_as_it_goes(benchmark, tmp_path, capsys):
    odd = tmp_path / "odd.csv"
    odd.write_text(
        "gpus,throughput,scaling,extra\n"
        "1,100,weak,x\n2,190,weak,\n2,194,Weak,\n4,370,weak,\n8,-1,weak,\n16,nan,weak,\n,5,weak,\n"
        "32,1e3,mixed,\n8,seven,weak,\n2.5,7,weak,\n"
    )
    assert benchmark.main([str(odd)]) == 0
    told = capsys.readouterr().out
    assert "left out: 2 rows, no count of GPUs" in told
    assert "left out: 3 rows, neither throughput nor step time" in told
    assert "left out: 1 rows, neither weak nor strong scaling" in told
    odd.write_text("gpus,step_time_s,scaling\n1,1,strong\n2,.6,strong\n4,.4,strong\n16,.2,strong\n")
    assert benchmark.main([str(odd)]) == 0
    assert capsys.readouterr().out.count("x8") == 3  # 2 -> 16, in its own row and in two pools
    for unusable in ("gpus,throughput\n1,5\n", ""):
        odd.write_text(unusable)
        assert benchmark.main([str(odd)]) == 1


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/prediction"))
    return importlib.import_module("projection")


def test_other_units_and_a_scaling_that_is_not_stated_give_the_same_times(benchmark, tmp_path):
    """The same weak series four times; and what cannot be one series is left out as a whole."""
    file = tmp_path / "units.csv"
    file.write_text(
        "Series,GPUs,throughput,throughput_unit,global_batch,per_gpu_batch,scaling,step_time_s\n"
        + "".join(
            f"all,{n},{rate},image/s,{32 * n},32,weak,\n"
            f"each,{n},{rate / n},image/s/GPU,{32 * n},32,weak,\n"
            f"steps,{n},{rate / n / 32},step/s,{32 * n},32,weak,\n"
            f"told,{n},{rate},image/s,{32 * n},32,,\n"
            f"turns,{n},{rate if n > 1 else ''},image/s,,,weak,{'' if n > 1 else 1}\n"
            f"changes,{n},{rate},{'image/s' if n > 1 else 'step/s'},,,weak,\n"
            for n, rate in ((1, 100), (2, 180), (4, 320))
        )
    )
    rows, left_out = benchmark.read(file)
    times = {name: [p.step_s for p in points] for _, name, *_, points in benchmark.series_of(rows)}
    assert set(times) == {"all", "each", "steps", "told"}
    for name in times:
        relative = [t / times[name][0] for t in times[name]]
        assert relative == pytest.approx([1, 2 / 1.8, 4 / 3.2]), name
    assert left_out["of a series that changes its scaling or its unit"] == 3
    assert left_out["of a series that states throughput and step times by turns"] == 3


def test_a_file_without_what_is_needed_is_named_with_its_columns(benchmark, tmp_path, capsys):
    file = tmp_path / "other.csv"
    file.write_text("workers,seconds\n1,2\n")
    assert benchmark.main([str(file)]) == 1
    assert "needs the columns gpus, and throughput or step_time_s; it has workers" in (
        capsys.readouterr().err
    )


#: A file that says nothing, and what is told of it.
UNUSABLE = {
    "gpus,throughput,scaling": "has no rows",
    "gpus,GPUs,throughput\n1,1,5": "has the column gpus twice",
    "gpus;throughput\n1;5": "it has gpus;throughput",
    "gpus,throughput\n1,2\n3,4,5,6": "Expected 2 fields in line 3",
    'gpus,throughput\n1,"2\n': "EOF inside string",
    "gpus,throughput,scaling\n4,100,weak": "no series has 2 counts",
    "gpus,throughput,scaling\n4,1,weak\n4,2,weak\n4,3,weak": "it has 1 series in 3 usable rows",
    "gpus,throughput\n1,5\n2,9\n4,17": "0 usable rows",
    "gpus,throughput,scaling\n1,inf,weak\n2,nan,weak\n4,-3,weak": "0 usable rows",
    "gpus,throughput,scaling\n1,1e300,weak\n2,2e300,weak\n4,1e-300,weak": "0 usable rows",
    "gpus,throughput,scaling\n1e18,1,weak\n2e18,2,weak\n4e18,3,weak": "0 usable rows",
    "gpus,throughput,throughput_unit,scaling\n1,9,s/step,weak\n2,8,s/step,weak": "0 usable rows",
}


@pytest.mark.parametrize("text", UNUSABLE)
def test_a_file_that_says_nothing_is_refused_in_a_sentence(text, benchmark, tmp_path, capsys):
    file = tmp_path / "odd.csv"
    file.write_text(text)
    assert benchmark.main([str(file)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {file}: ")
    assert UNUSABLE[text] in said


def test_files_that_are_none_are_refused_in_a_sentence(benchmark, tmp_path, capsys):
    file = tmp_path / "odd.csv"
    for content in (b"", bytes(range(256)), "gpus,throughput\n1,2".encode("utf-16")):
        file.write_bytes(content)
        assert benchmark.main([str(file)]) == 1
        assert capsys.readouterr().err.startswith("error: ")
    assert benchmark.main([str(tmp_path)]) == 1


@pytest.mark.parametrize(
    "unit",
    ["tokens/s/chip", "img/s/card", "samples/s/worker", "samples/s per rank", "tokens/s/GCD",
     "tokens_per_second_per_tpu", "images/sec/device", "tok/s/accelerator", "tokens/GPU/s", "samples/s/GPUs"],
)  # fmt: skip
def test_a_unit_of_one_device_counts_for_all_gpus(unit, benchmark, tmp_path):
    assert relative_times(benchmark, tmp_path, unit, (100, 90, 80)) == pytest.approx(
        [1, 1 / 0.9, 1 / 0.8]
    )


@pytest.mark.parametrize(
    "unit",
    ["global_step/sec", "minibatches/s", "mini-batches/s", "optimizer steps/s", "it/s",
     "train_steps_per_second", "iterations/s", "batches/s", "training steps/s"],
)  # fmt: skip
def test_a_unit_of_steps_counts_whole_batches(unit, benchmark, tmp_path):
    assert relative_times(benchmark, tmp_path, unit, (1, 0.9, 0.8)) == pytest.approx(
        [1, 1 / 0.9, 1 / 0.8]
    )


@pytest.mark.parametrize("unit", ["image/s", "tokens/s", "micro-batches/s", "samples per second"])
def test_another_unit_is_of_all_gpus_together(unit, benchmark, tmp_path):
    assert relative_times(benchmark, tmp_path, unit, (100, 180, 320)) == pytest.approx(
        [1, 1 / 0.9, 1 / 0.8]
    )


def relative_times(benchmark, folder: Path, unit: str, rates: tuple[float, ...]) -> list[float]:
    """The times of a weak series on 1, 2 and 4 GPUs, the first being 1."""
    file = folder / "unit.csv"
    file.write_text(
        "gpus,throughput,throughput_unit,scaling\n"
        + "".join(f"{n},{r},{unit},weak\n" for n, r in zip((1, 2, 4), rates, strict=True))
    )
    rows, left_out = benchmark.read(file)
    assert not left_out
    ((*_, points),) = benchmark.series_of(rows)
    return [p.step_s / points[0].step_s for p in points]


@pytest.mark.parametrize(
    ("unit", "reason"),
    [("samples/s/node", "throughput of a node, not of a GPU or of all"),
     ("tokens per second per node", "throughput of a node, not of a GPU or of all"),
     ("steps/s/GPU", "steps per GPU, an unclear unit")],
)  # fmt: skip
def test_an_unclear_unit_is_left_out_and_counted_but_for_its_step_times(
    unit, reason, benchmark, tmp_path
):
    file = tmp_path / "node.csv"
    file.write_text(
        "series,gpus,throughput,throughput_unit,scaling,step_time_s\n"
        + "".join(
            f"bare,{n},100,{unit},weak,\ntimed,{n},100,{unit},weak,{n}\n" for n in (8, 16, 32)
        )
    )
    rows, left_out = benchmark.read(file)
    assert left_out == {reason: 3}
    assert rows.time.tolist() == [8, 16, 32]


@pytest.mark.parametrize(("seconds", "taken"), [((1, 1.1, 1.5), 1), ((1, 1.1, 1.2), 0)])
def test_step_times_count_where_the_throughput_contradicts_them(
    seconds, taken, benchmark, tmp_path, capsys
):
    file = tmp_path / "both.csv"
    file.write_text(
        "gpus,throughput,throughput_unit,scaling,step_time_s\n"
        + "".join(
            f"{n},{rate},image/s,weak,{s}\n"
            for n, rate, s in zip((1, 2, 4), (100, 180, 360), seconds, strict=True)
        )
    )
    rows, _ = benchmark.read(file)
    by_throughput = [0.01, 2 / 180, 4 / 360]
    assert rows.time.tolist() == pytest.approx(seconds if taken else by_throughput)
    assert benchmark.main([str(file)]) == 0
    said = "step times taken: 1 series, whose throughput contradicts them"
    assert (said in capsys.readouterr().out) == bool(taken)


def test_a_row_without_the_step_time_that_counts_is_left_out(benchmark, tmp_path):
    file = tmp_path / "part.csv"
    file.write_text(
        "gpus,throughput,scaling,step_time_s\n1,100,weak,1\n2,180,weak,2\n4,360,weak,\n8,700,weak,8\n"
    )
    rows, left_out = benchmark.read(file)
    assert rows.time.tolist() == [1, 2, 8]
    assert left_out == {"of a series that states throughput and step times by turns": 1}


@pytest.mark.parametrize("scaling", ["weak", "strong", ""])
def test_trainings_of_different_batches_are_series_of_their_own(scaling, benchmark, tmp_path):
    file = tmp_path / "batches.csv"
    strong = scaling == "strong"
    file.write_text(
        "model,gpus,throughput,global_batch,per_gpu_batch,scaling\n"
        + "".join(
            f"m,{n},{n * batch},{batch if strong else batch * n},{batch / n if strong else batch},{scaling}\n"
            for batch in (32, 64)
            for n in (1, 2, 4)
        )
    )
    rows, left_out = benchmark.read(file)
    assert not left_out
    found = {name: [p.workers for p in points] for _, name, *_, points in benchmark.series_of(rows)}
    assert list(found.values()) == [[1, 2, 4], [1, 2, 4]]
    assert all("32" in name or "64" in name for name in found)


def test_one_placement_of_a_count_is_kept_and_the_others_are_counted(benchmark, tmp_path):
    file = tmp_path / "placed.csv"
    file.write_text(
        "gpus,nodes,throughput,scaling\n1,1,100,weak\n2,1,190,weak\n2,2,110,weak\n4,1,370,weak\n"
        "4,4,150,weak\n4,,160,weak\n"
    )
    rows, left_out = benchmark.read(file)
    assert left_out == {"another placement of a count (that on the fewest nodes is kept)": 3}
    assert rows.nodes.tolist() == [1, 1, 1]
    assert rows.throughput.tolist() == [100, 190, 370]


WHOLE = "gpus,throughput,scaling\n1,100,weak\n2,190,weak\n4,370,weak\n"


def test_a_file_that_cannot_be_read_is_told_in_a_sentence(benchmark, tmp_path, capsys):
    for name, content, said in (
        ("cut.csv.gz", gzip.compress(WHOLE.encode() * 99)[:-20], "cut off or damaged"),
        ("wide.csv", WHOLE.encode("utf-16"), "must be UTF-8"),
        ("bare.csv", WHOLE.encode("utf-16-le"), "must be UTF-8"),
        ("latin.csv", ("model," + WHOLE + "é,1").encode("latin-1"), "must be UTF-8"),
        ("more.csv", WHOLE.replace(",weak", ",weak,x").encode(), "more fields"),
    ):
        file = tmp_path / name
        file.write_bytes(content)
        assert benchmark.main([str(file)]) == 1
        said_here = capsys.readouterr().err
        assert said_here.startswith(f"error: {file}: ")
        assert said in said_here


def test_a_comma_at_the_end_of_each_row_shifts_no_column(benchmark, tmp_path):
    file = tmp_path / "comma.csv"
    file.write_text(WHOLE.replace(",weak", ",weak,"))
    rows, left_out = benchmark.read(file)
    assert (rows.gpus.tolist(), left_out) == ([1, 2, 4], {})


def test_cells_whose_node_boundary_is_unknown_are_counted(benchmark, tmp_path, capsys):
    file = tmp_path / "nodes.csv"
    file.write_text(WHOLE)
    assert benchmark.main([str(file)]) == 0
    assert "node boundary unknown: 1 cells" in capsys.readouterr().out
    file.write_text("nodes," + WHOLE.replace("\n1,", "\n1,1,").replace("\n2,", "\n1,2,").replace(
        "\n4,", "\n1,4,"))  # fmt: skip
    assert benchmark.main([str(file)]) == 0
    assert "node boundary unknown" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it_quietly(tmp_path):
    file = tmp_path / "whole.csv"
    file.write_text(WHOLE)
    command = [sys.executable, str(ROOT / "benchmarks/prediction/projection.py"), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        started.stdout.close()
        assert started.stderr.read() == b""
        started.wait(LIMIT_S)


COUNTS = (1, 2, 4, 8)
#: Throughputs on COUNTS that no cluster has, or only an easy one.
ODD_RATES = {
    "not monotone": (100, 5, 900, 20),
    "as perfect": (1, 2, 4, 8),
    "none gained": (5, 5, 5, 5),
    "tiny": (1e-29, 2e-29, 4e-29, 8e-29),
    "far apart": (1e-29, 1e29, 1e-29, 1e29),
    "in thousands": ('"1,000"', '"1,900"', '"3,600"', '"6,800"'),
}


#: Sources, and the nodes, batch and step time that they state. One has the name of a pool.
ODD_SOURCES = {
    "all sources": ",,",
    "<b>€|": "9,1e29,1e-29",
    "half a node": "0.5,1e-29,1e29",
    "words": "x,0,inf",
}


@pytest.mark.slow
# Not of what other tests have left open, which may be collected here.
@pytest.mark.filterwarnings("error::RuntimeWarning", "error::FutureWarning")
@pytest.mark.parametrize("rates", ODD_RATES.values(), ids=ODD_RATES)
def test_odd_figures_get_a_finite_answer(rates, benchmark, tmp_path, capsys):
    file = tmp_path / "odd.csv"
    file.write_text(
        "source,gpus,throughput,scaling,nodes,per_gpu_batch,step_time_s\n"
        + "".join(
            f"{source},{n},{rate},Weak scaling,{stated}\n"
            for source, stated in ODD_SOURCES.items()
            for n, rate in zip(COUNTS, rates, strict=True)
        )
    )
    for fit in ("2", "3"):
        assert benchmark.main([str(file), "--fit", fit]) == 0
        assert "source all sources" in capsys.readouterr().out
    rows, _ = benchmark.read(file)
    cells = benchmark.cells_of(rows, 2)
    assert len(cells) == 2 * len(ODD_SOURCES)
    answered = cells[~cells.refused]
    assert np.isfinite(answered.select_dtypes("number")).all().all()
    assert (answered.low_percent <= answered.error_percent).all()
    assert (answered.error_percent <= answered.high_percent).all()


@pytest.mark.slow
def test_ten_thousand_rows_are_read_and_a_single_source_is_pooled_alone(benchmark, tmp_path):
    file = tmp_path / "many.csv"
    file.write_text(
        "source,series,gpus,throughput,scaling\n"
        + "".join(f"one,{i},{n},{n**0.9},weak\n" for i in range(2500) for n in COUNTS)
    )
    rows, left_out = benchmark.read(file)
    assert (len(rows), left_out) == (10_000, {})
    cells = benchmark.cells_of(rows[rows.series.isin(["0", "1"])], 2)
    assert set(benchmark.tables(cells).source) >= {"one", "all sources", "discriminating sources"}

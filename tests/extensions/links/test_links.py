"""The measurement of links: the fit on made-up times, and real processes."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
from base64 import b64decode
from pathlib import Path

import pytest
from process_groups import forking

from launching import LIMIT_S, WORKFLOW
from stratbench.cell.text import pages
from stratbench.extensions.links import measure as links
from stratbench.extensions.links.collective_cost import (
    ALGORITHMS,
    CollectiveTime,
    LinkLayout,
    LinkModel,
    compute_served_cost,
    fit_links,
)
from stratbench.extensions.links.processes import run_calls_in_processes
from stratbench.extensions.links.section import TEMPLATE, make_links_section_values
from stratbench.extensions.links.timing import KINDS, Sweep
from stratbench.extensions.projection.links import Unmeasured, read_links
from stratbench.telemetry.collectives import CollectiveCall

SIZES = [1 << i for i in range(10, 27, 2)]
TRUE = {"within": LinkModel(20e-6, 5e9), "between": LinkModel(100e-6, 1e9)}


def made_up(
    kind: str, layouts: list[LinkLayout], algorithm=None, library="gloo"
) -> list[CollectiveTime]:
    algorithm = algorithm or ALGORITHMS[library][kind][0]
    return [
        CollectiveTime(
            library, kind, at.workers, at.nodes, size, repeat, cost.compute_time_s(TRUE) * noise
        )
        for at in layouts
        for size in SIZES
        for cost in [algorithm(kind, size, at)]
        for repeat, noise in enumerate((0.95, 1.0, 1.9))  # one of three repeats was disturbed
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_latency_and_rate_are_recovered_in_spite_of_disturbed_repeats(kind):
    (link,) = fit_links(made_up(kind, [LinkLayout(2), LinkLayout(4)]))
    assert link.level == "within"
    assert link.alpha_s == pytest.approx(20e-6, rel=1e-3)
    assert link.bytes_per_s == pytest.approx(5e9, rel=1e-3)
    assert link.knee_bytes == pytest.approx(1e5, rel=1e-2)
    assert 0.2 < link.log_sd < 0.6


def test_levels_are_told_apart():
    times = made_up(
        "all_reduce", [LinkLayout(2), LinkLayout(4), LinkLayout(4, 2), LinkLayout(8, 2)]
    )
    found = {link.level: link for link in fit_links(times)}
    for level, true in TRUE.items():
        assert found[level].alpha_s == pytest.approx(true.latency_s, rel=1e-2)
        assert found[level].bytes_per_s == pytest.approx(true.bytes_per_s, rel=1e-2)


ONE_NODE = [LinkLayout(2), LinkLayout(4), LinkLayout(8)]
RING, HIERARCHICAL, TREE = ALGORITHMS["nccl"]["all_reduce"]


def fastest(*algorithms):
    """A library that takes the fastest of these for each tensor."""
    return lambda *call: min(
        (a(*call) for a in algorithms), key=lambda cost: cost.compute_time_s(TRUE)
    )


@pytest.mark.parametrize(
    ("algorithm", "layouts", "named"),
    [
        (RING, ONE_NODE, "ring"),
        (RING, [*ONE_NODE, LinkLayout(16, 2), LinkLayout(32, 4)], "ring"),
        (TREE, ONE_NODE, "tree"),
        (HIERARCHICAL, [LinkLayout(8), LinkLayout(16, 2)], "hierarchical"),
        (HIERARCHICAL, [*ONE_NODE, LinkLayout(16, 2), LinkLayout(32, 4)], "hierarchical"),
        (fastest(RING, TREE), ONE_NODE, "fastest"),
        (fastest(RING, TREE, HIERARCHICAL), [*ONE_NODE, LinkLayout(16, 2)], "fastest"),
    ],
)
def test_nccls_links_give_the_measured_times_back_and_those_on_twice_the_workers(
    algorithm, layouts, named, tmp_path
):
    """Links that were fitted by one algorithm and priced by another were up to 2.3 times off."""
    times = made_up("all_reduce", layouts, algorithm, "nccl")
    assert fit_links(times)[0].algorithm == named
    links.write_links(tmp_path, times, 1.0)
    read = read_links(tmp_path / "links.csv", "nccl")
    last = layouts[-1]
    for at in (*layouts, LinkLayout(2 * last.workers, 2 * last.nodes if last.nodes > 1 else 1)):
        for size in SIZES:
            seconds, _ = read.compute_collective_time(CollectiveCall("all_reduce", size), at)
            true_s = algorithm("all_reduce", size, at).compute_time_s(TRUE)
            assert seconds == pytest.approx(true_s, rel=0.01), (at, size)


@pytest.mark.parametrize("algorithm", [RING, TREE])
def test_one_count_tells_ring_and_tree_not_apart_and_the_longer_is_said_beyond(algorithm, tmp_path):
    links.write_links(tmp_path, made_up("all_reduce", [LinkLayout(8)], algorithm, "nccl"), 1.0)
    read = read_links(tmp_path / "links.csv", "nccl")
    for workers, most in ((8, 1.01), (16, 2.0)):
        at = LinkLayout(workers)
        for size in SIZES:
            seconds, _ = read.compute_collective_time(CollectiveCall("all_reduce", size), at)
            true_s = algorithm("all_reduce", size, at).compute_time_s(TRUE)
            assert 0.99 * true_s < seconds < most * true_s


def test_a_server_takes_the_pushes_of_all_workers():
    times = made_up(
        "push_pull",
        [LinkLayout(1), LinkLayout(2), LinkLayout(4)],
        compute_served_cost,
        "servers-tcp",
    )
    (link,) = fit_links(times)
    assert link.bytes_per_s == pytest.approx(5e9, rel=1e-3)


def test_what_does_not_depend_on_its_bytes_has_no_rate():
    times = [CollectiveTime("gloo", "send", 2, 1, size, 0, 1e-4) for size in SIZES[:3]]
    (link,) = fit_links(times)
    assert link.alpha_s == pytest.approx(1e-4, rel=1e-3)
    assert link.bytes_per_s > 1e12


def test_sizes_go_from_a_kibibyte_to_the_largest():
    sizes = Sweep((2,), 100 << 20, 1).list_tensor_sizes_bytes()
    assert (sizes[0], sizes[-1]) == (1024, 100 << 20)
    assert sizes == sorted(set(sizes))
    assert Sweep((2,), 1024, 1).list_tensor_sizes_bytes() == [1024]


def test_the_report_shows_every_kind_with_its_fit_and_its_scatter(tmp_path):
    assert make_links_section_values(tmp_path) is None
    both = [LinkLayout(2), LinkLayout(4), LinkLayout(4, 2), LinkLayout(8, 2)]
    calm = [CollectiveTime("gloo", "send", 2, 1, size, 0, 1e-4 + size / 1e9) for size in SIZES]
    links.write_links(tmp_path, made_up("all_reduce", both) + calm, 1.25)
    section = make_links_section_values(tmp_path)
    assert [(r["name"], r["level"], r["doubtful"]) for r in section["rows"]] == [
        ("all-reduce by gloo", "within nodes", True),
        ("all-reduce by gloo", "between nodes", True),
        ("send by gloo", "within nodes", False),
    ]
    assert section["rows"][0]["alpha"] == "20 µs"
    section["charts"][0]["name"] = "<b>"
    html = pages.render_page(TEMPLATE.name, TEMPLATE.parent, values={"links": section})
    assert html.count("<figure>") == 2
    assert "<b>&lt;b&gt;</b>" in html
    assert "1.25 times as long" in html
    charts = [b64decode(svg).decode() for svg in re.findall(r"base64,([^\"]+)", html)]
    assert "4 workers, 2 nodes" in charts[0]
    assert "4 workers, 2 nodes" not in charts[1]
    assert all("2 workers" in chart for chart in charts)
    assert html.count('alt="Time of ') == 2
    table = tmp_path / "links.csv"
    table.write_text(table.read_text().replace(",ring,", ",<script>,"))
    with pytest.raises(ValueError, match="is not a valid table"):
        make_links_section_values(tmp_path)


def test_links_are_read_back_for_the_projection(tmp_path):
    links.write_links(tmp_path, made_up("all_reduce", [LinkLayout(2), LinkLayout(4)]), 1.25)
    read = read_links(tmp_path / "links.csv", "gloo")
    assert read.computation_slowdown_factor == 1.25
    expected = ALGORITHMS["gloo"]["all_reduce"][0](
        "all_reduce", 1e7, LinkLayout(16)
    ).compute_time_s(TRUE)
    assert read.compute_collective_time(CollectiveCall("all_reduce", 1e7), LinkLayout(16))[
        0
    ] == pytest.approx(expected, rel=1e-3)
    with pytest.raises(Unmeasured, match="no links of nccl"):
        read_links(tmp_path / "links.csv", "nccl")
    table = (tmp_path / "links.csv").read_text()
    (tmp_path / "links.csv").write_text(table.replace(",ring,", ",bus,"))
    with pytest.raises(ValueError, match="algorithm 'bus', expected one of ring, tree"):
        read_links(tmp_path / "links.csv", "gloo")
    (tmp_path / "links.csv").write_text("library,kind\ngloo,send\n")
    with pytest.raises(ValueError, match=r"is not a valid links\.csv"):
        read_links(tmp_path / "links.csv", "gloo")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_processes_measure_every_kind_and_the_servers(tmp_path):
    arguments = ["--workers", "2", "3", "--largest-mib", "1", "--repeats", "1", "--servers", "tcp"]
    printed = tmp_path / "printed"
    given = ([*arguments, "--out", str(tmp_path)], printed)
    process = forking().Process(target=measure, args=given)
    process.start()
    process.join(LIMIT_S)
    told = printed.read_text()
    assert process.exitcode == 0, told
    assert "collectives: round 1 of 1" in told
    assert "servers: round 1 of 1" in told
    with (tmp_path / "times.csv").open() as file:
        times = list(csv.DictReader(file))
    measured = {(t["library"], t["kind"], int(t["workers"])) for t in times}
    assert measured == {("gloo", k, n) for k in KINDS for n in (2, 3)} | {
        ("servers-tcp", "push_pull", n) for n in (1, 2, 3)
    }
    assert all(0 < float(t["seconds"]) < 60 for t in times)
    found = read_links(tmp_path / "links.csv", "gloo")
    assert found.computation_slowdown_factor >= 1
    large, small = (
        found.compute_collective_time(CollectiveCall("all_reduce", n), LinkLayout(2))[0]
        for n in (1 << 23, 1 << 10)
    )
    assert large >= small


def measure(arguments: list[str], printed: Path) -> None:
    """Become the command's process, which finds PyTorch imported; its output goes to a file."""
    with printed.open("w") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
    os.environ["PYTHONPATH"] = str(WORKFLOW)
    sys.exit(links.main(arguments))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_that_fails_ends_the_others(tmp_path):
    with pytest.raises(RuntimeError, match="ended with exit code"):
        run_calls_in_processes([(_fails, ()), (_waits, (str(tmp_path / "told"),))])


def _fails() -> None:
    sys.exit(3)


def _waits(path: str) -> None:
    import threading

    Path(path).write_text(json.dumps(math.pi))
    threading.Event().wait()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--workers", "1"], "connects two workers"),
        (["--workers", "2", "--repeats", "0"], "1 or more"),
    ],
)
def test_impossible_requests_are_refused_with_a_sentence(arguments, told, capsys, tmp_path):
    with pytest.raises(SystemExit):
        links.main([*arguments, "--out", str(tmp_path)])
    assert told in capsys.readouterr().err

"""The report: complete, right, self-contained, readable by machines that read to people."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import fixture_records as fixture
import pandas as pd
import pytest
import yaml

from stratbench import config
from stratbench.analysis import audit, collect, decide, plots, report, tables
from stratbench.analysis.measures import MEASURES, PLOTS

ROOT = Path(__file__).parents[2]
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Tags in order, with a check that every one is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.wrong, self.text = [], [], [], []
        self.feed(text)
        self.wrong += self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def all(self, *tags):
        return [attrs for tag, attrs in self.tags if tag in tags]


def write_page(root, cells, statuses=None, device="cuda", options=(), change=None, timelines=False):
    """The report's path, made through the command lines as the workflow does."""
    study_dir = fixture.write_study(root, cells, statuses, device, change, timelines)
    for cell in cells:
        log = cell.log_dir(root).with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("constructed\n")
    out = study_dir / "partial" if "--partial" in options else study_dir
    out.mkdir(exist_ok=True)
    collect.collect(cells, study_dir, out / "cells.csv", out / "epochs.csv")
    common = ["--cells", str(out / "cells.csv")]
    audit.main([*common, "--out", str(out / "audit.csv")])
    decide.main([*common, "--audit", str(out / "audit.csv"), "--out", str(out / "decision.csv")])
    summary = str(out / "summary.csv")
    audited = ["--audit", str(out / "audit.csv")]
    tables.main([*common, *audited, "--summary-out", summary, "--out-dir", str(out / "tables")])
    common += ["--summary", summary]
    drawn = ["--epochs", str(out / "epochs.csv"), "--study-dir", str(study_dir)]
    plots.main([*common, *drawn, "--out-dir", str(out / "plots")])
    common += [*audited, "--plots-dir", str(out / "plots"), "--study-dir", str(study_dir)]
    assert report.main([*common, *options, "--out", str(out / "report.html")]) == 0
    return out / "report.html"


@pytest.fixture(scope="module")
def cells():
    names = ("single", "ddp", "ps-sync", "ps-async", "ps-dana")
    return fixture.expand(strategies=names, models=("vgg16", "convnext_large"), repeats=2)


@pytest.fixture(scope="module")
def page_path(tmp_path_factory, cells):
    options = ("--partial", "--description", "About <this> study")
    root = tmp_path_factory.mktemp("report")
    return write_page(root, cells, fixture.DEMO_STATUSES, options=options)


@pytest.fixture(scope="module")
def page(page_path):
    return Page(page_path.read_text())


def test_the_page_is_well_formed(page):
    assert page.wrong == []


def test_the_page_needs_nothing_from_elsewhere(page_path, page):
    for attributes in page.all("img", "script", "link", "source", "iframe"):
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:")
    assert "@import" not in page_path.read_text()
    assert not re.search(r"url\((?!['\"]?data:)", page_path.read_text())
    assert page_path.stat().st_size < 5 * 2**20


def test_every_figure_and_table_is_there_with_words_for_it(page):
    images = page.all("img")
    # No record of this study has a timeline.
    drawn = [name for name, plot in PLOTS.items() if plot.needs != "utilisation_pct"]
    assert len(images) == len(drawn)
    assert all(len(image["alt"]) > 40 for image in images)
    assert len(page.all("figcaption")) == len(images)
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    # This study has ddp and ps-sync, so that no table is without a number.
    assert {f"t-main-{name}" for name in MEASURES} <= ids
    described = [t["aria-describedby"] for t in page.all("table") if "aria-describedby" in t]
    assert {f"c-main-{name}" for name in MEASURES} <= set(described)
    assert set(described) <= ids


def test_headings_are_in_order_and_anchors_lead_somewhere(page):
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    anchors = [a["href"][1:] for a in page.all("a") if a["href"].startswith("#")]
    assert len(anchors) >= 5
    assert set(anchors) <= ids


def test_every_cell_is_listed_with_links_that_lead_to_its_files(page_path, page, cells):
    links = [a["href"] for a in page.all("a") if not a["href"].startswith("#")]
    found = {(page_path.parent / unquote(link)).resolve() for link in links}
    root = page_path.parents[2]
    ok = [c for c in cells if fixture.DEMO_STATUSES.get((c.strategy, c.model, c.gpus)) is None]
    assert {c.record_path(root).resolve() for c in ok} <= found
    assert {c.log_dir(root).with_suffix(".log").resolve() for c in cells} <= found
    assert all(path.exists() for path in found)


def test_what_went_wrong_is_counted_and_explained(page):
    text = " ".join(" ".join(page.text).split())
    for words in (
        "2 failed",
        "2 have no record yet",
        "4 out of memory (OOM)",
        "2 diverged (div.)",
        "This report is partial",
        "worker 1 exited with -9",
        "loss became non-finite",
        "A worker is one GPU",
    ):
        assert words in text


def test_text_from_outside_is_escaped(page_path):
    assert "About &lt;this&gt; study" in page_path.read_text()
    assert "<this>" not in page_path.read_text()


def test_a_cpu_study_says_first_that_it_is_one(tmp_path):
    cells = fixture.expand(strategies=("single", "ddp"), models=("vgg16",), gpus=(1, 2))
    page = Page(write_page(tmp_path, cells, device="cpu").read_text())
    text = " ".join(page.text)
    assert "All cells ran without a GPU" in text
    assert "share 2 cores of constructed-host" in text
    assert text.index("without a GPU") < text.index("It trains in")
    assert "one GPU (" not in text


def test_the_audit_is_in_the_report_and_leads_to_the_figures_it_doubts(tmp_path):
    def change(cell, record):
        if cell.gpus == 2:
            record["accuracy"]["final"] = 0.11
        return record

    cells = fixture.expand(strategies=("single", "ddp"), models=("vgg16",), gpus=(1, 2))
    text = write_page(tmp_path, cells, change=change).read_text()
    said = " ".join(" ".join(Page(text).text).split())
    assert "doubtful accuracy-below-floor (1; affects accuracy)" in said
    assert "main, ddp, vgg16, 2 workers, repeat 0 11.0%; working training reaches 40%" in said
    assert text.count('<sup><a href="#audit" title="accuracy-below-floor">') == 1
    assert "No rule was tripped" in write_page(tmp_path / "sound", cells).read_text()


def test_mixed_machines_are_pointed_out(tmp_path):
    def change(cell, record):
        for worker in record["workers"]:
            worker["provenance"]["gpu"]["name"] += f" of repeat {cell.repeat}"
        return record

    cells = fixture.expand(strategies=("ddp",), models=("vgg16",), gpus=(1,), repeats=2)
    text = write_page(tmp_path, cells, change=change).read_text()
    assert "The records come from different devices" in text


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SORT_TWICE = """<script>
addEventListener("load", function () {
  var table = document.querySelector("#t-main-training_time table");
  var seen = [];
  for (var turn = 0; turn < 2; turn++) {
    table.querySelectorAll("th button")[4].click();
    var rows = Array.from(table.tBodies[0].rows);
    seen.push(rows.map(function (row) { return row.cells[4].dataset.sort; }).join());
  }
  document.title = "sorted:" + seen.join("|") + ":" + table.querySelector("[aria-sort]").ariaSort;
});
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.timeout(120)
def test_in_a_browser_tables_sort_and_nothing_complains(page_path, tmp_path):
    trial = page_path.with_name("trial.html")
    trial.write_text(page_path.read_text().replace("</body>", SORT_TWICE))
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(
                "--enable-logging=stderr",
                f"--user-data-dir={tmp_path}",
                "--dump-dom",
                f"file://{trial}",
            ),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>sorted:(.*)</title>", done.stdout)
    up, down, state = re.split(r"[|:]", title[1])
    assert state == "descending"
    for text, is_reversed in ((up, False), (down, True)):
        values = [float(value) for value in text.split(",") if value]
        assert len(values) > 4
        assert values == sorted(values, reverse=is_reversed)
        assert text.endswith(",")  # cells without a number stay last either way


PAPER_STATUSES = {
    ("single", "convnext_large", 1): "oom",
    ("ddp", "convnext_large", 1): "oom",
    ("ps-async-modified", "resnet50", 1): "timeout",
    ("ps-async-modified", "vgg16", 2): "timeout",
    ("ps-async", "densenet121", 4): "diverged",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_paper_study_renders(tmp_path):
    """The matrix of config.yaml's `paper` on up to 4 GPUs, one repeat, of constructed records."""
    raw = yaml.safe_load((ROOT / "config.yaml").read_text()) | {"study": "paper"}
    cells = [c for c in config.load(raw)[1].cells if c.repeat == 0 and c.gpus <= 4]
    path = write_page(tmp_path, cells, PAPER_STATUSES, timelines=True)
    page = Page(path.read_text())
    experiments = list(dict.fromkeys(c.experiment for c in cells))
    assert len(page.all("img")) == len(PLOTS) * len(experiments) - 1  # ddp-fsdp has no servers
    assert path.stat().st_size < 5 * 2**20
    assert page.wrong == []
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    assert {*(f"table_{n}" for n in range(3, 9)), "paper", "servers", "provenance"} <= ids
    said = " ".join(" ".join(page.text).split())
    assert "Constructed GPU (not measured)" in said
    assert "OOM" in said
    assert ">3000" in said
    assert "DDP is the fastest strategy" in said
    study = path.parent
    for experiment in experiments:
        for name in PLOTS:
            for kind in ("svg", "png", "pdf"):
                assert (study / "plots" / experiment / f"{name}.{kind}").stat().st_size > 1000
    sources = pd.read_csv(study / "tables" / "paper" / "table_8_sources.csv")
    for records in sources["records"].dropna():
        for where in records.split():
            assert (study / "cells" / where / "rep0" / "record.json").exists()
    table = pd.read_csv(study / "tables" / "paper" / "table_6.csv")
    modified = table[table["strategy"] == "ps-async-modified"].set_index(["experiment", "model"])
    for experiment in ("parameter-server", "modified-async"):
        assert modified.loc[(experiment, "resnet50"), "1 workers"] == ">3000"

"""The report: complete, right, self-contained, readable by machines that read to people, and in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import fixture_records as fixture
import pandas as pd
import pytest
import yaml

from stratbench.analysis.decision import decide
from stratbench.analysis.figures import plots, sheet
from stratbench.analysis.figures.figure_list import PLOTS
from stratbench.analysis.records import collect
from stratbench.analysis.records.measures import MEASURES
from stratbench.analysis.records.score import Score
from stratbench.analysis.report import report, sections
from stratbench.analysis.tables import tables
from stratbench.cell.installation import PACKAGE
from stratbench.extensions.audit import audit
from stratbench.extensions.audit import section as audit_section
from stratbench.extensions.paper import against
from stratbench.extensions.plan.pages import prediction_section
from stratbench.extensions.projection.table import Row, write_projection_csv
from stratbench.study.config import config

pytest_plugins = ["browser_fixtures"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
VOID = {"meta", "link", "img", "br", "hr", "input", "wbr"}


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
            self.text.append(data.replace("\u00a0", " "))

    def all(self, *tags):
        return [attrs for tag, attrs in self.tags if tag in tags]


def saving(complete):
    """`save_figure`, which for all but the experiments `complete` writes only what the page shows."""
    save_figure, formats = plots.save_figure, sheet.FORMATS

    def save(figure, stem):
        chosen = formats if stem.parts[-3] in complete else {".svg": formats[".svg"]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sheet, "FORMATS", chosen)
            save_figure(figure, stem)

    return save


def write_page(
    root,
    cells,
    statuses=None,
    device="cuda",
    options=(),
    change=None,
    timelines=False,
    prediction=None,
    figures=True,
    complete=(),
):
    """The report's path, made through the command lines as the workflow does.

    `figures`: whether to draw them, or which of which experiments. Only those of the experiments
    `complete` are also written in the formats that are not on the page.
    """
    study_dir = fixture.write_study(root, cells, statuses, device, change, timelines)
    for cell in cells:
        log = cell.log_dir(root).with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("constructed\n")
    out = study_dir / "partial" if "--partial" in options else study_dir
    out.mkdir(exist_ok=True)
    asked = collect.Expectations(
        target_scores_by_experiment={cell.experiment: 0.6 for cell in cells}
    )
    collect.collect_records(cells, study_dir, out / "cells.csv", out / "epochs.csv", asked)
    common = ["--cells", str(out / "cells.csv")]
    records = ["--study-dir", str(study_dir)]
    audit.main([*common, *records, "--out", str(out / "audit.csv")])
    audited = ["--audit", str(out / "audit.csv")]
    answers = ["--answers-out", str(out / "answers.json")]
    decide.main([*common, *audited, "--out", str(out / "decision.csv"), *answers])
    compared = ["--cells-out", str(out / "against_cells.csv")]
    compared += ["--claims-out", str(out / "against_claims.csv")]
    summary = str(out / "summary.csv")
    tables.main([*common, *audited, "--summary-out", summary, "--out-dir", str(out / "tables")])
    compared += ["--summary", summary, "--tables-out", str(out / "paper_tables")]
    against.main([*common, *audited, *compared])
    common += ["--summary", summary]
    drawn = ["--epochs", str(out / "epochs.csv"), "--study-dir", str(study_dir)]
    if figures:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                plots, "list_usable_cores", lambda: {0}
            )  # no processes, whose start takes seconds
            patch.setattr(plots, "save_figure", saving(complete))
            if figures is not True:
                has_data = plots.has_data
                patch.setattr(
                    plots,
                    "has_data",
                    lambda name, data: (
                        name in figures.get(data.experiment, ()) and has_data(name, data)
                    ),
                )
            drawn += ["--answers", str(out / "answers.json")]
            plots.main([*common, *drawn, "--out-dir", str(out / "plots")])
    if prediction is not None:
        (out / "prediction.csv").write_text(prediction)
    folder = ["--folder", str(out), "--study-dir", str(study_dir)]
    assert report.main([*folder, *audited, *options]) == 0
    return out / "report.html"


@pytest.fixture(scope="module")
def cells():
    names = ("single", "ddp", "fsdp", "ps-sync", "ps-async", "ps-dana")
    return fixture.expand(strategies=names, models=("vgg16", "convnext_large"), repeats=2)


@pytest.fixture(scope="module")
def page_path(tmp_path_factory, cells):
    """A report with every section."""
    prediction = (
        "experiment,strategy,peak_mib_predicted,peak_mib_measured,peak_error_percent,"
        "states_bytes_predicted,states_bytes_measured,states_error_percent,"
        "sent_bytes_predicted,sent_bytes_measured,sent_error_percent,train_s_in_range\n"
        "main,ddp,101,100,1.0,8,8,0.0,5,5,0.0,True\nmain,ps-dana,98,100,-2.0,8,8,0.0,5,5,0.0,False\n"
    )
    return write_page(
        tmp_path_factory.mktemp("report"),
        cells,
        fixture.DEMO_STATUSES,
        options=("--partial", "--description", "About <this> study"),
        timelines=True,
        prediction=prediction,
    )


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
    titles = {text.partition(", ")[0] for text in page.text}
    assert {plot.format_title(Score()) for plot in PLOTS.values()} <= titles
    assert len(page.all("h4")) == len(images)
    assert all(len(image["alt"]) > 40 for image in images)
    assert len(page.all("figcaption")) == len(images)
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    # This study has ddp and ps-sync, and waits in no queue: no other table is without a number.
    told = set(MEASURES) - {"perplexity", "time_to_result"}
    assert {f"t-main-{name}" for name in told} <= ids
    described = [t["aria-describedby"] for t in page.all("table") if "aria-describedby" in t]
    assert {f"c-main-{name}" for name in told} <= set(described)
    assert set(described) <= ids


def shown_figures(page):
    """How many figures each model shows before its first fold."""
    shown, counts = [], False
    for tag, _ in page.tags:
        if tag == "h3":
            shown.append(0)
        counts = tag == "h3" or (counts and tag != "details")
        if tag == "h4" and counts:
            shown[-1] += 1
    return list(filter(None, shown))


def test_figures_fill_their_rows_of_three(page):
    """Also those of a model on which `single` ran out of memory, so that a figure is missing."""
    assert shown_figures(page) == [6, 6]


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
        "2 without a record yet",
        "4 out of memory (OOM)",
        "Excluded",
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


def test_the_answer_of_a_queue_stands_with_its_modes(tmp_path):
    cells = fixture.expand(strategies=("single",), models=("vgg16",), gpus=(1,))
    path = write_page(tmp_path, cells, figures=False)
    queue = {
        "headline": "With the queue: split synchronous, 2.2 h.",
        "lines": ["Not modelled: <fair-share>."],
        "modes": [
            {"mode": "gang", "chosen": False, "hours": 2.77, "hours_low": None, "hours_high": None}
            | {"late_hours": 4.0, "ratio": 1.0, "ratio_low": None, "ratio_high": None},
            {"mode": "split synchronous", "chosen": True, "hours": 2.2, "hours_low": 2.05}
            | {"hours_high": 2.32, "late_hours": 2.56, "ratio": 0.78, "ratio_low": 0.65}
            | {"ratio_high": 0.95},
        ],
    }
    answers = path.with_name("answers.json")
    answers.write_text(json.dumps(json.loads(answers.read_text()) | {"further": {"queue": queue}}))
    report.main(["--folder", str(path.parent), "--study-dir", str(path.parent)])
    text = " ".join(" ".join(Page(path.read_text()).text).split())
    assert "With the queue: split synchronous, 2.2 h." in text
    assert "2.05 to 2.32" in text
    assert "Not modelled: <fair-share>." in text


def test_a_cpu_study_says_first_that_it_is_one(tmp_path):
    cells = fixture.expand(strategies=("single", "ddp"), models=("vgg16",), gpus=(1, 2))
    page = Page(write_page(tmp_path, cells, device="cpu", figures=False).read_text())
    text = " ".join(page.text)
    # No record of this study has a timeline.
    assert "t-main-utilisation" not in {attributes.get("id") for _, attributes in page.tags}
    measured = text.index("CPU processes that share 2 cores of one machine")
    assert "not valid for GPUs" in text[measured:][:120]
    assert measured < text.index("Training time") < text.index("tables")
    assert "share 2 cores of constructed-host" in text
    assert "one GPU (" not in text


def test_the_audit_is_in_the_report_and_leads_to_the_figures_it_doubts(tmp_path):
    def change(cell, record):
        if cell.gpus == 2:
            for entry in record["score"]["per_epoch"]:
                entry |= {"score": 0.11, "test_loss": 2.3}
            record["score"] |= {"final": 0.11, "best": 0.11}
        return record

    cells = fixture.expand(strategies=("single", "ddp"), models=("resnet50",), gpus=(1, 2))
    text = write_page(tmp_path, cells, change=change, figures=False).read_text()
    said = " ".join(" ".join(Page(text).text).split())
    assert "warning score below floor main, ddp, resnet50, 2 workers, repeat 0" in said
    assert "Rule score-below-floor; affects score." in said
    assert "main, ddp, resnet50, 2 workers, repeat 0 11.0%; single on 1 reaches" in said
    assert text.count('<sup><a href="#audit" title="warning: score-below-floor">') == 1
    assert (
        "No rule has findings" in write_page(tmp_path / "sound", cells, figures=False).read_text()
    )


def test_the_audit_says_which_findings_touch_a_choice():
    """The choice itself, the next one, and the next of another strategy; what is left open is on all."""
    rivals = [
        {"strategy": "ddp", "gpus": 2},
        {"strategy": "fsdp", "gpus": 4},
        {"strategy": "zero1", "gpus": 4},
    ]
    short = {"strategy": "ddp", "gpus": 4, "others": rivals}
    answers = [{"experiment": "e", "model": "m", "short": short}]
    place = dict.fromkeys(("experiment", "strategy", "model", "gpus", "repeat"))
    said = {"severity": "warning", "affects": "time", "explanation": "x", "figures": "f"}
    told = {
        "on the choice": {"strategy": "ddp", "gpus": 4},
        "next": {"strategy": "ddp", "gpus": 2},
        "of another": {"strategy": "fsdp", "model": "m"},
        "on all": {"experiment": "e"},
        "far": {"strategy": "zero1"},
        "elsewhere": {"experiment": "other", "strategy": "ddp", "gpus": 4},
    }
    findings = pd.DataFrame([place | said | {"rule": name} | at for name, at in told.items()])
    rules = {
        r["id"]: r["touches"] for r in audit_section.list_rules_with_findings(findings, answers)
    }
    assert rules == {
        "on the choice": ["ddp × 4 (m)"],
        "next": ["ddp × 2, next to ddp × 4 (m)"],
        "of another": ["fsdp × 4, next to ddp × 4 (m)"],
        "on all": ["ddp × 4 (m)"],
        "far": [],
        "elsewhere": [],
    }
    listed = audit_section.list_rules_with_findings(
        findings.assign(severity=["note", "unusable", *["warning"] * 4]), answers
    )
    assert [r["severity"] for r in listed] == ["unusable", *["warning"] * 4, "note"]
    assert audit_section.format_audit_summary_sentence(listed, answers) == (
        "These rules concern a choice or its nearest rival: next, of another, on all."
    )
    untouched = [rule for rule in listed if not rule["touches"]]
    assert audit_section.format_audit_summary_sentence(untouched, answers).startswith(
        "No doubtful finding"
    )


def test_mixed_machines_are_pointed_out(tmp_path):
    def change(cell, record):
        for worker in record["workers"]:
            worker["provenance"]["gpu"]["name"] += f" of repeat {cell.repeat}"
        return record

    cells = fixture.expand(strategies=("ddp",), models=("vgg16",), gpus=(1,), repeats=2)
    text = write_page(tmp_path, cells, change=change, figures=False).read_text()
    assert "The records come from different devices" in text


@pytest.mark.parametrize("alone", [False, True])
def test_hosts_are_a_notice_only_where_a_strategy_is_known_by_its_host(tmp_path, alone):
    """`alone`: each strategy on a node of its own; else repeats are spread over both."""

    def change(cell, record):
        for worker in record["workers"]:
            worker["provenance"]["host"]["name"] = f"node-{cell.strategy if alone else cell.repeat}"
        return record

    cells = fixture.expand(strategies=("ddp", "fsdp"), models=("vgg16",), gpus=(2,), repeats=2)
    text = write_page(tmp_path, cells, change=change, figures=False).read_text()
    notice = (
        "These strategies ran on other hosts than the rest: ddp, fsdp. Differences may come from"
    )
    assert (notice in text) == alone
    assert ("Compare with care" in text) == alone
    assert ("†: the audit reports warning (confounded-host)" in text) == alone


def test_predictions_are_told_by_strategy_with_their_worst(tmp_path, page):
    assert "keeps part of the memory" not in " ".join(page.text), "these cells ran on GPUs"
    path = tmp_path / "prediction.csv"
    path.write_text(
        "experiment,strategy,peak_mib_predicted,peak_mib_measured,peak_error_percent,"
        "states_bytes_predicted,states_bytes_measured,states_error_percent,"
        "sent_bytes_predicted,sent_bytes_measured,sent_error_percent,train_s_in_range\n"
        "e,ddp,101,100,1.0,8,8,0.0,5,,,True\ne,ddp,92.5,100,-7.5,8,8,0.0,5,,,False\n"
        "e,ddp,102,100,2.0,8,8,0.0,5,,,\ne,fsdp,3,,,100001,100000,0.0,103,100,3.0,\n"
    )
    first, second = prediction_section.read_prediction_errors(path)
    assert (first["cells"], first["peak_mib"]) == (3, "median +1.0 %, worst -7.5 %")
    assert (first["states_bytes"], first["sent_bytes"], first["time"]) == ("exact", "", "1 of 2")
    assert (second["peak_mib"], second["sent_bytes"]) == ("", "+3.0 %")
    assert second["states_bytes"] == "+0.0 %"  # not exact, only close
    page = Page(
        write_page(
            tmp_path,
            fixture.expand(strategies=("ddp", "fsdp"), models=("vgg16",)),
            device="cpu",
            prediction=path.read_text(),
            figures=False,
        ).read_text()
    )
    assert page.wrong == []
    assert "median +1.0 %, worst -7.5 %" in " ".join(page.text)
    assert "keeps part of the memory" in " ".join(page.text)
    path.write_text("study,experiment,strategy\n")  # no cell was predicted
    assert prediction_section.read_prediction_errors(path) == []


def test_experiments_stand_in_the_order_of_the_config(tmp_path):
    cells = [
        cell
        for name in ("zebra", "ant")
        for cell in fixture.expand(strategies=("ddp", "fsdp"), models=("vgg16",), experiment=name)
    ]
    text = write_page(tmp_path, cells, figures=False).read_text()
    answer = text[text.index('id="answer"') : text.index('id="e-zebra"')]
    assert answer.index("<small>zebra") < answer.index("<small>ant")


PAPER_STATUSES = {
    ("single", "convnext_large", 1): "oom",
    ("ddp", "convnext_large", 1): "oom",
    ("ps-async-modified", "resnet50", 1): "timeout",
    ("ps-async-modified", "vgg16", 2): "timeout",
    ("ps-async", "densenet121", 2): "diverged",
}


def test_the_whole_paper_study_renders(tmp_path):
    """The experiments of config.yaml's `paper` on up to 2 GPUs, one repeat, of constructed records.

    Without `parameter-server`, whose figures are those of `modified-async`; of a model or two of each.
    Figures of two: the strategies of all others are in `common`; of the other one what has no figure
    there, and in all formats what test_analysis_plots.py draws in none.
    """
    raw = yaml.safe_load((ROOT / "config.yaml").read_text()) | {"study": "paper"}
    cells = [
        c
        for c in config.load_config(raw)[1].cells
        if c.repeat == 0 and c.gpus <= 2 and c.experiment != "parameter-server"
        if c.model in (("convnext_large", "vgg16") if c.experiment == "ddp-fsdp" else ("resnet50",))
    ]
    complete = {"staleness", "utilisation", "utilisation_timelines", "memory_timelines"}
    figures = {"common": set(PLOTS), "straggler": complete | {"speedup_vs_single", "speedup"}}
    path = write_page(
        tmp_path, cells, PAPER_STATUSES, timelines=True, figures=figures, complete=["straggler"]
    )
    page = Page(path.read_text())
    drawn = list((path.parent / "plots").glob("*/*/*.svg"))
    assert len(page.all("img")) == len(drawn)
    missing = {(e, name) for e, names in figures.items() for name in names} - {
        (svg.parts[-3], svg.stem.partition("_on_")[0]) for svg in drawn
    }
    assert missing == {
        ("straggler", "speedup_vs_single"),
        ("straggler", "speedup"),  # no single worker
    }
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
    for svg in drawn:
        for kind in sheet.FORMATS if svg.parts[-3] == "straggler" else [".svg"]:
            assert svg.with_suffix(kind).stat().st_size > 1000
    sources = pd.read_csv(study / "paper_tables" / "table_8_sources.csv")
    for records in sources["records"].dropna():
        for where in records.split():
            assert (study / "cells" / where / "rep0" / "record.json").exists()
    table = pd.read_csv(study / "paper_tables" / "table_6.csv")
    modified = table[table["strategy"] == "ps-async-modified"].set_index(["experiment", "model"])
    for experiment in ("modified-async", "common"):
        assert modified.loc[(experiment, "resnet50"), "1 workers"] == ">3000"


def test_a_variant_without_a_record_is_told_as_one():
    rows = [
        {"strategy": "ddp", "strategy_base": None},
        {"strategy": "mine", "strategy_base": None},
        {"strategy": "fsdp-policy", "strategy_base": "fsdp"},
    ]
    ddp, mine, policy = sections.iter_strategy_rows(pd.DataFrame(rows))
    assert not ddp["summary"].startswith("a variant")
    assert mine["summary"] == "a variant without a record, so its base strategy is unknown."
    assert policy["summary"].startswith("a variant of fsdp: ")


def test_every_rule_of_the_pages_style_has_a_user():
    pages = [*PACKAGE.rglob("*.j2"), *PACKAGE.rglob("*.py")]
    used = " ".join(p.read_text(encoding="utf-8") for p in pages)
    for style in ("cell/text/templates/page.css", "analysis/report/templates/answers.css"):
        text = (PACKAGE / style).read_text(encoding="utf-8")
        classes = set(re.findall(r"\.([a-z][a-z-]+)(?=[^{}]*\{)", text))
        assert len(classes) > 10
        unused = {name for name in classes if not re.search(rf"\b{name}\b", used)}
        assert not unused, style


# ---- in a browser ------------------------------------------------------------------------------


#: Leaves what it saw as JSON in the page's title.
VISIT = """<script>
addEventListener("load", function () {
  var answers = Array.from(document.querySelectorAll(".choice"));
  var seen = { answered_px: answers[1].getBoundingClientRect().bottom };
  seen.height_px = document.documentElement.scrollHeight;
  seen.dark = getComputedStyle(document.body).backgroundColor;
  document.querySelectorAll("details").forEach(function (d) { d.open = true; });
  seen.scales = Array.from(document.querySelectorAll("figure")).map(function (figure) {
    return figure.querySelector("img").clientWidth;
  });
  Object.assign(seen, { tables: 0, columns: 0, numeric: 0 });
  Object.assign(seen, { unsorted: [], lost: [], dangling: [], broken: [] });
  document.querySelectorAll("table.sortable").forEach(function (table, t) {
    seen.tables++;
    var before = table.tBodies[0].rows.length;
    table.querySelectorAll("thead th").forEach(function (th, column) {
      var button = th.querySelector("button");
      if (!button) return;
      seen.columns++;
      ["ascending", "descending"].forEach(function (wanted) {
        button.click();
        var texts = Array.from(table.tBodies[0].rows).map(function (row) {
          var cell = row.cells[column], given = cell.dataset.sort;
          return given === undefined ? cell.textContent.trim() : given;
        });
        var filled = texts.filter(function (x) { return x !== ""; });
        var emptyLast = texts.slice(filled.length).every(function (x) { return x === ""; });
        var numbers = filled.map(Number);
        var ordered = numbers.some(isNaN) || numbers.every(function (x, i) {
          return i === 0 || (wanted === "ascending" ? numbers[i - 1] <= x : numbers[i - 1] >= x);
        });
        if (filled.length > 1 && !numbers.some(isNaN)) seen.numeric++;
        if (!ordered || !emptyLast || th.getAttribute("aria-sort") !== wanted)
          seen.unsorted.push(t + ":" + th.textContent + ":" + wanted);
        if (texts.length !== before) seen.lost.push(t + ":" + th.textContent);
      });
    });
  });
  document.querySelectorAll("a[href^='#']").forEach(function (a) {
    if (!document.getElementById(a.getAttribute("href").slice(1))) seen.dangling.push(a.href);
  });
  document.querySelectorAll("img").forEach(function (image) {
    if (!image.complete || image.naturalWidth === 0) seen.broken.push(image.alt);
  });
  seen.images = document.querySelectorAll("img").length;
  seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.title = "seen:" + JSON.stringify(seen);
});
</script></body>"""


#: Height of the first screen of a laptop and of a phone, by their widths.
SCREENS_PX = {1280: 720, 420: 900}
#: Of the first screen, the share above the end of the first answer, at most.
FIRST_ANSWER = {1280: 0.5, 420: 0.7}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", SCREENS_PX)
def test_everything_works_at_desktop_and_phone_width(browser, page_path, width, dark):
    trial = page_path.with_name("trial.html")
    trial.write_text(page_path.read_text().replace("</body>", VISIT))
    browser.sized(width, 900)
    browser.shown_as("dark" if dark else "light")
    browser.open(f"file://{trial}", "document.title.startsWith('seen:')")
    assert browser.complaints == []
    seen = json.loads(browser.run("document.title").removeprefix("seen:"))
    for fault in ("unsorted", "lost", "dangling", "broken"):
        assert seen[fault] == [], fault
    assert seen["tables"] > 20
    assert seen["numeric"] > 40
    assert seen["images"] > len(PLOTS)
    assert seen["overflow"] <= 0  # the page itself never scrolls sideways
    assert seen["answered_px"] < SCREENS_PX[width] * FIRST_ANSWER[width]
    assert seen["height_px"] < 12_000
    assert seen["dark"] == ("rgb(21, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert set(seen["scales"]) == {sheet.WIDTH}  # text is of one size in all figures


def test_a_projection_that_was_made_is_a_section_and_says_what_it_lacks(tmp_path):
    cells = fixture.expand(strategies=("ddp",), models=("vgg16",), gpus=(1, 2))
    row = Row(cells[0].experiment, "vgg16", "ddp", "ddp", "strong", "A100", 1, 1, "measured")
    steps = {"step_low_s": 0.9, "step_s": 1.0, "step_high_s": 1.2}
    ahead = {"kind": "projected", "workers": 8, "rule": "a rule", "evidence": "one count"}
    table = tmp_path / cells[0].study / "projection.csv"
    write_projection_csv(table, [replace(row, **steps), replace(row, **steps, **ahead)])
    text = " ".join(Page(write_page(tmp_path, cells, figures=False).read_text()).text)
    assert "On more workers" in text
    assert "Records were added since" in text  # the one on two workers

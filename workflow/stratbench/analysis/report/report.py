"""Writes the report, one self-contained HTML page, and beside it a page for exploring all cells."""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from markupsafe import Markup
from PIL import Image

from stratbench.analysis.audit import SEVERITIES
from stratbench.analysis.audit.across_cells.confounding import confounded_host
from stratbench.analysis.decision.raced import read_verdict
from stratbench.analysis.figures.figure_list import PLOTS
from stratbench.analysis.figures.marks import FAMILIES, css_variables, mark_of, outline
from stratbench.analysis.paper import paper_audit
from stratbench.analysis.records.columns import CELL_COLUMNS, Row, read_cells
from stratbench.analysis.records.findings import read_audit
from stratbench.analysis.records.measures import MEASURES, NO_CELL, Measure, measures_of
from stratbench.analysis.records.score import score_of
from stratbench.analysis.report import explore
from stratbench.analysis.report.answer_rows import answer_rows, ticks
from stratbench.analysis.report.links import links_section
from stratbench.analysis.report.sections import (
    machine_lines,
    paper_section,
    prediction_lines,
    server_lines,
    strategy_lines,
)
from stratbench.analysis.tables.numbered import read_paper_tables
from stratbench.analysis.tables.summary import read_summary
from stratbench.analysis.tables.tables import (
    doubt_note,
    has_table,
    spread_note,
    wide_rows,
    workers_are,
)
from stratbench.cell.files import write_atomic
from stratbench.cell.text import pages
from stratbench.cell.text.words import MIB, counted, plural, worker_noun

TEMPLATES = Path(__file__).parent / "templates"
#: A figure with a larger SVG goes into the page as PNG.
MOST_SVG_BYTES = 60_000
#: The caption stands beside figures of widths (points) between these: a narrower figure, with one model,
#: shares its line with another one; a wider one, with three models, fills it.
ONE_MODEL_PT, FULL_WIDTH_PT = 400, 620
STATUS_WORDS = {
    "ok": "finished",
    "oom": "out of memory (OOM)",
    "timeout": "stopped at their time limit",
    "diverged": "diverged (div.)",
    "refused": "refused: the strategy cannot train the network",
    "infeasible": "skipped, since the plan says that they do not fit",
    "error": "failed",
    "missing": "have no record yet",
    "unusable": "have a record that is no measurement",
}


def distinct_values(rows: pd.DataFrame, column: str) -> str:
    """The distinct values of a column as text, for the table of runs."""
    found = [str(v).removesuffix(".0") for v in rows[column].dropna().unique()]
    return ", ".join(found) or "not recorded"


def runs_by_experiment(cells: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each experiment: its matrix, its settings and its machine."""
    lines = []
    for experiment, rows in cells.groupby("experiment", sort=False):
        noun = worker_noun(rows["device_kind"])
        lines.append(
            {
                "experiment": str(experiment),
                "data set": distinct_values(rows, "dataset"),
                "strategies": distinct_values(rows, "strategy"),
                "models": distinct_values(rows, "model"),
                "workers": f"{distinct_values(rows, 'gpus')} {plural(noun)}",
                "repeats": str(rows["repeat"].nunique()),
                "task": distinct_values(rows, "task"),
                "epochs or steps": length_of_training(rows),
                "global batch": distinct_values(rows, "global_batch"),
                "precision": distinct_values(rows, "precision"),
                "device": distinct_values(rows, "device_name"),
                "host": distinct_values(rows, "host"),
                "torch": distinct_values(rows, "torch"),
            }
        )
    return lines


def length_of_training(rows: pd.DataFrame) -> str:
    """The number of epochs as text, or the number of steps of cells that were not evaluated."""
    if rows["steps"].notna().any():
        return f"{distinct_values(rows, 'steps')} steps, no score"
    return distinct_values(rows, "epochs")


def notices_above(
    cells: pd.DataFrame, partial: bool, findings: Sequence[Row] = ()
) -> Iterator[str]:
    """Notices that a reader must see before any number; `findings`: the audit's."""
    known = cells.dropna(subset=["device_kind"])
    cpu = known[known["device_kind"] == "cpu"]
    if (unusable := (cells["status"] == "unusable").sum()) > 0:
        yield f"{unusable} of {len(cells)} cells have a record that is no measurement, and no figure here."
    if partial and cells["status"].isin(["missing", "error"]).any():
        yield "This report is partial: cells without a usable record are marked, not left out."
    if 0 < len(cpu) < len(known):
        yield (
            f"Some cells ran without a GPU. {workers_are(cpu)} Their times, speedups and memory describe "
            "this machine, not GPUs: more processes are no more hardware."
        )
    if known["synthetic_data"].astype(str).eq("True").any():
        yield "Some cells train on generated data: their score means nothing outside this study."
    for column, name in (
        ("device_name", "devices"),
        ("torch", "torch versions"),
        ("revision", "revisions of the code"),
    ):
        distinct = sorted(known[column].dropna().unique())
        if len(distinct) > 1:
            listed = ", ".join(distinct)
            yield f"The records come from different {name}: {listed}. Compare with care."
    alone = [finding["strategy"] for finding in findings if finding["rule"] == confounded_host.id]
    if alone:
        listed = ", ".join(dict.fromkeys(alone))
        yield (
            f"Strategies ran on hosts of their own: {listed}. What differs may be the hosts. Compare with "
            "care."
        )


def measured_on(cells: pd.DataFrame) -> str:
    """What the cells ran on, and how many of them finished, in a line."""
    known = cells.dropna(subset=["device_kind"])
    kinds = set(known["device_kind"])
    ended = known[known["status"] == "ok"] if (known["status"] == "ok").any() else known
    devices = ", ".join(sorted(set(ended["device_name"].dropna()))) or "an unknown device"
    hosts = {host for text in ended["host"].dropna() for host in str(text).split("; ")}
    if kinds == {"cpu"}:
        cores = ended["cpu_cores"].max()
        shared = f" that share {cores:.0f} cores" if pd.notna(cores) else ""
        of = "one machine" if len(hosts) < 2 else f"{len(hosts)} machines"
        text = f"CPU processes{shared} of {of} ({devices}): it says nothing about GPUs."
    elif kinds:
        text = f"up to {counted(int(known['gpus'].max()), 'worker')} with {devices} on "
        text += f"{counted(len(hosts), 'host')}, {distinct_values(known, 'precision')}."
    else:
        text = "nothing yet."
    counts = cells["status"].value_counts()
    others = [
        f"{counts[s]} {words}" for s, words in STATUS_WORDS.items() if s in counts and s != "ok"
    ]
    ok = counts.get("ok", 0)
    finished = f" {ok} of {len(cells)} cells finished{': ' if others else ''}{', '.join(others)}."
    return text + finished


def drawn_figures(plots_dir: Path, experiment: str, rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The figures that exist, as data URIs, each with a text for readers who cannot see it."""
    score = score_of(rows)
    for name, plot in PLOTS.items():
        svg_path = plots_dir / experiment / f"{name}.svg"
        if not svg_path.exists():
            continue
        svg = svg_path.read_text(encoding="utf-8")
        width = width_pt(svg)
        yield {
            "title": plot.title_of(score),
            "caption": plot.caption_of(rows),
            "alt": f"{plot.chart}: {plot.title_of(score)} of {distinct_values(rows, 'strategy')} for "
            f"{distinct_values(rows, 'model')} on {distinct_values(rows, 'gpus')} "
            f"{plural(worker_noun(rows['device_kind']))}.",
            "uri": data_uri(svg, svg_path),
            "width_pt": width,
            "beside": ONE_MODEL_PT < width < FULL_WIDTH_PT,
            "primary": plot.primary,
        }


def note_on_experiment(rows: pd.DataFrame) -> str:
    """A note that holds for all figures and tables of an experiment."""
    slowed = sorted(set(rows["slowdown"].dropna()))
    told = f" Slowed down on purpose: {'; '.join(slowed)}." if slowed else ""
    if rows["steps"].notna().any():
        told += f" Trained for {length_of_training(rows)}: nothing was evaluated."
    return workers_are(rows) + told


def width_pt(svg: str) -> float:
    """The width of an SVG as Matplotlib writes it."""
    return float(re.search(r'<svg [^>]*?width="([\d.]+)pt"', svg)[1])


def data_uri(svg: str, svg_path: Path) -> str:
    """The figure as a data URI: the SVG with its numbers rounded to what can be seen.

    For a crowded figure it is the PNG with 256 colours, so that a page of many figures stays small.
    """
    if len(svg) < 2 * MOST_SVG_BYTES:  # a longer one is still too long after rounding
        svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        # A glyph's scale is small: rounded to two digits, it would not match the distances of glyphs.
        svg = re.sub(r"(scale\([^)]*\))|(\d\.\d\d)\d+", r"\1\2", svg)
        svg = re.sub(r"\s+", " ", svg)
    if len(svg) < MOST_SVG_BYTES:
        return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
    png = io.BytesIO()
    with Image.open(svg_path.with_suffix(".png")) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def clear_best(rows: list[Row], measure: Measure, margin: float) -> Row | None:
    """The best of summary rows; None for a tie: less than `margin` ahead, or overlapping spreads."""
    valued = [row for row in rows if pd.notna(row["value"])]
    if measure.better is None or len(valued) < 2:
        return None
    best, *others = sorted(valued, key=lambda r: r["value"], reverse=measure.better == "higher")

    def ties(row: Row) -> bool:
        if abs(row["value"] - best["value"]) <= margin * abs(best["value"]):
            return True
        return bool(row["low"] <= best["high"] and best["low"] <= row["high"])  # False without any

    return None if any(map(ties, others)) else best


def table_values(
    rows: pd.DataFrame, summary: pd.DataFrame, measure: Measure, margin: float
) -> dict[str, Any]:
    """The values of a table: texts split into number and rest, the clear best of each model marked."""
    counts, lines = wide_rows(rows, summary, measure)
    best = {
        (model, count): clear_best(
            [found[count] for other, _, found in lines if other == model and count in found],
            measure,
            margin,
        )
        for model in {model for model, _, _ in lines}
        for count in counts
    }
    body = []
    for model, strategy, found in lines:
        cells = []
        for count in counts:
            row = found.get(count)
            if row is None:
                none = {"text": NO_CELL, "rest": "", "sort": "", "kind": "none", "flags": ""}
                cells.append(none)
                continue
            valued = pd.notna(row["value"])
            text, _, rest = row["text"].partition(" ") if valued else (row["text"], "", "")
            is_best = row is best[model, count]
            kind = "best" if is_best else "" if valued else "failed"
            cells.append(
                {
                    "text": text,
                    "rest": rest,
                    "sort": row["value"] if valued else "",
                    "kind": kind,
                    "flags": row["flags"],
                }
            )
        body.append({"model": model, "strategy": strategy, "cells": cells})
    noun = worker_noun(rows["device_kind"])
    return {
        "id": measure.name,
        "title": measure.heading,
        "caption": spread_note(rows, measure) + doubt_note(lines),
        "columns": [counted(n, noun) for n in counts],
        "body": body,
    }


def cell_lines(cells: pd.DataFrame, study_dir: Path, page_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of all cells, with links to their records and logs, relative to the page."""

    def link(path: object) -> str | None:
        if not isinstance(path, str) or not (study_dir / path).exists():
            return None
        return quote(Path(os.path.relpath(study_dir / path, page_dir)).as_posix())

    scores = {name: score_of(rows) for name, rows in cells.groupby("experiment", sort=False)}
    for row in cells.itertuples():
        score = scores[row.experiment]
        yield {
            "status": row.status,
            "experiment": row.experiment,
            "strategy": row.strategy,
            "model": row.model,
            "gpus": row.gpus,
            "repeat": row.repeat,
            "time": "" if pd.isna(row.train_time_s) else f"{row.train_time_s:.2f}",
            "score": "" if pd.isna(row.score_final) else score.text(score.factor * row.score_final),
            "reason": row.reason if isinstance(row.reason, str) else "",
            "record": link(row.record_path),
            "log": link(row.log_path),
        }


def audit_rules(findings: pd.DataFrame) -> list[dict[str, Any]]:
    """The audit's rules with findings, the most severe first, each with its places and figures."""
    names = ("experiment", "strategy", "model")
    rules = []
    for rule, rows in findings.groupby("rule", sort=False):
        first = rows.iloc[0]
        places = []
        for row in rows.to_dict("records"):
            place = [row[name] for name in names if pd.notna(row[name])]
            place += [counted(row["gpus"], "worker")] if pd.notna(row["gpus"]) else []
            place += [f"repeat {row['repeat']}"] if pd.notna(row["repeat"]) else []
            places.append({"place": ", ".join(place) or "the study", "figures": row["figures"]})
        rules.append(
            {
                "id": rule,
                "severity": first["severity"],
                "affects": first["affects"],
                "explanation": first["explanation"],
                "places": places,
            }
        )
    return rules


def paper_audit_rules(path: Path) -> list[dict[str, Any]]:
    """The rules with findings in paper_audit.csv; each place has the version of the paper."""
    findings = paper_audit.read_paper_audit(path)
    both = findings["version"] == "both"
    return audit_rules(findings.assign(experiment=findings["version"].mask(both, "v1 and v2")))


def first_screen(cells: pd.DataFrame, decided: dict[str, Any]) -> dict[str, Any]:
    """What the page's first screen prints: a row for each answer, and the marks' colours and shapes."""
    bases = cells.dropna(subset=["strategy_base"]).drop_duplicates("strategy")
    names = list(zip(bases["strategy"], bases["strategy_base"], strict=True))
    rows = list(answer_rows(decided["answers"], names, decided["equivalence_margin"]))
    shown = {family for row in rows for family in row["families"]}
    by_cost = any("ranked by cost" in sentence for sentence in decided["constraints"])
    return {
        "answers": rows,
        "any_open": any(row["short"]["score_open"] for row in rows),
        "ticks": ticks(),
        "value_name": "Cost" if by_cost else "Training time",
        "others_name": f"{'Cost' if by_cost else 'Time'} of the others, as a multiple",
        "families": [
            {
                "name": name,
                "variable": mark_of(name, 0).variable,
                "path": outline(hue.shape, 7, 7, 4.5),
                "shown": name in shown,
            }
            for name, hue in FAMILIES.items()
        ],
        "light_marks": Markup(css_variables(dark=False)),
        "dark_marks": Markup(css_variables(dark=True)),
    }


def experiment_sections(
    folder: Path, cells: pd.DataFrame, decided: dict[str, Any]
) -> Iterator[dict]:
    """The section of each experiment: its figures and tables."""
    summary = read_summary(folder / "summary.csv")
    margin = decided["equivalence_margin"]
    for name, rows in cells.groupby("experiment", sort=False):
        yield {
            "name": str(name),
            "dataset": distinct_values(rows, "dataset"),
            "about": note_on_experiment(rows),
            "figures": list(drawn_figures(folder / "plots", str(name), rows)),
            "tables": [
                table_values(rows, summary, measure, margin)
                for measure in measures_of(rows).values()
                if has_table(rows, summary, measure)
            ],
        }


def page_values(folder: Path, study_dir: Path, partial: bool, verdict_path: str) -> dict[str, Any]:
    """All values that the template prints, from the files of the other stages in `folder`."""
    cells, findings = read_cells(folder / "cells.csv"), read_audit(folder / "audit.csv")
    decided = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    prediction = folder / "prediction.csv"
    verdict = read_verdict(verdict_path)
    if verdict is not None:
        # This module draws, and matplotlib takes 0.5 s to import.
        from stratbench.analysis.report.verdict_section import verdict_section

        verdict = verdict_section(verdict, cells)
    counts = cells["status"].value_counts()
    return {
        "study": str(cells["study"].iloc[0]),
        "notices": list(notices_above(cells, partial, findings.to_dict("records"))),
        "tally": [(s, int((findings["severity"] == s).sum())) for s in SEVERITIES],
        "decided": decided,
        "verdict": verdict,
        "measured": measured_on(cells),
        **first_screen(cells, decided),
        "strategies": list(strategy_lines(cells)),
        "experiments": list(experiment_sections(folder, cells, decided)),
        "numbered": list(read_paper_tables(folder / "tables" / "paper")),
        "servers": server_lines(cells),
        "audit": audit_rules(findings),
        "paper_audit": paper_audit_rules(folder / "paper_audit.csv"),
        "paper": paper_section(folder),
        "links": links_section(study_dir / "links"),
        "predictions": prediction_lines(prediction) if prediction.exists() else [],
        "statuses": [(counts[s], s, words) for s, words in STATUS_WORDS.items() if s in counts],
        "total": len(cells),
        "runs": runs_by_experiment(cells),
        "machines": machine_lines(cells),
        "cells": list(cell_lines(cells, study_dir, folder)),
        "measures": list(MEASURES.values()),
        "columns": CELL_COLUMNS,
    }


def render(values: dict[str, Any]) -> str:
    """The page as HTML."""
    return pages.render("report.html.j2", TEMPLATES, values=values)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="stratbench.analysis.report.report", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the other stages' files are; for the page"
    )
    parser.add_argument("--study-dir", type=Path, required=True, help="results/<study>, for links")
    parser.add_argument("--verdict", default="", help="the verdict.json that counts, if any")
    parser.add_argument("--description", default="", help="what the study is for")
    parser.add_argument("--partial", action="store_true", help="say that cells may be missing")
    args = parser.parse_args(argv)
    values = page_values(args.folder, args.study_dir, args.partial, args.verdict) | {
        "description": args.description
    }
    out = args.folder / "report.html"
    write_atomic(out, render(values))
    explored = args.folder / "explore.html"
    cells, findings = read_cells(args.folder / "cells.csv"), read_audit(args.folder / "audit.csv")
    findings = findings.to_dict("records")
    notices = [f"Measured on {values['measured']}", *values["notices"]]
    explore.write_page(explored, cells, findings, args.study_dir, notices)
    for page in (out, explored):
        print(f"{page} ({page.stat().st_size / MIB:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

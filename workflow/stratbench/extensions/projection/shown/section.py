"""Renders projected step times as a section of the report, and prints them as text.

python -m stratbench.extensions.projection.shown.section --table results/STUDY/projection.csv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.figures.log_chart import ChartSeries, render_log_chart
from stratbench.analysis.figures.marks import Mark, assign_marks_by_strategy
from stratbench.analysis.records.reading import Reading, ReportInput, Section, render_section
from stratbench.cell.text.words import format_bytes, format_hours, format_short_time, wrap_lines
from stratbench.extensions.projection.shown.crossings import StepTimesByStrategy, describe_crossings
from stratbench.extensions.projection.shown.evidence import read_evidence
from stratbench.extensions.projection.shown.projected import (
    choose_worker_noun,
    group_step_times_by_strategy,
    read_projection_rows,
)

TEMPLATE = Path(__file__).parent / "templates" / "projection.html.j2"

#: Times of two trainings are comparable if their numbers of samples differ by at most this factor.
MAX_MORE_SAMPLES = 1.5
#: Short names of projection rules for the table.
SHORT_RULES = {"replay on measured links": "links"}


def make_projection_sections(inputs: ReportInput) -> Iterator[Section]:
    """Yield the report's section on projected step times, if the study has a projection."""
    cells = inputs.cells
    trained = cells.loc[cells["status"] == "ok", ["experiment", "model", "strategy", "gpus"]]
    rows = set(trained.itertuples(index=False, name=None))
    if projections := make_section_entries(inputs.study_dir / "projection.csv", rows):
        html = render_section(TEMPLATE, projections=projections)
        yield Section("projection", html, "More workers")


def make_section_entries(
    table_path: Path, trained_counts: Collection[tuple[str, str, str, int]] = ()
) -> list[dict[str, Any]]:
    """Return the values of the report's section, one entry per model.

    Args:
        table_path: Path of projection.csv; without this file there are no entries.
        trained_counts: Experiment, model, strategy and worker count of each record, to find records that
            projection.csv lacks.

    Raises:
        ValueError: If the file has another format.
    """
    if not table_path.exists():
        return []
    rows = read_projection_rows(table_path)
    models = rows.groupby(["experiment", "model"], sort=False)
    marks = assign_marks_by_strategy(zip(rows["strategy"], rows["base"], strict=True))
    return [_make_model_entry(*key, group, marks, trained_counts) for key, group in models]


def _make_model_entry(
    experiment: str,
    model: str,
    rows: pd.DataFrame,
    marks: Mapping[str, Mark],
    trained_counts: Collection[tuple[str, str, str, int]],
) -> dict[str, Any]:
    known = rows[rows["kind"] != "refused"]
    noun = choose_worker_noun(rows)
    short = noun.split()[-1]
    lines = group_step_times_by_strategy(known)
    aim = "target_" if known["target_s"].notna().any() else ""
    return {
        "experiment": experiment,
        "model": model,
        "lacks": _lacks_newer_records(
            rows, [t[2:] for t in trained_counts if t[:2] == (experiment, model)]
        ),
        "device": ", ".join(dict.fromkeys(rows["device"])),
        "scaling": ", ".join(s for s in dict.fromkeys(known["scaling"]) if s),
        "svg": _draw_step_times(model, noun, lines, known, marks) if lines else "",
        "crossings": describe_crossings(lines, noun),
        "cheapest": list(_describe_fastest_and_cheapest(known, aim, short)),
        "evidence": list(_describe_evidence(rows)),
        "refused": list(_describe_unprojected_counts(rows)),
        "untold": list(_describe_missing_targets(rows)),
        "priced": bool(known[f"{aim}cost"].notna().any()),
        "aimed": bool(aim),
        "hours": f"{short}-hours",
        "rows": [_make_table_row(r, aim) for r in known.to_dict("records")],
    }


def _lacks_newer_records(rows: pd.DataFrame, trained_counts: Collection[tuple[str, int]]) -> bool:
    """Return whether a strategy was trained on a worker count that projection.csv does not have."""
    measured = rows[rows["kind"] == "measured"]
    known = set(zip(measured["strategy"], measured["workers"], strict=True))
    projected = set(rows["strategy"])
    return any(
        strategy in projected and (strategy, n) not in known for strategy, n in trained_counts
    )


def _draw_step_times(
    model: str,
    worker_noun: str,
    times_by_strategy: StepTimesByStrategy,
    rows: pd.DataFrame,
    marks: Mapping[str, Mark],
) -> str:
    """Return a chart (SVG) of measured and projected step times over workers, with perfect scaling."""
    series = []
    for strategy, counts in times_by_strategy.items():
        measured = [c for c in counts if c.is_measured]
        ahead = [
            *measured[-1:],
            *(c for c in counts if not c.is_measured and c.workers > measured[-1].workers),
        ]
        dots = [(c.workers, c.step_s) for c in measured]
        series.append(
            ChartSeries(
                strategy,
                marks[strategy].colour_css_variable,
                dots,
                dots,
                [(c.workers, c.step_s) for c in ahead] if len(ahead) > 1 else [],
                [(c.workers, c.interval_low_s, c.interval_high_s) for c in ahead]
                if len(ahead) > 1
                else [],
                marks[strategy],
            )
        )
    counts = sorted({c.workers for line in times_by_strategy.values() for c in line})
    first = min(
        (line[0] for line in times_by_strategy.values()), key=lambda c: (c.workers, c.step_s)
    )
    strong = (rows["scaling"] == "strong").any()
    ideal = [(n, first.step_s * (first.workers / n if strong else 1)) for n in counts]
    series.append(ChartSeries("perfect scaling", "muted", dashed_line_points=ideal))
    return render_log_chart(
        series, "GPUs" if worker_noun == "GPU" else "CPU processes", "time per global batch", counts,
        lambda n: f"{n:g}", format_short_time,
        f"Time per global batch of {model} over workers, measured and projected, by strategy",
    )  # fmt: skip


def _make_table_row(row: Mapping[str, Any], column_prefix: str) -> dict[str, Any]:
    """Return the values of a row of the report's table, as texts.

    Args:
        row: Row of projection.csv.
        column_prefix: "target_" for times and costs until the target score, "" for those of the whole
            training.
    """
    r, aim = row, column_prefix
    projected = r["kind"] == "projected"
    by = SHORT_RULES.get(r["rule"], r["rule"]) if projected else "measured"
    by_host = projected and not pd.isna(r["host_s"])
    time_s = "target_s" if aim else "train_s"
    return {
        "strategy": r["strategy"],
        "workers": int(r["workers"]),
        "step": _format_or_dash(r["step_s"], format_short_time),
        "range": _format_interval_columns(r, "step", "_s", format_short_time),
        "naive": _format_or_dash(r["a_plus_b_s"], format_short_time) if r["a_plus_b_s"] > 0 else "",
        "efficiency": _format_or_dash(r["efficiency"], "{:.2f}".format),
        "efficiency_range": _format_interval_columns(r, "efficiency", "", "{:.2f}".format),
        "time": _format_or_dash(r[time_s], format_short_time),
        "time_range": _format_interval_columns(
            r, time_s.removesuffix("_s"), "_s", format_short_time
        ),
        "hours": _format_or_dash(r[f"{aim}gpu_hours"], format_hours),
        "cost": _format_or_dash(r[f"{aim}cost"], "{:.3g}".format),
        "memory": _format_or_dash(r["memory_bytes"], format_bytes),
        "memory_range": _format_interval_columns(r, "memory", "_bytes", format_bytes),
        "by": f"{by}, host" if by_host else by,
    }


def _format_or_dash(value: float, format_value: Callable[[float], str]) -> str:
    return "–" if pd.isna(value) else format_value(value)


def _format_interval_columns(
    row: Mapping[str, Any], name: str, unit: str, format_value: Callable[[float], str]
) -> str:
    """Return the interval of a projected value, or the range of repeats, as text.

    The text is empty if both ends are equal.

    Args:
        row: Row of projection.csv.
        name: Name of the column without unit.
        unit: Unit at the end of the column's name, such as "_s", or "".
        format_value: Formats one end.
    """
    low, high = (
        _format_or_dash(row[f"{name}_{end}{unit}"], format_value) for end in ("low", "high")
    )
    return "" if low == high else f"{low} to {high}"


def _describe_fastest_and_cheapest(
    rows: pd.DataFrame, column_prefix: str, worker_noun: str
) -> Iterator[str]:
    """Yield sentences on the shortest training time, and on the fewest GPU-hours.

    Args:
        rows: Rows of projection.csv of one model.
        column_prefix: "target_" for times and costs until the target score, "" for those of the whole
            training.
        worker_noun: Noun for a worker, such as "GPU".
    """
    aim, noun = column_prefix, worker_noun
    # Number of samples that each training sees. With a fixed number of steps it grows with the workers.
    seen = rows["train_s"] / rows["step_s"] * rows["workers"].where(rows["scaling"] == "weak", 1)
    if seen.max() > MAX_MORE_SAMPLES * seen.min():
        yield (
            "No count is named as the fastest, since trainings with a fixed number of steps see more samples "
            "on more workers."
        )
        return
    time_s, hours = "target_s" if aim else "train_s", f"{aim}gpu_hours"
    what = "to the target score" if aim else "for the whole training"
    for title, column in (("least time", time_s), (f"fewest {noun}-hours", hours)):
        known = rows[rows[column].notna()]
        if len(known):
            r = known.loc[known[column].idxmin()]
            paid = "" if pd.isna(r[f"{aim}cost"]) else f", at a cost of {r[f'{aim}cost']:.3g}"
            took = format_short_time(r[time_s])
            measured = known[known["kind"] == "measured"]
            beside = ""
            if r["kind"] == "projected":
                low, high = (
                    format_short_time(r[f"{time_s[:-2]}_{end}_s"]) for end in ("low", "high")
                )
                took += f" (80 %: {low} to {high})"
                m = measured.loc[measured[column].idxmin()]
                best = f"{m['strategy']} on {m['workers']:.0f}, {format_short_time(m[time_s])}"
                beside = f"; the best measured one is {best}"
            yield (
                f"{r['strategy']} on {r['workers']:.0f} ({r['kind']}) needs the {title} {what}: {took} and "
                f"{format_hours(r[hours])} {noun}-hours{paid}{beside}."
            )


def _describe_evidence(rows: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence per strategy on the evidence for its projected step times."""
    for strategy, group in rows[rows["kind"] == "projected"].groupby("strategy", sort=False):
        by_evidence = list(group.groupby("evidence", sort=False)["workers"])
        for evidence, counts in by_evidence:
            on = f" on {', '.join(f'{n:.0f}' for n in counts)}" if len(by_evidence) > 1 else ""
            yield f"{strategy}{on}: {evidence}."


def _describe_unprojected_counts(rows: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence per reason why worker counts are not projected.

    Beyond the largest projected count of a strategy, only the first refused count is named.
    """
    by_reason: dict[tuple[str, str], list[str]] = {}
    for strategy, group in rows.groupby("strategy", sort=False):
        projected = group[group["kind"] == "projected"]["workers"].max()
        refused = group[group["kind"] == "refused"].sort_values("workers")
        between = refused[refused["workers"] < projected]
        beyond = refused[~(refused["workers"] < projected)]
        reasons = [(f"{r.workers:.0f}", r.reason) for r in between.itertuples()]
        if len(beyond):
            first = beyond.iloc[0]
            from_on = (
                f"from {first['workers']:.0f} on" if len(beyond) > 1 else f"{first['workers']:.0f}"
            )
            reasons.append((from_on, first["reason"]))
        for key in reasons:
            by_reason.setdefault(key, []).append(str(strategy))
    for (counts, reason), strategies in by_reason.items():
        yield f"Not projected: {', '.join(strategies)}, {counts}: {reason}."


def _describe_missing_targets(rows: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence per strategy whose time to the target score is unknown."""
    for strategy, group in rows.groupby("strategy", sort=False):
        if reason := next((w for w in group["why_no_target"] if w), ""):
            yield f"The time of {strategy} to the target score is unknown: {reason}."


READING = Reading(list_sections=make_projection_sections, read_evidence=read_evidence)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="stratbench.extensions.projection.shown.section", description=__doc__
    )
    parser.add_argument("--table", type=Path, required=True, help="the file projection.csv to read")
    args = parser.parse_args(argv)
    try:
        section = make_section_entries(args.table)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not section:
        print(
            f"error: {args.table} does not exist or is empty; run `stratbench project`",
            file=sys.stderr,
        )
        return 1
    lines = []
    for of in section:
        if sentences := [*of["crossings"], *of["cheapest"]]:
            lines += [f"{of['experiment']}, {of['model']}:", *(f"  {line}" for line in sentences)]
    print(wrap_lines(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

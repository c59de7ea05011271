"""The projection to more workers: a section of the report, and the text of `snakemake project`.

python -m stratbench.extensions.projection.shown.section --table results/STUDY/projection.csv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.figures.log_chart import ChartSeries, log_chart
from stratbench.analysis.figures.marks import Mark, marks_by_strategy
from stratbench.analysis.records.reading import Reading, ReportInput, Section, render_section
from stratbench.cell.text.words import bytes_text, folded, hours_text, short_time
from stratbench.extensions.projection.shown.crossings import Lines, sentences_on_crossings
from stratbench.extensions.projection.shown.evidence import read_evidence
from stratbench.extensions.projection.shown.projected import lines_of, noun_of, read_rows

TEMPLATE = Path(__file__).parent / "templates" / "projection.html.j2"

#: Trainings that see so many times as many samples as others take longer for that.
MAX_MORE_SAMPLES = 1.5
#: Names of rules in the table.
SHORT_RULES = {"replay on measured links": "links"}


def make_projection_sections(inputs: ReportInput) -> Iterator[Section]:
    """Make the section where a projection was made."""
    cells = inputs.cells
    trained = cells.loc[cells["status"] == "ok", ["experiment", "model", "strategy", "gpus"]]
    rows = set(trained.itertuples(index=False, name=None))
    if projections := projection_section(inputs.study_dir / "projection.csv", rows):
        html = render_section(TEMPLATE, projections=projections)
        yield Section("projection", html, "More workers")


def projection_section(
    table: Path, trained: Collection[tuple[str, str, str, int]] = ()
) -> list[dict[str, Any]]:
    """The values of the section, an entry for each model; none without a table. ValueError: it is none.

    `trained`: experiment, model, strategy and count of the records, if it is to be seen whether the table
    lacks some of them.
    """
    if not table.exists():
        return []
    rows = read_rows(table)
    models = rows.groupby(["experiment", "model"], sort=False)
    marks = marks_by_strategy(zip(rows["strategy"], rows["base"], strict=True))
    return [_model(*key, group, marks, trained) for key, group in models]


def _model(
    experiment: str,
    model: str,
    rows: pd.DataFrame,
    marks: Mapping[str, Mark],
    trained: Collection[tuple[str, str, str, int]],
) -> dict[str, Any]:
    known = rows[rows["kind"] != "refused"]
    noun = noun_of(rows)
    short = noun.split()[-1]
    lines = lines_of(known)
    aim = "target_" if known["target_s"].notna().any() else ""
    return {
        "experiment": experiment,
        "model": model,
        "lacks": _lacks(rows, [t[2:] for t in trained if t[:2] == (experiment, model)]),
        "device": ", ".join(dict.fromkeys(rows["device"])),
        "scaling": ", ".join(s for s in dict.fromkeys(known["scaling"]) if s),
        "svg": _chart(model, noun, lines, known, marks) if lines else "",
        "crossings": sentences_on_crossings(lines, noun),
        "cheapest": list(_cheapest(known, aim, short)),
        "evidence": list(_evidence(rows)),
        "refused": list(_refused(rows)),
        "untold": list(_untold(rows)),
        "priced": bool(known[f"{aim}cost"].notna().any()),
        "aimed": bool(aim),
        "hours": f"{short}-hours",
        "rows": [_line(r, aim) for r in known.to_dict("records")],
    }


def _lacks(rows: pd.DataFrame, trained: Collection[tuple[str, int]]) -> bool:
    """Return whether newer records have counts of its strategies that the table lacks."""
    measured = rows[rows["kind"] == "measured"]
    known = set(zip(measured["strategy"], measured["workers"], strict=True))
    projected = set(rows["strategy"])
    return any(strategy in projected and (strategy, n) not in known for strategy, n in trained)


def _chart(
    model: str, noun: str, lines: Lines, rows: pd.DataFrame, marks: Mapping[str, Mark]
) -> str:
    """Steps over workers: measured ones joined, projected ones dashed in their fans, and perfect scaling."""
    series = []
    for strategy, counts in lines.items():
        measured = [c for c in counts if c.measured]
        ahead = [
            *measured[-1:],
            *(c for c in counts if not c.measured and c.workers > measured[-1].workers),
        ]
        dots = [(c.workers, c.step_s) for c in measured]
        series.append(
            ChartSeries(
                strategy,
                marks[strategy].variable,
                dots,
                dots,
                [(c.workers, c.step_s) for c in ahead] if len(ahead) > 1 else [],
                [(c.workers, c.low_s, c.high_s) for c in ahead] if len(ahead) > 1 else [],
                marks[strategy],
            )
        )
    counts = sorted({c.workers for line in lines.values() for c in line})
    first = min((line[0] for line in lines.values()), key=lambda c: (c.workers, c.step_s))
    strong = (rows["scaling"] == "strong").any()
    ideal = [(n, first.step_s * (first.workers / n if strong else 1)) for n in counts]
    series.append(ChartSeries("nothing lost", "muted", dashed=ideal))
    return log_chart(
        series, f"{noun}s" if noun == "GPU" else "CPU processes", "time of a global batch", counts,
        lambda n: f"{n:g}", short_time,
        f"Time of a global batch of {model} over workers, measured and projected, by strategy",
    )  # fmt: skip


def _line(r: Mapping[str, Any], aim: str) -> dict[str, Any]:
    """Return a count of a strategy, in words.

    `aim`: the columns of what its training takes begin with it.
    """
    projected = r["kind"] == "projected"
    by = SHORT_RULES.get(r["rule"], r["rule"]) if projected else "measured"
    by_host = projected and not pd.isna(r.get("host_s"))  # a table of before has no such column
    time_s = "target_s" if aim else "train_s"
    return {
        "strategy": r["strategy"],
        "workers": int(r["workers"]),
        "step": _text(r["step_s"], short_time),
        "step_s": r["step_s"],
        "range": _range(r, "step", "_s", short_time),
        "naive": _text(r["a_plus_b_s"], short_time) if r["a_plus_b_s"] > 0 else "",
        "efficiency": _text(r["efficiency"], "{:.2f}".format),
        "efficiency_range": _range(r, "efficiency", "", "{:.2f}".format),
        "time": _text(r[time_s], short_time),
        "time_range": _range(r, time_s.removesuffix("_s"), "_s", short_time),
        "hours": _text(r[f"{aim}gpu_hours"], hours_text),
        "cost": _text(r[f"{aim}cost"], "{:.3g}".format),
        "memory": _text(r["memory_bytes"], bytes_text),
        "memory_range": _range(r, "memory", "_bytes", bytes_text),
        "by": f"{by}, host" if by_host else by,
    }


def _text(value: float, text: Callable[[float], str]) -> str:
    return "–" if pd.isna(value) else text(value)


def _range(r: Mapping[str, Any], name: str, unit: str, text: Callable[[float], str]) -> str:
    """Return the interval of a projection, or the range of repeats.

    Empty where it is one value.
    """
    low, high = (_text(r[f"{name}_{end}{unit}"], text) for end in ("low", "high"))
    return "" if low == high else f"{low} to {high}"


def _cheapest(rows: pd.DataFrame, aim: str, noun: str) -> Iterator[str]:
    """Yield which strategy and count takes the least time, and which the fewest GPU-hours."""
    # In weak scaling with a fixed number of steps more workers see more samples.
    seen = rows["train_s"] / rows["step_s"] * rows["workers"].where(rows["scaling"] == "weak", 1)
    if seen.max() > MAX_MORE_SAMPLES * seen.min():
        yield (
            "Which count takes the least time is not told: trainings of a fixed number of steps see more "
            "samples on more workers."
        )
        return
    time_s, hours = "target_s" if aim else "train_s", f"{aim}gpu_hours"
    what = "to the target score" if aim else "for the whole training"
    for title, column in (("least time", time_s), (f"fewest {noun}-hours", hours)):
        known = rows[rows[column].notna()]
        if len(known):
            r = known.loc[known[column].idxmin()]
            paid = "" if pd.isna(r[f"{aim}cost"]) else f", at a cost of {r[f'{aim}cost']:.3g}"
            took = short_time(r[time_s])
            measured = known[known["kind"] == "measured"]
            beside = ""
            if r["kind"] == "projected":
                low, high = (short_time(r[f"{time_s[:-2]}_{end}_s"]) for end in ("low", "high"))
                took += f" (80 %: {low} to {high})"
                m = measured.loc[measured[column].idxmin()]
                beside = f"; of those measured {m['strategy']} on {m['workers']:.0f}, {short_time(m[time_s])}"
            yield (
                f"The {title} {what}: {r['strategy']} on {r['workers']:.0f} ({r['kind']}), {took} and "
                f"{hours_text(r[hours])} {noun}-hours{paid}{beside}."
            )


def _evidence(rows: pd.DataFrame) -> Iterator[str]:
    """Yield the basis of each strategy's projection."""
    for strategy, group in rows[rows["kind"] == "projected"].groupby("strategy", sort=False):
        by_evidence = list(group.groupby("evidence", sort=False)["workers"])
        for evidence, counts in by_evidence:
            on = f" on {', '.join(f'{n:.0f}' for n in counts)}" if len(by_evidence) > 1 else ""
            yield f"{strategy}{on}: {evidence}."


def _refused(rows: pd.DataFrame) -> Iterator[str]:
    """Yield what is not projected, each reason once, beyond all projected counts only the first."""
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


def _untold(rows: pd.DataFrame) -> Iterator[str]:
    """Yield why there is no time to the target."""
    for strategy, group in rows.groupby("strategy", sort=False):
        if reason := next((w for w in group["why_no_target"] if w), ""):
            yield f"No time to the target of {strategy}: {reason}."


READING = Reading(sections=make_projection_sections, evidence=read_evidence)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="stratbench.extensions.projection.shown.section", description=__doc__
    )
    parser.add_argument("--table", type=Path, required=True, help="projection.csv")
    args = parser.parse_args(argv)
    try:
        section = projection_section(args.table)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not section:
        print(f"error: {args.table} is not there, or empty", file=sys.stderr)
        return 1
    lines = []
    for of in section:
        if sentences := [*of["crossings"], *of["cheapest"]]:
            lines += [f"{of['experiment']}, {of['model']}:", *(f"  {line}" for line in sentences)]
    print(folded(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

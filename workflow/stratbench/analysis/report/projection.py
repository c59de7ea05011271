"""What `snakemake project` says of more workers: a section of the report, `projection.html`, and sentences.

python -m stratbench.analysis.report.projection --table results/STUDY/projection.csv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from stratbench.analysis.decision.crossings import Count, Lines, sentences_on_crossings
from stratbench.analysis.figures.log_chart import Series, log_chart
from stratbench.analysis.figures.marks import Mark, marks_by_strategy
from stratbench.cell.files import write_atomic
from stratbench.cell.text import pages
from stratbench.cell.text.words import bytes_text, folded, hours_text, short_time

TEMPLATES = Path(__file__).parent / "templates"
TEXTS = ("experiment", "model", "strategy", "base", "scaling", "device", "kind", "why_no_target",
         "evidence", "rule", "why")  # fmt: skip


def projection_section(table: Path) -> list[dict[str, Any]]:
    """The values of the section, an entry for each model; none without a table. ValueError: it is none."""
    if not table.exists():
        return []
    try:
        rows = pd.read_csv(table, converters=dict.fromkeys(TEXTS, str))
        models = rows.groupby(["experiment", "model"], sort=False)
        marks = marks_by_strategy(zip(rows["strategy"], rows["base"], strict=True))
        return [_model(*key, group, marks) for key, group in models]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{table}: is no projection.csv ({error!r}); run `project` again") from error


def _model(
    experiment: str, model: str, rows: pd.DataFrame, marks: Mapping[str, Mark]
) -> dict[str, Any]:
    known = rows[rows["kind"] != "refused"]
    noun = "CPU process" if (rows["device"] == "CPU").all() else "GPU"
    lines = lines_of(known)
    return {
        "experiment": experiment,
        "model": model,
        "device": ", ".join(dict.fromkeys(rows["device"])),
        "svg": _chart(model, noun, lines, known, marks) if lines else "",
        "crossings": sentences_on_crossings(lines, noun),
        "cheapest": list(_cheapest(known)),
        "priced": bool(known["cost"].notna().any()),
        "aimed": bool(known["target_s"].notna().any()),
        "rows": [_line(r) for r in known.to_dict("records")],
        "refused": list(_refused(rows)),
        "untold": list(_untold(rows)),
    }


def lines_of(rows: pd.DataFrame) -> Lines:
    """The counts of each strategy that has been measured or projected."""
    return {
        str(strategy): [
            Count(int(r.workers), r.step_low_s, r.step_s, r.step_high_s, r.kind == "measured")
            for r in group.sort_values("workers").itertuples()
        ]
        for strategy, group in rows.groupby("strategy", sort=False)
    }


def _chart(
    model: str, noun: str, lines: Lines, rows: pd.DataFrame, marks: Mapping[str, Mark]
) -> str:
    """Steps over workers: measured ones joined, projected ones dashed in their fans, and perfect scaling."""
    series = []
    for strategy, counts in lines.items():
        measured = [c for c in counts if c.measured]
        ahead = [*measured[-1:], *(c for c in counts if not c.measured and c.workers > measured[-1].workers)]
        dots = [(c.workers, c.step_s) for c in measured]
        series.append(
            Series(
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
    series.append(Series("nothing lost", "muted", dashed=ideal))
    return log_chart(
        series, f"{noun}s" if noun == "GPU" else "CPU processes", "time of a global batch", counts,
        lambda n: f"{n:g}", short_time,
        f"Time of a global batch of {model} over workers, measured and projected, by strategy",
    )  # fmt: skip


def _line(r: Mapping[str, Any]) -> dict[str, Any]:
    """A count of a strategy, in words."""
    projected = r["kind"] == "projected"

    def three(name: str, text: Any, unit: str = "") -> str:
        low, middle, high = (r[f"{name}{end}{unit}"] for end in ("_low", "", "_high"))
        if pd.isna(middle):
            return "–"
        between = f" ({text(low)} to {text(high)})" if low != high else ""
        return f"{text(middle)}{between}"

    return {
        "strategy": r["strategy"],
        "workers": int(r["workers"]),
        "projected": projected,
        "step": three("step", short_time, "_s"),
        "step_s": r["step_s"],
        "naive": short_time(r["a_plus_b_s"]) if r["a_plus_b_s"] > 0 else "–",
        "efficiency": three("efficiency", lambda v: f"{v:.2f}"),
        "hours": three("gpu_hours", hours_text),
        "cost": three("cost", lambda v: f"{v:.3g}"),
        "target": three("target", short_time, "_s"),
        "target_hours": three("target_gpu_hours", hours_text),
        "target_cost": three("target_cost", lambda v: f"{v:.3g}"),
        "memory": three("memory", bytes_text, "_bytes"),
        "by": r["rule"] if projected else "measured",
        "evidence": r["evidence"],
        "skill": _skill(r) if projected else "",
    }


def _skill(r: Mapping[str, Any]) -> str:
    if pd.isna(r["skill"]):
        return "not known: fewer than three measured counts"
    return f"{r['skill']:.2f}"


def _cheapest(rows: pd.DataFrame) -> Iterator[str]:
    """Which strategy and count takes the fewest GPU-hours (cost), and which the least time, to the target."""
    aim = "target_" if rows["target_s"].notna().any() else ""
    what = "to the target score" if aim else "for the whole training"
    for title, column in (("fewest hours", f"{aim}gpu_hours"), ("least time", f"{aim or 'train_'}s".replace("__", "_"))):
        known = rows[rows[column].notna()]
        if len(known):
            r = known.loc[known[column].idxmin()]
            paid = "" if pd.isna(r[f"{aim}cost"]) else f", at a cost of {r[f'{aim}cost']:.3g}"
            time_s = r["target_s"] if aim else r["train_s"]
            yield (
                f"The {title} {what}: {r['strategy']} on {r['workers']:.0f} ({r['kind']}), "
                f"{short_time(time_s)} and {hours_text(r[f'{aim}gpu_hours'])} worker-hours{paid}."
            )


def _refused(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """For each strategy and reason, the counts of which nothing is said."""
    refused = rows[rows["kind"] == "refused"]
    for strategy, group in refused.groupby("strategy", sort=False):
        yield {
            "strategy": strategy,
            "counts": f"from {group['workers'].min():.0f} on" if len(group) > 1 else f"{group['workers'].min():.0f}",
            "why": group.sort_values("workers")["why"].iloc[0],
        }


def _untold(rows: pd.DataFrame) -> Iterator[str]:
    """Why nothing is said of the time to the target."""
    for strategy, group in rows.groupby("strategy", sort=False):
        if why := next((w for w in group["why_no_target"] if w), ""):
            yield f"{strategy}: {why}"


def page(section: Sequence[dict[str, Any]], title: str) -> str:
    """The section as a page of its own."""
    return pages.render(
        "projection_page.html.j2", TEMPLATES, values={"projections": section, "title": title}
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="stratbench.analysis.report.projection", description=__doc__
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
        if told := [*of["crossings"], *of["cheapest"]]:
            lines += [f"{of['experiment']}, {of['model']}:", *(f"  {line}" for line in told)]
    print(folded(lines))
    out = args.table.with_suffix(".html")
    write_atomic(out, page(section, f"Projection of {args.table.resolve().parent.name}"))
    print(f"Written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

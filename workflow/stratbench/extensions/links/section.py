"""Renders the measured links, as a section of the report and as text of `snakemake links`.

python -m stratbench.extensions.links.section --folder results/STUDY/links
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stratbench.analysis.figures.log_chart import ChartSeries, render_log_chart
from stratbench.analysis.records.reading import Reading, ReportInput, Section, render_section
from stratbench.cell.files import read_csv_rows
from stratbench.cell.text.words import format_bytes, format_short_time
from stratbench.extensions.links.collective_cost import (
    LinkLayout,
    LinkModel,
    get_algorithms_by_name,
)

TEMPLATE = Path(__file__).parent / "templates" / "links.html.j2"

#: Names of colours of the report. The plots' lines have one for each number of workers.
COLOURS = ("replicas", "bad", "averaging-servers", "wait", "ink", "muted")
#: A fit is trusted if the standard deviation of ln(measured / fitted time) is at most this.
TRUSTED_SD = 0.35


def make_links_sections(inputs: ReportInput) -> Iterator[Section]:
    """Yield the report's section on links, if links were measured."""
    if links := make_links_section_values(inputs.study_dir / "links"):
        yield Section("links", render_section(TEMPLATE, links=links), "Links")


def make_links_section_values(folder: Path) -> dict[str, Any] | None:
    """Return the values of the section on links, or None if none were measured.

    Raises:
        ValueError: If a file is not a valid table.
    """
    if not (folder / "links.csv").exists() or not (folder / "times.csv").exists():
        return None
    try:
        links, times = read_csv_rows(folder / "links.csv"), read_csv_rows(folder / "times.csv")
        kinds = list(dict.fromkeys((r["library"], r["kind"]) for r in links))
        return {
            "rows": [_make_link_table_row(r) for r in links],
            "charts": [_draw_collective_times(*kind, links, times) for kind in kinds],
            "kappa": next((f"{float(r['kappa']):.2f}" for r in links if r["kappa"]), ""),
        }
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{folder}: links.csv or times.csv is not a valid table ({error!r}); run `links` again"
        ) from error


def _make_link_table_row(link: dict[str, str]) -> dict[str, Any]:
    rate, knee, log_sd = (float(link[name]) for name in ("bytes_per_s", "knee_bytes", "log_sd"))
    return {
        "name": _describe_collective(link["library"], link["kind"]),
        "level": "between nodes" if link["level"] == "between" else "within nodes",
        "algorithm": link["algorithm"],
        "alpha": format_short_time(float(link["alpha_s"])),
        "rate": f"{format_bytes(rate)}/s" if math.isfinite(rate) else "not measurable",
        "knee": format_bytes(knee) if math.isfinite(knee) else "–",
        "off": f"{100 * (math.exp(log_sd) - 1):.0f} %",
        "doubtful": log_sd > TRUSTED_SD,
        "workers": link["workers"],
        "largest": format_bytes(float(link["largest_bytes"])),
        "times": link["times"],
    }


def _describe_collective(library: str, kind: str) -> str:
    if kind == "push_pull":
        return f"push and pull by {library.removeprefix('servers-')}"
    return f"{kind.replace('_', '-')} by {library}"


def _draw_collective_times(
    library: str, kind: str, links: Sequence[dict[str, str]], times: Sequence[dict[str, str]]
) -> dict[str, Any]:
    """Draw a collective's measured and fitted times over the bytes of the tensor.

    Each layout of workers over nodes has a colour.
    """
    fitted = [r for r in links if (r["library"], r["kind"]) == (library, kind)]
    levels = {r["level"]: LinkModel(float(r["alpha_s"]), float(r["bytes_per_s"])) for r in fitted}
    measured: dict[tuple[int, int], dict[int, list[float]]] = {}
    for t in times:
        if (t["library"], t["kind"]) == (library, kind):
            at = measured.setdefault((int(t["workers"]), int(t["nodes"])), {})
            at.setdefault(int(t["n_bytes"]), []).append(float(t["seconds"]))
    algorithms = get_algorithms_by_name(fitted[0]["algorithm"], library, kind)
    series = []
    for i, ((workers, nodes), points) in enumerate(sorted(measured.items())):
        layout = LinkLayout(workers, nodes)
        sizes = sorted(points)
        line = [
            (size, min(a(kind, size, layout).compute_time_s(levels) for a in algorithms))
            for size in sizes
        ]
        on = f", {nodes} nodes" if nodes > 1 else ""
        series.append(
            ChartSeries(
                f"{workers} worker{'s' * (workers > 1)}{on}",
                COLOURS[i % len(COLOURS)],
                marked_points=[(size, statistics.median(points[size])) for size in sizes],
                solid_line_points=[p for p in line if p[1] > 0],
            )
        )
    every = sorted({size for points in measured.values() for size in points})
    name = _describe_collective(library, kind)
    return {
        "name": name,
        "svg": render_log_chart(
            series,
            "bytes of the whole tensor",
            "time",
            every[:: max(1, len(every) // 5)],
            format_bytes,
            format_short_time,
            f"Time of {name} over bytes, measured and fitted, by workers",
        ),
    }


READING = Reading(list_sections=make_links_sections)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="stratbench.extensions.links.section", description=__doc__
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder with the files links.csv and times.csv"
    )
    args = parser.parse_args(argv)
    try:
        section = make_links_section_values(args.folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if section is None:
        print(
            f"error: {args.folder} has no links.csv and times.csv; run `stratbench links`",
            file=sys.stderr,
        )
        return 1
    for r in section["rows"]:
        print(
            f"{r['name']}, {r['level']}: latency {r['alpha']} per step, rate {r['rate']}, spread of times "
            f"{r['off']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The figure of a model's projections: measured counts, and a fan for each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stratbench.cell.files import replacing
from stratbench.plan.projection.evidence import Evidence
from stratbench.plan.projection.project import Projection

#: Colours that are told apart with any kind of sight (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def draw(found: Sequence[tuple[Evidence, Sequence[Projection]]], path: Path) -> None:
    """Writes an SVG. Lines end where the projection is refused."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    first = found[0][0]
    with mpl.rc_context({"svg.hashsalt": "stratbench", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for i, (evidence, projections) in enumerate(found):
            colour = COLOURS[i % len(COLOURS)]
            measured = evidence.points
            axes.plot(
                [p.workers for p in measured],
                [p.step_s for p in measured],
                "o-",
                color=colour,
                label=evidence.strategy,
            )
            said = [p for p in projections if p.interval]
            if not said:
                continue
            counts = [measured[-1].workers, *(p.workers for p in said)]
            last_s = measured[-1].step_s
            axes.plot(counts, [last_s, *(p.interval.middle_s for p in said)], "--", color=colour)
            axes.fill_between(
                counts,
                [last_s, *(p.interval.low_s for p in said)],
                [last_s, *(p.interval.high_s for p in said)],
                color=colour,
                alpha=0.2,
                linewidth=0,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_xlabel("GPUs" if first.stated.gpu else "workers (CPU processes)")
        axes.set_ylabel("seconds of a global batch")
        axes.set_title(
            f"{first.model}, {first.experiment}: dots measured, dashes projected, fans 80 %",
            fontsize="medium",
        )
        axes.legend(fontsize="small")
        with replacing(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})

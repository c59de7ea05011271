"""How often the regression watch errs, and what it finds: simulated sets with planted slow-downs.

    export PYTHONPATH=workflow
    nice python benchmarks/statistics/regression_watch.py > benchmarks/results/regression-watch.md

Four strategies, three models, two worker counts: 24 cells. Times of repeats scatter by 1 % (log-normal),
of independent repeats in both sets. The slower is one strategy in all of its cells, or one of its six.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from stratbench.analysis.records.groups import Group
from stratbench.extensions.sets.comparing import regression
from stratbench.extensions.sets.comparing.comparison import CellMeasurements, ComparedCell
from stratbench.extensions.sets.comparing.matching import Match

NOISE, TURNS, SEED = 0.01, 200, 20
SHAPE = (4, 3, 2)
#: Share that is planted, where, and how much the noise of cells differs (sd of its logarithm).
CASES = (
    ("A/A", 0.0, "strategy", 0.0),
    ("A/A, noise of cells ×exp(N(0, 0.7))", 0.0, "strategy", 0.7),
    *((f"strategy +{share:.0%}", share, "strategy", 0.0) for share in (0.02, 0.05, 0.2)),
    *((f"one cell +{share:.0%}", share, "cell", 0.0) for share in (0.02, 0.05, 0.2)),
)


def two_sets(
    chance: np.random.Generator, repeats: int, share: float, where: str, spread: float = 0.0
) -> SimpleNamespace:
    """Two sets as a comparison has them, the first strategy, or its first cell, slower by `share`."""
    cells = []
    for at in np.ndindex(*SHAPE):
        noise = NOISE * np.exp(spread * chance.normal())
        old, new = np.exp(noise * chance.normal(size=(2, repeats)))
        if at[0] == 0 and (where == "strategy" or at == (0, 0, 0)):
            new = new * (1 + share)
        group = Group("main", f"s{at[0]}", f"m{at[1]}", at[2] + 1)
        sides = (CellMeasurements(tuple(side)) for side in (old, new))
        cells.append(ComparedCell(Match("d", group, group), *sides))
    other = SimpleNamespace(name="new", is_published=False)
    return SimpleNamespace(
        other_set=other, common_cells=cells, cells_with_ratio=cells, cells_missing_in_other=()
    )


def share_of_alarms(
    repeats: int, allowed: float, share: float, where: str, spread: float, turns: int = TURNS
) -> float:
    """Of simulated pairs of sets the share of which the watch says that something is slower."""
    chance = np.random.default_rng(SEED)
    return float(
        np.mean(
            [
                regression.has_failing_outcome(
                    regression.find_regressions(
                        [two_sets(chance, repeats, share, where, spread)], allowed
                    )
                )
                for _ in range(turns)
            ]
        )
    )


def main() -> None:
    """Print the table as Markdown."""
    print("# The regression watch: false alarms and what is found\n")
    print(__doc__.partition("\n\n")[2].partition("\n\n")[2].strip())
    print(f"\nShare of {TURNS} simulated pairs of sets in which `compare` fails, %:\n")
    print("| `fail_above` | repeats | " + " | ".join(name for name, *_ in CASES) + " |")
    print("|---:|---:|" + "---:|" * len(CASES))
    for allowed in (0.0, 0.05):
        for repeats in (2, 3, 5):
            found = [share_of_alarms(repeats, allowed, *case) for _, *case in CASES]
            print(
                f"| {allowed:g} | {repeats} | " + " | ".join(f"{100 * x:.1f}" for x in found) + " |"
            )


if __name__ == "__main__":
    main()

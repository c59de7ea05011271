"""Makes the prior of `plan/projection/population.py` from published measurements, and says what it is worth.

    PYTHONPATH=workflow python benchmarks/projection_prior.py FILE.csv      fits it and prints it
    PYTHONPATH=workflow python benchmarks/projection_prior.py FILE.csv --halves

The second fits it twice, each time on a random half of the sources, and prints the table of projection.py for
the cells of the other half.

It maximises the density that the projection gives to measured times: of each series the two and the three
smallest counts are fitted, each count at 2, 4 or 8 times the last is judged. A source weighs as the root of
its number of cells. A weak penalty keeps what the data do not tell near a first guess. Minutes.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from projection import FACTORS, cells_of, read, series_of, tables
from scipy.optimize import minimize

from stratbench.plan.projection.naive import Measured
from stratbench.plan.projection.population import Stated, log_density

#: The guess: losses of a tenth of a step, of the size of a network a few times slower than what is in a node.
GUESS = {
    "volume": -2.4, "volume_sd": 1.2, "sent": 0.6, "sent_sd": 1.5, "sent_slope": 0.7,
    "between": 0.2, "between_sd": 1.2, "connected": -1.3, "log_n": -4.1, "log_n_sd": 1.4,
    "log_nodes": -4.1, "linear": -7.7, "linear_sd": 2.0, "servers": 0.1, "half": 1.5,
    "half_sd": 1.9, "kept": -2.5, "kept_sd": 1.8, "noise": -3.7, "noise_sd": 0.9,
    "wander": -1.3, "all_sd": 1.3, "accumulates": -1.0, "accumulates_by": 1.0, "short": 0.3,
    "leaving": -3.0, "leaving_sd": 1.5,
}  # fmt: skip
PENALTY = 0.002
SEED = 32


class Case(NamedTuple):
    source: str
    stated: Stated
    fitted: list[Measured]
    target: Measured


def cases_of(rows: pd.DataFrame) -> list[Case]:
    return [
        Case(source, stated, points[:k], target)
        for source, _, stated, points in series_of(rows)
        for k in (2, 3)
        for target in points[k:]
        if target.workers / points[k - 1].workers in FACTORS
    ]


def fitted_prior(cases: list[Case], iterations: int) -> dict[str, float]:
    names = list(GUESS)
    start = np.array([GUESS[n] for n in names])
    of_source = pd.Series([c.source for c in cases]).value_counts()
    weights = np.array([1 / math.sqrt(of_source[c.source]) for c in cases])

    def loss(values: np.ndarray) -> float:
        prior = dict(zip(names, values, strict=True))
        densities = [log_density(c.fitted, c.stated, c.target, prior) for c in cases]
        return -float(weights @ densities / weights.sum()) + PENALTY * float(
            ((values - start) ** 2).sum()
        )

    found = minimize(
        loss,
        start,
        method="L-BFGS-B",
        options={"maxiter": iterations, "eps": 1e-3, "maxfun": 10**9},
    )
    return {name: round(float(v), 3) for name, v in zip(names, found.x, strict=True)}


def halves(sources: list[str], seed: int) -> tuple[set[str], set[str]]:
    first = set(random.Random(seed).sample(sorted(sources), (len(sources) + 1) // 2))
    return first, set(sources) - first


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--halves", action="store_true", help="cross-check by halves of the sources"
    )
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the halves ({SEED})")
    parser.add_argument("--iterations", type=int, default=12, help="of the optimiser (12)")
    parser.add_argument("--out", type=Path, help="folder for halves.csv")
    args = parser.parse_args()
    rows, _ = read(args.file)
    if not args.halves:
        print(fitted_prior(cases_of(rows), args.iterations))
        return 0
    parts = halves(sorted(rows.source.unique()), args.seed)
    judged = []
    for train, test in (parts, parts[::-1]):
        prior = fitted_prior(cases_of(rows[rows.source.isin(train)]), args.iterations)
        print(f"fitted on {', '.join(sorted(train))}:\n{prior}", flush=True)
        judged.append(cells_of(rows[rows.source.isin(test)], 2, prior))
    made = tables(pd.concat(judged, ignore_index=True))
    with pd.option_context(
        "display.width", 250, "display.max_rows", None, "display.max_columns", None
    ):
        print(made.round(2).to_string(index=False))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        made.round(3).to_csv(args.out / "halves.csv", index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Holds a verdict against the full matrix of the same cells: `python benchmarks/verdict_digits.py FOLDER`.

FOLDER has digits-verdict.json (a verdict.json) and cells.csv of the matrix; verdict_digits.sh makes both.
Prints a table: of each strategy, its time over the leader's as the blocks and as the whole trainings have
it. A claim is contradicted where the trainings' own 95 % interval (paired t on logarithms, repeats as pairs)
lies wholly beyond it.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy import stats


def interval(times: list[float], leader: list[float]) -> tuple[float, float, float]:
    """Ratio of times to the leader's, and its 95 % interval, from repeats as pairs."""
    logs = [math.log(t / base) for t, base in zip(times, leader, strict=True)]
    half = stats.t.ppf(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(fmean(logs)), math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)


def contradicted(bout: dict[str, Any], high: float) -> bool:
    """Whether a rival that took at most `high` times as long as the leader makes the claim untrue."""
    if bout["at_most"] is None:
        return False  # nothing was claimed
    return high < math.exp(-math.log1p(bout["at_most"]))


def main(folder: Path) -> None:
    """Print the table of the study in `folder`."""
    verdict = json.loads((folder / "digits-verdict.json").read_text(encoding="utf-8"))
    with (folder / "cells.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok"]
    times: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: int(row["repeat"])):
        times.setdefault(row["strategy"], []).append(float(row["train_time_s"]))
    print("# A verdict and the full matrix\n")
    for bout in verdict["bouts"]:
        leader = times[bout["leader"]]
        print(f"{bout['text']} Blocks: {bout['blocks']}. Confidence: {bout['confidence']}.\n")
        print(
            "| strategy | blocks: ratio to the leader | at least | state | matrix, 3 repeats | contradicts |"
        )
        print("|---|---|---|---|---|---|")
        for arm in bout["ratios"]:
            known = arm["low"] is not None
            said = f"{arm['ratio']:.3f}" + (
                f" [{arm['low']:.3f}, {arm['high']:.3f}]" if known else ""
            )
            bound = f"{arm['at_least']:.3f}" if arm["at_least"] else "–"
            row = f"| {arm['strategy']} | {said} | {bound} | {arm['state']}"
            if (
                len(times.get(arm["strategy"], [])) < len(leader)
                or arm["strategy"] == bout["leader"]
            ):
                print(f"{row} | – | no |")
                continue
            ratio, low, high = interval(times[arm["strategy"]], leader)
            says = "**yes**" if contradicted(bout, high) else "no"
            print(f"{row} | {ratio:.3f} [{low:.3f}, {high:.3f}] | {says} |")
    spent, matrix = verdict["spent_gpu_hours"], verdict["matrix_gpu_hours"]
    print(
        f"\nThe verdict took {spent:.3g} worker-hours; the matrix would take {matrix:.3g}: "
        f"{spent / matrix:.0%} of it."
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

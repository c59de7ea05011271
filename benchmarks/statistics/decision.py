"""How often a decision is wrong, and what it finds, by simulation through the product's own functions.

    PYTHONPATH=workflow nice python benchmarks/statistics/decision.py > benchmarks/results/decision.md

About six minutes of one core. Seeds are fixed, so that the page comes out the same again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))
import decision_simulation as simulated
from decision_simulation import NOISES, ahead_by, judged, normal, preferences, truths
from stratbench.analysis.decision.ranking import RankingNoise
from stratbench.statistics.moderated import REPEATED_LOOKS

#: Decisions behind each rate.
DECISIONS = 4000
CANDIDATES, REPEATS = (2, 3, 4, 5, 8, 11), (2, 3, 5, 10)
LOOKS = (2, 3, 4, 5, 6, 8, 10)
#: Looks at numbers of repeats with their correction: where repeats are added, and where 5 were planned.
FURTHER = [(n, REPEATED_LOOKS) for n in LOOKS]
PLANNED = [*FURTHER[:3], (5, 1.0)]
TRUTHS = ("all equal", "two best equal", "rivals at the margin")


def percent(rate: np.ndarray | float) -> float:
    """A rate in percent."""
    return 100 * float(np.mean(rate))


def served_in(noise: str, k: int) -> np.ndarray | bool:
    """Which candidates have a parameter server."""
    return np.arange(k) >= k // 2 if "servers" in noise else False


def worst_rates(truth: str, noise: str, k: int, models: int) -> tuple[float, float]:
    """The most false decisions, and the fewest whose intervals all hold, over REPEATS and preferences."""
    found = []
    for n in REPEATS:
        rng = np.random.default_rng([k, n, models])
        true = truths(truth, (DECISIONS // models, models, k), rng)
        logs = true[..., None] + NOISES[noise](rng, (*true.shape, n))
        for preference in preferences(rng, true.shape):
            is_so = judged(true, logs, preference=preference, served=served_in(noise, k))
            found.append((percent(is_so["false"]), percent(is_so["held"])))
    return max(false for false, _ in found), min(held for _, held in found)


def table(head: list[str], rows: Iterator[list[str]]) -> Iterator[str]:
    """A table of Markdown, its first column of text."""
    yield f"| {' | '.join(head)} |"
    yield "|---|" + "--:|" * (len(head) - 1)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def false_decisions(models: int) -> Iterator[str]:
    """False decisions by noise and truth."""
    for noise in NOISES:
        for truth in TRUTHS:
            rates = [worst_rates(truth, noise, k, models) for k in CANDIDATES]
            held = min(h for _, h in rates)
            yield [noise, truth, *(f"{false:.1f}" for false, _ in rates), f"{held:.1f}"]


def share_found(share: float, sd: float, n: int, k: int, models: int, looks: float = 1.0) -> float:
    """How often a winner by the share is found, in percent."""
    rng = np.random.default_rng([k, n, models])
    true = ahead_by(share, (DECISIONS // models, models, k))
    logs = true[..., None] + normal(sd)(rng, (*true.shape, n))
    return percent(judged(true, logs, looks)["found"])


def power(looks: float) -> Iterator[list[str]]:
    """How often a winner is found, in studies of one model and of three."""
    cases = [(0.1, 0.01), (0.1, 0.03), (0.05, 0.01), (0.05, 0.03), (0.2, 0.03)]
    for share, sd in cases:
        for n in (3, 5):
            rates = [
                f"{share_found(share, sd, n, k, 1, looks):.0f}, {share_found(share, sd, n, k, 3, looks):.0f}"
                for k in (2, 3, 5, 8, 11)
            ]
            yield [
                f"{share:.0%}".replace("%", " %"),
                f"{sd:.0%}".replace("%", " %"),
                str(n),
                *rates,
            ]


def looking_again() -> Iterator[list[str]]:
    """Anything false, and a winner that is none, at any look of several."""
    for noise in ("10 %", "0.3 to 10 % by strategy", "3 %, servers 5.4 %"):
        for truth in ("all equal", "two best equal"):
            cells = []
            for k in (2, 3, 5, 8):
                rng = np.random.default_rng([k, 7])
                true = truths(truth, (DECISIONS, 1, k), rng)
                logs = true[..., None] + NOISES[noise](rng, (*true.shape, LOOKS[-1]))

                served = served_in(noise, k)
                further, planned = (
                    [judged(true, logs[..., :n], looks, served=served) for n, looks in seen]
                    for seen in (FURTHER, PLANNED)
                )
                rates = [
                    percent(np.logical_or.reduce([look[what] for look in found]))
                    for found in (further, planned)
                    for what in ("false", "winner")
                ]
                cells.append("{:.1f} ({:.1f}); {:.1f} ({:.1f})".format(*rates))
            yield [noise, truth, *cells]


def promised_repeats() -> Iterator[list[str]]:
    """How often a rival is told apart with the repeats that the answer names; 80 % are promised."""
    for sd in (0.01, 0.02, 0.03, 0.05):
        for share in (0.05, 0.10, 0.20):
            cells = []
            for k in (2, 3, 5, 8):
                n = RankingNoise(sd, k, prior_dof_per_repeat=k - 2).compute_needed_repeats(share)
                if n is None:
                    cells.append("more than 40")
                    continue
                rng = np.random.default_rng([k, n])
                true = ahead_by(share, (DECISIONS, 1, k))
                true[..., 2:] = 1.0  # one rival is near
                logs = true[..., None] + normal(sd)(rng, (*true.shape, n))
                cells.append(f"{n}: {percent(judged(true, logs)['found']):.0f}")
            yield [f"{sd:.0%}".replace("%", " %"), f"{share:.0%}".replace("%", " %"), *cells]


def scores() -> Iterator[list[str]]:
    """Judgements of scores."""
    for sd, loss in ((0.3, 0.9), (0.6, 0.0)):
        for n in (2, 3, 5):
            cells = []
            for k in (2, 4, 6, 8):
                rng = np.random.default_rng([k, n])
                true = np.zeros((DECISIONS, k))
                true[:, 1:] = -loss
                found = simulated.scores_judged(
                    true, true[..., None] + sd * rng.normal(size=(DECISIONS, k, n))
                )
                cells.append("{excluded:.1f}, {held:.1f}, {open:.0f}".format(**{
                    name: percent(rate) for name, rate in found.items()
                }))  # fmt: skip
            yield [f"{sd:g}", f"{loss:g}", str(n), *cells]


def main() -> None:
    """Prints the page."""
    error = 100 * np.sqrt(0.05 * 0.95 / DECISIONS)
    of_half = 100 * np.sqrt(0.25 / DECISIONS)
    ks = [str(k) for k in CANDIDATES]
    print("# How often a decision is wrong, and what it finds\n")
    print(
        "Made by `benchmarks/statistics/decision.py` through the decision's own functions. "
        f"Each rate is of {DECISIONS} "
        f"decisions: the standard error of 5 % is {error:.1f} points, of 50 % {of_half:.1f}. Noise is the "
        "standard deviation of the logarithm of a training time."
    )
    print(
        "\nA decision is false when it calls a strategy slower that is not, or when something is faster "
        f"than the chosen one by more than it says at most. Each figure is the worst of {REPEATS} "
        "repeats, with and without an order of preference among equals."
    )
    head = ["noise", "truth", *(f"{k} candidates" for k in ks), "all intervals hold, least"]
    for models in (1, 3):
        named = "one model" if models == 1 else "three models"
        print(f"\n## False decisions in studies of {named}, %\n")
        print(*table(head, false_decisions(models)), sep="\n")
    head = ["winner by", "noise", "repeats", *(f"{k} candidates" for k in (2, 3, 5, 8, 11))]
    for looks, named in ((1.0, "fixed before"), (REPEATED_LOOKS, "added to after looks")):
        print(f"\n## A winner is found, number of repeats {named}, % (one model, three models)\n")
        print(*table(head, power(looks)), sep="\n")
    print(
        "\n## Looking again, %\n\nAnything false (a winner that is none) at any look: after each of "
        f"{', '.join(map(str, LOOKS))} repeats that were added; then, where 5 were planned, after 2, 3, 4 "
        "and 5.\n"
    )
    head = ["noise", "truth", *(f"{k} candidates" for k in (2, 3, 5, 8))]
    print(*table(head, looking_again()), sep="\n")
    print(
        "\n## Repeats that the answer asks for, and how often they tell one near rival apart, %\n\n"
        "The answer promises 80 %.\n"
    )
    head = ["noise", "difference", *(f"{k} candidates" for k in (2, 3, 5, 8))]
    print(*table(head, promised_repeats()), sep="\n")
    print(
        "\n## Scores, %\n\nOne point of loss is allowed; all classes but the best lose the same. A class "
        "that loses no more than is allowed is excluded; no class loses more than it may; share of classes "
        "that may lose more than allowed.\n"
    )
    head = ["sd, points", "true loss", "repeats", *(f"{k} classes" for k in (2, 4, 6, 8))]
    print(*table(head, scores()), sep="\n")


if __name__ == "__main__":
    main()

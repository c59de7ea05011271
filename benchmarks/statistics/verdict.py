"""How often a verdict is wrong, and what it costs, by simulation through the product's own functions.

    PYTHONPATH=workflow python benchmarks/statistics/verdict.py > benchmarks/results/verdict/simulation.md

About two minutes of one core. Seeds are fixed, so that the page comes out the same again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))
import verdict_simulation as simulated
from verdict_simulation import PROFILES, Noise, normal_noise

#: Step times on one GPU of three models, steps of a full cell, and of a segment.
REGIMES = {
    "the paper's cells: 0.13 to 0.46 s per step, 3900 steps": ((0.125, 0.43, 0.46), 3900, 50),
    "short cells: 0.03 to 0.08 s per step, 3900 steps": ((0.03, 0.05, 0.08), 3900, 100),
    "long training: 0.25 s per step, 30000 steps": ((0.25, 0.25, 0.25), 30000, 50),
}
TRUTHS = ("all equal", "two best equal", "at the margin")
#: Comparisons behind each row of error rates, and of costs.
COMPARISONS, COST_COMPARISONS = 9000, 1800


def rates(
    truth: str, k: int, noise: Noise, comparisons: int = 9, n: int = COMPARISONS, **how
) -> dict:
    """Rates over about `n` comparisons, in studies of `comparisons` each."""
    rng = np.random.default_rng([k, comparisons, n])
    made = {name: how.pop(name) for name in ("scatter", "base_s") if name in how}
    s = simulated.studies(rng, n // comparisons, k, truth, comparisons, **made)
    return simulated.rates(s, simulated.run(rng, s, noise, **how))


def error_row(name: str, found: dict) -> str:
    """A row of the table of error rates."""
    return (
        f"| {name} | {found['wrong']:.1f} | {found['covered']:.1f} | {found['claims']:.0f} | "
        f"{found['fastest']:.1f} | {found['blocks']:.1f} |"
    )


ERROR_HEADER = [
    "| truth, strategies | wrong claims, % | all intervals of a comparison hold, % | within 3 % claimed, % | "
    "`fastest` claimed, % | blocks |",
    "|---|--:|--:|--:|--:|--:|",
]


def error_tables() -> Iterator[str]:
    """Error rates where they are highest."""
    for percent in (1, 3, 10):
        yield f"\n## Noise of {percent} % a block value, 9 comparisons a study\n"
        yield from ERROR_HEADER
        for truth in TRUTHS:
            for k in (2, 3, 4, 8, 15):
                yield error_row(f"{truth}, {k}", rates(truth, k, normal_noise(percent)))
    for percent in (1, 3):
        yield f"\n## One comparison alone, noise of {percent} %: no other variances to learn from\n"
        yield from ERROR_HEADER
        for truth in TRUTHS:
            for k in (2, 3, 4, 6, 8, 15):
                yield error_row(
                    f"{truth}, {k}", rates(truth, k, normal_noise(percent), comparisons=1)
                )
    yield "\n## Noise of 30 %, as on two busy CPU cores: no screen after the first block\n"
    yield from ERROR_HEADER
    for truth in TRUTHS:
        for k in (2, 4, 7):
            yield error_row(f"{truth}, {k}", rates(truth, k, normal_noise(30)))
    yield "\n## Strategies that scatter very differently (factor exp(N(0, 0.7))), noise of 1 %\n"
    yield from ERROR_HEADER
    for truth in TRUTHS:
        for k in (4, 8):
            yield error_row(f"{truth}, {k}", rates(truth, k, normal_noise(1), scatter=0.7))
    yield "\n## Bursts and drift, strategies as unlike as in real studies\n"
    yield from ERROR_HEADER
    for profile, noise in PROFILES.items():
        for k in (7, 15):
            found = rates("realistic", k, noise, n=COST_COMPARISONS)
            yield error_row(f"{profile} nodes, {k}", found)


def controls() -> Iterator[str]:
    """What the procedure guards against, done on purpose."""
    yield "\n## Controls: the same simulation finds the mistakes that the procedure avoids\n"
    yield "| mistake | wrong claims with it, % | without, % |"
    yield "|---|--:|--:|"
    noise = normal_noise(3)
    with simulated.uncorrected():
        uncorrected = rates("all equal", 2, noise)
    named = "looking again and again at an uncorrected interval"
    yield f"| {named} | {uncorrected['wrong']:.1f} | {rates('all equal', 2, noise)['wrong']:.1f} |"
    noise = Noise(0.04, 0.02, 0.004, 0.004)
    wrong, right = (
        rates("all equal", 2, noise, segments_as_units=u)["wrong"] for u in (True, False)
    )
    yield f"| two segments of one allocation taken for two measurements | {wrong:.1f} | {right:.1f} |"
    noise = normal_noise(1)._replace(strategy_in_allocation=0.015)
    wrong, right = (rates("two best equal", 4, noise, one_node=o)["wrong"] for o in (True, False))
    yield f"| all blocks on one node, taken for every node | {wrong:.1f} | {right:.1f} |"
    noise = normal_noise(30)
    right = rates("two best equal", 4, noise)["wrong"]
    with simulated.screening_whatever_the_noise():
        wrong = rates("two best equal", 4, noise)["wrong"]
    named = "dropping what is 1.5 times as slow in the first block, at a noise of 30 %"
    yield f"| {named} | {wrong:.1f} | {right:.1f} |"
    held = rates("all equal", 15, normal_noise(3), comparisons=1)["covered"]
    with simulated.intervals_of_a_leader_known_before():
        less = rates("all equal", 15, normal_noise(3), comparisons=1)["covered"]
    yield (
        f"\nAll reported intervals of one comparison of fifteen hold in {held:.1f} %. They count every pair "
        "of "
        "strategies, since the same blocks choose the leader; had they counted the rivals alone, in "
        f"{less:.1f} %."
    )


def cost_tables() -> Iterator[str]:
    """What studies of 3 models on 1, 2 and 4 GPUs cost."""
    for name, (base_s, steps, segment) in REGIMES.items():
        yield f"\n## Cost against the matrix of 3 repeats, {name}\n"
        yield (
            "| strategies, nodes | blocks, % | with full runs, % | within 3 % claimed, % | "
            "something may be faster by (median), % | wrong, % | blocks |"
        )
        yield "|---|--:|--:|--:|--:|--:|--:|"
        for k in (7, 15):
            for profile, noise in PROFILES.items():
                found = rates(
                    "realistic", k, noise, n=COST_COMPARISONS, base_s=base_s,
                    costs=simulated.Costs(steps=steps, segment=segment),
                )  # fmt: skip
                yield (
                    f"| {k}, {profile} | {found['time']:.1f} | {found['cost']:.1f} | {found['claims']:.0f} | "
                    f"{found['bound']:.1f} | {found['wrong']:.1f} | {found['blocks']:.1f} |"
                )


def page() -> Iterator[str]:
    """The page."""
    yield "# Simulated error rates and costs of a verdict\n"
    yield "Made, with fixed seeds, by"
    script, out = "benchmarks/statistics/verdict.py", "benchmarks/results/verdict/simulation.md"
    yield f"`PYTHONPATH=workflow python {script} > {out}`,"
    yield "through the functions that judge a study (`stratbench.extensions.verdict.paired.judging`)."
    yield "Nothing was measured: true times and noise are drawn."
    yield "`benchmarks/statistics/verdict_simulation.py` says how."
    yield ""
    yield (
        f"A row of error rates stands for {COMPARISONS} comparisons (a model on a number of workers), of "
        "costs for"
    )
    yield (
        f"{COST_COMPARISONS}. A claim is wrong when `fastest` names a strategy that is not, or one of "
        "several"
    )
    yield "that are equally fast; when `within 3 %` names one that is slower by more; or when something is"
    yield "faster by more than `at most` says. With a true rate of 5 % a row of 9000 shows 4.5 to 5.5 %."
    yield "Each block has a node of its own, and blocks are independent of one another; where that is not so:"
    yield "[limits.md](limits.md)."
    yield from error_tables()
    yield from controls()
    yield from cost_tables()


if __name__ == "__main__":
    for line in page():
        print(line, flush=True)

"""How far from the fastest `tune` ends, and what it costs, on simulated studies.

    PYTHONPATH=workflow python benchmarks/statistics/tune.py > benchmarks/results/tune.md

True and planned effects of each choice are those of pairs in public sweeps (workflow/reference/
public_sweeps.csv); a study's own sweeps are left out of the margins that drop its combinations. The sieve is
`stratbench.extensions.tune.sieves`, the verdict `stratbench.extensions.verdict.paired.judging`.
Nothing is measured. Seeds are fixed, so that the page comes out the same again. About a minute of one core.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "workflow")]
import verdict_simulation as simulated  # noqa: E402
from stratbench.extensions.tune.differences import (  # noqa: E402
    KINDS,
    MIN_MARGIN,
    fit_margins_to_sweeps,
    group_rows_by_sweep,
    read_public_sweeps,
)
from stratbench.extensions.tune.sieves import (  # noqa: E402
    MEASURED,
    MEMORY_FACTOR,
    OUT_OF_MEMORY,
    FilterResult,
    drop_slow_combinations,
)
from stratbench.extensions.tune.space import Combination  # noqa: E402
from verdict_simulation import PROFILES, Costs, Noise, Studies  # noqa: E402

STUDIES, GPUS, STEP_S = 200, 8, 0.25
NEAR = 0.03
#: Levels of each kind in the space: 7 strategies, 4 micro-batches, 3 checkpointings.
STRATEGIES = {
    "ddp": (0, 1),
    "zero1": (1, 1),
    "fsdp-never": (2, 1),
    "fsdp": (3, 1),
    "tensor-2": (3, 2),
    "tensor-4": (3, 4),
    "tensor-8": (3, 8),
}
MICRO_BATCHES, CHECKPOINTING = (8, 4, 2, 1), (0.0, 0.4, 1.0)
#: Of the time of a combination, what no choice explains by itself, on the log scale.
INTERACTION = 0.03
#: Of a worker's memory: what the first combination needs, from and to; what is left of it for each unit of
#: a kind; and how far the plan is off, on the log scale.
NEED = (0.2, 1.5)
NEED_LEFT = {"micro-batch": 1.35, "checkpointing": 0.5, "sharding": 0.85, "tensor": 0.6}
NEED_ERROR = 0.25
BASELINE = "ddp_8_0.0"


@dataclass(frozen=True)
class Effect:
    """What one unit of a kind does to the logarithm of a step's time, in a pair of a sweep."""

    sweep: str
    measured: float
    planned: float


@dataclass
class Truth:
    """A simulated study: by combination its amounts, true and planned log times, and needs of memory."""

    amounts: dict[str, dict[str, float]]
    true: dict[str, float]
    planned: dict[str, float]
    need: dict[str, float]
    planned_need: dict[str, float]
    sweeps: set[str]

    @property
    def fitting(self) -> list[str]:
        """What would run."""
        return [name for name, need in self.need.items() if need <= 1]

    def regret(self, name: str | None) -> float:
        """Return how much longer this combination takes than the fastest; infinite without one."""
        if name is None:
            return math.inf
        return math.expm1(self.true[name] - min(self.true[n] for n in self.fitting))


def units(kind: str, amount: float) -> float:
    """Return an amount in the units in which effects add up: doublings, stages, shares."""
    return math.log2(amount) if kind in ("micro-batch", "tensor", "pipeline") else amount


def read_effects() -> dict[str, list[Effect]]:
    """Return the effects of each kind, over pairs of a sweep that differ in nothing else."""
    found: dict[str, list[Effect]] = {}
    for sweep, rows in group_rows_by_sweep(
        row for row in read_public_sweeps() if row["measured"]
    ).items():
        for less, more in permutations(rows, 2):
            kinds = [kind for kind in KINDS if float(less[kind]) != float(more[kind])]
            if len(kinds) == 1 and float(more[kinds[0]]) > float(less[kinds[0]]):
                (kind,) = kinds
                n = units(kind, float(more[kind])) - units(kind, float(less[kind]))
                ratios = (float(more[k]) / float(less[k]) for k in ("measured", "planned"))
                measured, planned = (math.log(ratio) / n for ratio in ratios)
                found.setdefault(kind, []).append(Effect(sweep, measured, planned))
    return found


def draw(rng: np.random.Generator, effects: Mapping[str, Sequence[Effect]]) -> Truth:
    """Return a study; one that has at least two combinations that fit."""
    space = {
        f"{name}_{micro_batch}_{share}": {
            "micro-batch": micro_batch,
            "checkpointing": share,
            "sharding": stage,
            "tensor": tensor,
            "pipeline": 1,
            "compile": 0,
            "offload": 0,
        }
        for (name, (stage, tensor)), micro_batch, share in product(
            STRATEGIES.items(), MICRO_BATCHES, CHECKPOINTING
        )
    }
    while True:
        chosen = {kind: pick(rng, effects[kind]) for kind in NEED_LEFT}
        first = rng.uniform(*NEED)
        truth = Truth(space, {}, {}, {}, {}, {e.sweep for e in chosen.values()})
        for name, amounts in space.items():
            n = {
                kind: units(kind, amounts[kind]) - units(kind, space[BASELINE][kind])
                for kind in chosen
            }
            own = rng.normal(0, INTERACTION)
            truth.true[name] = own + sum(chosen[kind].measured * n[kind] for kind in n)
            truth.planned[name] = sum(chosen[kind].planned * n[kind] for kind in n)
            truth.planned_need[name] = first * math.prod(NEED_LEFT[kind] ** n[kind] for kind in n)
            truth.need[name] = truth.planned_need[name] * math.exp(rng.normal(0, NEED_ERROR))
        if len(truth.fitting) > 1:
            return truth


def pick(rng: np.random.Generator, effects: Sequence[Effect]) -> Effect:
    """Return an effect: first a sweep is drawn, then one of its pairs."""
    sweeps = sorted({effect.sweep for effect in effects})
    sweep = sweeps[rng.integers(len(sweeps))]
    own = [effect for effect in effects if effect.sweep == sweep]
    return own[rng.integers(len(own))]


class Result:
    """What a way to choose came to in a study: its choice, its cost, and how many it measured."""

    def __init__(self, choice: str | None, gpu_seconds: float, measured: int) -> None:
        self.choice, self.gpu_seconds, self.measured = choice, gpu_seconds, measured


def studies_of(truth: Truth, names: Sequence[str]) -> Studies:
    """Return one study of these combinations, for the verdict's simulation."""
    fastest = min(truth.true[name] for name in truth.fitting)
    mu = np.array([[[truth.true[name] - fastest for name in names]]])
    there = np.array([[[truth.need[name] <= 1 for name in names]]])
    all_of, factor = np.ones_like(there), np.ones(mu.shape)
    place = (np.array([GPUS]), np.array([STEP_S]))
    return Studies(mu, there, all_of, all_of, ~all_of, *place, factor)


def race(rng: np.random.Generator, truth: Truth, names: Sequence[str], noise: Noise) -> Result:
    """Return what the verdict of these combinations comes to."""
    study, costs = studies_of(truth, names), Costs()
    fits = study.there[0, 0]
    if fits.sum() < 2:
        left = next((name for name, fit in zip(names, fits, strict=True) if fit), None)
        return Result(left, len(names) * GPUS * costs.start_segment, len(names))
    found = simulated.run(rng, study, noise, costs)
    total_s = 3 * (costs.full(study) * study.there).sum()
    return Result(names[int(found.leader[0, 0])], float(found.share[0]) * total_s, len(names))


def tune(
    rng: np.random.Generator, truth: Truth, noise: Noise, keep_within: float | None = None
) -> Result:
    """Return what sieves and race come to; `keep_within`: one ratio for all; infinite: no sieve of time."""
    margins = fit_margins_to_sweeps(
        row for row in read_public_sweeps() if row["sweep"] not in truth.sweeps
    )
    failed: set[str] = set()
    before: list[str] = []
    spent_s, choice = 0.0, None
    while True:
        by_name = {
            name: FilterResult(Combination("ddp"), OUT_OF_MEMORY if name in failed else MEASURED, "",
                         math.exp(truth.planned[name]), amounts_by_difference_kind=amounts)
            for name, amounts in truth.amounts.items()
            if truth.planned_need[name] <= MEMORY_FACTOR
        }  # fmt: skip
        drop_slow_combinations(by_name, BASELINE, keep_within, margins)
        names = [name for name, s in by_name.items() if s.outcome in (MEASURED, OUT_OF_MEMORY)]
        if names == before:
            return Result(choice, spent_s, len(names))
        found = race(rng, truth, names, noise)
        spent_s, choice, before = spent_s + found.gpu_seconds, found.choice, names
        failed |= {name for name in names if truth.need[name] > 1}


def random_search(
    rng: np.random.Generator, truth: Truth, noise: Noise, gpu_seconds: float
) -> Result:
    """Return the fastest of combinations drawn at random, two segments each, for as much as `tune` spent."""
    names = [n for n in rng.permutation(list(truth.true)) if truth.planned_need[n] <= MEMORY_FACTOR]
    costs, spent_s, seen = Costs(), 0.0, {}
    short = dict(zip(names, costs.short(studies_of(truth, names))[0, 0], strict=True))
    scatter = math.hypot(noise.strategy_in_allocation, noise.process, noise.within) / math.sqrt(2)
    for name in names:
        fits = truth.need[name] <= 1
        spent_s += GPUS * costs.job / 10 + (2 * short[name] if fits else GPUS * costs.start_segment)
        if spent_s > gpu_seconds and seen:
            break
        if fits:
            seen[name] = truth.true[name] + rng.normal(0, scatter)
    return Result(min(seen, key=seen.__getitem__, default=None), spent_s, len(seen))


def plan_alone(truth: Truth) -> Result:
    """Return the planned fastest of those that are planned to fit, or the next where it does not run."""
    order = sorted(truth.planned, key=truth.planned.__getitem__)
    runs = [n for n in order if truth.planned_need[n] <= 1 and truth.need[n] <= 1]
    return Result(runs[0] if runs else None, 0.0, 0)


def rows(profile: str, effects: Mapping[str, Sequence[Effect]], n: int = STUDIES) -> Iterator[str]:
    """Yield the rows of a noise profile."""
    noise = PROFILES[profile]
    results: dict[str, list[tuple[Truth, Result]]] = {}
    for number in range(n):
        rng = np.random.default_rng([number, 49])
        truth = draw(rng, effects)
        ours = tune(rng, truth, noise)
        ways = {
            "`tune`": ours,
            "`tune`, `keep_within: 1.1`": tune(rng, truth, noise, 1.1),
            "`tune` without a sieve of time": tune(rng, truth, noise, math.inf),
            "random search at the cost of `tune`": random_search(
                rng, truth, noise, ours.gpu_seconds
            ),
            "the plan alone": plan_alone(truth),
        }
        for way, result in ways.items():
            results.setdefault(way, []).append((truth, result))
    for way, found in results.items():
        yield f"| {profile} | {way} | {' | '.join(figures(found))} |"


def figures(found: Sequence[tuple[Truth, Result]]) -> Iterator[str]:
    """Yield the cells of a row."""
    regrets = np.array([truth.regret(result.choice) for truth, result in found])
    shares = np.array([result.gpu_seconds / once_s(truth) for truth, result in found])
    yield f"{100 * np.mean(regrets <= NEAR):.0f}"
    yield f"{100 * np.median(regrets):.1f}"
    yield f"{100 * np.quantile(regrets, 0.95, method='higher'):.1f}"
    yield f"{100 * np.mean(shares):.1f}"
    yield f"{np.mean([result.measured for _, result in found]):.0f}"


def once_s(truth: Truth) -> float:
    """Return the GPU-seconds of one whole training of each combination that fits."""
    return float(Costs().full(studies_of(truth, truth.fitting)).sum())


PAGE = """# How far from the fastest `tune` ends

`PYTHONPATH=workflow python benchmarks/statistics/tune.py > benchmarks/results/tune.md`, with fixed seeds.
Nothing was measured, so that the load of the machine does not matter.

{n} simulated studies for each noise profile, of {space} combinations on {gpus} GPUs: 7 strategies, 4
micro-batches and 3 kinds of checkpointing. True and planned effects of each choice are those of a pair in a
public sweep. The sweeps drawn for a study are left out of the margins that drop its combinations. Planned
memory is off by a factor of exp(N(0, {error})). The sieve and the verdict are those of the product. The least
margin of the sieve, {least}, was chosen on other simulated studies.

Regret: the time of the choice over that of the fastest combination that fits, in percent. Cost: of one whole
training ({steps} steps) of each combination that fits. Aims: within 3 % in 95 % of studies, at 15 % of the
cost.

| noise | way | within 3 %, % of studies | median regret, % | 95th percentile, % | cost, % | measured |
|---|---|--:|--:|--:|--:|--:|
{rows}
"""


def main() -> None:
    """Print the page."""
    effects = read_effects()
    found = [row for profile in PROFILES for row in rows(profile, effects)]
    space = len(STRATEGIES) * len(MICRO_BATCHES) * len(CHECKPOINTING)
    values = {
        "n": STUDIES,
        "space": space,
        "gpus": GPUS,
        "error": NEED_ERROR,
        "steps": Costs().steps,
        "least": MIN_MARGIN,
    }
    print(PAGE.format(rows="\n".join(found), **values), end="")


if __name__ == "__main__":
    main()

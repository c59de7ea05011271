"""How often a verdict is wrong where its assumptions fail: nodes, dependence, full runs, copies, devices.

    PYTHONPATH=workflow python benchmarks/statistics/verdict_limits.py > benchmarks/results/verdict/limits.md

Ten minutes of one core. Seeds are fixed, so that the page comes out the same again. The tables on nodes and
on dependence go through `stratbench.extensions.verdict.paired.judging`; the others through the whole verdict
(`next_round`, then `verdict_of`), on blocks and full runs that are drawn.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))
from stratbench.cell.coordinates import Cell
from stratbench.extensions.verdict.blocks import ComparisonKey, PairedBlock, Segment
from stratbench.extensions.verdict.paired import judging
from stratbench.extensions.verdict.paired.evidence import FullRun, PairedComparison, PairedEvidence
from stratbench.extensions.verdict.paired.next_round import find_next_round, plan_next_round
from stratbench.extensions.verdict.paired.rounds import RoundReplay
from stratbench.extensions.verdict.paired.verdict import make_verdict_content

MARGIN = 0.03
#: Comparisons behind a row of the comparison alone, and of the whole verdict.
COMPARISONS, WHOLE = 2000, 200
#: What an allocation does to all strategies alike.
ALLOCATION = 0.04


# ---------------------------------------------------------------- the verdict alone


def true_logs(rng: np.random.Generator, n: int, k: int, truth: str) -> np.ndarray:
    """True log times of `n` studies of one comparison with `k` strategies, shape [n, 1, k]; the first is a
    best one.
    """
    mu = np.zeros((n, 1, k))
    if truth == "rivals 3.01 % slower":
        mu[..., 1:] = math.log(1.0301)
    elif truth == "two best equal":
        mu[..., 2:] = rng.uniform(0.1, 0.6, mu[..., 2:].shape)
    else:
        raise ValueError(truth)
    return mu


@dataclass(frozen=True)
class Blocks:
    """How blocks scatter; standard deviations of log times, of each strategy for itself."""

    sd: float  # from block to block
    nodes: int = 0  # that blocks are spread over at random; 0: another one for each block
    on_node: float = 0.0  # between nodes
    after: float = 0.0  # correlation with the block before


def race_rates(n: int, k: int, truth: str, how: Blocks) -> dict[str, float]:
    """Rates in percent over `n` comparisons, each alone in its study.

    `wrong`: of a claim that names its nodes (fewer than three) by what is true of these nodes, of others by
    what is true of all. `of_all`: all claims by what is true of all nodes.
    """
    rng = np.random.default_rng([n, k, how.nodes, round(1e4 * how.after)])
    mu = true_logs(rng, n, k, truth)
    everywhere = np.ones(mu.shape, dtype=bool)
    served = np.broadcast_to(np.arange(k) >= k // 2, mu.shape)
    course = judging.SequentialAnalysis(served, everywhere, everywhere, MARGIN)
    several = how.nodes or judging.LOOKS[-1]
    effects = (
        rng.normal(0, how.on_node, (*mu.shape, several)) if how.on_node else 0.0 * mu[..., None]
    )
    effects = np.broadcast_to(effects, (*mu.shape, several))
    state, done = rng.normal(0, how.sd, mu.shape), 0
    ran = np.zeros((n, 1, several), dtype=bool)
    result: dict[str, np.ndarray] = {}
    while course.open.any():
        judged = course.open.copy()
        new, nodes = [], []
        for _ in range(judging.get_block_count_at_next_analysis(done) - done):
            at = rng.integers(0, several, (n, 1)) if how.nodes else np.full((n, 1), done)
            ran |= (np.arange(several) == at[..., None]) & judged[..., None]
            own = np.take_along_axis(
                effects, np.broadcast_to(at[..., None, None], (*mu.shape, 1)), -1
            )
            logs = mu + own[..., 0] + rng.normal(0, ALLOCATION, (n, 1, 1)) + state
            fresh = rng.normal(0, how.sd, mu.shape)
            state = how.after * state + math.sqrt(1 - how.after**2) * fresh
            new.append(np.where(course.active & judged[..., None], logs, np.nan))
            nodes.append(at)
            done += 1
        step = course.add_blocks(np.stack(new, -1), judged * len(new), np.stack(nodes, -1))
        for name in ("leader", "is_leader_fastest", "at_most", "blocks", "sets"):
            value = getattr(step.look, name)
            result[name] = np.where(step.ended, value, result.get(name, np.zeros_like(value)))
    count = np.maximum(ran.sum(-1, keepdims=True), 1)
    here = mu + (effects * ran[..., None, :]).sum(-1) / count
    named = (result["sets"] < judging.MIN_SETS)[..., None]
    return {
        "wrong": 100 * wrong(np.where(named, here, mu), result).mean(),
        "of_all": 100 * wrong(mu, result).mean(),
        "within": 100 * (result["at_most"] <= math.log1p(MARGIN) + 1e-9).mean(),
        "fastest": 100 * result["is_leader_fastest"].mean(),
        "blocks": float(result["blocks"].mean()),
    }


def wrong(mu: np.ndarray, said: Mapping[str, np.ndarray]) -> np.ndarray:
    """Whether the claim on each comparison is wrong, by the true log times `mu`."""
    best = mu.min(-1)
    gap = judging.select_value_of_strategy(mu, said["leader"]) - best
    tied = (mu <= best[..., None] + 1e-12).sum(-1) > 1
    within = said["at_most"] <= math.log1p(MARGIN) + 1e-9
    return (
        (said["is_leader_fastest"] & ((gap > 1e-12) | tied))
        | (within & (gap > math.log1p(MARGIN) + 1e-9))
        | (gap > said["at_most"] + 1e-9)
    )


TRUTHS = ("rivals 3.01 % slower", "two best equal")


def race_tables() -> Iterator[str]:
    """The tables on nodes and on dependence."""
    yield "\n## Nodes that suit one strategy more than another, by 2 %; 0.5 % from block to block\n"
    yield (
        "| nodes | truth, strategies | wrong, % | wrong if read as of all nodes, % | "
        "within 3 % claimed, % | blocks |"
    )
    yield "|---|---|--:|--:|--:|--:|"
    for nodes in (1, 2, 3, 4, 0):
        for truth in TRUTHS:
            for k in (3, 7, 15):
                found = race_rates(COMPARISONS, k, truth, Blocks(0.005, nodes, 0.02))
                yield (
                    f"| {nodes or 'a node a block'} | {truth}, {k} | {found['wrong']:.1f} | "
                    f"{found['of_all']:.1f} | {found['within']:.0f} | {found['blocks']:.1f} |"
                )
    yield "\n## Blocks that depend on the one before (autoregression), 2 %\n"
    yield "| nodes, correlation | truth, strategies | wrong, % | within 3 % claimed, % | blocks |"
    yield "|---|---|--:|--:|--:|"
    rows = [("one", 1, c) for c in (0.8, 0.5, 0.0)] + [("a node a block", 0, c) for c in (0.8, 0.0)]
    for name, nodes, after in rows:
        for truth in TRUTHS:
            for k in (2, 3, 7, 15):
                found = race_rates(COMPARISONS, k, truth, Blocks(0.02, nodes, after=after))
                yield (
                    f"| {name}, {after:g} | {truth}, {k} | {found['wrong']:.1f} | {found['within']:.0f} | "
                    f"{found['blocks']:.1f} |"
                )


# ---------------------------------------------------------------- the whole verdict


@dataclass(frozen=True)
class World:
    """A synthetic comparison: true seconds per step in blocks, and what is done to it."""

    steps_s: Mapping[str, float]
    #: Factor of a full run's time over its steps, by strategy; 1 for others.
    full: Mapping[str, float]
    equal: tuple[str, ...]
    seed: int
    noise: float = 0.004
    allocation: float = 0.02
    on_node: float = 0.0
    nodes: int = 0  # that blocks go round; 0: a node a block
    copied: bool = False
    cpu_every: int = 0  # each such block runs on CPU processes
    full_steps: int = 4000

    @property
    def place(self) -> ComparisonKey:
        """Which comparison it is."""
        return ComparisonKey("e", "m", 4)

    def evidence(self) -> PairedEvidence:
        """Nothing measured yet."""
        strategies = tuple(self.steps_s)
        comparison = PairedComparison(
            comparison_key=self.place, dataset="d", strategies=strategies,
            uses_servers=tuple(a not in self.equal for a in strategies),
            equals_ddp=tuple(a in self.equal for a in strategies), shared_score_key=("e", "m"),
            full_run_steps=self.full_steps,
        )  # fmt: skip
        return PairedEvidence(study="s", seed=self.seed, comparisons=(comparison,))

    def rng(self, *of: int) -> np.random.Generator:
        """A generator of its own for each thing that is drawn."""
        return np.random.default_rng([self.seed, *of])

    def block(self, entry: Mapping[str, Any]) -> PairedBlock:
        """The block that an entry of round.json asks for."""
        number = entry["block"]
        rng = self.rng(1, 1 if self.copied else number)
        drawn = {strategy: rng.normal(0, self.noise, 3) for strategy in sorted(self.steps_s)}
        level = self.rng(2, number).normal(0, self.allocation)
        node = number % self.nodes if self.nodes else number
        effect = dict(zip(self.steps_s, self.rng(3, node).normal(0, self.on_node, len(self.steps_s)),
                          strict=True))  # fmt: skip
        segments = [Segment(0, "burn-in", entry["strategies"][0], "ok", 0.1, None, None, 6.0, 20.0)]
        for i, (passed, strategies) in enumerate(
            (("first", entry["strategies"]), ("mirror", entry["strategies"][::-1]))
        ):
            for strategy in strategies:
                step_s = self.steps_s[strategy] * math.exp(
                    level + drawn[strategy][i] + effect[strategy]
                )
                segments.append(
                    Segment(
                        len(segments),
                        passed,
                        strategy,
                        "ok",
                        step_s,
                        None,
                        None,
                        6.0,
                        6.0 + 75 * step_s,
                    )
                )
        cpu = self.cpu_every and number % self.cpu_every == 0
        return PairedBlock(
            self.place, number, entry["settings"]["steps"] or 60, tuple(segments), (f"node{node}",),
            "cpu" if cpu else "cuda", self.place.gpus * sum(s.wall_s for s in segments),
        )  # fmt: skip

    def full_run(self, cell: Cell) -> FullRun:
        """The full run of a cell, in an allocation of its own."""
        strategy = list(self.steps_s).index(cell.strategy)
        level = self.rng(4, strategy, cell.repeat).normal(0, self.allocation)
        factor = self.full.get(cell.strategy, 1.0) * math.exp(level)
        time_s = self.full_steps * self.steps_s[cell.strategy] * factor
        score = 98 + self.rng(5, strategy, cell.repeat).normal(0, 0.05)
        return FullRun("ok", None, score, "higher", 1.0, "accuracy", cell.gpus * (time_s + 40), time_s,
                       self.full_steps)  # fmt: skip

    def verdict(self) -> tuple[dict[str, Any], int]:
        """The comparison's entry of verdict.json at the end of all rounds, and the number of full runs."""
        evidence = self.evidence()
        while not (found := find_next_round(evidence)).is_verdict_done:
            blocks = {
                (self.place, entry["block"]): self.block(entry) for entry in found.block_entries
            }
            runs = {cell: self.full_run(cell) for cell in found.cells_to_train_in_full}
            evidence = replace(
                evidence,
                blocks={**evidence.blocks, **blocks},
                full_runs={**evidence.full_runs, **runs},
            )
        course = RoundReplay(evidence)
        return make_verdict_content(course, plan_next_round(course), [])["comparisons"][0], len(
            evidence.full_runs
        )

    def is_wrong(self, comparison: Mapping[str, Any], of_steps: bool) -> bool:
        """Whether its claim is wrong: of full trainings, or of steps."""
        if not comparison["claimed"]:
            return False
        full = {} if of_steps else self.full
        times = {strategy: s * full.get(strategy, 1.0) for strategy, s in self.steps_s.items()}
        gap = times[comparison["leader"]] / min(times.values()) - 1
        tied = sum(t <= min(times.values()) * (1 + 1e-9) for t in times.values()) > 1
        return (
            (comparison["claim"] == "fastest" and (gap > 1e-9 or tied))
            or (comparison["claim"] == "within" and gap > MARGIN + 1e-9)
            or gap > comparison["at_most"] + 1e-9
        )


def whole_row(worlds: Iterator[World]) -> str:
    """Shares of wrong claims, read as they are and of full trainings, of each claim; blocks and full runs."""
    n, bad, in_full, high, blocks, runs = 0, 0, 0, 0, 0, 0
    claims: Counter[str] = Counter()
    for world in worlds:
        comparison, trained = world.verdict()
        is_bad = world.is_wrong(comparison, of_steps=False)
        n, in_full = n + 1, in_full + is_bad
        bad += world.is_wrong(comparison, of_steps=not comparison["checked"])
        high += is_bad and comparison["confidence"] == "high"
        claims[comparison["claim"]] += 1
        blocks, runs = blocks + comparison["blocks"], runs + trained
    shares = " | ".join(
        f"{100 * claims[c] / n:.0f}" for c in ("fastest", "within", "at most", "none")
    )
    told = " | ".join(f"{100 * part / n:.1f}" for part in (bad, in_full, high))
    return f"{told} | {shares} | {blocks / n:.1f} | {runs / n:.1f} |"


def comparison_of(k: int, lead: float) -> dict[str, float]:
    """`k` strategies: DDP and FSDP at 0.1 s per step, slower ones, and `x`, faster than DDP by `lead`."""
    names = ["ddp", "fsdp", *(f"ps-{i}" for i in range(k - 3))]
    steps_s = {name: 0.1 * (1.0 if i < 2 else 1.08 + 0.02 * i) for i, name in enumerate(names)}
    return {**steps_s, "x": 0.1 * math.exp(-lead)}


def whole_tables() -> Iterator[str]:
    """The tables of the whole verdict."""
    header = [
        "| case | wrong, % | wrong if read as of full trainings, % | and `high`, % | `fastest`, % | "
        "`within`, % | `at most`, % | nothing claimed, % | blocks | full runs |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    yield "\n## Full runs that contradict the blocks, in which x leads by 4 %\n"
    yield from header
    for equal in (("ddp", "fsdp"), ("ddp", "fsdp", "x")):
        whose = "of other arithmetic" if "x" not in equal else "of DDP's arithmetic"
        for slower in (0.025, 0.04, 0.05, 0.10):
            for allocation in (0.02, 0.04):
                full = {"x": (1 + slower) * math.exp(0.04)}
                row = whole_row(
                    World(comparison_of(3, 0.04), full, equal, seed, allocation=allocation)
                    for seed in range(WHOLE)
                )
                yield f"| x {whose} {100 * slower:g} % slower, allocations {100 * allocation:g} % | {row}"
    yield "\n## The same with full runs that agree\n"
    yield from header
    for allocation in (0.02, 0.04, 0.06):
        for name, full in (
            ("agree", {}),
            ("are all 10 % slower", dict.fromkeys(comparison_of(3, 0), 1.1)),
        ):
            row = whole_row(
                World(comparison_of(3, 0.04), full, ("ddp", "fsdp"), seed, allocation=allocation)
                for seed in range(WHOLE)
            )
            yield f"| full runs {name}, allocations {100 * allocation:g} % | {row}"
    yield "\n## Copied blocks, and blocks on other devices\n"
    yield from header
    for k in (3, 7):
        row = whole_row(
            World(comparison_of(k, 0.0), {}, ("ddp", "fsdp"), seed, noise=0.02, copied=True)
            for seed in range(WHOLE // 2)
        )
        yield f"| the first block again and again, {k} strategies | {row}"
    row = whole_row(
        World(comparison_of(3, 0.04), {}, ("ddp", "fsdp"), seed, cpu_every=2)
        for seed in range(WHOLE // 2)
    )
    yield f"| every other block on CPU processes | {row}"


def page() -> Iterator[str]:
    """The page."""
    yield "# A verdict where its assumptions fail\n"
    yield "Made, with fixed seeds, by"
    script, out = "benchmarks/statistics/verdict_limits.py", "benchmarks/results/verdict/limits.md"
    yield f"`PYTHONPATH=workflow python {script} > {out}`,"
    yield "through the functions that judge a study. Nothing was measured: true times and noise are drawn."
    yield ""
    yield (
        f"A row of the first two tables stands for {COMPARISONS} comparisons, each alone in its study, of "
        "the others"
    )
    yield f"for {WHOLE} (copies, devices: {WHOLE // 2}): the standard error at 5 % is 0.5, 1.5 (2.2)."
    yield "Wrong claims are counted as in [simulation.md](simulation.md). A claim on fewer than three node"
    yield "sets names its nodes, and one that no full run could check says `by its steps`: `wrong` holds both"
    yield "to what they say; the column beside it to what is true of all nodes, or of full trainings."
    yield from race_tables()
    yield from whole_tables()


if __name__ == "__main__":
    for line in page():
        print(line, flush=True)

"""Synthetic evidence for tests of the verdict: a small study whose blocks are drawn, never measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stratbench.cell.coordinates import Cell
from stratbench.extensions.verdict.blocks import ComparisonKey, PairedBlock, Segment
from stratbench.extensions.verdict.paired.evidence import FullRun, PairedComparison, PairedEvidence
from stratbench.extensions.verdict.paired.next_round import NextRound, find_next_round


@dataclass(frozen=True)
class World:
    """What is true of a synthetic study: seconds per step, scores, and how blocks scatter."""

    steps_s: Mapping[str, float]
    scores: Mapping[str, float]  # of a full run; those of equal arithmetic are 98
    equal: Sequence[str] = ("ddp", "fsdp")
    oom: Sequence[str] = ()
    noise: float = 0.004
    #: Of the blocks, in turn: here a node a block.
    hosts: Sequence[str] = tuple(f"node{n}" for n in range(1, 11))
    places: Sequence[ComparisonKey] = (ComparisonKey("e", "m", 1), ComparisonKey("e", "m", 2))
    full_steps: int = 2000
    #: Factor of the full runs' times over steps x step time.
    sustained: float = 1.0
    #: A step takes gpus ** -speedup times as long.
    speedup: float = 0.0

    def step_s(self, strategy: str, gpus: int) -> float:
        """True seconds per step."""
        return self.steps_s[strategy] / gpus**self.speedup

    def evidence(self, **given) -> PairedEvidence:
        """Nothing measured yet."""
        strategies = tuple(self.steps_s)
        equal = tuple(a in self.equal for a in strategies)
        comparisons = tuple(
            PairedComparison(
                comparison_key=place,
                dataset="digits",
                strategies=strategies,
                uses_servers=tuple(a.startswith("ps") for a in strategies),
                equals_ddp=equal,
                shared_score_key=("e", "m"),
                full_run_steps=self.full_steps,
            )
            for place in self.places
        )
        return PairedEvidence(study="s", seed=0, comparisons=comparisons, **given)

    def block(self, entry: Mapping, study_seed: int = 0) -> PairedBlock:
        """The block that an entry of round.json asks for; the same whenever it is asked for."""
        place = ComparisonKey(entry["experiment"], entry["model"], entry["gpus"])
        rng = np.random.default_rng([study_seed, entry["block"], place.gpus])
        common = rng.normal(0, 0.01)
        known = sorted(self.steps_s)
        drawn = {strategy: rng.normal(0, self.noise, 3) for strategy in known}
        order = list(entry["strategies"])
        burn_in_s = self.step_s(order[0], place.gpus)
        segments = [Segment(0, "burn-in", order[0], "ok", burn_in_s, None, None, 1.0, 5.0)]
        for passed, strategies in (("first", order), ("mirror", order[::-1])):
            for strategy in strategies:
                bad = strategy in self.oom
                step_s = self.step_s(strategy, place.gpus) * math.exp(
                    common + drawn[strategy][int(passed == "mirror")]
                )
                segments.append(
                    Segment(len(segments), passed, strategy, "oom" if bad else "ok",
                            None if bad else step_s, None, None, 1.0, 5.0 + 75 * step_s)
                )  # fmt: skip
        return PairedBlock(
            comparison_key=place,
            block_number=entry["block"],
            timed_steps_per_segment=entry["settings"]["steps"] or 60,
            segments=tuple(segments),
            hosts=(self.hosts[entry["block"] % len(self.hosts)],),
            device_kind="cuda",
            gpu_seconds=place.gpus * 5.0 * len(segments),
        )

    def full_run(self, cell: Cell) -> FullRun:
        """The full run of a cell."""
        rng = np.random.default_rng([cell.repeat, cell.gpus, len(cell.strategy)])
        time_s = self.full_steps * self.step_s(cell.strategy, cell.gpus) * self.sustained
        score = 98.0 if cell.strategy in self.equal else self.scores[cell.strategy]
        return FullRun(
            status="ok", failure_reason=None, score=score + rng.normal(0, 0.05),
            better_score_direction="higher", score_tolerance=1.0, score_name="accuracy",
            gpu_seconds=cell.gpus * (time_s + 10), train_time_s=time_s, trained_steps=self.full_steps,
        )  # fmt: skip

    def follow(
        self,
        evidence: PairedEvidence,
        found: NextRound,
        keep: Callable[[object], bool] = lambda _: True,
    ) -> PairedEvidence:
        """The evidence after a round, of which only what `keep` lets through was finished."""
        blocks = dict(evidence.blocks)
        runs = dict(evidence.full_runs)
        for entry in found.block_entries:
            block = self.block(entry, evidence.seed)
            if keep((block.comparison_key, block.block_number)):
                blocks[block.comparison_key, block.block_number] = block
        runs |= {cell: self.full_run(cell) for cell in found.cells_to_train_in_full if keep(cell)}
        return replace(evidence, blocks=blocks, full_runs=runs)

    def to_the_end(
        self, evidence: PairedEvidence | None = None
    ) -> tuple[PairedEvidence, list[NextRound]]:
        """Rounds until `next_round` says that it is done."""
        evidence = evidence or self.evidence()
        rounds = []
        for _ in range(30):
            rounds.append(find_next_round(evidence))
            if rounds[-1].is_verdict_done:
                return evidence, rounds
            evidence = self.follow(evidence, rounds[-1])
        raise AssertionError("the verdict does not end")

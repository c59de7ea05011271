"""Rounds of a verdict on synthetic evidence: what is asked for, what is decided, and that order is
nothing.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from synthetic_paired import World

from stratbench.extensions.verdict.block_rules import (
    choose_segment_steps,
    compute_block_log_step_time,
    compute_segment_disagreement_limit,
    count_discarded_steps,
    estimate_block_and_full_cell_costs,
)
from stratbench.extensions.verdict.blocks import ComparisonKey, PairedBlock, Segment
from stratbench.extensions.verdict.paired import judging
from stratbench.extensions.verdict.paired.evidence import PairedEvidence
from stratbench.extensions.verdict.paired.lines import iter_verdict_lines
from stratbench.extensions.verdict.paired.next_round import find_next_round, plan_next_round
from stratbench.extensions.verdict.paired.noise import estimate_block_noise
from stratbench.extensions.verdict.paired.rounds import RoundReplay
from stratbench.extensions.verdict.paired.verdict import make_verdict_content

ONE = ComparisonKey("e", "m", 1)
FIVE = World(
    steps_s={"ddp": 0.1, "fsdp": 0.11, "ps-async": 0.099, "ps-slow": 0.3, "big": 0.05, "odd": 0.09},
    scores={"ps-async": 97.9, "ps-slow": 98.0, "big": 98.0, "odd": 90.0},
    oom=["big"],
)


def told(evidence) -> dict:
    course = RoundReplay(evidence)
    return make_verdict_content(course, plan_next_round(course), [])


def test_a_race_ends_with_the_right_claim_and_says_who_was_dropped_when_and_why():
    evidence, rounds = FIVE.to_the_end()
    verdict = told(evidence)
    assert rounds[-1].end_reason == "everything is decided"
    for comparison in verdict["comparisons"]:
        assert (comparison["claim"], comparison["leader"], comparison["confidence"]) == (
            "within",
            "ps-async",
            "high",
        )
        states = {r["strategy"]: r["state"] for r in comparison["ratios"]}
        assert states["big"] == "oom"
        assert states["odd"] == "score"
        assert states["ps-slow"] == "much slower"
    text = "\n".join(iter_verdict_lines(verdict))
    assert "ps-async is within 3 % of the fastest (95 %, on 3 nodes)" in text
    assert "its accuracy is 8" in text
    assert "Done: everything is decided." in text
    json.dumps(verdict, allow_nan=False)


def test_only_the_fastest_unknown_strategy_is_trained_and_equal_arithmetic_shares_one_run():
    evidence, rounds = FIVE.to_the_end()
    trained = [
        (c.strategy, c.gpus) for r in rounds for c in r.cells_to_train_in_full if c.repeat == 0
    ]
    assert trained.count(("ddp", 1)) == 1  # for all comparisons, at the fewest workers
    assert ("ddp", 2) not in trained
    assert {name for name, _ in trained} == {"ddp", "odd", "ps-async"}
    extra = {c.strategy for r in rounds for c in r.cells_to_train_in_full if c.repeat > 0}
    assert extra <= {"ps-async"}  # more seeds for the leader alone
    assert all(c.repeat <= 2 for c in evidence.full_runs)


def test_nothing_depends_on_the_order_of_files():
    evidence, _ = FIVE.to_the_end()
    rng = np.random.default_rng(0)
    blocks, runs = list(evidence.blocks.items()), list(evidence.full_runs.items())
    for _ in range(3):
        rng.shuffle(blocks)
        rng.shuffle(runs)
        assert told(replace(evidence, blocks=dict(blocks), full_runs=dict(runs))) == told(evidence)


@pytest.mark.parametrize("seed", range(4))
def test_a_study_killed_again_and_again_comes_to_the_same_verdict(seed):
    """Whatever part of a round was finished: the rest is asked for again, in the same order."""
    whole, _ = FIVE.to_the_end()
    rng = np.random.default_rng(seed)
    evidence, asked = FIVE.evidence(), {}
    for _ in range(100):
        found = find_next_round(evidence)
        for entry in found.block_entries:
            where = (entry["experiment"], entry["gpus"], entry["block"])
            assert asked.setdefault(where, entry["strategies"]) == entry["strategies"]
        if found.is_verdict_done:
            break
        evidence = FIVE.follow(evidence, found, keep=lambda _: rng.random() < 0.5)
    assert told(evidence) == told(whole)


def test_a_round_is_judged_by_its_own_evidence_alone():
    """A full run that nobody asked for, and a block of a later round, change nothing yet."""
    evidence, rounds = FIVE.to_the_end()
    first = FIVE.follow(FIVE.evidence(), rounds[0])
    early = replace(first, full_runs=evidence.full_runs)
    early = replace(early, blocks=first.blocks | {
        key: block for key, block in evidence.blocks.items() if key[1] == 3
    })  # fmt: skip
    assert [b["strategies"] for b in find_next_round(early).block_entries] == [
        b["strategies"] for b in find_next_round(first).block_entries
    ]


def test_the_second_pass_is_not_the_first_blocks_order_again():
    evidence = FIVE.evidence()
    orders = [
        tuple(evidence.order_strategies_of_block(evidence.comparisons[0], n, FIVE.steps_s))
        for n in range(1, 9)
    ]
    assert len(set(orders)) > 5
    assert {tuple(sorted(o)) for o in orders} == {tuple(sorted(FIVE.steps_s))}
    assert len({o[0] for o in orders}) > 2


def test_rivals_are_told_apart_by_the_bound_that_is_printed():
    """The interval, which counts all pairs at all looks, is wider and may hold 1."""
    verdict = told(FIVE.to_the_end()[0])
    ratios = [
        r for comparison in verdict["comparisons"] for r in comparison["ratios"] if r["at_least"]
    ]
    assert {r["state"] for r in ratios} >= {"slower"}
    for r in ratios:
        assert r["low"] < r["at_least"] < r["ratio"]
        assert (r["state"] == "slower") == (r["at_least"] > 1)
    text = "\n".join(iter_verdict_lines(verdict))
    assert all(f"at least {r['at_least']:.3f}" in text for r in ratios)
    assert not re.search(r"\d \[", text)  # the interval stands in the file alone


def test_a_budget_ends_the_race_and_the_last_look_stands():
    """No claim without three blocks, and none that the intervals do not allow."""
    near = World(steps_s={"ddp": 0.1, "fsdp": 0.1}, scores={}, noise=0.05)
    evidence, rounds = near.to_the_end()
    assert rounds[-1].end_reason == "the verdict has ended: it has the largest number of blocks, 10"
    assert {b["claim"] for b in told(evidence)["comparisons"]} == {"at most"}
    most = rounds[-1].spent_gpu_hours / 2
    poor, rounds = near.to_the_end(near.evidence(budget_gpu_hours=most))
    assert rounds[-1].spent_gpu_hours <= most
    assert "exceed the budget" in rounds[-1].end_reason
    verdict = told(poor)
    assert {b["claim"] for b in verdict["comparisons"]} <= {"at most", "none"}
    assert any(b["open"] for b in verdict["comparisons"])


def test_noise_that_hides_everything_ends_in_no_claim():
    """No share of hundreds of percent is printed as if it said something."""
    evidence, _ = World(steps_s={"ddp": 0.1, "fsdp": 0.1}, scores={}, noise=2.0).to_the_end()
    verdict = told(evidence)
    for comparison in verdict["comparisons"]:
        assert (comparison["claim"], comparison["confidence"]) == ("none", "low")
        assert "another strategy may still be more than twice as fast" in comparison["text"]
    text = "\n".join(iter_verdict_lines(verdict))
    assert "Ended undecided:" in text
    assert "Decided:" not in text
    assert "strategies takes more blocks than a verdict runs" in text


def test_nothing_is_claimed_before_three_blocks():
    evidence = FIVE.evidence()
    for _ in range(2):
        evidence = FIVE.follow(evidence, find_next_round(evidence))
    assert {b["claim"] for b in told(evidence)["comparisons"]} == {"none"}


def test_blocks_on_one_node_say_so():
    alone = replace(FIVE, hosts=["node1"])
    comparison = told(alone.to_the_end()[0])["comparisons"][0]
    assert "on node node1" in comparison["text"]
    assert comparison["confidence"] == "medium"


def test_a_full_run_that_takes_longer_than_its_steps_is_a_doubt():
    slow = told(replace(FIVE, sustained=1.1).to_the_end()[0])["comparisons"][0]
    assert any("full run" in doubt for doubt in slow["doubts"])
    assert slow["confidence"] == "medium"
    assert not told(FIVE.to_the_end()[0])["comparisons"][0]["doubts"]


def test_a_comparison_in_which_nothing_fits_ends():
    evidence, _ = replace(FIVE, oom=list(FIVE.steps_s)).to_the_end()
    assert {b["claim"] for b in told(evidence)["comparisons"]} == {"none"}


def test_a_comparison_with_one_strategy_left_ends_at_once():
    evidence, rounds = replace(FIVE, oom=["fsdp", "ps-async", "ps-slow", "big", "odd"]).to_the_end()
    assert {b["claim"] for b in told(evidence)["comparisons"]} == {"only"}
    assert max(block["block"] for r in rounds for block in r.block_entries) == 1


class Unlucky(World):
    """The first seed of every strategy of other arithmetic is good, the others are not."""

    def full_run(self, cell):
        run = super().full_run(cell)
        return run if cell.repeat == 0 or cell.strategy in self.equal else replace(run, score=90.0)


def test_a_leader_whose_further_seeds_fail_is_replaced():
    """One seed lets a loss pass; the mean of three does not."""
    world = Unlucky(steps_s={"ddp": 0.1, "ps-lucky": 0.08}, scores={"ps-lucky": 97.5})
    comparison = told(world.to_the_end()[0])["comparisons"][0]
    assert comparison["text"] == "ddp is the only strategy left."
    assert comparison["leader"] == "ddp"
    assert [r["state"] for r in comparison["ratios"]] == ["leader", "score"]


def test_what_was_dropped_for_being_slower_than_a_leader_that_is_out_comes_back():
    """The comparison is judged again by the blocks in which all of them were, and goes on from there."""
    near = {"ddp": 0.1, "fsdp": 0.1, "zero1": 0.1005, "ps-lucky": 0.06}
    world = Unlucky(
        steps_s=near, scores={"ps-lucky": 98.0}, equal=("ddp", "fsdp", "zero1"), places=[ONE]
    )
    evidence, rounds = world.to_the_end()
    seen = [set(block["strategies"]) for found in rounds for block in found.block_entries]
    assert not {"ddp", "fsdp", "zero1"} <= seen[-2]
    assert {"ddp", "fsdp", "zero1"} == seen[-1]
    (comparison,) = told(evidence)["comparisons"]
    states = {r["strategy"]: r["state"] for r in comparison["ratios"]}
    assert states.pop("ps-lucky") == "score"
    assert sorted(states.values()) in (["equal", "equal", "leader"], ["leader", "open", "open"])
    assert comparison["claim"] == "within"  # of three that are as fast: not "fastest"


def test_strategies_are_compared_over_the_blocks_that_all_of_them_are_in():
    """The second allocation was slow for all; the strategy that came back was not in it."""
    logs = np.array([[[0.0, 3.0, 0.0], [0.01, np.nan, 0.02]]])
    everywhere = np.ones((1, 2), dtype=bool)
    look = judging.judge_comparisons(
        logs, everywhere, everywhere, ~everywhere, np.array([2]), np.array([True]), 0.03, np.inf,
        np.arange(3)[None],
    )  # fmt: skip
    assert (look.leader[0], look.blocks[0]) == (0, 2)
    assert look.mean[0, 1] == pytest.approx(0.015)
    assert not look.decided[0]  # two blocks count


def test_who_was_faster_but_is_out_is_not_counted_among_the_slower():
    world = World(
        steps_s={"ddp": 0.1, "fsdp": 0.13, "ps-bad": 0.05, "ps-big": 0.05},
        scores={"ps-bad": 80.0}, oom=["ps-big"], places=[ONE],
    )  # fmt: skip
    (comparison,) = told(world.to_the_end()[0])["comparisons"]
    assert comparison["text"] == "ddp is the fastest of 2 (95 %, on 3 nodes)."


def test_a_noisy_first_block_drops_nobody():
    """Two that are the same, in a block in which two segments of one strategy differ by a third."""
    world = World(steps_s=dict.fromkeys("abcd", 0.1), scores={}, equal="abcd", places=[ONE])
    entry = find_next_round(world.evidence()).block_entries[0]
    block = world.block(entry)
    factor = {"a": 0.75, "b": 1.3, "c": 1.0, "d": 0.9}

    def noisy(shift: float) -> PairedEvidence:
        segments = tuple(
            replace(s, mean_step_s=0.1 * factor[s.strategy] * math.exp(sign[s.pass_name] * shift))
            for s in block.segments
        )
        blocks = {(ONE, 1): replace(block, segments=segments)}
        return replace(world.evidence(), blocks=blocks)

    sign = {"burn-in": 0, "first": 0.5, "mirror": -0.5}
    assert "b" in find_next_round(noisy(0.3)).block_entries[0]["strategies"]
    assert "b" not in find_next_round(noisy(0.01)).block_entries[0]["strategies"]


def test_a_block_depends_on_rounds_that_are_complete_alone():
    """Of the blocks 7 and 8 of one round the first is there: the second is asked for as before."""
    near = World(steps_s={"ddp": 0.1, "fsdp": 0.1}, scores={}, noise=0.05, places=[ONE])
    evidence = near.evidence()
    while len((found := find_next_round(evidence)).block_entries) < 2:
        evidence = near.follow(evidence, found)
    seven, eight = found.block_entries
    assert (seven["block"], eight["block"]) == (7, 8)
    half = near.follow(evidence, found, keep=lambda what: what == (ONE, 7))
    assert find_next_round(half).block_entries == (eight,)


def test_a_leader_that_nobody_has_trained_in_full_is_trained_at_last():
    """The one that led all along is out when there are no more blocks to come."""

    class Diverging(World):
        def full_run(self, cell):
            run = super().full_run(cell)
            return replace(run, status="diverged", score=None) if cell.repeat else run

        def step_s(
            self, strategy, gpus
        ):  # never told apart: ahead by more in odd blocks, behind in even ones
            shift = {"ps-a": -0.003 - 0.006 * (-1) ** (self.round + 1)}.get(strategy, 0.0)
            return super().step_s(strategy, gpus) * math.exp(shift)

        def block(self, entry, study_seed=0):
            object.__setattr__(self, "round", entry["block"])
            return super().block(entry, study_seed)

        round = 0

    strategies = dict.fromkeys(("ps-a", "ps-b", "ps-c"), 0.09)
    scores = dict.fromkeys(strategies, 98.0)
    world = Diverging(steps_s=strategies, scores=scores, equal=(), places=[ONE], noise=0.0001)
    _, rounds = world.to_the_end(world.evidence(margin=1e-9))
    asked = [
        (cell.strategy, cell.repeat) for found in rounds for cell in found.cells_to_train_in_full
    ]
    assert asked[:2] == [("ps-a", 0), ("ps-a", 1)]
    assert [repeat for _, repeat in asked[2:]] == [0, 1]
    assert rounds[-1].block_entries == ()


def test_an_strategy_that_fails_in_a_later_block_is_out_with_its_reason():
    evidence, _ = FIVE.to_the_end()
    key = (ComparisonKey("e", "m", 1), 2)
    broken = evidence.blocks[key]
    segments = tuple(
        replace(s, status="timeout", mean_step_s=None) if s.strategy == "fsdp" else s
        for s in broken.segments
    )
    changed = replace(evidence, blocks=evidence.blocks | {key: replace(broken, segments=segments)})
    ratio = next(r for r in told(changed)["comparisons"][0]["ratios"] if r["strategy"] == "fsdp")
    assert (ratio["state"], ratio["blocks"]) == ("timeout", 2)


def test_a_strategy_that_is_added_to_a_study_is_raced():
    """Blocks without it are measured again, and it is not taken for one that failed."""
    whole = {**FIVE.steps_s, "new": 0.08}
    before, _ = FIVE.to_the_end()
    world = replace(FIVE, steps_s=whole, scores={**FIVE.scores, "new": 98.0})
    evidence = replace(world.evidence(), blocks=before.blocks, full_runs=before.full_runs)
    first = find_next_round(evidence)
    assert [(b["block"], "new" in b["strategies"]) for b in first.block_entries] == [
        (1, True),
        (1, True),
    ]
    evidence, _ = world.to_the_end(evidence)
    assert {b["leader"] for b in told(evidence)["comparisons"]} == {"new"}


def test_third_segments_are_asked_for_by_the_study_so_far():
    _, rounds = FIVE.to_the_end()
    assert rounds[0].block_entries[0]["settings"] == {
        "steps": None,
        "discard": None,
        "disagreement": None,
    }
    later = rounds[1].block_entries[0]["settings"]
    assert later["steps"] == 60
    assert later["discard"] == count_discarded_steps(60) == 15
    assert later["disagreement"] == pytest.approx(0.03, abs=0.02)
    assert compute_segment_disagreement_limit([]) == 0.03
    assert compute_segment_disagreement_limit([0.01, 0.02, 0.03]) == pytest.approx(5.9 * 0.02)


def test_the_value_of_a_block_is_the_mean_of_two_or_the_median_of_three():
    assert compute_block_log_step_time([1.0, 3.0]) == 2.0
    assert compute_block_log_step_time([1.0, 3.0, 1.2]) == 1.2


@pytest.mark.parametrize(("step_s", "steps"), [(0.03, 120), (0.125, 59), (0.43, 50), (0.001, 300)])
def test_segments_are_as_long_as_their_start_is_worth(step_s, steps):
    assert choose_segment_steps(6.0, step_s, 0.05, 0.3, 0.008) == steps


def test_the_expected_cost_is_that_of_the_simulations():
    """The paper's step times cost about a tenth; where starts dominate far more, and the plan says so."""
    for k, segment, full, low, high in ((7, 20, 1000, 0.07, 0.11), (7, 14, 250, 0.15, 0.4)):
        times, trained = estimate_block_and_full_cell_costs([segment] * k, [full] * k)
        assert low < (times + trained) / (3 * k * full) < high


def made_blocks(rng, n, strategies, sd):
    """Blocks whose components are known: allocation, strategy in allocation, process, within, drift."""
    blocks = []
    for number in range(1, n + 1):
        order = list(rng.permutation(strategies))
        allocation, trend = rng.normal(0, sd["allocation"]), rng.normal(0, sd["drift"])
        own = {strategy: rng.normal(0, sd["strategy_in_allocation"]) for strategy in strategies}
        slots = [("first", a) for a in order] + [("mirror", a) for a in order[::-1]]
        at = np.linspace(-1, 1, len(slots))
        segments = [
            Segment(slot, passed, strategy, "ok", 0.1 * math.exp(
                allocation + trend * at[slot] + own[strategy] + rng.normal(0, sd["segment"])
            ), None, None, 1.0, 5.0)
            for slot, (passed, strategy) in enumerate(slots)
        ]  # fmt: skip
        blocks.append(
            PairedBlock(
                ComparisonKey("e", "m", 2), number, 60, tuple(segments), ("h",), "cuda", 1.0
            )
        )
    return blocks


def test_noise_is_told_apart_by_its_components():
    sd = {"allocation": 0.05, "strategy_in_allocation": 0.01, "segment": 0.008, "drift": 0.02}
    strategies = [f"a{i}" for i in range(8)]
    found = estimate_block_noise(made_blocks(np.random.default_rng(0), 60, strategies, sd))
    for name, true in sd.items():
        assert getattr(found, f"{name}_sd") == pytest.approx(true, rel=0.25), name
    assert found.log_ratio_sd == pytest.approx(math.sqrt(2 * (0.01**2 + 0.008**2 / 2)), rel=0.1)
    assert found.count_blocks_for_margin(0.03, 7) in (3, 4, 5)
    assert replace(found, log_ratio_sd=0.26).count_blocks_for_margin(0.03, 7) is None


def test_one_block_cannot_tell_noise_between_blocks():
    sd = {"allocation": 0.05, "strategy_in_allocation": 0.0, "segment": 0.008, "drift": 0.0}
    found = estimate_block_noise(made_blocks(np.random.default_rng(0), 1, ["a", "b", "c"], sd))
    assert found.log_ratio_sd is None
    assert found.allocation_sd is None
    assert found.segment_sd is not None

"""What takes a verdict's claim back: full runs, nodes, copies, other devices, and a file that was changed."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from synthetic_files import Files
from synthetic_paired import World

import verdict_limits as limits
from stratbench.extensions.verdict.blocks import ComparisonKey, read_block
from stratbench.extensions.verdict.paired import judging
from stratbench.extensions.verdict.paired.lines import iter_verdict_lines
from stratbench.extensions.verdict.paired.next_round import find_next_round, plan_next_round
from stratbench.extensions.verdict.paired.rounds import RoundReplay
from stratbench.extensions.verdict.paired.verdict import make_verdict_content
from stratbench.extensions.verdict.paired_results import collect_paired_results, read_verdict

ONE = ComparisonKey("e", "m", 1)
#: `ps-x` leads by 4 %.
LEADS = World(
    steps_s={"ddp": 0.1, "fsdp": 0.12, "ps-x": 0.096}, scores={"ps-x": 98.0}, places=[ONE]
)


def told(evidence) -> dict:
    course = RoundReplay(evidence)
    return make_verdict_content(course, plan_next_round(course), [])


def comparison_of(world: World) -> dict:
    return told(world.to_the_end()[0])["comparisons"][0]


class Sustained(World):
    """Full runs of `ps-x` take longer than their steps."""

    def full_run(self, cell):
        run = super().full_run(cell)
        factor = 1.1 if cell.strategy == "ps-x" else 1.0
        return replace(run, train_time_s=run.train_time_s * factor)


# ---------------------------------------------------------------- full runs


def test_a_leader_whose_full_run_is_slower_than_its_steps_is_no_longer_the_fastest():
    assert comparison_of(LEADS)["claim"] == "fastest"
    comparison = comparison_of(Sustained(**vars(LEADS)))
    assert comparison["claim"] == "at most"
    assert comparison["at_most"] > 0.05  # as it truly is
    assert comparison["confidence"] != "high"
    assert any("according to the blocks" in doubt for doubt in comparison["doubts"])


@pytest.mark.slow
@pytest.mark.parametrize("slower", [0.025, 0.04, 0.1])
@pytest.mark.parametrize("equal", [("ddp", "fsdp"), ("ddp", "fsdp", "x")])
def test_few_claims_are_wrong_of_full_trainings(slower, equal):
    full = {"x": (1 + slower) * math.exp(0.04)}
    worlds = [limits.World(limits.comparison_of(3, 0.04), full, equal, seed) for seed in range(20)]
    bad = [world.is_wrong(world.verdict()[0], of_steps=False) for world in worlds]
    assert sum(bad) <= 2  # of 20 at a rate of 5 %, three or more are seen in 8 %


def test_full_runs_that_are_all_slower_alike_change_no_claim():
    """Whatever slows all of them does not say who is faster."""
    assert comparison_of(replace(LEADS, sustained=1.1))["claim"] == "fastest"


#: Two numbers of workers, and one full run of DDP's arithmetic is enough for the scores of both.
BOTH = replace(LEADS, equal=("ddp", "fsdp", "ps-x"), places=[ONE, ComparisonKey("e", "m", 2)])


def test_a_leader_is_trained_in_full_on_its_number_of_workers_whatever_its_arithmetic():
    evidence, _ = BOTH.to_the_end()
    assert {(cell.strategy, cell.gpus) for cell in evidence.full_runs} == {("ps-x", 1), ("ps-x", 2)}


def test_high_takes_a_full_run_of_the_leader_itself():
    evidence, _ = BOTH.to_the_end()
    assert {comparison["confidence"] for comparison in told(evidence)["comparisons"]} == {"high"}
    first = {cell: run for cell, run in evidence.full_runs.items() if cell.gpus == 1}
    one, two = told(replace(evidence, full_runs=first))["comparisons"]
    assert (one["confidence"], two["confidence"]) == ("high", "medium")
    assert "by its steps" in two["text"]


def test_where_allocations_differ_too_much_for_a_check_the_claim_is_of_steps():
    class Rough(World):
        def block(self, entry, study_seed=0):
            block = super().block(entry, study_seed)
            factor = 1.2 if entry["block"] % 2 else 1.0
            segments = (
                replace(s, mean_step_s=s.mean_step_s and s.mean_step_s * factor)
                for s in block.segments
            )
            return replace(block, segments=tuple(segments))

    comparison = comparison_of(Rough(**vars(LEADS)))
    assert "by its steps" in comparison["text"]
    assert comparison["confidence"] == "medium"


# ---------------------------------------------------------------- nodes


@pytest.mark.parametrize(
    ("nodes", "words", "level"),
    [
        (1, "on node node1 (95 %)", "medium"),
        (2, "on 2 nodes alone, node1 and node2 (95 %)", "medium"),
        (3, "(95 %, on 3 nodes)", "high"),
    ],
)
def test_a_claim_says_its_nodes_or_how_many_and_high_takes_three(nodes, words, level):
    comparison = comparison_of(replace(LEADS, hosts=[f"node{n}" for n in range(1, nodes + 1)]))
    assert words in comparison["text"]
    assert comparison["claim"] in ("fastest", "within")
    assert comparison["confidence"] == level
    assert comparison["node_sets"] == nodes


@pytest.mark.parametrize("k", [3, 7, 15])
@pytest.mark.parametrize("truth", limits.TRUTHS)
@pytest.mark.parametrize("nodes", [1, 2, 4, 0])
def test_nodes_that_suit_one_strategy_do_no_harm(nodes, truth, k):
    found = limits.race_rates(600, k, truth, limits.Blocks(0.005, nodes, 0.02))
    assert found["wrong"] <= 5


def test_control_blocks_of_four_nodes_taken_for_ten_err_too_often(monkeypatch):
    none = np.zeros((1000, 1), dtype=bool)
    monkeypatch.setattr(
        judging, "average_by_node_set", lambda logs, _: (logs, none.astype(int), none)
    )
    how = limits.Blocks(0.005, 4, 0.02)
    monkeypatch.setattr(judging, "MIN_SETS", 0)
    assert limits.race_rates(1000, 15, limits.TRUTHS[0], how)["of_all"] > 5


# ---------------------------------------------------------------- dependence


@pytest.mark.parametrize("k", [2, 3, 7, 15])
@pytest.mark.parametrize("truth", limits.TRUTHS)
def test_blocks_that_depend_on_their_predecessor_do_no_harm(truth, k):
    found = limits.race_rates(1000, k, truth, limits.Blocks(0.02, 1, after=0.8))
    assert found["wrong"] <= 5


@pytest.mark.parametrize("k", [2, 7])
def test_independent_blocks_on_one_node_lose_few_claims(k):
    """Of noise of 1 %: the price is blocks, six at least, and not the claim."""
    found = limits.race_rates(600, k, "rivals 3.01 % slower", limits.Blocks(0.01, 1))
    assert found["within"] >= 95
    assert found["blocks"] < 7.5


def test_dependent_blocks_are_a_doubt():
    class Warming(World):
        def step_s(self, strategy, gpus):
            return super().step_s(strategy, gpus) * math.exp(0.02 * self.at * (strategy == "ddp"))

        def block(self, entry, study_seed=0):
            object.__setattr__(self, "at", entry["block"])
            return super().block(entry, study_seed)

        at = 0

    comparison = comparison_of(Warming(**{**vars(LEADS), "hosts": ["node1"]}))
    assert any("more similar than chance explains" in doubt for doubt in comparison["doubts"])
    assert not any(
        "before them" in d for d in comparison_of(replace(LEADS, hosts=["node1"]))["doubts"]
    )


# ---------------------------------------------------------------- blocks


class Copied(World):
    """All blocks have the ratios of the first."""

    def block(self, entry, study_seed=0):
        block = super().block({**entry, "block": 1}, study_seed)
        factor = 1 + 0.01 * entry["block"]
        segments = tuple(
            replace(s, mean_step_s=s.mean_step_s and s.mean_step_s * factor) for s in block.segments
        )
        return replace(block, block_number=entry["block"], segments=segments,
                       hosts=(f"node{entry['block']}",))  # fmt: skip


class OnTwoDevices(World):
    """Every other block ran on CPU processes."""

    def block(self, entry, study_seed=0):
        block = super().block(entry, study_seed)
        return replace(block, device_kind="cpu" if entry["block"] % 2 else "cuda")


class OnTwoGpus(World):
    """Every other block ran on GPUs of another name."""

    def block(self, entry, study_seed=0):
        block = super().block(entry, study_seed)
        return replace(block, gpu_names=("A100" if entry["block"] % 2 else "H100",))


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (Copied, "one block is a copy"),
        (OnTwoDevices, "cpu and on cuda"),
        (OnTwoGpus, "A100 and on H100"),
    ],
)
def test_copied_blocks_and_other_devices_claim_nothing_and_are_noted(world, words):
    verdict = told(world(**vars(LEADS)).to_the_end()[0])
    (comparison,) = verdict["comparisons"]
    assert (comparison["claim"], comparison["confidence"]) == ("none", "low")
    assert words in comparison["text"]
    assert any(words in note for note in verdict["notes"])
    assert not collect_paired_results(verdict)
    json.dumps(verdict, allow_nan=False)


def test_two_measured_strategies_with_one_equal_ratio_are_no_copy():
    assert comparison_of(replace(LEADS, steps_s={"ddp": 0.1, "ps-x": 0.096}))["unusable"] is None


def test_milliseconds_for_seconds_are_a_doubt_and_no_drop():
    """One strategy is 1000 times as slow in the first block; its own full run says what it takes."""

    class Mistaken(World):
        def block(self, entry, study_seed=0):
            block = super().block(entry, study_seed)
            wild = entry["block"] == 1
            segments = tuple(
                replace(s, mean_step_s=1000 * s.mean_step_s) if wild and s.strategy == "ps-x" else s
                for s in block.segments
            )
            return replace(block, segments=segments)

    world = Mistaken(**vars(LEADS))
    cell = world.evidence().make_full_run_cell(world.evidence().comparisons[0], "ps-x")
    evidence, _ = world.to_the_end(world.evidence(full_runs={cell: world.full_run(cell)}))
    (comparison,) = told(evidence)["comparisons"]
    state = {r["strategy"]: r["state"] for r in comparison["ratios"]}["ps-x"]
    assert state != "much slower"
    assert any(
        re.search(r"of ps-x in block 1 takes \d+ times", doubt) for doubt in comparison["doubts"]
    )
    assert comparison["confidence"] != "high"


def test_a_block_whose_steps_take_longer_than_its_segments_is_not_used(tmp_path):
    files = Files(tmp_path)
    path = files.write_block(files.next_round()["comparisons"][0])
    assert read_block(path).block_number == 1
    content = json.loads(path.read_text())
    content["segments"][1]["mean_step_s"] *= 1000
    path.write_text(json.dumps(content))
    files.command("tell")
    notes = json.loads((files.root / "verdict" / "verdict.json").read_text())["notes"]
    assert any("of the whole segment" in note for note in notes)


# ---------------------------------------------------------------- verdict.json


@pytest.fixture(scope="module")
def raced(tmp_path_factory) -> Files:
    files = Files(tmp_path_factory.mktemp("raced"))
    files.to_the_end()
    files.command("tell")
    return files


def halved(verdict: dict) -> dict:
    comparison = verdict["comparisons"][0]
    times = comparison["step_s"][comparison["leader"]]
    comparison["step_s"][comparison["leader"]] = [s / 2 for s in times]
    return verdict


def test_a_verdict_that_was_changed_is_not_used(raced, capsys):
    path = raced.root / "verdict" / "verdict.json"
    written = path.read_text()
    assert read_verdict(str(path))["comparisons"][0]["leader"] == "ps-dana"
    path.write_text(json.dumps(halved(json.loads(written))))
    assert read_verdict(str(path)) is None
    assert "its content was changed after it was written" in capsys.readouterr().err
    path.write_text(written)


def test_a_verdict_that_says_something_else_than_its_blocks_is_not_used(raced, capsys):
    from stratbench.extensions.verdict.blocks import add_verdict_digest

    path = raced.root / "verdict" / "verdict.json"
    written = path.read_text()
    path.write_text(json.dumps(add_verdict_digest(halved(json.loads(written)))))
    assert read_verdict(str(path)) is None
    assert "block1/block.json has another step time of ps-dana" in capsys.readouterr().err
    path.write_text(written)


# ---------------------------------------------------------------- words


def test_the_first_round_says_that_no_cost_is_known_and_how_many_rounds_may_follow():
    found = find_next_round(LEADS.evidence())
    assert found.cost_and_rounds_sentence.startswith(
        "The cost is unknown before the first block; at most 7 rounds of"
    )
    later = find_next_round(LEADS.follow(LEADS.evidence(), found))
    assert later.cost_and_rounds_sentence.startswith("This round takes about ")
    text = "\n".join(iter_verdict_lines(told(LEADS.evidence())))
    assert (
        "its cost is unknown before the first block; at most 7 rounds of blocks may follow" in text
    )
    assert (
        "Nothing more is to run" in find_next_round(LEADS.to_the_end()[0]).cost_and_rounds_sentence
    )

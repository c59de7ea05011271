"""The decision: right on constructed cells whose answer is known, and never from an unusable one."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest

from stratbench.analysis.decision import decide
from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.records.columns import COLUMNS
from stratbench.analysis.records.findings import AUDIT_COLUMNS
from stratbench.cell.text.words import wrap_lines
from stratbench.extensions.audit import audit
from stratbench.extensions.paper import published
from stratbench.extensions.projection.shown.evidence import ProjectionEvidence
from stratbench.extensions.projection.shown.projected import read_projections_by_strategy
from stratbench.extensions.projection.table import Row, write_projection_csv
from stratbench.strategies import get_option_defaults, get_strategy_class, get_traits
from stratbench.study.config.messages import ConfigError

MIB = 2**20


def cell(strategy, time_s, gpus=4, repeat=0, **other):
    """A row of cells.csv; `other` replaces any of its columns."""
    said = get_traits(strategy, get_option_defaults(strategy), gpus)
    return (
        dict.fromkeys(COLUMNS)
        | {"study": "s", "experiment": "e", "strategy": strategy, "model": "vgg16"}
        | {"dataset": "cifar10", "gpus": gpus, "repeat": repeat, "status": "ok"}
        | {"strategy_base": strategy, "strategy_kind": get_strategy_class(strategy).kind}
        | asdict(said)
        | {"train_time_s": time_s, "score_final": 0.9, "device_kind": "cuda"}
        | {"host": f"node{repeat % 2}", "batchnorm": False}
        | {"peak_memory_bytes": 1000 * MIB, "model_states_bytes": 500 * MIB}
        | other
    )


def failed(strategy, status, gpus=4, **other):
    empty = ("train_time_s", "score_final", "peak_memory_bytes", "model_states_bytes")
    return cell(strategy, None, gpus, status=status, **(dict.fromkeys(empty) | other))


def repeats(strategy, times, **other):
    return [cell(strategy, time_s, repeat=k, **other) for k, time_s in enumerate(times)]


def finding(rule="some-rule", severity="unusable", affects="time", **where):
    blank = dict.fromkeys(AUDIT_COLUMNS)
    return blank | {"rule": rule, "severity": severity, "affects": affects, "figures": "f"} | where


def decided(rows, findings=(), **constraints):
    """The decision on one experiment and model."""
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    found = pd.DataFrame(list(findings), columns=list(AUDIT_COLUMNS))
    under = Constraints(**constraints)
    evidence = decide.read_evidence((), under)
    (decision,) = decide.make_decisions(frame, found, under, list(evidence.values()))
    return decision


def standings(decision):
    return {(row["strategy"], row["gpus"]): row["status"] for row in decision.decision_csv_rows}


@pytest.mark.parametrize(
    ("test_samples", "status"), [(None, "worse score"), (10_000, "worse score"), (360, "")]
)
def test_accuracy_is_lost_only_beyond_what_chance_makes_of_the_test_set(test_samples, status):
    """90 % against 88 %: the 95 % interval of the difference is 4.5 points at 360 samples."""
    rows = [
        cell("ddp", 10.0, score_final=0.88, test_samples=test_samples),
        cell("fsdp", 20.0, score_final=0.90, test_samples=test_samples),
    ]
    found = decided(rows)
    assert found.choice.strategy == ("fsdp" if status else "ddp")
    assert status in standings(found)["ddp", 4]


def test_what_the_plan_calls_infeasible_does_not_fit():
    rows = [cell("ddp", 10.0), failed("single", "infeasible", 1, reason="needs 93.0 GiB")]
    found = decided(rows)
    assert standings(found)["single", 1] == "does not fit"
    assert any("needs 93.0 GiB by the plan" in reason for _, reason in found.excluded)


def test_the_fastest_is_chosen_by_how_much_and_how_sure():
    rows = repeats("ddp", [10.0, 10.2, 10.1]) + repeats("fsdp", [15.0, 15.3, 15.15])
    found = decided(rows)
    assert found.headline == "ddp × 4. Fastest: the next takes 50 % longer."
    assert "takes 1.50 [1.50, 1.50] times as long as the choice (15.1 s)" in found.reason
    assert found.confidence == "high"
    assert "Over 3 repeats the choice is significantly faster than its only rival" in " ".join(
        found.sure
    )
    assert standings(found) == {("ddp", 4): "recommended", ("fsdp", 4): "possible"}


def test_repeats_that_do_not_tell_two_apart_leave_a_tie():
    found = decided(repeats("ddp", [10.0, 12.0, 11.0]) + repeats("fsdp", [12.0, 10.5, 11.2]))
    assert found.headline == "ddp × 4. Not significantly faster than fsdp × 4."
    assert found.confidence == "low"
    assert "is not significantly faster than 1 rival" in " ".join(found.sure)
    assert standings(found)[("fsdp", 4)] == "tied"


def test_of_equals_the_one_that_needs_less_memory_is_named_first():
    rows = [cell("ddp", 10.0), cell("fsdp", 10.0, peak_memory_bytes=400 * MIB)]
    found = decided(rows)
    assert found.headline == "fsdp × 4. Fastest, in one run each."
    assert "ddp on 4 GPUs takes exactly as long as the choice (10.0 s)." in found.reason


@pytest.mark.parametrize(("gpus", "memory", "first"), [(2, 1000, 2), (4, 400, 4), (8, 400, 4)])
def test_near_ties_are_ties_and_fewer_gpus_come_first(gpus, memory, first):
    """1 % apart, every repeat alike: told apart, and still equal within the margin of 3 %."""
    times = [10.0, 10.5, 9.8, 10.2, 10.1]
    rows = repeats("ddp", times) + repeats(
        "fsdp", [1.01 * t for t in times], gpus=gpus, peak_memory_bytes=memory * MIB
    )
    found = decided(rows)
    assert found.short_answer.claim.startswith("As fast as ")
    assert (found.choice.gpus, standings(found)["ddp", 4]) != (2, "recommended")
    assert found.choice.gpus == first
    assert found.choice.strategy == ("ddp" if gpus == 8 else "fsdp")
    assert found.confidence == "medium"
    assert decided(rows, equivalence_margin=0.0).short_answer.claim.startswith("Fastest: ")


def test_every_rival_and_worker_count_is_judged_not_the_next_alone():
    """The second is told apart; the third, which scatters, is not, nor is the first on 2 GPUs."""
    rows = repeats("ddp", [10.0, 10.1, 10.2]) + repeats("fsdp", [12.0, 12.1, 12.2])
    assert decided(rows).confidence == "high"
    found = decided([*rows, *repeats("ps-sync", [9.0, 16.0, 13.5])])
    assert found.headline == "ddp × 4. Not significantly faster than ps-sync × 4."
    assert found.confidence == "low"
    counts = decided([*rows, *repeats("ddp", [9.5, 16.0, 13.0], gpus=2)])
    assert counts.headline == "ddp × 4. Not significantly faster than ddp × 2."
    assert standings(counts) == {
        ("ddp", 4): "recommended", ("fsdp", 4): "possible", ("ddp", 2): "tied"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "ratio", "level", "reason"),
    [
        ({}, 1.08, "high", "faster than its only rival"),
        (
            {"host": "node0"},
            1.08,
            "medium",
            "ran on host node0; other hosts may rank the strategies differently",
        ),
        ({"host": "node0; node1"}, 1.08, "medium", "All repeats ran on host node0; node1"),
        (
            {"host": "node0"},
            1.5,
            "high",
            "ran on host node0; only a host whose time ratios differ by over 10 % may rank them differently",
        ),
        ({"device_kind": "cpu"}, 1.5, "high", "on this machine, not for GPUs"),
        ({"slowdown": "rank 0 4 times slower"}, 1.5, "high", "slowed down on purpose"),
    ],
)
def test_high_confidence_needs_several_repeats_on_several_hosts(change, ratio, level, reason):
    """On one host it needs a lead of more than 10 %."""
    times = [10.0, 10.2, 10.1]
    rows = repeats("ddp", times) + repeats("fsdp", [ratio * t for t in times])
    found = decided([row | change for row in rows])
    assert found.confidence == level
    assert reason in " ".join(found.sure)
    two = decided([row | change for row in rows if row["repeat"] < 2])
    assert two.confidence == "medium"


def test_a_tie_is_never_of_high_confidence_and_says_how_far_it_may_be_off():
    """Ten repeats, two equal strategies: within a few percent of each other."""
    rng = np.random.default_rng(1)
    rows = [
        row
        for name in ("ddp", "fsdp")
        for row in repeats(name, 10 * np.exp(rng.normal(0, 0.02, 10)))
    ]
    found = decided(rows)
    assert found.short_answer.claim.startswith("As fast as ")
    assert found.confidence == "medium"
    assert "a rival may be up to" in " ".join(found.sure)


WORSE = "The accuracy of ps-async on 4 GPUs may be up to {} points worse than that of ddp on 4 (1 allowed)."


@pytest.mark.parametrize(
    ("lost", "samples", "status", "said"),
    [
        # By one repeat: what the test set leaves to chance, 0.8 points at 10,000 samples.
        ([0.5], 10_000, "recommended", WORSE.format(1.3)),
        ([0.1], 10_000, "recommended", None),
        ([3.0], 10_000, "worse score", None),
        ([3.0], 360, "recommended", WORSE.format(7.7)),
        # By repeats: how they scatter, whatever the test set leaves to chance.
        ([0.4, 0.5, 0.6], 360, "recommended", None),
        ([2.9, 3.0, 3.1], 360, "worse score", None),
        ([-1.0, 0.5, 2.0], 10_000, "recommended", WORSE.format("3.0")),
    ],
)
def test_what_may_be_lost_in_accuracy_is_said_and_goes_by_the_repeats(lost, samples, status, said):
    rows = [
        row
        for k, points in enumerate(lost)
        for row in (
            cell("ddp", 30.0 + k, repeat=k, test_samples=samples),
            cell("ps-async", 10.0 + k, repeat=k, score_final=0.9 - points / 100)
            | {"test_samples": samples},
        )
    ]
    found = decided(rows)
    assert standings(found)["ps-async", 4] == status
    assert (said or "") in found.reason
    assert (said is not None) == ("may be up to" in found.reason) == found.short_answer.score_open
    if said:
        assert found.confidence != "high"
        assert any(
            change.startswith("A score that is surely within the tolerance: then ddp")
            for change in found.changes
        )
    if samples == 360:
        assert status != "recommended" or "points by chance, more than" in " ".join(found.sure)


def test_strategies_of_equal_arithmetic_share_their_accuracy():
    """Their repeats are of one thing; one that is far off is doubted and stands by itself."""
    accuracies = {"ddp": 0.895, "fsdp": 0.905, "ps-sync": 0.900}
    rows = [
        cell(name, 10.0 + k, score_final=accuracy, test_samples=10_000)
        for k, (name, accuracy) in enumerate(accuracies.items())
    ]
    assert decided(rows, score_tolerance={"accuracy": 0.5}).choice.strategy == "ddp"
    odd = decided([rows[0] | {"score_final": 0.6}, *rows[1:]])
    assert standings(odd)["ddp", 4] == "worse score"
    assert (
        "differs by 30.00 points from that of equal arithmetic"
        in odd.decision_csv_rows[0]["doubts"]
    )


def test_one_repeat_gives_no_interval_and_little_confidence():
    found = decided([cell("ddp", 10.0), cell("fsdp", 30.0)])
    assert found.confidence == "low"
    assert found.headline == "ddp × 4. Fastest, in one run each."
    assert "There is no interval" in " ".join(found.sure)
    assert any(change.startswith("More repeats") for change in found.changes)


@pytest.mark.parametrize(
    ("row", "kind", "reason"),
    [
        (failed("ddp", "oom"), "does not fit", "out of memory"),
        (failed("ddp", "timeout", time_limit_s=3000), "too slow", "not done after 3000 s"),
        (failed("ddp", "diverged"), "worse score", "training diverged"),
        (failed("ddp", "error", reason="rank 1 died"), "failed", "rank 1 died"),
        (failed("ddp", "missing"), "not measured", "no record"),
        (cell("ddp", 5.0, score_final=0.85), "worse score", "5.00 points less than fsdp"),
    ],
)
def test_what_cannot_be_chosen_is_excluded_with_why(row, kind, reason):
    found = decided([row, cell("fsdp", 30.0)])
    assert found.choice.strategy == "fsdp"
    ((name, text),) = found.excluded
    assert name == "ddp"
    assert kind in text
    assert reason in text
    assert standings(found)[("ddp", 4)] == kind


def test_a_repeat_that_ran_out_of_memory_counts_against_the_others():
    rows = [*repeats("ddp", [10.0, 10.0]), failed("ddp", "oom", repeat=2), cell("fsdp", 30.0)]
    found = decided(rows)
    assert found.choice.strategy == "fsdp"
    assert "1 of 3 repeats: out of memory" in found.excluded[0][1]


@pytest.mark.parametrize("where", [{"strategy": "ddp"}, {"strategy": "ddp", "gpus": 4}])
def test_nothing_is_recommended_from_an_unusable_cell(where):
    rows = [cell("ddp", 10.0), cell("fsdp", 30.0)]
    found = decided(rows, [finding(**where)])
    assert found.choice.strategy == "fsdp"
    assert "the audit: some-rule (f)" in found.excluded[0][1]
    everything = decided(rows, [finding(experiment="e", model="vgg16")])
    assert everything.choice is None
    assert everything.confidence == "none"
    # A doubt lowers the confidence and no more; what only memory suffers from needs a limit of it.
    assert decided(rows, [finding(severity="warning", **where)]).choice.strategy == "ddp"
    memory = finding(affects="memory", **where)
    assert decided(rows, [memory]).choice.strategy == "ddp"
    assert decided(rows, [memory], gpu_memory_gib=80).choice.strategy == "fsdp"


def test_a_doubt_lowers_the_confidence_and_is_named():
    rows = repeats("ddp", [10.0, 10.2, 10.1]) + repeats("fsdp", [15.0, 15.3, 15.15])
    found = decided(rows, [finding("superlinear", "warning", strategy="ddp")])
    assert found.confidence == "medium"
    assert "Caveats on the choice: superlinear." in " ".join(found.sure)


@pytest.mark.parametrize("severity", ["unusable", "warning"])
def test_memory_that_the_audit_doubts_is_no_reason_for_a_choice(severity):
    rows = repeats("ddp", [100, 101, 100.5])
    rows += repeats("fsdp", [101, 102, 101.5], peak_memory_bytes=100 * MIB)
    place = {"experiment": "e", "model": "vgg16", "strategy": "fsdp", "gpus": 4}
    doubt = finding("some-rule", severity, "memory", **place)
    sound, doubted = decided(rows), decided(rows, [doubt])
    assert sound.headline == "fsdp × 4. As fast as ddp × 4 within 3 %, and needs 900 MiB less."
    assert doubted.headline == "ddp × 4. As fast as fsdp × 4 within 3 %."
    assert not any("less memory" in change for change in doubted.changes)
    alone = decided(rows[3:], [doubt])
    assert "100 MiB per worker (doubted by the audit: some-rule)" in alone.reason
    assert alone.short_answer.memory_note == "doubted by the audit"
    note = decided(rows, [doubt | {"severity": "note"}])
    assert note.headline == sound.headline


def test_a_mean_within_the_deadline_says_that_a_repeat_was_not():
    rows = repeats("ddp", [90, 98, 111]) + repeats("fsdp", [201, 202, 201.5])
    late = decided(rows, deadline_s=100)
    assert "Caveats on the choice: it may take 111 s, over the limit of 100 s." in late.sure
    assert late.confidence == "medium"
    assert not any("may take" in told for told in decided(rows, deadline_s=112).sure)
    # A doubt of the decision's own is not the audit's.
    rows = repeats("ddp", [90, 98, 111]) + repeats("fsdp", [95, 102, 116])
    assert decided(rows, deadline_s=114).confidence != "low"
    found = decided(repeats("ddp", [90] * 3, device_kind="cpu"), gpu_memory_gib=1.0)
    assert "by the audit" not in found.short_answer.reason


def test_elastic_workers_cost_what_their_jobs_held_and_are_compared_if_as_many_were_there():
    held = {"allocated_s": 370.0, "idle_s": 10.0}
    rows = repeats("ddp", [90, 90, 90], **held)
    rows += repeats("ps-async", [200, 200, 200], allocated_s=810.0, idle_s=10.0)
    alike = decided(rows, price_per_gpu_hour=3600.0)
    assert alike.choice.training_cost == pytest.approx(370)
    assert "(0.103 GPU-hours at 3600 each)" in alike.reason
    assert not any("Workers joined and left" in told for told in alike.sure)
    few = [row | {"allocated_s": 410.0} for row in rows[3:]]
    unlike = decided(rows[:3] + few)
    assert unlike.confidence == "low"
    assert unlike.short_answer.reason == "the mean number of workers differs between strategies"
    assert (
        "Workers joined and left, so the mean number of present workers differs: 4 of 4 for ddp, 2 of 4 "
        "for ps-async." in unlike.sure
    )


def test_memory_and_deadline_exclude_and_say_what_would_change():
    rows = [
        cell("ddp", 10.0, peak_memory_bytes=3000 * MIB),
        cell("fsdp", 30.0, peak_memory_bytes=900 * MIB),
    ]
    found = decided(rows, gpu_memory_gib=2)
    assert found.choice.strategy == "fsdp"
    assert "peak 2.93 GiB, over the limit of 2 GiB" in found.excluded[0][1]
    then = "More memory: then ddp on 4 workers would be chosen (10.0 s"
    assert any(c.startswith(then) for c in found.changes)
    then = "then fsdp on 4 workers would be chosen (900 MiB)"
    assert any(then in c for c in decided(rows).changes)
    late = decided(rows, gpu_memory_gib=2, deadline_s=20)
    assert late.choice is None
    assert any(c.startswith("A later deadline: then fsdp") for c in late.changes)


def test_the_memory_of_a_small_network_is_told_in_a_unit_that_shows_it():
    found = decided([cell("ddp", 10.0, peak_memory_bytes=348 << 10, device_kind="cpu")])
    assert "has a peak of 348 KiB per worker above its base." in found.reason


def test_a_price_ranks_by_cost():
    rows = [cell("ddp", 10.0, gpus=4), cell("ddp", 18.0, gpus=2), cell("ddp", 40.0, gpus=1)]
    assert decided(rows).choice.gpus == 4
    cheapest = decided(rows, price_per_gpu_hour=3.6)
    assert cheapest.choice.gpus == 2
    assert cheapest.choice.training_cost == pytest.approx(0.036)
    assert decided(rows, price_per_gpu_hour=3.6, deadline_s=12).choice.gpus == 4


@pytest.mark.parametrize(
    ("leader", "given", "says"),
    [
        ("ps-async", {"price_per_gpu_hour": 3.6}, True),
        ("ps-async", {}, False),
        ("ddp", {"price_per_gpu_hour": 3.6}, False),
    ],
)
def test_a_cost_without_the_servers_says_so(leader, given, says):
    found = decided([cell(leader, 10.0, gpus=4), cell("zero1", 18.0, gpus=4)], **given)
    assert found.choice.strategy == leader
    assert ("excludes the processes of its parameter servers" in found.reason) is says


def test_accuracy_may_be_traded_for_time():
    rows = [cell("ddp", 30.0), cell("ps-async", 10.0, score_final=0.87)]
    found = decided(rows)
    assert found.choice.strategy == "ddp"
    assert any(c.startswith("A worse score allowed: then ps-async") for c in found.changes)
    assert decided(rows, score_tolerance={"accuracy": 3.5}).choice.strategy == "ps-async"
    one, more = (
        list(Constraints(score_tolerance={"accuracy": n}).iter_constraint_texts()) for n in (1, 1.5)
    )
    assert "accuracy at most 1 point worse than the best" in one
    assert "accuracy at most 1.5 points worse than the best" in more


def test_training_that_does_not_work_is_never_recommended():
    rows = [cell("ps-sync", 10.0, score_final=0.2), cell("ddp", 30.0)]
    floor = finding("score-below-floor", "warning", "score", strategy="ps-sync")
    found = decided(rows, [floor], score_tolerance={"accuracy": 100})
    assert found.choice.strategy == "ddp"
    assert not any("ps-sync" in change for change in found.changes)


def test_workers_that_come_and_go_need_a_strategy_that_goes_on():
    rows = [cell("ddp", 10.0), cell("ddp", 38.0, gpus=1), cell("ps-dana", 12.0)]
    found = decided(rows, gang_scheduled=False)
    assert found.choice.strategy == "ps-dana"
    assert standings(found)[("ddp", 4)] == "needs all workers"
    assert standings(found)[("ddp", 1)] == "possible"


def test_unequal_workers_are_answered_by_where_it_turns_round():
    rows = [cell("ddp", 10.0), cell("ps-dana", 13.0)]
    # (4 x 1.3 - 1) / 3 = 1.4: then 10 x 1.4 = 14 = 13 x 4 / (3 + 1 / 1.4).
    (change,) = [c for c in decided(rows).changes if c.startswith("Workers of unequal speed")]
    assert "more than 1.40 times slower" in change
    assert pytest.approx(10 * 1.4) == 13 * 4 / (3 + 1 / 1.4)
    unequal = decided(rows, homogeneous=False)
    # It was asked: it comes first, and what turns the order round is part of the reason.
    assert unequal.short_answer.claim.startswith(
        "There are no results for unequal workers: all measured workers"
    )
    assert unequal.headline.endswith("Among the measured cells: Fastest, in one run each.")
    assert change in unequal.reason
    assert change not in unequal.changes
    assert unequal.confidence == "low"
    slowed = [row | {"slowdown": "rank 0 4 times slower"} for row in rows]
    assert "slowed down on purpose" in " ".join(decided(slowed).sure)
    assert (
        decided(slowed).short_answer.claim
        == "Fastest, in one run each. Condition: rank 0 4 times slower."
    )


def projection(tmp_path, *rows, gpus=256):
    """What a projection.csv says: (strategy, low, middle and high training time, or why there is none).

    `ddp × 8` is ddp on 8 workers and not on `gpus`.
    """
    found = []
    for name, *said in rows:
        strategy, _, count = name.partition(" × ")
        workers = int(count or gpus)
        row = Row("e", "vgg16", strategy, strategy, "strong", "A100", workers, None, "refused")
        if len(said) == 1:
            found.append(replace(row, reason=said[0]))
            continue
        times = dict(zip(("train_low_s", "train_s", "train_high_s"), said, strict=True))
        steps = {name.replace("train", "step"): t / 100 for name, t in times.items()}
        shares = {"efficiency_low": 0.5, "efficiency": 0.6, "efficiency_high": 0.7}
        evidence = "steps measured on 1, 2 and 4 workers, by replay on measured links"
        row = replace(row, kind="projected", evidence=evidence, memory_high_bytes=3 * 2.0**30)
        found.append(replace(row, **times, **steps, **shares))
    write_projection_csv(tmp_path / "projection.csv", found)
    return read_projections_by_strategy(str(tmp_path / "projection.csv"), gpus)


def decided_on(tmp_path, rows, *projected, **constraints):
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    none = pd.DataFrame([], columns=list(AUDIT_COLUMNS))
    made = projection(tmp_path, *projected, gpus=constraints["gpus"])
    (decision,) = decide.make_decisions(
        frame, none, Constraints(**constraints), [ProjectionEvidence(made)]
    )
    return decision


LINES = [cell(s, 40.0 / n, gpus=n) for s in ("ddp", "fsdp", "ps-async") for n in (1, 2, 4)]


def test_a_count_that_was_not_measured_is_projected_with_an_interval_and_its_evidence(tmp_path):
    found = decided_on(
        tmp_path, LINES, ("ddp", 0.5, 0.6, 0.7), ("fsdp", 0.9, 1.0, 1.2),
        ("ps-async", "the servers are full at about 20 workers"), gpus=256,
    )  # fmt: skip
    assert (found.choice.strategy, found.choice.gpus) == ("ddp", 256)
    assert (
        found.headline == "ddp × 256. Fastest by projection; nothing was measured on 256 workers."
    )
    assert "(projected, 80 %: 0.500 to 0.700 s)" in found.reason
    assert "6 ms per global batch (80 %: 5 ms to 7 ms)" in found.reason
    assert (
        "an efficiency of 0.60 (0.50 to 0.70) and a peak memory of up to 3.00 GiB per worker"
        in found.reason
    )
    assert (
        "Evidence: steps measured on 1, 2 and 4 workers, by replay on measured links."
        in found.reason
    )
    assert (
        "There is no projection to 256 GPUs for ps-async (the servers are full at about 20 workers)."
        in found.reason
    )
    assert found.confidence == "low"
    assert found.changes[0].startswith("Training on 256 workers: the measured times")
    row = next(r for r in found.decision_csv_rows if (r["strategy"], r["gpus"]) == ("ddp", 256))
    assert (row["time_low_s"], row["time_s"], row["time_high_s"]) == (0.5, 0.6, 0.7)
    assert found.short_answer.value_note == "0.500–0.700 s (80 %, projected)"


def test_a_projected_choice_tells_the_target_its_cost_and_other_counts(tmp_path):
    made = projection(tmp_path, ("ddp", 0.5, 0.6, 0.7), gpus=8)
    by_count = made[("e", "vgg16", "ddp")]
    by_count[8] = replace(
        by_count[8],
        target_range_s=(40.0, 60.0, 80.0), target_gpu_hours=0.13, target_cost=0.4,
    )  # fmt: skip
    frame = pd.DataFrame(LINES, columns=list(COLUMNS))
    none = pd.DataFrame([], columns=list(AUDIT_COLUMNS))
    told = {("e", "vgg16"): ["From about 23 GPUs on fsdp takes the lead from ddp."]}
    evidence = [ProjectionEvidence(made, told)]
    (found,) = decide.make_decisions(frame, none, Constraints(gpus=8), evidence)
    assert (
        "The target score is reached after 60 s (80 %: 40 s to 80 s), with 0.13 GPU-hours, at a cost of 0.4."
        in found.reason
    )
    assert found.changes[-1].startswith("Another number of workers: From about 23 GPUs on fsdp")
    (measured,) = decide.make_decisions(frame, none, Constraints(gpus=4), evidence)
    assert not any("Another number" in change for change in measured.changes)


def test_fewer_workers_than_there_are_may_be_the_faster_ones(tmp_path):
    more = ("ddp × 16", 0.9, 1.0, 1.1), ("ddp × 8", 0.5, 0.6, 0.7)
    found = decided_on(tmp_path, LINES, ("ddp", 2.0, 3.0, 4.0), *more, gpus=32)
    assert found.headline == "ddp × 8. Fastest by projection; nothing was measured on 8 workers."
    assert "ddp on 16 GPUs takes 1.67 [1.29, 2.20] times as long" in found.reason
    assert found.changes[0].startswith("Training on 8 workers: the measured times")
    assert standings(found)[("ddp", 32)] == "possible"
    # What was asked for and cannot be known comes first.
    reason = "32 is more than 8 times the largest measured count"
    found = decided_on(tmp_path, LINES, ("ddp", reason), *more, gpus=32)
    assert (found.choice.strategy, found.choice.gpus, found.confidence) == ("ddp", 8, "low")
    assert found.short_answer.claim == (
        f"There are no results for 32 GPUs: {reason}. Apart from that: Fastest by projection; nothing was "
        "measured on 8 workers."
    )
    assert f"There is no projection to 32 GPUs for ddp ({reason}); fsdp" in found.reason
    assert decided_on(tmp_path, LINES, *more, gpus=12).choice.gpus == 8


def test_projections_that_overlap_are_not_told_apart(tmp_path):
    found = decided_on(tmp_path, LINES, ("ddp", 0.5, 0.6, 1.1), ("fsdp", 0.9, 1.0, 1.2), gpus=256)
    assert found.headline == (
        "ddp × 256. Not significantly faster than fsdp × 256 by projection; nothing was measured on 256 "
        "workers."
    )
    (other,) = (o for o in found.short_answer.others if o["gpus"] == 256)
    assert other["low"] == pytest.approx(0.9 / 1.1)
    assert other["high"] == pytest.approx(1.2 / 0.5)
    assert found.short_answer.claim.startswith("Not significantly faster than fsdp × 256")


def test_where_nothing_is_projected_the_answer_begins_with_that_and_why(tmp_path):
    reason = "256 is more than 8 times the largest measured count, 4: measure 32 or more"
    refused = [(s, reason) for s in ("ddp", "fsdp", "ps-async")]
    found = decided_on(tmp_path, LINES, *refused, gpus=256)
    assert found.choice.gpus == 4
    assert found.short_answer.claim.startswith(
        f"There are no results for 256 GPUs: {reason}. Among the measured cells: "
    )
    assert "no projection" not in found.reason
    # Without any evidence, as of a bundle; and below what was measured, its memory would be more.
    unknown = "There are no results for 8 GPUs: this number was not measured"
    assert unknown in decided(LINES, gpus=8).headline
    few = decided([c | {"gpus": 2 * c["gpus"]} for c in LINES], gpus=1)
    assert few.choice is None
    measured = decided(LINES, gpus=2)
    assert measured.choice.gpus == 2
    assert standings(measured)[("ddp", 4)] == "needs more workers"


def test_a_measured_choice_is_as_sure_as_its_measured_rivals_let_it_be(tmp_path):
    rows = [
        c for s, t in (("ddp", 10.0), ("fsdp", 20.0)) for c in repeats(s, [t, t * 1.01, t * 0.99])
    ]
    alone = decided(rows)
    found = decided_on(
        tmp_path, rows, ("ddp", 30.0, 40.0, 50.0), ("fsdp", 30.0, 40.0, 50.0), gpus=8
    )
    assert (found.choice.strategy, found.choice.gpus) == ("ddp", 4)
    assert found.confidence == alone.confidence == "high"
    assert "faster than its only rival" in " ".join(found.sure)
    # What fits no memory is not chosen, projected or not.
    small = decided_on(tmp_path, LINES, ("ddp", 0.5, 0.6, 0.7), gpus=256, gpu_memory_gib=2)
    assert standings(small)[("ddp", 256)] == "does not fit"


def test_a_peak_needs_a_reserve_before_it_fits():
    """As the plan's: 10 % on top, for what the driver and a fragmented allocator take."""
    rows = [
        cell("ddp", 10.0, peak_memory_bytes=1900 * MIB),
        cell("fsdp", 30.0, peak_memory_bytes=900 * MIB),
    ]
    found = decided(rows, gpu_memory_gib=2)
    assert found.choice.strategy == "fsdp"
    assert "peak 1.86 GiB plus a reserve of 10 %, over the limit of 2 GiB" in found.excluded[0][1]
    assert decided(rows, gpu_memory_gib=2, memory_margin=0.05).choice.strategy == "ddp"


def test_records_of_cpu_processes_do_not_speak_of_gpus():
    rows = [cell("ddp", 10.0, device_kind="cpu", peak_memory_bytes=5 * MIB)]
    found = decided(rows, gpu_memory_gib=1)
    assert "on this machine, not for GPUs" in " ".join(found.sure)
    assert "whether it fits is not known" in " ".join(found.sure)
    held = decided(rows, gpu_memory_gib=0.1)
    assert held.choice is None
    assert "model states alone 500 MiB" in held.excluded[0][1]


def test_where_nothing_was_measured_the_plan_is_pointed_to():
    found = decided([failed(name, "missing") for name in ("ddp", "fsdp")])
    assert found.choice is None
    assert found.headline == (
        "Nothing can be recommended. No cell was measured: train the cells, or let `plan` estimate their "
        "memory and time."
    )
    assert (found.confidence, found.short_answer.reason) == ("none", "2 of 2 were not measured")
    assert [name for name, _ in found.excluded] == ["ddp", "fsdp"]
    every = decided([failed(name, "error") for name in ("ddp", "fsdp")])
    assert every.headline == "Nothing can be recommended. Every cell failed."


def test_where_all_reached_their_limit_a_longer_one_is_told_as_the_way_on():
    found = decided([failed("ddp", "timeout")])
    assert found.reason.startswith("Every strategy is excluded: ddp: too slow (")
    assert found.changes == (
        "A longer time_limit_s: ddp reached the present limit. Raise the limit, and train again with "
        "--forcerun (docs/configuration.md).",
    )


@pytest.mark.parametrize(
    ("constraints", "told"),
    [
        (
            {"deadline_s": 5},
            "ddp, fsdp: too slow (the nearest, fsdp × 2: 7 s, over the limit of 5 s)",
        ),
        (
            {"gpus": 1},
            "ddp, fsdp: needs more workers (the nearest, fsdp × 2: 2, but 1 are available)",
        ),
        (
            {"gpu_memory_gib": 0.5},
            "ddp, fsdp: does not fit (the nearest, fsdp × 2: peak 600 MiB, over the limit of 512 MiB)",
        ),
    ],
)
def test_of_those_that_a_constraint_keeps_out_the_nearest_is_quoted(constraints, told):
    rows = [cell("ddp", 10.0), cell("fsdp", 7.0, gpus=2, peak_memory_bytes=600 * MIB)]
    found = decided(rows, **constraints)
    assert found.reason.startswith(f"Every strategy is excluded: {told}.")
    assert not found.headline.endswith("Every candidate is excluded.")


def test_the_least_that_is_needed_counts_the_reserve_that_keeps_it_out():
    found = decided([cell("ddp", 10.0)], gpu_memory_gib=1.0)
    assert "peak 0.98 GiB plus a reserve of 10 %, over the limit of 1 GiB" in found.reason
    assert (
        "The lowest need is 1.07 GiB per worker (ddp × 4, including the reserve)." in found.reason
    )


def test_where_every_training_diverged_it_is_said_with_what_steadies_one():
    found = decided([failed("ddp", "diverged"), failed("fsdp", "diverged")])
    assert found.headline == "Nothing can be recommended. Every training diverged."
    assert found.short_answer.reason == "2 of 2 diverged"
    assert "lower lr or set lr_warmup_steps or max_grad_norm" in found.reason
    some = decided([failed("ddp", "diverged"), failed("fsdp", "oom")])
    assert some.headline == "Nothing can be recommended. Every candidate is excluded."


def test_the_papers_own_tables_give_an_answer_one_can_sign():
    cells = published.make_cells_from_paper("v2")
    findings = pd.DataFrame(
        audit.audit_cells(cells, accuracy_floors=published.read_accuracy_floors()),
        columns=list(AUDIT_COLUMNS),
    )
    found = {
        (d.experiment, d.model): d for d in decide.make_decisions(cells, findings, Constraints())
    }
    assert len(found) == 6
    for (experiment, _), decision in found.items():
        assert decision.confidence in ("low", "none")
        if experiment == "ddp-fsdp":
            assert decision.headline == "ddp × 4. Fastest, in one run each."
            assert "Caveats on fsdp on 4 workers: sharding-slow-alone" in " ".join(decision.sure)
            assert "its accuracy was not recorded" in " ".join(decision.sure)
    # Only VGG16 under sync on one GPU trains as it should; the rest of the server's cells do not.
    assert found["server", "vgg16"].choice.strategy == "ps-sync"
    for model in ("resnet50", "densenet121"):
        decision = found["server", model]
        assert decision.choice is None
        assert "async-alone-unlike-sync" in dict(decision.excluded)["ps-async"]
    (note,) = decide.describe_study_findings(findings)
    assert "cannot rank one kind against the other" in note


def test_the_command_writes_the_matrix_and_prints_the_answer(tmp_path, capsys):
    cells = published.make_cells_from_paper("v2")
    cells.to_csv(tmp_path / "cells.csv", index=False)
    audited = ["--cells", str(tmp_path / "cells.csv"), "--out", str(tmp_path / "audit.csv")]
    assert audit.main(audited) == 0
    arguments = ["--cells", str(tmp_path / "cells.csv"), "--audit", str(tmp_path / "audit.csv")]
    arguments += ["--constraints", json.dumps({"gpus": 2}), "--out", str(tmp_path / "d.csv")]
    assert decide.main([*arguments, "--answers-out", str(tmp_path / "answers.json")]) == 0
    said = capsys.readouterr().out
    assert "at most 2 workers" in said
    assert "convnext_large (ddp-fsdp): ddp × 2" in said
    matrix = pd.read_csv(tmp_path / "d.csv")
    assert tuple(matrix.columns) == decide.MATRIX_COLUMNS
    assert len(matrix) == len(cells)
    assert set(matrix.loc[matrix["gpus"] == 4, "status"]) >= {"needs more workers"}
    told = json.loads((tmp_path / "answers.json").read_text())
    assert all(answer["short"]["claim"] in said for answer in told["answers"])


def test_where_nothing_can_be_recommended_it_is_said_why():
    rows = [*repeats("ddp", [9.0]), *repeats("fsdp", [8.0]), failed("ps-sync", "oom")]
    doubts = [
        finding("learns-nothing", strategy=name, model="vgg16", affects="all")
        for name in ("ddp", "fsdp")
    ]
    found = decided(rows, doubts)
    assert found.headline == "Nothing can be recommended. Every candidate is excluded."
    assert found.reason.startswith("Every strategy is excluded: ddp, fsdp: unusable record ")
    assert "(the audit: learns-nothing (f)); ps-sync: does not fit (out of memory)." in found.reason


def test_a_misspelt_model_is_refused_with_those_there_are(tmp_path, capsys):
    rows = [cell("ddp", 10.0), cell("ddp", 9.0, model="resnet50")]
    with pytest.raises(ConfigError, match="is not a model of the study"):
        decided(rows, model="densenet121")  # built in, and not of this study
    with pytest.raises(ConfigError) as refused:
        decided(rows, model="vgg61")
    assert str(refused.value) == (
        "config: decide.model = 'vgg61': is not a model of the study. Did you mean 'vgg16'? "
        "Allowed: vgg16, resnet50."
    )
    pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(tmp_path / "cells.csv", index=False)
    pd.DataFrame(columns=list(AUDIT_COLUMNS)).to_csv(tmp_path / "audit.csv", index=False)
    arguments = ["--cells", f"{tmp_path}/cells.csv", "--audit", f"{tmp_path}/audit.csv"]
    arguments += ["--out", f"{tmp_path}/d.csv", "--answers-out", f"{tmp_path}/a.json"]
    assert decide.main([*arguments, "--constraints", '{"model": "nonsense"}']) == 1
    said = capsys.readouterr()
    assert said.err.startswith("config: decide.model = 'nonsense': is not a model of the study.")
    assert not said.out
    assert not (tmp_path / "d.csv").exists()


def test_the_figures_of_the_choice_come_first_and_those_of_its_rival_in_a_sentence_of_their_own():
    found = decided(
        repeats("ddp", [10.0, 10.2, 10.1]) + repeats("fsdp", [15.0, 15.3, 15.15], gpus=8)
    )
    assert found.reason == (
        "ddp on 4 GPUs trains in 10.1 s, reaches accuracy 90.00 % and has a peak of 1,000 MiB per worker. "
        "fsdp on 8 GPUs takes 1.50 [1.50, 1.50] times as long as the choice (15.1 s)."
    )


def test_what_counts_as_equal_is_told_by_how_much_it_differs():
    times = [10.0, 10.5, 9.8, 10.2, 10.1]
    rows = [r | {"device_kind": "cpu"} for r in repeats("ddp", times)]
    rows += [
        r | {"device_kind": "cpu"} for r in repeats("zero1", [0.98 * t for t in times], gpus=8)
    ]
    found = decided(rows)
    assert (
        "zero1 on 8 CPU processes takes 2 % less than the choice (9.92 s), which counts as equal (margin: "
        "3 %). Among equals, fewer CPU processes and then less memory decide."
    ) in found.reason
    assert "GPU" not in found.reason


def test_costs_have_the_unit_of_their_price_and_equal_ones_are_not_1_times():
    rows = [cell("ddp", 10.0, gpus=4), cell("ddp", 20.001, gpus=2)]
    found = decided(rows, price_per_gpu_hour=2.5)
    price = "ddp on 2 GPUs trains in 20.0 s at a cost of 0.0278 (0.0111 GPU-hours at 2.5 each),"
    assert price in found.reason
    cheap = decided([rows[0], cell("fsdp", 10.004)], price_per_gpu_hour=2.5)
    assert "fsdp on 4 GPUs costs 1.0004 times as much as the choice (" in cheap.reason
    alike = decided([rows[0], cell("fsdp", 10.0)], price_per_gpu_hour=2.5)
    assert "fsdp on 4 GPUs costs exactly as much as the choice (" in alike.reason


def test_what_alone_is_left_says_what_was_excluded_and_why():
    found = decided([cell("ddp", 10.0), failed("fsdp", "oom"), failed("ps-sync", "diverged")])
    assert found.headline == "ddp × 4. The only candidate that is not excluded."
    assert found.reason.endswith(
        "All other candidates are excluded: fsdp: does not fit (out of memory); "
        "ps-sync: worse score (training diverged)."
    )


def test_one_run_is_called_one_whether_it_was_the_fastest_or_near_it():
    near = decided([cell("ddp", 10.0), cell("fsdp", 10.1)])
    assert near.headline == "ddp × 4. Fastest, in one run each."
    fewer = decided([cell("ddp", 10.0), cell("fsdp", 10.1, gpus=2)])
    assert fewer.headline == "fsdp × 2. Within 3 % of the fastest, in one run each."


def test_amounts_that_print_alike_get_a_digit_more():
    held = 12.31 * MIB
    rows = [cell("ddp", 10.0, device_kind="cpu", model_states_bytes=held)]
    found = decided(rows, gpu_memory_gib=0.012, memory_margin=0.0)
    assert "model states alone 12.31 MiB, over the limit of 12.29 MiB" in found.excluded[0][1]
    late = decided([cell("ddp", 1.164)], deadline_s=1)
    assert late.changes == (
        "A later deadline: then ddp on 4 workers would be chosen (1.16 s, over the limit of 1 s).",
    )


def test_more_repeats_are_asked_for_in_numbers():
    noisy = repeats("ddp", [10.0, 10.4, 10.1]) + repeats("fsdp", [10.9, 10.5, 10.8])
    (change,) = [c for c in decided(noisy).changes if c.startswith("More repeats")]
    needed = r"At the measured noise of (.*) %, (\d+) repeats are needed to detect a difference of 10 %\."
    found = re.search(needed, change)
    assert 1.5 < float(found[1]) < 3.5
    assert 4 <= int(found[2]) <= 8


@pytest.mark.parametrize(
    ("planned", "pays"),
    [([3, 3, 3], False), ([2, 2, 3], True), ([5, 5, 5], True), ([None] * 3, True)],
)
def test_intervals_pay_for_looking_again_unless_every_record_planned_as_many(planned, pays):
    """Added after a look, still to come, or not said."""
    rows = [
        row | {"planned_repeats": planned[k % 3]}
        for k, row in enumerate(
            repeats("ddp", [10.0, 10.3, 10.1]) + repeats("fsdp", [15.0, 15.2, 15.4])
        )
    ]
    found = decided(rows)
    assert ("corrects for repeated looks" in " ".join(found.sure)) is pays
    assert found.decision_csv_rows[1]["high"] > 1.52
    other = decided([row | {"planned_repeats": 3} for row in rows])
    assert (found.decision_csv_rows[1]["high"] > other.decision_csv_rows[1]["high"]) is pays


def test_doubts_that_do_not_touch_the_choice_are_left_to_the_audit():
    rows = repeats("ddp", [10.0, 12.0, 11.0]) + repeats("fsdp", [12.0, 10.5, 11.2])
    rows += repeats("zero1", [13.0, 11.0, 12.0])
    doubt = finding("sharding-slow-alone", "warning", strategy="zero1")
    assert "sharding-slow-alone" not in " ".join(decided(rows, [doubt]).sure)
    near = finding("sharding-slow-alone", "warning", strategy="fsdp")
    assert "Caveats on fsdp on 4 workers: sharding-slow-alone." in " ".join(
        decided(rows, [near]).sure
    )


def test_a_number_of_workers_that_nothing_is_known_of_has_no_sure_answer():
    rows = repeats("ddp", [10.0] * 5) + repeats("fsdp", [15.0] * 5)
    assert decided(rows, gpus=4).confidence == "high"
    found = decided(rows, gpus=16)
    assert found.confidence == "low"
    assert found.short_answer.reason == "there are no results for 16 workers"
    assert "There are no results for 16 GPUs" in found.short_answer.claim


def test_what_holds_for_every_decision_is_said_once():
    rows = [
        row | {"device_kind": "cpu", "model": model}
        for model in ("vgg16", "resnet50")
        for row in repeats("ddp", [10.0, 10.1]) + repeats("fsdp", [15.0, 15.3])
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    none = pd.DataFrame(columns=list(AUDIT_COLUMNS))
    found = decide.make_decisions(frame, none, Constraints())
    said = decide.describe_decisions(found, [], Constraints())
    assert said.count("on this machine, not for GPUs") == 1
    assert "For all answers: The answer holds for CPU processes on this machine" in said
    # The answers stand last, and every line has room on a screen.
    last = said.rpartition("\n\n")[2]
    assert last.startswith(
        "Two questions, no sure answer yet: both hold with a condition.\nvgg16 (e): ddp × 4"
    )
    assert "\nresnet50 (e): ddp × 4, 10.0 s." in last
    alone = decide.describe_decisions(found[:1], [], Constraints()).rpartition("\n\n")[2]
    assert alone.startswith(
        "One question, no sure answer yet: it holds with a condition.\nvgg16 (e): "
    )
    assert max(map(len, said.split("\n"))) <= 100


def test_broken_lines_go_on_further_in_and_no_name_is_broken():
    name = "a-path/" * 20
    text = wrap_lines(["  " + "word " * 40, name, ""])
    first, second, *_ = text.split("\n")
    assert first.startswith("  word")
    assert second.startswith("    word")
    assert name in text
    assert text.endswith("\n")

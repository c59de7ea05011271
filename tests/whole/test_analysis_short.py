"""The answer in a few words: the sentence of each case, its figures, the reason for the confidence."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest
from test_analysis_decide import MIB, cell, decided, failed, finding, repeats

from stratbench.analysis.decision.claim import format_percentage
from stratbench.analysis.decision.decide import list_model_names_and_answers
from stratbench.analysis.decision.short import ShortAnswer, format_duration, format_summary_line
from stratbench.analysis.report.answer_rows import compute_ratio_position_px, iter_answer_row_values

NOISE = (1.0, 1.01, 0.99, 1.005, 0.995)


def runs(strategy, time_s, count=5, gpus=4, **other):
    """Repeats of a strategy around a time."""
    return repeats(
        strategy, [time_s * f for f in NOISE[:count]], gpus=gpus, planned_repeats=count, **other
    )


CASES = {
    "a clear winner": (
        [*runs("ddp", 200.0), *runs("zero1", 218.0)],
        "high",
        "Fastest: the next takes 9 % longer.",
        "5 runs on 2 hosts, no doubts",
    ),
    "a tie": (
        [
            *runs("ddp", 200.0, peak_memory_bytes=3000 * MIB),
            *runs("zero1", 201.0, peak_memory_bytes=1000 * MIB),
        ],
        "medium",
        "As fast as ddp × 4 within 3 %, and needs 1.95 GiB less.",
        "equal within 3 %: either will do",
    ),
    "not told apart": (
        [*repeats("ddp", [200.0, 260.0, 180.0]), *repeats("zero1", [230.0, 190.0, 300.0])],
        "low",
        "Not significantly faster than zero1 × 4.",
        "zero1 × 4 may take much less",
    ),
    "one run": (
        [cell("ddp", 200.0), cell("zero1", 218.0)],
        "low",
        "Fastest, in one run each.",
        "one run each: may be chance",
    ),
    "a doubt": (
        [*runs("ddp", 200.0), *runs("zero1", 218.0)],
        "medium",
        "Fastest: the next takes 9 % longer.",
        "doubted by the audit: some-rule",
    ),
    "one host": (
        [*runs("ddp", 200.0, host="a"), *runs("zero1", 218.0, host="a")],
        "medium",
        "Fastest: the next takes 9 % longer.",
        "5 runs on one host",
    ),
    "nothing": (
        [failed("ddp", "oom"), failed("zero1", "oom")],
        "none",
        "No candidate fits into memory.",
        "2 of 2 do not fit",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_its_sentence_and_its_reason(name):
    rows, level, claim, reason = CASES[name]
    findings = (
        [finding(severity="warning", experiment="e", strategy="ddp")] if name == "a doubt" else []
    )
    answer = decided(rows, findings)
    assert (answer.confidence, answer.short_answer.claim, answer.short_answer.reason) == (
        level,
        claim,
        reason,
    )
    assert (answer.choice is None) == (answer.short_answer.strategy is None)


def test_a_score_that_may_be_lost_stands_in_the_claim_and_in_its_cell():
    scores = dict(zip(range(5), (0.90, 0.93, 0.91, 0.94, 0.90), strict=True))
    fast = [r | {"score_final": scores[r["repeat"]]} for r in runs("ps-async", 150.0)]
    steady = [r | {"score_final": 0.92} for r in runs("ddp", 200.0)]
    short = decided([*fast, *steady]).short_answer
    assert short.strategy == "ps-async"
    assert short.claim == "Fastest, but its accuracy may be worse than allowed."
    assert short.score_open
    assert short.score_note.startswith("may lose up to ")
    assert short.score_note.endswith(" points (1 allowed)")
    assert short.score == "91.6 %"


def test_a_time_has_an_interval_from_five_runs_on_and_a_range_below():
    five, three = (
        decided(runs("ddp", 200.0)).short_answer,
        decided(runs("ddp", 200.0, 3)).short_answer,
    )
    logs = np.log(200.0 * np.array(NOISE))
    half = (
        2.7764451 * logs.std(ddof=1) / np.sqrt(5)
    )  # the 97.5 % quantile of t with 4 degrees of freedom
    low, high = np.exp(logs.mean() - half), np.exp(logs.mean() + half)
    assert five.value_note == f"{low:.0f}–{high:.0f} s (95 %)"
    assert three.value_note == "198–202 s in 3 runs"
    assert decided([cell("ddp", 3.5)]).short_answer.value_note == "one run"
    assert [format_duration(s) for s in (0.8123, 12.34, 1870.0, 9000.0)] == [
        "0.812 s", "12.3 s", "1\u2009870 s", "2.5 h",
    ]  # fmt: skip


def test_memory_stands_against_the_card():
    on_card = decided(runs("ddp", 200.0, device_memory_bytes=80 * 2**30)).short_answer
    assert (on_card.memory, on_card.memory_note) == ("0.98 GiB", "of 80 GiB")
    assert on_card.memory_share == pytest.approx(1000 / 81920)
    on_cpu = decided(runs("ddp", 200.0, device_kind="cpu")).short_answer
    assert (on_cpu.memory_note, on_cpu.memory_share) == ("above its base", None)


def test_where_nothing_fits_the_least_need_and_what_to_try_are_said():
    rows = [*runs("ddp", 200.0), *runs("fsdp", 210.0, peak_memory_bytes=600 * 2**20)]
    none = decided(rows, gpu_memory_gib=0.5).short_answer
    assert none.strategy is None
    assert none.remedy.startswith(
        "The lowest need is 660 MiB per worker (fsdp × 4, including the reserve). More workers,"
    )
    assert not decided(rows).short_answer.remedy


def test_a_share_too_small_for_its_digits_is_not_nothing():
    assert [format_percentage(part) for part in (0.0001, 0.004, 0.02, 0.271)] == [
        "less than 0.1 %", "0.4 %", "2 %", "27 %",
    ]  # fmt: skip


def test_with_a_price_the_cheapest_is_said():
    short = decided(
        [*runs("ddp", 200.0), *runs("single", 500.0, gpus=1)], price_per_gpu_hour=2.0
    ).short_answer
    assert short.strategy == "single"
    assert short.claim == "Cheapest: the next costs 60 % more."
    assert short.value_note == "for 500 s"


def test_a_sure_answer_says_by_how_much_and_which_rival_needs_less_memory():
    rows = runs("ddp", 100.0, peak_memory_bytes=10 << 30)
    rows += runs("fsdp", 140.0, peak_memory_bytes=6 << 30)
    decision = decided(rows)
    assert decision.short_answer.runner_up == "fsdp × 4 takes 40 % longer, with 40 % less memory"
    assert decision.short_answer.memory_note.endswith("fsdp × 4: 40 % less")
    assert "ddp × 4 for vgg16 (fsdp × 4 takes 40 % longer, with" in format_summary_line(
        list_model_names_and_answers([decision])
    )
    others = [decision, replace(decision, experiment="other")]
    assert [name for name, _ in list_model_names_and_answers(others)] == [
        "vgg16 in e",
        "vgg16 in other",
    ]


def test_memory_is_weighed_only_against_rivals_that_are_told_apart():
    rows = runs("ddp", 100.0, peak_memory_bytes=10 << 30)
    rows += runs("fsdp", 101.0, peak_memory_bytes=9.9 * 2**30)
    rows += runs("zero1", 140.0, peak_memory_bytes=6 << 30)
    assert decided(rows).short_answer.memory_note == ""


def test_an_answer_on_text_has_tokens_per_second_in_total_and_per_worker():
    text = {
        "throughput_samples_per_s": 10.05,
        "throughput_unit": "tokens",
        "counts_per_sample": 1024,
    }
    decision = decided(runs("ddp", 100.0, **text, mfu=0.384))
    assert decision.short_answer.value_note.endswith(
        "; 10,300 tokens/s (2,570 per worker, MFU 38 %)"
    )
    assert (
        "ddp on 4 GPUs trains in 100.0 s at 10,300 tokens/s (2,570 per worker, MFU 38 %)"
        in decision.reason
    )
    assert "tokens" not in decided(runs("ddp", 100.0, throughput_samples_per_s=10.0)).reason


def test_one_line_says_how_many_answers_are_sure():
    sure, tie = (
        ShortAnswer("ddp", 8, "Fastest.", "sure"),
        ShortAnswer("zero1", 8, "As fast.", "condition"),
    )
    one, none = (
        ShortAnswer("fsdp", 4, "Fastest.", "one run"),
        ShortAnswer(None, None, "None.", "none"),
    )
    lines = [
        format_summary_line([("a", sure), ("b", tie), ("c", one), ("d", none)]),
        format_summary_line([("resnet50", one)]),
        format_summary_line(
            [("a", ShortAnswer("ddp", 2, "Not significantly faster than x.", "apart"))] * 2
        ),
        format_summary_line([("a", tie)] * 3),
        format_summary_line([("a", one), ("b", tie)]),
        format_summary_line([("a", sure)]),
        format_summary_line([("a", sure), ("b", sure), ("c", sure)]),
        format_summary_line([("a", sure), ("b", replace(tie, strategy="ddp")), ("c", sure)]),
    ]
    assert lines == [
        "One answer is sure: ddp × 8 for a. One holds with a condition, one rests on one run of each "
        "cell and one has no strategy to recommend.",
        "One question, no sure answer yet: it rests on one run of each cell.",
        "Two questions, no sure answer yet: both have no significant winner.",
        "Three questions, no sure answer yet (zero1 × 8 in all): all hold with a condition.",
        "Two questions, no sure answer yet. One holds with a condition and one rests on one run of each "
        "cell.",
        "One answer is sure: ddp × 8 for a.",
        "Three answers are sure: ddp × 8 in all.",
        "Two answers are sure: ddp × 8 for a; ddp × 8 for c. One holds with a condition.",
    ]


# ---------------------------------------------------------------- on the page


def row_of(rows, margin=0.03):
    decision = decided(rows)
    answer = {"short": asdict(decision.short_answer), "confidence": decision.confidence}
    bases = {name: name for name in pd.DataFrame(rows)["strategy"]}
    [row] = iter_answer_row_values([answer], bases, margin)
    return row


def test_the_nearest_rival_is_drawn_also_where_it_is_far():
    scale = row_of([*runs("ddp", 100.0), *runs("fsdp", 500.0), *runs("zero1", 700.0)])["scale"]
    assert len(scale["marks"]) == 2  # the choice and the nearest, at the end of the scale
    assert scale["beyond"] == 2
    assert scale["label"].startswith("fsdp × 4: 5.00×")
    assert all(line["to"] <= compute_ratio_position_px(3.0) + 12 for line in scale["lines"])


def test_from_twice_the_time_on_a_factor_is_said():
    said = [
        decided([*runs("ddp", 100.0), *runs("fsdp", t)]).short_answer.claim for t in (190.0, 312.0)
    ]
    assert said[0] == "Fastest: the next takes 90 % longer."
    assert said[1] == "Fastest: the next takes 3.1 times as long."


def test_rivals_stand_at_their_ratios_and_far_ones_are_counted():
    row = row_of([*runs("ddp", 100.0), *runs("zero1", 150.0), *runs("fsdp", 500.0)])
    scale = row["scale"]
    assert scale["beyond"] == 1
    assert scale["label"].startswith("zero1 × 4: 1.50× [1.50–1.50]")
    assert scale["label_x"] == pytest.approx(compute_ratio_position_px(1.5), abs=0.5)
    assert (
        scale["band"]["x"]
        < compute_ratio_position_px(1.0)
        < scale["band"]["x"] + scale["band"]["width"]
    )
    assert row["dots"] == 3
    assert row["families"] == ["replicas", "shards"]


def test_marks_that_would_overlap_are_put_on_lines_of_their_own():
    rows = [
        cell("single", 100.0, gpus=1),
        cell("ddp", 112.0),
        cell("zero1", 113.0),
        cell("fsdp", 114.0),
    ]
    marks = row_of(rows)["scale"]["marks"]
    heights = {m.path.split(",")[1].split("L")[0] for m in marks[:-1]}
    assert len(heights) == 3


def test_an_answer_without_a_rival_has_no_scale():
    assert row_of([cell("ddp", 100.0)])["scale"] is None
    assert row_of([failed("ddp", "oom")])["scale"] is None


def test_where_a_constraint_keeps_faster_ones_out_the_claim_says_of_whom_it_is_the_fastest():
    rows = [*runs("ddp", 200.0), *runs("zero1", 218.0)]
    worse = [r | {"score_final": r["score_final"] - 0.05} for r in runs("ps-async", 100.0)]
    assert decided([*rows, *worse]).short_answer.claim == (
        "Fastest of the candidates with an acceptable accuracy: the next takes 9 % longer."
    )
    large = runs("single", 150.0, peak_memory_bytes=90 * 2**30)
    kept = decided([*rows, *large], gpu_memory_gib=80).short_answer
    assert kept.claim == "Fastest of the candidates with enough memory: the next takes 9 % longer."
    slower = [r | {"train_time_s": 400.0} for r in worse]
    assert decided([*rows, *slower]).short_answer.claim == "Fastest: the next takes 9 % longer."

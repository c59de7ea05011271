"""The answer of `tune`: the winner against the baseline, main effects, the front, and its page."""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode

import numpy as np
import pytest
from browser_fixtures import browser  # noqa: F401
from synthetic_files import Files
from synthetic_paired import World

from stratbench.extensions.tune import answer as answers
from stratbench.extensions.tune.answer import (
    MeasuredCombination,
    TuneAnswer,
    describe_answer,
    estimate_choice_effects,
    read_tune_answer,
)
from stratbench.extensions.tune.page import render_answer_page
from stratbench.extensions.tune.sieves import MEASURED, TOO_SLOW, UNSUPPORTED, FilterResult
from stratbench.extensions.tune.space import Combination

GIB = 1 << 30
ON = {"activation_checkpointing": True}


def measured(
    combination: Combination, step_s: float, memory_gib: float = 1.0, blocks: int = 5
) -> MeasuredCombination:
    """A combination in the first `blocks` of five blocks, which scatter by half a percent."""
    rng = np.random.default_rng([blocks, len(combination.name)])
    steps = step_s * np.exp(rng.normal(0, 0.005, 5))
    known = tuple(float(s) if i < blocks else None for i, s in enumerate(steps))
    return MeasuredCombination(combination, known, int(memory_gib * GIB), "slower")


MEASURED_ONES = (
    measured(Combination("ddp"), 1.0, 8.0),
    measured(Combination("ddp", {}, ON), 1.3, 4.0),
    measured(Combination("fsdp"), 1.1, 5.0),
    measured(Combination("fsdp", {}, ON), 1.4, 3.0),
    measured(Combination("fsdp", {"reshard_after_forward": "never"}), 0.95, 7.0),
    measured(Combination("fsdp", {}, {"gradient_accumulation_steps": 2}), 2.2, 4.5, blocks=1),
    measured(
        Combination("fsdp", {"offload": "cpu"}, {"gradient_accumulation_steps": 2}),
        9.0,
        6.0,
        blocks=1,
    ),
)


def test_an_effect_is_of_pairs_that_differ_in_one_choice():
    effects = {
        (e.choice, e.reference_strategy): e for e in estimate_choice_effects(MEASURED_ONES, "ddp")
    }
    assert set(effects) == {
        ("activation_checkpointing true", ""),
        ("fsdp", "ddp"),
        ("fsdp reshard_after_forward never", ""),
        ("gradient_accumulation_steps 2", ""),
        ("fsdp offload cpu", ""),
    }
    checkpointing = effects["activation_checkpointing true", ""]
    assert (checkpointing.num_pairs, checkpointing.num_blocks) == (2, 5)
    ratio = checkpointing.time_ratio
    assert ratio.value == pytest.approx(math.sqrt(1.3 * 1.4 / 1.1), rel=0.01)
    assert 1 < ratio.high / ratio.low < 1.05
    assert effects["fsdp", "ddp"].num_pairs == 2
    alone = effects["gradient_accumulation_steps 2", ""]
    assert (alone.num_blocks, alone.time_ratio.low) == (1, None)
    assert "one block gives no interval" in answers.describe_effect(alone)


def test_the_front_is_what_no_other_beats_in_time_and_memory():
    answer = TuneAnswer({}, {}, "ddp", MEASURED_ONES, None)
    assert [m.name for m in answer.pareto_front] == [
        "fsdp_reshard-never",
        "fsdp",
        "ddp_checkpointing",
        "fsdp_checkpointing",
    ]


@pytest.fixture
def paired(tmp_path) -> Files:
    """A race that has ended: FSDP is fastest."""
    files = Files(tmp_path, World(steps_s={"ddp": 0.12, "fsdp": 0.1, "zero1": 0.3}, scores={}))
    files.to_the_end()
    assert files.command("tell") == 0
    for strategy, gib in (("ddp", 2), ("fsdp", 1)):
        record = {
            "memory": {"peak_bytes": gib * GIB},
            "cell": {"strategy": strategy},
            "status": "ok",
        }
        path = (
            files.root / "blocks/first/vgg-compact/1gpu/block1/segments" / strategy / "record.json"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
    return files


SIEVED = [
    FilterResult(Combination("ddp"), MEASURED, "fits", 1.0, GIB, device_memory_bytes=8.0 * GIB),
    FilterResult(Combination("fsdp"), MEASURED, "fits", 1.0, GIB),
    FilterResult(Combination("zero1"), MEASURED),
    FilterResult(Combination("tensor"), UNSUPPORTED, "it has no plan"),
    FilterResult(
        Combination("pipeline"), TOO_SLOW, "planned 3.00 times as long as ddp (kept up to 1.20)"
    ),
]


def test_the_answer_is_one_screen(paired):
    answer = read_tune_answer(paired.root.parent, "demo", SIEVED, "ddp")
    lines = list(describe_answer(answer))
    assert lines[0].startswith("fsdp is the fastest of 3 ")
    told = "\n".join(lines)
    assert "The baseline, ddp, takes 1.2" in told
    assert (
        "The fastest combination needs 1.00 GiB of 8.00 GiB per worker: 7.00 GiB are free." in told
    )
    assert "fsdp over ddp: 0.8" in told
    assert len(lines) < 20


def test_without_a_verdict_there_is_no_answer(tmp_path):
    assert read_tune_answer(tmp_path, "demo", SIEVED, "ddp") is None


def test_the_page_says_what_was_measured_and_what_was_not_looked_at(paired):
    html = render_answer_page(
        read_tune_answer(paired.root.parent, "demo", SIEVED, "ddp"), SIEVED, "vgg-compact"
    )
    chart = b64decode(re.search(r"base64,([^\"]+)", html)[1]).decode()
    assert ">ddp<" in chart
    for text in (
        "fsdp is the fastest",
        "7.00 GiB are free",
        "it has no plan",
        "kept up to 1.20",
        "ddp",
    ):
        assert text in html, text


def rich_answer() -> tuple[TuneAnswer, list[FilterResult]]:
    """An answer with the measured combinations from above."""
    ratios = [
        {
            "strategy": m.name,
            "state": "leader" if i == 4 else "slower",
            "ratio": m.mean_step_s / 0.95,
            "low": m.mean_step_s / 0.96,
            "high": m.mean_step_s / 0.94,
            "against": "fsdp_reshard-never",
            "text": f"{m.mean_step_s / 0.95:.3f}",
            "reason": "out of memory" if i == 6 else "",
            "words": "slower",
        }
        for i, m in enumerate(MEASURED_ONES)
    ]
    comparison = {
        "text": "fsdp_reshard-never is the fastest of 7 on node a (95 %).",
        "leader": "fsdp_reshard-never",
        "workers": "8 GPUs",
        "ratios": ratios,
        "strategies": [m.name for m in MEASURED_ONES],
        "blocks": 5,
        "block_gpu_hours": 2.0,
        "at_most": 0.0,
    }
    verdict = {
        "spent_gpu_hours": 2.1,
        "hours": "GPU-hours",
        "done": True,
        "reason": "everything is decided",
    }
    return TuneAnswer(verdict, comparison, "ddp", MEASURED_ONES, 24.0 * GIB), SIEVED


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 420])
def test_the_page_fits_a_screen_and_a_phone(tmp_path, browser, width):  # noqa: F811
    (tmp_path / "index.html").write_text(render_answer_page(*rich_answer(), "gpt-compact"))
    browser.sized(width, 1400)
    browser.complaints.clear()
    browser.open((tmp_path / "index.html").as_uri())
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert 250 < browser.run("document.querySelector('figure img').clientWidth") < width
    assert not browser.complaints

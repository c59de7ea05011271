"""A round of a verdict as the rules run it: its jobs, their resources, and what ends a chain of rounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stratbench.cell.settings import Settings
from stratbench.extensions.verdict.blocks import hash_trained_settings
from stratbench.extensions.verdict.verdict_round import (
    SEGMENT_ALLOWANCE_S,
    Round,
    compute_block_limit_minutes,
    compute_segment_limit_s,
)
from stratbench.study.config.config import load_config
from stratbench.study.config.messages import ConfigError
from stratbench.study.jobs import Jobs

BLOCK = {
    "experiment": "e", "model": "vgg-compact", "dataset": "digits", "gpus": 2, "block": 3,
    "strategies": ["ddp", "ps-async"], "seed": 5,
    "settings": {"steps": 60, "discard": 15, "disagreement": 0.03},
}  # fmt: skip
RUN = {"study": "s", "experiment": "e", "strategy": "ddp", "model": "vgg-compact",
       "dataset": "digits", "gpus": 2, "repeat": 4}  # fmt: skip


def content(**changes: Any) -> dict[str, Any]:
    return {"round": 2, "comparisons": [BLOCK], "full_runs": [RUN], "done": False} | changes


def determine_next_round(
    results: Path,
    said: dict[str, Any] | str,
    is_job: bool = False,
    variants: dict[str, Any] | None = None,
    **changes: Any,
) -> Round:
    """A round of a study whose command says `said`, or fails with that text."""
    variants = variants or {}
    experiment = {
        "dataset": "digits", "strategies": ["ddp", "ps-async", *variants], "models": ["vgg-compact"],
        "gpus": [2], "epochs": 20, "global_batch": 64, "lr": 0.1, "time_limit_s": 1000,
        "device": "cpu", **changes,
    }  # fmt: skip
    raw = {
        "study": "s",
        "results": str(results),
        "cluster": {"mem_mib_per_cpu_worker": 1000},
        "studies": {"s": {"experiments": {"e": experiment}, "variants": variants}},
    }
    config, study = load_config(raw)
    fails = isinstance(said, str)
    code = f"raise SystemExit({said!r})" if fails else f"print({json.dumps(json.dumps(said))})"
    return Round(config, study, Jobs(config, study), [sys.executable, "-c", code], is_job)


def wildcards(block: int) -> dict[str, str]:
    return {"experiment": "e", "model": "vgg-compact", "gpus": "2", "block": str(block)}


def test_a_round_makes_its_blocks_and_whole_trainings(tmp_path):
    found = determine_next_round(tmp_path, content())
    assert [str(Path(p).relative_to(tmp_path)) for p in found.list_files()] == [
        "s/blocks/e/vgg-compact/2gpu/block3/block.json",
        "s/cells/e/ddp/vgg-compact/2gpu/rep4/record.json",  # beyond the repeats of the study
    ]
    plan = found.get_block_plan(wildcards(3))
    assert (plan.order, plan.seed, plan.steps) == (("ddp", "ps-async"), 5, 60)
    assert list(found.get_cell_settings(plan)) == ["ddp", "ps-async"]
    with pytest.raises(
        ConfigError, match="e/vgg-compact/2gpu/block2 is not in the verdict's current round"
    ):
        found.get_block_plan(wildcards(2))


def test_a_block_asks_for_the_most_that_one_of_its_strategies_needs(tmp_path):
    found = determine_next_round(tmp_path, content())
    plan = found.get_block_plan(wildcards(3))
    request = found.make_block_request(plan)
    assert (request.nodes, request.cpus, request.mem_mib) == (1, 3, 3000)  # the server's
    total = 20 * (1437 // 64)
    limit_s = SEGMENT_ALLOWANCE_S + 1000 * 75 / total
    assert found.compute_segment_time_limit_s(plan) == pytest.approx(limit_s, rel=0.05)
    assert request.runtime_min == pytest.approx((3 * limit_s + 600) / 60, abs=1.5)
    assert compute_segment_limit_s(None, 75, total) is None
    assert (
        compute_segment_limit_s(1000, 75, 10) == SEGMENT_ALLOWANCE_S + 1000
    )  # no more than its own
    assert compute_block_limit_minutes(None, 7, {}) == 24 * 60


def test_a_segment_may_take_as_long_as_a_strategy_needs_for_its_own_period(tmp_path):
    """DiLoCo times whole outer steps, PowerSGD begins late: the block's own length is no limit for them."""
    strategies = {"ddp": 75, "slow": 15 + 70, "late": 1100 + 60}
    variants = {
        "slow": {"strategy": "local-sgd", "period": 35},
        "late": {"strategy": "ddp", "compress": "powersgd", "powersgd_start_step": 1100},
    }
    for name, steps in strategies.items():
        found = determine_next_round(
            tmp_path,
            content(comparisons=[BLOCK | {"strategies": ["ddp", name]}]),
            variants=variants,
            epochs=200,
        )
        total = 200 * (1437 // 64)
        limit_s = found.compute_segment_time_limit_s(found.get_block_plan(wildcards(3)))
        assert limit_s == pytest.approx(SEGMENT_ALLOWANCE_S + 1000 * steps / total, abs=5), name


def test_a_verdict_counts_while_strategies_are_trained_as_they_were(tmp_path, capsys):
    path = tmp_path / "s" / "verdict" / "verdict.json"
    assert not determine_next_round(tmp_path, "not asked").has_current_verdict
    path.parent.mkdir(parents=True)
    found = determine_next_round(tmp_path, content())
    settings = Settings(**found.get_cell_settings(found.get_block_plan(wildcards(3)))["ddp"])
    place = {"experiment": "e", "model": "vgg-compact", "gpus": 2}
    trained = {"ddp": hash_trained_settings(settings), "taken-out-since": "0"}
    path.write_text(json.dumps({"comparisons": [place | {"trained": trained}]}))
    assert determine_next_round(tmp_path, "not asked").has_current_verdict
    # A block does not depend on the number of epochs.
    assert determine_next_round(tmp_path, "not asked", epochs=30).has_current_verdict
    assert capsys.readouterr().err == ""
    assert not determine_next_round(tmp_path, "not asked", lr=0.2).has_current_verdict
    assert "verdict.json is not used" in capsys.readouterr().err
    path.write_text("[]")
    assert not determine_next_round(tmp_path, "not asked").has_current_verdict


def test_a_job_of_the_round_reads_what_was_kept(tmp_path):
    with pytest.raises(ConfigError, match=r"round\.json cannot be read: .*snakemake verdict"):
        determine_next_round(tmp_path, "not asked", is_job=True).list_files()
    determine_next_round(tmp_path, content()).write_round_file()
    assert len(determine_next_round(tmp_path, "not asked", is_job=True).list_files()) == 2


def test_a_command_that_fails_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"the next round of the verdict failed:\nno study"):
        determine_next_round(tmp_path, "no study").list_files()


def test_a_round_that_would_be_the_next_again_ends_the_chain(tmp_path):
    first = determine_next_round(tmp_path, content())
    assert len(first.blocks) == 1
    with pytest.raises(ConfigError, match="would repeat this one"):
        first.is_followed_by_round()
    for said, goes_on in ((content(done=True), False), (content(full_runs=[]), True)):
        first._command = determine_next_round(tmp_path, said)._command
        assert first.is_followed_by_round() is goes_on


def test_what_makes_a_block_stale_is_what_is_trained(tmp_path):
    found = determine_next_round(tmp_path, content())
    stated = found.get_settings_in_common(found.get_block_plan(wildcards(3)))["ddp"]
    assert stated["lr"] == 0.1
    assert not {"epochs", "steps", "seed"} & set(stated)


def test_the_command_reads_a_config_that_is_longer_than_a_command_line(tmp_path: Path) -> None:
    few = determine_next_round(tmp_path, content())
    code = "import json, sys; print(json.dumps({'round': len(json.load(sys.stdin)['note'])}))"
    command = [sys.executable, "-c", code]
    config = few.config | {"note": "x" * 200_000}
    many = Round(config, few._study, few._jobs, command, is_job=False)
    assert many.content == {"round": 200_000}

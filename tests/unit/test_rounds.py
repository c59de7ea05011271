"""A round of a verdict as the rules run it: its jobs, their resources, and what ends a chain of rounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stratbench.study.config import load_config
from stratbench.study.jobs import Jobs
from stratbench.study.messages import ConfigError
from stratbench.study.resources import SEGMENT_ALLOWANCE_S, block_min, segment_limit_s
from stratbench.study.rounds import Round

BLOCK = {
    "experiment": "e", "model": "vgg-compact", "dataset": "digits", "gpus": 2, "block": 3,
    "arms": ["ddp", "ps-async"], "seed": 5,
    "settings": {"steps": 60, "discard": 15, "disagreement": 0.03},
}  # fmt: skip
RUN = {"study": "s", "experiment": "e", "strategy": "ddp", "model": "vgg-compact",
       "dataset": "digits", "gpus": 2, "repeat": 4}  # fmt: skip


def content(**changes: Any) -> dict[str, Any]:
    return {"round": 2, "bouts": [BLOCK], "full_runs": [RUN], "done": False} | changes


def round_of(results: Path, said: dict[str, Any] | str, is_job: bool = False) -> Round:
    """A round of a study whose command says `said`, or fails with that text."""
    experiment = {
        "dataset": "digits", "strategies": ["ddp", "ps-async"], "models": ["vgg-compact"],
        "gpus": [2], "epochs": 20, "global_batch": 64, "lr": 0.1, "time_limit_s": 1000,
        "device": "cpu",
    }  # fmt: skip
    raw = {
        "study": "s",
        "results": str(results),
        "cluster": {"mem_mib_per_cpu_worker": 1000},
        "studies": {"s": {"experiments": {"e": experiment}}},
    }
    config, study = load_config(raw)
    fails = isinstance(said, str)
    code = f"raise SystemExit({said!r})" if fails else f"print({json.dumps(json.dumps(said))})"
    return Round(config, study, Jobs(config, study), [sys.executable, "-c", code], is_job)


def wildcards(block: int) -> dict[str, str]:
    return {"experiment": "e", "model": "vgg-compact", "gpus": "2", "block": str(block)}


def test_a_round_makes_its_blocks_and_whole_trainings(tmp_path):
    found = round_of(tmp_path, content())
    assert [str(Path(p).relative_to(tmp_path)) for p in found.files()] == [
        "s/blocks/e/vgg-compact/2gpu/block3/block.json",
        "s/cells/e/ddp/vgg-compact/2gpu/rep4/record.json",  # beyond the repeats of the study
    ]
    plan = found.block_of(wildcards(3))
    assert (plan.order, plan.seed, plan.steps) == (("ddp", "ps-async"), 5, 60)
    assert list(found.settings_of(plan)) == ["ddp", "ps-async"]
    with pytest.raises(ConfigError, match="e/vgg-compact/2gpu/block2 is no block of this round"):
        found.block_of(wildcards(2))


def test_a_block_asks_for_the_most_that_one_of_its_strategies_needs(tmp_path):
    found = round_of(tmp_path, content())
    plan = found.block_of(wildcards(3))
    request = found.request_of(plan)
    assert (request.nodes, request.cpus, request.mem_mib) == (1, 3, 3000)  # the server's
    total = 20 * (1437 // 64)
    limit_s = SEGMENT_ALLOWANCE_S + 1000 * 75 / total
    assert found.limit_s(plan) == pytest.approx(limit_s, rel=0.05)
    assert request.runtime_min == pytest.approx((3 * limit_s + 600) / 60, abs=1.5)
    assert segment_limit_s(None, 75, total) is None
    assert segment_limit_s(1000, 75, 10) == SEGMENT_ALLOWANCE_S + 1000  # no more than its own
    assert block_min(None, 7, {}) == 24 * 60


def test_a_job_of_the_round_reads_what_was_kept(tmp_path):
    with pytest.raises(ConfigError, match=r"round\.json cannot be read: .*snakemake verdict"):
        round_of(tmp_path, "not asked", is_job=True).files()
    round_of(tmp_path, content()).keep()
    assert len(round_of(tmp_path, "not asked", is_job=True).files()) == 2


def test_a_command_that_fails_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"next round of the verdict is unknown:\nno study"):
        round_of(tmp_path, "no study").files()


def test_a_round_that_would_be_the_next_again_ends_the_chain(tmp_path):
    first = round_of(tmp_path, content())
    assert len(first.blocks) == 1
    with pytest.raises(ConfigError, match="would be the next one again"):
        first.goes_on()
    for said, goes_on in ((content(done=True), False), (content(full_runs=[]), True)):
        first._command = round_of(tmp_path, said)._command
        assert first.goes_on() is goes_on


def test_what_makes_a_block_stale_is_what_is_trained(tmp_path):
    found = round_of(tmp_path, content())
    stated = found.trained(found.block_of(wildcards(3)))["ddp"]
    assert stated["lr"] == 0.1
    assert "schedule" not in stated  # a later setting at its default: older blocks do not state it
    assert not {"epochs", "steps", "seed"} & set(stated)

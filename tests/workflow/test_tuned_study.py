"""`tune` by the real Snakemake: sieves, rounds of blocks of what they leave, and the answer."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import yaml
from tiny_study import Workflow, tiny_config

from stratbench.cell.files import read_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
#: How long a step sleeps, so that the best combination is known on a busy machine, too.
SLEEPS = """\
        checkpointing = bool(self.worker.settings.activation_checkpointing)
        __import__("time").sleep(0.06 * ((parts > 1) + checkpointing))
"""
#: A network of two blocks, of which a step takes little.
NETWORK = """
from torch import nn

class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

class Net(nn.Sequential):
    def __init__(self, classes):
        super().__init__(
            nn.Flatten(), nn.Linear(256, 16), Block(), Block(), nn.Linear(16, classes)
        )
"""
FILES = ("--configfile", "config.yaml", "results/tiny/tune/config.yaml")


@pytest.fixture(scope="module")
def tuning(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """A small network on two processes, where accumulation and checkpointing lose: each makes a step sleep.

    Values to try are few: each block trains every combination twice.
    """
    config = tiny_config()
    experiments = config["studies"]["tiny"]["experiments"]
    del experiments["second"]
    experiments["first"] |= {
        "strategies": ["ddp"],
        "models": ["net"],
        "gpus": [2],
        "global_batch": 4,
    }
    config["models"] = {"net": {"call": "network.Net", "wrap_classes": ["Block"]}}
    config["tune"] = {"include": ["ddp"], "keep_within": 100}
    workflow = Workflow(tmp_path_factory.mktemp("tuning"), config)
    (workflow.folder / "network.py").write_text(NETWORK)
    space = "workflow/stratbench/extensions/tune/space.py"
    workflow.change_code(space, '(False, "selective", True)', "(False, True)")
    workflow.change_code("workflow/stratbench/strategies/ddp.py", "tried=[100]", "tried=[]")
    parts = "        parts = self.worker.settings.gradient_accumulation_steps\n"
    workflow.change_code("workflow/stratbench/strategies/collective.py", parts, parts + SLEEPS)
    rules = "workflow/stratbench/extensions/verdict/block_rules.py"
    workflow.change_code(rules, "MAX_STEPS = 50, 300", "MAX_STEPS = 8, 12")
    workflow.change_code(rules, "SHARE_DISCARDED = 15, 0.2", "SHARE_DISCARDED = 2, 0.2")
    workflow.change_code(rules, "MATRIX_REPEATS = 3", "MATRIX_REPEATS = 1")
    race = "workflow/stratbench/extensions/verdict/paired/judging.py"
    workflow.change_code(race, "LOOKS = (1, 2, 3, 4, 5, 6, 8, 10)", "LOOKS = (1, 2)")
    return workflow


def fates(workflow: Workflow) -> dict[str, str]:
    with (workflow.folder / "results/tiny/tune/tune.csv").open(newline="") as file:
        return {row["variant"]: row["fate"] for row in csv.DictReader(file)}


def test_the_known_best_is_found_and_said_on_one_screen_and_a_page(tuning):
    done = tuning.run("tune")
    assert done.returncode == 0, done.stdout
    assert "4 combinations: 0 unsupported, 0 do not fit" in done.stdout
    assert set(fates(tuning).values()) == {"measured"}
    done = tuning.run("verdict", *FILES, "--config", "verdict={rounds: all}")
    assert done.returncode == 0, done.stdout
    done = tuning.run("tune")
    assert done.returncode == 0, done.stdout
    (comparison,) = read_json(tuning.folder / "results/tiny-tune/verdict/verdict.json")[
        "comparisons"
    ]
    assert comparison["leader"] == "ddp"
    slower = {r["strategy"]: r["ratio"] for r in comparison["ratios"] if r["ratio"] is not None}
    assert min(slower["ddp_accumulate-2"], slower["ddp_accumulate-2_checkpointing"]) > 1.1
    told = " ".join(done.stdout.split())
    for choice in ("gradient_accumulation_steps 2", "activation_checkpointing true"):
        assert float(re.search(rf"{choice}: (\d+\.\d+)", told)[1]) > 1.1
    assert "shows all results." in told
    page = (tuning.folder / "results/tiny/tune/index.html").read_text()
    assert "data:image/svg+xml" in page
    assert "accumulate-2" in page


def test_a_budget_leaves_the_slowest_for_later(tuning):
    config = yaml.safe_load(Path(tuning.folder, "config.yaml").read_text())
    tuning.write_config(config | {"tune": config["tune"] | {"budget_gpu_hours": 1e-6}})
    assert tuning.run("tune").returncode == 0
    assert sorted(fates(tuning).values()) == ["beyond the budget"] * 2 + ["measured"] * 2
    tuned = yaml.safe_load((tuning.folder / "results/tiny/tune/config.yaml").read_text())
    assert tuned["verdict"] == {"budget_gpu_hours": 1e-6}

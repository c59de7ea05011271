"""The project's config.yaml: it is valid, the same as text, read without torch, and its demo is small."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import yaml

from stratbench.study import resources
from stratbench.study.config import config, validation, yaml_traps
from stratbench.study.slurm import nodes

ROOT = Path(__file__).parents[2]
#: As `sinfo` prints nodes of 16 cores and 24 GB.
SMALL_NODES = "gpu*|node1|16|24000|gpu:4|infinite\ngpu*|node2|16|24000|gpu:4|infinite\n"


def test_the_projects_own_config_is_valid():
    yaml_traps.check_duplicate_yaml_keys(ROOT / "config.yaml")
    given = yaml.safe_load((ROOT / "config.yaml").read_text())
    for name in given["studies"]:
        _, found = config.load_config(given | {"study": name})
        assert found.cells


def as_text(value: Any) -> Any:
    """What Snakemake makes of a value that is nested in --config: every number becomes text."""
    if isinstance(value, dict):
        return {key: as_text(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_text(inner) for inner in value]
    return value if isinstance(value, str) else json.dumps(value)


def test_a_config_of_text_alone_is_the_same_config():
    given = yaml.safe_load((ROOT / "config.yaml").read_text())
    given["studies"]["demo"].setdefault("variants", {})["v"] = {
        "strategy": "ddp",
        "bucket_cap_mb": 5,
        "gradient_as_bucket_view": False,
    }
    given["datasets"] |= {"mine": {"source": "synthetic", "size": 8}}
    assert validation.validate_config(as_text(given)) == validation.validate_config(given)


def test_the_demo_runs_every_strategy_of_the_paper_and_repeats_what_it_is_to_answer():
    found = yaml.safe_load((ROOT / "config.yaml").read_text())
    cells = config.load_config(found | {"study": "demo"})[1].cells
    assert len(cells) <= 32, "make demo takes three minutes on two cores"
    by_experiment = {name: [c for c in cells if c.experiment == name] for name in
                     dict.fromkeys(c.experiment for c in cells)}  # fmt: skip
    matrix = {(c.strategy, c.gpus) for c in by_experiment["strategies"]}
    names = ["ddp", "fsdp", "ps-sync", "ps-async", "ps-async-modified", "ps-ormo"]
    assert matrix == {("single", 1), *itertools.product(names, (1, 2, 4))}
    repeated = [name for name, of in by_experiment.items() if {c.repeat for c in of} >= {0, 1, 2}]
    assert repeated == ["memory", "straggler"]


def test_the_demo_fits_on_small_nodes():
    """Every cell of the demo, on nodes of 16 cores and 24 GB."""
    raw = yaml.safe_load((ROOT / "config.yaml").read_text())
    configuration, study = config.load_config(raw | {"study": "demo"})
    for cell in study.cells:
        settings = study.settings(cell)
        asked = resources.build_job_request(
            cell, settings, configuration["cluster"], study.time_limit_s(cell)
        )
        assert (
            nodes.explain_oversized_job(cell, settings, asked, nodes.parse_sinfo(SMALL_NODES))
            is None
        )
        assert asked.cpus <= 5

"""The files of a synthetic verdict: a config, blocks and records whose figures are drawn, never measured."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import fixture_records as fixture
from planted import faster
from synthetic_paired import World

from stratbench.cell.coordinates import Cell
from stratbench.extensions.verdict.blocks import BLOCK_PATTERN, remove_length_and_seed
from stratbench.extensions.verdict.paired import __main__ as command
from stratbench.extensions.verdict.paired.evidence import read_evidence
from stratbench.extensions.verdict.paired.next_round import find_next_round
from stratbench.study.config.config import load_config

WORLD = World(
    steps_s={"ddp": 0.1, "fsdp": 0.11, "ps-dana": 0.099, "ps-async": 0.3},
    scores={},  # as the fixture's records have them
    speedup=0.8,
)


class Files:
    """A study's folder that blocks and records are written to as `next` asks for them."""

    def __init__(
        self, folder: Path, world: World = WORLD, device: str = "cuda", **verdict: Any
    ) -> None:
        first = {
            "dataset": "digits", "strategies": list(world.steps_s), "models": ["vgg-compact"],
            "gpus": [1, 2], "epochs": 6, "global_batch": 128, "lr": 0.01, "device": device,
        }  # fmt: skip
        self.world, self.device = world, device
        self.config, self.study = load_config(
            {
                "study": "demo",
                "studies": {"demo": {"experiments": {"first": first}}},
                "results": str(folder),
            }
        )
        self.config["verdict"] = {"rounds": 1, "budget_gpu_hours": None, "margin": 0.03} | verdict
        self.root = folder / "demo"

    def command(self, *args: str) -> int:
        """`python -m stratbench.extensions.verdict.paired`."""
        return command.main([args[0], "--config", json.dumps(self.config), *args[1:]])

    def next_round(self) -> dict[str, Any]:
        """What `next` prints."""
        return find_next_round(read_evidence(self.config)[0]).as_dict()

    def run(self, found: dict[str, Any]) -> None:
        """Write all that a round asks for."""
        for entry in found["comparisons"]:
            self.write_block(entry)
        for coordinates in found["full_runs"]:
            self.write_record(Cell(**coordinates))

    def to_the_end(self) -> int:
        """All rounds; how many there were."""
        for number in range(30):
            found = self.next_round()
            if found["done"]:
                return number
            self.run(found)
        raise AssertionError("the verdict does not end")

    def write_block(self, entry: dict[str, Any]) -> Path:
        """The block.json of an entry of round.json."""
        block = self.world.block(entry)
        place = {key: entry[key] for key in ("experiment", "model", "gpus", "block")}
        cells = {
            strategy: Cell("demo", "first", strategy, entry["model"], "digits", entry["gpus"], 0)
            for strategy in entry["strategies"]
        }
        result = {
            "schema_version": 1, "study": "demo", "dataset": "digits", **place,
            "seed": entry["seed"], "order": entry["strategies"],
            "settings": {"steps": block.timed_steps_per_segment, "discard": 15, "disagreement": None},
            "segments": [segment.as_dict() for segment in block.segments],
            "hosts": list(block.hosts), "device": "cuda" if self.device == "cuda" else "cpu",
            "allocation": None, "started": "", "ended": "", "gpu_seconds": block.gpu_seconds,
            "gpu_names": list(block.gpu_names),
            "trained": {
                strategy: remove_length_and_seed(self.study.settings(c)) for strategy, c in cells.items()
            },
        }  # fmt: skip
        path = self.root / "blocks" / BLOCK_PATTERN.format(**place) / "block.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
        return path

    def record(self, cell: Cell) -> dict[str, Any]:
        """The record of a full run, as long as its steps take."""
        found = fixture.make_record(cell, "ok", self.device)
        settings = self.study.settings(cell)
        wanted_s = self.world.step_s(cell.strategy, cell.gpus) * 390 * 6 * self.world.sustained
        faster(found["time"]["train_time_s"] / wanted_s)(found)
        found["time"]["total_s"] = 14.0 + wanted_s
        started = datetime.fromisoformat(found["provenance"]["started"])
        ended = started + timedelta(seconds=14.0 + wanted_s)
        found["provenance"]["finished"] = ended.isoformat(timespec="seconds")
        found["settings"] = settings.as_dict()
        return found

    def write_record(self, cell: Cell) -> Path:
        """The record of a full run, in its place."""
        path = cell.record_path(self.root.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.record(cell)))
        return path

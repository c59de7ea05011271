"""Blocks: short timed runs (segments) of the strategies of a bout in one allocation, and their files.

A *bout* is what is compared: the strategies of one experiment, model and number of workers. Nothing
here imports anything heavy: the Snakefile uses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.files import read_json
from stratbench.cell.settings import LATER, Settings

#: Path of a block below `blocks/` and `logs/blocks/` of its study.
BLOCK_PATTERN = "{experiment}/{model}/{gpus}gpu/block{block}"
BLOCK_FILE = "block.json"
SCHEMA_VERSION = 1
#: Settings that say how long is trained and from which seed, and not with what.
_LENGTH = ("steps", "epochs", "seed", "profile")


class BlockError(ValueError):
    """A file is not a block's result; the message names it."""


@dataclass(frozen=True)
class BlockPlan:
    """What a block shall run. `order`: the strategies of the first pass; the second is its mirror.

    `steps` and `discard`: steps of a segment that are timed, and that come before; None: they follow
    from its burn-in. Strategies whose two segments differ by more than `disagreement` (natural
    logarithm of the ratio) run a third; None: it follows from the differences of the block.
    """

    study: str
    experiment: str
    model: str
    dataset: str
    gpus: int
    block: int
    order: tuple[str, ...]
    seed: int
    steps: int | None
    discard: int | None
    disagreement: float | None

    @classmethod
    def from_round(cls, study: str, entry: Mapping[str, Any]) -> BlockPlan:
        """The block of an entry of round.json."""
        settings = entry["settings"]
        return cls(
            study=study,
            order=tuple(entry["arms"]),
            steps=settings["steps"],
            discard=settings["discard"],
            disagreement=settings["disagreement"],
            **{
                key: entry[key]
                for key in ("experiment", "model", "dataset", "gpus", "block", "seed")
            },
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BlockPlan:
        """The plan that `as_dict` gave."""
        return cls(**{**values, "order": tuple(values["order"])})

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON-able values."""
        return asdict(self) | {"order": list(self.order)}

    def __str__(self) -> str:
        return f"{self.study}/{self.experiment}: {self.model}, workers: {self.gpus}, block {self.block}"

    @property
    def path(self) -> str:
        """The block's path below `blocks/` and `logs/blocks/` of its study."""
        return BLOCK_PATTERN.format(**vars(self))

    def folder(self, results: str | Path) -> Path:
        """Where the block's results lie below the results folder."""
        return Path(results) / self.study / "blocks" / self.path

    def log_dir(self, results: str | Path) -> Path:
        """Where the logs of its segments and the evidence of a failure lie."""
        return Path(results) / self.study / "logs" / "blocks" / self.path

    def cell(self, strategy: str) -> Cell:
        """The coordinates that the records of a strategy's segments carry: the repeat is the block."""
        return Cell(
            self.study, self.experiment, strategy, self.model, self.dataset, self.gpus, self.block
        )


def segment_settings(settings: Settings, plan: BlockPlan, steps: int) -> Settings:
    """What a segment of a cell with these settings is trained with, for `steps` steps in all."""
    return replace(settings, steps=steps, epochs=None, seed=plan.seed, profile=False)


def trained_with(settings: Settings | Mapping[str, Any]) -> dict[str, Any]:
    """Settings without what a block has of its own: length and seed. For comparisons, older ones too."""
    values = asdict(settings) if isinstance(settings, Settings) else LATER | dict(settings)
    return {key: value for key, value in values.items() if key not in _LENGTH}


def block_files(results: str | Path, study: str) -> list[Path]:
    """The results of all of a study's complete blocks, in the order of their paths."""
    return sorted((Path(results) / study / "blocks").glob(f"*/*/*gpu/block*/{BLOCK_FILE}"))


def read_block(path: str | Path) -> dict[str, Any]:
    """The result of a complete block. Raises BlockError where `path` holds none."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as e:
        raise BlockError(f"{path} cannot be read as a block's result: {e}") from e
    if not isinstance(found, dict) or found.get("schema_version") != SCHEMA_VERSION:
        raise BlockError(f"{path} is no block's result of version {SCHEMA_VERSION}")
    faults = list(_faults(found))
    if faults:
        raise BlockError(f"{path} is not a block's result: {'; '.join(faults[:3])}")
    return found


def _faults(found: Mapping[str, Any]) -> Iterable[str]:
    """What is missing or impossible in a block's result."""
    for key, kind in _FIELDS.items():
        if not isinstance(found.get(key), kind):
            yield f"{key} is {str(found.get(key))[:40]!r}"
    if not isinstance(found.get("segments"), list):
        return
    for n, segment in enumerate(found["segments"]):
        if not isinstance(segment, dict) or segment.get("strategy") not in found["order"]:
            yield f"segments[{n}] is of no strategy of the block"
            continue
        mean_s, ok = segment.get("mean_step_s"), segment.get("status") == "ok"
        sound = isinstance(mean_s, float) and 0 < mean_s < math.inf if ok else mean_s is None
        if not sound:
            yield f"segments[{n}].mean_step_s is {mean_s!r} with status {segment.get('status')!r}"


_FIELDS: dict[str, Any] = {
    "experiment": str, "model": str, "gpus": int, "block": int, "seed": int, "order": list,
    "settings": dict, "segments": list, "hosts": list, "gpu_seconds": (int, float),
    "arithmetic": dict, "servers": dict, "trained": dict,
}  # fmt: skip

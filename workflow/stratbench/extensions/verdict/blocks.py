"""Describes blocks: their plan, result and files. A block times short trainings of several strategies.

A *comparison* is the set of strategies of one experiment, model and number of workers. This module imports no
large package, because the Snakefile uses it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from stratbench.cell import software_gpu
from stratbench.cell.coordinates import Cell
from stratbench.cell.files import read_json
from stratbench.cell.settings import Settings
from stratbench.extensions.verdict.block_rules import compute_block_log_step_time

#: Path of a block below `blocks/` and `logs/blocks/` of its study.
BLOCK_PATTERN = "{experiment}/{model}/{gpus}gpu/block{block}"
BLOCK_FILE = "block.json"
SCHEMA_VERSION = 1
#: Version of verdict.json.
VERDICT_VERSION = 4
#: Passes of a block, in order. The burn-in is one segment that does not count. In `first` and `mirror` each
#: strategy runs a segment, in `mirror` in reverse order. In `third`, strategies run again whose two segments
#: disagree.
PASSES = BURN_IN, FIRST, MIRROR, THIRD = "burn-in", "first", "mirror", "third"
#: Settings in which a segment may differ from the full run: length, seed and profiler.
_SETTINGS_THAT_DIFFER = ("steps", "epochs", "seed", "profile")


class BlockError(ValueError):
    """A file is no valid block.json. The message names the file and the fault."""


@dataclass(frozen=True)
class BlockPlan:
    """Plan of a block: the strategies to run, and the length of their segments.

    Attributes:
        block: Number of the block in its comparison, from 1.
        order: Strategies in the order of the first pass; the second pass has the reverse order.
        seed: Seed of all segments.
        steps: Timed steps per segment; None if the burn-in segment determines their number.
        discarded_steps: Steps before the timed ones; None if the burn-in segment determines their number.
        disagreement_limit: Log time ratio of a strategy's two segments above which it runs a third one; None
            if the segments of this block determine the limit.
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
    discarded_steps: int | None
    disagreement_limit: float | None

    @classmethod
    def from_round_entry(cls, study: str, entry: Mapping[str, Any]) -> BlockPlan:
        """Make the plan of a block from the block's entry in round.json."""
        settings = entry["settings"]
        return cls(
            study=study,
            order=tuple(entry["strategies"]),
            steps=settings["steps"],
            discarded_steps=settings["discard"],
            disagreement_limit=settings["disagreement"],
            **{
                key: entry[key]
                for key in ("experiment", "model", "dataset", "gpus", "block", "seed")
            },
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BlockPlan:
        """Make a plan from the values that `as_dict` returned."""
        return cls(**{**values, "order": tuple(values["order"])})

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as a dict that JSON can store."""
        return asdict(self) | {"order": list(self.order)}

    def __str__(self) -> str:
        return f"{self.study}/{self.experiment}: {self.model}, workers: {self.gpus}, block {self.block}"

    @property
    def relative_path(self) -> str:
        """Path of the block below `blocks/` and `logs/blocks/` of its study."""
        return BLOCK_PATTERN.format(**vars(self))

    def get_result_folder(self, results: str | Path) -> Path:
        """Return the folder of the block's results, below the folder of all results."""
        return Path(results) / self.study / "blocks" / self.relative_path

    def get_log_folder(self, results: str | Path) -> Path:
        """Return the folder for logs of the block's segments, below the folder `results`."""
        return Path(results) / self.study / "logs" / "blocks" / self.relative_path

    def make_segment_cell(self, strategy: str) -> Cell:
        """Return the cell that the records of a strategy's segments name.

        Its repeat is the number of the block.
        """
        return Cell(
            self.study, self.experiment, strategy, self.model, self.dataset, self.gpus, self.block
        )


def make_segment_settings(settings: Settings, plan: BlockPlan, segment_steps: int) -> Settings:
    """Return a segment's settings, made from the settings of the cell's full run.

    Args:
        settings: Settings of the full run.
        plan: Plan of the block.
        segment_steps: Number of steps, including the discarded ones.
    """
    return replace(settings, steps=segment_steps, epochs=None, seed=plan.seed, profile=False)


def remove_length_and_seed(settings: Settings | Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a cell that are equal in segments and full runs."""
    values = settings.as_dict() if isinstance(settings, Settings) else settings
    return {key: value for key, value in values.items() if key not in _SETTINGS_THAT_DIFFER}


def hash_trained_settings(settings: Settings | Mapping[str, Any]) -> str:
    """Return a short hash of the settings that are equal in segments and full runs."""
    text = json.dumps(remove_length_and_seed(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, order=True)
class ComparisonKey:
    """Identity of a comparison: its experiment, model and number of workers."""

    experiment: str
    model: str
    gpus: int

    @classmethod
    def from_cell(cls, cell: Mapping[str, Any] | Cell) -> ComparisonKey:
        """Return the key of a cell's comparison."""
        values = vars(cell) if isinstance(cell, Cell) else cell
        return cls(values["experiment"], values["model"], values["gpus"])

    def __str__(self) -> str:
        return f"{self.experiment}, {self.model} on {self.gpus}"


@dataclass(frozen=True)
class Segment:
    """Result of a segment, one short training in a block.

    Attributes:
        slot: Position of the segment in its block, from 0.
        pass_name: Pass of the block, one of PASSES.
        status: Status of the segment's record, such as `ok` or `oom`.
        mean_step_s: Mean seconds of a timed step; None unless the status is `ok`.
        step_cv: Standard deviation of the timed steps, divided by their mean; None unless the status is `ok`.
        record: Path of the segment's record, relative to the folder of the block.
        start_s: Seconds of the segment outside its training steps, such as the start of its processes.
        wall_s: Seconds of the whole segment.
    """

    slot: int
    pass_name: str
    strategy: str
    status: str
    mean_step_s: float | None
    step_cv: float | None
    record: str | None
    start_s: float
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of the segment in block.json."""
        return {"pass" if key == "pass_name" else key: value for key, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Segment:
        """Make a segment from the values that `as_dict` returned."""
        return cls(**{"pass_name" if key == "pass" else key: v for key, v in values.items()})


@dataclass(frozen=True)
class PairedBlock:
    """Result of a complete block: the segments of all strategies."""

    comparison_key: ComparisonKey
    block_number: int
    #: Number of timed steps per segment, without the discarded ones.
    timed_steps_per_segment: int
    segments: tuple[Segment, ...]
    hosts: tuple[str, ...]
    #: Kind of device: `cuda` or `cpu`.
    device_kind: str
    gpu_seconds: float
    #: Hash of each strategy's settings, from `hash_trained_settings`.
    settings_hashes: Mapping[str, str] = field(default_factory=dict)
    #: Names of the block's GPUs; empty on CPUs, and if no worker reported them.
    gpu_names: tuple[str, ...] = ()

    def list_counted_segments(self, strategy: str) -> list[Segment]:
        """Return the segments of a strategy without the burn-in, in the order of PASSES."""
        counting = [s for s in self.segments if s.strategy == strategy and s.pass_name != BURN_IN]
        return sorted(counting, key=lambda s: PASSES.index(s.pass_name))

    def list_segment_log_step_times(self, strategy: str) -> list[float]:
        """Return the logarithm of the mean step time of each segment of a strategy.

        The list is empty if a segment failed.
        """
        segments = self.list_counted_segments(strategy)
        if len(segments) < 2 or any(s.status != "ok" for s in segments):
            return []
        return [math.log(s.mean_step_s) for s in segments]

    def compute_log_step_time(self, strategy: str) -> float:
        """Return the logarithm of a strategy's step time in this block. NaN after a failure."""
        logs = self.list_segment_log_step_times(strategy)
        return compute_block_log_step_time(logs) if logs else math.nan

    def find_failure_status(self, strategy: str) -> str | None:
        """Return the status of a strategy's first failed segment, or None if no segment failed."""
        bad = (s.status for s in self.segments if s.strategy == strategy and s.status != "ok")
        return next(bad, None)


def list_block_files(results: str | Path, study: str) -> list[Path]:
    """Return the paths of the block.json files of a study's complete blocks, sorted."""
    return sorted((Path(results) / study / "blocks").glob(f"*/*/*gpu/block*/{BLOCK_FILE}"))


def read_block(path: str | Path) -> PairedBlock:
    """Read the result of a complete block from its block.json.

    Raises:
        BlockError: The file is no valid block.json.
    """
    try:
        result = read_json(path)
    except (OSError, ValueError) as e:
        raise BlockError(f"{path} cannot be read: {e}") from e
    if not isinstance(result, dict) or result.get("schema_version") != SCHEMA_VERSION:
        raise BlockError(f"{path} is not a block.json of schema version {SCHEMA_VERSION}")
    if result.get("software_gpu"):
        raise BlockError(f"{path} was {software_gpu.WHY}")
    if faults := list(_iter_block_faults(result)):
        raise BlockError(f"{path} has invalid values: {'; '.join(faults[:3])}")
    return PairedBlock(
        comparison_key=ComparisonKey.from_cell(result),
        block_number=result["block"],
        timed_steps_per_segment=result["settings"]["steps"],
        segments=tuple(map(Segment.from_dict, result["segments"])),
        hosts=tuple(sorted(result["hosts"])),
        device_kind=result["device"],
        gpu_seconds=result["gpu_seconds"],
        settings_hashes={name: hash_trained_settings(s) for name, s in result["trained"].items()},
        gpu_names=tuple(sorted(result["gpu_names"])),
    )


def _iter_block_faults(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each value that is missing or impossible in a block's result."""
    for key, kind in _FIELDS.items():
        if not isinstance(result.get(key), kind):
            yield f"{key} is {str(result.get(key))[:40]!r}"
            return
    if not isinstance(steps := result["settings"].get("steps"), int):
        yield f"settings.steps is {str(steps)[:40]!r}"
        return
    for name in result["order"]:
        if not isinstance(result["trained"].get(name), dict):
            yield f"trained has no settings of {str(name)[:40]!r}"
    for n, values in enumerate(result["segments"]):
        try:
            segment = Segment.from_dict(values)
        except (AttributeError, TypeError) as e:
            yield f"segments[{n}] is not a valid segment ({e})"
            continue
        if segment.strategy not in result["order"] or segment.pass_name not in PASSES:
            yield f"segments[{n}] has a strategy or pass that the block does not have"
        mean_s, ok = segment.mean_step_s, segment.status == "ok"
        if not (isinstance(mean_s, float) and 0 < mean_s < math.inf if ok else mean_s is None):
            yield f"segments[{n}].mean_step_s is {mean_s!r} with status {segment.status!r}"
        elif ok and segment.pass_name != BURN_IN and steps * mean_s > segment.wall_s:
            yield (
                f"segments[{n}]: {steps} steps of {mean_s:.4g} s are more than the {segment.wall_s:.4g} s "
                "of the whole segment"
            )


_FIELDS: dict[str, Any] = {
    "experiment": str, "model": str, "gpus": int, "block": int, "order": list, "settings": dict,
    "segments": list, "hosts": list, "device": str, "gpu_seconds": (int, float), "trained": dict,
    "gpu_names": list,
}  # fmt: skip


def add_verdict_digest(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Return verdict.json's content with a key `digest`, the SHA-256 of all other values.

    The digest shows an accidental change, such as by an editor. It does not prevent forgery, because anyone
    can compute it again.
    """
    return {**verdict, "digest": compute_verdict_digest(verdict)}


def compute_verdict_digest(verdict: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the content of verdict.json, without its digest."""
    content = {key: value for key, value in verdict.items() if key != "digest"}
    # JSON has only lists, so a tuple has the same digest as the list that is read from the file.
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def find_distrust_reason(verdict: Mapping[str, Any], path: str | Path) -> str | None:
    """Return the reason not to trust the verdict.json at `path`, or None.

    A verdict is not trusted if it was changed, or if its step times differ from those in its blocks. The
    blocks are checked if they are next to the file.
    """
    if verdict.get("digest") != compute_verdict_digest(verdict):
        return "its content was changed after it was written"
    folder = Path(path).parents[1] / "blocks"
    for comparison in verdict["comparisons"] if folder.is_dir() else ():
        for number in range(1, comparison["blocks"] + 1):
            block = folder / BLOCK_PATTERN.format(**{**comparison, "block": number}) / BLOCK_FILE
            try:
                result = read_block(block)
            except BlockError as e:
                return f"a block that it is based on has changed: {e}"
            for strategy, times in comparison["step_s"].items():
                log = result.compute_log_step_time(strategy)
                now, then = math.exp(log) if math.isfinite(log) else None, times[number - 1]
                if (now is None) != (then is None) or (now and abs(now / then - 1) > 1e-9):
                    return f"{block} has another step time of {strategy}"
    return None

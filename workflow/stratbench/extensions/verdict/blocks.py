"""Blocks: short timed runs (segments) of the strategies of a comparison in one allocation, and their files.

A *comparison* is what is compared: the strategies of one experiment, model and number of workers. Nothing
here imports anything heavy: the Snakefile uses it.
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
from stratbench.extensions.verdict.block_rules import value_of_segments

#: Path of a block below `blocks/` and `logs/blocks/` of its study.
BLOCK_PATTERN = "{experiment}/{model}/{gpus}gpu/block{block}"
BLOCK_FILE = "block.json"
SCHEMA_VERSION = 1
#: Version of verdict.json.
VERDICT_VERSION = 4
#: The passes of a block: a segment that does not count, each strategy twice, and once more where the two
#: disagree.
PASSES = BURN_IN, FIRST, MIRROR, THIRD = "burn-in", "first", "mirror", "third"
#: Settings that say how long is trained and from which seed, and not with what.
_LENGTH = ("steps", "epochs", "seed", "profile")


class BlockError(ValueError):
    """A file is not a block's result; the message names it."""


@dataclass(frozen=True)
class BlockPlan:
    """The segments that a block runs.

    `order`: the strategies of the first pass; the second is its mirror.

    `steps` and `discard`: steps of a segment that are timed, and that come before, or None if they follow
    from its burn-in. A strategy runs a third segment if its first two differ by more than `disagreement`
    (natural logarithm of the ratio). If that is None, the limit follows from the block's differences.
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
        """Return the block of an entry of round.json."""
        settings = entry["settings"]
        return cls(
            study=study,
            order=tuple(entry["strategies"]),
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
        """Return the plan that `as_dict` gave."""
        return cls(**{**values, "order": tuple(values["order"])})

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-able values."""
        return asdict(self) | {"order": list(self.order)}

    def __str__(self) -> str:
        return f"{self.study}/{self.experiment}: {self.model}, workers: {self.gpus}, block {self.block}"

    @property
    def path(self) -> str:
        """The block's path below `blocks/` and `logs/blocks/` of its study."""
        return BLOCK_PATTERN.format(**vars(self))

    def folder(self, results: str | Path) -> Path:
        """Return the folder of the block's results below the results folder."""
        return Path(results) / self.study / "blocks" / self.path

    def log_dir(self, results: str | Path) -> Path:
        """Return the folder of the logs of its segments and the evidence of a failure."""
        return Path(results) / self.study / "logs" / "blocks" / self.path

    def cell(self, strategy: str) -> Cell:
        """Return the coordinates in the records of a strategy's segments, with the block as repeat."""
        return Cell(
            self.study, self.experiment, strategy, self.model, self.dataset, self.gpus, self.block
        )


def segment_settings(settings: Settings, plan: BlockPlan, steps: int) -> Settings:
    """Return the settings of a segment of a cell with these settings.

    Args:
        settings: Settings of the full cell.
        plan: The block.
        steps: Number of steps, discarded ones included.
    """
    return replace(settings, steps=steps, epochs=None, seed=plan.seed, profile=False)


def trained_with(settings: Settings | Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without what a block has of its own: length and seed."""
    values = settings.as_dict() if isinstance(settings, Settings) else settings
    return {key: value for key, value in values.items() if key not in _LENGTH}


def trained_digest(settings: Settings | Mapping[str, Any]) -> str:
    """Return a short digest of `trained_with`, the same for equal settings."""
    text = json.dumps(trained_with(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------- results


@dataclass(frozen=True, order=True)
class ComparisonKey:
    """Identity of a comparison: its experiment, model and number of workers."""

    experiment: str
    model: str
    gpus: int

    @classmethod
    def of(cls, cell: Mapping[str, Any] | Cell) -> ComparisonKey:
        """Return the comparison of a cell, or of its coordinates."""
        values = vars(cell) if isinstance(cell, Cell) else cell
        return cls(values["experiment"], values["model"], values["gpus"])

    def __str__(self) -> str:
        return f"{self.experiment}, {self.model} on {self.gpus}"


@dataclass(frozen=True)
class Segment:
    """Result of a segment.

    Times are in seconds.

    `mean_step_s`, and `step_cv` (the standard deviation of a step's time over its mean) are None unless it
    ended well. `start_s` is all of `wall_s` but the steps.
    """

    slot: int
    in_pass: str
    strategy: str
    status: str
    mean_step_s: float | None
    step_cv: float | None
    record: str | None
    start_s: float
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of block.json."""
        return {"pass" if key == "in_pass" else key: value for key, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Segment:
        """Return the segment that `as_dict` gave."""
        return cls(**{"in_pass" if key == "pass" else key: v for key, v in values.items()})


@dataclass(frozen=True)
class PairedBlock:
    """The result of a complete block."""

    place: ComparisonKey
    number: int
    #: Timed steps of a segment, without the discarded ones.
    steps: int
    segments: tuple[Segment, ...]
    hosts: tuple[str, ...]
    #: `cuda` or `cpu`.
    device: str
    gpu_seconds: float
    #: Digest of each strategy's settings, as `trained_digest` returns it.
    trained: Mapping[str, str] = field(default_factory=dict)
    #: Names of its GPUs; empty for CPU processes, and if no worker reported them.
    gpu_names: tuple[str, ...] = ()

    def of(self, strategy: str) -> list[Segment]:
        """Return a strategy's segments that count, in the order first, mirror, third."""
        counting = [s for s in self.segments if s.strategy == strategy and s.in_pass != BURN_IN]
        return sorted(counting, key=lambda s: PASSES.index(s.in_pass))

    def logs(self, strategy: str) -> list[float]:
        """Return logarithms of a strategy's step times, by segment.

        Empty unless all of them ended well.
        """
        segments = self.of(strategy)
        if len(segments) < 2 or any(s.status != "ok" for s in segments):
            return []
        return [math.log(s.mean_step_s) for s in segments]

    def value(self, strategy: str) -> float:
        """Return the logarithm of a strategy's seconds per step.

        Return NaN where it did not end well.
        """
        logs = self.logs(strategy)
        return value_of_segments(logs) if logs else math.nan

    def status(self, strategy: str) -> str | None:
        """Return how the strategy's first segment that failed ended, or None if all ended well."""
        bad = (s.status for s in self.segments if s.strategy == strategy and s.status != "ok")
        return next(bad, None)


def block_files(results: str | Path, study: str) -> list[Path]:
    """Return the results of all of a study's complete blocks, in the order of their paths."""
    return sorted((Path(results) / study / "blocks").glob(f"*/*/*gpu/block*/{BLOCK_FILE}"))


def read_block(path: str | Path) -> PairedBlock:
    """Return the result of a complete block. Raises BlockError where `path` holds none."""
    try:
        result = read_json(path)
    except (OSError, ValueError) as e:
        raise BlockError(f"{path} cannot be read as a block's result: {e}") from e
    if not isinstance(result, dict) or result.get("schema_version") != SCHEMA_VERSION:
        raise BlockError(f"{path} is no block's result of version {SCHEMA_VERSION}")
    if result.get("software_gpu"):
        raise BlockError(f"{path} was {software_gpu.WHY}")
    if faults := list(_faults(result)):
        raise BlockError(f"{path} is not a block's result: {'; '.join(faults[:3])}")
    return PairedBlock(
        place=ComparisonKey.of(result),
        number=result["block"],
        steps=result["settings"]["steps"],
        segments=tuple(map(Segment.from_dict, result["segments"])),
        hosts=tuple(sorted(result["hosts"])),
        device=result["device"],
        gpu_seconds=result["gpu_seconds"],
        trained={name: trained_digest(s) for name, s in result["trained"].items()},
        gpu_names=tuple(sorted(result["gpu_names"])),
    )


def _faults(result: Mapping[str, Any]) -> Iterator[str]:
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
            yield f"trained does not say with what {str(name)[:40]!r} was"
    for n, values in enumerate(result["segments"]):
        try:
            segment = Segment.from_dict(values)
        except (AttributeError, TypeError) as e:
            yield f"segments[{n}] is no segment ({e})"
            continue
        if segment.strategy not in result["order"] or segment.in_pass not in PASSES:
            yield f"segments[{n}] is of no strategy or pass of the block"
        mean_s, ok = segment.mean_step_s, segment.status == "ok"
        if not (isinstance(mean_s, float) and 0 < mean_s < math.inf if ok else mean_s is None):
            yield f"segments[{n}].mean_step_s is {mean_s!r} with status {segment.status!r}"
        elif ok and segment.in_pass != BURN_IN and steps * mean_s > segment.wall_s:
            yield (
                f"segments[{n}]: {steps} steps of {mean_s:.4g} s are more than the {segment.wall_s:.4g} s "
                "that it took in all"
            )


_FIELDS: dict[str, Any] = {
    "experiment": str, "model": str, "gpus": int, "block": int, "order": list, "settings": dict,
    "segments": list, "hosts": list, "device": str, "gpu_seconds": (int, float), "trained": dict,
    "gpu_names": list,
}  # fmt: skip


# --- the seal of verdict.json ---------------------------------------------------------------------


def with_seal(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of verdict.json with the digest of everything else in it.

    The digest shows an accidental change by an editor or a merge. It does not prevent forgery: the digest can
    be computed again by anyone.
    """
    return {**verdict, "digest": digest_of(verdict)}


def digest_of(verdict: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a verdict's content but for its digest, whatever the order of keys."""
    content = {key: value for key, value in verdict.items() if key != "digest"}
    # As it comes back from a file: tuples are lists there.
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def why_broken(verdict: Mapping[str, Any], path: str | Path) -> str | None:
    """Return why the content of the verdict.json at `path` is not valid.

    Return None if it is.

    Step times are computed again from the blocks next to the file, if these exist.
    """
    if verdict.get("digest") != digest_of(verdict):
        return "it has been changed since it was written"
    folder = Path(path).parents[1] / "blocks"
    for comparison in verdict["comparisons"] if folder.is_dir() else ():
        for number in range(1, comparison["blocks"] + 1):
            block = folder / BLOCK_PATTERN.format(**{**comparison, "block": number}) / BLOCK_FILE
            try:
                result = read_block(block)
            except BlockError as e:
                return f"it rests on a block that is not there as it was: {e}"
            for strategy, times in comparison["step_s"].items():
                log = result.value(strategy)
                now, then = math.exp(log) if math.isfinite(log) else None, times[number - 1]
                if (now is None) != (then is None) or (now and abs(now / then - 1) > 1e-9):
                    return f"{block} says something else of {strategy}"
    return None

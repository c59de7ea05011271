"""The evidence of a study: its bouts, the complete blocks and the full runs that there are."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratbench.cell import record
from stratbench.cell.blocks import block_files, read_block, trained_with
from stratbench.cell.coordinates import Cell
from stratbench.cell.segments import value_of_segments
from stratbench.cell.settings import LATER
from stratbench.strategies import strategy_class, traits_of
from stratbench.strategies.base import Traits
from stratbench.study.config import Study
from stratbench.study.jobs import Jobs
from stratbench.workload.models import MODELS

#: Repeats that a leader's score may be measured in, those of the matrix that a verdict saves.
SEEDS = MATRIX_REPEATS = 3


@dataclass(frozen=True, order=True)
class Place:
    """Which bout: its experiment, model and number of workers."""

    experiment: str
    model: str
    gpus: int

    def __str__(self) -> str:
        return f"{self.experiment}, {self.model} on {self.gpus}"


@dataclass(frozen=True)
class Bout:
    """What competes: the strategies of an experiment, model and number of workers."""

    place: Place
    dataset: str
    arms: tuple[str, ...]
    served: tuple[bool, ...]
    #: Whether an arm's arithmetic equals DDP's.
    equal: tuple[bool, ...]
    #: Arms of equal arithmetic share their score with those of other bouts that have the same key.
    arithmetic: tuple[Any, ...]
    #: What is true of each arm, as its strategy says it.
    traits: tuple[Traits, ...] = ()
    #: Steps of a full cell; None: not known before the data are read.
    full_steps: int | None = None
    #: Whether full cells are evaluated.
    scored: bool = True


@dataclass(frozen=True)
class Segment:
    """A segment of a block; `step_s`: mean time of its steps, None where it did not end well."""

    strategy: str
    slot: int
    passed: str
    status: str
    step_s: float | None
    start_s: float | None = None
    wall_s: float | None = None
    step_cv: float | None = None


@dataclass(frozen=True)
class Block:
    """A complete block."""

    place: Place
    number: int
    steps: int
    segments: tuple[Segment, ...]
    hosts: tuple[str, ...]
    allocation: str | None
    gpu_seconds: float
    device: str = "cuda"

    def of(self, strategy: str) -> list[Segment]:
        """An arm's segments that count, in the order first, mirror, third."""
        ordered = ("first", "mirror", "third")
        found = [s for s in self.segments if s.strategy == strategy and s.passed in ordered]
        return sorted(found, key=lambda s: ordered.index(s.passed))

    def logs(self, strategy: str) -> list[float]:
        """Logarithms of an arm's step times, by segment; empty unless all of them ended well."""
        found = self.of(strategy)
        if len(found) < 2 or any(s.status != "ok" or not s.step_s for s in found):
            return []
        return [math.log(s.step_s) for s in found]

    def value(self, strategy: str) -> float:
        """The arm's value, the logarithm of its seconds a step; NaN where it did not end well."""
        logs = self.logs(strategy)
        return value_of_segments(logs) if logs else math.nan

    def status(self, strategy: str) -> str | None:
        """How the arm's first segment that did not end well ended; None: all did."""
        bad = (s.status for s in self.segments if s.strategy == strategy and s.status != "ok")
        return next(bad, None)


@dataclass(frozen=True)
class FullRun:
    """A full training of a cell: what its record says."""

    status: str
    reason: str | None
    score: float | None  # as shown: points of accuracy
    better: str
    tolerance: float
    score_name: str
    gpu_seconds: float
    train_time_s: float | None
    steps: int

    @property
    def sign(self) -> int:
        """1 where more is better."""
        return 1 if self.better == "higher" else -1


@dataclass(frozen=True)
class Evidence:
    """All that a verdict rests on. What is in it depends on no order of files."""

    study: str
    seed: int
    bouts: tuple[Bout, ...]
    blocks: Mapping[tuple[Place, int], Block] = field(default_factory=dict)
    full_runs: Mapping[Cell, FullRun] = field(default_factory=dict)
    margin: float = 0.03
    budget_gpu_hours: float | None = None
    #: Tolerated losses by the name of the score; others have their task's.
    tolerances: Mapping[str, float] = field(default_factory=dict)

    def cell(self, bout: Bout, strategy: str, repeat: int = 0) -> Cell:
        """The cell of an arm's full training."""
        place = bout.place
        return Cell(
            self.study, place.experiment, strategy, place.model, bout.dataset, place.gpus, repeat
        )

    def order(self, bout: Bout, block: int, arms: Iterable[str]) -> list[str]:
        """The order of a block's first pass: by a hash, so that it is the same wherever it is asked."""
        return sorted(arms, key=lambda arm: _hash(self.seed, bout.place, block, arm))

    def block_seed(self, bout: Bout, block: int) -> int:
        """The seed that all segments of a block share."""
        return int(_hash(self.seed, bout.place, block)[:8], 16) >> 1


def _hash(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


# ---------------------------------------------------------------- from files


def read_evidence(config: Mapping[str, Any]) -> tuple[Evidence, list[str]]:
    """The evidence of a config's study, and notes on what was not used. `config`: validated."""
    study = Study(config, config["study"])
    given = config.get("verdict") or {}
    root = Path(config["results"])
    skipped = Jobs(config, study).skipped
    bouts = tuple(bouts_of(study, skipped))
    notes = [
        f"{path} is not raced: {why}" for path, why in skipped.items() if path.endswith("rep0")
    ]
    blocks = {}
    for block, trained in _blocks_in(root, study.name, notes):
        bout = next((b for b in bouts if b.place == block.place), None)
        if bout is None:
            continue
        if stale := _changed_arms(study, bout, trained):
            notes.append(
                f"{block.place}, block {block.number} is not used: {', '.join(stale)} had other "
                "settings than the config's"
            )
            continue
        blocks[block.place, block.number] = block
    runs = dict(_full_runs(study, bouts, root, notes))
    samples = {}
    for cell, (_, train_samples) in runs.items():
        samples.setdefault(cell.dataset, train_samples)
    return Evidence(
        study=study.name,
        seed=study.seed,
        bouts=tuple(with_full_steps(study, bout, samples.get(bout.dataset)) for bout in bouts),
        blocks=blocks,
        full_runs={cell: run for cell, (run, _) in runs.items()},
        margin=given.get("margin", 0.03),
        budget_gpu_hours=given.get("budget_gpu_hours"),
        tolerances=(config.get("decide") or {}).get("score_tolerance") or {},
    ), notes


def bouts_of(study: Study, skipped: Container[str] = ()) -> Iterator[Bout]:
    """The bouts of a study, in the order of the config, without cells of which the path is `skipped`."""
    found: dict[Place, list[Cell]] = {}
    for cell in study.cells:
        if cell.repeat == 0 and cell.path not in skipped:
            found.setdefault(Place(cell.experiment, cell.model, cell.gpus), []).append(cell)
    for place, cells in found.items():
        settings = [study.settings(cell) for cell in cells]
        known = MODELS.get(place.model)
        apart = known is None or known.batchnorm is not False
        key = (place.experiment, place.model, place.gpus if apart else None)
        traits = tuple(traits_of(s.strategy, s.options, place.gpus) for s in settings)
        equal = tuple(t.equals_ddp for t in traits)
        yield Bout(
            place=place,
            dataset=cells[0].dataset,
            arms=tuple(cell.strategy for cell in cells),
            served=tuple(strategy_class(s.strategy).kind == "server" for s in settings),
            equal=equal,
            arithmetic=tuple(key if e else None for e in equal),
            traits=traits,
            scored=settings[0].steps is None,
        )


def with_full_steps(study: Study, bout: Bout, train_samples: int | None) -> Bout:
    """The bout with the steps of its full cells, where the size of the data is known."""
    known = train_samples or study.dataset(bout.dataset).train_samples
    settings = study.settings(
        Cell(study.name, bout.place.experiment, bout.arms[0], bout.place.model, bout.dataset,
             bout.place.gpus, 0)
    )  # fmt: skip
    if settings.steps is None and known is None:
        return bout
    return Bout(**{**vars(bout), "full_steps": settings.total_steps(known or 0)})


def _blocks_in(
    results: Path, study: str, notes: list[str]
) -> Iterator[tuple[Block, Mapping[str, Any]]]:
    for path in block_files(results, study):
        try:
            found = read_block(path)
            yield block_from(found), found["trained"]
        except (ValueError, KeyError, TypeError) as e:
            notes.append(f"not used: {e or type(e).__name__}")


def block_from(found: Mapping[str, Any]) -> Block:
    """A block from what its block.json says."""
    return Block(
        place=Place(found["experiment"], found["model"], found["gpus"]),
        number=found["block"],
        steps=int(found["settings"]["steps"]),
        segments=tuple(
            Segment(
                strategy=s["strategy"],
                slot=s["slot"],
                passed=s["pass"],
                status=s["status"],
                step_s=s["mean_step_s"],
                start_s=s.get("start_s"),
                wall_s=s.get("wall_s"),
                step_cv=s.get("step_cv"),
            )
            for s in found["segments"]
        ),
        hosts=tuple(sorted(map(str, found["hosts"]))),
        allocation=None if found.get("allocation") is None else str(found["allocation"]),
        gpu_seconds=float(found["gpu_seconds"]),
        device=str(next(iter(found["trained"].values()), {}).get("device", "cuda")),
    )


def _changed_arms(study: Study, bout: Bout, trained: Mapping[str, Any]) -> list[str]:
    """Arms of a block that were trained with other settings than the config gives them now."""
    changed = []
    for arm, settings in trained.items():
        if arm not in bout.arms:
            continue  # taken out of the study since: its segments are ignored
        cell = Cell(study.name, bout.place.experiment, arm, bout.place.model, bout.dataset,
                    bout.place.gpus, 0)  # fmt: skip
        if trained_with(study.settings(cell)) != trained_with(settings):
            changed.append(arm)
    return changed


def _full_runs(
    study: Study, bouts: Iterable[Bout], results: Path, notes: list[str]
) -> Iterator[tuple[Cell, tuple[FullRun, int]]]:
    """The full runs whose settings are the config's, each with the samples of its training set."""
    for bout in bouts:
        place = bout.place
        for arm in bout.arms:
            for repeat in range(SEEDS):
                cell = Cell(study.name, place.experiment, arm, place.model, bout.dataset,
                            place.gpus, repeat)  # fmt: skip
                path = cell.record_path(results)
                if not path.exists():
                    continue
                try:
                    found = record.read(path)
                except record.RecordError as e:
                    notes.append(f"not used: {e}")
                    continue
                wanted = study.settings(cell)
                stated = LATER | found["settings"]
                if any(stated.get(k) != v for k, v in vars(wanted).items() if k != "profile"):
                    notes.append(f"{cell} is not used: its settings are not the config's")
                    continue
                samples = found["data"]["train_samples"]
                yield cell, (full_run_from(found, wanted.total_steps(samples)), samples)


def full_run_from(found: record.Record, steps: int) -> FullRun:
    """A full run from its record."""
    task, score = found["task"], found["score"]["final"]
    factor = 100 if task["unit"] == "share" else 1
    return FullRun(
        status=found["status"],
        reason=found["reason"],
        score=None if score is None else factor * score,
        better=task["better"],
        tolerance=task["tolerance"],
        score_name=task["score"],
        gpu_seconds=found["time"]["total_s"] * found["cell"]["gpus"],
        train_time_s=found["time"]["train_time_s"],
        steps=steps,
    )

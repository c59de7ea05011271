"""The evidence of a study: its comparisons, their complete blocks, and the full runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stratbench.cell import record
from stratbench.cell.coordinates import Cell
from stratbench.extensions.verdict.block_rules import MATRIX_REPEATS
from stratbench.extensions.verdict.blocks import (
    BlockError,
    ComparisonKey,
    PairedBlock,
    block_files,
    read_block,
    trained_digest,
)
from stratbench.strategies import strategy_class, traits_of
from stratbench.strategies.base import Traits
from stratbench.study.config.config import Study
from stratbench.study.jobs import Jobs
from stratbench.workload.network.models import MODELS


@dataclass(frozen=True)
class PairedComparison:
    """A comparison: the strategies that compete on one experiment, model and number of workers."""

    place: ComparisonKey
    dataset: str
    strategies: tuple[str, ...]
    served: tuple[bool, ...]
    #: Whether a strategy's arithmetic equals DDP's: such strategies share one score.
    equal: tuple[bool, ...]
    #: Comparisons with equal `arithmetic` share it, too.
    arithmetic: tuple[Any, ...]
    #: The traits of each strategy, as it declares them.
    traits: tuple[Traits, ...] = ()
    #: The settings that each strategy is trained with, as a `trained_digest`.
    trained: tuple[str, ...] = ()
    #: Steps of a full cell; None: not known before the data are read.
    full_steps: int | None = None
    #: Whether full cells are evaluated.
    scored: bool = True


@dataclass(frozen=True)
class FullRun:
    """A full training of a cell, from its record."""

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
        """1 if a higher score is better, else -1."""
        return 1 if self.better == "higher" else -1

    @property
    def step_log(self) -> float | None:
        """The logarithm of the seconds that a step took.

        None if the run did not end well.
        """
        if self.status != "ok" or not self.train_time_s or not self.steps:
            return None
        return math.log(self.train_time_s / self.steps)


@dataclass(frozen=True)
class PairedEvidence:
    """Everything that a verdict rests on. It does not depend on the order of files."""

    study: str
    seed: int
    comparisons: tuple[PairedComparison, ...]
    blocks: Mapping[tuple[ComparisonKey, int], PairedBlock] = field(default_factory=dict)
    full_runs: Mapping[Cell, FullRun] = field(default_factory=dict)
    margin: float = 0.03
    budget_gpu_hours: float | None = None
    #: Tolerated losses by the name of the score; scores not named here have their task's.
    tolerances: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def _blocks_by_place(self) -> dict[ComparisonKey, list[PairedBlock]]:
        blocks: dict[ComparisonKey, list[PairedBlock]] = {}
        for key in sorted(self.blocks):
            blocks.setdefault(key[0], []).append(self.blocks[key])
        return blocks

    def blocks_of(self, key: ComparisonKey) -> list[PairedBlock]:
        """Return the blocks of a comparison, in order."""
        return self._blocks_by_place.get(key, [])

    def cell(self, comparison: PairedComparison, strategy: str, repeat: int = 0) -> Cell:
        """Return the cell of a strategy's full training.

        Args:
            comparison: The comparison.
            strategy: Its strategy.
            repeat: Number of the repeat.
        """
        return cell_of(self.study, comparison, strategy, repeat)

    def runs_of(self, comparison: PairedComparison, strategy: str) -> list[FullRun]:
        """Return the full runs of a strategy, by repeat."""
        cells = (self.cell(comparison, strategy, repeat) for repeat in range(MATRIX_REPEATS))
        return [self.full_runs[cell] for cell in cells if cell in self.full_runs]

    def order(
        self, comparison: PairedComparison, block: int, strategies: Iterable[str]
    ) -> list[str]:
        """Return the strategies in a block's order, which is by a hash and so always the same.

        Args:
            comparison: The comparison.
            block: Number of the block.
            strategies: Strategies of the block.
        """
        return sorted(
            strategies, key=lambda strategy: _hash(self.seed, comparison.place, block, strategy)
        )

    def block_seed(self, comparison: PairedComparison, block: int) -> int:
        """Return the seed that all segments of a block share."""
        return int(_hash(self.seed, comparison.place, block)[:8], 16) >> 1


def _hash(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


def cell_of(study: str, comparison: PairedComparison, strategy: str, repeat: int = 0) -> Cell:
    """Return the cell of a strategy and repeat in a comparison.

    Args:
        study: Name of the study.
        comparison: The comparison.
        strategy: Its strategy.
        repeat: Number of the repeat.
    """
    key = comparison.place
    return Cell(study, key.experiment, strategy, key.model, comparison.dataset, key.gpus, repeat)


# ---------------------------------------------------------------- from files


#: Why cells of many jobs, and those that a command trains, are in no comparison.
JOBS_APART = "its workers are jobs of their own, and a block is one allocation"
COMMAND = "a command of yours cannot be stopped and begun in segments"


def not_compared(study: Study) -> dict[str, str]:
    """Return paths of the cells that blocks cannot time, with the reason."""
    apart = (cell.path for cell in study.cells if study.settings(cell).workers_are_jobs)
    own = (cell.path for cell in study.cells if study.strategy_kind(cell.strategy) == "own")
    return dict.fromkeys(apart, JOBS_APART) | dict.fromkeys(own, COMMAND)


def read_evidence(config: Mapping[str, Any]) -> tuple[PairedEvidence, list[str]]:
    """Return the evidence of a config's study, and notes on what was not used. `config`: validated."""
    study = Study(config, config["study"])
    keys = config.get("verdict") or {}
    root = Path(config["results"])
    skipped = Jobs(config, study).skipped | not_compared(study)
    comparisons = tuple(comparisons_of(study, skipped))
    notes = [
        f"{path} is not compared: {reason}"
        for path, reason in skipped.items()
        if path.endswith("rep0")
    ]
    blocks = {(b.place, b.number): b for b in _usable_blocks(study, comparisons, root, notes)}
    runs = dict(_full_runs(study, comparisons, root, notes))
    samples = {}
    for cell, (_, train_samples) in runs.items():
        samples.setdefault(cell.dataset, train_samples)
    return PairedEvidence(
        study=study.name,
        seed=study.seed,
        comparisons=tuple(
            with_full_steps(study, comparison, samples.get(comparison.dataset))
            for comparison in comparisons
        ),
        blocks=blocks,
        full_runs={cell: run for cell, (run, _) in runs.items()},
        margin=keys.get("margin", 0.03),
        budget_gpu_hours=keys.get("budget_gpu_hours"),
        tolerances=(config.get("decide") or {}).get("score_tolerance") or {},
    ), notes


def comparisons_of(study: Study, skipped: Container[str] = ()) -> Iterator[PairedComparison]:
    """Yield the comparisons of a study in the config's order, without the cells in `skipped`."""
    by_key: dict[ComparisonKey, list[Cell]] = {}
    for cell in study.cells:
        if cell.repeat == 0 and cell.path not in skipped:
            by_key.setdefault(ComparisonKey.of(cell), []).append(cell)
    for key, cells in by_key.items():
        settings = [study.settings(cell) for cell in cells]
        known = MODELS.get(key.model)
        # Whether the loss of a user's task adds up is not known yet.
        builtin = settings[0].own_task is None
        apart = known is None or known.batchnorm is not False or not builtin
        traits = tuple(
            traits_of(s.strategy, s.options, key.gpus, adds_up=builtin) for s in settings
        )
        yield PairedComparison(
            place=key,
            dataset=cells[0].dataset,
            strategies=tuple(cell.strategy for cell in cells),
            served=tuple(strategy_class(s.strategy).kind == "server" for s in settings),
            equal=tuple(t.equals_ddp for t in traits),
            arithmetic=(key.experiment, key.model, key.gpus if apart else None),
            traits=traits,
            trained=tuple(map(trained_digest, settings)),
            scored=settings[0].steps is None,
        )


def with_full_steps(
    study: Study, comparison: PairedComparison, train_samples: int | None
) -> PairedComparison:
    """Return the comparison with the number of steps of its full cells, if it is known.

    Args:
        study: The study.
        comparison: The comparison.
        train_samples: Number of training samples, if known.
    """
    known = train_samples or study.dataset(comparison.dataset).train_samples
    settings = study.settings(cell_of(study.name, comparison, comparison.strategies[0]))
    if settings.steps is None and known is None:
        return comparison
    return replace(comparison, full_steps=settings.total_steps(known or 0))


def _usable_blocks(
    study: Study, comparisons: Iterable[PairedComparison], results: Path, notes: list[str]
) -> Iterator[PairedBlock]:
    """Yield those blocks of the comparisons whose strategies were all trained with the config's settings."""
    wanted = {b.place: dict(zip(b.strategies, b.trained, strict=True)) for b in comparisons}
    for path in block_files(results, study.name):
        try:
            block = read_block(path)
        except BlockError as e:
            notes.append(f"not used: {e}; delete it, and the block is measured again")
            continue
        if block.place not in wanted:
            continue
        # Segments of strategies that have been removed from the study since are not needed.
        strategies = wanted[block.place].keys() & block.trained.keys()
        now = wanted[block.place]
        if stale := sorted(a for a in strategies if now[a] != block.trained[a]):
            notes.append(
                f"{block.place}, block {block.number} is not used: {', '.join(stale)} had other "
                "settings than the config's"
            )
            continue
        yield block


def _full_runs(
    study: Study, comparisons: Iterable[PairedComparison], results: Path, notes: list[str]
) -> Iterator[tuple[Cell, tuple[FullRun, int]]]:
    """Yield the full runs with the config's settings, each with its number of training samples."""
    for comparison in comparisons:
        for strategy in comparison.strategies:
            for repeat in range(MATRIX_REPEATS):
                cell = cell_of(study.name, comparison, strategy, repeat)
                path = cell.record_path(results)
                if not path.exists():
                    continue
                try:
                    measured = record.read_measured(path)
                except record.RecordError as e:
                    notes.append(f"not used: {e}")
                    continue
                wanted = study.settings(cell)
                recorded = measured["settings"]
                if any(recorded.get(k) != v for k, v in wanted.as_dict().items() if k != "profile"):
                    notes.append(f"{cell} is not used: its settings are not the config's")
                    continue
                samples = measured["data"]["train_samples"]
                yield cell, (full_run_from(measured, wanted.total_steps(samples)), samples)


def full_run_from(measured: record.Record, steps: int) -> FullRun:
    """Return the full run that a record describes."""
    task, score = measured["task"], measured["score"]["final"]
    factor = 100 if task["unit"] == "share" else 1
    return FullRun(
        status=measured["status"],
        reason=measured["reason"],
        score=None if score is None else factor * score,
        better=task["better"],
        tolerance=task["tolerance"],
        score_name=task["score"],
        gpu_seconds=measured["time"]["total_s"] * measured["cell"]["gpus"],
        train_time_s=measured["time"]["train_time_s"],
        steps=steps,
    )

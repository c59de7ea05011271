"""Reads the evidence of a verdict: comparisons, complete blocks and full runs of a study."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from stratbench.cell import record
from stratbench.cell.coordinates import Cell
from stratbench.extensions.verdict.block_rules import MATRIX_REPEATS
from stratbench.extensions.verdict.blocks import (
    BlockError,
    ComparisonKey,
    PairedBlock,
    hash_trained_settings,
    list_block_files,
    read_block,
)
from stratbench.strategies import get_strategy_class, get_traits
from stratbench.strategies.base import Traits
from stratbench.study.config.config import Study
from stratbench.study.jobs import Jobs
from stratbench.workload.network.models import MODELS


@dataclass(frozen=True)
class PairedComparison:
    """A comparison: the strategies that are compared on one experiment, model and number of workers."""

    comparison_key: ComparisonKey
    dataset: str
    strategies: tuple[str, ...]
    uses_servers: tuple[bool, ...]
    #: For each strategy: whether its updates, and therefore its score, equal those of DDP.
    equals_ddp: tuple[bool, ...]
    #: Experiment, model and, if it changes the updates, number of workers. In comparisons with equal keys,
    #: all strategies that equal DDP have the same score.
    shared_score_key: tuple[Any, ...]
    #: The declared traits of each strategy.
    traits: tuple[Traits, ...] = ()
    #: Hash of each strategy's settings, from `hash_trained_settings`.
    settings_hashes: tuple[str, ...] = ()
    #: Number of steps of a full run; None if unknown until the data are read.
    full_run_steps: int | None = None
    #: Whether full runs evaluate the model, and therefore have a score.
    has_scored_full_runs: bool = True


@dataclass(frozen=True)
class FullRun:
    """A full training of a cell, from its record."""

    status: str
    failure_reason: str | None
    #: Final score in the unit of the report, such as percent for accuracy; None without a score.
    score: float | None
    better_score_direction: str
    score_tolerance: float
    score_name: str
    gpu_seconds: float
    train_time_s: float | None
    trained_steps: int

    @property
    def score_sign(self) -> int:
        """Factor (1 or -1) that converts a score so that a higher value is better."""
        return 1 if self.better_score_direction == "higher" else -1

    @property
    def log_step_time(self) -> float | None:
        """The logarithm of the run's mean seconds per step.

        The value is None if the run did not end well.
        """
        if self.status != "ok" or not self.train_time_s or not self.trained_steps:
            return None
        return math.log(self.train_time_s / self.trained_steps)


class SdEstimate(NamedTuple):
    """Estimate of a standard deviation, with its degrees of freedom."""

    sd: float
    dof: int


@dataclass(frozen=True)
class PairedEvidence:
    """All inputs of a verdict: comparisons, blocks, full runs and limits."""

    study: str
    seed: int
    comparisons: tuple[PairedComparison, ...]
    blocks: Mapping[tuple[ComparisonKey, int], PairedBlock] = field(default_factory=dict)
    full_runs: Mapping[Cell, FullRun] = field(default_factory=dict)
    margin: float = 0.03
    budget_gpu_hours: float | None = None
    #: Largest tolerated loss of score, by name of the score. Other scores have the tolerance of their task.
    score_tolerances: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def _blocks_by_comparison(self) -> dict[ComparisonKey, list[PairedBlock]]:
        blocks: dict[ComparisonKey, list[PairedBlock]] = {}
        for key in sorted(self.blocks):
            blocks.setdefault(key[0], []).append(self.blocks[key])
        return blocks

    def list_blocks_of_comparison(self, comparison_key: ComparisonKey) -> list[PairedBlock]:
        """Return the blocks of a comparison, ordered by number."""
        return self._blocks_by_comparison.get(comparison_key, [])

    def make_full_run_cell(
        self, comparison: PairedComparison, strategy: str, repeat: int = 0
    ) -> Cell:
        """Make the cell of a full run: the whole training of a strategy.

        Args:
            comparison: The comparison.
            strategy: Name of a strategy in the comparison.
            repeat: Number of the repeat.
        """
        return make_cell_of_strategy(self.study, comparison, strategy, repeat)

    def list_full_runs(self, comparison: PairedComparison, strategy: str) -> list[FullRun]:
        """Return the full runs of a strategy, ordered by repeat."""
        cells = (
            self.make_full_run_cell(comparison, strategy, repeat)
            for repeat in range(MATRIX_REPEATS)
        )
        return [self.full_runs[cell] for cell in cells if cell in self.full_runs]

    def order_strategies_of_block(
        self, comparison: PairedComparison, block_number: int, strategies: Iterable[str]
    ) -> list[str]:
        """Return the order in which a block runs its strategies, a permutation by hash.

        Args:
            comparison: The comparison.
            block_number: Number of the block.
            strategies: Strategies of the block.
        """
        return sorted(
            strategies,
            key=lambda strategy: _hash_joined_parts(
                self.seed, comparison.comparison_key, block_number, strategy
            ),
        )

    def compute_block_seed(self, comparison: PairedComparison, block_number: int) -> int:
        """Return the seed that all segments of a block share."""
        return (
            int(_hash_joined_parts(self.seed, comparison.comparison_key, block_number)[:8], 16) >> 1
        )


def _hash_joined_parts(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


def make_cell_of_strategy(
    study: str, comparison: PairedComparison, strategy: str, repeat: int = 0
) -> Cell:
    """Return the cell that trains a strategy of a comparison.

    Args:
        study: Name of the study.
        comparison: The comparison.
        strategy: Name of a strategy in the comparison.
        repeat: Number of the repeat.
    """
    key = comparison.comparison_key
    return Cell(study, key.experiment, strategy, key.model, comparison.dataset, key.gpus, repeat)


#: Reasons why no comparison has the cells with one SLURM job per worker, and those that a user's own command
#: trains.
SEPARATE_JOBS_REASON = "its workers are separate jobs, and a block is one allocation"
OWN_COMMAND_REASON = "it is trained by a command of yours, which cannot run in short segments"


def find_reasons_against_timing_in_blocks(study: Study) -> dict[str, str]:
    """Return the path of each cell that blocks cannot time, with the reason."""
    apart = (cell.path for cell in study.cells if study.settings(cell).workers_are_jobs)
    own = (cell.path for cell in study.cells if study.get_strategy_kind(cell.strategy) == "own")
    return dict.fromkeys(apart, SEPARATE_JOBS_REASON) | dict.fromkeys(own, OWN_COMMAND_REASON)


def read_evidence(config: Mapping[str, Any]) -> tuple[PairedEvidence, list[str]]:
    """Read the evidence of a validated config's study, with notes on unused blocks and cells."""
    study = Study(config, config["study"])
    root = Path(config["results"])
    skipped = Jobs(config, study).skip_reasons | find_reasons_against_timing_in_blocks(study)
    comparisons = tuple(iter_comparisons(study, skipped))
    notes = [
        f"{path} is not compared: {reason}"
        for path, reason in skipped.items()
        if path.endswith("rep0")
    ]
    blocks = {
        (b.comparison_key, b.block_number): b
        for b in _iter_usable_blocks(study, comparisons, root, notes)
    }
    runs = dict(_iter_full_runs(study, comparisons, root, notes))
    samples = {}
    for cell, (_, train_samples) in runs.items():
        samples.setdefault(cell.dataset, train_samples)
    return PairedEvidence(
        study=study.name,
        seed=study.seed,
        comparisons=tuple(
            add_full_run_steps(study, comparison, samples.get(comparison.dataset))
            for comparison in comparisons
        ),
        blocks=blocks,
        full_runs={cell: run for cell, (run, _) in runs.items()},
        margin=config["verdict"]["margin"],
        budget_gpu_hours=config["verdict"]["budget_gpu_hours"],
        score_tolerances=config["decide"]["score_tolerance"],
    ), notes


def iter_comparisons(
    study: Study, skipped_paths: Container[str] = ()
) -> Iterator[PairedComparison]:
    """Yield the comparisons of a study in the config's order, without the cells in `skipped_paths`."""
    by_key: dict[ComparisonKey, list[Cell]] = {}
    for cell in study.cells:
        if cell.repeat == 0 and cell.path not in skipped_paths:
            by_key.setdefault(ComparisonKey.from_cell(cell), []).append(cell)
    for key, cells in by_key.items():
        settings = [study.settings(cell) for cell in cells]
        known = MODELS.get(key.model)
        # The traits of a user's own task are unknown: its loss may not be a mean over the parts of a batch.
        builtin = settings[0].own_task is None
        apart = known is None or known.batchnorm is not False or not builtin
        traits = tuple(
            get_traits(s.strategy, s.options, key.gpus, loss_adds_up=builtin) for s in settings
        )
        yield PairedComparison(
            comparison_key=key,
            dataset=cells[0].dataset,
            strategies=tuple(cell.strategy for cell in cells),
            uses_servers=tuple(get_strategy_class(s.strategy).kind == "server" for s in settings),
            equals_ddp=tuple(t.equals_ddp for t in traits),
            shared_score_key=(key.experiment, key.model, key.gpus if apart else None),
            traits=traits,
            settings_hashes=tuple(map(hash_trained_settings, settings)),
            has_scored_full_runs=settings[0].steps is None,
        )


def add_full_run_steps(
    study: Study, comparison: PairedComparison, train_samples: int | None
) -> PairedComparison:
    """Return the comparison with the number of steps of its full runs, if known.

    Args:
        study: The study.
        comparison: The comparison.
        train_samples: Number of training samples, if known.
    """
    known = train_samples or study.get_dataset(comparison.dataset).train_samples
    settings = study.settings(
        make_cell_of_strategy(study.name, comparison, comparison.strategies[0])
    )
    if settings.steps is None and known is None:
        return comparison
    return replace(comparison, full_run_steps=settings.count_steps(known or 0))


def _iter_usable_blocks(
    study: Study, comparisons: Iterable[PairedComparison], results: Path, notes: list[str]
) -> Iterator[PairedBlock]:
    """Yield the blocks whose strategies were all trained with the settings of the config.

    Args:
        study: The study.
        comparisons: Comparisons of the study.
        results: The folder of results.
        notes: List to which a sentence on each unused block is added.
    """
    wanted = {
        b.comparison_key: dict(zip(b.strategies, b.settings_hashes, strict=True))
        for b in comparisons
    }
    for path in list_block_files(results, study.name):
        try:
            block = read_block(path)
        except BlockError as e:
            notes.append(f"not used: {e}; delete it, and the block is measured again")
            continue
        if block.comparison_key not in wanted:
            continue
        # The settings are checked only of the block's strategies that are still in the study. What the block
        # measured of other strategies is not used.
        strategies = wanted[block.comparison_key].keys() & block.settings_hashes.keys()
        now = wanted[block.comparison_key]
        if stale := sorted(a for a in strategies if now[a] != block.settings_hashes[a]):
            notes.append(
                f"{block.comparison_key}, block {block.block_number} is not used: {', '.join(stale)} had "
                "other settings than those of the config"
            )
            continue
        yield block


def _iter_full_runs(
    study: Study, comparisons: Iterable[PairedComparison], results: Path, notes: list[str]
) -> Iterator[tuple[Cell, tuple[FullRun, int]]]:
    """Yield the full runs that have the settings of the config.

    An item is the cell, and a pair of its full run and the number of training samples.

    Args:
        study: The study.
        comparisons: Comparisons of the study.
        results: The folder of results.
        notes: List to which a sentence on each unused full run is added.
    """
    for comparison in comparisons:
        for strategy in comparison.strategies:
            for repeat in range(MATRIX_REPEATS):
                cell = make_cell_of_strategy(study.name, comparison, strategy, repeat)
                path = cell.record_path(results)
                if not path.exists():
                    continue
                try:
                    measured = record.read_measured_record(path)
                except record.RecordError as e:
                    notes.append(f"not used: {e}")
                    continue
                wanted = study.settings(cell)
                recorded = measured["settings"]
                if any(recorded.get(k) != v for k, v in wanted.as_dict().items() if k != "profile"):
                    notes.append(f"{cell} is not used: its settings are not the config's")
                    continue
                samples = measured["data"]["train_samples"]
                yield cell, (make_full_run(measured, wanted.count_steps(samples)), samples)


def make_full_run(measured_record: record.Record, trained_steps: int) -> FullRun:
    """Make a full run from the record of a cell.

    Args:
        measured_record: The record.
        trained_steps: Number of steps that the cell trained.
    """
    task, score = measured_record["task"], measured_record["score"]["final"]
    factor = 100 if task["unit"] == "share" else 1
    return FullRun(
        status=measured_record["status"],
        failure_reason=measured_record["reason"],
        score=None if score is None else factor * score,
        better_score_direction=task["better"],
        score_tolerance=task["tolerance"],
        score_name=task["score"],
        gpu_seconds=measured_record["time"]["total_s"] * measured_record["cell"]["gpus"],
        train_time_s=measured_record["time"]["train_time_s"],
        trained_steps=trained_steps,
    )

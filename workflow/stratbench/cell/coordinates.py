"""Defines a cell (a point of a study's matrix) and its paths, and expands a matrix into cells.

This module has no slow imports, since the Snakefile uses it on every parse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stratbench.cell.text.words import format_count

#: Path of a cell below its study's folder, with Snakemake's wildcards.
CELL_PATTERN = "{experiment}/{strategy}/{model}/{gpus}gpu/rep{repeat}"


#: Statuses of cells with a record. A cell that ends in an error has no record.
STATUSES = ("ok", "oom", "timeout", "diverged", "unsupported")
#: Status, in tables, of a cell that did other work than the cells with which it is compared.
INCOMPARABLE = "incomparable"


@dataclass(frozen=True, order=True)
class Cell:
    """One training run of a strategy (or variant) with a model on `gpus` workers.

    `gpus` counts workers, which are CPU processes on a machine without GPUs. Parameter servers do not count.
    """

    study: str
    experiment: str
    strategy: str
    model: str
    dataset: str
    gpus: int
    repeat: int

    def __str__(self) -> str:
        return (
            f"{self.study}/{self.experiment}: {self.strategy}, {self.model}, "
            f"{format_count(self.gpus, 'worker')}, repeat {self.repeat}"
        )

    def as_dict(self) -> dict[str, str | int]:
        """Return the cell's seven coordinates as in a record and in a table row."""
        return dict(vars(self))

    @property
    def path(self) -> str:
        """The path of the cell below the folders `cells/` and `logs/` of its study."""
        return CELL_PATTERN.format(**vars(self))

    def record_path(self, results: str | Path) -> Path:
        """Return the path of the cell's record below the results folder."""
        return Path(results) / self.study / "cells" / self.path / "record.json"

    def log_dir(self, results: str | Path) -> Path:
        """Return the folder with the cell's logs per process and the reason of a failure."""
        return Path(results) / self.study / "logs" / self.path


def expand_cells(
    study: str,
    experiment: str,
    dataset: str,
    strategies: Iterable[tuple[str, int | None]],
    models: Sequence[str],
    gpus: Sequence[int],
    repeats: int,
) -> Iterator[Cell]:
    """Yield every cell of one experiment, in the order of the config.

    A strategy has no cells above its maximum number of workers: `single` has only cells on one worker.

    Args:
        study: Name of the study.
        experiment: Name of the experiment.
        dataset: Name of the data set.
        strategies: Names, each with its maximum number of workers (None without a limit).
        models: Names of the models.
        gpus: Worker counts.
        repeats: Number of repeats.
    """
    for strategy, most_workers in strategies:
        for model in models:
            for n in gpus:
                if most_workers is not None and n > most_workers:
                    continue
                for repeat in range(repeats):
                    yield Cell(study, experiment, strategy, model, dataset, n, repeat)

"""The cell: one point of a study's matrix, how a matrix expands into cells, and where their files live.

Nothing here imports anything heavy: the Snakefile uses it on every parse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stratbench.cell.text.words import counted

#: Path of a cell below its study's folder, with the names Snakemake uses as wildcards.
CELL_PATTERN = "{experiment}/{strategy}/{model}/{gpus}gpu/rep{repeat}"


#: Ways a cell can end that are results. Anything else is an error and leaves no record.
STATUSES = ("ok", "oom", "timeout", "diverged", "unsupported")
#: In tables, the status of a cell that did other work than those it is compared with.
INCOMPARABLE = "incomparable"


@dataclass(frozen=True, order=True)
class Cell:
    """One training run: a strategy (or variant) with a model on `gpus` workers, repeat `repeat`.

    `gpus` counts workers. On a machine without GPUs each worker is a CPU process; parameter-server processes
    are never counted.
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
            f"{counted(self.gpus, 'worker')}, repeat {self.repeat}"
        )

    def as_dict(self) -> dict[str, str | int]:
        """Return the cell's seven coordinates, as a record and a table row carry them."""
        return dict(vars(self))

    @property
    def path(self) -> str:
        """The cell's path below `cells/` and `logs/` of its study."""
        return CELL_PATTERN.format(**vars(self))

    def record_path(self, results: str | Path) -> Path:
        """Return the path of the cell's record below the results folder."""
        return Path(results) / self.study / "cells" / self.path / "record.json"

    def log_dir(self, results: str | Path) -> Path:
        """Return the folder of the cell's per-process logs and the evidence of a failure."""
        return Path(results) / self.study / "logs" / self.path


def expand(
    study: str,
    experiment: str,
    dataset: str,
    strategies: Iterable[tuple[str, int | None]],
    models: Sequence[str],
    gpus: Sequence[int],
    repeats: int,
) -> Iterator[Cell]:
    """Yield every cell of one experiment, in the order of the config.

    A strategy has no cells above the worker count that it can use: `single` appears once, at one GPU.

    Args:
        study: Name of the study.
        experiment: Name of the experiment.
        dataset: Name of the data set.
        strategies: Names, each with its maximum worker count (None: no limit).
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

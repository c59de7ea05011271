"""The cell: one point of a study's matrix, how a matrix expands into cells, and where their files live.

    snakemake --profile profiles/local --forcerun \
        $(python -m stratbench.cells --study demo --status oom,timeout)

Nothing here imports anything heavy: the Snakefile uses it on every parse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stratbench.files import read_json

#: Path of a cell below its study's folder, with the names Snakemake uses as wildcards.
CELL_PATTERN = "{experiment}/{strategy}/{model}/{gpus}gpu/rep{repeat}"


#: Ways a cell can end that are results. Anything else is an error and leaves no record.
STATUSES = ("ok", "oom", "timeout", "diverged")


@dataclass(frozen=True, order=True)
class Cell:
    """One training run: a strategy (or a variant's name) with a model on `gpus` workers, repeat `repeat`.

    `gpus` counts workers. On a machine without GPUs each worker is a CPU process; parameter-server
    processes are never counted.
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
            f"{self.gpus} GPU{'s' if self.gpus != 1 else ''}, repeat {self.repeat}"
        )

    def as_dict(self) -> dict[str, str | int]:
        """The cell's seven coordinates, as a record and a table row carry them."""
        return dict(vars(self))

    @property
    def path(self) -> str:
        """The cell's path below `cells/` and `logs/` of its study."""
        return CELL_PATTERN.format(**vars(self))

    def record_path(self, results: str | Path) -> Path:
        """Where the cell's record lies below the results folder."""
        return Path(results) / self.study / "cells" / self.path / "record.json"

    def log_dir(self, results: str | Path) -> Path:
        """Where the cell's per-process logs and the evidence of a failure lie."""
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
    """Every cell of one experiment, in the order of the config.

    `strategies` pairs a name with the most workers it can use (`None`: no limit); larger worker
    counts are left out, so `single` appears once, at one GPU.
    """
    for strategy, most_workers in strategies:
        for model in models:
            for n in gpus:
                if most_workers is not None and n > most_workers:
                    continue
                for repeat in range(repeats):
                    yield Cell(study, experiment, strategy, model, dataset, n, repeat)


def records_with(results: Path, statuses: Iterable[str], study: str = "*") -> Iterator[Path]:
    """The records below `results` whose status is one of `statuses`, sorted.

    Only the status is looked at. Raises ValueError, naming the file, for one that is not a record.
    """
    pattern = f"{study}/cells/" + CELL_PATTERN.format(
        experiment="*", strategy="*", model="*", gpus="*", repeat="*"
    )
    for path in sorted(results.glob(f"{pattern}/record.json")):
        try:
            status = read_json(path)["status"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{path} is not a record; delete it to train its cell again") from e
        if status in statuses:
            yield path


def _statuses(text: str) -> list[str]:
    statuses = [status.strip() for status in text.split(",")]
    for status in statuses:
        if status not in STATUSES:
            raise argparse.ArgumentTypeError(
                f"{status!r} is no status; known: {', '.join(STATUSES)}"
            )
    return statuses


def main(arguments: list[str] | None = None) -> int:
    """List the records of cells that ended in a given way, for `snakemake --forcerun`."""
    parser = argparse.ArgumentParser(prog="python -m stratbench.cells", description=main.__doc__)
    parser.add_argument(
        "--status", type=_statuses, required=True, help=f"of {', '.join(STATUSES)}; several: a,b"
    )
    parser.add_argument("--study", default="*", help="only of this study")
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: results")
    options = parser.parse_args(arguments)
    if not (options.results / options.study).is_dir() and options.study != "*":
        parser.error(f"no results of study {options.study!r} in {options.results}")
    if not options.results.is_dir():
        parser.error(f"{options.results} is not a folder; name yours with --results")
    try:
        for path in records_with(options.results, options.status, options.study):
            print(path)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

r"""Lists the records of training runs (cells) with certain statuses, so that the cells can be trained again.

snakemake --profile profiles/local --forcerun \
        $(python -m stratbench.cell --study demo --status oom,timeout)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from stratbench.cell.coordinates import CELL_PATTERN, STATUSES
from stratbench.cell.files import read_json


def iter_records_by_status(
    results: Path, statuses: Iterable[str], study: str = "*"
) -> Iterator[Path]:
    """Yield the paths of the records whose status is one of `statuses`, sorted.

    Args:
        results: The results folder.
        statuses: Statuses such as `oom` and `timeout`.
        study: Name of the study, or `*` for all.

    Raises:
        ValueError: If a file is not a record; the message names it.
    """
    pattern = f"{study}/cells/" + CELL_PATTERN.format(
        experiment="*", strategy="*", model="*", gpus="*", repeat="*"
    )
    for path in sorted(results.glob(f"{pattern}/record.json")):
        try:
            status = read_json(path)["status"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{path} is not a record; delete it to train its cell again") from e
        if status in statuses:
            yield path


def parse_statuses(comma_separated: str) -> list[str]:
    """Return the statuses in a comma-separated list, such as `oom,timeout`."""
    statuses = [status.strip() for status in comma_separated.split(",")]
    for status in statuses:
        if status not in STATUSES:
            known = ", ".join(STATUSES)
            raise argparse.ArgumentTypeError(f"{status!r} is not a status; choose among {known}")
    return statuses


def main(arguments: list[str] | None = None) -> int:
    """List the records of cells with given statuses, for `snakemake --forcerun`."""
    parser = argparse.ArgumentParser(prog="python -m stratbench.cell", description=main.__doc__)
    parser.add_argument(
        "--status",
        type=parse_statuses,
        required=True,
        help=f"statuses to list, joined by commas, among {', '.join(STATUSES)}",
    )
    parser.add_argument(
        "--study",
        default="*",
        help="name of the study whose records are listed (default: all studies)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        help="the results folder (default: results)",
    )
    options = parser.parse_args(arguments)
    if not (options.results / options.study).is_dir() and options.study != "*":
        parser.error(f"no results of study {options.study!r} in {options.results}")
    if not options.results.is_dir():
        parser.error(f"{options.results} is not a folder; name yours with --results")
    try:
        for path in iter_records_by_status(options.results, options.status, options.study):
            print(path)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

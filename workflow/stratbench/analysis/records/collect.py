"""Collects the records of a study into cells.csv, a row per cell, and epochs.csv, a row per epoch.

Every expected cell gets its row, in the order of the config. A cell without a record is `missing`, `error` if
it failed or its record is unusable, or `infeasible` if the plan skipped it. One of a user's command that did
other work than comparable ones is `incomparable`. No cell is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stratbench.analysis.records.columns import (
    COLUMNS,
    COORDINATES,
    EPOCH_COLUMNS,
    Row,
    build_row_from_record,
    clean_and_shorten_text,
)
from stratbench.cell import record
from stratbench.cell.coordinates import Cell
from stratbench.cell.extensions import import_attribute, load_extensions
from stratbench.cell.files import write_csv_rows
from stratbench.cell.record import Record
from stratbench.cell.text.words import format_count
from stratbench.study.config.config import Study

#: Statuses of cells without a usable record: `missing` without any, `error` after a failure.
UNMEASURED = ("missing", "error")
#: The rows of a cell: one of cells.csv, and one of epochs.csv per epoch.
CellRows = tuple[Row, list[Row]]


@dataclass(frozen=True)
class Expectations:
    """Expectations of the config about records: skipped cells, target scores, and required settings.

    Attributes:
        skip_reasons: Reasons of skipped cells, by the cells' paths.
        target_scores_by_experiment: Scores to reach, by experiment.
        study: The study whose settings every record must have; None to check no settings.
    """

    skip_reasons: Mapping[str, str] = field(default_factory=dict)
    target_scores_by_experiment: Mapping[str, float] = field(default_factory=dict)
    study: Study | None = None


def add_expected_record_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for skipped cells, target scores and required settings to a command line."""
    parser.add_argument(
        "--skipped", default="{}", help="JSON object: why a cell is skipped, by its path"
    )
    parser.add_argument(
        "--study", default="null", help="JSON object: the config, to check settings of records"
    )
    parser.add_argument(
        "--targets", default="{}", help="JSON object: the score to reach, by experiment"
    )


def read_expected_record_options(args: argparse.Namespace) -> Expectations:
    """Return the skipped cells, target scores and required settings that a command line gives."""
    config = json.loads(args.study)
    study = Study(config, config["study"]) if config else None
    return Expectations(json.loads(args.skipped), json.loads(args.targets), study)


def find_time_to_target_score_s(
    epoch_rows: list[Row], target_score: float | None, better: str
) -> float | None:
    """Return the training time in s until an epoch reaches a target score.

    The time ends with the first such epoch. It is None if no epoch reached the target, or without a target.

    Args:
        epoch_rows: Results of the epochs.
        target_score: Score to reach, if any.
        better: `higher` if the target is a minimum, else it is a maximum.
    """
    if target_score is None:
        return None
    sign = 1 if better == "higher" else -1
    reached = (
        e["train_time_s"]
        for e in epoch_rows
        if e["score"] is not None and sign * e["score"] >= sign * target_score
    )
    return next(reached, None)


def build_row_without_record(log_dir: Path) -> Row:
    """Return the fields `status` and `reason` of the row of a cell without a record.

    The status is `error` if its logs show a failure, else `missing`.
    """
    reason = record.read_failure_reason(log_dir)
    if reason is None:
        return {"status": "missing", "reason": "no record yet"}
    return {"status": "error", "reason": clean_and_shorten_text(reason)}


def build_cell_rows(
    cell: Cell,
    study_dir: Path,
    expected: Expectations,
    read_record: Callable[[Path], Record] = record.read_measured_record,
) -> CellRows:
    """Return a cell's row of cells.csv and its rows of epochs.csv.

    The status is `error` for an invalid record, and `infeasible` for a skipped cell without a record.

    Args:
        cell: The cell.
        study_dir: The folder results/<study>.
        expected: Skipped cells, target scores and settings of the config.
        read_record: Reads a record's file.
    """
    path = study_dir / "cells" / cell.path / "record.json"
    log_dir = study_dir / "logs" / cell.path
    log = log_dir.with_name(log_dir.name + ".log")
    coordinates = cell.as_dict()
    row: Row = dict.fromkeys(COLUMNS) | coordinates
    row["log_path"] = str(log.relative_to(study_dir))
    if not os.path.lexists(path):
        skip_reason = expected.skip_reasons.get(cell.path)
        outcome = (
            {"status": "infeasible", "reason": skip_reason}
            if skip_reason
            else build_row_without_record(log_dir)
        )
        return row | outcome, []
    row["record_path"] = str(path.relative_to(study_dir))
    try:
        rec = read_record(path)
        if rec["cell"] != coordinates:
            raise record.RecordError(
                f"{path} is the record of another cell: {record.get_cell(rec)}"
            )
        if expected.study is not None and (
            other := record.describe_settings_differences(rec, expected.study.settings(cell))
        ):
            raise record.RecordError(f"{path} {other}")
        measured = build_row_from_record(rec, path.with_name("timeline.csv"))
    except record.RecordError as e:
        # Without the path, which another column has, cells with the same problem have the same reason.
        reason = str(e).replace(str(path), path.name, 1)
        return row | {"status": "error", "reason": clean_and_shorten_text(reason)}, []
    except Exception as e:  # one unreadable record must not stop the collection of the others
        reason = f"{path} is not a record that can be read: {type(e).__name__}: {e}"
        return row | {"status": "error", "reason": clean_and_shorten_text(reason)}, []
    row |= measured
    row["target_score"] = target = expected.target_scores_by_experiment.get(cell.experiment)
    row["time_to_target_s"] = find_time_to_target_score_s(
        rec["score"]["per_epoch"], target, rec["task"]["better"]
    )
    epochs = [coordinates | epoch for epoch in rec["score"]["per_epoch"]]
    return row, epochs


def iter_cell_rows(
    cells: Sequence[Cell],
    study_dir: Path,
    expected: Expectations,
    read_record: Callable[[Path], Record],
) -> Iterator[CellRows]:
    """Yield the rows of each cell for cells.csv and epochs.csv. Print progress every few seconds.

    Args:
        cells: The cells.
        study_dir: The folder results/<study>.
        expected: Skipped cells, target scores and settings of the config.
        read_record: Reads a record's file.
    """
    next_line_s = time.monotonic() + 3
    for done, cell in enumerate(cells):
        if time.monotonic() > next_line_s:
            print(f"read {done} of {len(cells)} records", file=sys.stderr, flush=True)
            next_line_s += 3
        yield build_cell_rows(cell, study_dir, expected, read_record)


def read_expected_cells(path: Path) -> list[Cell]:
    """Return the cells of a study from a JSON file. The file has a list of their coordinates."""
    cells = [Cell(**coordinates) for coordinates in json.loads(path.read_text(encoding="utf-8"))]
    if not cells:
        raise ValueError(f"{path}: the list of cells is empty")
    return cells


def collect_records(
    cells: Sequence[Cell],
    study_dir: Path,
    out: Path,
    epochs_out: Path,
    expected: Expectations | None = None,
    read_record: Callable[[Path], Record] = record.read_measured_record,
) -> list[Row]:
    """Write cells.csv and epochs.csv, and return the rows of cells without a usable record.

    Args:
        cells: The cells.
        study_dir: The folder results/<study>.
        out: The file cells.csv.
        epochs_out: The file epochs.csv.
        expected: Skipped cells, target scores and settings of the config.
        read_record: Reads a record's file.
    """
    listed = list(iter_cell_rows(cells, study_dir, expected or Expectations(), read_record))
    rows = [row for row, _ in listed]
    for extension in load_extensions().values():
        if extension.modify_cell_rows is not None:
            import_attribute(extension.modify_cell_rows)(rows)
    write_csv_rows(epochs_out, EPOCH_COLUMNS, (epoch for _, epochs in listed for epoch in epochs))
    write_csv_rows(out, COLUMNS, rows)
    return [row for row in rows if row["status"] in UNMEASURED]


def describe_cells_without_record(rows_without_record: Sequence[Row], num_cells: int) -> str:
    """Return a message that names every cell without a usable record."""
    lines = [f"{len(rows_without_record)} of {num_cells} cells have no usable record:"]
    for row in rows_without_record:
        cell = Cell(**{key: row[key] for key in COORDINATES})
        lines.append(f"  {row['status']}: {cell} ({row['reason']})")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of the collection. The exit code is 1 if records are missing."""
    parser = argparse.ArgumentParser(
        prog="stratbench.analysis.records.collect", description=__doc__
    )
    parser.add_argument(
        "--expected", type=Path, required=True, help="JSON file with the list of all cells"
    )
    parser.add_argument(
        "--records-root", type=Path, required=True, help="the folder results/<study>/cells"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the file cells.csv to write, with a row per cell"
    )
    parser.add_argument(
        "--epochs-out",
        type=Path,
        required=True,
        help="the file epochs.csv to write, with a row per epoch",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="accept that records are missing, and list these cells",
    )
    add_expected_record_options(parser)
    args = parser.parse_args(argv)
    cells = read_expected_cells(args.expected)
    study_dir = args.records_root.parent
    without = collect_records(
        cells, study_dir, args.out, args.epochs_out, read_expected_record_options(args)
    )
    if without:
        file = sys.stdout if args.partial else sys.stderr
        print(describe_cells_without_record(without, len(cells)), file=file)
    else:
        print(format_count(len(cells), "record"))
    return 1 if without and not args.partial else 0


if __name__ == "__main__":
    sys.exit(main())

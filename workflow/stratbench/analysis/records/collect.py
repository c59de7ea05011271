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
    build_record_row,
    join_lines,
)
from stratbench.cell import record
from stratbench.cell.coordinates import Cell
from stratbench.cell.extensions import import_attribute, load_extensions
from stratbench.cell.files import write_rows
from stratbench.cell.record import Record
from stratbench.cell.text.words import format_count
from stratbench.study.config.config import Study

#: Statuses of cells without a usable record: no record yet, or a failure or an unusable record.
UNMEASURED = ("missing", "error")


@dataclass(frozen=True)
class Expectations:
    """The config's expectations of the records: skipped cells, target scores, and settings.

    Attributes:
        skip_reasons: Reasons of skipped cells, by the cells' paths.
        targets: Scores to reach, by experiment.
        study: The study whose settings every record must have; None to check no settings.
    """

    skip_reasons: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, float] = field(default_factory=dict)
    study: Study | None = None


def add_expectation_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `read_expectations` reads to a command line."""
    parser.add_argument("--skipped", default="{}", help="JSON: reasons of skipped cells, by path")
    parser.add_argument("--study", default="null", help="JSON: the config of the study")
    parser.add_argument("--targets", default="{}", help="JSON: scores to reach, by experiment")


def read_expectations(args: argparse.Namespace) -> Expectations:
    """Return the expectations that the options of a command line describe."""
    config = json.loads(args.study)
    study = Study(config, config["study"]) if config else None
    return Expectations(json.loads(args.skipped), json.loads(args.targets), study)


def find_time_to_score_s(per_epoch: list[Row], target: float | None, better: str) -> float | None:
    """Return the training time to the end of the first epoch that reached the target.

    The result is None if no epoch reached it, or without a target.

    Args:
        per_epoch: Results of the epochs.
        target: Score to reach, if any.
        better: `higher` if the target is a minimum, else it is a maximum.
    """
    if target is None:
        return None
    sign = 1 if better == "higher" else -1
    reached = (
        e["train_time_s"]
        for e in per_epoch
        if e["score"] is not None and sign * e["score"] >= sign * target
    )
    return next(reached, None)


def describe_missing_record(log_dir: Path) -> Row:
    """Return the status and the reason of a cell without a record.

    The status is `error` if its logs show a failure, else `missing`.
    """
    reason = record.read_failure_reason(log_dir)
    if reason is None:
        return {"status": "missing", "reason": "no record yet"}
    return {"status": "error", "reason": join_lines(reason)}


def build_cell_rows(
    cell: Cell,
    study_dir: Path,
    expected: Expectations,
    read: Callable[[Path], Record] = record.read_measured_record,
) -> tuple[Row, list[Row]]:
    """Return a cell's row of cells.csv and its rows of epochs.csv.

    The status is `error` for an invalid record, and `infeasible` for a skipped cell without a record.

    Args:
        cell: The cell.
        study_dir: The folder results/<study>.
        expected: Expectations of the config.
        read: Reads a record.
    """
    path = study_dir / "cells" / cell.path / "record.json"
    log_dir = study_dir / "logs" / cell.path
    log = log_dir.with_name(log_dir.name + ".log")
    coordinates = cell.as_dict()
    row: Row = dict.fromkeys(COLUMNS) | coordinates
    row["log_path"] = str(log.relative_to(study_dir))
    if not os.path.lexists(path):
        skip_reason = expected.skip_reasons.get(cell.path)
        return row | (
            {"status": "infeasible", "reason": skip_reason}
            if skip_reason
            else describe_missing_record(log_dir)
        ), []
    row["record_path"] = str(path.relative_to(study_dir))
    try:
        rec = read(path)
        if rec["cell"] != coordinates:
            raise record.RecordError(
                f"{path} holds the record of another cell: {record.get_cell(rec)}"
            )
        if expected.study is not None and (
            other := record.describe_settings_differences(rec, expected.study.settings(cell))
        ):
            raise record.RecordError(f"{path} {other}")
        measured = build_record_row(rec, path.with_name("timeline.csv"))
    except record.RecordError as e:
        # Without the path, equal reasons of many cells are one; the path is in another column.
        reason = str(e).replace(str(path), path.name, 1)
        return row | {"status": "error", "reason": join_lines(reason)}, []
    except Exception as e:  # one odd record must not stop the collection
        reason = f"{path} is not a record that can be read: {type(e).__name__}: {e}"
        return row | {"status": "error", "reason": join_lines(reason)}, []
    row |= measured
    row["target_score"] = target = expected.targets.get(cell.experiment)
    row["time_to_target_s"] = find_time_to_score_s(
        rec["score"]["per_epoch"], target, rec["task"]["better"]
    )
    epochs = [coordinates | epoch for epoch in rec["score"]["per_epoch"]]
    return row, epochs


def iter_cell_rows(
    cells: Sequence[Cell], study_dir: Path, expected: Expectations, read: Callable[[Path], Record]
) -> Iterator[tuple[Row, list[Row]]]:
    """Yield the results of `build_cell_rows` for all cells; print progress every few seconds.

    Args:
        cells: The cells.
        study_dir: The folder results/<study>.
        expected: Expectations of the config.
        read: Reads a record.
    """
    next_line_s = time.monotonic() + 3
    for done, cell in enumerate(cells):
        if time.monotonic() > next_line_s:
            print(f"read {done} of {len(cells)} records", file=sys.stderr, flush=True)
            next_line_s += 3
        yield build_cell_rows(cell, study_dir, expected, read)


def read_expected_cells(path: Path) -> list[Cell]:
    """Return the cells of the study's config, from a JSON list of their coordinates."""
    cells = [Cell(**coordinates) for coordinates in json.loads(path.read_text(encoding="utf-8"))]
    if not cells:
        raise ValueError(f"{path} names no cells")
    return cells


def collect_records(
    cells: Sequence[Cell],
    study_dir: Path,
    out: Path,
    epochs_out: Path,
    expected: Expectations | None = None,
    read: Callable[[Path], Record] = record.read_measured_record,
) -> list[Row]:
    """Write cells.csv and epochs.csv, and return the rows of cells without a usable record.

    Args:
        cells: The cells.
        study_dir: The folder results/<study>.
        out: The file cells.csv.
        epochs_out: The file epochs.csv.
        expected: Expectations of the config.
        read: Reads a record.
    """
    listed = list(iter_cell_rows(cells, study_dir, expected or Expectations(), read))
    rows = [row for row, _ in listed]
    for extension in load_extensions().values():
        if extension.modify_cell_rows is not None:
            import_attribute(extension.modify_cell_rows)(rows)
    write_rows(epochs_out, EPOCH_COLUMNS, (epoch for _, epochs in listed for epoch in epochs))
    write_rows(out, COLUMNS, rows)
    return [row for row in rows if row["status"] in UNMEASURED]


def describe_missing(without: Sequence[Row], total: int) -> str:
    """Return a message that names every cell without a usable record."""
    lines = [f"{len(without)} of {total} cells have no usable record:"]
    for row in without:
        cell = Cell(**{key: row[key] for key in COORDINATES})
        lines.append(f"  {row['status']}: {cell} ({row['reason']})")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 for unusable records without `--partial`."""
    parser = argparse.ArgumentParser(
        prog="stratbench.analysis.records.collect", description=__doc__
    )
    parser.add_argument("--expected", type=Path, required=True, help="JSON list of all cells")
    parser.add_argument("--records-root", type=Path, required=True, help="results/<study>/cells")
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write, a row per cell")
    parser.add_argument(
        "--epochs-out", type=Path, required=True, help="CSV file to write, a row per epoch"
    )
    parser.add_argument(
        "--partial", action="store_true", help="accept missing records, and list them"
    )
    add_expectation_options(parser)
    args = parser.parse_args(argv)
    cells = read_expected_cells(args.expected)
    study_dir = args.records_root.parent
    without = collect_records(cells, study_dir, args.out, args.epochs_out, read_expectations(args))
    if without:
        file = sys.stdout if args.partial else sys.stderr
        print(describe_missing(without, len(cells)), file=file)
    else:
        print(format_count(len(cells), "record"))
    return 1 if without and not args.partial else 0


if __name__ == "__main__":
    sys.exit(main())

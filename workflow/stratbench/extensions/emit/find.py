"""Finds the record of the cell to emit: by path, by the cell's name, or as `decide` chose it."""

from __future__ import annotations

import json
from pathlib import Path

from stratbench.cell import record
from stratbench.extensions.emit.errors import EmitError

#: Syntax of a cell's name, as shown in messages.
NAME = "EXPERIMENT/STRATEGY/MODEL/Ngpu[/repK]"


def read_record_to_emit(results: Path, study: str | None, cell: str | None) -> record.Record:
    """Read the record of the named cell, or of the cell that `decide` chose.

    Args:
        results: The folder with the results of all studies.
        study: Name of the study; None if only one study has the cell.
        cell: Path of a record, or name of a cell; None for the cell that `decide` chose.

    Raises:
        EmitError: If the record does not exist, or the name is ambiguous.
    """
    path = (
        find_record_path_by_name(results, study, cell)
        if cell
        else find_chosen_record_path(results, study)
    )
    try:
        return record.read_record(path)
    except record.RecordError as error:
        raise EmitError(str(error)) from None


def find_record_path_by_name(results: Path, study: str | None, cell: str) -> Path:
    """Return the path of a record, given this path or the name of its cell.

    Args:
        results: The folder with the results of all studies.
        study: Name of the study; None if only one study has the cell.
        cell: Path of a record, or name of a cell.
    """
    named = Path(cell).expanduser()
    for path in (named, named / "record.json"):
        if path.is_file():
            return path
    # A pattern with an absolute path or `..` would search outside the folder of results.
    is_name = not named.is_absolute() and ".." not in named.parts
    matches = {
        folder.parent.name: paths
        for folder in sorted(results.glob(f"{study or '*'}/cells"))
        if is_name and (paths := sorted((folder / cell).glob("**/record.json")))
    }
    if not matches:
        raise EmitError(
            f"{cell}: is neither a record nor a cell in {results / (study or '*')}; name a cell as "
            f"{NAME}, or give the path of its record.json"
        )
    if len(matches) > 1:
        raise EmitError(
            f"{cell}: is a cell of several studies, {', '.join(matches)}; select one by --study"
        )
    paths = next(iter(matches.values()))
    groups = sorted({path.parent.parent for path in paths})
    if len(groups) > 1:
        names = ", ".join(str(group.relative_to(group.parents[3])) for group in groups)
        raise EmitError(f"{cell}: matches several cells; name one of {names}")
    return paths[0]


def find_chosen_record_path(results: Path, study: str | None) -> Path:
    """Return the record path of the first repeat of the cell that `decide` chose."""
    folders = [folder.parent for folder in sorted(results.glob(f"{study or '*'}/cells"))]
    names = ("decision/answers.json", "answers.json")
    decided = {f: f / name for f in folders for name in reversed(names) if (f / name).is_file()}
    if not decided:
        raise EmitError(
            f"{results / (study or '*')}: no study has a decision; run `stratbench decide`, or name a cell "
            f"as {NAME}"
        )
    if len(decided) > 1:
        raise EmitError(
            f"{results}: several studies have decisions, {', '.join(f.name for f in decided)}; select one by "
            "--study"
        )
    folder, file = next(iter(decided.items()))
    answers = json.loads(file.read_text(encoding="utf-8"))["answers"]
    cells = [
        f"{a['experiment']}/{short['strategy']}/{a['model']}/{short['gpus']}gpu"
        for a in answers
        if (short := a.get("short") or {}).get("strategy")
    ]
    if not cells:
        raise EmitError(f"{file}: the decision chose no cell; name a cell as {NAME}")
    if len(cells) > 1:
        raise EmitError(
            f"{file}: the decision chose {len(cells)} cells; name one of {', '.join(cells)}"
        )
    return find_record_path_by_name(results, folder.name, cells[0])

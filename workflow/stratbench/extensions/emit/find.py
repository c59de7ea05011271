"""Finds a record: by its path, by a cell's name in the results, or as the choice of `decide`."""

from __future__ import annotations

import json
from pathlib import Path

from stratbench.cell import record
from stratbench.extensions.emit.errors import EmitError

#: Syntax of a cell's name below the results of its study.
NAME = "EXPERIMENT/STRATEGY/MODEL/Ngpu[/repK]"


def find_record(results: Path, study: str | None, cell: str | None) -> record.Record:
    """Return the record of `cell`: a path, or a name; None: the choice of `decide`.

    Args:
        results: The folder with the results of all studies.
        study: The study's name; None: the only one that has the cell.
        cell: A path or a name; None: the choice of `decide`.

    Raises:
        EmitError: It does not exist, or the name is ambiguous.
    """
    path = named_path(results, study, cell) if cell else chosen_path(results, study)
    try:
        return record.read(path)
    except record.RecordError as error:
        raise EmitError(str(error)) from None


def named_path(results: Path, study: str | None, cell: str) -> Path:
    """Return the path of a record from a path or a cell's name.

    Args:
        results: The folder with the results of all studies.
        study: The study's name; None: the only one that has the cell.
        cell: A path or a name.
    """
    named = Path(cell).expanduser()
    for path in (named, named / "record.json"):
        if path.is_file():
            return path
    is_name = not named.is_absolute() and ".." not in named.parts  # else all of a disk is searched
    matches = {
        folder.parent.name: sorted((folder / cell).glob("**/record.json"))
        for folder in sorted(results.glob(f"{study or '*'}/cells"))
        if is_name
    }
    matches = {name: paths for name, paths in matches.items() if paths}
    if not matches:
        raise EmitError(
            f"{cell} is no record, nor a cell in {results / (study or '*')}; name it as {NAME}, or give "
            "the path of its record.json"
        )
    if len(matches) > 1:
        raise EmitError(f"{cell} is in the studies {', '.join(matches)}; add --study")
    paths = next(iter(matches.values()))
    groups = sorted({path.parent.parent for path in paths})
    if len(groups) > 1:
        names = ", ".join(str(group.relative_to(group.parents[3])) for group in groups)
        raise EmitError(f"{cell} is more than one cell; name one of {names}")
    return paths[0]


def chosen_path(results: Path, study: str | None) -> Path:
    """Return the record's path of the cell that `decide` chose, of its first repeat."""
    folders = [folder.parent for folder in sorted(results.glob(f"{study or '*'}/cells"))]
    names = ("decision/answers.json", "answers.json")
    decided = {f: f / name for f in folders for name in reversed(names) if (f / name).is_file()}
    if not decided:
        raise EmitError(
            f"no decision is in {results / (study or '*')}; run `stratbench decide`, or name a cell as {NAME}"
        )
    if len(decided) > 1:
        raise EmitError(
            f"the studies {', '.join(f.name for f in decided)} have decisions; add --study"
        )
    folder, file = next(iter(decided.items()))
    answers = json.loads(file.read_text(encoding="utf-8"))["answers"]
    cells = [
        f"{a['experiment']}/{short['strategy']}/{a['model']}/{short['gpus']}gpu"
        for a in answers
        if (short := a.get("short") or {}).get("strategy")
    ]
    if not cells:
        raise EmitError(f"{file} chooses nothing; name a cell as {NAME}")
    if len(cells) > 1:
        raise EmitError(f"decide chose {len(cells)} cells; name one of {', '.join(cells)}")
    return named_path(results, folder.name, cells[0])

"""Writes files that appear whole or not at all, and reads files that others may have changed."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: A larger file is not one of ours and is not read into memory, in bytes.
MAX_JSON_BYTES = 64 << 20
#: The file that marks a folder of ours, where users choose the place.
MARK = ".stratbench"
#: Integers from here on do not fit in a column of a table.
_MAX_WHOLE = 1 << 63
_MAX_DIGITS = len(f"-{_MAX_WHOLE}")


def write_atomic(path: str | Path, text: str) -> None:
    """Write `text` to `path` atomically.

    A reader sees the old file, the new one or none, never a part.
    """
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8", newline="") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` at the end.

    It has the suffix of `path`. If something is raised, the old file stays as it was. An OSError names
    `path`: that of a full disk names nothing.
    """
    path = Path(path)
    temporary = path.with_name(f".{secrets.token_hex(8)}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(e, OSError) and e.errno and e.filename in (None, str(temporary)):
            raise OSError(e.errno, e.strerror, str(path)) from e
        raise


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, each as texts by column."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_rows(path: str | Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file of these columns, complete or not at all.

    Args:
        path: File to write.
        columns: Names of the columns.
        rows: Values by column; a missing one stays empty.
    """
    with (
        replacing(path) as unfinished,
        open(unfinished, "x", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)


def claim_folder(folder: Path, about: str = "") -> str:
    """Create `folder` for our files, or reuse one created so; return the recorded `about`.

    Raises FileExistsError if the folder holds anything and lacks our marker: files of others are never
    overwritten.
    """
    mark = folder / MARK
    ours = mark.is_file()
    if not ours and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} was not written by stratbench; name a folder that does not exist yet"
        )
    before = read_regular(mark, MAX_JSON_BYTES).decode(errors="replace") if ours else ""
    write_atomic(mark, about)
    return before


def reason_of(error: OSError) -> str:
    """Return an error of a file as a sentence without the number."""
    name = "" if error.filename is None else f": {error.filename}"
    return f"{error.strerror or error}{name}"


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """Return the bytes of a regular file of at most `most_bytes`.

    Raises OSError if it cannot be read, is larger, or is not a regular file: a FIFO or a device is
    never waited for.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as f:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "is not a regular file", str(path))
        # A file of /proc reports the size 0, and may never end.
        content = f.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(0, f"is larger than {most_bytes:,} bytes", str(path))
    return content


def last_lines(path: str | Path) -> list[str]:
    """Return the lines in the last 64 KiB of a log."""
    with open(path, "rb") as f:
        f.seek(0, 2)
        f.seek(max(0, f.tell() - 64 * 1024))
        return f.read().decode(errors="replace").splitlines()


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is not finite: JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def read_json(path: str | Path) -> Any:
    """Return the value in a JSON file.

    Only strict and ordinary JSON is accepted.

    Raises:
        ValueError: For anything else: NaN and infinities, integers beyond 64 bits, duplicate keys, lone
            surrogates, hundreds of levels.
        OSError: If the file cannot be read or is no regular file.
    """
    return parse_json(read_regular(path, MAX_JSON_BYTES).decode("utf-8"))


def read_json_lines(path: Path) -> list[Any]:
    """Return the values in a file of ours that grows by one a line.

    None where there is no file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]  # the last may be half written


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: For JSON that `read_json` rejects.
    """
    try:
        value = json.loads(
            text,
            parse_constant=reject_constant,
            parse_int=parse_whole_number,
            object_pairs_hook=reject_repeated_keys,
        )
        check_ordinary([value])
    except RecursionError:
        raise ValueError("too many levels") from None
    return value


def reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def parse_whole_number(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:  # Python's own refusal of thousands advises to allow them
        raise ValueError("a whole number is too large")
    return int(digits)


def reject_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated[:80]!a} is there twice")
    return values


def check_ordinary(values: Iterable[Any]) -> None:
    """Raise ValueError for a value that JSON allows but that no table or page can show."""
    for value in values:  # without a call for each: a record has hundreds
        kind = type(value)
        if kind is str:
            if not value.isascii():
                value.encode()  # UnicodeEncodeError, a ValueError, on half characters
        elif kind is float:
            if not math.isfinite(value):
                raise ValueError("a number is too large")
        elif kind is int:
            if not -_MAX_WHOLE <= value < _MAX_WHOLE:
                raise ValueError("a whole number is too large")
        elif kind is dict:
            check_ordinary(value)  # its keys
            check_ordinary(value.values())
        elif kind is list:
            check_ordinary(value)

"""Writes files atomically, and safely reads files that other programs may have changed."""

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

#: The maximum size in bytes of a JSON file that is read into memory.
MAX_JSON_BYTES = 64 << 20
#: The smallest integer that does not fit in a column of 64-bit integers.
_MAX_WHOLE = 1 << 63
_MAX_DIGITS = len(f"-{_MAX_WHOLE}")


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write a text to a file atomically, so that no reader sees an incomplete file."""
    with (
        replace_file_atomically(path) as temporary,
        temporary.open("x", encoding="utf-8", newline="") as f,
    ):
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


@contextmanager
def replace_file_atomically(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path, whose file replaces `path` at the end of the block.

    If the block raises, the old file is unchanged. An OSError always names `path`, which that of a full disk
    does not do by itself.
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


def read_csv_rows(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, each as texts by column."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv_rows(
    path: str | Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Write the rows of a CSV file with the columns `columns`, atomically.

    Args:
        path: File to write.
        columns: Names of the columns.
        rows: Values by column; a missing one stays empty.
    """
    with (
        replace_file_atomically(path) as unfinished,
        open(unfinished, "x", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)


def format_os_error(error: OSError) -> str:
    """Return an OSError as a text with reason and file name, without the error number."""
    name = "" if error.filename is None else f": {error.filename}"
    return f"{error.strerror or error}{name}"


def read_regular_file(path: str | Path, max_bytes: int) -> bytes:
    """Return the bytes of a regular file of at most `max_bytes`.

    Raises:
        OSError: The file cannot be read, is larger, or is not a regular file. A FIFO or a device does not
            block.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as f:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "is not a regular file", str(path))
        # The size is not read beforehand: files of /proc have the size 0, and may never end.
        content = f.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(0, f"is larger than {max_bytes:,} bytes", str(path))
    return content


def read_last_lines(path: str | Path) -> list[str]:
    """Return the lines in the last 64 KiB of a log."""
    with open(path, "rb") as f:
        f.seek(0, 2)
        f.seek(max(0, f.tell() - 64 * 1024))
        return f.read().decode(errors="replace").splitlines()


def replace_non_finite_by_none(value: float | None) -> float | None:
    """Return the value, or None for NaN and infinities, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def read_json(path: str | Path) -> Any:
    """Return the value in a file of strict JSON.

    Raises:
        ValueError: The file is not JSON, or has NaN or infinities, integers beyond 64 bits, duplicate keys,
            lone surrogates, or hundreds of levels.
        OSError: The file cannot be read or is not a regular file.
    """
    return parse_json(read_regular_file(path, MAX_JSON_BYTES).decode("utf-8"))


def read_json_lines(path: Path) -> list[Any]:
    """Return the values of all complete lines of a JSON Lines file. Empty if the file is missing."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]  # the last line may be incomplete


def parse_json(text: str) -> Any:
    """Return the value of a text of strict JSON.

    Raises:
        ValueError: The text is JSON that `read_json` rejects.
    """
    try:
        value = json.loads(
            text,
            parse_constant=reject_non_finite_constant,
            parse_int=parse_64_bit_integer,
            object_pairs_hook=reject_repeated_keys,
        )
        check_displayable_values([value])
    except RecursionError:
        raise ValueError("too many levels") from None
    return value


def reject_non_finite_constant(constant: str) -> None:
    """Raise ValueError for NaN or an infinity, which Python accepts in JSON."""
    raise ValueError(f"{constant} is not a number that JSON allows")


def parse_64_bit_integer(digits: str) -> int:
    """Return the integer in a text of digits. Raise ValueError if there are too many digits."""
    # Python's own error for so many digits would wrongly advise to raise a limit of Python.
    if len(digits) > _MAX_DIGITS:
        raise ValueError("an integer is too large for 64 bits")
    return int(digits)


def reject_repeated_keys(key_value_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of pairs of key and value. Raise ValueError if a key is repeated."""
    values = dict(key_value_pairs)
    if len(values) < len(key_value_pairs):
        keys = [key for key, _ in key_value_pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated[:80]!a} appears twice")
    return values


def check_displayable_values(values: Iterable[Any]) -> None:
    """Raise ValueError for a value that JSON allows but that tables or pages cannot show."""
    for value in values:  # one call checks a whole list, because a call per value would be slow
        kind = type(value)
        if kind is str:
            if not value.isascii():
                # Encoding raises UnicodeEncodeError, a ValueError, for lone surrogates.
                value.encode()
        elif kind is float:
            if not math.isfinite(value):
                raise ValueError("a number is too large")
        elif kind is int:
            if not -_MAX_WHOLE <= value < _MAX_WHOLE:
                raise ValueError("an integer is too large for 64 bits")
        elif kind is dict:
            check_displayable_values(value)  # iterating over a mapping gives its keys
            check_displayable_values(value.values())
        elif kind is list:
            check_displayable_values(value)

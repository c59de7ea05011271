"""Reads a user's texts with hidden tokens, and labelled texts from CSV or JSON Lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratbench.extensions.labelled.generated import hide_tokens
from stratbench.workload.data.kinds import FileKind, Samples
from stratbench.workload.data.own_files import (
    ByClass,
    Labelled,
    divide_into_train_and_test,
    open_tokenizer,
    read_tokens,
    read_utf8,
    split_text,
)
from stratbench.workload.data.sources import DataError, Source, Split

if TYPE_CHECKING:
    import numpy as np

TEXTS = Samples("text")
#: Number of different tokens of labelled texts without a tokenizer, which are the bytes of UTF-8. The byte 0,
#: which no text has, is the padding.
BYTES = 256
#: Smallest number of tokens of a text with a hidden token, which is neither the first nor the last.
SHORTEST_MASKED = 3
#: Names that tokenizers give to the padding and to the mask.
FILLS, HIDES = ("[PAD]", "<pad>"), ("[MASK]", "<mask>")
_CHUNK = 1024


def read_masked_text_files(
    name: str,
    files: Sequence[Path],
    tokenizer: Path | None,
    sequence: int,
    test_share: float,
    seed: int,
) -> tuple[Source, int]:
    """Return a text cut into samples with hidden tokens, and the number of different tokens.

    The files are concatenated to one text. The mask is the tokenizer's own, or a new token after the last one
    of the text.

    Args:
        name: Name of the data set.
        files: Files of the text.
        tokenizer: A tokenizer.json, if any.
        sequence: Tokens per sample.
        test_share: Fraction of the tokens, at the end, for the test set.
        seed: Seed of the places of hidden tokens.
    """
    tokens, size = read_tokens(name, files, tokenizer)
    opened = open_tokenizer(name, tokenizer) if tokenizer else None
    hides = find_special_token(opened, HIDES, size)
    parts = split_text(name, tokens, size, sequence, test_share)

    def make_split(part: np.ndarray, stream: int) -> Split:
        import numpy as np

        samples = len(part) // sequence
        texts = part[: samples * sequence].reshape(-1, sequence)
        chunks = (
            hide_tokens(texts[at : at + _CHUNK], hides, np.random.default_rng([seed, stream, at]))
            for at in range(0, samples, _CHUNK)
        )
        return Split(samples, chunks)

    return Source(make_split(parts[0], 1), make_split(parts[1], 2), []), max(size, hides + 1)


def find_special_token(tokenizer: Any, names: Sequence[str], size: int) -> int:
    """Return the number of a tokenizer's special token, or `size` if it has none.

    The number `size` is that of a new token.
    """
    known = (tokenizer.token_to_id(name) for name in names) if tokenizer else ()
    return next((number for number in known if number is not None), size)


def read_labelled_texts(
    name: str,
    files: Sequence[Path],
    test: Path | None,
    tokenizer: Path | None,
    text_column: str,
    label_column: str,
    vocabulary: int,
    sequence: int,
    test_share: float,
    seed: int,
) -> tuple[Source, int]:
    """Return the labelled texts of CSV or JSON Lines files, and the number of classes.

    A text is cut or padded to `sequence` tokens. Tokens are a tokenizer's, or bytes of UTF-8.

    Args:
        name: Name of the data set.
        files: Files of the training set.
        test: File of the test set, if any.
        tokenizer: A tokenizer.json, if any.
        text_column: Column of the texts.
        label_column: Column of the labels.
        vocabulary: Number of different tokens of the model.
        sequence: Tokens per sample.
        test_share: Share of each class for the test set, if there is no test file.
        seed: Seed of the division.
    """
    columns = (text_column, label_column)
    of_test = _read_texts_by_label(name, [test], columns) if test else None
    by_label = _read_texts_by_label(name, files, columns), of_test
    train, test_set, classes = divide_into_train_and_test(name, by_label, TEXTS, test_share, seed)
    opened = open_tokenizer(name, tokenizer) if tokenizer else None
    tokens = BYTES
    if opened:
        size = opened.get_vocab_size()
        fills = find_special_token(opened, FILLS, size)
        tokens = max(size, fills + 1)
        opened.enable_truncation(sequence)
        opened.enable_padding(length=sequence, pad_id=fills)
    if vocabulary < tokens:
        raise DataError(
            f"data set {name!r}: vocabulary = {vocabulary}: the texts need {tokens:,} tokens; set "
            f"`vocabulary: {tokens}`"
        )

    def make_split(texts: Labelled) -> Split:
        return Split(len(texts), _iter_text_chunks(opened, texts, sequence))

    return Source(make_split(train), make_split(test_set), []), classes


def _iter_text_chunks(
    tokenizer: Any, texts: Labelled, sequence: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    import numpy as np

    for start in range(0, len(texts), _CHUNK):
        chunk, labels = zip(*texts[start : start + _CHUNK], strict=True)
        if tokenizer:
            rows = [encoded.ids for encoded in tokenizer.encode_batch(list(chunk))]
        else:
            cut = (text.encode("utf-8")[:sequence] for text in chunk)
            rows = [list(text.ljust(sequence, b"\0")) for text in cut]
        yield np.array(rows, np.int64), np.array(labels)


def _read_texts_by_label(name: str, files: Sequence[Path], columns: tuple[str, str]) -> ByClass:
    by_label: ByClass = {}
    for path in files:
        for text, label in read_columns(name, path, columns):
            by_label.setdefault(label, []).append(text)
    return by_label


def read_columns(name: str, path: Path, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the values of some columns or keys of a file.

    The file is CSV with a header, or JSON Lines.

    Args:
        name: Name of the data set, for messages.
        path: The file.
        columns: Columns or keys.

    Raises:
        DataError: If the file is neither CSV nor JSON Lines, or if a column or a value is missing.
    """
    read = _iter_json_rows if path.suffix in (".jsonl", ".ndjson") else _iter_csv_rows
    rows = []
    for line, row in read(name, path):
        for column in columns:
            if column not in row:
                known = ", ".join(map(str, row))
                raise DataError(
                    f"data set {name!r}: {path}, line {line}: has no column {column!r}, but only {known}"
                )
        values = tuple(row[column] for column in columns)
        for column, value in zip(columns, values, strict=True):
            if type(value) not in (str, int) or not str(value).strip("\0 \t\r\n"):
                raise DataError(
                    f"data set {name!r}: {path}, line {line}: the value of {column} is {value!r}; it must be "
                    "a text or a whole number"
                )
        rows.append(tuple(map(str, values)))
    if not rows:
        raise DataError(f"data set {name!r}: {path} has no rows; add rows, or remove the file")
    return rows


def _open_lines(name: str, path: Path) -> io.StringIO:
    """Return a table file's lines, without the byte-order mark that spreadsheets write."""
    return io.StringIO(read_utf8(name, path).removeprefix("\ufeff"), newline="")


def _iter_csv_rows(name: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(1 << 30)  # a text may be longer than the default limit of 128 KiB
    reader = csv.DictReader(_open_lines(name, path), strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(
            f"data set {name!r}: {path}, line {reader.reader.line_num}: is not CSV ({error}); correct it"
        ) from error


def _iter_json_rows(name: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(_open_lines(name, path), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise DataError(
                f"data set {name!r}: {path}, line {line}: is not JSON ({error}); correct it"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"data set {name!r}: {path}, line {line}: is not a JSON object; write one object per line"
            )
        yield line, row


def _find_row_fault(values: Mapping[str, Any]) -> str | None:
    if (length := values["sequence"]) >= SHORTEST_MASKED:
        return None
    return f"sequence = {length}: a text with hidden tokens must have at least {SHORTEST_MASKED} tokens"


MASKED = FileKind(
    read_masked_text_files,
    {"sequence": 64, "test_share": 0.1, "seed": 0},
    further_file_keys=("tokenizer",),
    task="masked-token",
    invalid_values_reason=_find_row_fault,
)
LABELLED = FileKind(
    read_labelled_texts,
    {
        "text_column": "text",
        "label_column": "label",
        "vocabulary": BYTES,
        "sequence": 64,
        "test_share": 0.1,
        "seed": 0,
    },
    further_file_keys=("test", "tokenizer"),
    task="text-classification",
)

"""Reads a user's texts as masked texts, and labelled texts from CSV or JSON Lines files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratbench.extensions.labelled.generated import replace_tokens_by_mask
from stratbench.workload.data.kinds import FileKind, SampleFileKind
from stratbench.workload.data.own_files import (
    LabelledSamples,
    SamplesByClass,
    divide_samples_into_train_and_test,
    open_tokenizer,
    read_tokens_and_vocabulary_size,
    read_utf8_file,
    split_text_into_train_and_test,
)
from stratbench.workload.data.sources import DataError, Source, Split

if TYPE_CHECKING:
    import numpy as np

    from stratbench.workload.data.kinds import SourceAndClassCount
    from stratbench.workload.data.sources import InputsAndTargets

    #: Line number of a row in its file, and the row's values by column.
    NumberedRow = tuple[int, dict[str, Any]]

TEXTS = SampleFileKind("text")
#: Number of different tokens if there is no tokenizer. The tokens are then the bytes of UTF-8, and byte 0 is
#: the padding.
BYTES = 256
#: Smallest number of tokens of a masked text. Neither its first nor its last token is masked.
SHORTEST_MASKED = 3
#: Names that tokenizers give to the padding token and to the mask token.
PADDING_NAMES, MASK_NAMES = ("[PAD]", "<pad>"), ("[MASK]", "<mask>")
_CHUNK = 1024


def read_masked_text_files(
    dataset_name: str,
    files: Sequence[Path],
    tokenizer: Path | None,
    sequence: int,
    test_share: float,
    seed: int,
) -> SourceAndClassCount:
    """Return samples of a text with masked tokens, and the number of different tokens.

    The files are concatenated to one text. The mask is the tokenizer's own, or a new token after the last one
    of the text.

    Args:
        dataset_name: Name of the data set.
        files: Files of the text.
        tokenizer: A tokenizer.json, if any.
        sequence: Tokens per sample.
        test_share: Fraction of the tokens, at the end, for the test set.
        seed: Seed of the choice of masked tokens.
    """
    tokens, size = read_tokens_and_vocabulary_size(dataset_name, files, tokenizer)
    opened = open_tokenizer(dataset_name, tokenizer) if tokenizer else None
    hides = find_special_token_id(opened, MASK_NAMES, size)
    parts = split_text_into_train_and_test(dataset_name, tokens, size, sequence, test_share)

    def make_masked_split(tokens: np.ndarray, random_stream: int) -> Split:
        import numpy as np

        samples = len(tokens) // sequence
        texts = tokens[: samples * sequence].reshape(-1, sequence)
        chunks = (
            replace_tokens_by_mask(
                texts[at : at + _CHUNK], hides, np.random.default_rng([seed, random_stream, at])
            )
            for at in range(0, samples, _CHUNK)
        )
        return Split(samples, chunks)

    return Source(make_masked_split(parts[0], 1), make_masked_split(parts[1], 2), []), max(
        size, hides + 1
    )


def find_special_token_id(tokenizer: Any, token_names: Sequence[str], new_number: int) -> int:
    """Return the number of a tokenizer's special token, such as the mask.

    Args:
        tokenizer: The tokenizer, or None.
        token_names: Possible names of the token.
        new_number: Number that is returned if the tokenizer has no such token.
    """
    known = (tokenizer.token_to_id(name) for name in token_names) if tokenizer else ()
    return next((number for number in known if number is not None), new_number)


def read_labelled_texts(
    dataset_name: str,
    files: Sequence[Path],
    test: Path | None,
    tokenizer: Path | None,
    text_column: str,
    label_column: str,
    vocabulary: int,
    sequence: int,
    test_share: float,
    seed: int,
) -> SourceAndClassCount:
    """Return the labelled texts in CSV or JSON Lines files, and the number of classes.

    A text is cut or padded to `sequence` tokens. Tokens are a tokenizer's, or bytes of UTF-8.

    Args:
        dataset_name: Name of the data set.
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
    of_test = _read_texts_by_label(dataset_name, [test], columns) if test else None
    by_label = _read_texts_by_label(dataset_name, files, columns), of_test
    train, test_set, classes = divide_samples_into_train_and_test(
        dataset_name, by_label, TEXTS, test_share, seed
    )
    opened = open_tokenizer(dataset_name, tokenizer) if tokenizer else None
    tokens = BYTES
    if opened:
        size = opened.get_vocab_size()
        fills = find_special_token_id(opened, PADDING_NAMES, size)
        tokens = max(size, fills + 1)
        opened.enable_truncation(sequence)
        opened.enable_padding(length=sequence, pad_id=fills)
    if vocabulary < tokens:
        raise DataError(
            f"data set {dataset_name!r}: vocabulary = {vocabulary}: the texts have {tokens:,} different "
            f"tokens; set `vocabulary: {tokens}`"
        )

    def make_labelled_split(texts: LabelledSamples) -> Split:
        return Split(len(texts), _iter_labelled_text_chunks(opened, texts, sequence))

    return Source(make_labelled_split(train), make_labelled_split(test_set), []), classes


def _iter_labelled_text_chunks(
    tokenizer: Any, texts: LabelledSamples, sequence: int
) -> Iterator[InputsAndTargets]:
    import numpy as np

    for start in range(0, len(texts), _CHUNK):
        chunk, labels = zip(*texts[start : start + _CHUNK], strict=True)
        if tokenizer:
            rows = [encoded.ids for encoded in tokenizer.encode_batch(list(chunk))]
        else:
            cut = (text.encode("utf-8")[:sequence] for text in chunk)
            rows = [list(text.ljust(sequence, b"\0")) for text in cut]
        yield np.array(rows, np.int64), np.array(labels)


def _read_texts_by_label(
    dataset_name: str, files: Sequence[Path], columns: tuple[str, str]
) -> SamplesByClass:
    by_label: SamplesByClass = {}
    for path in files:
        for text, label in read_table_rows(dataset_name, path, columns):
            by_label.setdefault(label, []).append(text)
    return by_label


def read_table_rows(dataset_name: str, path: Path, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the values in the given columns of a table file. Each row is a tuple.

    The file is CSV with a header, or JSON Lines.

    Args:
        dataset_name: Name of the data set, for messages.
        path: The file.
        columns: Columns or keys.

    Raises:
        DataError: If the file is neither CSV nor JSON Lines, or if a column or a value is missing.
    """
    read = _iter_json_rows if path.suffix in (".jsonl", ".ndjson") else _iter_csv_rows
    rows = []
    for line, row in read(dataset_name, path):
        for column in columns:
            if column not in row:
                known = ", ".join(map(str, row))
                raise DataError(
                    f"data set {dataset_name!r}: {path}, line {line}: has no column {column!r}, but only "
                    f"{known}"
                )
        values = tuple(row[column] for column in columns)
        for column, value in zip(columns, values, strict=True):
            if type(value) not in (str, int) or not str(value).strip("\0 \t\r\n"):
                raise DataError(
                    f"data set {dataset_name!r}: {path}, line {line}: the value of {column} is {value!r}; "
                    "it must be a text or a whole number"
                )
        rows.append(tuple(map(str, values)))
    if not rows:
        raise DataError(
            f"data set {dataset_name!r}: {path} has no rows; add rows, or remove the file"
        )
    return rows


def _open_table_text(dataset_name: str, path: Path) -> io.StringIO:
    """Return the text of a table file, without the byte-order mark that spreadsheets write."""
    return io.StringIO(read_utf8_file(dataset_name, path).removeprefix("\ufeff"), newline="")


def _iter_csv_rows(dataset_name: str, path: Path) -> Iterator[NumberedRow]:
    # A text may be longer than 128 KiB, the default limit.
    csv.field_size_limit(1 << 30)
    reader = csv.DictReader(_open_table_text(dataset_name, path), strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(
            f"data set {dataset_name!r}: {path}, line {reader.reader.line_num}: is not CSV ({error}); "
            "correct it"
        ) from error


def _iter_json_rows(dataset_name: str, path: Path) -> Iterator[NumberedRow]:
    for line, text in enumerate(_open_table_text(dataset_name, path), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise DataError(
                f"data set {dataset_name!r}: {path}, line {line}: is not JSON ({error}); correct it"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"data set {dataset_name!r}: {path}, line {line}: is not a JSON object; write one object per "
                "line"
            )
        yield line, row


def _invalid_sequence_reason(values: Mapping[str, Any]) -> str | None:
    if (length := values["sequence"]) >= SHORTEST_MASKED:
        return None
    return f"sequence = {length}: a text with hidden tokens must have at least {SHORTEST_MASKED} tokens"


MASKED = FileKind(
    read_masked_text_files,
    {"sequence": 64, "test_share": 0.1, "seed": 0},
    further_file_keys=("tokenizer",),
    task="masked-token",
    invalid_values_reason=_invalid_sequence_reason,
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

"""Reads a user's folder of WAV files, each with a label."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from stratbench.extensions.labelled.texts import read_table_rows
from stratbench.workload.data.kinds import FileKind, SampleFileKind
from stratbench.workload.data.own_files import (
    LabelledSamples,
    SamplesByClass,
    divide_samples_into_train_and_test,
    list_sample_files,
    list_train_and_test_files,
)
from stratbench.workload.data.sources import DataError, Source, Split

if TYPE_CHECKING:
    import numpy as np

    from stratbench.workload.data.kinds import SourceAndClassCount
    from stratbench.workload.data.sources import InputsAndTargets

WAVEFORMS = SampleFileKind("waveform", (".wav",))
#: Columns of a user's table that has the label of each WAV file.
COLUMNS = ("file", "label")
_CHUNK = 64


def read_waveform_folder(
    dataset_name: str, folder: Path, labels: Path | None, length: int, test_share: float, seed: int
) -> SourceAndClassCount:
    """Return the waveforms in a folder of WAV files, and the number of classes.

    All files must have one sample rate. Channels are averaged. A waveform is cut to `length` values, or
    padded with zeros.

    Args:
        dataset_name: Name of the data set.
        folder: Folder of the WAV files.
        labels: Table with each file's label, or None if the folder has class folders.
        length: Values per waveform.
        test_share: Share of each class for the test set, if there is none.
        seed: Seed of the division.
    """
    by_label = (_list_files_by_label(dataset_name, folder, labels), None) if labels else None
    by_class = by_label or list_train_and_test_files(dataset_name, folder, WAVEFORMS)
    train, test, classes = divide_samples_into_train_and_test(
        dataset_name, by_class, WAVEFORMS, test_share, seed
    )
    first = train[0][0]
    with _open_wav_file(dataset_name, first) as file:
        rate = file.getframerate()

    def iter_waveform_chunks(files: LabelledSamples) -> Iterator[InputsAndTargets]:
        import numpy as np

        for start in range(0, len(files), _CHUNK):
            part = files[start : start + _CHUNK]
            values = [
                _read_waveform_values(dataset_name, path, length, rate, first) for path, _ in part
            ]
            yield np.stack(values)[:, None], np.array([label for _, label in part])

    splits = (
        Split(len(train), iter_waveform_chunks(train)),
        Split(len(test), iter_waveform_chunks(test)),
    )
    return Source(*splits, []), classes


def _list_files_by_label(dataset_name: str, folder: Path, table: Path) -> SamplesByClass:
    """Return the WAV files by label, as a user's table states them."""
    files: dict[str, Path] = dict(list_sample_files([folder], WAVEFORMS))
    by_label: SamplesByClass = {}
    for file, label in read_table_rows(dataset_name, table, COLUMNS):
        if (path := files.pop(PurePath(file).as_posix(), None)) is None:
            raise DataError(
                f"data set {dataset_name!r}: {table} names {file!r}, which is not a {WAVEFORMS} in "
                f"{folder}, or names it twice; correct the table"
            )
        by_label.setdefault(label, []).append(path)
    return by_label


def _open_wav_file(dataset_name: str, path: Path) -> wave.Wave_read:
    try:
        return wave.open(str(path), "rb")
    except (OSError, wave.Error, EOFError) as error:
        raise DataError(
            f"data set {dataset_name!r}: {path} cannot be read as 16-bit PCM ({error or 'it ends early'}); "
            "convert or remove it"
        ) from error


def _read_waveform_values(
    dataset_name: str, path: Path, length: int, sample_rate: int, file_with_this_rate: Path
) -> np.ndarray:
    """Return the values of a WAV file as float32 [length].

    They are from -1 to 1. The waveform is cut or padded.

    Args:
        dataset_name: Name of the data set.
        path: File of the waveform.
        length: Number of values.
        sample_rate: Sample rate that the file must have.
        file_with_this_rate: Another file of the data set, with this sample rate; messages name it.
    """
    import numpy as np

    with _open_wav_file(dataset_name, path) as file:
        channels, width, own_rate, frames, *_ = file.getparams()
        if width != 2:
            raise DataError(
                f"data set {dataset_name!r}: {path} has {8 * width}-bit values; convert it to 16-bit PCM"
            )
        if own_rate != sample_rate:
            raise DataError(
                f"data set {dataset_name!r}: {path} has {own_rate:,} values per second, but "
                f"{file_with_this_rate} has {sample_rate:,}; resample all files to one rate"
            )
        count = min(frames, length)
        stored = file.readframes(count)
    if not count or len(stored) != 2 * channels * count:
        raise DataError(
            f"data set {dataset_name!r}: {path} contains {len(stored) // (2 * channels)} of the {frames} "
            "values that its header states; repair or remove it"
        )
    values = np.zeros(length, np.float32)
    values[:count] = np.frombuffer(stored, "<i2").reshape(-1, channels).mean(1) / 32768
    return values


KIND = FileKind(
    read_waveform_folder,
    {"length": 16000, "test_share": 0.1, "seed": 0},
    further_file_keys=("labels",),
    samples=WAVEFORMS,
    shape=(1, "length"),
    has_float_samples=True,
)

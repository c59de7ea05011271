"""Writes and reads prepared data sets, each a folder with four arrays and their metadata.

Images: `train_inputs.npy`, `test_inputs.npy` uint8 or float32 [N, C, H, W]; `train_targets.npy`,
`test_targets.npy` int64 [N], or float32 [N, values]. Waveforms: float32 [N, C, length] and int64 [N]. Texts:
inputs and targets [N, length], tokens in the smallest sufficient type; labels of hidden tokens are int32,
labels of whole texts int64 [N]. The folder is either complete or missing. Its SHA-256 shows later damage. The
hash is computed again only if a file's size or modification time differs from the metadata.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratbench.cell.files import read_json
from stratbench.cell.text.progress import create_progress_bar
from stratbench.workload.data.dataset import get_sample_kind
from stratbench.workload.data.sources import DataError, Source

if TYPE_CHECKING:
    import numpy as np

    from stratbench.workload.data.dataset import Dataset

    ArraysByName = dict[str, np.ndarray]

#: Version of the files' format. Data sets in an older format are prepared again.
FORMAT = 2
#: Metadata of a prepared data set, as in its metadata file.
Metadata = dict[str, Any]
ARRAYS = ("train_inputs", "train_targets", "test_inputs", "test_targets")
#: Names of files of a prepared data set, including Snakemake's. A folder with only such files may be
#: replaced.
OURS = re.compile(rf"({'|'.join(ARRAYS)})\.npy|meta(-[0-9a-f]{{12}})?\.json|\.snakemake_timestamp")


def format_meta_file_name(identity: Mapping[str, Any] | None) -> str:
    """Return the name of the metadata file of a data set with a given identity.

    Each identity has its own name, so that Snakemake finds no such file in a folder with other data.

    Args:
        identity: Identity that determines the samples, or None if the data set's name does.
    """
    if identity is None:
        return "meta.json"
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"meta-{digest[:12]}.json"


def write_data_set(
    folder: Path, requested_metadata: Mapping[str, Any], source: Source, dataset: Dataset
) -> None:
    """Write the arrays and metadata of a data set to a folder.

    The metadata are `requested_metadata`, the numbers of samples, the source files, and the arrays' SHA-256,
    size in bytes and modification time. For images and waveforms they include the mean and standard deviation
    of each channel over the training set, where bytes count as 0..1. They include the least possible loss if
    it is known.

    Args:
        folder: Folder to write.
        requested_metadata: Metadata that identify the data set.
        source: Samples of the data set.
        dataset: Description of the samples.
    """
    import numpy as np

    shape = dataset.shape or ()
    what = get_sample_kind(shape)
    value = (
        np.float32
        if dataset.has_float_samples
        else {1: np.uint8, 4: np.int32}[dataset.stored_bytes]
    )
    moments = (
        None
        if dataset.is_text
        else (_FloatMoments if dataset.has_float_samples else _ByteMoments)(shape[0])
    )
    for split, (samples, chunks) in (("train", source.train), ("test", source.test)):
        inputs, targets = (
            np.lib.format.open_memmap(folder / f"{split}_{name}.npy", "w+", dtype, (samples, *one))
            for name, (dtype, one) in {
                "inputs": (value, shape),
                "targets": dataset.target_dtype_name_and_shape,
            }.items()
        )
        start = 0
        with create_progress_bar(
            samples, f" {what}", f"{requested_metadata['name']}, {split}"
        ) as bar:
            for chunk_inputs, chunk_targets in chunks:
                stop = start + len(chunk_targets)
                inputs[start:stop], targets[start:stop] = chunk_inputs, chunk_targets
                if split == "train" and moments is not None:
                    moments.add_images(chunk_inputs)
                start = stop
                bar.update(len(chunk_targets))
        if start != samples:
            raise DataError(
                f"data set {requested_metadata['name']!r}: the {split} set has {start} {what} instead of "
                f"{samples}; correct the code that makes them"
            )
        inputs.flush()
        targets.flush()
    moments_meta = {} if moments is None else moments.compute_mean_and_std()
    if 0 in moments_meta.get("std", ()):
        raise DataError(
            f"data set {requested_metadata['name']!r}: channel {moments_meta['std'].index(0)} has the same "
            f"value in all training {what}, so that nothing can be learnt from it; remove the channel"
        )
    meta = {
        **requested_metadata,
        "classes": dataset.classes,
        "shape": list(shape),
        "train_samples": source.train.samples,
        "test_samples": source.test.samples,
        **moments_meta,
        **({"least_loss": source.least_loss} if dataset.is_text or source.least_loss else {}),
        **({"floats": True} if dataset.has_float_samples else {}),
        **({"values": True} if dataset.values else {}),
        **({"vocabulary": dataset.vocabulary} if dataset.vocabulary else {}),
        "generated": source.generated,
        "sources": source.files,
        "sha256": _hash_arrays(folder),
        "arrays": {array: _get_file_bytes_and_mtime_ns(folder, array) for array in ARRAYS},
    }
    path = folder / format_meta_file_name(requested_metadata["spec"])
    path.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


class _ByteMoments:
    """Computes mean and standard deviation of each channel of uint8 images, from a histogram."""

    def __init__(self, channels: int) -> None:
        import numpy as np

        self._counts = np.zeros((channels, 256), dtype=np.int64)

    def add_images(self, images: np.ndarray) -> None:
        import numpy as np

        channels = images.swapaxes(0, 1)
        self._counts += [np.bincount(c.ravel(), minlength=256) for c in channels]

    def compute_mean_and_std(self) -> dict[str, list[float]]:
        import numpy as np

        values, share = np.arange(256) / 255, self._counts / self._counts.sum(1, keepdims=True)
        mean = share @ values
        return {
            "mean": mean.tolist(),
            "std": np.sqrt((share * (values - mean[:, None]) ** 2).sum(axis=1)).tolist(),
        }


class _FloatMoments:
    """Computes mean and standard deviation of each channel of float32 samples, part by part.

    See Chan, Golub and LeVeque, 1979.
    """

    def __init__(self, channels: int) -> None:
        import numpy as np

        self._n, self._mean, self._squares = 0, np.zeros(channels), np.zeros(channels)

    def add_images(self, images: np.ndarray) -> None:
        import numpy as np

        values = images.swapaxes(0, 1).reshape(images.shape[1], -1).astype(np.float64)
        n, mean = values.shape[1], values.mean(axis=1)
        self._squares += ((values - mean[:, None]) ** 2).sum(axis=1)
        self._squares += (mean - self._mean) ** 2 * self._n * n / (self._n + n)
        self._mean += (mean - self._mean) * n / (self._n + n)
        self._n += n

    def compute_mean_and_std(self) -> dict[str, list[float]]:
        import numpy as np

        return {"mean": self._mean.tolist(), "std": np.sqrt(self._squares / self._n).tolist()}


def _get_file_bytes_and_mtime_ns(folder: Path, array_name: str) -> list[int]:
    """Return the size in bytes and the modification time in ns of an array's file.

    Raises:
        DataError: If it is not a regular file.
    """
    path = folder / f"{array_name}.npy"
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: is not a regular file; replace or remove it")
    return [status.st_size, status.st_mtime_ns]


def _hash_arrays(folder: Path) -> str:
    """Return the SHA-256 of the four array files of a prepared data set."""
    digest = hashlib.sha256()
    for array in ARRAYS:
        # This call raises DataError for a FIFO, because reading it would wait forever.
        _get_file_bytes_and_mtime_ns(folder, array)
        with (folder / f"{array}.npy").open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def read_metadata_if_intact(folder: Path, requested_metadata: Mapping[str, Any]) -> Metadata | None:
    """Return the metadata of a prepared data set. None if it is damaged or not the requested one."""
    try:
        meta = _read_metadata_file(folder)
        same = all(meta[key] == value for key, value in requested_metadata.items())
        return meta if same and meta["sha256"] == _hash_arrays(folder) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def install_data_set(
    new_folder: Path, target_folder: Path, requested_metadata: Mapping[str, Any]
) -> Metadata:
    """Move a new prepared data set to its final folder, and return the metadata there.

    The move is one atomic step. If another process has prepared the same data set there, that one stays. A
    damaged or different data set is first moved next to `new_folder`.

    Args:
        new_folder: Folder with the new data set.
        target_folder: Destination.
        requested_metadata: Metadata that identify the data set.

    Raises:
        DataError: If the destination has a file that is not of a data set. The destination is then left
            unchanged.
    """
    while True:
        try:
            os.replace(new_folder, target_folder)
            return _read_metadata_file(target_folder)
        except OSError as error:
            if not target_folder.exists():
                raise DataError(f"{target_folder}: cannot be written: {error.strerror}") from error
        if (other := read_metadata_if_intact(target_folder, requested_metadata)) is not None:
            return other
        _move_old_data_set(target_folder, new_folder.parent)


def _move_old_data_set(folder: Path, aside_folder: Path) -> None:
    try:
        foreign = sorted(e.name for e in folder.iterdir() if not OURS.fullmatch(e.name))
        if foreign:
            raise DataError(
                f"{folder}: contains {foreign[0]!r}, which is not part of a prepared data set; "
                "name another folder, or empty this one"
            )
        os.replace(folder, aside_folder / f"replaced-{len(list(aside_folder.iterdir()))}")
    except NotADirectoryError:
        raise DataError(f"{folder}: is not a folder; name another path") from None
    except FileNotFoundError:
        return  # another process has already moved the folder


def _read_metadata_file(folder: Path) -> Metadata:
    """Return the content of the metadata file of a prepared data set.

    Raises:
        OSError: If the file is missing or unreadable.
        ValueError: If the file is not JSON.
    """
    paths = list(folder.glob("meta*.json"))
    if len(paths) != 1:
        raise FileNotFoundError(errno.ENOENT, f"{len(paths)} files meta*.json", str(folder))
    return read_json(paths[0])


def read_unverified_metadata(folder: Path) -> Metadata:
    """Return the metadata of a prepared data set, without a check of its arrays.

    Raises:
        DataError: If the metadata are missing or unreadable.
    """
    try:
        return _read_metadata_file(folder)
    except (OSError, ValueError) as error:
        raise _make_incomplete_data_error(folder, error) from error


def read_verified_metadata(folder: Path) -> Metadata:
    """Return the metadata of a prepared data set, after checking that its arrays are unchanged.

    The arrays are read only if a size or modification time differs, as after a copy or a change.

    Raises:
        DataError: If a file is missing, or the arrays have another SHA-256.
    """
    try:
        meta = _read_metadata_file(folder)
        now = {array: _get_file_bytes_and_mtime_ns(folder, array) for array in ARRAYS}
        recorded = meta.get("arrays", {})
        changed = [array for array in ARRAYS if now[array] != recorded.get(array)]
        if changed and _hash_arrays(folder) != meta["sha256"]:
            raise DataError(
                f"the arrays {', '.join(changed)} have changed since the data set was prepared"
            )
    except OSError as error:
        raise _make_incomplete_data_error(folder, error.strerror or error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _make_incomplete_data_error(folder, error) from error
    return meta


def _make_incomplete_data_error(folder: Path, reason: object) -> DataError:
    return DataError(
        f"{folder} is not a complete prepared data set ({reason}); delete it, and the next run prepares it "
        f"again, as `python -m stratbench.workload.data.prepare NAME --out {folder}` does"
    )


def read_data_set(folder: Path) -> tuple[Metadata, ArraysByName]:
    """Return the metadata of a prepared data set, and its arrays by name.

    The arrays are mapped from their files copy-on-write.

    Raises:
        DataError: If the folder is incomplete.
    """
    import numpy as np

    try:
        meta = _read_metadata_file(folder)
        for array in ARRAYS:
            _get_file_bytes_and_mtime_ns(folder, array)
        # Copy-on-write mapping ("c") gives PyTorch writable arrays, and never changes the files.
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in ARRAYS}
        for split in ("train", "test"):
            samples = meta[f"{split}_samples"]
            shape = (samples, *meta["shape"])
            if arrays[f"{split}_inputs"].shape != shape:
                raise ValueError(f"{split}_inputs.npy has another shape than the metadata say")
            is_tokens = len(shape) == 2 and "vocabulary" not in meta
            of_targets = shape if is_tokens else shape[:1]
            if meta.get("values"):
                of_targets = (samples, meta["classes"])
            if arrays[f"{split}_targets"].shape != of_targets:
                raise ValueError(
                    f"the shape of {split}_targets.npy does not match {split}_inputs.npy"
                )
        # If another process has replaced the folder meanwhile, the arrays may not fit the metadata.
        if _read_metadata_file(folder) != meta:
            raise ValueError("the folder was replaced while it was read")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _make_incomplete_data_error(folder, error) from error
    return meta, arrays

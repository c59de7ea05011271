"""Reads a user's files for a data set: images in class folders, and texts.

When the Snakefile is read, files are only listed, and hashed again if one has changed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stratbench.cell.files import read_json, write_text_atomically
from stratbench.cell.text.progress import create_progress_bar
from stratbench.workload.data.kinds import SampleFileKind
from stratbench.workload.data.sources import DataError, Source, Split, cut_text_into_samples

if TYPE_CHECKING:
    import numpy as np

    from stratbench.workload.data.kinds import SourceAndClassCount
    from stratbench.workload.data.sources import InputsAndTargets


IMAGES = SampleFileKind("image", (".png", ".jpg", ".jpeg"))
#: Name of the subfolder with the training set, and possible names of the subfolder with the test set.
TRAIN, TESTS = "train", ("test", "val")
_CHUNK = 256
_READERS = 8


def list_sample_files(
    files_and_folders: Sequence[Path], sample_kind: SampleFileKind
) -> list[tuple[str, Path]]:
    """Return the given files, and all sample files in the given folders.

    Args:
        files_and_folders: Files, and folders of samples.
        sample_kind: Kind of sample files in the folders.

    Returns:
        Pairs (path relative to the given folder, path), sorted within each folder.

    Raises:
        DataError: If a folder has no sample file.
    """
    files: list[tuple[str, Path]] = []
    for place in files_and_folders:
        if place.is_dir():
            below = sorted(_iter_sample_files(place, sample_kind))
            if not below:
                raise DataError(
                    f"{place}: has no {sample_kind} in its subfolders; add some, or correct the path"
                )
            files += [(path.relative_to(place).as_posix(), path) for path in below]
        else:
            files.append(("", place))
    return files


def _iter_sample_files(folder: Path, sample_kind: SampleFileKind) -> Iterator[Path]:
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(sample_kind.ends) and not name.startswith("."):
                yield Path(at, name)


def hash_sample_files(
    files_and_folders: Sequence[Path], sample_kind: SampleFileKind, hash_cache: Path | None = None
) -> str:
    """Return the SHA-256 of the relative paths and contents of files.

    Args:
        files_and_folders: Files, and folders of samples.
        sample_kind: Kind of sample files in the folders.
        hash_cache: File that caches the hash, if any. Files whose name, size and modification time are
            unchanged are not read again.

    Raises:
        DataError: If a file cannot be read.
    """
    files = list_sample_files(files_and_folders, sample_kind)
    seen = hashlib.sha256()
    for name, path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: is not a regular file; replace or remove it")
        seen.update(f"{name}\0{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    if hash_cache is not None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            cached = read_json(hash_cache)
            if cached["listing"] == seen.hexdigest():
                return str(cached["sha256"])
    digest = hashlib.sha256()
    with create_progress_bar(len(files), " files", f"hashing {files_and_folders[0].name}") as bar:
        for name, path in files:
            digest.update(f"{name}\0".encode() + _hash_file(path))
            bar.update(1)
    if hash_cache is not None:
        # The cache need not be written. Without it, the files are just hashed again.
        with suppress(OSError):
            write_text_atomically(
                hash_cache,
                f'{{"listing": "{seen.hexdigest()}", "sha256": "{digest.hexdigest()}"}}\n',
            )
    return digest.hexdigest()


def _hash_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


#: Samples of each class, by the name of the class.
SamplesByClass = dict[str, list[Any]]
#: Samples, each with the number of its class.
LabelledSamples = list[tuple[Any, int]]


class DividedSamples(NamedTuple):
    """Training and test samples with their class numbers, and the number of classes."""

    train: LabelledSamples
    test: LabelledSamples
    classes: int


def list_train_and_test_files(
    dataset_name: str, folder: Path, sample_kind: SampleFileKind
) -> tuple[SamplesByClass, SamplesByClass | None]:
    """Return the training and test files of each class, from FOLDER/train/CLASS and FOLDER/test/CLASS.

    The test folder may be named `val`. Without it, the test files are None, and the class folders may be in
    FOLDER itself.
    """
    top = folder / TRAIN if (folder / TRAIN).is_dir() else folder
    apart = next((folder / t for t in TESTS if (folder / t).is_dir()), None)
    if top == folder and apart is not None:
        raise DataError(
            f"data set {dataset_name!r}: {folder} has a subfolder {apart.name!r}, but no subfolder "
            f"{TRAIN!r}; add it"
        )
    test = _list_files_by_class(dataset_name, apart, sample_kind) if apart else None
    return _list_files_by_class(dataset_name, top, sample_kind), test


def _list_files_by_class(
    dataset_name: str, folder: Path, sample_kind: SampleFileKind
) -> SamplesByClass:
    """Return the sample files of each class folder. Raise DataError if a class folder has none."""
    by_class = {}
    for place in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        by_class[place.name] = sorted(_iter_sample_files(place, sample_kind))
        if not by_class[place.name]:
            raise DataError(
                f"data set {dataset_name!r}: the class folder {place} has no {sample_kind}; add some, or "
                "remove it"
            )
    return by_class


def divide_samples_into_train_and_test(
    dataset_name: str,
    train_and_test_by_class: tuple[SamplesByClass, SamplesByClass | None],
    sample_kind: SampleFileKind,
    test_share: float,
    seed: int,
) -> DividedSamples:
    """Return training and test samples with their class numbers, and the number of classes.

    Classes are numbered in the order of their names. Without a test set, the training set is divided: the
    share `test_share` of each class, but at least one sample, becomes the test set.

    Args:
        dataset_name: Name of the data set.
        train_and_test_by_class: Samples by class of the training set, and of the test set, if any.
        sample_kind: Kind of the samples.
        test_share: Share of each class for the test set.
        seed: Seed of the division.
    """
    import numpy as np

    train, test = train_and_test_by_class
    noun, classes = sample_kind.noun, sorted(train)
    if len(classes) < 2:
        raise DataError(
            f"data set {dataset_name!r}: the training set has {len(classes)} class; add {noun}s of a second "
            "class"
        )
    if test is None:
        test = {}
        for number, label in enumerate(classes):
            of_class = train[label]
            if len(of_class) < 2:
                raise DataError(
                    f"data set {dataset_name!r}: class {label!r} has one {noun}, which cannot be divided "
                    f"into training and test set; add {noun}s, or give a test set (`test`)"
                )
            share = min(max(1, round(test_share * len(of_class))), len(of_class) - 1)
            chosen = set(np.random.default_rng([seed, number]).permutation(len(of_class))[:share])
            test[label] = [one for i, one in enumerate(of_class) if i in chosen]
            train[label] = [one for i, one in enumerate(of_class) if i not in chosen]
    elif unknown := sorted(test.keys() - train.keys()):
        raise DataError(
            f"data set {dataset_name!r}: the test set has a class {unknown[0]!r}, but the training set does "
            "not; add samples of it to the training set"
        )

    def number_classes(by_class: SamplesByClass) -> LabelledSamples:
        return [(one, classes.index(label)) for label in by_class for one in by_class[label]]

    return DividedSamples(number_classes(train), number_classes(test), len(classes))


def read_image_folder(
    dataset_name: str, folder: Path, size: int, channels: int, test_share: float, seed: int
) -> SourceAndClassCount:
    """Return the images in a folder of class folders, and the number of classes.

    An image is resized so that its short side has `size` pixels (bilinear, antialiased), and its centre
    is cut out.

    Args:
        dataset_name: Name of the data set.
        folder: The folder.
        size: Height and width of an image in pixels.
        channels: Channels of an image.
        test_share: Fraction of each class for the test set, but one image at least.
        seed: Seed of the division.
    """
    by_class = list_train_and_test_files(dataset_name, folder, IMAGES)
    train, test, classes = divide_samples_into_train_and_test(
        dataset_name, by_class, IMAGES, test_share, seed
    )

    def make_image_split(images: LabelledSamples) -> Split:
        return Split(len(images), _iter_image_file_chunks(dataset_name, images, size, channels))

    return Source(make_image_split(train), make_image_split(test), []), classes


def invalid_channels_reason(values: Mapping[str, Any]) -> str | None:
    """Return why the value of the key `channels` is invalid. None if it is valid."""
    if values["channels"] in (1, 3):
        return None
    return f"channels = {values['channels']}: images become grey (1) or RGB (3)"


def _iter_image_file_chunks(
    dataset_name: str, labelled_files: Sequence[tuple[Path, int]], size: int, channels: int
) -> Iterator[InputsAndTargets]:
    import numpy as np

    with ThreadPoolExecutor(_READERS) as readers:
        for start in range(0, len(labelled_files), _CHUNK):
            chunk = labelled_files[start : start + _CHUNK]
            pixels = readers.map(
                lambda one: _read_image_pixels(dataset_name, one[0], size, channels), chunk
            )
            yield np.stack(list(pixels)), np.array([label for _, label in chunk])


def _read_image_pixels(dataset_name: str, image_path: Path, size: int, channels: int) -> np.ndarray:
    """Return the pixels of an image file as uint8 [channels, size, size]."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(image_path) as image:
            whole = image.convert("RGB" if channels == 3 else "L")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"data set {dataset_name!r}: {image_path} cannot be read as an image ({error}); repair or remove "
            "it"
        ) from error
    width, height = whole.size
    factor = size / min(width, height)
    width, height = max(size, round(width * factor)), max(size, round(height * factor))
    left, top = (width - size) // 2, (height - size) // 2
    resized = whole.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(resized.crop((left, top, left + size, top + size)), np.uint8)
    return pixels.reshape(size, size, channels).transpose(2, 0, 1)


def read_text_files(
    dataset_name: str,
    files: Sequence[Path],
    tokenizer: Path | None,
    sequence: int,
    test_share: float,
) -> SourceAndClassCount:
    """Return samples of the text in some files, and the number of different tokens.

    The text is cut into pieces of `sequence` tokens. Without a tokenizer, a character's token is its index
    among the sorted different characters of the text.

    Args:
        dataset_name: Name of the data set.
        files: Files of the text.
        tokenizer: A tokenizer.json, if any.
        sequence: Tokens per sample.
        test_share: Fraction of the tokens, at the end, for the test set.
    """
    tokens, vocabulary = read_tokens_and_vocabulary_size(dataset_name, files, tokenizer)
    train, test = split_text_into_train_and_test(
        dataset_name, tokens, vocabulary, sequence, test_share
    )
    return Source(
        cut_text_into_samples(train, sequence), cut_text_into_samples(test, sequence), []
    ), vocabulary


def read_tokens_and_vocabulary_size(
    dataset_name: str, files: Sequence[Path], tokenizer: Path | None
) -> tuple[np.ndarray, int]:
    """Return the tokens of text files, which are concatenated, and the number of different tokens."""
    import numpy as np

    text = "".join(read_utf8_file(dataset_name, path) for path in files)
    if tokenizer is not None:
        opened = open_tokenizer(dataset_name, tokenizer)
        tokens = np.asarray(opened.encode(text, add_special_tokens=False).ids, np.int64)
        vocabulary = opened.get_vocab_size()
    else:
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        characters, tokens = np.unique(points, return_inverse=True)
        vocabulary = len(characters)
    return tokens.astype(np.int32), vocabulary


def split_text_into_train_and_test(
    dataset_name: str, tokens: np.ndarray, vocabulary: int, sequence: int, test_share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the training part and the test part of a text. The test part is the end of the text.

    Args:
        dataset_name: Name of the data set.
        tokens: Tokens of the text.
        vocabulary: Number of different tokens.
        sequence: Tokens per sample.
        test_share: Fraction of the tokens for the test part.

    Raises:
        DataError: If a part is shorter than a sample.
    """
    first_of_test = len(tokens) - round(test_share * len(tokens))
    parts = tokens[:first_of_test], tokens[first_of_test:]
    for part, what in zip(parts, ("training", "test"), strict=True):
        if len(part) <= sequence:
            raise DataError(
                f"data set {dataset_name!r}: the {what} text has {len(part):,} tokens, but a sample with "
                f"sequence = {sequence} needs {sequence + 1}; use a longer text or a smaller `sequence`"
            )
    if vocabulary < 2:
        raise DataError(
            f"data set {dataset_name!r}: the text has only {vocabulary} different token; use a text "
            "with two or more"
        )
    return parts


def read_utf8_file(dataset_name: str, path: Path) -> str:
    """Return the text of a UTF-8 file. Raise DataError if the file cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(
            f"data set {dataset_name!r}: {path} cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"data set {dataset_name!r}: {path} is not UTF-8 text (at byte {error.start:,}); convert it to "
            "UTF-8, or return tokens by a function of your own (`call`)"
        ) from error


def open_tokenizer(dataset_name: str, path: Path) -> Any:
    """Return the tokenizer in a file. Raise DataError for an invalid file or a missing package."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError(f"data set {dataset_name!r}: {NO_TOKENIZERS}") from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises `Exception` itself for an invalid file
        raise DataError(
            f"data set {dataset_name!r}: {path} is not a tokenizer file ({error}); give a tokenizer.json"
        ) from error


NO_TOKENIZERS = (
    "the key `tokenizer` needs the package `tokenizers` on the machine that prepares the data set; install "
    "it, or remove the key to use characters as tokens"
)

"""Reads MNIST, CIFAR-10 and tinyshakespeare from files on disk, or downloads the files.

MNIST and CIFAR-10 are read in torchvision's layout. No file is parsed before its MD5 was compared with the
published one. numpy is imported inside functions, since the Snakefile imports this module.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stratbench.cell.files import read_regular_file
from stratbench.cell.text.progress import create_progress_bar

if TYPE_CHECKING:
    import numpy as np

    #: Inputs and targets of some samples.
    InputsAndTargets = tuple[np.ndarray, np.ndarray]

#: Environment variable with the folder of source files. It replaces `data.root` of config.yaml.
ROOT_VARIABLE = "STRATBENCH_DATA"

NO_ROOT = "No folder with the files was given."

#: For each file of MNIST: the MD5 of its .gz file (as torchvision publishes it), and of the decompressed
#: file.
MNIST_FILES = {
    "train-images-idx3-ubyte": (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "6bbc9ace898e44ae57da46a324031adb",
    ),
    "train-labels-idx1-ubyte": (
        "d53e105ee54ea40749a09fcbcd1e9432",
        "a25bea736e30d166cdddb491f175f624",
    ),
    "t10k-images-idx3-ubyte": (
        "9fb629c4189551a2d022fa330f9573f3",
        "2646ac647ad5339dbf082846283269ea",
    ),
    "t10k-labels-idx1-ubyte": (
        "ec29112dd5afa0611ce80d1b7f02629c",
        "27ae3e4e09519cfbb04c329615203637",
    ),
}
MNIST_FOLDER = "MNIST/raw"
MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)

#: MD5 of each batch file of CIFAR-10, as in torchvision's list. The last file is the test set.
CIFAR10_FILES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CIFAR10_FOLDER = "cifar-10-batches-py"
CIFAR10_ARCHIVE = ("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a")
CIFAR10_MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)

SHAKESPEARE_FILES = {"input.txt": "6fb458f1232090904fb40fe944165e91"}
SHAKESPEARE_FOLDER = "tinyshakespeare"
SHAKESPEARE_MIRRORS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",
)
#: Number of characters in the training text and in the test text.
SHAKESPEARE_TOKENS = (1_003_854, 111_540)
#: Number of different characters in the whole text.
SHAKESPEARE_VOCABULARY = 65

TEXT_CHUNK_SAMPLES = 1 << 14
DOWNLOAD_TIMEOUT_S = 30
#: Largest number of bytes that is read from a file. No file of a known data set is larger.
MAX_FILE_BYTES = 1 << 30


class DataError(ValueError):
    """The data of a data set are missing, damaged or wrongly specified; the message has the remedy."""


class Split(NamedTuple):
    """A training set or test set: its number of samples, and its inputs and targets in chunks.

    A chunk of images is uint8 [n, C, H, W] and labels [n]; one of text is tokens and next tokens [n, length].
    """

    samples: int
    chunks: Iterator[InputsAndTargets]


class Source(NamedTuple):
    """The samples of a data set and their origin.

    Attributes:
        train: Training set.
        test: Test set.
        files: Files from which the samples were read, each with `file`, `md5` and `bytes`.
        generated: Whether a random generator has made the samples.
        least_loss: Least possible mean loss of any model, in nats, or None if unknown.
    """

    train: Split
    test: Split
    files: list[dict[str, Any]]
    generated: bool = False
    least_loss: float | None = None


def read_verified_file(path: Path, md5: str) -> bytes:
    """Return the content of a file. Raise DataError if the file's MD5 is not `md5`."""
    try:
        content = read_regular_file(path, MAX_FILE_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != md5:
        raise DataError(
            f"{path}: is corrupt or truncated ({len(content):,} bytes).\n"
            f"  expected MD5 {md5}\n"
            f"  found MD5    {actual}\n"
            "  Delete the file and put an intact copy in its place, or point data.root in "
            f"config.yaml (or the environment variable {ROOT_VARIABLE}) to another folder. "
            "Without such a folder, the files are downloaded."
        )
    return content


def download_and_verify_files(
    name: str,
    mirrors: Sequence[str],
    md5_by_file: Mapping[str, str],
    download_folder: Path | None,
    missing_files_text: str,
) -> Path:
    """Download files to a folder, verify their MD5, and return the folder.

    Args:
        name: Name of the data set.
        mirrors: Addresses to try one after the other.
        md5_by_file: MD5 of each file.
        download_folder: Folder to download to, or None if downloads are not allowed.
        missing_files_text: Sentence on the missing files and where they were searched, for the message.

    Raises:
        DataError: If downloads are not allowed, or if all mirrors fail.
    """
    failure = "Downloading was not allowed."
    try:
        if download_folder is not None:
            for filename, md5 in md5_by_file.items():
                _download_from_mirrors(mirrors, filename, md5, download_folder)
            return download_folder
    except DataError as error:
        failure = str(error)
    folders = {"mnist": f"ROOT/{MNIST_FOLDER}/", "tinyshakespeare": f"ROOT/{SHAKESPEARE_FOLDER}/"}
    folder = folders.get(name, "ROOT/")
    sources = "\n".join(f"    {mirrors[0]}{filename}" for filename in md5_by_file)
    raise DataError(
        f"{name}: the data set was not found.\n"
        f"  {missing_files_text}\n"
        f"  {failure}\n"
        f"  Remedy: choose a folder ROOT, and put these files into {folder}\n{sources}\n"
        "  Then give ROOT as data.root in config.yaml or in the environment variable "
        f"{ROOT_VARIABLE}."
    )


def _download_from_mirrors(mirrors: Sequence[str], filename: str, md5: str, folder: Path) -> None:
    # `http` is imported only here, because most processes that import this module download nothing.
    from http.client import HTTPException

    failures = []
    for mirror in mirrors:
        try:
            _download_file(mirror + filename, folder / filename)
            read_verified_file(folder / filename, md5)
            return
        except (OSError, ValueError, HTTPException) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            failures.append(f"\n    {mirror}{filename}: {reason}")
    raise DataError("Downloading failed:" + "".join(failures))


def _download_file(url: str, target: Path) -> None:
    import urllib.request

    with (
        urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as response,
        target.open("wb") as file,
        create_progress_bar(
            int(response.headers.get("Content-Length", 0)), "B", target.name
        ) as bar,
    ):
        while block := response.read(1 << 16):
            if file.tell() > MAX_FILE_BYTES:
                raise DataError(
                    f"the server sent more than {MAX_FILE_BYTES:,} bytes, the limit for a file"
                )
            file.write(block)
            bar.update(len(block))


def _describe_source_file(path: Path, md5: str) -> dict[str, Any]:
    return {"file": path.name, "md5": md5, "bytes": path.stat().st_size}


def load_mnist(root: Path | None, download_folder: Path | None) -> Source:
    """Return MNIST from the files in ROOT/MNIST/raw, or else download it from mirrors.

    Args:
        root: Folder with MNIST/raw, if any; its files may be compressed.
        download_folder: Folder to download to, or None if downloads are not allowed.
    """
    folder = root / MNIST_FOLDER if root else None
    if folder and all(
        (folder / name).exists() or (folder / f"{name}.gz").exists() for name in MNIST_FILES
    ):
        return read_mnist_folder(folder)
    compressed = {f"{name}.gz": gz_md5 for name, (gz_md5, _) in MNIST_FILES.items()}
    looked_for = f"Not all in {folder}: {', '.join(MNIST_FILES)} (or .gz)." if folder else NO_ROOT
    return read_mnist_folder(
        download_and_verify_files("mnist", MNIST_MIRRORS, compressed, download_folder, looked_for)
    )


def read_mnist_folder(folder: Path) -> Source:
    """Return MNIST from a folder with its four IDX files.

    The folder has, for each of them, the file, its .gz, or both.
    """
    arrays, files = {}, []
    for name, (gz_md5, raw_md5) in MNIST_FILES.items():
        compressed, plain = folder / f"{name}.gz", folder / name
        content = b""
        if compressed.exists():
            content = gzip.decompress(read_verified_file(compressed, gz_md5))
            files.append(_describe_source_file(compressed, gz_md5))
        if plain.exists():
            content = read_verified_file(plain, raw_md5)
            files.append(_describe_source_file(plain, raw_md5))
        arrays[name] = _parse_idx_array(content, name)
    (train_images, train_labels, test_images, test_labels) = arrays.values()
    return Source(
        Split(len(train_labels), iter([(train_images[:, None], train_labels)])),
        Split(len(test_labels), iter([(test_images[:, None], test_labels)])),
        files,
    )


def _parse_idx_array(content: bytes, file_name: str) -> np.ndarray:
    """Return the array of an IDX file.

    The file consists of bytes 0, 0, 8 (uint8), the number of axes, lengths and values.
    """
    import numpy as np

    if content[:3] != b"\0\0\x08":
        raise DataError(f"{file_name}: is not an IDX file of bytes; replace it by an intact copy")
    axes = content[3]
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def load_cifar10(root: Path | None, download_folder: Path | None) -> Source:
    """Return CIFAR-10 from its batch files or archive in a folder, or else download it.

    Args:
        root: Folder with the batch files or the archive, if any.
        download_folder: Folder to download to, or None if downloads are not allowed.
    """
    name, md5 = CIFAR10_ARCHIVE
    folder = root / CIFAR10_FOLDER if root else None
    if folder and all((folder / batch).exists() for batch in CIFAR10_FILES):
        return _make_cifar10_source(
            {
                batch: read_verified_file(folder / batch, md5)
                for batch, md5 in CIFAR10_FILES.items()
            },
            [_describe_source_file(folder / batch, md5) for batch, md5 in CIFAR10_FILES.items()],
        )
    if root and (root / name).exists():
        archive = root / name
    else:
        looked_for = (
            f"Not all in {folder}: {', '.join(CIFAR10_FILES)}; nor {root / name}."
            if root
            else NO_ROOT
        )
        archive = (
            download_and_verify_files(
                "cifar10", CIFAR10_MIRRORS, {name: md5}, download_folder, looked_for
            )
            / name
        )
    return _make_cifar10_source(
        _unpack_cifar10(read_verified_file(archive, md5)), [_describe_source_file(archive, md5)]
    )


def _unpack_cifar10(archive: bytes) -> dict[str, bytes]:
    """Return the contents of the batch files in CIFAR-10's archive, by file name."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        return {
            name: member.read()
            for name in CIFAR10_FILES
            if (member := tar.extractfile(f"{CIFAR10_FOLDER}/{name}"))
        }


def _make_cifar10_source(contents: Mapping[str, bytes], files: list[dict[str, Any]]) -> Source:
    batches = [_parse_cifar10_batch(content, name) for name, content in contents.items()]
    *train, test = batches
    return Source(
        Split(sum(len(labels) for _, labels in train), iter(train)),
        Split(len(test[1]), iter([test])),
        files,
    )


class _ArraysOnly(pickle.Unpickler):
    """Unpickles arrays of numbers, as in a batch file of CIFAR-10, and rejects anything else."""

    def find_class(self, module: str, name: str) -> Any:
        import numpy as np

        if module in {"numpy.core.multiarray", "numpy._core.multiarray"} and name == "_reconstruct":
            return np.ndarray(0).__reduce__()[0]
        if module == "numpy" and name in {"ndarray", "dtype"}:
            return getattr(np, name)
        raise DataError(
            f"{module}.{name} is not part of a batch file of CIFAR-10, and is not loaded; replace the file"
        )


def _parse_cifar10_batch(content: bytes, file_name: str) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except DataError as error:
        raise DataError(f"{file_name}: {error}") from None
    images = batch[b"data"].reshape(-1, 3, 32, 32)
    return images, np.asarray(batch[b"labels"], dtype=np.uint8)


def load_tinyshakespeare(root: Path | None, download_folder: Path | None, sequence: int) -> Source:
    """Return the text tinyshakespeare, cut into samples of `sequence` characters.

    The last tenth is the test set, as in nanoGPT. A character's token is its index in the text's alphabet.

    Args:
        root: Folder with tinyshakespeare/input.txt, if any.
        download_folder: Folder to download to, or None if downloads are not allowed.
        sequence: Tokens of a sample.
    """
    import numpy as np

    [(name, md5)] = SHAKESPEARE_FILES.items()
    folder = root / SHAKESPEARE_FOLDER if root else None
    if folder is None or not (folder / name).exists():
        missing = f"Not in {folder}: {name}." if folder else NO_ROOT
        folder = download_and_verify_files(
            "tinyshakespeare", SHAKESPEARE_MIRRORS, SHAKESPEARE_FILES, download_folder, missing
        )
    content = np.frombuffer(read_verified_file(folder / name, md5), np.uint8)
    _, tokens = np.unique(content, return_inverse=True)
    train, test = np.split(tokens.astype(np.uint8), [SHAKESPEARE_TOKENS[0]])
    files = [_describe_source_file(folder / name, md5)]
    return Source(
        cut_text_into_samples(train, sequence), cut_text_into_samples(test, sequence), files
    )


def cut_text_into_samples(tokens: np.ndarray, sequence: int) -> Split:
    """Return a text cut into samples of `sequence` tokens, with the next tokens as targets."""
    samples = (len(tokens) - 1) // sequence
    inputs, targets = (tokens[i : i + samples * sequence].reshape(-1, sequence) for i in (0, 1))
    starts = range(0, samples, TEXT_CHUNK_SAMPLES)
    chunks = ((inputs[i : i + starts.step], targets[i : i + starts.step]) for i in starts)
    return Split(samples, chunks)

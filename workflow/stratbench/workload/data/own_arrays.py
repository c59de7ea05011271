"""The arrays that a user's callable returns: checks, and the chunks to prepare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from stratbench.workload.data.sources import DataError, Source, Split, pieces

if TYPE_CHECKING:
    import numpy as np

NAMES = ("train_x", "train_y", "test_x", "test_y")
TOKEN_NAMES = ("train", "test")
#: An axis of so many entries at the end of an image's shape holds its channels.
MAX_CHANNELS = 4
#: Bytes that are looked at together.
_CHUNK_BYTES = 32 << 20
RETURNS = f"return ({', '.join(NAMES)}) or ({', '.join(TOKEN_NAMES)} tokens), or a mapping with these keys"


class Opened(NamedTuple):
    """A user's data set, opened: its samples, the shape of one, and the number of classes, of a text of
    different tokens. `floats`: whether images are float32. `values`: whether targets are values, float32
    [N, `classes`], and no class numbers.
    """

    source: Source
    shape: tuple[int, ...]
    classes: int
    floats: bool = False
    values: bool = False


def open_arrays(label: str, returned: Any, sequence: int | None) -> Opened:
    """Return the data set in the result of a user's callable.

    Images are `train_x`, `test_x` uint8 or float32 [N, H, W], [N, C, H, W] or [N, H, W, C]. Their `train_y`,
    `test_y` are integer labels [N], or values to learn, float32 [N] or [N, values]. A text is tokens `train`,
    `test` [N], of an integer type, which are cut into pieces of `sequence`.

    Args:
        label: Text on the data set, for messages.
        returned: Result of the callable.
        sequence: Tokens of a sample of text.

    Raises:
        DataError: For anything else.
    """
    arrays = _arrays_by_name(label, returned)
    if "train" in arrays:
        return _text(label, arrays, sequence)
    if sequence is not None:
        raise DataError(f"{label}: returned images, which have no `sequence`; remove the key")
    return _images(label, arrays)


def _arrays_by_name(label: str, returned: Any) -> dict[str, np.ndarray]:
    import numpy as np

    arrays: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        if set(returned) in (set(NAMES), set(TOKEN_NAMES)):
            arrays = dict(returned)
    elif isinstance(returned, (tuple, list)) and len(returned) in (4, 2):
        arrays = dict(zip(NAMES if len(returned) == 4 else TOKEN_NAMES, returned, strict=True))
    if not arrays:
        what = f"a {type(returned).__name__}"
        if isinstance(returned, Mapping):
            what = f"a mapping with the keys {', '.join(map(str, returned)) or '(none)'}"
        elif isinstance(returned, (tuple, list)):
            what += f" of {len(returned)}"
        raise DataError(f"{label}: returned {what}; {RETURNS}")
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise DataError(
                f"{label}: {name} is a {type(array).__name__}; it must be a NumPy array"
            )
    return arrays


# ---------------------------------------------------------------- images


def _images(label: str, arrays: Mapping[str, np.ndarray]) -> Opened:
    import numpy as np

    shapes = {}
    for split in ("train", "test"):
        x, y = arrays[f"{split}_x"], arrays[f"{split}_y"]
        if x.dtype not in (np.uint8, np.float32):
            raise DataError(f"{label}: {split}_x is of type {x.dtype}; it must be uint8 or float32")
        if x.ndim not in (3, 4) or 0 in x.shape:
            raise DataError(
                f"{label}: {split}_x has the shape {list(x.shape)}; it must be [N, H, W], [N, C, H, W] or "
                "[N, H, W, C], and none of them 0"
            )
        of_values = y.dtype == np.float32 and y.ndim in (1, 2) and 0 not in y.shape
        if not of_values and (y.ndim != 1 or y.dtype.kind not in "iu"):
            raise DataError(
                f"{label}: {split}_y is {y.dtype} {list(y.shape)}; labels must be integers [N], and values "
                "to learn float32 [N] or [N, values]"
            )
        if len(x) != len(y):
            raise DataError(
                f"{label}: {split}_x has {len(x):,} images and {split}_y {len(y):,} labels"
            )
        shapes[split] = channels_first(x[:1]).shape[1:]
    kinds = {split: arrays[f"{split}_x"].dtype for split in shapes}
    if shapes["train"] != shapes["test"] or kinds["train"] != kinds["test"]:
        raise DataError(
            f"{label}: training images are {kinds['train']} {list(shapes['train'])} and test images "
            f"{kinds['test']} {list(shapes['test'])} (channels, height, width); they must be alike"
        )
    targets = {split: arrays[f"{split}_y"] for split in shapes}
    values = any(y.dtype.kind == "f" for y in targets.values())
    if values:
        targets = _values(label, targets)
        classes = targets["train"].shape[1]
    else:
        classes = _classes(label, targets["train"], targets["test"])

    def split_of(split: str) -> Split:
        x, y = arrays[f"{split}_x"], targets[split]
        return Split(len(y), _image_chunks(f"{label}: {split}_x", x, y))

    source = Source(split_of("train"), split_of("test"), [])
    of_floats = kinds["train"] == np.float32
    return Opened(source, tuple(shapes["train"]), classes, of_floats, values)


def channels_first(x: np.ndarray) -> np.ndarray:
    """Images [N, C, H, W]. The last axis holds the channels where it has 1 to 4, and the second more."""
    if x.ndim == 3:
        return x[:, None]
    last = x.shape[3] <= MAX_CHANNELS < x.shape[1]
    return x.transpose(0, 3, 1, 2) if last else x


def _classes(who: str, train: np.ndarray, test: np.ndarray) -> int:
    import numpy as np

    for y, name in ((train, "train_y"), (test, "test_y")):
        if y.min() < 0:
            raise DataError(f"{who}: {name} has a label {y.min()}; labels count from 0")
    classes = int(train.max()) + 1
    present = np.unique(train)
    if len(present) < classes:
        missing = next(i for i, label in enumerate(present) if label != i)
        raise DataError(
            f"{who}: train_y has labels up to {classes - 1} and none that is {missing}; labels must "
            "count from 0 without a gap"
        )
    if classes < 2:
        raise DataError(f"{who}: train_y has one class; there must be two or more")
    if test.max() >= classes:
        raise DataError(
            f"{who}: test_y has a label {test.max()}, and train_y none above {classes - 1}"
        )
    return classes


def _values(label: str, targets: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Targets that are values, as [N, values]."""
    import numpy as np

    flat = {}
    for split, y in targets.items():
        if y.dtype.kind == "f" and not np.isfinite(y).all():
            place = int(np.flatnonzero(~np.isfinite(y.reshape(len(y), -1)).all(axis=1))[0])
            raise DataError(
                f"{label}: {split}_y[{place}] holds NaN or infinity; every value must be finite"
            )
        flat[split] = y.reshape(len(y), -1)
    kinds = {split: f"{y.dtype} {list(y.shape[1:])}" for split, y in targets.items()}
    if kinds["train"] != kinds["test"]:
        raise DataError(
            f"{label}: a target of train_y is {kinds['train']}, and one of test_y {kinds['test']}; they must "
            "be alike"
        )
    return flat


def _image_chunks(
    what: str, x: np.ndarray, y: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    import numpy as np

    step = max(1, _CHUNK_BYTES // max(1, x[0].nbytes))
    for start in range(0, len(x), step):
        images = np.ascontiguousarray(channels_first(x[start : start + step]))
        if images.dtype.kind == "f" and not np.isfinite(images).all():
            place = start + int(np.flatnonzero(~np.isfinite(images).all(axis=(1, 2, 3)))[0])
            raise DataError(f"{what}[{place}] holds NaN or infinity; every value must be finite")
        yield images, np.asarray(y[start : start + step])


# ---------------------------------------------------------------- text


def _text(label: str, arrays: Mapping[str, np.ndarray], sequence: int | None) -> Opened:
    if sequence is None:
        raise DataError(
            f"{label}: returned tokens; give `sequence`, the length of the pieces that they are cut into"
        )
    for name, tokens in arrays.items():
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"{label}: {name} is {tokens.dtype} {list(tokens.shape)}; tokens must be integers [N]"
            )
        if len(tokens) <= sequence:
            raise DataError(
                f"{label}: {name} has {len(tokens):,} tokens; a piece of {sequence} needs {sequence + 1}"
            )
    lowest = min(int(_over_parts(tokens, min)) for tokens in arrays.values())
    if lowest < 0:
        raise DataError(f"{label}: has a token {lowest}; tokens count from 0")
    vocabulary = max(int(_over_parts(tokens, max)) for tokens in arrays.values()) + 1
    if not 2 <= vocabulary <= 1 << 31:
        raise DataError(f"{label}: has tokens up to {vocabulary - 1}; there must be 2 to 2^31")
    splits = [pieces(arrays[name], sequence) for name in TOKEN_NAMES]
    return Opened(Source(splits[0], splits[1], []), (sequence,), vocabulary)


def _over_parts(tokens: np.ndarray, of: Callable[[Any], Any]) -> Any:
    """Return the minimum or maximum of tokens that may be mapped from a file, part by part."""
    name = of.__name__
    step = _CHUNK_BYTES // tokens.itemsize
    return of(getattr(tokens[i : i + step], name)() for i in range(0, len(tokens), step))

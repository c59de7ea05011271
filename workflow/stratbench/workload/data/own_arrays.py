"""Makes a data set of the arrays that a user's function returns, and checks these arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from stratbench.workload.data.sources import DataError, Source, Split, cut_text_into_samples

if TYPE_CHECKING:
    import numpy as np

    from stratbench.workload.data.sources import InputsAndTargets

NAMES = ("train_x", "train_y", "test_x", "test_y")
TOKEN_NAMES = ("train", "test")
#: Largest number of channels of images. The last axis counts as channels if it is at most this long.
MAX_CHANNELS = 4
#: Bytes of a memory-mapped array that are read at a time.
_CHUNK_BYTES = 32 << 20
WHAT_TO_RETURN = (
    f"return ({', '.join(NAMES)}), ({', '.join(TOKEN_NAMES)}) of tokens, or a mapping with "
    "these keys"
)


class OpenedDataSet(NamedTuple):
    """A user's data set that was opened: its samples, their shape, and the number of classes.

    Attributes:
        source: Samples of the data set.
        shape: Shape of one sample.
        classes: Number of classes, or of different tokens of a text.
        floats: Whether samples are float32 instead of uint8.
        values: Whether targets are values, float32 [N, `classes`], instead of class numbers.
    """

    source: Source
    shape: tuple[int, ...]
    classes: int
    floats: bool = False
    values: bool = False


def open_returned_arrays(label: str, returned: Any, sequence: int | None) -> OpenedDataSet:
    """Return the data set of which a user's function has returned the arrays.

    Images are `train_x` and `test_x`, uint8 or float32 [N, H, W], [N, C, H, W] or [N, H, W, C]. Their
    `train_y` and `test_y` are integer labels [N], or values to learn, float32 [N] or [N, values]. A text has
    the integer tokens `train` and `test` [N], which are cut into pieces of `sequence` tokens.

    Args:
        label: Name of the data set, for messages.
        returned: Result of the function.
        sequence: Tokens per sample of text.

    Raises:
        DataError: If the arrays are of another form.
    """
    arrays = _get_arrays_by_name(label, returned)
    if "train" in arrays:
        return _open_token_arrays(label, arrays, sequence)
    if sequence is not None:
        raise DataError(
            f"{label}: returned images, but the key `sequence` is for texts; remove this key"
        )
    return _open_image_arrays(label, arrays)


def _get_arrays_by_name(label: str, returned: Any) -> dict[str, np.ndarray]:
    import numpy as np

    arrays: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        if set(returned) in (set(NAMES), set(TOKEN_NAMES)):
            arrays = dict(returned)
    elif isinstance(returned, (tuple, list)) and len(returned) in (4, 2):
        arrays = dict(zip(NAMES if len(returned) == 4 else TOKEN_NAMES, returned, strict=True))
    if not arrays:
        returned_type = f"a {type(returned).__name__}"
        if isinstance(returned, Mapping):
            returned_type = f"a mapping with the keys {', '.join(map(str, returned)) or '(none)'}"
        elif isinstance(returned, (tuple, list)):
            returned_type += f" of {len(returned)}"
        raise DataError(f"{label}: returned {returned_type}; {WHAT_TO_RETURN}")
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise DataError(
                f"{label}: {name} is a {type(array).__name__}; it must be a NumPy array"
            )
    return arrays


def _open_image_arrays(label: str, arrays: Mapping[str, np.ndarray]) -> OpenedDataSet:
    import numpy as np

    shapes = {}
    for split in ("train", "test"):
        x, y = arrays[f"{split}_x"], arrays[f"{split}_y"]
        if x.dtype not in (np.uint8, np.float32):
            raise DataError(f"{label}: {split}_x is of type {x.dtype}; it must be uint8 or float32")
        if x.ndim not in (3, 4) or 0 in x.shape:
            raise DataError(
                f"{label}: {split}_x has the shape {list(x.shape)}; it must be [N, H, W], [N, C, H, W] or "
                "[N, H, W, C], and no dimension may be 0"
            )
        of_values = y.dtype == np.float32 and y.ndim in (1, 2) and 0 not in y.shape
        if not of_values and (y.ndim != 1 or y.dtype.kind not in "iu"):
            raise DataError(
                f"{label}: {split}_y is {y.dtype} {list(y.shape)}; labels must be integers [N], and values "
                "to learn float32 [N] or [N, values]"
            )
        if len(x) != len(y):
            raise DataError(
                f"{label}: {split}_x has {len(x):,} images, but {split}_y has {len(y):,} labels; return one "
                "label per image"
            )
        shapes[split] = move_channels_first(x[:1]).shape[1:]
    kinds = {split: arrays[f"{split}_x"].dtype for split in shapes}
    if shapes["train"] != shapes["test"] or kinds["train"] != kinds["test"]:
        raise DataError(
            f"{label}: training images are {kinds['train']} {list(shapes['train'])}, but test images are "
            f"{kinds['test']} {list(shapes['test'])} (channels, height, width); make them equal"
        )
    targets = {split: arrays[f"{split}_y"] for split in shapes}
    values = any(y.dtype.kind == "f" for y in targets.values())
    if values:
        targets = _flatten_value_targets(label, targets)
        classes = targets["train"].shape[1]
    else:
        classes = _count_label_classes(label, targets["train"], targets["test"])

    def make_image_split(split_name: str) -> Split:
        x, y = arrays[f"{split_name}_x"], targets[split_name]
        return Split(len(y), _iter_image_array_chunks(f"{label}: {split_name}_x", x, y))

    source = Source(make_image_split("train"), make_image_split("test"), [])
    of_floats = kinds["train"] == np.float32
    return OpenedDataSet(source, tuple(shapes["train"]), classes, of_floats, values)


def move_channels_first(images: np.ndarray) -> np.ndarray:
    """Return images as [N, C, H, W], where C is the number of channels.

    The last axis is that of the channels if its length is 1 to 4, and the second axis is longer.
    """
    if images.ndim == 3:
        return images[:, None]
    last = images.shape[3] <= MAX_CHANNELS < images.shape[1]
    return images.transpose(0, 3, 1, 2) if last else images


def _count_label_classes(data_label: str, train_labels: np.ndarray, test_labels: np.ndarray) -> int:
    import numpy as np

    for y, name in ((train_labels, "train_y"), (test_labels, "test_y")):
        if y.min() < 0:
            raise DataError(f"{data_label}: {name} has the label {y.min()}; labels must begin at 0")
    classes = int(train_labels.max()) + 1
    present = np.unique(train_labels)
    if len(present) < classes:
        missing = next(i for i, label in enumerate(present) if label != i)
        raise DataError(
            f"{data_label}: train_y has labels up to {classes - 1}, but not the label {missing}; labels "
            "must begin at 0 and have no gap"
        )
    if classes < 2:
        raise DataError(
            f"{data_label}: train_y has only one class; return labels of two classes or more"
        )
    if test_labels.max() >= classes:
        raise DataError(
            f"{data_label}: test_y has the label {test_labels.max()}, but the labels of train_y end at "
            f"{classes - 1}; use the same labels in both"
        )
    return classes


def _flatten_value_targets(label: str, targets: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the real-valued targets of each set as [N, values]. The keys are `train` and `test`."""
    import numpy as np

    flat = {}
    for split, y in targets.items():
        if y.dtype.kind == "f" and not np.isfinite(y).all():
            place = int(np.flatnonzero(~np.isfinite(y.reshape(len(y), -1)).all(axis=1))[0])
            raise DataError(
                f"{label}: {split}_y[{place}] has NaN or infinity; every value must be finite"
            )
        flat[split] = y.reshape(len(y), -1)
    kinds = {split: f"{y.dtype} {list(y.shape[1:])}" for split, y in targets.items()}
    if kinds["train"] != kinds["test"]:
        raise DataError(
            f"{label}: a target of train_y is {kinds['train']}, but one of test_y is {kinds['test']}; make "
            "them equal"
        )
    return flat


def _iter_image_array_chunks(
    array_label: str, images_array: np.ndarray, targets: np.ndarray
) -> Iterator[InputsAndTargets]:
    import numpy as np

    step = max(1, _CHUNK_BYTES // max(1, images_array[0].nbytes))
    for start in range(0, len(images_array), step):
        images = np.ascontiguousarray(move_channels_first(images_array[start : start + step]))
        if images.dtype.kind == "f" and not np.isfinite(images).all():
            place = start + int(np.flatnonzero(~np.isfinite(images).all(axis=(1, 2, 3)))[0])
            raise DataError(
                f"{array_label}[{place}] has NaN or infinity; every value must be finite"
            )
        yield images, np.asarray(targets[start : start + step])


def _open_token_arrays(
    label: str, arrays: Mapping[str, np.ndarray], sequence: int | None
) -> OpenedDataSet:
    if sequence is None:
        raise DataError(
            f"{label}: returned tokens; give `sequence`, the number of tokens per sample"
        )
    for name, tokens in arrays.items():
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"{label}: {name} is {tokens.dtype} {list(tokens.shape)}; tokens must be integers [N]"
            )
        if len(tokens) <= sequence:
            raise DataError(
                f"{label}: {name} has {len(tokens):,} tokens, but a sample with sequence = {sequence} needs "
                f"{sequence + 1}; return more tokens, or lower sequence"
            )
    lowest = min(int(_find_extreme_token(tokens, min)) for tokens in arrays.values())
    if lowest < 0:
        raise DataError(f"{label}: has the token {lowest}; every token must be at least 0")
    vocabulary = max(int(_find_extreme_token(tokens, max)) for tokens in arrays.values()) + 1
    if not 2 <= vocabulary <= 1 << 31:
        raise DataError(
            f"{label}: the largest token is {vocabulary - 1}; it must be from 1 to 2^31 - 1"
        )
    splits = [cut_text_into_samples(arrays[name], sequence) for name in TOKEN_NAMES]
    return OpenedDataSet(Source(splits[0], splits[1], []), (sequence,), vocabulary)


def _find_extreme_token(tokens: np.ndarray, min_or_max: Callable[[Any], Any]) -> Any:
    """Return the smallest or the largest token of an array. The array may be mapped from a file.

    Args:
        tokens: The tokens, which are read in parts.
        min_or_max: Python's function `min` or `max`.
    """
    name = min_or_max.__name__
    step = _CHUNK_BYTES // tokens.itemsize
    return min_or_max(getattr(tokens[i : i + step], name)() for i in range(0, len(tokens), step))

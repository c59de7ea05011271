"""Lists the built-in data sets with their metadata, and describes a user's data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratbench.cell.extensions import import_named_additions
from stratbench.workload.data import generated, sources
from stratbench.workload.data.dataset import Dataset
from stratbench.workload.data.kinds import Generator
from stratbench.workload.data.own_data import is_own_data_set, read_own_data_specification
from stratbench.workload.data.sources import DataError

#: Sources of random samples, by the name that config.yaml has in `source`.
GENERATORS: dict[str, Generator] = {
    "synthetic": Generator(
        generated.generate_synthetic_images,
        {"train_samples": 2048, "test_samples": 512}
        | {"classes": 10, "channels": 3, "size": 32, "seed": 0},
        shape_keys=("channels", "size", "size"),
    ),
    "markov-text": Generator(
        generated.generate_markov_text,
        {"train_samples": 4096, "test_samples": 512, "vocabulary": 64, "sequence": 64, "seed": 0},
        shape_keys=("sequence",),
        class_count_key="vocabulary",
    ),
    **import_named_additions("generators"),
}
#: Keys that a data set of each source may have in config.yaml, with their defaults.
SPECS: dict[str, Mapping[str, int]] = {
    **{source: generator.defaults for source, generator in GENERATORS.items()},
    "tinyshakespeare": {"sequence": 64},
}


def make_dataset_metadata(
    name: str,
    spec: Mapping[str, Any] | None = None,
    prepared: Mapping[str, Any] | None = None,
) -> Dataset:
    """Return the metadata of a data set. It is built in, or the config specifies it.

    Args:
        name: Name of the data set.
        spec: Specification of the data set in the config, if any: `{source: NAME}` with keys that SPECS has
            for this source, or that of a user's own data set (`own_data`).
        prepared: Metadata of a user's prepared data set, if any.

    Raises:
        DataError: If the name or the specification is invalid.
    """
    if spec is None:
        if name not in DATASETS:
            raise DataError(
                f"data set {name!r}: is unknown; use one of {', '.join(DATASETS)}, or define it in `datasets`"
            )
        return DATASETS[name]
    if name in DATASETS and name not in SPECS:
        raise DataError(
            f"data set {name!r}: is built in and takes no specification; choose another name for yours"
        )
    if is_own_data_set(spec):
        return _make_own_dataset_metadata(name, spec, prepared or {})
    source, values = _read_source_and_values(name, spec)
    return _make_dataset_metadata_from_source(source, values)


def compute_data_identity(
    name: str, spec: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the source and all values that determine the samples of a built-in data set.

    The result is None if the name of the data set determines its samples. The identity becomes `data_spec` in
    the settings of a cell. File paths are not part of the identity, since files are only read with their
    published MD5.

    Raises:
        DataError: If the name or the specification is invalid.
    """
    make_dataset_metadata(name, spec)
    spec = {"source": name} if spec is None else spec
    if spec["source"] not in SPECS:
        return None
    source, values = _read_source_and_values(name, spec)
    return {"source": source} | values


def _make_own_dataset_metadata(
    name: str, spec: Mapping[str, Any], prepared_meta: Mapping[str, Any]
) -> Dataset:
    own = read_own_data_specification(name, spec)
    values = own.values_by_key
    return Dataset(
        shape=tuple(prepared_meta["shape"]) if prepared_meta else own.shape,
        classes=prepared_meta.get("classes"),
        train_samples=prepared_meta.get("train_samples"),
        test_samples=prepared_meta.get("test_samples"),
        crop_padding=values.get("crop_padding", 0),
        has_random_flips=values.get("flip", False),
        has_float_samples=prepared_meta.get("floats", False),
        values=prepared_meta.get("values", False),
        task=own.task,
        vocabulary=values.get("vocabulary"),
    )


def _read_source_and_values(name: str, spec: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """Return the source of a data set's specification, and the values of its other keys.

    Missing keys have their defaults.

    Raises:
        DataError: If the specification has an unknown source, a wrong key or a wrong value.
    """
    source = spec.get("source")
    if source not in SPECS:
        raise DataError(
            f"data set {name!r}: source is {source!r}; it must be one of {', '.join(SPECS)}"
        )
    values = {key: value for key, value in spec.items() if key != "source"}
    for key, value in values.items():
        if key not in SPECS[source]:
            allowed = ", ".join(SPECS[source])
            raise DataError(
                f"data set {name!r}: the key {key!r} is unknown; use keys among source, {allowed}"
            )
        lowest = 0 if key == "seed" else 1
        if type(value) is not int or value < lowest:
            raise DataError(
                f"data set {name!r}: {key} is {value!r}; it must be a whole number >= {lowest}"
            )
    return source, {**SPECS[source], **values}


def _make_tinyshakespeare_metadata(values: Mapping[str, int]) -> Dataset:
    length = values["sequence"]
    shortest = min(sources.SHAKESPEARE_TOKENS)
    if length >= shortest:
        raise DataError(
            f"data set tinyshakespeare: sequence is {length}, but the test text has {shortest:,} tokens; "
            "choose a smaller sequence"
        )
    # The last token of a text is no input, because it has no next token as a target.
    train, test = ((tokens - 1) // length for tokens in sources.SHAKESPEARE_TOKENS)
    return Dataset(
        shape=(length,),
        classes=sources.SHAKESPEARE_VOCABULARY,
        train_samples=train,
        test_samples=test,
        open_source=lambda root, downloads: sources.load_tinyshakespeare(root, downloads, length),
    )


def _make_dataset_metadata_from_source(source: str, values: Mapping[str, int]) -> Dataset:
    return (
        GENERATORS[source].make_generated_dataset_metadata(values)
        if source in GENERATORS
        else _make_tinyshakespeare_metadata(values)
    )


DATASETS: dict[str, Dataset] = {
    "digits": Dataset((1, 8, 8), 10, 1437, 360, generated.load_digits_images, crop_padding=1),
    "mnist": Dataset((1, 28, 28), 10, 60_000, 10_000, sources.load_mnist, crop_padding=2),
    "cifar10": Dataset(
        (3, 32, 32), 10, 50_000, 10_000, sources.load_cifar10, crop_padding=4, has_random_flips=True
    ),
} | {
    source: _make_dataset_metadata_from_source(source, defaults)
    for source, defaults in SPECS.items()
}

"""Reads specifications of users' data sets in config.yaml, and opens these data sets.

Most metadata of such a data set are unknown before it is prepared, and are then read from the prepared data.
The Snakefile imports this module: it imports no user's code and reads no file before a data set is prepared.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from stratbench.cell.extensions import import_named_additions
from stratbench.cell.files import read_json
from stratbench.workload import users_code
from stratbench.workload.data import own_arrays, own_files, prepared
from stratbench.workload.data.kinds import FileKind
from stratbench.workload.data.own_arrays import OpenedDataSet
from stratbench.workload.data.sources import DataError

#: Environment variable that gives jobs the paths of data files. If paths were job parameters, moving a folder
#: would run jobs again.
PLACES_VARIABLE = "STRATBENCH_PLACES"
#: Config keys on how augmentation may change training images, with their defaults.
AUGMENTATION = {"crop_padding": 0, "flip": False}
#: Config keys, with their defaults, of a data set whose arrays a user's function (`call`) returns.
OF_CALL: Mapping[str, Any] = {"kwargs": {}, "sequence": None, **AUGMENTATION}
#: Kinds of data sets that are read from files, by the config key of these files.
KINDS: dict[str, FileKind] = {
    "images": FileKind(
        own_files.read_image_folder,
        {"size": 64, "channels": 3, "test_share": 0.1, "seed": 0, **AUGMENTATION},
        samples=own_files.IMAGES,
        shape=("channels", "size", "size"),
        invalid_values_reason=own_files.invalid_channels_reason,
    ),
    "text": FileKind(
        own_files.read_text_files,
        {"sequence": 64, "test_share": 0.1},
        further_file_keys=("tokenizer",),
    ),
    **import_named_additions("file_kinds"),
}
#: All config keys that name files or folders.
PLACES = tuple(
    dict.fromkeys(key for name, k in KINDS.items() for key in (name, *k.further_file_keys))
)
#: Kinds of data sets that the extension `labelled` adds.
OF_LABELLED = ("masked_text", "labelled_texts", "waveforms")


@dataclass(frozen=True)
class OwnData:
    """A user's specification of a data set: its kind, the values of its keys, and its files."""

    #: Name of the data set in the config.
    name: str
    #: Kind of the data set: a key of KINDS, or `call`.
    kind_name: str
    #: Values of the config keys, including defaults. Keys that name files are left out.
    values_by_key: dict[str, Any]
    #: Paths of files or folders, by the config key that names them.
    paths_by_key: dict[str, list[Path]]

    def __str__(self) -> str:
        return f"data set {self.name!r} ({self.call or self.kind_name})"

    @property
    def call(self) -> str:
        """The user's function as `module:name`, or "" if the data set consists of files."""
        return self.values_by_key.get("call", "")

    @property
    def task(self) -> str | None:
        """Name of the task, or None if the shape of the samples determines the task."""
        return None if self.call else KINDS[self.kind_name].task

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of a sample, or None if it is unknown before the data are read."""
        if self.call:
            return (self.values_by_key["sequence"],) if self.values_by_key["sequence"] else None
        shape = KINDS[self.kind_name].shape
        return tuple(self.values_by_key[n] if isinstance(n, str) else n for n in shape)

    def compute_data_set_identity(
        self, code_folders: Iterable[Path] = (), hash_cache: Path | None = None
    ) -> dict[str, Any]:
        """Return the config keys and hash that determine the samples.

        The hash is that of the files or the code.

        Args:
            code_folders: Folders of the user's code.
            hash_cache: File that caches the hash of unchanged files, if any.

        Raises:
            DataError: If a file cannot be read.
        """
        if self.call:
            fingerprint = users_code.compute_code_fingerprint(self.call, code_folders)
        else:
            files = [place for places in self.paths_by_key.values() for place in places]
            samples = KINDS[self.kind_name].samples or own_files.IMAGES
            sha256 = own_files.hash_sample_files(files, samples, hash_cache)
            fingerprint = {"sha256": sha256, "version": None}
        return {"kind": self.kind_name} | self.values_by_key | fingerprint

    def open_samples(self) -> OpenedDataSet:
        """Return the data set's samples, their shape and the number of classes."""
        if self.call:
            return own_arrays.open_returned_arrays(
                str(self), self._call_user_function(), self.values_by_key["sequence"]
            )
        kind, files = KINDS[self.kind_name], self.paths_by_key[self.kind_name]
        first = files[0] if kind.samples else files
        others = (
            next(iter(self.paths_by_key.get(key, [])), None) for key in kind.further_file_keys
        )
        options = {k: v for k, v in self.values_by_key.items() if k not in AUGMENTATION}
        source, classes = kind.read(self.name, first, *others, **options)
        return OpenedDataSet(source, self.shape or (), classes, floats=kind.has_float_samples)

    def _call_user_function(self) -> Any:
        try:
            function = users_code.import_user_callable(self)
        except users_code.ModelError as error:
            raise DataError(str(error)) from error
        kwargs = self.values_by_key["kwargs"]
        try:
            return function(**kwargs)
        except MemoryError:
            raise
        except users_code.ERRORS as error:
            # A signal that ends this process raises SystemExit, too, with a code above 128.
            if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
                raise
            called = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
            raise DataError(
                f"{self}: the function, called with ({called}), raised {users_code.format_user_error(error)}"
            ) from error


def is_own_data_set(spec: Mapping[str, Any] | None) -> bool:
    """Return whether a specification in the config describes a user's own data set."""
    return spec is not None and "source" not in spec


def read_own_data_specification(
    name: str, spec: Mapping[str, Any], paths_by_key: Mapping[str, Any] | None = None
) -> OwnData:
    """Return a user's data set as a specification in the config describes it. No file is read.

    Args:
        name: Name of the data set.
        spec: The specification, as in the config or from `identity`.
        paths_by_key: Paths of the files, which override those of `spec`.

    Raises:
        DataError: For errors that are visible without reading a file: contradicting keys, a missing
            folder or file, a malformed call, a missing package.
    """
    keys = {k: v for k, v in spec.items() if k not in ("kind", "sha256", "version")}
    known = ("call", *KINDS)
    for kind in {*OF_LABELLED} - {*known} & {*spec, spec.get("kind")}:
        raise DataError(
            f"data set {name!r}: {kind}: needs the extension `labelled`, which this installation does "
            "not have; restore it, or return arrays by a function of your own (`call`)"
        )
    kinds = [spec["kind"]] if "kind" in spec else [kind for kind in known if kind in spec]
    if len(kinds) != 1:
        given_keys = " and ".join(kinds) or "none of them"
        raise DataError(
            f"data set {name!r}: must have exactly one of the keys source, {', '.join(known)}; it has "
            f"{given_keys}"
        )
    [kind] = kinds
    files = (kind, *KINDS[kind].further_file_keys) if kind in KINDS else ()
    defaults = KINDS[kind].defaults if kind in KINDS else OF_CALL
    allowed = dict.fromkeys([kind, *files, *defaults])
    for key in keys:
        if key not in allowed:
            raise DataError(
                f"data set {name!r}: the key {key!r} is not allowed with {kind!r}; allowed: "
                f"{', '.join(allowed)}"
            )
    values = {key: value for key, value in {**defaults, **keys}.items() if key not in files}
    locations = _find_data_paths(name, files, keys if paths_by_key is None else paths_by_key)
    if kind == "call":
        if reason := users_code.invalid_call_reason(values["call"]):
            raise DataError(f"data set {name!r}: call = {values['call']!r} {reason}")
        bad = next((key for key in values["kwargs"] if not key.isidentifier()), None)
        if bad is not None:
            raise DataError(
                f"data set {name!r}: kwargs: {bad!r} is not a Python parameter name; rename it"
            )
    elif invalid_values_reason := KINDS[kind].invalid_values_reason(values):
        raise DataError(f"data set {name!r}: {invalid_values_reason}")
    if "tokenizer" in locations and util.find_spec("tokenizers") is None:
        raise DataError(f"data set {name!r}: {own_files.NO_TOKENIZERS}")
    return OwnData(name, kind, values, locations)


def _find_data_paths(
    dataset_name: str, file_keys: Iterable[str], paths_by_key: Mapping[str, Any]
) -> dict[str, list[Path]]:
    locations = {}
    for key in file_keys:
        value = paths_by_key.get(key)
        if value is None:
            continue
        locations[key] = [Path(p).expanduser() for p in _make_path_list(value)]
        for place in locations[key]:
            is_there, what = (
                (place.is_dir(), "folder")
                if key in KINDS and KINDS[key].samples
                else (place.is_file(), "file")
            )
            if not is_there:
                raise DataError(
                    f"data set {dataset_name!r}: {key} = {str(place)!r} is not a {what}; correct the path"
                )
    return locations


def _make_path_list(paths: str | list[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else paths


def format_data_paths_for_jobs(datasets: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the file paths of all data sets in the config. They are JSON text, which jobs read."""
    locations = {}
    for name, spec in datasets.items():
        places = {
            key: [str(Path(p).expanduser().absolute()) for p in _make_path_list(spec[key])]
            for key in PLACES
            if spec.get(key)
        }
        if places:
            locations[name] = places
    return json.dumps(locations, sort_keys=True)


def read_own_data_specification_in_job(name: str, spec: Mapping[str, Any]) -> OwnData:
    """Return a user's data set in a job.

    The paths of its files are those of the specification, or else of the environment variable
    PLACES_VARIABLE.
    """
    if spec.keys() & set(PLACES) or spec.get("call"):
        return read_own_data_specification(name, spec)
    return read_own_data_specification(
        name, spec, json.loads(os.environ.get(PLACES_VARIABLE, "{}")).get(name, {})
    )


def read_prepared_metadata(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the metadata of a prepared data set. None if the folder has no data or other data.

    Args:
        folder: Folder of the prepared data set.
        identity: What determines the samples (`compute_data_set_identity`).
    """
    try:
        return read_json(folder / prepared.format_meta_file_name(identity))
    except (OSError, ValueError):
        return None

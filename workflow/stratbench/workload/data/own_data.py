"""A user's data sets: arrays that a callable returns, images, waveforms, or texts.

Little is known of one before it is prepared; the rest is read from the prepared data. The Snakefile imports
this: no user's code is imported, and no file read, before a data set is prepared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from stratbench.cell.extensions import resolve_all
from stratbench.cell.files import read_json
from stratbench.workload import users_code
from stratbench.workload.data import own_arrays, own_files, prepared
from stratbench.workload.data.kinds import FileKind
from stratbench.workload.data.own_arrays import Opened
from stratbench.workload.data.sources import DataError

#: The environment variable that tells jobs where files lie: moving a folder prepares nothing again.
PLACES_VARIABLE = "STRATBENCH_PLACES"
#: What augmentation may do to training images, with defaults.
AUGMENTATION = {"crop_padding": 0, "flip": False}
#: Keys of a data set that a callable returns, with their defaults.
OF_CALL: Mapping[str, Any] = {"kwargs": {}, "sequence": None, **AUGMENTATION}
#: Kinds of data sets in files, by the key that names these.
KINDS: dict[str, FileKind] = {
    "images": FileKind(
        own_files.image_folder,
        {"size": 64, "channels": 3, "test_share": 0.1, "seed": 0, **AUGMENTATION},
        samples=own_files.IMAGES,
        shape=("channels", "size", "size"),
        find_fault=own_files.find_fault_of_images,
    ),
    "text": FileKind(
        own_files.text_files, {"sequence": 64, "test_share": 0.1}, more_files=("tokenizer",)
    ),
    **resolve_all("file_kinds"),
}
#: Keys that name files: their content counts, and not where they are.
PLACES = tuple(dict.fromkeys(key for name, k in KINDS.items() for key in (name, *k.more_files)))
#: Kinds of the extension `labelled`.
OF_LABELLED = ("masked_text", "labelled_texts", "waveforms")


@dataclass(frozen=True)
class OwnData:
    """A user's specification of a data set: its kind, the keys of that kind, and its files."""

    name: str
    kind: str
    values: dict[str, Any]
    places: dict[str, list[Path]]

    def __str__(self) -> str:
        return f"data set {self.name!r} ({self.call or self.kind})"

    @property
    def call(self) -> str:
        """The callable; empty for files."""
        return self.values.get("call", "")

    @property
    def task(self) -> str | None:
        """The task that its targets are for, where the samples' shape does not say it."""
        return None if self.call else KINDS[self.kind].task

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of a sample, as far as it is known without a look at the data."""
        if self.call:
            return (self.values["sequence"],) if self.values["sequence"] else None
        shape = KINDS[self.kind].shape
        return tuple(self.values[n] if isinstance(n, str) else n for n in shape)

    def identity(self, folders: Iterable[Path] = (), known: Path | None = None) -> dict[str, Any]:
        """Return the identity for a cell's settings: its keys, and the hash of its files or code.

        `folders`: folders of the user's code. `known`: a file that caches the hash of unchanged files.
        DataError if a file cannot be read.
        """
        if self.call:
            fingerprint = users_code.fingerprint(self.call, folders)
        else:
            files = [place for places in self.places.values() for place in places]
            samples = KINDS[self.kind].samples or own_files.IMAGES
            sha256 = own_files.content_sha256(files, samples, known)
            fingerprint = {"sha256": sha256, "version": None}
        return {"kind": self.kind} | self.values | fingerprint

    def open_samples(self) -> Opened:
        """Return its samples, and what is known of them."""
        if self.call:
            return own_arrays.open_arrays(
                str(self), self._returned_arrays(), self.values["sequence"]
            )
        kind, files = KINDS[self.kind], self.places[self.kind]
        first = files[0] if kind.samples else files
        others = (next(iter(self.places.get(key, [])), None) for key in kind.more_files)
        options = {k: v for k, v in self.values.items() if k not in AUGMENTATION}
        source, classes = kind.read(self.name, first, *others, **options)
        return Opened(source, self.shape or (), classes, floats=kind.floats)

    def _returned_arrays(self) -> Any:
        try:
            function = users_code.callable_of(self)
        except users_code.ModelError as error:
            raise DataError(str(error)) from error
        kwargs = self.values["kwargs"]
        try:
            return function(**kwargs)
        except MemoryError:
            raise
        except Exception as error:
            called = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
            raise DataError(
                f"{self}: called with ({called}), it raised {users_code.error_text(error)}"
            ) from error


def is_own(spec: Mapping[str, Any] | None) -> bool:
    """Return whether a spec of the config names no source of ours."""
    return spec is not None and "source" not in spec


def own_data(
    name: str, spec: Mapping[str, Any], places: Mapping[str, Any] | None = None
) -> OwnData:
    """Return a user's data set by its specification.

    Args:
        name: Name of the data set.
        spec: The specification, as in the config or from `identity`.
        places: Paths of its files, which override those of `spec`.

    Raises:
        DataError: For errors that are visible without reading a file: contradicting keys, a missing
            folder or file, a malformed call, a missing package.
    """
    keys = {k: v for k, v in spec.items() if k not in ("kind", "sha256", "version")}
    known = ("call", *KINDS)
    for kind in {*OF_LABELLED} - {*known} & {*spec, spec.get("kind")}:
        raise DataError(
            f"data set {name!r}: {kind}: needs the extension `labelled`, which was deleted here; put it "
            "back, or bring arrays by `call`"
        )
    kinds = [spec["kind"]] if "kind" in spec else [kind for kind in known if kind in spec]
    if len(kinds) != 1:
        text = " and ".join(kinds) or "none of them"
        raise DataError(
            f"data set {name!r}: must have one of source, {', '.join(known)}; it has {text}"
        )
    [kind] = kinds
    files = (kind, *KINDS[kind].more_files) if kind in KINDS else ()
    defaults = KINDS[kind].defaults if kind in KINDS else OF_CALL
    allowed = dict.fromkeys([kind, *files, *defaults])
    for key in keys:
        if key not in allowed:
            raise DataError(
                f"data set {name!r}: {key!r} does not go with {kind!r}; allowed: {', '.join(allowed)}"
            )
    values = {key: value for key, value in {**defaults, **keys}.items() if key not in files}
    locations = _places(name, files, keys if places is None else places)
    if kind == "call":
        if fault := users_code.fault_of_call(values["call"]):
            raise DataError(f"data set {name!r}: call = {values['call']!r} {fault}")
        bad = next((key for key in values["kwargs"] if not key.isidentifier()), None)
        if bad is not None:
            raise DataError(f"data set {name!r}: kwargs: {bad!r} cannot be the name of an argument")
    elif fault := KINDS[kind].find_fault(values):
        raise DataError(f"data set {name!r}: {fault}")
    if "tokenizer" in locations and util.find_spec("tokenizers") is None:
        raise DataError(f"data set {name!r}: {own_files.NO_TOKENIZERS}")
    return OwnData(name, kind, values, locations)


def _places(name: str, files: Iterable[str], spec: Mapping[str, Any]) -> dict[str, list[Path]]:
    locations = {}
    for key in files:
        value = spec.get(key)
        if value is None:
            continue
        locations[key] = [Path(p).expanduser() for p in _each(value)]
        for place in locations[key]:
            is_there, what = (
                (place.is_dir(), "folder")
                if key in KINDS and KINDS[key].samples
                else (place.is_file(), "file")
            )
            if not is_there:
                raise DataError(f"data set {name!r}: {key} = {str(place)!r} is no {what}")
    return locations


def _each(paths: str | list[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else paths


def places_for_jobs(datasets: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the paths of the config's data sets, as a text for PLACES_VARIABLE."""
    locations = {}
    for name, spec in datasets.items():
        places = {
            key: [str(Path(p).expanduser().absolute()) for p in _each(spec[key])]
            for key in PLACES
            if spec.get(key)
        }
        if places:
            locations[name] = places
    return json.dumps(locations, sort_keys=True)


def of_job(name: str, spec: Mapping[str, Any]) -> OwnData:
    """Return a user's data set in a job, with file paths from the spec or the environment."""
    if spec.keys() & set(PLACES) or spec.get("call"):
        return own_data(name, spec)
    return own_data(name, spec, json.loads(os.environ.get(PLACES_VARIABLE, "{}")).get(name, {}))


def prepared_facts(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the meta data of what was prepared in `folder` for `identity`.

    Return None where nothing was.
    """
    try:
        return read_json(folder / prepared.meta_name(identity))
    except (OSError, ValueError):
        return None

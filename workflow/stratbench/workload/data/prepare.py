"""Prepares a data set: converts its source files to arrays in one folder.

python -m stratbench.workload.data.prepare NAME --out DIR
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stratbench.cell.locks import create_temporary_locked_folder
from stratbench.workload import users_code
from stratbench.workload.data import own_data, prepared, sources
from stratbench.workload.data.dataset import Dataset, get_sample_kind
from stratbench.workload.data.datasets import DATASETS, compute_data_identity, make_dataset_metadata
from stratbench.workload.data.sources import DataError, Source


def prepare_data_set(
    name: str,
    out_dir: str | Path,
    root: str | Path | None = None,
    download: bool = True,
    spec: Mapping[str, Any] | None = None,
) -> prepared.Metadata:
    """Write the arrays and metadata of a data set to a folder. Return the metadata.

    If the folder already has this data set intact, it stays. The folder is either complete or missing, and
    concurrent calls do not disturb each other.

    Args:
        name: Name of the data set.
        out_dir: Folder to write.
        root: Folder of the source files in torchvision's layout, or None for that of the environment variable
            STRATBENCH_DATA.
        download: Whether missing source files may be downloaded.
        spec: Specification in the config, if any.

    Raises:
        DataError: If the data set cannot be prepared; the message has the remedy.
    """
    if own_data.is_own_data_set(spec):
        return _prepare_own_data_set(
            own_data.read_own_data_specification_in_job(name, spec), Path(out_dir), spec
        )
    facts = make_dataset_metadata(name, spec)
    request = {
        "format": prepared.FORMAT,
        "name": name,
        "spec": compute_data_identity(name, spec),
        "classes": facts.classes,
        "crop_padding": facts.crop_padding,
        "flip": facts.has_random_flips,
    }
    root = root or os.environ.get(sources.ROOT_VARIABLE)

    def open_source(download_folder: Path) -> tuple[Source, Dataset]:
        folder = Path(root).expanduser() if root else None
        return facts.open_source(folder, download_folder if download else None), facts

    return _prepare_data_set_unless_intact(request, Path(out_dir), open_source)


def _prepare_own_data_set(
    own_data_set: own_data.OwnData, out_dir: Path, spec: Mapping[str, Any]
) -> prepared.Metadata:
    """Write the arrays and metadata of a user's data set to a folder. Return the metadata.

    Raises:
        DataError: If the data or code have changed since `spec` was made.
    """
    identity = json.loads(
        json.dumps(own_data_set.compute_data_set_identity(users_code.list_code_folders()))
    )
    hashes = {key: spec[key] for key in ("sha256", "version") if key in spec}
    if any(identity[key] != value for key, value in hashes.items()):
        raise DataError(
            f"{own_data_set}: its {'code has' if own_data_set.call else 'files have'} changed since the run "
            "was started; start the run again"
        )
    request = {
        "format": prepared.FORMAT,
        "name": own_data_set.name,
        "spec": identity,
        **{
            key: own_data_set.values_by_key.get(key, off)
            for key, off in own_data.AUGMENTATION.items()
        },
    }

    def open_source(download_folder: Path) -> tuple[Source, Dataset]:
        source, shape, classes, *kinds = own_data_set.open_samples()
        samples = source.train.samples, source.test.samples
        of_texts = own_data_set.task, own_data_set.values_by_key.get("vocabulary")
        return source, Dataset(shape, classes, *samples, None, 0, False, *kinds, *of_texts)

    return _prepare_data_set_unless_intact(request, out_dir, open_source)


def _prepare_data_set_unless_intact(
    requested_metadata: Mapping[str, Any],
    out_dir: Path,
    open_source: Callable[[Path], tuple[Source, Dataset]],
) -> prepared.Metadata:
    """Prepare a data set in a folder, unless the folder has it intact. Return its metadata.

    Args:
        requested_metadata: Metadata that the prepared data set must have.
        out_dir: Folder to write.
        open_source: Opens the samples, given a folder for downloads.
    """
    if (intact := prepared.read_metadata_if_intact(out_dir, requested_metadata)) is not None:
        return intact
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with create_temporary_locked_folder(out_dir.parent, f".{out_dir.name}.", ".partial") as scratch:
        built, downloads = Path(scratch, "built"), Path(scratch, "downloads")
        built.mkdir()
        downloads.mkdir()
        source, facts = open_source(downloads)
        prepared.write_data_set(built, requested_metadata, source, facts)
        return prepared.install_data_set(built, out_dir, requested_metadata)


def _parse_data_set_specification(json_text: str) -> dict[str, Any] | None:
    try:
        spec = json.loads(json_text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{json_text}: is not JSON ({error}); correct it"
        ) from None
    if spec is not None and not isinstance(spec, dict):
        raise argparse.ArgumentTypeError(
            f'{json_text}: is not a JSON object; write one such as {{"source": "synthetic"}}'
        )
    return spec


def main(arguments: list[str] | None = None) -> int:
    """Prepare a data set: write its arrays and metadata to a folder.

    Return 0, or 1 with a message on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.workload.data.prepare", description=main.__doc__
    )
    parser.add_argument(
        "name", help=f"name of the data set: {', '.join(DATASETS)}, or any name with --spec"
    )
    parser.add_argument("--out", required=True, help="folder for the arrays and metadata")
    parser.add_argument(
        "--no-download",
        action="store_true",
        help="fail if source files are missing, instead of downloading them",
    )
    parser.add_argument(
        "--spec",
        type=_parse_data_set_specification,
        help="specification of the data set in JSON, as in config.yaml; null: a built-in data set",
    )
    options = parser.parse_args(arguments)
    try:
        download = not options.no_download
        meta = prepare_data_set(options.name, options.out, download=download, spec=options.spec)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was left behind", file=sys.stderr)
        return 128 + signal.SIGINT
    size = "x".join(map(str, meta["shape"]))
    what = get_sample_kind(meta["shape"])
    kinds = "tokens" if what == "texts" and "vocabulary" not in meta else "classes"
    if meta.get("values"):
        kinds = "values to learn per sample"
    print(
        f"{meta['name']}: {meta['train_samples']} training and {meta['test_samples']} test {what} "
        f"of {size}, {meta['classes']} {kinds}, in {options.out}"
    )
    return 0


if __name__ == "__main__":
    # Let SIGTERM raise SystemExit. A cancelled job then removes its temporary folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())

"""Writes and reads bundles: zip files of a study's results with a manifest of hashes.

A bundle may come from anybody, so nothing in it is trusted. Only files that `stratbench bundle` writes are
accepted, and their sizes are limited. Every fault raises a SetError with one sentence.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench import __version__
from stratbench.cell.files import parse_json, replace_file_atomically

SCHEMA_VERSION = 1
#: Ending of a bundle's file name: `<study>.stratbench.zip`.
SUFFIX = ".stratbench.zip"
MANIFEST = "manifest.json"
#: Largest size of a bundle that is read, in bytes.
MAX_FILE_BYTES = 256 << 20
#: Largest number of files in a bundle (members of the zip file).
MAX_MEMBERS = 50_000
#: Largest unpacked size of one member, in bytes.
MAX_MEMBER_BYTES = 64 << 20
#: Largest unpacked size of all members together, in bytes.
MAX_BYTES = 1 << 30
#: Largest unpacked size, as a multiple of the compressed size. An unpacked size below RATIO_FROM_BYTES is not
#: checked.
MAX_RATIO, RATIO_FROM_BYTES = 200, 16 << 20
#: Largest size of a member's entry in the directory of a zip file, in bytes.
_DIRECTORY_BYTES = 600

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_MEMBER = re.compile(
    rf"(manifest|cells|config|environment|plan)\.json"
    rf"|cells/{_PART}/{_PART}/{_PART}/[1-9][0-9]{{0,5}}gpu/rep(0|[1-9][0-9]{{0,5}})"
    r"/(record\.json|timeline\.csv)"
)
#: Pattern of the names of studies and sets. Such a name is used as the name of a folder.
NAME = re.compile(_PART)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class SetError(ValueError):
    """A result set cannot be used. The message gives the reason in one sentence."""


def write_bundle_archive(
    out: Path, texts_by_name: Mapping[str, str], study: str, created: str, hosts: str
) -> dict[str, Any]:
    """Write a bundle as a zip file, and return its manifest.

    The zip file appears when it is complete. Equal arguments give equal bytes.

    Args:
        out: Zip file to write.
        texts_by_name: Content of each file in the bundle, by its name.
        study: Name of the study.
        created: Time of creation, in ISO format.
        hosts: `replaced` if names of hosts were replaced in the texts, else `named`.
    """
    packed = {name: text.encode() for name, text in sorted(texts_by_name.items())}
    manifest: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "product": {"name": "stratbench", "version": __version__},
        "study": study,
        "created": created,
        "hosts": hosts,
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            for name, content in packed.items()
        },
    }
    manifest["sha256"] = hash_manifest(manifest)
    packed = {MANIFEST: (json.dumps(manifest, indent=1) + "\n").encode()} | packed
    with (
        replace_file_atomically(out) as unfinished,
        zipfile.ZipFile(unfinished, "x", zipfile.ZIP_DEFLATED, compresslevel=9) as archive,
    ):
        for name, content in packed.items():
            # Each member has the default date (1980), so bundles of equal files have equal bytes.
            member = zipfile.ZipInfo(name)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = 3
            member.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(member, content)
    return manifest


def hash_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a bundle's manifest, which has the hashes of all files."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def extract_bundle(path: Path, folder: Path) -> dict[str, Any]:
    """Check a bundle, write its files below `folder`, and return its manifest.

    Raises:
        SetError: The bundle is damaged, is too large, or has a file that no bundle has.
    """
    _check_zip_signatures(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_zip_members(path, members)
            manifest = _read_manifest(path, archive)
            _check_manifest_lists_members(path, manifest, members)
            for member in members:
                if member.filename != MANIFEST:
                    _extract_zip_member(
                        path, archive, member, manifest["files"][member.filename], folder
                    )
    except SetError:
        raise
    except OSError as e:
        raise SetError(f"{path} cannot be read: {e.strerror or e}") from e
    except (
        *(zipfile.BadZipFile, zlib.error, EOFError, struct.error, NotImplementedError),
        *(RuntimeError, ValueError, KeyError, OverflowError, MemoryError),
    ) as e:
        raise SetError(f"{path} is damaged, or not a zip file ({type(e).__name__})") from e
    return manifest


def _check_zip_signatures(path: Path) -> None:
    """Raise SetError if a file is not a zip file, or is too large.

    SetError is also raised if the zip file has too many members. These checks precede `zipfile`, because
    `zipfile` creates an object per member.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SetError(f"{path} is not a regular file")
            if status.st_size > MAX_FILE_BYTES:
                raise SetError(
                    f"{path} has {status.st_size:,} bytes; a bundle has at most {MAX_FILE_BYTES:,}"
                )
            begin = file.read(4)
            file.seek(max(0, status.st_size - 22))
            end = file.read(22)
    except OSError as e:
        raise SetError(f"{path} cannot be read: {e.strerror}") from e
    if begin != b"PK\x03\x04" or len(end) < 22 or end[:4] != b"PK\x05\x06" or end[20:] != b"\0\0":
        raise SetError(
            f"{path} is not a bundle: its first or last bytes are not those of a zip file"
        )
    entries, directory_bytes = struct.unpack("<HL", end[10:16])
    if entries > MAX_MEMBERS or directory_bytes > MAX_MEMBERS * _DIRECTORY_BYTES:
        raise SetError(f"{path} has too many files; a bundle has at most {MAX_MEMBERS:,}")
    if directory_bytes > max(1, entries) * _DIRECTORY_BYTES:
        raise SetError(f"{path} is not a bundle: the file list of the zip file is too large")


def _check_zip_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """Raise SetError if a zip member has an invalid name, kind or size."""
    seen: set[str] = set()
    if len(members) > MAX_MEMBERS:
        raise SetError(f"{path} has too many files; a bundle has at most {MAX_MEMBERS:,}")
    for member in members:
        # `orig_filename` is the name in the zip file; in `filename`, zipfile may have changed it.
        name = member.orig_filename
        shown = quote_untrusted_value(name)
        kind = stat.S_IFMT(member.external_attr >> 16)
        if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
            raise SetError(
                f"{path} has a file with an absolute path, {shown}; the bundle was not read"
            )
        if ".." in re.split(r"[/\\]", name):
            raise SetError(
                f"{path} has a file with a path outside of its folder, {shown}; the bundle was not read"
            )
        if kind not in (0, stat.S_IFREG):
            raise SetError(
                f"{path} has the file {shown}, which is a link or a device; the bundle was not read"
            )
        if not _MEMBER.fullmatch(name) or name != member.filename:
            raise SetError(
                f"{path} has the file {shown}, which no bundle has; the bundle was not read"
            )
        if name.casefold() in seen:
            raise SetError(f"{path} has the file {shown} twice")
        if member.flag_bits & 0x1:
            raise SetError(f"{path} has the encrypted file {shown}; bundles are not encrypted")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise SetError(
                f"{path} has the file {shown}, compressed by a method that no bundle uses"
            )
        if member.file_size > MAX_MEMBER_BYTES:
            raise SetError(f"{path} has the file {shown} of more than {MAX_MEMBER_BYTES:,} bytes")
        seen.add(name.casefold())
    total, packed = (
        sum(getattr(m, size) for m in members) for size in ("file_size", "compress_size")
    )
    if total > MAX_BYTES:
        raise SetError(f"{path} has {total:,} unpacked bytes; a bundle has at most {MAX_BYTES:,}")
    if total > RATIO_FROM_BYTES and total > MAX_RATIO * max(1, packed):
        raise SetError(
            f"{path} is not a bundle: its unpacked size is more than {MAX_RATIO} times its size"
        )
    if MANIFEST not in seen:
        raise SetError(f"{path} has no {MANIFEST}; use a bundle that `stratbench bundle` wrote")


def _read_manifest(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return a bundle's manifest, after a check of its keys, values and hash."""
    try:
        manifest = parse_json(_read_zip_member(path, archive, archive.getinfo(MANIFEST)).decode())
    except ValueError as e:
        if isinstance(e, SetError):
            raise
        raise SetError(f"{path}: {MANIFEST} is not valid JSON: {e}") from e
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        version = (
            quote_untrusted_value(manifest.get("schema_version"))
            if isinstance(manifest, dict)
            else "none"
        )
        raise SetError(
            f"{path} is a bundle of format version {version}; this version of stratbench reads format "
            f"version {SCHEMA_VERSION}"
        )
    files, product = manifest.get("files"), manifest.get("product")
    whole = (
        isinstance(files, dict)
        and all(
            isinstance(entry, dict)
            and entry.keys() == {"sha256", "bytes"}
            and isinstance(entry["sha256"], str)
            and _SHA256.fullmatch(entry["sha256"])
            and type(entry["bytes"]) is int
            for entry in files.values()
        )
        and isinstance(product, dict)
        and product.keys() == {"name", "version"}
        and all(isinstance(text, str) and len(text) < 100 for text in product.values())
        and isinstance(manifest.get("study"), str)
        and NAME.fullmatch(manifest["study"])
        and isinstance(manifest.get("created"), str)
        and len(manifest["created"]) < 100
        and manifest.get("hosts") in ("named", "replaced")
    )
    if not whole:
        raise SetError(
            f"{path}: {MANIFEST} lacks values that each bundle has, or has them in another form"
        )
    if manifest.get("sha256") != hash_manifest(manifest):
        raise SetError(f"{path}: {MANIFEST} was changed: its content has another hash")
    return manifest


def _check_manifest_lists_members(
    path: Path, manifest: Mapping[str, Any], members: list[zipfile.ZipInfo]
) -> None:
    """Raise SetError if the manifest of a bundle lists other files than the bundle has."""
    members_listed = {member.filename for member in members} - {MANIFEST}
    listed = set(manifest["files"])
    if members_listed != listed:
        name = min(members_listed ^ listed)
        where = (
            "is not in its manifest"
            if name in members_listed
            else "is in its manifest, but not in the bundle"
        )
        raise SetError(f"{path}: {quote_untrusted_value(name)} {where}")


def _extract_zip_member(
    path: Path,
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    entry: Mapping[str, Any],
    folder: Path,
) -> None:
    """Write a bundle's member to a file. Raise SetError if its size or hash differs from the manifest.

    Args:
        path: Path of the bundle, for messages.
        archive: The open bundle.
        member: The member to write.
        entry: Size and hash of the member according to the manifest.
        folder: Folder to write below.
    """
    content = _read_zip_member(path, archive, member)
    if len(content) != entry["bytes"] or hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise SetError(
            f"{path}: {member.filename} was changed: its content has another hash than in the manifest"
        )
    # The path is below the folder, because the name matched the pattern _MEMBER before.
    out = folder / member.filename
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(content)


def _read_zip_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return the content of a member of a bundle.

    The size is limited while the member is unpacked, because its header may state a wrong size.
    """
    with archive.open(member) as file:
        content = file.read(MAX_MEMBER_BYTES + 1)
    if len(content) > MAX_MEMBER_BYTES:
        raise SetError(
            f"{path} has the file {member.filename} of more than {MAX_MEMBER_BYTES:,} bytes"
        )
    return content


def quote_untrusted_value(value: object) -> str:
    """Return an untrusted value as text for a message: quoted, in ASCII, and short."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

"""Marks the folders that stratbench writes, so that it never overwrites other files of the user."""

from __future__ import annotations

from pathlib import Path

from stratbench.cell.files import MAX_JSON_BYTES, read_regular_file, write_text_atomically

#: Name of the file that marks a folder as written by stratbench.
MARK = ".stratbench"


def mark_folder_and_return_old_text(folder: Path, marker_text: str = "") -> str:
    """Create an output folder with a marker file, or reuse a marked folder.

    Args:
        folder: Folder to write to.
        marker_text: Text to store in the marker, such as what the folder contains.

    Returns:
        The text that the marker had before; empty for a new folder.

    Raises:
        FileExistsError: The folder has files, but no marker.
    """
    mark = folder / MARK
    ours = mark.is_file()
    if not ours and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} was not written by stratbench; name a folder that does not exist yet"
        )
    before = read_regular_file(mark, MAX_JSON_BYTES).decode(errors="replace") if ours else ""
    write_text_atomically(mark, marker_text)
    return before

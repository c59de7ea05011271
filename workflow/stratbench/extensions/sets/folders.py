"""Claims the folders that users choose for results, so that no foreign file is overwritten."""

from __future__ import annotations

from pathlib import Path

from stratbench.cell.files import MAX_JSON_BYTES, read_regular_file, write_atomic

#: The file that marks a folder as written by stratbench.
MARK = ".stratbench"


def claim_folder(folder: Path, about: str = "") -> str:
    """Create a marked folder or reuse one, so that foreign files are never overwritten.

    Args:
        folder: The folder.
        about: Text to store in the marker.

    Returns:
        The text that the marker had before; empty for a new folder.

    Raises:
        FileExistsError: The folder has files and lacks the marker.
    """
    mark = folder / MARK
    ours = mark.is_file()
    if not ours and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} was not written by stratbench; name a folder that does not exist yet"
        )
    before = read_regular_file(mark, MAX_JSON_BYTES).decode(errors="replace") if ours else ""
    write_atomic(mark, about)
    return before

"""Creates the files of a new study: config.yaml, profiles, and a Snakefile that imports stratbench."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from stratbench.cell.installation import INSTALLED, ROOT, SNAKEFILE
from stratbench.command import CommandError

TEMPLATES = Path(__file__).parent / "templates" / "study"
#: If stratbench is an installed package, the Snakefile of a study gets this import and this path.
FROM_WHEEL = ("from stratbench.cell.installation import SNAKEFILE", "str(SNAKEFILE)")


def create_study_files(folder: Path) -> list[Path]:
    """Create the files of a new study, and return their paths.

    Raises:
        CommandError: The folder is not empty, or cannot be written to; then it is unchanged.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"{folder} is not an empty folder; name one that does not exist yet")
    sources = {folder / p.relative_to(TEMPLATES): p for p in TEMPLATES.rglob("*") if p.is_file()}
    for profile in (ROOT / "profiles").glob("*/config.yaml"):
        sources[folder / profile.relative_to(ROOT)] = profile
    try:
        for path, source in sources.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
        snakefile = folder / "Snakefile"
        line, place = FROM_WHEEL if INSTALLED else ("", repr(str(SNAKEFILE)))
        text = snakefile.read_text(encoding="utf-8").replace(
            "@IMPORT@\n", f"{line}\n" if line else ""
        )
        snakefile.write_text(text.replace("@SNAKEFILE@", place), encoding="utf-8")
    except OSError as error:
        with suppress(OSError):
            for child in folder.iterdir():
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        raise CommandError(f"cannot write to {folder}: {error.strerror}") from error
    return sorted(sources)

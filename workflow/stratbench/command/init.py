"""Writes the files of a new study: config.yaml, a Snakefile that uses stratbench as a module, profiles."""

from __future__ import annotations

import shutil
from pathlib import Path

from stratbench.cell.installation import INSTALLED, ROOT, SNAKEFILE
from stratbench.command import CommandError

TEMPLATES = Path(__file__).parent / "templates" / "study"
#: The path in a wheel would change with the environment, but the package can be imported from any.
FROM_WHEEL = ("from stratbench.cell.installation import SNAKEFILE", "str(SNAKEFILE)")


def lay_down(folder: Path) -> list[Path]:
    """Writes the study's files and returns their paths. CommandError if `folder` is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"{folder} is not an empty folder; name one that does not exist yet")
    try:
        shutil.copytree(TEMPLATES, folder, dirs_exist_ok=True)
        for profile in sorted((ROOT / "profiles").glob("*/config.yaml")):
            target = folder / profile.relative_to(ROOT)
            target.parent.mkdir(parents=True)
            shutil.copyfile(profile, target)
        snakefile = folder / "Snakefile"
        line, place = FROM_WHEEL if INSTALLED else ("", repr(str(SNAKEFILE)))
        text = snakefile.read_text(encoding="utf-8").replace(
            "@IMPORT@\n", f"{line}\n" if line else ""
        )
        snakefile.write_text(text.replace("@SNAKEFILE@", place), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write to {folder}: {error.strerror}") from error
    return sorted(path for path in folder.rglob("*") if path.is_file())

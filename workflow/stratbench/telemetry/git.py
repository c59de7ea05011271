"""The git state of the checkout that a cell runs from. No torch: the launcher uses it."""

from __future__ import annotations

import functools
import os
import subprocess
from typing import Any


@functools.cache
def git_state(root: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return `{"revision": ..., "dirty": ...}` of the checkout at `root`, cached per process.

    Dirty: a tracked file differs from the revision, or there is a Python or Snakemake file that git does not
    track. None without git, outside a checkout, or before the first commit.
    """
    revision = _git(root, "rev-parse", "HEAD")
    if revision is None:
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    unknown = _git(root, "ls-files", "--others", "--exclude-standard", "--", "*.py", "*.smk")
    return {"revision": revision, "dirty": bool(changed or unknown)}


def _git(root: str | os.PathLike[str], *arguments: str) -> str | None:
    # No optional locks: cells that run side by side must not fight over the index.
    command = ["git", "--no-optional-locks", "-C", os.fspath(root), *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

"""Reads the git revision from which a cell runs, and whether files were changed since."""

from __future__ import annotations

import functools
import os
import subprocess
from typing import Any


@functools.cache
def read_git_state(root: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the git revision of the checkout at `root`, and whether the checkout is dirty.

    A checkout is dirty if a tracked file differs from the revision, or if git does not track a Python or
    Snakemake file in it. The result is `{"revision": ..., "dirty": ...}`, and is cached per process. It is
    None without git, outside of a checkout, or before the first commit.
    """
    revision = _run_git(root, "rev-parse", "HEAD")
    if revision is None:
        return None
    changed = _run_git(root, "status", "--porcelain", "--untracked-files=no")
    unknown = _run_git(root, "ls-files", "--others", "--exclude-standard", "--", "*.py", "*.smk")
    return {"revision": revision, "dirty": bool(changed or unknown)}


def _run_git(root: str | os.PathLike[str], *arguments: str) -> str | None:
    # Without optional locks, several cells can call git at the same time: they do not lock its index.
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

"""Reads the git state of the checkout that a cell runs from, without torch, for the launcher."""

from __future__ import annotations

import functools
import os
import subprocess
from typing import Any


@functools.cache
def read_git_state(root: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return `{"revision": ..., "dirty": ...}` of the checkout at `root`, cached per process.

    A checkout is dirty if a tracked file differs from the revision, or if git does not track a Python or
    Snakemake file in it. The result is None without git, outside of a checkout, or before the first commit.
    """
    revision = _run_git(root, "rev-parse", "HEAD")
    if revision is None:
        return None
    changed = _run_git(root, "status", "--porcelain", "--untracked-files=no")
    unknown = _run_git(root, "ls-files", "--others", "--exclude-standard", "--", "*.py", "*.smk")
    return {"revision": revision, "dirty": bool(changed or unknown)}


def _run_git(root: str | os.PathLike[str], *arguments: str) -> str | None:
    # Without optional locks, cells that run at the same time do not compete for the index.
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

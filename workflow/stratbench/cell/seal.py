"""The seal of a verdict.json: tells a reader whether it is as it was written, and agrees with its blocks.

A slip of an editor or of a merge, not a forger: whoever can write the file can seal it, too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratbench.cell.blocks import BLOCK_FILE, BLOCK_PATTERN, BlockError, read_block


def with_seal(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """The content of verdict.json with the digest of all else in it."""
    return {**verdict, "digest": digest_of(verdict)}


def digest_of(verdict: Mapping[str, Any]) -> str:
    """The SHA-256 of a verdict's content but for its digest, whatever the order of keys."""
    content = {key: value for key, value in verdict.items() if key != "digest"}
    # As it comes back from a file: tuples are lists there.
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def why_broken(verdict: Mapping[str, Any], path: str | Path) -> str | None:
    """Why the content of the verdict.json at `path` is not to be believed; None if nothing says so.

    Its step times are worked out again from the blocks beside it, where they are.
    """
    if verdict.get("digest") != digest_of(verdict):
        return "it has been changed since it was written"
    folder = Path(path).parents[1] / "blocks"
    for bout in verdict["bouts"] if folder.is_dir() else ():
        for number in range(1, bout["blocks"] + 1):
            block = folder / BLOCK_PATTERN.format(**{**bout, "block": number}) / BLOCK_FILE
            try:
                result = read_block(block)
            except BlockError as e:
                return f"it rests on a block that is not there as it was: {e}"
            for arm, times in bout["step_s"].items():
                log = result.value(arm)
                now, then = math.exp(log) if math.isfinite(log) else None, times[number - 1]
                if (now is None) != (then is None) or (now and abs(now / then - 1) > 1e-9):
                    return f"{block} says something else of {arm}"
    return None

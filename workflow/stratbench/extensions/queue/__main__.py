"""Simulates the queue that `decide.queue` describes, and writes the answer as JSON.

python -m stratbench.extensions.queue --config JSON --out queue.json      as `snakemake decide` calls it
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_atomic
from stratbench.extensions.queue.request import QueueRequest


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.extensions.queue", description=__doc__
    )
    parser.add_argument("--config", required=True, help="`decide` and `cluster` of it, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="the answer (JSON)")
    args = parser.parse_args(argv)
    config = json.loads(args.config)
    try:
        write_answer(config["decide"], config["cluster"]["gpus_per_node"], args.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write_answer(decide: Mapping[str, Any], gpus_per_node: int, out: Path) -> dict[str, Any]:
    """Return the answer to `decide.queue`, written to `out`, with progress on stderr.

    ValueError with a remedy if the history does not do; OSError if it cannot be read.
    """
    from stratbench.extensions.queue.answer import answer

    def progress(done: int, of: int) -> None:
        if done * 4 // of > (done - 1) * 4 // of:
            print(f"queue: {done} of {of} moments simulated", file=sys.stderr, flush=True)

    found = answer(
        QueueRequest(**decide["queue"]), gpus_per_node, decide["equivalence_margin"], progress
    )
    write_atomic(out, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(main())

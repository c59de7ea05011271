"""`python -m stratbench.verdict`: `next` prints the next round to run, `tell` the verdict so far."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from stratbench.cell.files import write_atomic
from stratbench.verdict.evidence import read_evidence
from stratbench.verdict.next_round import round_of
from stratbench.verdict.rounds import Course
from stratbench.verdict.summary import verdict_of
from stratbench.verdict.words import verdict_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="stratbench.verdict", description=__doc__)
    parser.add_argument(
        "what", choices=["next", "tell"], help="the next round, or the verdict so far"
    )
    parser.add_argument("--config", required=True, help="the validated config, as JSON")
    args = parser.parse_args(argv)
    config = json.loads(args.config)
    evidence, notes = read_evidence(config)
    course = Course(evidence)
    found = round_of(course)
    if args.what == "next":
        print(json.dumps(found.as_dict(), indent=1, allow_nan=False))
        return 0
    verdict = verdict_of(course, found, notes)
    out = Path(config["results"], evidence.study, "verdict", "verdict.json")
    write_atomic(out, json.dumps(verdict, indent=1, allow_nan=False) + "\n")
    print(*verdict_lines(verdict), f"{out} has it all.", sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m stratbench.verdict next` says what the next round shall run, `tell` what is decided so far."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratbench.cell.files import write_atomic
from stratbench.verdict.evidence import read_evidence
from stratbench.verdict.rounds import Course, round_of
from stratbench.verdict.summary import verdict_of
from stratbench.verdict.words import verdict_lines


def read_config(text: str) -> dict[str, Any]:
    """The config: JSON, or `@FILE` that holds it."""
    if text.startswith("@"):
        text = Path(text[1:]).read_text(encoding="utf-8")
    return json.loads(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="stratbench.verdict", description=__doc__)
    parser.add_argument(
        "what", choices=["next", "tell"], help="the next round, or the verdict so far"
    )
    parser.add_argument("--config", required=True, help="the validated config, as JSON or @FILE")
    parser.add_argument("--out", type=Path, help="next: write round.json there, and print nothing")
    args = parser.parse_args(argv)
    config = read_config(args.config)
    evidence, notes = read_evidence(config)
    course = Course(evidence)
    found = round_of(course)
    if args.what == "next":
        text = json.dumps(found.as_dict(), indent=1, allow_nan=False) + "\n"
        if args.out:
            write_atomic(args.out, text)
        else:
            print(text, end="")
        return 0
    verdict = verdict_of(course, found, notes)
    out = Path(config["results"], evidence.study, "verdict", "verdict.json")
    write_atomic(out, json.dumps(verdict, indent=1, allow_nan=False) + "\n")
    print(*verdict_lines(verdict), f"{out} has it all.", sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

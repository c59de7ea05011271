"""Command line: `next` prints a verdict's next round as JSON, and `tell` prints the verdict.

`tell` also writes verdict.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from stratbench.cell.files import write_text_atomically
from stratbench.cell.text.words import wrap_lines
from stratbench.extensions.verdict.paired.evidence import read_evidence
from stratbench.extensions.verdict.paired.lines import iter_verdict_lines
from stratbench.extensions.verdict.paired.next_round import plan_next_round
from stratbench.extensions.verdict.paired.rounds import RoundReplay
from stratbench.extensions.verdict.paired.verdict import make_verdict_content


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `next` or `tell`, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="stratbench.extensions.verdict.paired", description=__doc__
    )
    parser.add_argument(
        "what",
        choices=["next", "tell"],
        help="next: print the next round as JSON; tell: print the verdict so far, and write verdict.json",
    )
    parser.add_argument(
        "--config", required=True, help="the validated config as JSON, or - to read it from stdin"
    )
    args = parser.parse_args(argv)
    config = json.loads(sys.stdin.read() if args.config == "-" else args.config)
    evidence, notes = read_evidence(config)
    analysis = RoundReplay(evidence)
    next_round = plan_next_round(analysis)
    if args.what == "next":
        print(json.dumps(next_round.as_dict(), indent=1, allow_nan=False))
        return 0
    verdict = make_verdict_content(analysis, next_round, notes)
    out = Path(config["results"], evidence.study, "verdict", "verdict.json")
    write_text_atomically(out, json.dumps(verdict, indent=1, allow_nan=False) + "\n")
    print(wrap_lines([*iter_verdict_lines(verdict), f"{out} has all values."]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes the list of a study's cells, so that the analysis knows which records are missing.

MATRICES is a JSON list with a mapping per experiment: the arguments of `coordinates.expand_cells`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stratbench.cell.coordinates import expand_cells
from stratbench.cell.files import write_text_atomically
from stratbench.cell.text.words import format_count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "matrices",
        help="JSON list with a mapping per experiment: its name, strategies, models and so on",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write the cells to, as JSON"
    )
    args = parser.parse_args()
    cells = [c.as_dict() for matrix in json.loads(args.matrices) for c in expand_cells(**matrix)]
    write_text_atomically(args.out, json.dumps(cells, indent=0) + "\n")
    print(format_count(len(cells), "cell"))


if __name__ == "__main__":
    main()

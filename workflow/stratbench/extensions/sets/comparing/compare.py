"""Compares result sets: writes the page, its tables and figures, and detects slow-downs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.decide import describe_decisions
from stratbench.cell.files import claim_folder, write_atomic
from stratbench.cell.text.words import folded, printable
from stratbench.extensions.sets.archive import NAME, SetError, shown_name
from stratbench.extensions.sets.comparing import figures, page, regression, tables
from stratbench.extensions.sets.comparing.comparison import compare, headline_of
from stratbench.extensions.sets.comparing.exploring import write_explore
from stratbench.extensions.sets.comparing.union import decisions_over, sentences_on
from stratbench.extensions.sets.keys import EXPLORE, INDEX, PAGES
from stratbench.extensions.sets.reading import ResultSet, read_set

#: The longest name of a comparison's folder, without the hash that makes a shortened one unique.
_MAXIMUM = 100


def compare_sets(
    named: Mapping[str, str],
    out_root: Path,
    allowed: float | None = None,
    prices: Mapping[str, float] | None = None,
    limits: Constraints | None = None,
) -> int:
    """Compare the sets with the first of them; return 1 if one fails.

    Writes <out_root>/<names>/index.html, and next to it tables, figures and the page of all cells. A set
    fails if something in it is slower by more than `allowed`, beyond noise, or no longer finishes.

    Args:
        named: Sources of the sets, by name.
        out_root: Folder to write below.
        allowed: Allowed slow-down as a fraction; None: none is reported.
        prices: Prices by set.
        limits: Constraints of a decision over all sets.
    """
    if len(named) < 2:
        raise SetError("one set cannot be compared; name two or more")
    for name in named:
        if not NAME.fullmatch(name) or name.lower() in PAGES:
            raise SetError(
                f"{shown_name(name)} cannot name a set: letters, digits, '.', '_' and '-' can, "
                f"but for {' and '.join(PAGES)}"
            )
    prices, limits = prices or {}, limits or Constraints()
    sets = [read_noisily(source, name) for name, source in named.items()]
    folder = out_root / folder_name(named)
    take_folder(folder, named)
    compared = [compare(sets[0], other) for other in sets[1:]]
    decisions = decisions_over(sets, prices, limits)
    watched = None if allowed is None else regression.watch(compared, allowed)
    sections = []
    for one in compared:
        tables.write_all(one, folder)
        drawn = figures.draw_all(one, folder, limits.equivalence_margin)
        sections.append(page.pair_section(one, drawn))
    by_cost = bool(prices) or limits.price_per_gpu_hour is not None
    constraints = list(sentences_on(limits, prices))
    values = page.page_values(
        sets, sections, watched, allowed, decisions, constraints, limits, by_cost
    )
    write_atomic(folder / INDEX, page.render(values))
    write_explore(sets, folder / EXPLORE)
    for one in compared:
        text = f"{one.other.name} against {one.first.name}: {headline_of(one)}"
        print(printable(folded([text])))
        for mean in one.strategies:
            if mean.gpus is None:
                print(f"  {mean.strategy}: {tables.ratio_text(mean.time)} times the training time")
    if decisions:
        print(printable(describe_decisions(decisions, [], limits, constraints)))
    if watched is not None:
        print(printable(folded(regression.describe_watch(watched, allowed))))
    print(folder / INDEX)
    return 1 if watched and regression.is_slower(watched) else 0


def take_folder(folder: Path, named: Mapping[str, str]) -> None:
    """Claim the comparison's folder; print a note if it replaces that of other sets."""
    about = ", ".join(f"{name}={source}" for name, source in named.items())
    before = claim_folder(folder, about)
    if before not in ("", about):
        text = f"{folder} held the comparison of {before}, which is replaced"
        print(printable(text), file=sys.stderr)


def folder_name(names: Iterable[str]) -> str:
    """Return the name of a comparison's folder, unique to these sets."""
    name = "+".join(names)  # no name has a plus in it
    if len(name) <= _MAXIMUM:
        return name
    return f"{name[:_MAXIMUM]}+{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def read_noisily(source: str, name: str) -> ResultSet:
    """Read a set, after printing a line on it: thousands of records take a while."""
    print(f"reading {name}: {source}", file=sys.stderr, flush=True)
    return read_set(source, name)

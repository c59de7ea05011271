"""Compares result sets with the first: writes the page, tables and figures, and detects slow-downs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.decide import describe_decisions
from stratbench.cell.files import write_atomic
from stratbench.cell.text.words import replace_control_characters, wrap_lines
from stratbench.extensions.sets.archive import NAME, SetError, quote_untrusted
from stratbench.extensions.sets.comparing import figures, page, regression, tables
from stratbench.extensions.sets.comparing.comparison import compare_result_sets, make_headline
from stratbench.extensions.sets.comparing.exploring import write_explore_page
from stratbench.extensions.sets.comparing.union import decide_over_sets, iter_constraint_sentences
from stratbench.extensions.sets.folders import claim_folder
from stratbench.extensions.sets.keys import EXPLORE, INDEX, PAGES
from stratbench.extensions.sets.reading import ResultSet, read_set

#: Longest name of a comparison's folder; a longer name is cut and gets a hash.
_MAX_FOLDER_NAME = 100


def compare_sets(
    named: Mapping[str, str],
    out_root: Path,
    allowed: float | None = None,
    prices: Mapping[str, float] | None = None,
    limits: Constraints | None = None,
) -> int:
    """Compare result sets with the first of them, and write the page.

    The function returns 1 if a set fails. The page is <out_root>/<names>/index.html; tables, figures and a
    page of all cells are next to it. A set fails if a strategy is slower by more than `allowed` and by more
    than noise, or no longer finishes.

    Args:
        named: Sources of the sets, by name.
        out_root: Folder to write below.
        allowed: Allowed slow-down as a fraction, or None if slow-downs are not watched.
        prices: Price per GPU-hour of each set, by name.
        limits: Constraints of the decision over all sets.
    """
    if len(named) < 2:
        raise SetError("a single set cannot be compared; name two or more sets")
    for name in named:
        if not NAME.fullmatch(name) or name.lower() in PAGES:
            raise SetError(
                f"{quote_untrusted(name)} cannot be the name of a set; use letters, digits, '.', '_' and "
                f"'-', but not {' or '.join(PAGES)}"
            )
    prices, limits = prices or {}, limits or Constraints()
    sets = [read_set_with_message(source, name) for name, source in named.items()]
    folder = out_root / make_folder_name(named)
    claim_comparison_folder(folder, named)
    compared = [compare_result_sets(sets[0], other) for other in sets[1:]]
    decisions = decide_over_sets(sets, prices, limits)
    watched = None if allowed is None else regression.watch_regressions(compared, allowed)
    sections = []
    for one in compared:
        tables.write_comparison_tables(one, folder)
        drawn = figures.draw_ratio_figures(one, folder, limits.equivalence_margin)
        sections.append(page.make_pair_section(one, drawn))
    by_cost = bool(prices) or limits.price_per_gpu_hour is not None
    constraints = list(iter_constraint_sentences(limits, prices))
    values = page.make_page_values(
        sets, sections, watched, allowed, decisions, constraints, limits, by_cost
    )
    write_atomic(folder / INDEX, page.render_comparison_page(values))
    write_explore_page(sets, folder / EXPLORE)
    for one in compared:
        text = f"{one.other_set.name} compared with {one.first_set.name}: {make_headline(one)}"
        print(replace_control_characters(wrap_lines([text])))
        for mean in one.strategy_means:
            if mean.gpus is None:
                print(
                    f"  {mean.strategy}: {tables.format_ratio(mean.time_ratio)} times the training time"
                )
    if decisions:
        print(replace_control_characters(describe_decisions(decisions, [], limits, constraints)))
    if watched is not None:
        print(replace_control_characters(wrap_lines(regression.describe_watch(watched, allowed))))
    print(folder / INDEX)
    return 1 if watched and regression.has_failures(watched) else 0


def claim_comparison_folder(folder: Path, named: Mapping[str, str]) -> None:
    """Claim the output folder of a comparison.

    A note is printed if the folder had a comparison of other sets.
    """
    about = ", ".join(f"{name}={source}" for name, source in named.items())
    before = claim_folder(folder, about)
    if before not in ("", about):
        text = f"{folder} had the comparison of {before}, which is now replaced"
        print(replace_control_characters(text), file=sys.stderr)


def make_folder_name(names: Iterable[str]) -> str:
    """Return a folder name for a comparison of sets, unique to the sets' names."""
    name = "+".join(names)  # no name has a plus in it
    if len(name) <= _MAX_FOLDER_NAME:
        return name
    return f"{name[:_MAX_FOLDER_NAME]}+{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def read_set_with_message(source: str, name: str) -> ResultSet:
    """Print a line on a set, and read it. Thousands of records take a while to read."""
    print(f"reading {name}: {source}", file=sys.stderr, flush=True)
    return read_set(source, name)

"""Compares result sets with the first one: writes a page, tables and figures, and finds slow-downs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.decide import describe_decisions
from stratbench.cell.files import write_text_atomically
from stratbench.cell.text.words import replace_control_characters, wrap_lines
from stratbench.command import ExitCode
from stratbench.extensions.sets.archive import NAME, SetError, quote_untrusted_value
from stratbench.extensions.sets.comparing import figures, page, regression, tables
from stratbench.extensions.sets.comparing.comparison import compare_result_sets, describe_comparison
from stratbench.extensions.sets.comparing.exploring import write_explore_page
from stratbench.extensions.sets.comparing.union import decide_over_sets, iter_constraint_sentences
from stratbench.extensions.sets.folders import mark_folder_and_return_old_text
from stratbench.extensions.sets.keys import EXPLORE, INDEX, PAGES
from stratbench.extensions.sets.reading import ResultSet, read_set

#: Largest length of the name of a comparison's folder. A longer name is cut and gets a hash at its end.
_MAX_FOLDER_NAME = 100


def compare_sets_with_first(
    sources_by_name: Mapping[str, str],
    out_root: Path,
    allowed_slowdown: float | None,
    prices: Mapping[str, float],
    constraints: Constraints,
) -> ExitCode:
    """Compare result sets with the first set, write a page, and return the exit code.

    The page is <out_root>/<names>/index.html. Tables, figures and a page of all cells are next to it. The
    exit code is 1 if a strategy in a set no longer finishes, or is slower by more than the allowed share and
    by more than noise.

    Args:
        sources_by_name: Source of each set, by its name.
        out_root: Folder in which to write a folder with the comparison.
        allowed_slowdown: Share by which a strategy may be slower; None if slow-downs do not fail.
        prices: Price per GPU-hour of each set, by name.
        constraints: Constraints of the decision over all sets.
    """
    if len(sources_by_name) < 2:
        raise SetError("a single set cannot be compared; name two or more sets")
    for name in sources_by_name:
        if not NAME.fullmatch(name) or name.lower() in PAGES:
            raise SetError(
                f"{quote_untrusted_value(name)} cannot be the name of a set; use letters, digits, '.', '_' "
                f"and '-'; {' and '.join(PAGES)} are reserved"
            )
    sets = [announce_and_read_set(source, name) for name, source in sources_by_name.items()]
    folder = out_root / make_comparison_folder_name(sources_by_name)
    create_comparison_folder(folder, sources_by_name)
    compared = [compare_result_sets(sets[0], other) for other in sets[1:]]
    decisions = decide_over_sets(sets, prices, constraints)
    watched = None
    if allowed_slowdown is not None:
        watched = regression.find_regressions(compared, allowed_slowdown)
    sections = []
    for one in compared:
        tables.write_comparison_tables(one, folder)
        drawn = figures.draw_ratio_figures(one, folder, constraints.equivalence_margin)
        sections.append(page.collect_comparison_section_values(one, drawn))
    by_cost = bool(prices) or constraints.price_per_gpu_hour is not None
    sentences = list(iter_constraint_sentences(constraints, prices))
    values = page.collect_comparison_page_values(
        sets, sections, watched, allowed_slowdown, decisions, sentences, constraints, by_cost
    )
    write_text_atomically(folder / INDEX, page.render_comparison_page(values))
    write_explore_page(sets, folder / EXPLORE)
    for one in compared:
        text = (
            f"{one.other_set.name} compared with {one.first_set.name}: {describe_comparison(one)}"
        )
        print(replace_control_characters(wrap_lines([text])))
        for mean in one.strategy_means:
            if mean.gpus is None:
                print(
                    f"  {mean.strategy}: {tables.format_ratio(mean.time_ratio)} times the training time"
                )
    if decisions:
        answers = describe_decisions(decisions, [], constraints, sentences)
        print(replace_control_characters(answers))
    if watched is not None:
        lines = regression.describe_regressions(watched, allowed_slowdown)
        print(replace_control_characters(wrap_lines(lines)))
    print(folder / INDEX)
    return 1 if watched and regression.has_failing_outcome(watched) else 0


def create_comparison_folder(folder: Path, sources_by_name: Mapping[str, str]) -> None:
    """Create or reuse the output folder of a comparison.

    If the folder has the comparison of other sets, print a note that this is replaced.
    """
    sets = ", ".join(f"{name}={source}" for name, source in sources_by_name.items())
    previous_sets = mark_folder_and_return_old_text(folder, sets)
    if previous_sets not in ("", sets):
        text = f"{folder} had the comparison of {previous_sets}, which is now replaced"
        print(replace_control_characters(text), file=sys.stderr)


def make_comparison_folder_name(names: Iterable[str]) -> str:
    """Return the name of the folder for a comparison. Sets with other names have another folder."""
    # The name of a set has no "+", so the joined names are unique.
    name = "+".join(names)
    if len(name) <= _MAX_FOLDER_NAME:
        return name
    return f"{name[:_MAX_FOLDER_NAME]}+{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def announce_and_read_set(source: str, name: str) -> ResultSet:
    """Print that a set is being read, which may take long, and return the set."""
    print(f"reading {name}: {source}", file=sys.stderr, flush=True)
    return read_set(source, name)

"""Runs commands on a result set: check, decide, compare, export, and plan of a bundle."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.decide import make_decisions, read_evidence, write_decisions
from stratbench.cell.text.words import replace_control_characters, wrap_lines
from stratbench.command import CommandError
from stratbench.command.subcommands import apply_config_pairs
from stratbench.extensions.sets.archive import SetError, extract_bundle
from stratbench.extensions.sets.check import INVALID, choose_exit_code, describe_set
from stratbench.extensions.sets.export import export_set
from stratbench.extensions.sets.folders import claim_folder
from stratbench.extensions.sets.keys import list_existing_sets
from stratbench.extensions.sets.reading import ResultSet, read_set
from stratbench.study.config.messages import ConfigError
from stratbench.study.config.schema import (
    check_config_block,
    check_extension_keys,
    collect_constraints,
)
from stratbench.workload.data.own_data import is_own_data_set
from stratbench.workload.tasks import TASKS


def read_set_or_fail(text: str) -> ResultSet:
    """Read the result set that the text `text` names, or raise CommandError.

    Raises:
        CommandError: If the set cannot be read.
    """
    try:
        return read_set(text)
    except SetError as error:
        raise CommandError(str(error)) from None


def check_set_source(text: str) -> int:
    """Check a set, and print its content and the audit's findings.

    Returns:
        1 if the audit calls values unusable, 2 if the set is invalid, and otherwise 0.
    """
    try:
        result_set = read_set(text)
    except SetError as error:
        print(f"stratbench check: {error}")
        return INVALID
    print(replace_control_characters(wrap_lines(describe_set(result_set))))
    return choose_exit_code(result_set)


def decide_from_set(text: str, pairs: Sequence[str], out: Path | None) -> int:
    """Decide from a set's records, print the decisions, and write them to a folder.

    Args:
        text: Source of the set.
        pairs: Constraints, as KEY=VALUE.
        out: Folder to write, if any.
    """
    result_set = read_set_or_fail(text)
    folder = out or Path(f"{result_set.study}.decision")
    config = apply_config_pairs(result_set.config or {}, pairs)
    try:
        blocks = {
            key: check_config_block(key, config.get(key, {})) for key in ("decide", "cluster")
        }
        check_extension_keys("decide", blocks["decide"], blocks)
    except ConfigError as error:
        raise CommandError(str(error)) from None
    claim_folder(folder)
    written = [folder / name for name in ("decision.csv", "answers.json")]
    try:
        constraints = Constraints(**collect_constraints(blocks))
        evidence = read_evidence((), constraints)
        tables = (result_set.cells, result_set.findings)
        made = make_decisions(*tables, constraints, list(evidence.values()))
        answers = write_decisions(made, tables[1], constraints, *written, evidence)
    except ValueError as error:  # a ConfigError is a ValueError
        raise CommandError(str(error)) from None
    print(replace_control_characters(answers))
    print(f"Written: {', '.join(map(str, written))}")
    return 0


def compare_set_sources(sources: Sequence[str], pairs: Sequence[str], out: Path | None) -> int:
    """Compare sets, and return 1 if one of them is slower by more than `compare.fail_above`.

    Args:
        sources: The sets, as NAME=SET.
        pairs: Config values, as KEY=VALUE.
        out: Folder to write, if any.
    """
    from stratbench.extensions.sets.comparing.compare import compare_sets

    config = apply_config_pairs({}, pairs)
    named = dict(source.partition("=")[::2] for source in sources)
    if "" in named.values() or len(named) < len(sources):
        raise CommandError(
            "each set needs a name of its own, as NAME=SET: old=old.stratbench.zip new=results/demo"
        )
    try:
        keys = ("compare", "decide", "cluster")
        blocks = {key: check_config_block(key, config.get(key, {})) for key in keys}
        blocks["sets"] = check_config_block("sets", named)
        check_extension_keys("top", blocks, blocks)
        return compare_sets(
            list_existing_sets(blocks),
            out or Path("compare"),
            blocks["compare"]["fail_above"],
            blocks["compare"]["prices"],
            Constraints(**collect_constraints(blocks)),
        )
    except (SetError, ConfigError) as error:
        raise CommandError(str(error)) from None


def export_set_source(text: str, formats: Sequence[str], out: Path | None) -> int:
    """Export a set to the formats of other tools.

    Args:
        text: Source of the set.
        formats: Names of the formats.
        out: Folder to write, if any.
    """
    result_set = read_set_or_fail(text)
    try:
        folders = export_set(result_set, formats, out or Path(f"{result_set.study}.export"))
    except SetError as error:
        raise CommandError(str(error)) from None
    print("Written:", *folders, sep="\n  ")
    return 0


def plan_from_bundle(text: str, pairs: Sequence[str], out: Path | None) -> int:
    """Plan the study of a bundle from its config and its records.

    Args:
        text: Source of the set.
        pairs: Config values, as KEY=VALUE.
        out: Folder to write, if any.
    """
    from stratbench.extensions.plan.__main__ import main as make_plan

    result_set = read_set_or_fail(text)
    if result_set.config is None:
        raise CommandError(
            f"{text} has no config to plan; name a bundle, or run `stratbench plan` in the study's folder"
        )
    config = apply_config_pairs(result_set.config, pairs)
    check_no_foreign_code(text, config)
    folder = out or Path(f"{result_set.study}.plan")
    claim_folder(folder)
    with tempfile.TemporaryDirectory(prefix="stratbench-plan-") as results:
        extract_bundle(Path(text).expanduser(), Path(results, result_set.study))
        config |= {"results": results, "code": [], "data": {}}
        return make_plan(["--config", json.dumps(config), "--out", str(folder)])


def get_experiments(config: Mapping[str, Any], study: str) -> dict[str, dict[str, Any]]:
    """Return the experiments in a set's unchecked config.

    The result is an empty dict if the config has none.
    """
    try:
        experiments = config["studies"][study]["experiments"]
        return {name: dict(block) for name, block in experiments.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def check_no_foreign_code(text: str, config: Mapping[str, Any]) -> None:
    """Raise CommandError if a plan would run code or read data that the bundle names."""
    # Values of other types are skipped here, because the validation of the config rejects them later.
    models, datasets, studies = (
        value if isinstance(value := config.get(key), dict) else {}
        for key in ("models", "datasets", "studies")
    )
    own = [f"models.{name}" for name in models]
    own += [
        f"datasets.{name}"
        for name, spec in datasets.items()
        if isinstance(spec, dict) and is_own_data_set(spec)
    ]
    for name in studies:
        for block in get_experiments(config, name).values():
            if block.get("task") not in (None, *TASKS):
                own.append(f"the task {block['task']}")
    if own:
        raise CommandError(
            f"{text} names code or data of its own ({own[0]}), which is never run from a bundle; run "
            "`stratbench plan` in the folder of its config.yaml"
        )

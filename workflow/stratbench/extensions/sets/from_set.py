"""Runs the commands `check`, `decide`, `compare`, `export` and `plan` on result sets."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.decision.decide import (
    make_decisions,
    read_evidence,
    write_and_describe_decisions,
)
from stratbench.cell.text.words import replace_control_characters, wrap_lines
from stratbench.command import CommandError, ExitCode
from stratbench.command.subcommands import apply_config_changes
from stratbench.extensions.sets.archive import SetError, extract_bundle
from stratbench.extensions.sets.check import INVALID, choose_check_exit_code, describe_result_set
from stratbench.extensions.sets.export import export_set
from stratbench.extensions.sets.folders import mark_folder_and_return_old_text
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


def read_set_or_fail(source: str) -> ResultSet:
    """Return the result set that a source names: a bundle, a folder or `paper:v1`.

    Raises:
        CommandError: The set cannot be read.
    """
    try:
        return read_set(source)
    except SetError as error:
        raise CommandError(str(error)) from None


def check_set_source(source: str) -> ExitCode:
    """Check a result set, print its content and audit findings, and return the exit code.

    Args:
        source: A bundle, a folder or `paper:v1`.

    Returns:
        1 if the audit calls values unusable, 2 if the set is invalid, else 0.
    """
    try:
        result_set = read_set(source)
    except SetError as error:
        print(f"stratbench check: {error}")
        return INVALID
    print(replace_control_characters(wrap_lines(describe_result_set(result_set))))
    return choose_check_exit_code(result_set)


def decide_from_set(source: str, config_pairs: Sequence[str], out: Path | None) -> ExitCode:
    """Decide from a result set, print and write the decisions, and return the exit code.

    Args:
        source: A bundle, a folder or `paper:v1`.
        config_pairs: Values of the config, as KEY=VALUE.
        out: Folder to write to; by default STUDY.decision.
    """
    result_set = read_set_or_fail(source)
    folder = out or Path(f"{result_set.study}.decision")
    config = apply_config_changes(result_set.config or {}, config_pairs)
    try:
        blocks = {
            key: check_config_block(key, config.get(key, {})) for key in ("decide", "cluster")
        }
        check_extension_keys("decide", blocks["decide"], blocks)
    except ConfigError as error:
        raise CommandError(str(error)) from None
    mark_folder_and_return_old_text(folder)
    written = [folder / name for name in ("decision.csv", "answers.json")]
    try:
        constraints = Constraints(**collect_constraints(blocks))
        evidence = read_evidence((), constraints)
        tables = (result_set.cells, result_set.findings)
        made = make_decisions(*tables, constraints, list(evidence.values()))
        answers = write_and_describe_decisions(made, tables[1], constraints, *written, evidence)
    # A ConfigError is a ValueError, too.
    except ValueError as error:
        raise CommandError(str(error)) from None
    print(replace_control_characters(answers))
    print(f"Written: {', '.join(map(str, written))}")
    return 0


def compare_set_sources(
    named_sources: Sequence[str], config_pairs: Sequence[str], out: Path | None
) -> ExitCode:
    """Compare result sets with the first one, write the page, and return the exit code.

    The exit code is 1 if a set is slower by more than `compare.fail_above`.

    Args:
        named_sources: The sets, each as NAME=SET.
        config_pairs: Values of the config, as KEY=VALUE.
        out: Folder to write to; by default `compare`.
    """
    from stratbench.extensions.sets.comparing.compare import compare_sets_with_first

    config = apply_config_changes({}, config_pairs)
    named = dict(named_source.partition("=")[::2] for named_source in named_sources)
    if "" in named.values() or len(named) < len(named_sources):
        raise CommandError(
            "each set needs its own name; write NAME=SET, such as old=old.stratbench.zip new=results/demo"
        )
    try:
        keys = ("compare", "decide", "cluster")
        blocks = {key: check_config_block(key, config.get(key, {})) for key in keys}
        blocks["sets"] = check_config_block("sets", named)
        check_extension_keys("top", blocks, blocks)
        return compare_sets_with_first(
            list_existing_sets(blocks),
            out or Path("compare"),
            blocks["compare"]["fail_above"],
            blocks["compare"]["prices"],
            Constraints(**collect_constraints(blocks)),
        )
    except (SetError, ConfigError) as error:
        raise CommandError(str(error)) from None


def export_set_source(source: str, formats: Sequence[str], out: Path | None) -> ExitCode:
    """Write a result set in formats of other tools, and return the exit code.

    Args:
        source: A bundle or a folder.
        formats: Names of the formats.
        out: Folder to write to; by default STUDY.export.
    """
    result_set = read_set_or_fail(source)
    try:
        folders = export_set(result_set, formats, out or Path(f"{result_set.study}.export"))
    except SetError as error:
        raise CommandError(str(error)) from None
    print("Written:", *folders, sep="\n  ")
    return 0


def plan_from_bundle(source: str, config_pairs: Sequence[str], out: Path | None) -> ExitCode:
    """Plan a bundle's study from its config and records, and return the exit code.

    Args:
        source: The bundle.
        config_pairs: Values of the config, as KEY=VALUE.
        out: Folder to write to; by default STUDY.plan.
    """
    from stratbench.extensions.plan.__main__ import main as make_plan

    result_set = read_set_or_fail(source)
    if result_set.config is None:
        raise CommandError(
            f"{source} has no config to plan; name a bundle, or run `stratbench plan` in the study's folder"
        )
    config = apply_config_changes(result_set.config, config_pairs)
    check_plan_runs_no_bundle_code(source, config)
    folder = out or Path(f"{result_set.study}.plan")
    mark_folder_and_return_old_text(folder)
    with tempfile.TemporaryDirectory(prefix="stratbench-plan-") as results:
        extract_bundle(Path(source).expanduser(), Path(results, result_set.study))
        config |= {"results": results, "code": [], "data": {}}
        return make_plan(["--config", json.dumps(config), "--out", str(folder)])


def get_unchecked_experiments(config: Mapping[str, Any], study: str) -> dict[str, dict[str, Any]]:
    """Return a study's experiments, by name, from a config that may be invalid.

    If they cannot be read, the result is empty.
    """
    try:
        experiments = config["studies"][study]["experiments"]
        return {name: dict(block) for name, block in experiments.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def check_plan_runs_no_bundle_code(source: str, config: Mapping[str, Any]) -> None:
    """Raise CommandError if a plan would use code or data of the bundle's author."""
    # A value of a wrong type is ignored here: the validation of the config rejects it afterwards.
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
        for block in get_unchecked_experiments(config, name).values():
            if block.get("task") not in (None, *TASKS):
                own.append(f"the task {block['task']}")
    if own:
        raise CommandError(
            f"{source} uses code or data of its author ({own[0]}), and code from a bundle is never run; run "
            "`stratbench plan` in the folder of its config.yaml"
        )

"""Filters the combinations of an experiment, and writes a study that measures the rest.

`snakemake tune` calls this as python -m stratbench.extensions.tune --config JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from stratbench.cell.files import write_text_atomically
from stratbench.cell.installation import ROOT
from stratbench.cell.text.words import format_bytes, format_count, format_seconds, wrap_lines
from stratbench.extensions.plan.pages.table import write_csv_rows
from stratbench.extensions.tune.answer import describe_answer, read_tune_answer
from stratbench.extensions.tune.differences import describe_margins, fit_public_margins
from stratbench.extensions.tune.page import render_answer_page
from stratbench.extensions.tune.paths import TUNING_CONFIG_PATH
from stratbench.extensions.tune.sieves import (
    LATER,
    MEASURED,
    OUT_OF_MEMORY,
    TOO_LARGE,
    TOO_SLOW,
    UNSUPPORTED,
    FilterResult,
    add_tuning_study,
    filter_combinations,
    make_tuning_study_name,
    read_out_of_memory_combinations,
)
from stratbench.extensions.tune.space import Combination, list_combinations
from stratbench.strategies import REGISTRY
from stratbench.study.config.config import load_config
from stratbench.study.config.messages import ConfigError, format_wrong_value_message
from stratbench.study.job_environment import set_job_environment


def main(argv: Sequence[str] | None = None) -> int:
    """Filter the combinations, print the result and, after measurements, the answer. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.extensions.tune", description=__doc__
    )
    parser.add_argument("--config", required=True, help="the study's whole config, as JSON")
    args = parser.parse_args(argv)
    try:
        config = json.loads(args.config)
        whole, _ = load_config(config)
        set_job_environment(whole, str(ROOT / "workflow"))
        question = choose_tuning_task(whole)
        combinations = list_combinations(question["values"], question["gpus"], whole["tune"])
        if not combinations:
            raise ConfigError(
                "config: tune: no strategy is left after `include` and `exclude`; add a strategy to "
                "`include`, or remove one from `exclude`"
            )
        where = (question["experiment"], question["gpus"], question["model"])
        failed = read_out_of_memory_combinations(
            whole["results"], make_tuning_study_name(whole["study"])
        )
        sieved = filter_combinations(
            config, *where, combinations, whole["tune"]["baseline"], failed
        )
    except ConfigError as error:
        print(wrap_lines([f"error: {error}"]), file=sys.stderr)
        return 1
    tuned = Path(whole["results"], whole["study"], *TUNING_CONFIG_PATH)
    table = tuned.with_name("tune.csv")
    write_combinations_csv(sieved, table)
    experiment, gpus, model = where
    what = f"Model {model} of the experiment {experiment} on {format_count(gpus, 'worker')}:"
    print(wrap_lines([what, *describe_filter_results(sieved)]))
    chosen = [s.combination for s in sieved if s.outcome in (MEASURED, OUT_OF_MEMORY)]
    if not chosen:
        print(f"No combination is left to measure: {table} has the reason for each.")
        return 1
    write_tuning_config(config, *where, chosen, tuned, whole["tune"]["budget_gpu_hours"])
    print(f"Written: {table}, {tuned}")
    study, baseline = make_tuning_study_name(whole["study"]), whole["tune"]["baseline"]
    answer = read_tune_answer(Path(whole["results"]), study, sieved, baseline)
    if answer is not None:
        path = tuned.with_name("index.html")
        write_text_atomically(path, render_answer_page(answer, sieved, question["model"]))
        print(wrap_lines(["", *describe_answer(answer), f"{path} shows all results."]))
    return 0


def choose_tuning_task(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to tune: the experiment, its values, the model and the number of workers.

    Raises:
        ConfigError: The study has no such experiment, or the experiment has no such model.
    """
    tune, experiments = config["tune"], config["studies"][config["study"]]["experiments"]
    for key in ("include", "exclude", "baseline"):
        for name in [tune[key]] if key == "baseline" else tune[key]:
            if name not in REGISTRY:
                raise ConfigError(
                    format_wrong_value_message(f"tune.{key}", name, "is not a strategy", REGISTRY)
                )
    name = tune["experiment"] or next(iter(experiments))
    if name not in experiments:
        what = f"is not an experiment of {config['study']}"
        raise ConfigError(format_wrong_value_message("tune.experiment", name, what, experiments))
    values = experiments[name]
    model = tune["model"] or values["models"][0]
    if model not in values["models"]:
        what = f"is not a model of {name}"
        raise ConfigError(format_wrong_value_message("tune.model", model, what, values["models"]))
    gpus = tune["gpus"] or max(values["gpus"])
    return {"experiment": name, "values": values, "model": model, "gpus": gpus}


def describe_filter_results(filter_results: Sequence[FilterResult]) -> list[str]:
    """Return lines with the number of combinations per outcome, and the combinations to measure.

    The combination with the shortest planned time comes first.
    """
    fates = Counter(s.outcome for s in filter_results)
    texts = [f"{fates[UNSUPPORTED]} unsupported", f"{fates[TOO_LARGE]} do not fit"]
    texts.append(f"{fates[TOO_SLOW]} too slow to be among the fastest")
    texts += [f"{fates[fate]} {fate}" for fate in (LATER, OUT_OF_MEMORY) if fates[fate]]
    texts.append(f"{fates[MEASURED]} to measure")
    lines = [f"{format_count(len(filter_results), 'combination')}: {', '.join(texts)}.", ""]
    left = [s for s in filter_results if s.outcome == MEASURED]
    for each in sorted(
        left, key=lambda s: s.planned_time_s if s.planned_time_s is not None else float("inf")
    ):
        time = (
            format_seconds(each.planned_time_s)
            if each.planned_time_s is not None
            else "time not planned"
        )
        memory = (
            format_bytes(each.planned_memory_bytes)
            if each.planned_memory_bytes is not None
            else "memory not planned"
        )
        lines.append(f"  {each.combination.name}: {time}, {memory} per worker; {each.reason}")
    if any(s.amounts_by_difference_kind is not None for s in filter_results):
        lines += [
            "",
            "A combination is dropped if its planned time, divided by that of a faster one, exceeds this "
            "factor for the property in which the two differ:",
        ]
        lines += describe_margins(fit_public_margins())
    reasons = Counter(s.reason for s in filter_results if s.outcome == UNSUPPORTED)
    lines += ["", *(f"Unsupported ({n}): {reason}" for reason, n in reasons.most_common())]
    return lines


def write_combinations_csv(filter_results: Sequence[FilterResult], path: Path) -> None:
    """Write tune.csv: the outcome and the planned values of each combination."""
    rows = [
        {
            "variant": s.combination.name,
            "strategy": s.combination.strategy,
            "options": json.dumps(s.combination.options, sort_keys=True),
            "settings": json.dumps(s.combination.settings, sort_keys=True),
            "fate": s.outcome,
            "reason": s.reason,
            "planned_s": s.planned_time_s,
            "planned_bytes": s.planned_memory_bytes,
        }
        for s in filter_results
    ]
    write_csv_rows(rows, path)


def write_tuning_config(
    config: Mapping[str, Any],
    experiment: str,
    gpus: int,
    model: str,
    combinations: Sequence[Combination],
    path: Path,
    budget_gpu_hours: float | None,
) -> None:
    """Write a config file with the study that measures the remaining combinations.

    Snakemake reads this file in addition to config.yaml.

    Args:
        config: The config as read from YAML.
        experiment: Name of the experiment to tune.
        gpus: Number of workers.
        model: Name of the model.
        combinations: The combinations to measure.
        path: File to write.
        budget_gpu_hours: Limit of GPU-hours, or None without limit.
    """
    made = add_tuning_study(config, experiment, gpus, model, combinations)
    name = make_tuning_study_name(config["study"])
    alone = {"study": name, "studies": {name: made["studies"][name]}}
    if budget_gpu_hours is not None:
        alone["verdict"] = {"budget_gpu_hours": budget_gpu_hours}
    write_text_atomically(path, yaml.safe_dump(alone, sort_keys=False))


if __name__ == "__main__":
    sys.exit(main())

"""Plans a study: writes plan.csv, plan.html and plan.json, and prints a summary.

`snakemake plan` calls `python -m stratbench.extensions.plan --config JSON`. `--check` is for `snakemake
check`. `--model NAME` plans a single model, and `--gpus N` prints a table of what fits on N GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.extensions import iter_imported_additions
from stratbench.cell.installation import ROOT
from stratbench.cell.text.words import format_count, wrap_lines
from stratbench.extensions.plan.check import check_study
from stratbench.extensions.plan.device_rates import list_configured_gpus
from stratbench.extensions.plan.duration import ProjectedDuration
from stratbench.extensions.plan.one_model.model_answer import Answer, answer_model_question
from stratbench.extensions.plan.one_model.one_network import make_model_study
from stratbench.extensions.plan.pages import table
from stratbench.extensions.plan.pages.check_text import format_check_result
from stratbench.extensions.plan.pages.model_answer import (
    format_first_traced_strategy,
    format_model_answer,
)
from stratbench.extensions.plan.pages.text import (
    format_plan,
    format_single_model_plan,
    write_plan_html,
)
from stratbench.extensions.plan.schedule import (
    Records,
    make_plan,
    read_records_by_cell,
    select_timed_records,
)
from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import ConfigError
from stratbench.study.job_environment import set_job_environment
from stratbench.study.model_question import add_question_options, read_question
from stratbench.study.resources import build_job_request
from stratbench.study.slurm.nodes import (
    describe_mixed_gpu_types,
    read_cluster_nodes,
    select_partition_nodes,
)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        config = json.loads(args.config)
        if args.gpus is not None:
            print_model_answer(config, args)
            return 0
        if args.model is None:
            config, study = load_config(config)
        else:
            config, study, left_out = make_model_study(config, args.model, args.dataset)
            print("".join(f"left out: {reason}\n" for reason in left_out), end="", flush=True)
        cluster = config["cluster"]
        # An unknown GPU raises here, before the check of all models, which takes minutes.
        list_configured_gpus(cluster)
        set_job_environment(config, str(ROOT / "workflow"))
        checked = check_study(
            config, study, tries_both_resharding=not args.check and not args.model
        )
        if args.check:
            print(wrap_lines([format_check_result(checked)]))
            nodes = select_partition_nodes(read_cluster_nodes(), args.partition)
            requests = (
                build_job_request(s.cell, s.settings, cluster, None) for s in checked.cells_to_plan
            )
            if mixed := describe_mixed_gpu_types(nodes, requests):
                print(wrap_lines([mixed]))
            return 1 if checked.refusal_reasons_by_cell else 0
        if refused := checked.refusal_reasons_by_cell:
            text = f"{len(refused)} of {format_count(len(checked.cells_to_plan), 'cell')} cannot be trained"
            more = "" if args.model else ", and `check`"
            print(f"{text}: see below{more}", flush=True)
        records = read_records_by_cell(study, config["results"])
        timed = select_timed_records(records, cluster["gpu"])
        projected = get_projected_durations_by_cell(config, study, timed)
        plan = make_plan(config, checked, records, args.partition, projected)
    except ConfigError as error:
        print(wrap_lines([f"error: {error}"]), file=sys.stderr)
        return 1
    out = args.out or Path(config["results"]) / study.name
    table.write_plan_csv(plan, out / "plan.csv")
    table.write_plan_json(plan, out / "plan.json")
    write_plan_html(plan, out / "plan.html")
    print(format_plan(plan) if args.model is None else f"{format_single_model_plan(plan)}\n")
    print(f"Written: {out / 'plan.csv'}, {out / 'plan.html'}")
    return 0


def print_model_answer(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Print which strategies fit a model on `args.gpus` GPUs.

    The first result is printed early, to stderr.
    """

    def print_first_traced_strategy(first_answer: Answer) -> None:
        print(format_first_traced_strategy(first_answer), file=sys.stderr, flush=True)

    print(
        format_model_answer(
            answer_model_question(config, read_question(args), print_first_traced_strategy)
        )
    )


def get_projected_durations_by_cell(
    config: dict[str, Any], study: Study, records: Records
) -> dict[Cell, ProjectedDuration]:
    """Return the durations of trainings that extensions project from records.

    Raises:
        ConfigError: If an extension cannot use one of its files.
    """
    projected: dict[Cell, ProjectedDuration] = {}
    try:
        for _, addition in iter_imported_additions("plan_additions"):
            if addition.durations is not None:
                projected |= addition.durations(config, study, records)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return projected


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.extensions.plan",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="the whole config as JSON text")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only check the models; the exit code is 1 if a cell cannot be trained",
    )
    parser.add_argument(
        "--out", type=Path, help="folder to write the plan to; default: results/<study>"
    )
    parser.add_argument("--model", help="plan this model alone, without a study")
    parser.add_argument(
        "--dataset",
        help="data set to train on; default: data with the shape of ImageNet's images or GPT-2's texts",
    )
    add_question_options(parser)
    parser.add_argument(
        "--partition", default="*", help="SLURM partition in which cells will run; default: any"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

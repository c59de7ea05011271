"""Defines `stratbench plan` and `stratbench check`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from stratbench.command import CommandError
from stratbench.command.in_folder import check_packages_installed
from stratbench.command.subcommands import (
    SubcommandAdder,
    apply_config_changes,
    check_no_unknown_arguments,
    print_rule_answer,
    print_rule_answer_with_torch,
)
from stratbench.study.model_question import add_question_options, format_question_options


def add_subcommands(add_subcommand: SubcommandAdder) -> None:
    """Add `plan` and `check` to the command line."""
    plan = add_subcommand("plan", run_plan_subcommand, "predict memory, time and cost of each cell")
    plan.add_argument(
        "--model",
        metavar="NAME",
        help="plan a single model without a study: a model of stratbench or torchvision, or one of `models` "
        "in this folder's config.yaml",
    )
    plan.add_argument(
        "--dataset",
        metavar="NAME",
        help="with --model: data set to train on; default: data of the shape of ImageNet or GPT-2's",
    )
    plan.add_argument(
        "--out",
        type=Path,
        help="folder for the plan of a single model or of a bundle; default: STUDY.plan",
    )
    add_question_options(plan)
    add_subcommand(
        "check",
        print_rule_answer_with_torch,
        "check whether each strategy of a study can train each model",
    )


def run_plan_subcommand(args: argparse.Namespace, unknown_args: list[str]) -> int:
    """Run `stratbench plan`, for a study or for a single model."""
    check_packages_installed("torch")
    if args.model is not None:
        return plan_single_model(args, unknown_args)
    check_no_single_model_options(args)
    if args.out is not None:
        raise CommandError(
            "--out: needs --model; the plan of a study is written to the folder `results` of its config"
        )
    return print_rule_answer(args, unknown_args)


def check_no_single_model_options(args: argparse.Namespace) -> None:
    """Raise CommandError for an option that applies to a single model only."""
    if args.dataset is not None:
        raise CommandError("--dataset: applies to a single model; add --model NAME")
    for option in format_question_options(args):
        raise CommandError(f"{option}: needs --model NAME and --gpus N; add them")


def plan_single_model(args: argparse.Namespace, unknown_args: list[str]) -> int:
    """Run `stratbench plan --model NAME`, with the config of this folder if there is one."""
    import yaml

    from stratbench.extensions.plan.__main__ import main as make_plan
    from stratbench.study.config.messages import ConfigError
    from stratbench.study.config.yaml_traps import check_duplicate_yaml_keys, check_yaml_syntax

    check_no_unknown_arguments([*unknown_args, *(["--study"] if args.study else [])])
    path = Path("config.yaml")
    config: dict[str, Any] = {}
    if path.is_file():
        try:
            check_yaml_syntax(path)
            check_duplicate_yaml_keys(path)
        except ConfigError as error:
            raise CommandError(str(error)) from None
        config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    arguments = [
        "--config",
        json.dumps(apply_config_changes(config, args.config)),
        "--model",
        args.model,
    ]
    arguments += ["--dataset", args.dataset] if args.dataset else []
    arguments += ["--out", str(args.out)] if args.out else []
    options = format_question_options(args)
    if options and "--gpus" not in options:
        option = next(iter(options))
        raise CommandError(f"{option}: needs --gpus N; add it")
    if options and args.out:
        raise CommandError("--out writes a page, and --gpus prints a table; remove one of them")
    arguments += [text for option in options.items() for text in option]
    return make_plan(arguments)

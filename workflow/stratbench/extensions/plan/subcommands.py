"""`stratbench plan` of a study, of a network alone, or of one on so many GPUs; and `stratbench check`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from stratbench.command import CommandError
from stratbench.command.in_folder import require
from stratbench.command.subcommands import (
    Adder,
    answer_by_rule,
    answer_with_torch,
    changed,
    refuse,
)
from stratbench.study.model_question import add_question, options_of


def add_subcommands(add: Adder) -> None:
    """Add `plan` and `check`."""
    plan = add("plan", run_plan, "what fits, how long it takes, what it costs")
    plan.add_argument(
        "--model",
        metavar="NAME",
        help="what fits for a network alone, without a study: one of ours or of torchvision's, or "
        "one of the `models` of this folder's config.yaml",
    )
    plan.add_argument(
        "--dataset",
        metavar="NAME",
        help="with --model: what it is trained on; default: data of ImageNet's or GPT-2's shape",
    )
    plan.add_argument(
        "--out",
        type=Path,
        help="of a network alone, or a bundle: the folder to write; default: STUDY.plan",
    )
    add_question(plan)
    add("check", answer_with_torch, "whether each strategy of a study can train each network")


def run_plan(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench plan`: the rule `plan`, or for a network alone its plan."""
    require("torch")
    if given.model is not None:
        return plan_model(given, others)
    refuse_question(given)
    if given.out is not None:
        raise CommandError(
            "--out is for --model; a study's plan is in the folder `results` of its config"
        )
    return answer_by_rule(given, others)


def refuse_question(given: argparse.Namespace) -> None:
    """Raise CommandError for an option that is for a network alone."""
    if given.dataset is not None:
        raise CommandError("--dataset is for --model")
    for option in options_of(given):
        raise CommandError(f"{option} is for --model NAME --gpus N")


def plan_model(given: argparse.Namespace, others: list[str]) -> int:
    """`stratbench plan --model NAME`: with the config of this folder, if there is one."""
    import yaml

    from stratbench.extensions.plan.__main__ import main as make_plan
    from stratbench.study.config.messages import ConfigError
    from stratbench.study.config.yaml_traps import check_duplicate_keys, check_syntax

    refuse([*others, *(["--study"] if given.study else [])])
    path = Path("config.yaml")
    config: dict[str, Any] = {}
    if path.is_file():
        try:
            check_syntax(path)
            check_duplicate_keys(path)
        except ConfigError as error:
            raise CommandError(str(error)) from None
        config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    arguments = ["--config", json.dumps(changed(config, given.config)), "--model", given.model]
    arguments += ["--dataset", given.dataset] if given.dataset else []
    arguments += ["--out", str(given.out)] if given.out else []
    options = options_of(given)
    if options and "--gpus" not in options:
        raise CommandError(f"{next(iter(options))} is for --model NAME --gpus N; add --gpus")
    if options and given.out:
        raise CommandError("--out is for a page, and --gpus prints a table; remove one of them")
    arguments += [text for option in options.items() for text in option]
    return make_plan(arguments)

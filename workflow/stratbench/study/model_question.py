"""Defines the question of `stratbench plan --model NAME --gpus N`, and its command-line options."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Question:
    """A question to the plan: which strategies can train a model on some GPUs.

    Attributes:
        model: Name of the model in `models` of the config, or a built-in or torchvision name.
        gpus: Number of GPUs.
        gpu: Product name of the GPUs, such as `H100 80GB`, or None for the config's.
        dataset: Name of the data set, or None for data of a usual size.
        sequence: Tokens per text sample, or None for that of the data set.
        tokens: Tokens of the whole training, or None for a usual number.
        samples: Images of the whole training, or None for a usual number.
        price: Price of a GPU per hour, or None for the config's, if any.
    """

    model: str
    gpus: int
    gpu: str | None = None
    dataset: str | None = None
    sequence: int | None = None
    tokens: float | None = None
    samples: float | None = None
    price: float | None = None


def add_question_options(parser: argparse.ArgumentParser) -> None:
    """Add a question's command-line options, except those for model and data set."""
    add = parser.add_argument
    add(
        "--gpus",
        type=_count,
        metavar="N",
        help="with --model: print a table of the strategies that fit on N GPUs",
    )
    add(
        "--gpu",
        metavar="GPU",
        help="with --gpus: name of the GPUs, such as 'H100 80GB'; default: cluster.gpu",
    )
    add("--sequence", type=_count, metavar="T", help="with --gpus: tokens per sample of text")
    add("--tokens", type=_amount, metavar="X", help="with --gpus: tokens to train on; default: 1e9")
    add(
        "--samples", type=_amount, metavar="X", help="with --gpus: images to train on; default: 1e6"
    )
    add("--price", type=_amount, metavar="X", help="with --gpus: price of a GPU per hour")


def format_question_options(args: argparse.Namespace) -> dict[str, str]:
    """Return the set options of a question as texts, except model and data set."""
    names = [f.name for f in fields(Question) if f.name not in ("model", "dataset")]
    return {f"--{n}": str(v) for n in names if (v := getattr(args, n)) is not None}


def read_question(args: argparse.Namespace) -> Question:
    """Return the question that parsed command-line arguments ask."""
    return Question(**{f.name: getattr(args, f.name) for f in fields(Question)})


def _make_positive_parser(
    convert: Callable[[str], float], kind_of_number: str
) -> Callable[[str], float]:
    def parse_positive_number(text: str) -> float:
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: is not a {kind_of_number} above 0; give one")
        return value

    return parse_positive_number


_count, _amount = _make_positive_parser(int, "whole number"), _make_positive_parser(float, "number")

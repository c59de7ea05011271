"""The sets of a config that `stratbench compare` compares, and the checks on them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stratbench.cell.settings import Keys, setting
from stratbench.cell.text.words import repr_of
from stratbench.study.config.messages import ConfigError, wrong_value_message

#: The prefix of a version of the paper's tables, and the versions.
PAPER, VERSIONS = "paper:", ("v1", "v2")
#: The pages of a comparison; next to them each set has a folder with its name.
PAGES = INDEX, EXPLORE = "index.html", "explore.html"
_EXAMPLE = "--config 'sets={old: old.stratbench.zip, new: results/demo}'"


@dataclass(frozen=True, kw_only=True)
class Sets(Keys):
    """The keys of the top level."""

    # fmt: off
    sets: dict[str, str] = setting({}, propertyNames={"$ref": "#/$defs/name"},
        additionalProperties={"type": "string", "minLength": 1, "maxLength": 1000},
        help="Result sets that `stratbench compare` puts side by side, by the names that the page gives "
        "them: each a bundle (`<study>.stratbench.zip`), a folder `results/<study>`, or the paper's tables "
        "(`paper:v1`, `paper:v2`). Ratios are against the first.")
    export: list[str] = setting(["parquet"], minItems=1, uniqueItems=True,
        items={"enum": ["parquet", "mlflow", "tensorboard", "wandb"]},
        help="The formats that `stratbench export` writes below `results/<study>/export`: Parquet tables, "
        "MLflow's SQLite store, events for TensorBoard, offline runs for Weights & Biases. Their packages: "
        "envs/requirements-export.txt.")
    # fmt: on

    @classmethod
    def faults(cls, block: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
        """Yield why sets cannot be compared, and which prices do not match them."""

        def wrong(*of: Any) -> str:
            return wrong_value_message(*of).removeprefix("config: ")

        sets, prices = block["sets"], config["compare"]["prices"]
        if len(sets) == 1:
            yield f"sets = {repr_of(dict(sets))}: has one set; name two or more, as {_EXAMPLE}"
        places: dict[str, str] = {}
        for name, text in sets.items():
            if name.lower() in PAGES:
                yield f"sets.{name}: is the name of a page of the comparison; give the set another"
            is_paper = text.startswith(PAPER)
            place = text if is_paper else os.path.realpath(os.path.expanduser(text))
            if place in places:
                yield f"sets.{name} = {repr_of(text)}: is the same as sets.{places[place]}; keep one"
            places[place] = name
            if is_paper and text.removeprefix(PAPER) not in VERSIONS:
                known = [PAPER + version for version in VERSIONS]
                yield wrong(f"sets.{name}", text, "is no version of the paper", known)
        for name in prices if sets else ():
            if name not in sets:
                yield wrong("compare.prices", name, "is not the name of a set", sets)
        unpriced = [name for name in sets if name not in prices]
        if prices and unpriced and prices.keys() <= sets.keys():
            yield f"compare.prices: has no price for {unpriced[0]}; give one for each set, or none"


@dataclass(frozen=True, kw_only=True)
class Compare(Keys):
    """How `stratbench compare` judges the sets."""

    # fmt: off
    fail_above: float | None = setting(None, minimum=0, maximum=1,
        help="Share by which a strategy may be slower than in the first set; beyond it, and beyond noise, "
        "`stratbench compare` fails. 0.05 is 5 %. null: it does not judge.")
    prices: dict[str, float] = setting({}, additionalProperties={"type": "number", "exclusiveMinimum": 0},
        help="Price of a GPU for an hour in each set, by its name: the decision over all sets is then by "
        "cost.")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class Bundle(Keys):
    """What `stratbench bundle` writes."""

    # fmt: off
    hosts: Literal["named", "replaced"] = setting("named",
        help="replaced: names of hosts become node1, node2, ..., and names of users and their folders go, "
        "everywhere in the bundle.")
    # fmt: on


def existing_sets(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sets by name, for a comparison that is about to run.

    Raises:
        ConfigError: If one does not exist.
    """
    sets = dict(config["sets"])
    if not sets:
        raise ConfigError(f"config: sets: is not given; name two or more, as {_EXAMPLE}")
    for name, text in sets.items():
        if not text.startswith(PAPER) and not os.path.exists(os.path.expanduser(text)):
            raise ConfigError(
                f"config: sets.{name} = {repr_of(text)}: there is no such file or folder; give a bundle, "
                f"a folder results/<study>, or {PAPER}{VERSIONS[0]}"
            )
    return sets

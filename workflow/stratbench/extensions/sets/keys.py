"""Keys of config.yaml to compare, export and bundle result sets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stratbench.cell.settings import Keys, setting
from stratbench.cell.text.words import format_wrong_value
from stratbench.study.config.messages import ConfigError, format_wrong_value_message

#: The set `paper:v1` is the tables of version v1 of the paper. PAPER is the prefix, VERSIONS the versions.
PAPER, VERSIONS = "paper:", ("v1", "v2")
#: File names of a comparison's pages. No set may have such a name, because the comparison writes a folder
#: with the name of each set next to the pages.
PAGES = INDEX, EXPLORE = "index.html", "explore.html"
_EXAMPLE = "--config 'sets={old: old.stratbench.zip, new: results/demo}'"


@dataclass(frozen=True, kw_only=True)
class Sets(Keys):
    """Top-level keys of config.yaml: result sets to compare, and formats to export."""

    # fmt: off
    sets: dict[str, str] = setting({}, propertyNames={"$ref": "#/$defs/name"},
        additionalProperties={"type": "string", "minLength": 1, "maxLength": 1000},
        help="Result sets that `stratbench compare` compares, by the names that the page shows. Each is a "
        "bundle (`<study>.stratbench.zip`), a folder `results/<study>`, or the paper's tables (`paper:v1`, "
        "`paper:v2`). Ratios are relative to the first set.")
    export: list[str] = setting(["parquet"], minItems=1, uniqueItems=True,
        items={"enum": ["parquet", "mlflow", "tensorboard", "wandb"]},
        help="Formats that `stratbench export` writes below `results/<study>/export`: Parquet tables, "
        "MLflow's SQLite store, event files for TensorBoard, offline runs for Weights & Biases. Install "
        "their packages from envs/requirements-export.txt.")
    # fmt: on

    @classmethod
    def iter_contradictions(
        cls, block: Mapping[str, Any], config: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield a message per invalid set. Yield messages on prices that do not match the sets."""

        def make_wrong_value_message(*arguments: Any) -> str:
            return format_wrong_value_message(*arguments).removeprefix("config: ")

        sets, prices = block["sets"], config["compare"]["prices"]
        if len(sets) == 1:
            given = format_wrong_value(dict(sets))
            yield f"sets = {given}: has a single set; name two or more, as in {_EXAMPLE}"
        places: dict[str, str] = {}
        for name, text in sets.items():
            if name.lower() in PAGES:
                yield f"sets.{name}: is the name of a page of the comparison; give the set another name"
            is_paper = text.startswith(PAPER)
            place = text if is_paper else os.path.realpath(os.path.expanduser(text))
            if place in places:
                yield (
                    f"sets.{name} = {format_wrong_value(text)}: is the same set as sets.{places[place]}; "
                    "keep one of them"
                )
            places[place] = name
            if is_paper and text.removeprefix(PAPER) not in VERSIONS:
                known = [PAPER + version for version in VERSIONS]
                yield make_wrong_value_message(
                    f"sets.{name}", text, "is no version of the paper", known
                )
        for name in prices if sets else ():
            if name not in sets:
                yield make_wrong_value_message(
                    "compare.prices", name, "is not the name of a set", sets
                )
        unpriced = [name for name in sets if name not in prices]
        if prices and unpriced and prices.keys() <= sets.keys():
            yield f"compare.prices: has no price for {unpriced[0]}; give a price for each set, or for none"


@dataclass(frozen=True, kw_only=True)
class Compare(Keys):
    """Keys of `stratbench compare`: when it fails, and the price of a GPU-hour in each set."""

    # fmt: off
    fail_above: float | None = setting(None, minimum=0, maximum=1,
        help="Share by which a strategy may be slower than in the first set (0.05 is 5 %). `stratbench "
        "compare` fails if one is slower by more, and by more than noise. null: it never fails.")
    prices: dict[str, float] = setting({}, additionalProperties={"type": "number", "exclusiveMinimum": 0},
        help="Price per GPU-hour in each set, by name of the set. With prices, the decision over all sets is "
        "by cost.")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class Bundle(Keys):
    """Keys of `stratbench bundle`: whether the names of hosts and users are replaced."""

    # fmt: off
    hosts: Literal["named", "replaced"] = setting("named",
        help="named: a bundle has the names of hosts. replaced: everywhere in the bundle, names of hosts "
        "become node1, node2, ..., and names of users and of their folders are removed.")
    # fmt: on


def list_existing_sets(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the source of each set in the config, by name of the set.

    Raises:
        ConfigError: The config has no sets, or the file or folder of a set does not exist.
    """
    sets = dict(config["sets"])
    if not sets:
        raise ConfigError(f"config: sets: is missing; name two or more sets, as in {_EXAMPLE}")
    for name, text in sets.items():
        if not text.startswith(PAPER) and not os.path.exists(os.path.expanduser(text)):
            raise ConfigError(
                f"config: sets.{name} = {format_wrong_value(text)}: there is no such file or folder; give "
                f"a bundle, a folder results/<study>, or {PAPER}{VERSIONS[0]}"
            )
    return sets

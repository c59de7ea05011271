"""The sets of a config that `snakemake compare` puts side by side, and the checks on them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stratbench.cell.text.words import repr_of
from stratbench.study.config.messages import ConfigError, wrong_value_message

#: The prefix of a version of the paper's tables, and the versions.
PAPER, VERSIONS = "paper:", ("v1", "v2")
#: The pages of a comparison; beside them each set has a folder with its name.
PAGES = INDEX, EXPLORE = "index.html", "explore.html"
_EXAMPLE = "--config 'sets={old: old.stratbench.zip, new: results/demo}'"


def check_sets(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for sets that cannot be compared, and for prices that do not fit them."""
    sets, prices = config["sets"], config["compare"]["prices"]
    if len(sets) == 1:
        raise ConfigError(
            f"config: sets = {repr_of(dict(sets))}: has one set; name two or more, as {_EXAMPLE}"
        )
    places: dict[str, str] = {}
    for name, text in sets.items():
        if name.lower() in PAGES:
            raise ConfigError(
                f"config: sets.{name}: is the name of a page of the comparison; give the set another"
            )
        place = text if text.startswith(PAPER) else os.path.realpath(os.path.expanduser(text))
        if place in places:
            raise ConfigError(
                f"config: sets.{name} = {repr_of(text)}: is the same as sets.{places[place]}; keep one"
            )
        places[place] = name
        if text.startswith(PAPER) and text.removeprefix(PAPER) not in VERSIONS:
            raise ConfigError(
                wrong_value_message(
                    f"sets.{name}",
                    text,
                    "is no version of the paper",
                    [PAPER + v for v in VERSIONS],
                )
            )
    for name in prices if sets else ():
        if name not in sets:
            raise ConfigError(
                wrong_value_message("compare.prices", name, "is not the name of a set", sets)
            )
    unpriced = [name for name in sets if name not in prices]
    if prices and unpriced:
        raise ConfigError(
            f"config: compare.prices: has no price for {unpriced[0]}; give one for each set, or none"
        )


def existing_sets(config: Mapping[str, Any]) -> dict[str, str]:
    """The sets by name, for a comparison that is about to run; ConfigError if one does not exist."""
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

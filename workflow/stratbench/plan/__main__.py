"""Plans a study: writes plan.csv, plan.html and plan.json, and prints a summary.

python -m stratbench.plan --config JSON          as `snakemake plan` calls it
python -m stratbench.plan --config JSON --check  as `snakemake check` calls it
python -m stratbench.plan --configfile config.yaml --study paper --gpu "A10G 24GB"
python -m stratbench.plan --model resnet50       a network alone
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from stratbench.cell.coordinates import Cell
from stratbench.cell.installation import ROOT
from stratbench.cell.text.words import counted, folded
from stratbench.plan.check import check_study
from stratbench.plan.device_rates import named_gpus
from stratbench.plan.duration import Projected
from stratbench.plan.one_network import study_of
from stratbench.plan.pages import table
from stratbench.plan.pages.check_text import check_text
from stratbench.plan.pages.text import network_text, plan_text, write_html
from stratbench.plan.projection.study import projected_trainings
from stratbench.plan.schedule import Records, make_plan, records_by_cell, timed_records
from stratbench.study.config.config import Study, load_config
from stratbench.study.config.messages import ConfigError
from stratbench.study.config.yaml_traps import check_duplicate_keys
from stratbench.study.job_environment import set_job_environment


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        if args.model is None:
            config, study = load_config(read_config(args))
        else:
            config, study, left_out = study_of(read_config(args), args.model, args.dataset)
            print("".join(f"left out: {why}\n" for why in left_out), end="", flush=True)
        cluster = config["cluster"]
        named_gpus({**cluster, "gpu": args.gpu or cluster["gpu"]})  # before what takes minutes
        set_job_environment(config, str(ROOT / "workflow"))
        checked = check_study(config, study, resharding=not args.check and not args.model)
        if args.check:
            print(folded([check_text(checked)]))
            return 1 if checked.refused else 0
        if checked.refused:
            told = f"{len(checked.refused)} of {counted(len(checked.subjects), 'cell')} would be refused"
            print(f"{told}: see below, and `snakemake check`", flush=True)
        records = records_by_cell(study, config["results"])
        timed = timed_records(records, args.gpu or cluster["gpu"])
        projected = by_records(config, study, timed)
        plan = make_plan(config, checked, records, args.gpu, args.partition, projected)
    except ConfigError as error:
        print(folded([f"error: {error}"]), file=sys.stderr)
        return 1
    out = args.out or Path(config["results"]) / study.name
    table.write_csv(plan, out / "plan.csv")
    table.write_json(plan, out / "plan.json")
    write_html(plan, out / "plan.html")
    print(plan_text(plan) if args.model is None else f"{network_text(plan)}\n")
    print(f"Written: {out / 'plan.csv'}, {out / 'plan.html'}")
    return 0


def by_records(config: dict[str, Any], study: Study, records: Records) -> dict[Cell, Projected]:
    """The trainings that the records are projected to; ConfigError for measured links that are none."""
    try:
        return projected_trainings(config, study, records)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.plan",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--config", help="the whole config, as JSON")
    given.add_argument("--configfile", type=Path, help="the config as a YAML file")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only check the networks; exit code 1 where a cell would be refused",
    )
    parser.add_argument("--out", type=Path, help="folder of the plan; default: results/<study>")
    parser.add_argument("--model", help="plan this network alone, without a study")
    parser.add_argument("--dataset", help="what it is trained on; default: data of a usual shape")
    parser.add_argument("--study", help="the study, where it is not the config's")
    parser.add_argument("--gpu", help="the GPU to plan for, where it is not the config's")
    parser.add_argument(
        "--partition", default="*", help="SLURM's, where cells will run; default: any"
    )
    args = parser.parse_args(argv)
    if args.model is None and args.config is None and args.configfile is None:
        parser.error("give --config or --configfile, or --model")
    return args


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The config as given, not yet validated."""
    if args.config is not None:
        config = json.loads(args.config)
    elif args.configfile is None:
        return {}
    else:
        config = read_yaml(args.configfile)
    return config | ({"study": args.study} if args.study else {})


def read_yaml(path: Path) -> dict[str, Any]:
    """A config file, not yet validated; ConfigError for a key that is there twice."""
    import yaml

    check_duplicate_keys(path)
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


if __name__ == "__main__":
    sys.exit(main())

"""Commands of the Snakemake rules `bundle`, `compare` and `export`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from stratbench.analysis.decision.constraints import Constraints
from stratbench.analysis.records import collect
from stratbench.cell.files import format_os_error
from stratbench.cell.text.words import format_count
from stratbench.command import ExitCode
from stratbench.extensions.sets.archive import SetError
from stratbench.extensions.sets.bundle import write_bundle
from stratbench.extensions.sets.check import INVALID
from stratbench.extensions.sets.export import EXPORTS, export_set
from stratbench.extensions.sets.reading import read_set


def bundle_study(args: argparse.Namespace) -> ExitCode:
    """Write the results of a study to one file, a bundle."""
    path, manifest = write_bundle(args.study_dir, json.loads(args.config), args.hosts, args.out)
    records = sum(name.endswith("record.json") for name in manifest["files"])
    size = path.stat().st_size / 1024
    print(
        f"{path} ({format_count(records, 'record')}, {size:,.0f} KiB), sha256 {manifest['sha256']}"
    )
    if args.hosts == "named":
        print(
            "The bundle has the names of hosts; to replace them: --config 'bundle={hosts: replaced}'"
        )
    return 0


def export_named_set(args: argparse.Namespace) -> ExitCode:
    """Write a result set in the formats of other tools, such as MLflow."""
    result_set = read_set(args.set, expected=collect.read_expected_record_options(args))
    for folder in export_set(result_set, dict.fromkeys(args.to), args.out):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder} ({size / 2**20:.1f} MiB)")
    return 0


def compare_named_sets(args: argparse.Namespace) -> ExitCode:
    """Compare result sets with the first of them, and write a page.

    Return the exit code: 1 if a set is slower by more than the allowed share.
    """
    from stratbench.extensions.sets.comparing.compare import compare_sets_with_first

    constraints = Constraints.from_json(args.constraints)
    settings = json.loads(args.compare)
    return compare_sets_with_first(
        json.loads(args.sets),
        args.out,
        settings.get("fail_above"),
        settings.get("prices", {}),
        constraints,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code.

    If a set or a file cannot be used, the exit code is 2, and stderr has the reason.
    """
    parser = argparse.ArgumentParser(
        prog="python -m stratbench.extensions.sets", description=__doc__
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("bundle", help=bundle_study.__doc__)
    one.add_argument("--study-dir", type=Path, required=True, help="folder results/<study>")
    one.add_argument("--config", default="{}", help="the study's config with all defaults, as JSON")
    one.add_argument("--hosts", choices=["named", "replaced"], default="named")
    one.add_argument(
        "--out",
        type=Path,
        help="bundle to write; default: results/<study>/<study>.stratbench.zip",
    )
    one.set_defaults(run=bundle_study)
    one = commands.add_parser("compare", help=compare_named_sets.__doc__)
    one.add_argument(
        "--sets",
        required=True,
        help="JSON object with the name of each set and its bundle, its folder or paper:v1",
    )
    one.add_argument("--compare", default="{}", help="block `compare` of config.yaml, as JSON")
    one.add_argument("--constraints", default="{}", help="block `decide` of config.yaml, as JSON")
    one.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder in which to write a folder with the comparison",
    )
    one.set_defaults(run=compare_named_sets)
    one = commands.add_parser("export", help=export_named_set.__doc__)
    one.add_argument("set", help="result set to export: a bundle, or a folder results/<study>")
    one.add_argument("--to", nargs="+", choices=list(EXPORTS), default=["parquet"])
    one.add_argument(
        "--out", type=Path, required=True, help="folder in which to write a folder per format"
    )
    collect.add_expected_record_options(one)
    one.set_defaults(run=export_named_set)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except SetError as e:
        print(f"error: {e}", file=sys.stderr)
        return INVALID
    except OSError as e:
        print(f"error: {format_os_error(e)}", file=sys.stderr)
        return INVALID


if __name__ == "__main__":
    sys.exit(main())

# Finds the Python package. It lies beside these rules, and not beside the Snakefile that was started: that may
# be another workflow's, which uses this one as a module. Beside the rules of an installed wheel there is no
# package: Python finds it by itself.
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

RULES = workflow.current_basedir
if not RULES.is_local:
    raise WorkflowError(
        f"module: snakefile = {RULES.get_path_or_uri(secret_free=True)}: stratbench is more than its rules; "
        "clone its repository, and give the path of the clone's Snakefile"
    )
PACKAGE_ROOT = str(Path(RULES).parent)
if PACKAGE_ROOT not in sys.path:
    sys.path.insert(0, PACKAGE_ROOT)

from stratbench.study import snakemake_internals as internals
from stratbench.study.versions import describe_old_packages, list_required_packages

# Not in each job again: it costs 0.1 s.
if internals.is_planning_process(workflow) and (
    old := describe_old_packages(list_required_packages())
):
    raise WorkflowError("\n".join(old))

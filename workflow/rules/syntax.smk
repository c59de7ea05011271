# Says where config.yaml is not YAML, before Snakemake reads it, which does not say where.
from snakemake.exceptions import WorkflowError

from stratbench.study.config.messages import ConfigError
from stratbench.study.config.yaml_traps import check_syntax

try:
    check_syntax("config.yaml")
except ConfigError as error:
    raise WorkflowError(str(error)) from None

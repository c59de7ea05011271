# Says where config.yaml is not YAML, before Snakemake reads it, which does not say where. A job that was given
# the config of its run reads no config.yaml.
from snakemake.exceptions import WorkflowError

from stratbench.study.config.messages import ConfigError
from stratbench.study.config.yaml_traps import check_syntax
from stratbench.study.job_values import has_saved_config

IS_GIVEN_CONFIG = has_saved_config(workflow)
try:
    if not IS_GIVEN_CONFIG:
        check_syntax("config.yaml")
except ConfigError as error:
    raise WorkflowError(str(error)) from None

# Says where config.yaml is not YAML, before Snakemake reads it, which does not say where. A job that was given
# the config of its run reads no config.yaml.
from snakemake.exceptions import WorkflowError

from stratbench.study.config.messages import ConfigError
from stratbench.study.config.yaml_traps import check_yaml_syntax
from stratbench.study.job_values import is_job_with_saved_config

IS_GIVEN_CONFIG = is_job_with_saved_config(workflow)
try:
    if not IS_GIVEN_CONFIG:
        check_yaml_syntax("config.yaml")
except ConfigError as error:
    raise WorkflowError(str(error)) from None

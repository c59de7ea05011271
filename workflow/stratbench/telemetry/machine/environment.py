"""Selects the environment variables that records may contain, and detects secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping

_ENVIRONMENT = re.compile(
    r"(OMP|KMP|MKL|GOMP|OPENBLAS|GLOO|NCCL|CUDA|CUBLAS|CUDNN|TORCH|TORCHINDUCTOR|PYTORCH)_\w+"
    r"|NVIDIA_(VISIBLE_DEVICES|TF32_OVERRIDE)|MALLOC_\w+|LD_PRELOAD|PYTHONHASHSEED"
)
_SLURM = re.compile(
    r"SLURM_(CLUSTER_NAME|JOB_ID|JOB_PARTITION|JOB_NODELIST|JOB_NUM_NODES|JOB_GPUS|STEP_ID"
    r"|ARRAY_(JOB|TASK)_ID|NNODES|NODEID|NTASKS|PROCID|LOCALID|CPUS_PER_TASK|CPUS_ON_NODE"
    r"|CPU_BIND|GPUS\w*|MEM_PER_\w+|RESTART_COUNT)|SLURMD_NODENAME"
)
#: Parts of a variable's name that indicate a secret value. The names TOKENIZER and AUTHOR do not match.
_SECRET = re.compile(
    r"SECRET|TOKEN(?!I[SZ])|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|AUTH(?!OR(?!I))|(^|_)KEY|APIKEY",
    re.IGNORECASE,
)
#: Pattern of one word in a variable's name, such as `api` and `Key` in `apiKey`.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
#: Names, as words in lower case, of variables that are secret even if they contain only a number. A name such
#: as `n_tokens` does not match.
_SECRET_WORDS = re.compile(
    r"(.* )?(secrets?|token|passw(or)?ds?|passphrases?|credentials?|auth|authori[sz]ation|apikeys?"
    r"|(api|access|account|auth|private|secret|signing) keys?)"
)
#: Texts that certainly contain a secret: an address with a password or signature, `token=...`, or a key of a
#: provider such as GitHub.
_SURE_SECRET = re.compile(
    r"://[^/\s:@]+:[^/\s@]+@"
    r"|(?i:secret|token|passw(or)?d|credential|api_?key)\w*\s*[=:]"
    r"|(?i:\b[\w-]*signature=|[?&;]([\w.-]*[-_.])?(sig|key|auth)=)\S"
    r"|\b(gh[opsu]_|github_pat_|glpat-|hf_|sk-|xox[abp]-|AKIA|eyJ)[\w-]{12}"
)
#: Long mixtures of letters and digits, which may be keys. Paths, UUIDs, masks and lists of options do not
#: match.
_LONG_MIX = re.compile(
    r"(?<![\w/.+-])(?=[\w+]*[A-Z])(?=[\w+]*[a-z])(?=[\w+]*[0-9])[A-Za-z0-9+]{32,}={0,2}(?![\w/.-])"
    r"|(?<![\w/.-])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{32,}(?![\w/.-])"
)


def select_training_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may affect training, except for secrets."""
    return _select_without_secrets(environment, _ENVIRONMENT)


def select_slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return SLURM's environment variables that describe the job and the node, except for secrets."""
    return _select_without_secrets(environment, _SLURM)


def is_secret_name(name: str) -> bool:
    """Return whether a variable's name indicates a secret value, as `HF_TOKEN` does."""
    return _SECRET.search(name) is not None


def is_secret_number_name(name: str) -> bool:
    """Return whether a variable with this name is secret although its value is a number.

    A number named `api_key` is secret, but a number named `token_dim` is not.
    """
    return _SECRET_WORDS.fullmatch(" ".join(_WORDS.findall(name)).lower()) is not None


def contains_secret(text: str) -> bool:
    """Return whether a text certainly contains a secret, such as an address with a password.

    Others are `token=...` and a provider's key. A long mixture of letters and digits does not count, since
    hashes and revisions look the same.
    """
    return _SURE_SECRET.search(text) is not None


def _select_without_secrets(
    environment: Mapping[str, str], pattern: re.Pattern[str]
) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if pattern.fullmatch(name)
        and not is_secret_name(name)
        and not contains_secret(value)
        and not _LONG_MIX.search(value)
    }

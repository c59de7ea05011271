#!/bin/sh
# Puts stratbench with its exact requirements into /opt/stratbench: what both recipes of the image run.
#   install.sh FOLDER    a folder with the repository's files
# Of pip's settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) those of the environment count: PyTorch for
# another CUDA, or for none, comes from another index.
set -eu
apt-get update -q
# git: records name the revision of user code. A C++ compiler: torch.compile makes kernels with it.
DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends git g++
rm -rf /var/lib/apt/lists/*
# An environment of its own has a prefix of its own: no process of the host is taken for one of the image.
python3 -m venv /opt/stratbench
pip="/opt/stratbench/bin/pip --disable-pip-version-check"
$pip install --no-cache-dir -c "$1/envs/constraints.txt" -r "$1/envs/requirements.txt"
$pip install --no-cache-dir --no-deps "$1"
/opt/stratbench/bin/pip check
/opt/stratbench/bin/stratbench --version
/opt/stratbench/bin/python -c 'import torch; print("PyTorch", torch.__version__, "CUDA", torch.version.cuda)'

# make demo    sets itself up, runs the demo study on this machine, writes results/demo/report.html
# make test    sets itself up, runs all tests: about 20 minutes on 2 cores; make test-quick without the slow ones
# make lint    formatting and style     make docs    regenerates generated pages (make pages), and builds the
#              site of all pages in docs/_build/html (make site), with Sphinx in an environment of its own
# make gpu-check   checks the engine on a GPU, at most 10 minutes; uses $(PYTHON) where it has PyTorch
# make test-gpu-path   tests without a GPU what runs on one: PyTorch's CUDA build (a download of some GB) on a GPU
#              in software (tests/software_gpu); no part of make test
# make test-deepspeed   tests the strategy deepspeed, with DeepSpeed in an environment of its own; no part of make test
# make test-transformers   tests models of transformers and timm and files for their trainers, in an environment of its own; no part of make test
# make test-versions   tests the oldest and the newest versions that are promised, for releases; no part of make test
# make clean   removes the environments and keeps results/; make clean-results deletes all records, too

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.requirements
DEV_STAMP := $(VENV)/.requirements-dev
GPU_PATH_VENV := .venv-gpu-path
GPU_PATH_STAMP := $(GPU_PATH_VENV)/.requirements
DEEPSPEED_VENV := .venv-deepspeed
DEEPSPEED_STAMP := $(DEEPSPEED_VENV)/.requirements
TRANSFORMERS_VENV := .venv-transformers
TRANSFORMERS_STAMP := $(TRANSFORMERS_VENV)/.requirements
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.requirements
PIP := -m pip install --quiet --disable-pip-version-check -c envs/constraints.txt

.PHONY: demo test test-quick lint docs pages site clean clean-results setup gpu-check test-gpu-path test-deepspeed test-transformers test-versions
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n 's/^# //p' Makefile | head -11

setup: $(RUN_STAMP)

%/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"stratbench needs Python 3.11 or newer; $(PYTHON) is {v.major}.{v.minor}. Name another one: make PYTHON=python3.12")'
	@echo "making $* with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $* || $(PYTHON) -m virtualenv $* || \
	  { echo "cannot make a virtual environment: install your system's python3-venv package" >&2; rm -rf $*; exit 1; }

$(RUN_STAMP): envs/requirements.txt envs/constraints.txt | $(BIN)/python
	@echo "installing envs/requirements.txt into $(VENV) (PyTorch is large: a minute or more)"
	@$(BIN)/python $(PIP) -r envs/requirements.txt
	@touch $@

$(DEV_STAMP): envs/requirements-dev.txt envs/constraints.txt $(RUN_STAMP)
	@echo "installing envs/requirements-dev.txt into $(VENV)"
	@$(BIN)/python $(PIP) -r envs/requirements-dev.txt
	@touch $@

demo: $(RUN_STAMP)
	@echo "training the demo study: CPU processes on this machine, three minutes on two idle cores"
	$(BIN)/snakemake --profile profiles/local --config study=demo
	@echo "report: results/demo/report.html"

# Side by side as tests/conftest.py says; `pytest tests/core/test_x.py` runs one file in one process.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: $(DEV_STAMP)
	$(PYTEST)

test-quick: $(DEV_STAMP)
	$(PYTEST) -m "not slow and not slurm"

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/snakemake --lint

docs: pages site

pages: $(DEV_STAMP)
	PYTHONPATH=workflow $(BIN)/python docs/architecture.py
	PYTHONPATH=workflow $(BIN)/python docs/config_tables.py
	PYTHONPATH=workflow $(BIN)/python docs/record_tables.py
	PYTHONPATH=workflow $(BIN)/python docs/command_tables.py

$(DOCS_STAMP): envs/requirements-docs.txt envs/constraints.txt | $(DOCS_VENV)/bin/python
	@echo "installing envs/requirements-docs.txt into $(DOCS_VENV)"
	@$(DOCS_VENV)/bin/python $(PIP) -r envs/requirements-docs.txt
	@touch $@

# A broken link or a page in no table of contents is an error. Nothing is read from a network.
site: $(DOCS_STAMP)
	$(DOCS_VENV)/bin/python -m sphinx --quiet --fail-on-warning --keep-going -c docs -d docs/_build/doctrees . docs/_build/html
	@echo "site: docs/_build/html/index.html"

$(GPU_PATH_STAMP): envs/requirements-gpu-path.txt envs/requirements.txt envs/requirements-dev.txt envs/constraints.txt | $(GPU_PATH_VENV)/bin/python
	@echo "installing envs/requirements-gpu-path.txt into $(GPU_PATH_VENV) (PyTorch and its CUDA libraries: some GB)"
	@$(GPU_PATH_VENV)/bin/python $(PIP) -r envs/requirements-gpu-path.txt
	@touch $@

# Side by side: cells wait for each other's processes and for clocks. ARGS: pytest's, such as -k memory.
test-gpu-path: $(GPU_PATH_STAMP)
	$(GPU_PATH_VENV)/bin/python tests/software_gpu/build.py $(GPU_PATH_VENV)
	$(GPU_PATH_VENV)/bin/python -m pytest -n 3 --dist worksteal tests/software_gpu $(ARGS)

$(DEEPSPEED_STAMP): envs/requirements-deepspeed.txt envs/requirements.txt envs/requirements-dev.txt envs/constraints.txt | $(DEEPSPEED_VENV)/bin/python
	@echo "installing envs/requirements-deepspeed.txt into $(DEEPSPEED_VENV), with all that the tests run on"
	@$(DEEPSPEED_VENV)/bin/python $(PIP) -r envs/requirements.txt -r envs/requirements-dev.txt -r envs/requirements-deepspeed.txt
	@touch $@

# Its own tests, and of those of every strategy what they say of it.
test-deepspeed: $(DEEPSPEED_STAMP)
	$(DEEPSPEED_VENV)/bin/python -m pytest tests/extensions/deepspeed/test_deepspeed.py $(ARGS)
	$(DEEPSPEED_VENV)/bin/python -m pytest -k deepspeed tests/extensions/emit/test_emit_trains.py tests/whole/test_saved_state.py tests/whole/test_frozen.py \
	  tests/whole/test_slowdown.py tests/whole/test_data_placement.py $(ARGS)

$(TRANSFORMERS_STAMP): envs/requirements-transformers.txt envs/requirements.txt envs/requirements-dev.txt envs/constraints.txt | $(TRANSFORMERS_VENV)/bin/python
	@echo "installing envs/requirements-transformers.txt into $(TRANSFORMERS_VENV), with all that the tests run on"
	@$(TRANSFORMERS_VENV)/bin/python $(PIP) -r envs/requirements.txt -r envs/requirements-dev.txt -r envs/requirements-transformers.txt
	@touch $@

# Nothing is downloaded from a hub of models.
test-transformers: $(TRANSFORMERS_STAMP)
	HF_HUB_OFFLINE=1 $(TRANSFORMERS_VENV)/bin/python -m pytest tests/extensions/libraries tests/extensions/emit/test_emit_trains.py tests/extensions/emit/test_emit_memory.py \
	  tests/extensions/labelled/test_own_labelled.py $(ARGS)
	$(TRANSFORMERS_VENV)/bin/python -m pytest tests/workflow/test_tutorials.py -k transformers $(ARGS)

# ARGS: `oldest` or `newest` alone.
test-versions: $(DEV_STAMP)
	$(BIN)/python tests/versions.py $(ARGS)

# A GPU machine's own PyTorch is the one to check: nothing is installed where $(PYTHON) has one.
gpu-check:
	@if $(PYTHON) -c 'import sys, torch, torchvision; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then $(PYTHON) benchmarks/gpu/check.py $(ARGS); \
	else $(MAKE) --no-print-directory setup && $(BIN)/python benchmarks/gpu/check.py $(ARGS); fi

clean:
	rm -rf $(VENV) $(GPU_PATH_VENV) $(DEEPSPEED_VENV) $(TRANSFORMERS_VENV) $(DOCS_VENV) .venv-versions docs/_build
	@[ ! -e results ] || echo "results is kept: make clean-results deletes it"

# With results goes .snakemake, which knows what they were made from.
clean-results:
	@if [ -d results ]; then \
	  echo "deleting .snakemake and $$(readlink -f results): $$(du -shL results | cut -f1), with these records of cells:"; \
	  for study in results/*/cells; do [ ! -d "$$study" ] || \
	    echo "  $$study: $$(find "$$study" -name record.json | wc -l)"; done; fi
	rm -rf results .snakemake

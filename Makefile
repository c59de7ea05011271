# make demo    sets itself up, runs the demo study on this machine, writes results/demo/report.html
# make test    sets itself up, runs all tests: about 9 minutes on 2 cores; make test-quick without the slow ones
# make lint    formatting and style                    make docs         regenerates generated pages
# make gpu-check   checks the engine on a GPU, at most 10 minutes; uses $(PYTHON) where it has PyTorch
# make clean   removes the environment and keeps results/; make clean-results deletes all records, too

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.requirements
DEV_STAMP := $(VENV)/.requirements-dev
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c envs/constraints.txt

.PHONY: demo test test-quick lint docs clean clean-results setup gpu-check
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n 's/^# //p' Makefile | head -5

setup: $(RUN_STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"stratbench needs Python 3.11 or newer; $(PYTHON) is {v.major}.{v.minor}. Name another one: make PYTHON=python3.12")'
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || $(PYTHON) -m virtualenv $(VENV) || \
	  { echo "cannot make a virtual environment: install your system's python3-venv package" >&2; rm -rf $(VENV); exit 1; }

$(RUN_STAMP): envs/requirements.txt envs/constraints.txt | $(BIN)/python
	@echo "installing envs/requirements.txt into $(VENV) (PyTorch is large: a minute or more)"
	@$(PIP) -r envs/requirements.txt
	@touch $@

$(DEV_STAMP): envs/requirements-dev.txt envs/constraints.txt $(RUN_STAMP)
	@echo "installing envs/requirements-dev.txt into $(VENV)"
	@$(PIP) -r envs/requirements-dev.txt
	@touch $@

demo: $(RUN_STAMP)
	@echo "training the demo study: CPU processes on this machine, some minutes"
	$(BIN)/snakemake --profile profiles/local --config study=demo
	@echo "report: results/demo/report.html"

# Side by side as tests/conftest.py says; `pytest tests/unit/test_x.py` runs one file in one process.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: $(DEV_STAMP)
	$(PYTEST)

test-quick: $(DEV_STAMP)
	$(PYTEST) -m "not slow and not slurm"

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow/Snakefile workflow/rules
	$(BIN)/snakemake --lint

docs: $(DEV_STAMP)
	PYTHONPATH=workflow $(BIN)/python docs/architecture.py > ARCHITECTURE.md
	PYTHONPATH=workflow $(BIN)/python docs/config_tables.py docs/configuration.md

# A GPU machine's own PyTorch is the one to check: nothing is installed where $(PYTHON) has one.
gpu-check:
	@if $(PYTHON) -c 'import sys, torch, torchvision; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then $(PYTHON) benchmarks/gpu/check.py $(ARGS); \
	else $(MAKE) --no-print-directory setup && $(BIN)/python benchmarks/gpu/check.py $(ARGS); fi

clean:
	rm -rf $(VENV)
	@[ ! -e results ] || echo "results is kept: make clean-results deletes it"

# With results goes .snakemake, which knows what they were made from.
clean-results:
	@if [ -d results ]; then \
	  echo "deleting .snakemake and $$(readlink -f results): $$(du -shL results | cut -f1), with these records of cells:"; \
	  for study in results/*/cells; do [ ! -d "$$study" ] || \
	    echo "  $$study: $$(find "$$study" -name record.json | wc -l)"; done; fi
	rm -rf results .snakemake

# Everything a fresh machine needs besides Python 3.11 or newer and make is installed by the targets.

VENV ?= .venv
METHODS ?= cgp
SCALE ?= laptop
PYTEST_ARGS ?=
TREE := .cache/tree
comma := ,

.PHONY: help test reproduce lint ruff format imports types environment tree peers clean

help:
	@echo "make reproduce   run the experiments: METHODS=\"cgp language\", SCALE=smoke or laptop (now $(METHODS), $(SCALE))"
	@echo "make test        the fast tests; PYTEST_ARGS=... goes to pytest"
	@echo "make lint        ruff, and the direction of imports"
	@echo "make types       mypy on the public surface"
	@echo "make peers       .venv-peers: other people's implementations to compare with (Python 3.11)"
	@echo "make clean       remove what was built, and the environments"
	@echo "PYTHON=/path/to/python chooses the interpreter; the newest of 3.13, 3.12, 3.11 is taken"

test: environment
	$(VENV)/bin/python -m pytest -m "not slow" -n auto --dist loadfile $(PYTEST_ARGS)

reproduce:
	@sh .ci/environment $(VENV) experiments$(if $(filter language,$(METHODS)),$(comma)language)
	$(VENV)/bin/foliax reproduce $(METHODS) --scale=$(SCALE)

lint: ruff format imports

ruff: environment
	$(VENV)/bin/python -m ruff check

format: environment
	$(VENV)/bin/python -m ruff format --check

imports: tree
	PYTHONPATH=$(TREE) $(VENV)/bin/lint-imports --no-logo

types: tree
	cd $(TREE) && $(abspath $(VENV))/bin/python -m mypy -p foliax \
	  --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.cache/mypy

environment:
	@sh .ci/environment $(VENV) dev

# Tools that read packages from disk need the folders where an installed foliax has them.
tree: environment
	@rm -rf $(TREE) && mkdir -p $(TREE) && cp -R lib $(TREE)/foliax
	@cp -R envs experiments kernels_pallas $(TREE)/foliax

peers:
	@sh .ci/environment .venv-peers peers 3.11

clean:
	rm -rf .venv .venv-peers .venv-ci .venv-ci-311 .cache build dist *.egg-info

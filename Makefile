PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# More workers would each hold PyTorch and gain little. A worker without tests takes some of another.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal
# Of npm: what finds in a page what keeps people from reading it.
AXE := 4.14.1
COVERAGE := .coverage.json
CACHES := $(COVERAGE) .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

.DEFAULT_GOAL := help
.PHONY: help setup demo run find-batch bench doctor test test-slow test-lowest test-newest test-mps browser screenshots check types format resolve-mac constraints clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv with the pinned packages; PYTHON=python3.12 picks another Python

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"Python 3.11 or newer is needed; try: make setup PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[offline,onnx,tensorboard,web,test,dev]'
	@touch $@

demo: setup ## Fine-tune a small model without a network, into runs/demo
	$(BIN)/finetune run offline --output-dir runs/demo --overwrite

run: setup ## Fine-tune; ARGS="trec_head" and the like
	$(BIN)/finetune run $(ARGS)

find-batch: setup ## Find the batch sizes that fit this machine; ARGS="--device cpu" and the like
	$(BIN)/finetune find-batch $(ARGS)

bench: setup ## Time this machine's devices at published workloads; ARGS="--quick" and the like
	$(BIN)/finetune bench $(ARGS)

doctor: setup ## Check whether this machine is ready; ARGS="--device mps" and the like
	$(BIN)/finetune doctor $(ARGS)

test: setup ## Run the quick tests; fails under 90 % line coverage
	$(BIN)/python -m slipcover --json --out $(COVERAGE) -m pytest $(PARALLEL)
	$(BIN)/python -m slipcover --merge $(COVERAGE) --out $(COVERAGE) --fail-under 90

test-slow: setup ## Run all tests, the slow ones too; SLOW=only for those alone
	$(BIN)/pytest $(PARALLEL) -m '$(if $(filter only,$(SLOW)),slow)'

test-lowest: ## Run the quick tests with the oldest versions that pyproject.toml admits
test-newest: ## Run the quick tests with the newest versions that pyproject.toml admits
test-lowest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-lowest test-newest: $(BIN)/uv
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) .venv/$@
	$(BIN)/uv pip compile --quiet --python .venv/$@ --resolution $(RESOLUTION) --no-annotate \
		--extra offline --extra onnx --extra tensorboard --extra web --extra test \
		--output-file .venv/$@/versions.txt pyproject.toml
	$(BIN)/uv pip install --quiet --python .venv/$@ --requirement .venv/$@/versions.txt --editable .
	.venv/$@/bin/python -m pytest $(PARALLEL)

test-mps: setup ## Run the tests that need a Mac's GPU; elsewhere they are skipped, with the reason
	$(BIN)/pytest -m mps

browser: setup ## Get what the tests of pages in a browser need; without it they are skipped
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ apt-get update --quiet=2 && apt-get install --quiet=2 --yes chromium; }
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[browser]'
	cd .venv && npm pack --silent axe-core@$(AXE) && mkdir -p axe-core && \
		tar -xzf axe-core-$(AXE).tgz -C axe-core --strip-components 1

screenshots: browser ## Make docs/screenshots again from a run
	$(BIN)/python docs/screenshots.py

check: setup ## Lint, check the format, the types, who imports whom, and the workflow of CI
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/ci.yml

types: setup ## Write the options of the schema into the types of the Python API
	$(BIN)/python tests/option_types.py

format: setup ## Format the code and sort the imports
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

resolve-mac: setup ## Show that the pinned packages have wheels for a Mac with Apple silicon
	MACOSX_DEPLOYMENT_TARGET=14.0 $(BIN)/uv pip compile --quiet --no-header --no-annotate \
		--python-version 3.11 --python-platform aarch64-apple-darwin --only-binary :all: \
		--constraint constraints.txt --extra offline pyproject.toml
	@echo 'The pinned packages resolve from wheels alone on macOS 14 with Apple silicon, Python 3.11.'

# Not setup, which fails while the ranges in pyproject.toml and the old pins contradict each other.
$(BIN)/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt uv

# One pin serves every Python version, so that no user gets a version that was never run.
# Other builds of torch bring gigabytes to Linux. A Mac gets the newest that the tests passed with:
# known_faults.yaml lists fewer faults for it.
TORCH := "torch==2.13.0 ; sys_platform != 'darwin'" "torch==2.15.0 ; sys_platform == 'darwin'"
constraints: $(BIN)/uv ## Pin the newest versions that pyproject.toml admits, in constraints.txt
	printf '%s\n' $(TORCH) | $(BIN)/uv pip compile --quiet --upgrade --universal --all-extras \
		--python-version 3.11 --fork-strategy fewest --no-annotate \
		--custom-compile-command 'make constraints' --constraint - \
		--output-file constraints.txt pyproject.toml

clean: ## Remove .venv and the tools' caches; runs/ stays
	rm -rf .venv build dist $(CACHES)
	find finetune tests -name __pycache__ -exec rm -rf {} +

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# More workers would need more memory and gain little. Idle workers take tests from busy workers.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal
# Version of the npm package axe-core, which checks the accessibility of pages.
AXE := 4.14.1
COVERAGE := .coverage.json
CACHES := $(COVERAGE) .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

.DEFAULT_GOAL := help
.PHONY: help setup demo run find-batch bench doctor test test-slow test-faults test-lowest test-newest test-mps rehearse browser screenshots check types format resolve-mac constraints clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv with the pinned packages; PYTHON=python3.12 picks another Python

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"Python 3.11 or newer is needed; try: make setup PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	# Compiling all files takes 40 s. Python compiles those that it imports.
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt \
		--editable '.[offline,onnx,tensorboard,web,test,dev]'
	@touch $@

demo: setup ## Fine-tune a small model without a network, into runs/demo
	$(BIN)/finetune run offline --output-dir runs/demo --overwrite

run: setup ## Fine-tune, with arguments such as ARGS="trec_head"
	$(BIN)/finetune run $(ARGS)

find-batch: setup ## Find the batch sizes that fit, with arguments such as ARGS="--device cpu"
	$(BIN)/finetune find-batch $(ARGS)

bench: setup ## Time the devices of this machine, with arguments such as ARGS="--quick"
	$(BIN)/finetune bench $(ARGS)

doctor: setup ## Check whether this machine is ready, with arguments such as ARGS="--device mps"
	$(BIN)/finetune doctor $(ARGS)

# Measuring the coverage takes a quarter of the time.
test: setup ## Run the quick tests; with COVERED=1, fail if less than 90% of the lines are covered
	$(BIN)/python $(if $(COVERED),-m slipcover --json --out $(COVERAGE)) -m pytest $(PARALLEL)
	$(if $(COVERED),$(BIN)/python -m slipcover --merge $(COVERAGE) --out $(COVERAGE) --fail-under 90)

test-slow: setup ## Run all tests, or with SLOW=only just the slow tests
	$(BIN)/pytest $(PARALLEL) -m '$(if $(filter only,$(SLOW)),slow)'

test-faults: setup ## Let operations on files fail, one at a time, on Linux, and damage bytes of files
	ALL_FAULTS=1 FAULTS="--every 2" $(BIN)/pytest -m "slow or not slow" -s tests/faults

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

test-mps: setup ## Run the tests that need the GPU of a Mac; skipped on other machines
	$(BIN)/pytest -m mps

DEVICE := mps
rehearse: setup ## Run each command on a device, and write rehearsal-mps.txt; DEVICE=cpu picks another
	$(BIN)/python tests/rehearsal/rehearse.py --device $(DEVICE) --log rehearsal-$(DEVICE).txt

browser: setup ## Install what the browser tests need; without it they are skipped
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ apt-get update --quiet=2 && apt-get install --quiet=2 --yes chromium; }
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[browser]'
	cd .venv && npm pack --silent axe-core@$(AXE) && mkdir -p axe-core && \
		tar -xzf axe-core-$(AXE).tgz -C axe-core --strip-components 1

screenshots: browser ## Make the chart, the example report and the screenshots of the README and the docs
	$(BIN)/python docs/speed_chart.py
	$(BIN)/python docs/screenshots.py

check: setup ## Check style, format, types, import contracts, English and the CI workflow
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/english.py
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/ci.yml

types: setup ## Write the options into the types of the Python API
	$(BIN)/python tests/option_types.py

format: setup ## Format the code and sort the imports
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

resolve-mac: setup ## Check that the pinned packages have wheels for a Mac with Apple silicon
	MACOSX_DEPLOYMENT_TARGET=14.0 $(BIN)/uv pip compile --quiet --no-header --no-annotate \
		--python-version 3.11 --python-platform aarch64-apple-darwin --only-binary :all: \
		--constraint constraints.txt --extra offline pyproject.toml
	@echo 'The pinned packages resolve from wheels alone on macOS 14 with Apple silicon, Python 3.11.'

# Doesn't depend on setup, which fails while the old pins contradict the ranges in pyproject.toml.
$(BIN)/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt uv

# All versions of Python get the same pins, so that no user gets an untested version.
# Other builds of torch bring gigabytes to Linux. A Mac gets the newest that the tests passed with:
# known_faults.yaml lists fewer faults for it.
TORCH := "torch==2.13.0 ; sys_platform != 'darwin'" "torch==2.15.0 ; sys_platform == 'darwin'"
constraints: $(BIN)/uv ## Pin the newest versions that pyproject.toml allows, in constraints.txt
	printf '%s\n' $(TORCH) | $(BIN)/uv pip compile --quiet --upgrade --universal --all-extras \
		--python-version 3.11 --fork-strategy fewest --no-annotate \
		--custom-compile-command 'make constraints' --constraint - \
		--output-file constraints.txt pyproject.toml

clean: ## Remove .venv and the tools' caches; runs/ stays
	rm -rf .venv build dist $(CACHES)
	find finetune tests -name __pycache__ -exec rm -rf {} +

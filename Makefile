# `make` lists what there is. Everything works on a fresh clone: the environment is made when it is first needed.

RECIPE ?= mnist_moe
PRESET ?=
GPUS ?=
CPUS ?=
ARGS ?=
ROUNDS ?= 5
KERNELS ?=
LOADERS ?=
VENV ?= .venv
PYTHON ?= python3
CONSTRAINTS ?=

SHELL := bash
.DEFAULT_GOAL := help
PY := $(VENV)/bin/python
# CONSTRAINTS=constraints.txt installs the very versions with which the suite last passed.
INSTALL := -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS))
PIP := $(PY) $(INSTALL)
# A path in place of a finder, which editors and type checkers cannot follow.
EDITABLE := --config-settings editable_mode=compat -e
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# Without a GPU, a torch that is there before the resolver looks keeps it from fetching the CUDA packages.
TORCH := $(if $(HAS_GPU),,torch==2.13.0)

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: install
install: $(VENV)/.installed-dev ## make the environment, with what developers need

.PHONY: train
train: $(VENV)/.installed ## train RECIPE= with PRESET= on GPUS= or CPUS= processes, ARGS= more flags; all GPUs if none is said
	@if [ ! -f recipes/$(RECIPE).py ]; then \
	    echo "error: RECIPE=$(RECIPE): take one of $(patsubst recipes/%.py,%,$(wildcard recipes/*.py))." >&2; exit 2; fi; \
	found=$$($(PY) -c 'import torch; print(torch.cuda.device_count())'); \
	gpus="$(GPUS)"; gpus=$${gpus:-$$found}; \
	if [ -n "$(CPUS)" ]; then processes="--cpu --num-processes $(CPUS)"; \
	elif [[ ! $$gpus =~ ^[0-9]+$$ ]]; then echo "error: GPUS=$$gpus: take a number." >&2; exit 2; \
	elif [ -z "$(GPUS)" ] && [ $$found -eq 0 ]; then processes=; \
	elif [ $$gpus -gt $$found ]; then \
	    echo "error: GPUS=$$gpus: this machine has $$found; CPUS=$$gpus rehearses on the CPU." >&2; exit 2; \
	elif [ $$gpus -eq 0 ]; then processes="--cpu"; \
	else processes="--num-processes $$gpus"; fi; \
	exec $(PY) recipes/$(RECIPE).py $(PRESET) $$processes $(ARGS)

.PHONY: smoke
smoke: $(VENV)/.installed ## every recipe's debug preset, on one and on two processes
	@set -e; for recipe in recipes/*.py; do for processes in 1 2; do \
	    echo "== $$recipe debug, $$processes process(es)"; \
	    $(PY) $$recipe debug --cpu --num-processes $$processes --tracker none --run-dir "$$(mktemp -d)/run"; \
	done; done

# What makes torch compute, and so round, as on a processor with less than this one: without AVX-512, without vectors.
KERNELS_avx2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
KERNELS_default := ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2

# Tests often wait for processes that they started: one worker more than there are cores, and at most four.
WORKERS := $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n + 1 : 4)))

# A test that hangs for this long ends its process with the stacks of all threads; a second process may try its file again.
HANGS := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true --max-worker-restart 1

.PHONY: test
test: $(VENV)/.installed-dev ## all tests that need no GPU; KERNELS=avx2 or default: as on a lesser processor
	@case "$(KERNELS)" in ""|avx2|default) ;; \
	    *) echo "error: KERNELS=$(KERNELS): take avx2 or default." >&2; exit 2;; esac
	env -u PYTHONDONTWRITEBYTECODE $(KERNELS_$(KERNELS)) $(PY) -m pytest \
	    -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(HANGS)

.PHONY: families
families: $(VENV)/.installed-dev ## write docs/experts/transformers_families.md: every MoE family of the installed transformers, two minutes
	$(PY) -m tests.integrations.transformers.test_families

.PHONY: matrix
matrix: $(VENV)/.installed-dev ## write docs/project/matrix.md: parity of expert-parallel libraries with one process
	$(PY) -m benchmarks.matrix.compare

.PHONY: fuzz
fuzz: $(VENV)/.installed-dev ## the properties on other cases each time, ROUNDS= times
	@for round in $$(seq $(ROUNDS)); do \
	    $(PY) -m pytest -n $(WORKERS) -m hypothesis --hypothesis-profile=fuzz || exit; done

.PHONY: test-dist
test-dist: $(VENV)/.installed-dev ## the tests that start several processes
	$(PY) -m pytest tests/test_processes.py tests/parity tests/run/launch tests/traps

.PHONY: test-gpu
test-gpu: $(VENV)/.installed-dev ## the tests that need a GPU
	$(PY) -m pytest -m gpu $$(grep -rl "mark\.gpu" tests)

.PHONY: gpu-report
gpu-report: $(VENV)/.installed-dev ## the benchmarks and tests of one GPU, at most 25 minutes
	-timeout --signal INT 300 $(PY) benchmarks/speed/gpu_layer.py --rounds 10
	-timeout --signal INT 600 $(PY) benchmarks/speed/gpu_training.py --rounds 2
	timeout --signal INT 600 $(MAKE) test-gpu

.PHONY: test-slurm
test-slurm: $(VENV)/.installed-dev ## the Slurm templates on a cluster of two nodes inside this machine, as root
	@command -v slurmctld >/dev/null || apt-get install -y --no-install-recommends slurm-wlm || \
	    { echo "error: Slurm is missing and could not be installed: apt-get install slurm-wlm, as root." >&2; exit 2; }
	$(PY) -m pytest -m slurm tests/test_slurm.py

.PHONY: check
check: $(VENV)/.installed-dev ## style, types, import rules, size totals, and links of the documentation
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	MYPYPATH=recipes $(PY) -m mypy recipes
	$(PY) -m pytest tests/test_architecture.py
	$(PY) benchmarks/lines.py --check
	$(PY) -m sphinx --builder dummy --fail-on-warning --keep-going --quiet --conf-dir docs \
	    --doctree-dir build/doctrees . build/dummy

.PHONY: test-browser
test-browser: $(VENV)/.installed-dev ## the page of `toolkit report`, and the site's search, in headless Chromium
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	    { apt-get update && apt-get install -y --no-install-recommends chromium; } || \
	    { echo "error: Chromium is missing and could not be installed: apt-get install chromium, as root." >&2; exit 2; }
	$(PY) -m pytest -m browser tests/commands/report tests/docs/test_site.py

.PHONY: test-loaders
test-loaders: $(VENV)/.installed-dev ## the rules of vLLM's and SGLang's loaders, in LOADERS= or the pinned wheels
	LOADERS="$(LOADERS)" $(PY) -m pytest -m loaders tests/audit/test_loaders.py

# In need of a folder or a GPU, or hours long.
BENCH_OTHERS := $(addprefix benchmarks/,$(addprefix speed/,gpu_layer.py gpu_training.py) \
	$(addprefix learning/,quality.py lmu_speech.py lmu_psmnist.py vae_robustness.py few_labels.py) \
	$(addprefix placement/,record_traces.py placement_lab.py))

.PHONY: bench
bench: $(VENV)/.installed-dev ## the measurements behind the figures of docs/project/results.md
	@missed=0; for benchmark in $(filter-out $(BENCH_OTHERS) %/__init__.py,$(wildcard benchmarks/speed/*.py benchmarks/learning/*.py benchmarks/placement/*.py)); do \
	    echo "== $$benchmark"; $(PY) $$benchmark || missed=1; done; \
	$(PY) benchmarks/placement/record_traces.py runs/traces && $(PY) benchmarks/placement/placement_lab.py runs/traces || missed=1; exit $$missed

# Everything is read anew: a warning is given only when a page is read, and each one fails the build.
.PHONY: docs
docs: $(VENV)/.installed-dev ## the pages and the API reference as a site, build/site/index.html; a dead link fails it
	rm -rf build/site
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet --fresh-env --conf-dir docs \
	    --doctree-dir build/site-doctrees . build/site

.PHONY: docs-test
docs-test: $(VENV)/.installed-dev ## run every command of the documentation that is marked `run`
	$(PY) -m pytest tests/docs

RELEASE := build/release
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' toolkit/version.py)
REPOSITORY := $(shell sed -n 's/^Repository = "\(.*\)"/\1/p' pyproject.toml)

# Links of README lead into the repository, which the package index does not have: they get the address of the version.
.PHONY: release
release: export PYTHONPATH :=
release: ## sdist, wheel and SBOM of HEAD in dist/, checked, and installed from a local index into an empty environment
	rm -rf dist $(RELEASE)
	mkdir -p $(addprefix $(RELEASE)/,source index/moe-toolkit elsewhere)
	git archive HEAD toolkit pyproject.toml README.md LICENSE | tar -x -C $(RELEASE)/source
	sed -E -i -e 's#\]\((docs/images/[^):]*)\)#]($(REPOSITORY)/raw/v$(VERSION)/\1)#g' \
	    -e 's#\]\(([A-Za-z][^):]*)\)#]($(REPOSITORY)/blob/v$(VERSION)/\1)#g' $(RELEASE)/source/README.md
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/python $(INSTALL) build twine cyclonedx-bom
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
	    $(RELEASE)/tools/bin/python -m build --quiet --outdir dist $(RELEASE)/source
	$(RELEASE)/tools/bin/python -m twine check --strict dist/*
	cp dist/* $(RELEASE)/index/moe-toolkit
	cd dist && for file in *; do echo "<a href=\"$$file\">$$file</a>"; done > ../$(RELEASE)/index/moe-toolkit/index.html
	$(PYTHON) -m venv $(RELEASE)/empty
	$(if $(TORCH),$(RELEASE)/empty/bin/python $(INSTALL) $(TORCH))
	$(RELEASE)/empty/bin/python $(INSTALL) --no-deps --index-url file://$(CURDIR)/$(RELEASE)/index moe-toolkit==$(VERSION)
	$(RELEASE)/empty/bin/python $(INSTALL) 'moe-toolkit[recipes]==$(VERSION)'
	$(RELEASE)/empty/bin/python -m pip check
	cp docs/examples/own_loop.py $(RELEASE)/elsewhere
	bin=$(CURDIR)/$(RELEASE)/empty/bin; cd $(RELEASE)/elsewhere && $$bin/toolkit --version && \
	    $$bin/python own_loop.py debug --cpu --num-processes 2 --tracker none --run-dir run
	sed -i 's/^dynamic = .*/version = "$(VERSION)"/' $(RELEASE)/source/pyproject.toml  # which the SBOM takes from there
	$(RELEASE)/tools/bin/cyclonedx-py environment --pyproject $(RELEASE)/source/pyproject.toml --output-reproducible \
	    --output-file dist/moe-toolkit-$(VERSION).cdx.json $(RELEASE)/empty
	cd dist && sha256sum *
	@! grep OWNER pyproject.toml || echo "not to be uploaded yet: put the account's name in place of OWNER above"

.PHONY: clean
clean: ## remove what was built and cached; runs/ and the environment stay
	rm -rf build dist docs/api .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	    { echo "error: this needs Python 3.11, 3.12, 3.13 or 3.14: name one with PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV): a few minutes"
	$(if $(TORCH),$(PIP) $(TORCH))
	$(PIP) $(EDITABLE) '.[recipes]'
	@touch $@
	@echo "to call python, toolkit and accelerate of it: source $(VENV)/bin/activate"

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV): a few minutes"
	$(if $(TORCH),$(PIP) $(TORCH))
	$(PIP) $(EDITABLE) '.[dev]'
	@touch $(VENV)/.installed $@
	@echo "to call python, toolkit and accelerate of it: source $(VENV)/bin/activate"

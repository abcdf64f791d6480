# Everything a person or a machine does with this repository. `make help` lists it.
# PYTHON chooses the interpreter of .venv; without it the first of these that is new enough is taken.
# STUBS is the folder that `make protos` writes to. WORKERS is how many processes share the tests.
PYTHON  ?= $(firstword $(foreach p,python3 python3.11 python3.12 python3.13 python,$(shell $(p) -c $(NEW_ENOUGH) 2>/dev/null && echo $(p))))
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
KERNELS := eyas/kernels/cpu/__pycache__/.compiled
PROTOS  := $(wildcard protos/eyas/v1/*.proto)
STUBS   := .
WORKERS ?= 4
CLEAN_ENV := env -u MAKEFLAGS -u MAKELEVEL -u MFLAGS
SHARED   = -n $(WORKERS) --dist loadscope --no-loadscope-reorder

NEW_ENOUGH = 'import sys; sys.exit(sys.version_info < (3, 11))'

# pip's log as one line that rewrites itself on a terminal, and as its last step elsewhere.
define PROGRESS
while IFS= read -r line; do \
	if [ -t 1 ]; then printf '\r\033[K  %.76s' "$$line"; \
	elif [[ "$$line" == Installing* ]]; then printf '  %.76s...\n' "$$line"; fi; \
done; [ ! -t 1 ] || printf '\r\033[K'
endef

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
# Bytecode is kept: without it every test worker, and every process that a test starts, compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup demo up bench gemma talks methods gpu count test every-test nightly nightly-tests test-fast soak chaos fuzz clients ray lint format protos chart docs pictures wheel sbom notes images rehearsal prometheus clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(READY) $(KERNELS) ## make .venv with everything that the other targets need

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" && "$(PYTHON)" -c $(NEW_ENOUGH) || { \
		echo "Eyas needs Python 3.11 or newer$(if $(PYTHON),; $(PYTHON) is older or missing). Install it or name it: make setup PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@echo "Setting up $(VENV) with $$("$(PYTHON)" --version); the first time takes a few minutes"
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check -e '.[serve,ray,bench,train,docs,dev]' -c constraints.txt 2>&1 \
		| tee $(VENV)/setup.log | { $(PROGRESS); } || { tail -n 20 $(VENV)/setup.log >&2; exit 1; }
	@touch $(READY)
	@echo "$(VENV) is ready"

# numba keeps what it compiles in __pycache__, for all processes that start later. It does not see changes of other files.
$(KERNELS): $(READY) $(wildcard eyas/kernels/cpu/*.py)
	@echo "Compiling kernels for this processor"
	@rm -f eyas/kernels/cpu/__pycache__/*.nb[ci]
	@OMP_NUM_THREADS=1 $(BIN)/python -m eyas.kernels.cpu
	@touch $@

demo: $(KERNELS) ## start all services here, compare plain with speculative decoding, stop
	@$(BIN)/python -m benchmarks.scripts.demo

up: $(KERNELS) ## start all services here and keep them running
	@$(BIN)/eyas serve --demo

bench: $(KERNELS) ## measure the demo models here, about 3 minutes; writes dated reports to benchmarks/results/
	@$(BIN)/eyas bench offline --model models/demo/target --draft-model models/demo/eagle3 --prompts models/demo/prompts.jsonl \
		--batch 1 --batch 8 --batch 16 --temperature 0 --temperature 0.8

# Sources of Python's library without the modules that the prompts are from.
CORPUS := build/methods/corpus
PACKAGES := asyncio email http json logging multiprocessing unittest urllib xml
$(CORPUS)/datastore.json: $(READY)
	@cd "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" && $(abspath $(BIN))/eyas datastore build *.py $(PACKAGES) \
		--model $(CURDIR)/models/demo/target --exclude $(CURDIR)/models/demo/heldout_modules.json --out $(CURDIR)/$(CORPUS)

gemma: $(KERNELS) ## fetch Gemma 3 270M, train a head for it in 15 minutes, compare methods with transformers; GEMMA="--minutes 5" for less
	@$(BIN)/python -m benchmarks.scripts.gemma $(GEMMA)

talks: $(KERNELS) ## train a head of each method for Gemma, compare all methods by Spec-Bench's kinds; TALKS="--questions FILE --tokens 100000" for less
	@$(BIN)/python -m benchmarks.scripts.talks $(TALKS)

methods: $(KERNELS) $(CORPUS)/datastore.json ## every drafting method over the same prompts, about 15 minutes; writes a dated table and chart to benchmarks/results/
	@$(BIN)/eyas bench methods --model models/demo/target --prompts models/demo/prompts.jsonl --num-prompts 10 --max-tokens 64 \
		--threads 1 --method eagle1=models/demo/eagle1 --method eagle2=models/demo/eagle1 --method eagle3=models/demo/eagle3-full \
		--method dspark=models/demo/dspark --method peagle=models/demo/peagle --method medusa=models/demo/medusa \
		--method hydra=models/demo/hydra --method sps=models/demo/small \
		--method prompt_lookup --method suffix --method rest=$(CORPUS) --method lookahead --method eagle3+prompt_lookup=models/demo/eagle3-full \
		--method dspark+prompt_lookup=models/demo/dspark $(METHODS)

gpu: $(READY) ## on a machine with a GPU: its tests, kernels, prefill, steps, draft rounds and the widened demo, 25 minutes; GPU="--stage steps" for parts
	@$(BIN)/python -m benchmarks.gpu $(GPU)

count: $(READY) ## files, lines, functions and class names of the code, and what two journeys through it cross
	@$(BIN)/python -m benchmarks.scripts.count_code

FAST := api cache cli config device drafters engine grammar llm protocol sampling text
test-fast: $(KERNELS) ## units, engine, drafters and protocol without slow tests, under 90 s; for daily work
	@$(BIN)/python -m pytest -q $(SHARED) -m "not slow and not nightly" $(FAST:%=tests/%)

test: $(READY) ## lint and the daily tests side by side, under 8 minutes on two cores
	@$(MAKE) --jobs=2 --keep-going lint every-test

every-test: $(KERNELS)
	@$(CLEAN_ENV) $(BIN)/python -m pytest -q $(SHARED) -m "not nightly"

nightly: nightly-tests rehearsal soak chaos fuzz ray ## what is too long for every day: charts and Ray in running services, sweeps, rehearsals, storms

# NIGHTLY names the folders or files of some of these tests.
NIGHTLY ?= tests
nightly-tests: WORKERS = 2
nightly-tests: $(KERNELS)
	@$(CLEAN_ENV) $(BIN)/python -m pytest -q $(SHARED) -m nightly $(NIGHTLY)

soak: $(KERNELS) ## 10,000 short requests with cancellations, about 3 minutes: no slot lost, no memory taken
	@LRU_CACHE_CAPACITY=8 ONEDNN_PRIMITIVE_CACHE_CAPACITY=8 $(BIN)/python -m tests.engine.soak

chaos: $(KERNELS) ## kill, freeze, cut and overload services on loopback, about 5 minutes; no token may be lost; CHAOS="--minutes 60" for more
	@$(BIN)/python -m tests.chaos $(CHAOS)

fuzz: $(KERNELS) ## 20,000 malformed messages over all methods and routes, about a minute; FUZZ="--messages 1000000" for more
	@$(BIN)/python -m tests.fuzz $(FUZZ)

clients: $(READY) ## install other projects' clients into build/clients and run a small job of each; writes tests/clients/README.md
	@$(BIN)/python -m tests.clients $(CLIENTS)

ray: $(KERNELS) ## pools on a local Ray that grow, shrink and are replaced under load, about 5 minutes; no request may fail
	@$(BIN)/python -m tests.services.ray.cluster.soak

lint: $(READY) ## style, types and import contracts
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "the files above are not formatted; run: make format" >&2; exit 1; }
	@$(BIN)/mypy --strict --explicit-package-bases eyas benchmarks/split benchmarks/widen tests/chaos tests/fuzz
	@$(BIN)/lint-imports --no-logo

format: $(READY) ## format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix --quiet || true
	@$(BIN)/ruff format

protos: $(READY) ## regenerate eyas/v1 from protos/
	@PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos --python_out=$(STUBS) --grpc_python_out=$(STUBS) \
		--mypy_out=quiet:$(STUBS) --mypy_grpc_out=quiet:$(STUBS) $(PROTOS)

chart: $(READY) ## regenerate the Helm chart's schema and table of values, then lint it
	@$(BIN)/python -m deploy.generate
	@helm=$$($(BIN)/python -m deploy.binaries); for values in deploy/helm/values/*.yaml; do \
		"$$helm" lint --strict --quiet deploy/helm --values "$$values"; done

docs: $(READY) ## build the site of the documentation into build/site; fails at a broken link
	@$(BIN)/python -m docs.site

pictures: $(KERNELS) ## make the playground's recorded run, screenshots and animation again; needs chromium and a quiet machine; PICTURES=shots for a part
	@$(BIN)/python -m docs.pictures $(PICTURES)

wheel: $(READY) ## build sdist and wheel into dist/, and try the wheel in a fresh environment
	@bash deploy/wheel.sh

sbom: $(READY) ## list the Python packages of constraints.txt as dist/eyas.cdx.json (CycloneDX)
	@test -x build/sbom/bin/cyclonedx-py || { $(BIN)/python -m venv --without-pip build/sbom && \
		$(BIN)/python -m pip --python build/sbom/bin/python install --quiet --disable-pip-version-check 'cyclonedx-bom>=7'; }
	@mkdir -p dist
	@build/sbom/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type library --output-reproducible \
		--output-file dist/eyas.cdx.json constraints.txt

notes: $(READY) ## print the release notes of TAG, or of this version, from CHANGELOG.md
	@$(BIN)/python -m deploy.notes $(TAG)

images: ## build the images with docker, podman or buildah; TAG names them, PIP_EXTRA_INDEX_URL adds a source of packages
	@bash deploy/docker/build.sh

rehearsal: $(READY) ## run the steps of the Dockerfiles here, in fresh environments, and start the services in them
	@$(BIN)/python -m pytest -q tests/deploy/images/rehearsal.py

prometheus: $(READY) ## fetch Debian's Prometheus into .venv, for the tests of alerts and dashboards
	@command -v prometheus promtool >/dev/null || [ -x $(VENV)/prometheus/usr/bin/promtool ] || { mkdir -p $(VENV)/prometheus && \
		cd $(VENV)/prometheus && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb; }

clean: ## remove .venv, caches and build results
	@rm -rf $(VENV) build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find eyas services tests -name __pycache__ -type d -prune -exec rm -rf {} +

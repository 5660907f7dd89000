# SPDX-License-Identifier: Apache-2.0
# Every target does its own set-up: system packages, .venv/, the built extension. A second run only does what changed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
JOBS ?= $(shell nproc)
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NATIVE := CMakeLists.txt $(shell find csrc protos -type f)
CPP_FILES = $(shell find csrc integrations/nixl tests/nixl tests/cpp tests/capi tests/simulation tests/memory_model benchmarks/peers/adapters -name '*.h' -o -name '*.cc' -o -name '*.c')
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
STRICT := KVLINK_WERROR=ON
# From scratch a unity build takes little more than half the time, after a change longer.
UNITY := CMAKE_UNITY_BUILD=$(if $(CI),ON,OFF)
export SKBUILD_CMAKE_DEFINE := $(STRICT);$(UNITY)
# Compilers' results are reused by content, also between checkouts, where ccache is installed.
CCACHE := $(shell command -v ccache)
ifneq ($(CCACHE),)
export CMAKE_CXX_COMPILER_LAUNCHER := $(CCACHE)
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
endif

.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: build ## prefill in one process, decode in another, over every transport
	kvlink demo --transport all

# The gate: nothing in it waits, races or judges by a clock. CONTRIBUTING.md describes the tiers.
# Two processes of pytest take the files in turn.
.PHONY: test
test: export PYTHONHASHSEED := 0
test: lint test-cpp ## lint, C++ tests, Python tests, one demo, the site, the wheel: all that a change must pass
	pytest -n 2 --dist loadfile -m "not engines and not netns and not softroce and not slow and not newcomer and not verify"
	kvlink demo
	! python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $(MAKE) --no-print-directory docs
	.ci/test-wheel $(PYTHON)

.PHONY: verify
verify: build $(VENV)/.checked ## tier 2, one lane after the other: real processes, stores, namespaces, sanitizers; 40 minutes
	python .ci/lanes.py verify

# RANGE=HEAD~3..HEAD: what these commits changed, instead of the working tree against the branch it will land on.
.PHONY: verify-change
verify-change: build $(VENV)/.checked ## the lanes of tier 2 that a change touches
	python .ci/lanes.py changed $(RANGE)

.PHONY: lanes
lanes: ## how each lane ended last, and at which commit
	@$(PYTHON) .ci/lanes.py show

.PHONY: build
build: $(VENV)/.built ## .venv/ with kvlink installed in place

# CUDA 12 for the drivers of that version: they refuse what later compilers make.
NVRTC := build/nvrtc-12.9.86
$(NVRTC): $(VENV)/.made
	$(PIP_INSTALL) --target $@ --no-deps cuda-bindings==12.9.10 cuda-pathfinder==1.9.1 nvidia-cuda-nvrtc-cu12==12.9.86

.PHONY: kernels
kernels: build $(NVRTC) ## kvlink/hardware/kernels/images/ and docs/hardware/kernel.md, after a change of gather.cu
	LD_LIBRARY_PATH=$(NVRTC)/nvidia/cuda_nvrtc/lib PYTHONPATH=$(NVRTC) python .ci/kernels.py

.PHONY: venv
venv: $(VENV)/.made ## .venv/ with what a build needs

$(VENV)/.made: constraints.txt
	.ci/system-packages $(PYTHON)
	[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) scikit-build-core pybind11 grpcio-tools setuptools cmake ninja
	touch $@

$(VENV)/.built: $(VENV)/.made pyproject.toml $(NATIVE)
	$(PIP_INSTALL) --no-build-isolation --editable .
	touch $@

$(VENV)/.checked: $(VENV)/.made pyproject.toml
	$(PIP_INSTALL) --group dev
	touch $@

NEWEST = $(shell sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml | tail -n 1)

.PHONY: lint
lint: build $(VENV)/.checked ## ruff, the rules of luck and supervision, the word list, mypy, import-linter, clang-format; counts lines
	ruff check .
	ruff format --check .
	python tests/luck.py
	python tests/supervision.py
	python tests/words.py
	mypy -p kvlink -p benchmarks -p integrations
	mypy --python-version $(NEWEST) -p kvlink -p benchmarks -p integrations
	lint-imports
	.ci/lines
	@echo clang-format --dry-run, all C++ files
	@clang-format --dry-run -Werror $(CPP_FILES)

.PHONY: format
format: $(VENV)/.checked ## rewrite sources the way lint wants them
	ruff check --fix .
	ruff format .
	clang-format -i $(CPP_FILES)

# $(call cpp-build,build folder,options of CMake,options of the build) and $(call cpp-tests,build folder,command before). TSan cannot map its
# shadow when addresses are too random.
define cpp-build
	cmake -S . -B build/$(1) -G Ninja -D$(STRICT) -DKVLINK_PYTHON=OFF -DKVLINK_TESTS=ON $(2) >/dev/null
	cmake --build build/$(1) $(3) >build/$(1)/log || { cat build/$(1)/log; exit 1; }
endef
define cpp-tests
	timeout 900 $(2) build/$(1)/kvlink_tests --gtest_brief=1
endef
# $(call cpp-tests-at-once,as above): half of them beside the other half.
define cpp-tests-at-once
	seq 0 1 | GTEST_TOTAL_SHARDS=2 xargs -P 2 -I% env GTEST_SHARD_INDEX=% $(call cpp-tests,$(1),$(2))
endef
FIXED_ADDRESSES = $$(setarch -R true 2>/dev/null && echo setarch -R)

# The tests link what `make build` has compiled.
WITH_CORE = -D$(UNITY) -DKVLINK_CORE=$$(ls -t $(CURDIR)/build/cp*/libkvlink_core.a | head -n 1)

.PHONY: build-cpp
build-cpp: build
	$(call cpp-build,cpp,$(WITH_CORE))

.PHONY: test-cpp
test-cpp: build-cpp ## C++ tests; KVLINK_SIMULATION_SEEDS=1000000: that many runs of the simulation
	$(call cpp-tests,cpp,)
	build/cpp/kvlink_simulation
	build/cpp/kvlink_memory_model

.PHONY: build-sanitizers
build-sanitizers: $(VENV)/.made
	$(call cpp-build,asan,-DKVLINK_SANITIZE=address$(,)undefined -DCMAKE_UNITY_BUILD=ON)
	$(call cpp-build,tsan,-DKVLINK_SANITIZE=thread -DCMAKE_UNITY_BUILD=ON)
, := ,

.PHONY: test-sanitizers
test-sanitizers: export UBSAN_OPTIONS := halt_on_error=1:print_stacktrace=1
test-sanitizers: build-sanitizers ## C++ tests under ASan with UBSan, and under TSan
	$(call cpp-tests-at-once,asan,)
	$(call cpp-tests-at-once,tsan,$(FIXED_ADDRESSES))

.PHONY: test-transports
test-transports: build $(VENV)/.checked ## the whole transport and fault suites, over processes
	pytest -m "verify" tests/transports

.PHONY: test-fabric
test-fabric: FABRIC ?= sockets tcp;ofi_rxm
test-fabric: build $(VENV)/.checked ## the same over fabric, by providers of libfabric that need no hardware; FABRIC='efa': by this one
	for provider in $(foreach one,$(FABRIC),'$(one)'); do \
	  KVLINK_TEST_TRANSPORTS=fabric KVLINK_FABRIC_PROVIDER=$$provider pytest -m verify tests/transports -k fabric || exit 1; \
	done

CAPI_PROGRAMS = kvlink_node kvlink_misuse kvlink_threads

NIXL_FAULTS = tests/nixl/test_traps.py tests/nixl/test_faults.py

.PHONY: test-nixl
test-nixl: build $(VENV)/.checked ## the backend in the wheels of NIXL, also under sanitizers; KVLINK_NIXL_SOURCES=DIR: NIXL's own tests too
	$(call cpp-build,cpp,$(WITH_CORE),--target kvlink_nixl)
	pytest tests/nixl
	$(call cpp-build,asan,-DKVLINK_SANITIZE=address$(,)undefined -DCMAKE_UNITY_BUILD=ON,--target kvlink_nixl)
	KVLINK_NIXL_BUILD=asan pytest $(NIXL_FAULTS)
	$(call cpp-build,tsan,-DKVLINK_SANITIZE=thread -DCMAKE_UNITY_BUILD=ON,--target kvlink_nixl)
	KVLINK_NIXL_BUILD=tsan $(FIXED_ADDRESSES) pytest $(NIXL_FAULTS)

.PHONY: test-capi
test-capi: build-cpp $(VENV)/.checked ## programs in C, alone, with each other and with Python; again under sanitizers; ten million malformed inputs
	pytest tests/capi
	$(call cpp-build,asan,-DKVLINK_SANITIZE=address$(,)undefined -DCMAKE_UNITY_BUILD=ON,--target $(CAPI_PROGRAMS))
	KVLINK_CAPI_BUILD=asan pytest tests/capi/test_pairings.py tests/capi/test_channel_from_c.py tests/capi/test_misuse.py
	$(call cpp-build,tsan,-DKVLINK_SANITIZE=thread -DCMAKE_UNITY_BUILD=ON,--target kvlink_threads)
	$(FIXED_ADDRESSES) build/tsan/kvlink_threads
	build/cpp/kvlink_fuzz 10000000 $${KVLINK_TEST_SEED:-1}

.PHONY: test-hostile
test-hostile: build $(VENV)/.checked ## workers that publish false cards to an honest reader of a third process
	pytest -m verify tests/hostile_peers

.PHONY: test-processes
test-processes: build $(VENV)/.checked ## tests that need real time, a real etcd, or processes that are killed
	.ci/system-packages $(PYTHON) processes || true
	pytest -m verify $(addprefix --ignore tests/,transports hostile_peers deploy pages capi nixl)

.PHONY: test-deploy
test-deploy: build $(VENV)/.checked ## chart, compose file, systemd unit
	.ci/system-packages $(PYTHON) deploy || true
	pytest -m verify tests/deploy

.PHONY: test-pages
test-pages: build $(VENV)/.checked ## the status page, the report and the site in Chromium, with axe-core
	.ci/system-packages $(PYTHON) page || true
	$(PIP_INSTALL) --group pages
	! python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $(PIP_INSTALL) --group docs
	pytest -m verify tests/pages

.PHONY: release-wheel
release-wheel: venv ## dist/release/: a stripped wheel for glibc 2.28 and later, and the sdist; tried in a fresh environment
	.ci/release-wheel $(PYTHON)
	.ci/test-wheel $(PYTHON) "$$(ls -t dist/release/*.whl | head -n 1)"

.PHONY: same-bytes
same-bytes: release-wheel ## the same wheel and sdist from another folder, at another time, have the same hash; a whole build
	.ci/same-bytes $(PYTHON)

# ARCH=aarch64: for that processor.
.PHONY: release-wheels
release-wheels: venv ## dist/release/: a wheel for each Python that the metadata names and that runs here
	.ci/release-wheel $$(python tests/pythons/interpreters.py | cut -d' ' -f2)

.PHONY: test-aarch64
test-aarch64: build ## a wheel for aarch64, cross-compiled, and imported and used under qemu-user (root)
	.ci/system-packages $(PYTHON) aarch64
	ARCH=aarch64 .ci/release-wheel $(PYTHON)
	.ci/test-aarch64 "$$(ls -t dist/release/*aarch64.whl | head -n 1)"

.PHONY: test-newcomer
test-newcomer: build release-wheel $(VENV)/.checked ## README and pages followed literally in a fresh Debian (root)
	.ci/system-packages $(PYTHON) newcomer
	pytest -m newcomer tests/newcomer

.PHONY: test-image
test-image: build $(VENV)/.checked ## the Containerfile's steps in a fresh Debian, without a container engine (root)
	.ci/system-packages $(PYTHON) newcomer
	pytest -m newcomer tests/deploy/test_image_steps.py

.PHONY: test-pythons
test-pythons: build $(VENV)/.checked ## every module imported by the oldest and the newest Python that runs here
	.ci/pythons python

# EXTRAS="metrics otel": only these.
.PHONY: test-extras
test-extras: build ## each extra installed by itself, without constraints, and imported; torch may have 5 GB
	.ci/extras $(PYTHON) $(EXTRAS)

.PHONY: test-slow
test-slow: build $(VENV)/.checked ## Python tests that take minutes; none is fine
	pytest -m "slow and not netns and not softroce" || [ $$? -eq 5 ]

# SECONDS=3600: for so long. SEED=N: the same decisions as an earlier run; what the machine does with them differs.
SECONDS ?= 600
.PHONY: soak
soak: build ## owners and readers that are killed and stopped, every byte compared; ten minutes, not in CI
	PYTHONPATH=tests python -m soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# SEEDS="7 100-200": these of the control plane. SEEDS=random:1000: so many, which KVLINK_TEST_SEED decides where it is
# set. ENGINE_SEEDS=1000000: so many of the engine, behind those of the gate.
SEEDS ?= random:100
ENGINE_SEEDS ?= 100000
.PHONY: simulate
simulate: export PYTHONHASHSEED := 0
simulate: build ## control plane and engine in virtual time, under faults that seeds decide; the lease table on weak memory
	PYTHONPATH=tests python -m control_simulation $(SEEDS)
	$(call cpp-build,cpp,$(WITH_CORE),--target kvlink_simulation kvlink_memory_model)
	KVLINK_SIMULATION_FIRST=10001 KVLINK_SIMULATION_SEEDS=$(ENGINE_SEEDS) build/cpp/kvlink_simulation
	KVLINK_MODEL_LARGE=1 KVLINK_MODEL_ONLY=large build/cpp/kvlink_memory_model

# MODULE="lease stores": a sample of 100 of each, or "all", which takes a night; else 15 a module in lines that the branch
# changes. MUTATE="--seed 7 --sample 300 --each-kind": what `python -m mutation --help` lists.
.PHONY: mutate
mutate: export PYTHONHASHSEED := 0
mutate: build $(VENV)/.checked ## small changes of the code that tests of the gate must find
	PYTHONPATH=tests python -m mutation $(MODULE) $(MUTATE)

ENGINE ?= $(shell command -v docker || command -v podman || echo docker)
# podman's own format has no health check.
IMAGE_FORMAT = $(if $(findstring podman,$(ENGINE)),--format=docker)
.PHONY: image
image: ## the container image kvlink:VERSION, by docker or podman
	$(ENGINE) build $(IMAGE_FORMAT) --file integrations/deploy/image/Containerfile \
	  --tag kvlink:$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' kvlink/__init__.py) .

.PHONY: test-netns
test-netns: build $(VENV)/.checked ## several hosts in network namespaces (root)
	pytest -m netns

# RDMA_TESTS="tests/softroce/test_guest.py": only these. KVLINK_TEST_RDMA=mlx5_0: over that device, without a guest,
# where all is ten times slower.
.PHONY: test-rdma
test-rdma: export KVLINK_NICS ?= $(or $(KVLINK_TEST_RDMA),rxe0:1)
test-rdma: build $(VENV)/.checked ## verbs over soft-RoCE in a guest, or over the device KVLINK_TEST_RDMA
	run=; if [ -z "$(KVLINK_TEST_RDMA)" ] && .ci/system-packages $(PYTHON) rdma && tests/softroce/guest --prepare; \
	then run="tests/softroce/guest --"; fi; \
	if [ -n "$$run$(KVLINK_TEST_RDMA)" ]; then $$run tests/softroce/lane $(RDMA_TESTS); else pytest -m softroce; fi

# ENGINES=vllm: only this one. ENGINES_TESTS="tests/engines/test_vllm.py -k llama": only these tests.
ENGINES ?= vllm sglang transformers lmcache
.PHONY: test-engines
test-engines: build $(VENV)/.checked ## real inference servers, a router, faults: an hour and more, 24 GiB of memory
	for engine in $(ENGINES); do .ci/engines $$engine $(PYTHON); done
	$(if $(filter vllm,$(ENGINES)),.ci/vllm-source $(PYTHON))
	of=$(firstword $(filter-out lmcache,$(ENGINES))); \
	[ -z "$$of" ] || build/engines/$$of/bin/python tests/engines/models.py build/engines/models
	pytest -m engines $(ENGINES_TESTS)

.PHONY: wheel
wheel: build ## dist/kvlink-*.whl: a wheel for this machine, of what the build compiled
	.ci/wheel

.PHONY: test-wheel
test-wheel: build ## build a wheel, install it into a fresh environment, use it there
	.ci/test-wheel $(PYTHON)

.PHONY: docs
docs: build ## build/docs/index.html: the documentation as a site, warnings are errors; Python 3.11 or later
	$(PIP_INSTALL) --group docs
	sphinx-build -q -W --keep-going -b html docs build/docs

.PHONY: bench
bench: build $(VENV)/.checked peers ## build/bench/report.html: kvlink beside its limits and other libraries; 10 minutes
	mkdir -p build/bench
	kvlink bench control
	kvlink bench peers --seconds 0.5 --blocks 256 --json >build/bench/results.jsonl
	kvlink bench peers --seconds 0.5 --blocks 1 --block-bytes 16384 --json >>build/bench/results.jsonl
	kvlink bench peers --seconds 0.2 --suite benchmarks/workloads/bursts.json --json >>build/bench/results.jsonl
	kvlink bench plan --json >>build/bench/results.jsonl
	kvlink bench pull --json >>build/bench/results.jsonl
	kvlink bench migrate --tokens 256,4096 --beside cpu --json >>build/bench/results.jsonl
	-kvlink simulate --validate shm --json >>build/bench/results.jsonl
	kvlink simulate --requests 4000 --popular 0.02 --json >>build/bench/results.jsonl
	kvlink predict --calibrate build/bench/results.jsonl
	kvlink report build/bench/results.jsonl -o build/bench/report.html

.PHONY: test-instructions
test-instructions: build ## instructions of plan, post, settle and pulls, also from C, against the committed baseline; a minute
	.ci/system-packages $(PYTHON) instructions
	$(call cpp-build,cpp,$(WITH_CORE),--target kvlink_cost)
	python -m kvlink.benchmarks.instructions.gate

.PHONY: peers
peers: $(VENV)/.made ## build/peers/: other transfer libraries, each in its own environment, for kvlink bench peers
	.ci/peers $(PYTHON)

.PHONY: clean
clean: ## remove .venv/ and everything built
	rm -rf $(VENV) build dist kvlink/v1/*_pb2* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Everything from a fresh machine: `make demo`, `make test`; `make` lists the rest.
# Each step is done once and again only when what it depends on has changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The interpreter that .venv is made from: PYTHON=python3.12 make demo
PYTHON ?= python3
# Files of tests that run at the same time, each in a process of its own; one of
# them takes up to 4 GB. One more than two cores: some wait for other processes.
TEST_WORKERS ?= 3
# Files are units, and start in the order of tests/long_files.txt.
BY_FILES := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
FUZZ_SECONDS ?= 20
FUZZ_PARSER_SECONDS ?= $(FUZZ_SECONDS)

# `tensorflow-cpu` exists for x86-64 only; elsewhere `tensorflow` is the same.
TF_PACKAGE ?= $(if $(filter x86_64,$(shell uname -m)),tensorflow-cpu,tensorflow)
TF_MINOR := $(shell sed -n 's/^TENSORFLOW = "\(.*\)"$$/\1/p' \
    tf_layoutmap/_core/requirements.py)

# keras-hub, and what importing it takes.
HUB_PACKAGES := "keras-hub==0.32.*" regex tokenizers
# Models for tf_keras.
RECOMMENDER_PACKAGES := "tensorflow-recommenders==0.7.*" "deepctr==0.9.*"

VENV := .venv
# One interpreter for Bazel, setup.py and the tests, or Bazel would configure
# itself anew for each of them.
export PYTHON_BIN_PATH := $(CURDIR)/$(VENV)/bin/python
RUN := $(VENV)/bin/python
# setup.py writes this last.
BUILT := tf_layoutmap/_build_info.py
BAZEL ?= $(shell command -v bazel || command -v bazelisk || echo bazel)

NATIVE_SOURCES := $(shell find cc third_party -type f -not -name '*.md') \
    setup.py pyproject.toml WORKSPACE MODULE.bazel .bazelrc
CC_FILES = $(shell find cc -name '*.cc' -o -name '*.h')
BAZEL_FILES = BUILD WORKSPACE MODULE.bazel \
    $(shell find cc third_party -name BUILD -o -name '*.bzl')

.PHONY: help
help:  ## Lists the targets.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | \
	    awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

$(VENV)/.packages: setup.py pyproject.toml .ci/system_packages .ci/make_venv
	bash .ci/system_packages build
	bash .ci/make_venv $(VENV) $(PYTHON)
	$(RUN) -m pip install -q "$(TF_PACKAGE)==$(TF_MINOR).*" \
	    "setuptools>=66" wheel pybind11
	# Builds where it can be seen; pip, which shows nothing, finds it done.
	$(RUN) setup.py -q build_ext --inplace
	# In compat mode editors and type checkers resolve the package.
	$(RUN) -m pip install -q --no-build-isolation \
	    --config-settings editable_mode=compat \
	    -e '.[$(TF_PACKAGE),datasets,develop]'
	# Only tested where it is; it would pull `tensorflow` over tensorflow-cpu.
	$(RUN) -m pip install -q --no-deps "tf_keras==$(TF_MINOR).*"
	# Models of others, for tests/real: what they require would pull `tensorflow`, too.
	$(RUN) -m pip install -q --no-deps $(HUB_PACKAGES) \
	    $(RECOMMENDER_PACKAGES)
	touch $@

$(BUILT): $(VENV)/.packages $(NATIVE_SOURCES)
	$(RUN) setup.py -q build_ext --inplace
	touch $@

.PHONY: build
build: $(BUILT)  ## Builds the native parts with Bazel, into tf_layoutmap/.

.PHONY: demo
demo: build  ## Trains, saves and serves a model; DEMO_FLAGS=--fresh for a new one.
	$(RUN) examples/next_identifier.py $(DEMO_FLAGS)

.PHONY: check
check: build  ## Runs the quick Python tests: the daily loop.
	$(RUN) -m pytest $(BY_FILES) -m "not slow" $(PYTEST_FLAGS)

.PHONY: test
test: build  ## Runs all tests, C++ and Python.
	bash .ci/system_packages test
	$(BAZEL) test //cc/...
	$(RUN) -m pytest $(BY_FILES) $(PYTEST_FLAGS)

.PHONY: real
real: build  ## Runs other people's models and programs on a mesh and without one.
	mkdir -p build
	$(RUN) -m tests.real --json build/real.json $(REAL_FLAGS)

.PHONY: bench
bench: build  ## Measures against TensorFlow's own ops and the machine's roof.
	$(BAZEL) build //cc/benchmarks:roof
	$(RUN) -m benchmarks $(BENCH_FLAGS)

# FBGEMM's tables on the CPU, for a comparison; no TensorFlow is beside them.
PEERS := build/peers
PEER_PACKAGES := torch==2.13.0 fbgemm-gpu-cpu==1.8.0 numpy

$(PEERS)/.packages:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q $(PEER_PACKAGES)
	touch $@

.PHONY: bench-peers
bench-peers: build $(PEERS)/.packages  ## Measures tables against FBGEMM, in a venv of its own.
	$(BAZEL) build //cc/benchmarks:roof
	$(RUN) -m benchmarks embedding_step \
	    --fbgemm_python=$(CURDIR)/$(PEERS)/bin/python \
	    --json=build/peers.json --picture=build/peers.svg $(BENCH_FLAGS)

.PHONY: bench-cluster
bench-cluster: build  ## Measures steps over parameter servers, and what they send.
	$(RUN) -m benchmarks cluster --json=build/cluster.json $(BENCH_FLAGS)

# The package is installed, so this brings what its extra asks for and no more.
$(VENV)/.docs_packages: $(VENV)/.packages
	$(RUN) -m pip install -q 'tf_layoutmap[docs]'
	touch $@

.PHONY: docs
docs: build $(VENV)/.docs_packages  ## Builds the documentation into site/.
	rm -rf site
	$(RUN) -m sphinx --fresh-env --fail-on-warning --keep-going --quiet \
	    docs site
	@echo "Open site/index.html in a browser."

.PHONY: wheel
wheel: build  ## Makes a manylinux wheel in wheelhouse/.
	bash .ci/wheel $(RUN)

.PHONY: wheels
wheels: build  ## Makes and tries a wheel for each Python 3.11 to 3.13 that is found.
	bash .ci/wheels $(TF_PACKAGE) $(TF_MINOR)

.PHONY: debian13
debian13:  ## Builds, tests and runs the demo in a Debian 13 chroot; needs root.
	bash .ci/debian13

.PHONY: asan
asan:  ## Runs the C++ tests under AddressSanitizer and UBSan.
	bash .ci/system_packages build test
	$(BAZEL) test --config=asan //cc/core/... //cc/emulation:all

.PHONY: asan-ops
asan-ops: build  ## Runs the op tests over an ASan-built core inside TensorFlow.
	bash .ci/asan_ops $(RUN) $(BAZEL) $(BY_FILES) -m "not slow" \
	    tests/kernels tests/embedding

.PHONY: tsan
tsan:  ## Runs the C++ tests under ThreadSanitizer.
	bash .ci/system_packages build test
	$(BAZEL) test --config=tsan //cc/core/... //cc/emulation:all

.PHONY: fuzz
fuzz:  ## Runs each fuzz target for FUZZ_SECONDS (20), parsers for FUZZ_PARSER_SECONDS.
	bash .ci/system_packages build fuzz
	bash .ci/fuzz $(BAZEL) $(FUZZ_SECONDS) $(FUZZ_PARSER_SECONDS)

.PHONY: lint
lint: $(VENV)/.packages .tools/buildifier  ## Checks Python, its types, C++ and BUILD files.
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	# Else it would ask for a newer version of itself.
	env PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(RUN) -m pyright
	$(VENV)/bin/clang-format --dry-run -Werror $(CC_FILES)
	.tools/buildifier -mode=check -lint=warn $(BAZEL_FILES)

.PHONY: format
format: $(VENV)/.packages .tools/buildifier  ## Lays out C++ and BUILD files as lint wants them.
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i $(CC_FILES)
	.tools/buildifier -mode=fix $(BAZEL_FILES)

.tools/buildifier: .ci/system_packages
	bash .ci/system_packages npm
	mkdir -p .tools
	npm install --silent --no-audit --no-fund --prefix .tools \
	    @bazel/buildifier
	ln -sf node_modules/.bin/buildifier $@

.PHONY: clean
clean:  ## Removes what was built; .venv stays (rm -r .venv for that).
	-$(BAZEL) clean
	rm -rf build dist wheelhouse site .tools/fuzz-* tf_layoutmap/*.so \
	    $(BUILT)

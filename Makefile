# Installs the required packages, builds the project, and runs tests and checks.
# `make` without arguments lists all targets. A step runs again only if one of
# its dependencies has changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The Python interpreter that creates .venv. To use another interpreter, set the
# variable, for example: PYTHON=python3.12 make demo
PYTHON ?= python3
# Number of test files that run at the same time. Each test file runs in a
# separate process that uses up to 4 GB of memory. The default of 3 is suitable
# for two cores, because some tests only wait for other processes.
TEST_WORKERS ?= 3
# pytest distributes the tests by file. The files start in the order of
# tests/long_files.txt.
BY_FILES := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
FUZZ_SECONDS ?= 20
FUZZ_PARSER_SECONDS ?= $(FUZZ_SECONDS)

# The package `tensorflow-cpu` exists only for x86-64. On other machines, the
# package `tensorflow` is equivalent.
TF_PACKAGE ?= $(if $(filter x86_64,$(HOST_ARCH)),tensorflow-cpu,tensorflow)
# The minor versions of TensorFlow that the source supports. `make test TF=2.20`
# uses one of them, and the default is the newest.
TF_VERSIONS := $(shell sed -n 's/^TENSORFLOW = (\(.*\))$$/\1/p' \
    tf_layoutmap/_core/requirements.py | tr -d '",')
TF_NEWEST := $(lastword $(TF_VERSIONS))
TF ?= $(TF_NEWEST)
ifeq ($(filter $(TF),$(TF_VERSIONS)),)
$(error TF must be one of $(TF_VERSIONS). Received: TF=$(TF))
endif

# The package keras-hub, and the packages that it imports.
HUB_PACKAGES := "keras-hub==0.32.*" regex tokenizers
# Packages that contain models for tf_keras.
RECOMMENDER_PACKAGES := "tensorflow-recommenders==0.7.*" "deepctr==0.9.*"

# The architecture of the wheel. `make wheel ARCH=aarch64` builds on x86-64.
HOST_ARCH := $(shell uname -m)
ARCH ?= $(HOST_ARCH)
ifeq ($(filter $(ARCH),$(HOST_ARCH) $(if $(filter x86_64,$(HOST_ARCH)),aarch64)),)
$(error ARCH must be $(HOST_ARCH), or aarch64 on x86_64. Received: ARCH=$(ARCH))
endif

# Each version of TensorFlow has its own environment. The last build has written
# the libraries in tf_layoutmap/.
VENV := .venv$(if $(filter-out $(TF_NEWEST),$(TF)),-$(TF))
BAZEL_OPTIONS := $(if $(filter-out $(TF_NEWEST),$(TF)),--config=tf$(TF))
AARCH64_CONFIG := aarch64$(if $(filter-out $(TF_NEWEST),$(TF)),-tf$(TF))
# Bazel, setup.py and the tests must use the same interpreter. Otherwise, Bazel
# would configure the build again each time the interpreter changes.
export PYTHON_BIN_PATH := $(CURDIR)/$(VENV)/bin/python
RUN := $(VENV)/bin/python
# setup.py writes this file after all other files of the build.
BUILT := tf_layoutmap/_build_info.py
# If the last build was for another version of TensorFlow, the build runs again.
ifneq ($(filter-out $(TF),$(shell sed -n \
    's/^TF_VERSION = "\([0-9]*\.[0-9]*\).*/\1/p' $(BUILT) 2>/dev/null)),)
.PHONY: $(BUILT)
endif
BAZEL ?= $(shell command -v bazel || command -v bazelisk || echo bazel)

NATIVE_SOURCES := $(shell find cc third_party -type f -not -name '*.md') \
    setup.py pyproject.toml WORKSPACE MODULE.bazel .bazelrc
CC_FILES = $(shell find cc -name '*.cc' -o -name '*.h')
BAZEL_FILES = BUILD WORKSPACE MODULE.bazel \
    $(shell find cc third_party -name BUILD -o -name '*.bzl')

.PHONY: help
help:  ## Lists the targets of this Makefile.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | \
	    awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

# Installs the packages that the build and the demo require.
$(VENV)/.packages: setup.py pyproject.toml .ci/system_packages .ci/make_venv
	bash .ci/system_packages build
	bash .ci/make_venv $(VENV) $(PYTHON)
	$(RUN) -m pip install -q "$(TF_PACKAGE)==$(TF).*" \
	    "setuptools>=66" wheel pybind11
	# The build runs before pip, because pip does not show the output of a build.
	# pip then reuses the result.
	$(RUN) setup.py -q build_ext --inplace
	# Editors and type checkers can find the package only in compat mode.
	$(RUN) -m pip install -q --no-build-isolation \
	    --config-settings editable_mode=compat -e '.[$(TF_PACKAGE)]'
	touch $@

# Installs the packages that the tests and checks require. tf_layoutmap is
# already installed, so pip installs only the packages of the extras.
$(VENV)/.develop: $(VENV)/.packages
	$(RUN) -m pip install -q 'tf_layoutmap[datasets,develop]'
	# Only tests require tf_keras. It is installed without its dependencies,
	# because they would install `tensorflow` over tensorflow-cpu.
	$(RUN) -m pip install -q --no-deps "tf_keras==$(TF).*"
	# tests/real requires these packages. Their dependencies would also install
	# `tensorflow`.
	$(RUN) -m pip install -q --no-deps $(HUB_PACKAGES) \
	    $(RECOMMENDER_PACKAGES)
	touch $@

$(BUILT): $(VENV)/.packages $(NATIVE_SOURCES)
	$(RUN) setup.py -q build_ext --inplace
	touch $@

.PHONY: build
build: $(BUILT)  ## Builds the native code with Bazel into tf_layoutmap/.

.PHONY: demo
demo: build  ## Trains, saves and serves a model; DEMO_FLAGS=--fresh starts a new one.
	$(RUN) examples/next_identifier.py $(DEMO_FLAGS)

.PHONY: check
check: build $(VENV)/.develop  ## Runs the fast Python tests.
	$(RUN) -m pytest $(BY_FILES) -m "not slow and not exhaustive" \
	    $(PYTEST_FLAGS)

.PHONY: test
test: cc-test $(VENV)/.develop  ## Runs the C++ tests, and the Python tests that are not exhaustive.
	$(RUN) -m pytest $(BY_FILES) -m "not exhaustive" $(PYTEST_FLAGS)

.PHONY: test-all
test-all: cc-test $(VENV)/.develop  ## Runs all tests, C++ and Python.
	$(RUN) -m pytest $(BY_FILES) $(PYTEST_FLAGS)

.PHONY: cc-test
cc-test: build
	bash .ci/system_packages test
	$(BAZEL) test $(BAZEL_OPTIONS) //cc/...

# Without TF=..., these targets use each version of TensorFlow. Each pair of
# versions writes its row of docs/versions.md.
EACH_TF := $(if $(findstring file,$(origin TF)),$(TF_VERSIONS),$(TF))
.PHONY: versions
versions:  ## Runs fast tests with each TensorFlow and Keras; writes the table of docs/versions.md.
	for tf in $(EACH_TF); do \
	    $(MAKE) TF=$$tf TESTS_OF_VERSIONS="run $(VERSIONS_FLAGS)" versions-of-tf; \
	done

# All versions save models, and then all versions load them.
.PHONY: acceptance
acceptance:  ## Runs first programs and exchanges saved models between all versions.
	rm -rf build/versions/files
	for step in write read; do for tf in $(EACH_TF); do \
	    $(MAKE) TF=$$tf TESTS_OF_VERSIONS="accept $$step" versions-of-tf; \
	done; done

# tensorflow-tpu has only one supported version.
TF_TPU := $(shell sed -n 's/^TENSORFLOW_TPU = "\(.*\)"$$/\1/p' \
    tf_layoutmap/_core/requirements.py)
.PHONY: test-tensorflow-tpu
test-tensorflow-tpu:  ## Runs the self-check and fast tests with tensorflow-tpu, without a TPU.
	$(MAKE) TF=$(TF_TPU) TESTS_OF_VERSIONS=tensorflow_tpu versions-of-tf

.PHONY: versions-of-tf
versions-of-tf: build $(VENV)/.develop
	$(RUN) -m tests.versions $(TESTS_OF_VERSIONS)

# Time limit of `make test-rest`. Reaching the limit is not an error.
EXHAUSTIVE_SECONDS ?= 1800
.PHONY: test-rest
test-rest: build $(VENV)/.develop  ## Runs the exhaustive cases for at most EXHAUSTIVE_SECONDS.
	bash .ci/exhaustive $(EXHAUSTIVE_SECONDS) \
	    $(RUN) -m pytest $(BY_FILES) -m exhaustive $(PYTEST_FLAGS)

# Folders whose tests run with one device of type GPU, and with four.
GPU_TESTS := tests/embedding tests/layers tests/sharded tests/vocabulary \
    tests/serving tests/deltas tests/gradients tests/training \
    tests/kernels tests/dtensor tests/freed tests/planning tests/*.py
GPU_MESH_TESTS := tests/layout tests/distribution
FAKE_GPU = TF_LAYOUTMAP_FAKE_GPU_LIBRARY="$$($(BAZEL) info $(BAZEL_OPTIONS) bazel-bin)/cc/testing/fake_gpu.so"
.PHONY: test-gpu
test-gpu: build $(VENV)/.develop  ## Runs the fast tests with devices that TensorFlow takes for GPUs.
	$(BAZEL) build $(BAZEL_OPTIONS) //cc/testing:fake_gpu.so
	$(FAKE_GPU) TF_LAYOUTMAP_FAKE_GPUS=1 $(RUN) -m pytest $(BY_FILES) \
	    -m "not slow and not exhaustive" $(GPU_TESTS) $(PYTEST_FLAGS)
	$(FAKE_GPU) TF_LAYOUTMAP_FAKE_GPUS=4 $(RUN) -m pytest $(BY_FILES) \
	    -m "not slow and not exhaustive" $(GPU_MESH_TESTS) $(PYTEST_FLAGS)
	$(RUN) -m pytest -m "" tests/accelerators/test_examples.py $(PYTEST_FLAGS)
	for gpus in 1 4; do \
	    $(FAKE_GPU) TF_LAYOUTMAP_FAKE_GPUS=$$gpus $(RUN) -m pytest -m "" \
	        tests/docs/test_snippets.py $(PYTEST_FLAGS); \
	done

# JAX and the newest libtpu compile for TPUs without a TPU. They are in an
# environment without TensorFlow, which cannot import this libtpu.
TPU_COMPILE := build/tpu_compile
TPU_COMPILE_PACKAGES := jax==0.10.2 libtpu==0.0.52

$(TPU_COMPILE)/.packages: Makefile
	$(PYTHON) -m venv $(TPU_COMPILE)
	$(TPU_COMPILE)/bin/python -m pip install -q $(TPU_COMPILE_PACKAGES)
	touch $@

# The ops of SparseCores have XLA kernels only in tensorflow-tpu, which requires
# another version of TensorFlow and an older libtpu.
TPU_LOWERING := build/tpu_lowering
TPU_LOWERING_PACKAGES := "tensorflow-tpu==$(TF_TPU).*" libtpu==0.0.24

$(TPU_LOWERING)/.packages: Makefile
	$(PYTHON) -m venv $(TPU_LOWERING)
	$(TPU_LOWERING)/bin/python -m pip install -q $(TPU_LOWERING_PACKAGES)
	touch $@

.PHONY: tpu-compile
tpu-compile: build $(VENV)/.develop $(TPU_COMPILE)/.packages $(TPU_LOWERING)/.packages  ## Compiles models for TPUs without a TPU; writes docs/tpu_compilation.md.
	$(RUN) -m tests.accelerators.tpu_compiler \
	    --jax_python=$(CURDIR)/$(TPU_COMPILE)/bin/python \
	    --tensorflow_tpu_python=$(CURDIR)/$(TPU_LOWERING)/bin/python

.PHONY: real
real: build $(VENV)/.develop  ## Runs third-party models and programs with and without a mesh.
	mkdir -p build
	$(RUN) -m tests.real --json build/real.json $(REAL_FLAGS)

.PHONY: bench
bench: build $(VENV)/.develop  ## Measures speed against TensorFlow's own ops and the machine's limit.
	$(BAZEL) build $(BAZEL_OPTIONS) //cc/benchmarks:roof
	$(RUN) -m benchmarks $(BENCH_FLAGS)

# FBGEMM's tables on the CPU and torch.nn.EmbeddingBag are measured for
# comparison. They run in a separate environment without TensorFlow.
PEERS := build/peers
PEER_PACKAGES := torch==2.13.0 fbgemm-gpu-cpu==1.8.0 numpy

$(PEERS)/.packages:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q $(PEER_PACKAGES)
	touch $@

# JAX trains a decoder on a mesh for comparison, also without TensorFlow.
PEERS_JAX := build/peers_jax
PEERS_JAX_PACKAGES := jax==0.10.2 keras==3.15.1 grain==0.2.18 kagglehub \
    sentencepiece

$(PEERS_JAX)/.packages:
	$(PYTHON) -m venv $(PEERS_JAX)
	$(PEERS_JAX)/bin/python -m pip install -q $(PEERS_JAX_PACKAGES)
	# The dependencies of keras-hub contain TensorFlow.
	$(PEERS_JAX)/bin/python -m pip install -q --no-deps $(HUB_PACKAGES)
	touch $@

.PHONY: bench-peers
bench-peers: build $(VENV)/.develop $(PEERS)/.packages bench-mesh  ## Measures tables and DLRM against torch, and models on a mesh against JAX.
	$(BAZEL) build $(BAZEL_OPTIONS) //cc/benchmarks:roof
	$(RUN) -m benchmarks embedding_step \
	    --torch_python=$(CURDIR)/$(PEERS)/bin/python \
	    --json=build/peers.json --picture=build/peers.svg $(BENCH_FLAGS)
	$(RUN) -m benchmarks criteo_dlrm \
	    --torch_python=$(CURDIR)/$(PEERS)/bin/python \
	    --json=build/peers_dlrm.json $(BENCH_FLAGS)
	$(RUN) -m benchmarks serving --distributions=uniform \
	    --torch_python=$(CURDIR)/$(PEERS)/bin/python \
	    --json=build/peers_serving.json $(BENCH_FLAGS)

.PHONY: bench-growth
bench-growth: build $(VENV)/.develop  ## Draws the growth of times and memory with the sizes of tables.
	$(BAZEL) build $(BAZEL_OPTIONS) //cc/benchmarks:roof
	$(RUN) -m benchmarks growth --distributions=uniform \
	    --growth_pictures=build --json=build/growth.json $(BENCH_FLAGS)

.PHONY: bench-mesh
bench-mesh: build $(VENV)/.develop $(PEERS_JAX)/.packages  ## Measures models on a mesh against JAX, in a separate venv.
	$(RUN) -m benchmarks mesh_models --distributions=uniform --rounds=5 \
	    --jax_python=$(CURDIR)/$(PEERS_JAX)/bin/python \
	    --json=build/peers_mesh.json $(MESH_FLAGS)

.PHONY: bench-cluster
bench-cluster: build $(VENV)/.develop  ## Measures steps over parameter servers, and the bytes that they send.
	$(RUN) -m benchmarks cluster --json=build/cluster.json $(BENCH_FLAGS)

.PHONY: bench-plan
bench-plan: build $(VENV)/.develop  ## Compares predicted and measured step times of plans.
	$(RUN) -m benchmarks.plans.own_maps $(OWN_MAPS_FLAGS)
	$(RUN) -m benchmarks.plans.mesh $(BENCH_FLAGS)
	TF_NUM_INTRAOP_THREADS=1 $(RUN) -m tf_layoutmap.local_cluster --ps 2 \
	    --workers 1 -- $(RUN) -m benchmarks.plans.servers $(BENCH_FLAGS)

# tf_layoutmap is already installed, so this command installs only the packages
# of the extra.
$(VENV)/.docs_packages: $(VENV)/.develop
	$(RUN) -m pip install -q 'tf_layoutmap[docs]'
	touch $@

.PHONY: docs
docs: build $(VENV)/.docs_packages  ## Builds the documentation into site/, and checks its pages in a browser.
	rm -rf site jupyter_execute
	$(RUN) -m sphinx --fresh-env --fail-on-warning --keep-going --quiet \
	    docs site
	$(RUN) -m tools.page_widths site
	@echo "Open site/index.html in a browser."

# A wheel for another architecture contains no files of the build for this one.
ifeq ($(ARCH),$(HOST_ARCH))
.PHONY: wheel
wheel: build $(VENV)/.develop  ## Builds a manylinux wheel in wheelhouse/; TF=2.20 and ARCH=aarch64 select others.
	bash .ci/wheel $(RUN) $(TF)
else
wheel: $(ARCH)-wheel
endif

# An environment for aarch64, whose TensorFlow the build uses.
AARCH64 := .tools/aarch64/$(TF)
AARCH64_BUILD = TF_LAYOUTMAP_ARCH=aarch64 TF_LAYOUTMAP_BUILD_PACKAGES="$$(echo \
    $(CURDIR)/$(AARCH64)/lib/python*/site-packages)"
$(AARCH64)/.packages: $(VENV)/.develop .ci/aarch64_packages
	bash .ci/aarch64_packages $(RUN) $(TF) $(AARCH64)
	touch $@

.PHONY: aarch64-wheel
aarch64-wheel: $(AARCH64)/.packages
	bash .ci/system_packages aarch64
	$(AARCH64_BUILD) bash .ci/wheel $(RUN) $(TF)

.PHONY: test-aarch64
test-aarch64: aarch64-wheel build  ## Tests a wheel for aarch64 with QEMU; requires root.
	bash .ci/system_packages test aarch64 emulator
	$(AARCH64_BUILD) bash .ci/test_aarch64 $(RUN) $(TF) $(AARCH64) \
	    $(BAZEL) --config=$(AARCH64_CONFIG)

.PHONY: wheels
wheels: build  ## Builds and tests a wheel for each TensorFlow and installed Python.
	bash .ci/wheels $(TF_PACKAGE) $(TF_VERSIONS)

.PHONY: debian13
debian13:  ## Builds, tests and runs the demo in a Debian 13 chroot; requires root.
	bash .ci/debian13

.PHONY: asan
asan:  ## Runs the C++ tests under AddressSanitizer and UBSan.
	bash .ci/system_packages build test
	$(BAZEL) test --config=asan //cc/core/... //cc/emulation:all

.PHONY: asan-ops
asan-ops: build $(VENV)/.develop  ## Runs the op tests with an ASan build of the core inside TensorFlow.
	bash .ci/asan_ops $(RUN) $(BAZEL) $(BY_FILES) \
	    -m "not slow and not exhaustive" tests/kernels tests/embedding tests/deltas

.PHONY: tsan
tsan:  ## Runs the C++ tests under ThreadSanitizer.
	bash .ci/system_packages build test
	$(BAZEL) test --config=tsan //cc/core/... //cc/emulation:all

.PHONY: fuzz
fuzz:  ## Runs each fuzz target for FUZZ_SECONDS (20), parsers for FUZZ_PARSER_SECONDS.
	bash .ci/system_packages build fuzz
	bash .ci/fuzz $(BAZEL) $(FUZZ_SECONDS) $(FUZZ_PARSER_SECONDS)

.PHONY: lint
lint: $(VENV)/.develop .tools/buildifier  ## Checks Python, its types, C++ and BUILD files.
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	# Without this variable, pyright warns if a newer version of pyright exists.
	env PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(RUN) -m pyright
	$(VENV)/bin/clang-format --dry-run -Werror $(CC_FILES)
	.tools/buildifier -mode=check -lint=warn $(BAZEL_FILES)

.PHONY: format
format: $(VENV)/.develop .tools/buildifier  ## Formats Python, C++ and BUILD files as `make lint` requires.
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
clean:  ## Removes build outputs but not .venv (remove it with rm -r .venv).
	-$(BAZEL) clean
	rm -rf build dist wheelhouse site jupyter_execute .tools/fuzz-* .tools/tf2.* .tools/aarch64-* tf_layoutmap/*.so \
	    $(BUILT)

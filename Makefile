# Everything a fresh machine needs is Python 3.10 to 3.13, a C++17 compiler and make.
# The targets make .venv themselves, once; it is renewed when one of the files it was made from changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Twice quiet: no progress and no warnings, errors only.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
NATIVE_SOURCES := $(shell find csrc -name '*.cc' -o -name '*.h')
SANITIZED := build/sanitize/lib

.DEFAULT_GOAL := help
FUZZ_SECONDS ?= 600
.PHONY: help venv build lint format test test-slow test-base test-megatron test-trainers test-media test-ray test-browser test-cloud test-gpu sanitize fuzz bench wheels demo clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/installed  ## the package and everything its tests need, in .venv

build: $(VENV)/built  ## venv, with the native extension built from the sources as they are now

lint: $(VENV)/built  ## ruff, mypy, and a list of words to avoid
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/python tests/prose.py

format: $(VENV)/built  ## let ruff rewrite the sources
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format .

# Two processes, each with whole files, because modules share what is slow to make. More would not fit where memory
# is small: some tests start separate processes, and most of those import torch. One thread of torch's in each, as
# both cores are taken; and files in their own order, since those with few tests, which go last else, are among the longest.
# Bytecode is written even where the environment says otherwise: hundreds of processes would compile the package again.
test: $(VENV)/built  ## the test suite, or with TESTS="tests/chat tests/check" some of its folders; names what it skips at the end
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(TESTS)

test-slow: $(VENV)/built  ## the longer checks that test leaves out, and whole what it takes a sample of
	@$(BIN)/python -m pytest -m '(slow or sample or examples) and not cloud'
	@$(BIN)/python tests/matrix.py base
	@$(BIN)/python tests/matrix.py megatron

test-base: $(VENV)/built  ## all tests where neither Megatron nor any other extra is installed, in .venv-base
	@$(BIN)/python tests/matrix.py base

# One environment for each Python, .venv-megatron-3.X, but that of .venv where it lacks nothing: each takes 5 GB with a torch for CUDA.
test-megatron: $(VENV)/built  ## faces, training and live data against each Python found here and its Megatron
	@$(BIN)/python tests/matrix.py megatron

# One environment for each trainer, .venv-trainer-*, of Python 3.11: some 2 GB each.
test-trainers: $(VENV)/built  ## verl, NeMo Automodel, LLaMA-Factory, torchtitan and TRL: what each trains on, by its own code
	@$(BIN)/python tests/matrix.py trainers

# One environment, .venv-media-3.12, which takes 5 GB with a torch for CUDA.
test-media: $(VENV)/built  ## Qwen-VL and other models with images and audio against packs, by torchvision, on Python 3.12
	@$(BIN)/python tests/matrix.py media

test-ray: $(VENV)/built  ## preprocess --engine ray on clusters of several nodes on this machine, killed and not; installs Ray
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[test,ray]'
	@$(BIN)/python -m pytest -m 'slow or not slow' tests/tokenize/test_ray_engine.py tests/project/test_readme_ray.py tests/slow/test_ray_scale.py

test-browser: $(VENV)/built  ## the inspector's page in Chromium, from Debian's package where there is none; screenshots in build/
	@command -v chromium >/dev/null || apt-get install -qq -y --no-install-recommends chromium >/dev/null || \
	{ echo "make test-browser needs chromium in the PATH: install it with your system's package manager"; exit 1; }
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[browser]'
	@mkdir -p build/screenshots
	@SFT_IDX_BROWSER=1 $(BIN)/python -m pytest -m browser tests/browser

# OpenStack Swift gets a separate environment, .venv-swift, once.
test-cloud: $(VENV)/built  ## the checks against a real object store, which they start on this machine
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[test,cloud]'
	@$(BIN)/python -m pytest -m cloud

# Transformer Engine is built for the installed torch and CUDA. If that fails, the checks that need it are skipped.
test-gpu: $(VENV)/built  ## the checks that need a GPU, as a table: Transformer Engine, NCCL, transfers; without one, the skipped checks
	@if command -v nvidia-smi >/dev/null && ! $(BIN)/python -c 'import transformer_engine' 2>/dev/null; then \
	$(PIP) install --no-build-isolation 'transformer-engine[pytorch]' || echo "Transformer Engine cannot be installed here"; fi
	@$(BIN)/python -W ignore tests/gpu/checks.py

# pytest is called as a script, not as a module, so that the working folder with its plain build of the
# extension stays off sys.path; tests/native then checks that what it imported is the sanitized one.
# Capturing Python's output only lets the sanitizer's report reach the terminal. Leaks are not looked for: the interpreter keeps memory until it ends. libstdc++ is loaded up front because
# the sanitizer must find the C++ throw that it wraps.
sanitize: $(VENV)/built  ## the native kernels' tests under the address and undefined-behaviour sanitizers
	@SFT_IDX_SANITIZE=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python setup.py --quiet build --build-base build/sanitize --build-lib $(SANITIZED)
	@SFT_IDX_NATIVE_FOLDER=$(SANITIZED) PYTHONPATH=$(SANITIZED) PYTHONMALLOC=malloc \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	$(BIN)/pytest -v --capture=sys tests/native

# atheris has wheels for Linux on x86-64 only; elsewhere pip would look for a clang with libFuzzer to build it.
fuzz: $(VENV)/built  ## every parser against mutated input, FUZZ_SECONDS (600) a target; FUZZ_TARGETS="building rows" for some
	@$(PIP) install --constraint constraints.txt --only-binary atheris --no-build-isolation --editable '.[fuzz]' || \
	{ echo "make fuzz needs atheris, which has wheels for Linux on x86-64 and Python 3.10 to 3.12 only;" \
	"make test replays the corpus anywhere"; exit 1; }
	@$(BIN)/python tests/fuzz/driver.py --seconds $(FUZZ_SECONDS) $(FUZZ_TARGETS)

# mosaicml-streaming would install torchvision and the clients of five clouds, and reading local files needs none of them.
# The extra has its other dependencies.
bench: $(VENV)/built  ## the board, in under 20 minutes: everything compared with its peers, tools/bench/RESULTS.md; BENCHES="shard merge" for some
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[bench]'
	@$(PIP) install --constraint constraints.txt --no-deps mosaicml-streaming
	@$(BIN)/python tools/bench/board.py $(if $(BENCHES),--only $(BENCHES))

wheels: $(VENV)/built  ## dist/: a source distribution, and a wheel for each Python found here, tried in a fresh environment
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[wheels]'
	@$(BIN)/python tests/matrix.py wheels

demo: $(VENV)/native  ## pack bundled chats into a shard in demo-out, verify and read it, write a page to look at
	@$(BIN)/python tools/demo/run.py

clean:  ## remove everything the targets made, .venv included
	rm -rf $(VENV) .venv-base .venv-megatron-* .venv-trainer-* .venv-media-* .venv-swift .venv-swift.lock build dist demo-out *.egg-info megatron_sft_idx/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The dependencies of the package. pip installs it in editable mode, which compiles the C++ kernels too.
$(VENV)/base: pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 13) or sys.exit( \
	"$(PYTHON) is Python %d.%d; 3.10 to 3.13 is needed: make PYTHON=python3.11 ..." % v)'
	@echo "1 of 2: make the environment $(VENV) and install build tools"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --constraint constraints.txt setuptools pybind11
	@echo "2 of 2: install the package: download what it needs, 60 MB, and compile its C++ kernels, a minute on 2 cores"
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable .
	@touch $@

$(VENV)/native: $(VENV)/base $(NATIVE_SOURCES)
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# mistral-common is a peer in tests; it asks for an older numpy, which it does not need.
$(VENV)/installed: $(VENV)/base
	@echo "install what the tests need, torch and Megatron among it: 1.7 GB, a few minutes the first time"
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[test]'
	@$(PIP) install --constraint constraints.txt --no-deps mistral-common pillow pycountry pydantic-extra-types
	@touch $@

$(VENV)/built: $(VENV)/installed $(VENV)/native
	@touch $@

# Every path here is relative: make cannot handle a checkout whose folder has a space in its name otherwise.
# Tools are called as `python -m`, because scripts in .venv/bin may not start from such a folder.
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install
TOOLS_PATH := PATH="$$PWD/.venv/bin:$$PATH"
CMAKE := $(TOOLS_PATH) $(PY) -m cmake
CTEST := $(PY) -c "import cmake; cmake.ctest()"
CLANG_FORMAT := $(PY) -c "import clang_format; clang_format.clang_format()"
# The thread sanitizer of older compilers cannot start under strong address randomisation.
FIXED_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)

# Folders are listed too, so that a file taken away also counts as a change.
SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE \
	$(shell find core src \( -type d ! -name __pycache__ \) -o -name '*.cc' -o -name '*.h' -o -name '*.py' -o -name '*.pyi' -o -name py.typed)
CXX_FILES = $(shell find core tests/core -name '*.h' -o -name '*.cc')
# Prints what pyproject.toml asks for under the extras named; Python 3.10 has no tomllib, but the one in pip.
REQUIREMENTS := import sys; toml = "tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli"; \
	p = __import__(toml, fromlist=["load"]).load(open("pyproject.toml", "rb")); \
	print(*p["build-system"]["requires"], "cmake>=3.20", "ninja", sep="\n"); \
	[print(*p["project"]["optional-dependencies"][extra], sep="\n") for extra in sys.argv[1:]]

.PHONY: arm coverage docs links stubs tidy wheel wheel-test injected fuzz help demo test test-slow bench clients conformance mutation faults soak lint format core-test sanitize sanitize-python install clean
.DELETE_ON_ERROR:

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

demo: .venv/package.done  ## set everything up, then show two ranks at work
	$(PY) -m unisono.demo $(ARGS)

test: .venv/package.done  ## set everything up, then run all tests but the slow ones
	$(PY) -m pytest $(ARGS)

test-slow: .venv/package.done  ## run the tests marked slow
	$(PY) -m pytest -m slow $(ARGS)

bench: .venv/package.done  ## measure, and print ratios
	$(PY) -m unisono.cli bench $(ARGS)

conformance: .venv/package.done  ## torch's own distributed tests on unisono and on gloo, and every difference
	$(PY) -m tests.conformance.run $(ARGS)

clients: .venv/package.done  ## libraries from PyPI on gloo and on unisono, compared, into docs/clients.md (40 minutes the first time)
	$(PY) -m tests.clients.run $(ARGS)

mutation: .venv/package.done  ## break the torch backend in many ways, one at a time: the tests must notice each
	$(PY) -m tests.mutation.run $(ARGS)

faults: .venv/package.done  ## inject every fault of the matrix, and write docs/faults.md (about a quarter of an hour)
	$(PY) -m tests.faults.page $(ARGS)

SECONDS ?= 600
SEED ?=
soak: .venv/package.done  ## random calls, kills and restarts for SECONDS, every result checked; SEED replays
	$(PY) -m tests.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

lint: .venv/tools.done  ## check style and types; changes nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(if $(CXX_FILES),$(CLANG_FORMAT) --dry-run -Werror $(CXX_FILES))

format: .venv/tools.done  ## put all files into the common style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(if $(CXX_FILES),$(CLANG_FORMAT) -i $(CXX_FILES))

stubs: .venv/package.done  ## are the stubs of the C++ modules what the modules have?
	$(PY) -m tests.typing.stubs

# Not the analyzer on the kernels: their templates have hundreds of instances, which it takes hours for.
TIDY := clang-tidy -p build/tidy --quiet --warnings-as-errors='*'
TIDY_FILES = $(filter-out core/python/% %/module.cc,$(filter core/%.cc,$(CXX_FILES)))
tidy: .venv/tools.done  ## clang-tidy on the core, with the checks of .clang-tidy (ten minutes or so)
	$(PIP) -q clang-tidy==20.1.0
	$(CMAKE) -S . -B build/tidy -G Ninja -DUNISONO_MODULE=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
	printf '%s\n' $(filter-out %_kernels.cc,$(TIDY_FILES)) | $(TOOLS_PATH) xargs -P 2 -n 4 $(TIDY) $(ARGS)
	$(TOOLS_PATH) $(TIDY) --checks='-clang-analyzer-*' $(filter %_kernels.cc,$(TIDY_FILES))

# Python: a part of the tests that reaches most of the package without the long ones. C++: the tests of the core.
COVERED_TESTS ?= tests/api tests/uneven tests/functional tests/torch_backend tests/testing tests/trace tests/cli
coverage: .venv/package.done  ## how much of the code tests reach, Python and C++: two tables (some minutes)
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest -q $(COVERED_TESTS) $(ARGS)
	$(PY) -m coverage combine -q
	$(PY) -m coverage report --skip-covered --sort=cover
	$(call run_core_tests,build/coverage,,-DUNISONO_COVERAGE=ON)
	$(PY) -m gcovr -r . --filter core/ build/coverage --print-summary

core-test: .venv/tools.done  ## build and run the C++ tests
	$(call run_core_tests,build/core-test,)

sanitize: .venv/tools.done  ## the C++ tests under the thread, address and undefined-behaviour sanitizers
	$(call run_core_tests,build/core-thread,thread)
	$(call run_core_tests,build/core-address,address)

# Needs Debian's g++-aarch64-linux-gnu and qemu-user; their library folder is asked from the compiler. The test of the
# reductions tries every kernel on half a million cases, which the emulator takes up to half an hour for.
ARM := -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	-DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;$$(aarch64-linux-gnu-g++ -print-sysroot | sed 's,^/*$$,/usr/aarch64-linux-gnu,')"
arm: .venv/tools.done  ## the C++ tests for 64-bit ARM, cross-compiled and run under qemu-user
	$(CMAKE) -S . -B build/core-arm -G Ninja -DUNISONO_MODULE=OFF -DUNISONO_TESTS=ON $(ARM)
	$(CMAKE) --build build/core-arm
	$(CTEST) --test-dir build/core-arm --output-on-failure --no-tests=error $(ARGS)

# Threads, callbacks and ends of groups: where memory may be used after it was freed. Ranks are forked from a process
# with the same environment. A report fails the run even if its rank was meant to die. What Python does not free at its
# end is no leak of ours, hence detect_leaks=0. Not the test that forks among allocating threads: the sanitizer's own
# allocator (GCC 12) does not open its locks in the child, which then waits for ever in malloc.
MEMORY_TESTS := tests/api/test_async.py tests/api/test_send_recv.py
SANITIZED_TESTS := $(MEMORY_TESTS) tests/api/test_group.py tests/faults/test_waits.py tests/faults/test_fork.py \
	tests/faults/test_injected.py \
	--deselect tests/api/test_group.py::test_from_env_under_torchrun \
	--deselect tests/faults/test_fork.py::test_a_child_forked_among_threads_can_use_unisono
sanitize-python: .venv/package.done  ## some Python tests with freed memory overwritten, then under the address sanitizer
	GLIBC_TUNABLES=glibc.malloc.tcache_count=0:glibc.malloc.perturb=165 $(PY) -m pytest $(MEMORY_TESTS) $(ARGS)
	$(call build_core,build/core-address,address,ON)
	rm -rf build/address
	mkdir -p build/address/reports
	$(CMAKE) --install build/core-address --prefix build/address/site
	cp -R src/unisono src/unisono_autoload build/address/site
	export PYTHONPATH="$$PWD/build/address/site" PYTHONMALLOC=malloc; \
	export LD_PRELOAD="$$(ldd build/address/site/unisono/_core*.so | awk '/libasan|libstdc/ { printf "%s:", $$3 }')"; \
	export ASAN_OPTIONS=detect_leaks=0:log_path="'$$PWD/build/address/reports/address'"; \
	export UBSAN_OPTIONS=print_stacktrace=1:log_path="'$$PWD/build/address/reports/undefined'"; \
	$(FIXED_ADDRESSES) $(PY) -m pytest $(SANITIZED_TESTS) $(ARGS); status=$$?; \
	cat build/address/reports/* 2>/dev/null && exit 1; exit $$status

injected: .venv/package.done  ## faults at exact points of the core; and each cell of the matrix without its defence
	$(CMAKE) -S . -B build/core-faults -G Ninja -DUNISONO_FAULTS=ON -DPython_EXECUTABLE="$$PWD/$(PY)"
	$(CMAKE) --build build/core-faults
	rm -rf build/faults
	$(CMAKE) --install build/core-faults --prefix build/faults/site
	cp -R src/unisono src/unisono_autoload build/faults/site
	PYTHONPATH="$$PWD/build/faults/site" $(PY) -m pytest -m "slow or not slow" tests/faults/test_injected.py $(ARGS)

FUZZ_SECONDS ?= 60
fuzz: .venv/tools.done  ## a hostile peer's hellos, heap and messages, under the address sanitizer; FUZZ_SECONDS, SEED
	$(call build_core,build/core-address,address,OFF)
	UNISONO_FUZZ_SECONDS=$(FUZZ_SECONDS) $(if $(SEED),UNISONO_FUZZ_SEED=$(SEED)) build/core-address/test_hostile
	UNISONO_FUZZ_SECONDS=$(FUZZ_SECONDS) $(if $(SEED),UNISONO_FUZZ_SEED=$(SEED)) build/core-address/test_fuzz

docs: .venv/docs.done  ## build the documentation into build/docs
	$(PY) -m sphinx -W --keep-going -q -b html docs build/docs

links: .venv/docs.done  ## ask the web whether the pages' links to it work; needs the network, so CI leaves it out
	$(PY) -m sphinx -q -b linkcheck docs build/links

# The wheel of Python 3.12 uses the stable ABI and serves all later ones: PYTHON=python3.10, python3.11, python3.12.
WHEEL_PATH := PATH="$$PWD/build/wheel/env/bin:$$PATH"
wheel:  ## an sdist, and from it a manylinux wheel for PYTHON, in dist/; needs no torch
	rm -rf build/wheel
	$(PYTHON) -m venv build/wheel/env
	build/wheel/env/bin/python -c '$(REQUIREMENTS)' release > build/wheel/tools.txt
	build/wheel/env/bin/python -m pip --disable-pip-version-check install -q -r build/wheel/tools.txt
	$(WHEEL_PATH) build/wheel/env/bin/python -m build --no-isolation --sdist --outdir dist .
	$(WHEEL_PATH) build/wheel/env/bin/python -m pip --disable-pip-version-check wheel -q --no-build-isolation --no-deps \
		-w build/wheel dist/unisono-*.tar.gz
	$(WHEEL_PATH) build/wheel/env/bin/python -m auditwheel repair -w dist build/wheel/*.whl

# SMOKE may be an environment that has torch already.
SMOKE ?= build/smoke
wheel-test:  ## installs the wheel from dist/ where there is no compiler and no source, and tries it there
	test -d $(SMOKE) || { $(PYTHON) -m venv $(SMOKE) && $(SMOKE)/bin/python -m pip install -q '$(TORCH)' numpy; }
	$(SMOKE)/bin/python -m pip --disable-pip-version-check install -q --no-index --no-deps --force-reinstall --find-links dist unisono
	cd $(SMOKE) && env -i PATH="$$PWD/bin" HOME="$$PWD" LD_LIBRARY_PATH="$$LD_LIBRARY_PATH" bin/python -m unisono doctor

install: .venv/package.done  ## only set everything up

clean:  ## remove everything that was built, and the virtual environment
	rm -rf build .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# $(1): build folder, $(2): sanitizer or nothing, $(3): ON for the Python module too, $(4): more settings. All for tests,
# so with faults.
define build_core
	$(CMAKE) -S . -B $(1) -G Ninja -DUNISONO_MODULE=$(3) -DUNISONO_FAULTS=ON -DUNISONO_TESTS=ON -DUNISONO_SANITIZE=$(2) $(4) \
		-DPython_EXECUTABLE="$$PWD/$(PY)" -DCMAKE_COMPILE_WARNING_AS_ERROR=ON
	$(CMAKE) --build $(1)
endef

define run_core_tests
	$(call build_core,$(1),$(2),OFF,$(3))
	$(FIXED_ADDRESSES) $(CTEST) --test-dir $(1) --output-on-failure --no-tests=error
endef

# Set-up, each step once. torch comes first, so that whatever asks for torch later finds this build of it.
.venv/venv.done:
	$(PYTHON) -m venv .venv
	@touch $@

.venv/torch.done: .venv/venv.done
	$(PIP) '$(TORCH)'
	@touch $@

.venv/tools.done: .venv/torch.done pyproject.toml
	$(PY) -c '$(REQUIREMENTS)' dev > .venv/tools.txt
	$(PIP) -r .venv/tools.txt
	@touch $@

.venv/package.done: .venv/tools.done $(SOURCES)
	$(PIP) --no-build-isolation --no-deps .
	@touch $@

.venv/docs.done: .venv/package.done pyproject.toml
	$(PY) -c '$(REQUIREMENTS)' docs > .venv/docs.txt
	$(PIP) -q -r .venv/docs.txt
	@touch $@

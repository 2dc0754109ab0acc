# make demo   set up, then run the main job: train, unplug, kill, drain, and show that it survives
# make demo-gpu  the chain behind a lost (simulated) GPU: verdict, eviction, return; report in build/demo-gpu.html
# make test   set up, then run the tests in two processes beside each other; JOBS=1: in one
# make soak   the long tests: failures at every point of a step, storms over a lab; SOAK_SECONDS=1200, SOAK_SEED to repeat one
# make chaos  all playbooks, each in a lab: JUnit XML, an HTML report and a summary in build/chaos; TAG=quick for some
# make vm     faults that need netem, in a small virtual machine with Debian's kernel (qemu-system-x86, busybox-static); as root also the systemd units
# make setup  the set-up alone (.venv at the project's root); again in a second when nothing changed
# make check  linters, types, import rules
# make gpu-check  what needs a GPU, under 8 minutes; figures in build/gpu.json
# make test-native  the native code built with sanitizers, tested and stormed; KINDS=release,asan,tsan ROUNDS=3
# make fuzz   feed the native parsers and connections with damaged input; SECONDS=60
# make storm  fail the rails of NCCL connections FAULTS=1000 times, as root

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
# The CPU build is enough for the demo and the tests. TORCH_PIP_ARGS takes what your mirror needs (e.g. an index option).
TORCH ?= torch==2.13.0
TORCH_PIP_ARGS ?=
PIP := .venv/bin/python -m pip --disable-pip-version-check
STAMP := .venv/.ftctl-setup
NATIVE := CMakeLists.txt $(wildcard ftar_core/native/csrc/*) $(wildcard ftar_core/native/csrc/nccl/*) $(wildcard ftar_core/bench/csrc/*)

.PHONY: setup demo demo-gpu test soak vm chaos gpu-check check simulation native-tools test-native fuzz storm clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml $(NATIVE)
	@say() { printf '\033[1m==> %s\033[0m\n' "$$*" >&2; }; \
	need() { printf 'setup: %s is missing: %s\n  install it with: %s\n' "$$1" "$$2" "$$3" >&2; exit 1; }; \
	command -v $(PYTHON) >/dev/null || need "$(PYTHON)" "nothing runs without it" "sudo apt-get install python3 python3-venv python3-dev"; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || need "Python 3.10 or newer" "$$($(PYTHON) --version) is too old" "sudo apt-get install python3.11 python3.11-venv python3.11-dev, then make PYTHON=python3.11 setup"; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || need "the venv module" "it makes .venv" "sudo apt-get install python3-venv"; \
	$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' || need "Python.h" "the native core is built against it" "sudo apt-get install python3-dev"; \
	command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || need "a C++20 compiler" "the native core is C++" "sudo apt-get install g++"; \
	command -v nft >/dev/null || [ -x /usr/sbin/nft ] || printf 'setup: note: nftables is missing; the demo and the tests run without it, faults that drop packets will not\n  install it with: sudo apt-get install nftables\n' >&2; \
	[ -x .venv/bin/python ] || { say "making .venv with $$($(PYTHON) --version)"; rm -rf .venv; $(PYTHON) -m venv .venv; }; \
	.venv/bin/python -c 'import torch' 2>/dev/null || { say "installing $(TORCH) (CPU; some minutes the first time)"; $(PIP) install --quiet $(TORCH_PIP_ARGS) '$(TORCH)'; }; \
	say "building the native core, installing ftctl and what its tests need"; \
	$(PIP) install --quiet --editable '.[agent,train,report,test]'; \
	touch $(STAMP); say "ready: .venv/bin/ftctl --help"

demo: setup
	@.venv/bin/ftctl lab demo

demo-gpu: setup
	@mkdir -p build; trap 'kill $$watching 2>/dev/null || true; .venv/bin/ftctl lab down --name demo-gpu' EXIT; watching=; \
	.venv/bin/ftctl lab up --name demo-gpu --gpus 2 --policy act >/dev/null; export FTCTL_LAB=demo-gpu; \
	.venv/bin/ftctl events -f & watching=$$!; \
	.venv/bin/ftctl chaos run playbooks/gpu-xid-79.yaml --html build/demo-gpu.html

JOBS ?= 2
test: setup
	@.venv/bin/python -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadscope --no-loadscope-reorder) $(PYTEST_ARGS)

# The long tests, which `make test` leaves out
soak: setup
	@.venv/bin/python -m pytest -m soak $(PYTEST_ARGS)

gpu-check: setup
	@tests/gpu/run.sh

# The kernel is unpacked, not installed
vm: setup
	@[ -d build/vm/kernel ] || { mkdir -p build/vm && cd build/vm && \
	  apt-get download "$$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: //p')" && \
	  dpkg-deb -x linux-image-*.deb kernel.new && mv kernel.new kernel && rm linux-image-*.deb; }
	@.venv/bin/python -m pytest -m vm tests/vm $(PYTEST_ARGS)

chaos: setup
	@mkdir -p build/chaos
	@.venv/bin/ftctl chaos run playbooks $(if $(strip $(TAG)),--tag $(TAG)) --lab --out build/chaos/runs \
	  --junit build/chaos/junit.xml --html build/chaos/report.html --markdown build/chaos/summary.md $(CHAOS_ARGS)

check: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# make simulation SEEDS=100000
SEEDS ?= 10000
simulation: setup
	@.venv/bin/python -m pytest tests/simulation --seeds $(SEEDS) --timeout 0

# ROUNDS, KINDS, FAULTS, SEED, TESTS as `python tests/native/builds.py --help` says; MODE and RAILS for storm
option = $(if $($(1)),--$(2) '$($(1))')
native-tools: setup
	@.venv/bin/python -c 'import cmake, nanobind' 2>/dev/null || $(PIP) install --quiet cmake 'nanobind>=2.4'

test-native: native-tools
	@.venv/bin/python tests/native/builds.py $(call option,KINDS,kinds) $(call option,ROUNDS,rounds) $(call option,FAULTS,faults) \
	  $(call option,SEED,seed) $(call option,TESTS,tests)

fuzz: native-tools
	@.venv/bin/python tests/native/builds.py --fuzz $(or $(SECONDS),60) $(call option,SEED,seed)

storm: setup
	@.venv/bin/python tests/native/nccl/storm.py $(call option,FAULTS,faults) $(call option,SEED,seed) $(call option,RAILS,rails) \
	  $(call option,MODE,mode) $(call option,ROUNDS,rounds)

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

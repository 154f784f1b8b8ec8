# vnet: build, demonstrate, test.
#
#   make demo    two hosts, two virtual machines, two containers on one Ethernet LAN, and a table of figures
#   make test    all checks; CONTRIBUTING.md lists the stages
#   make bench   vnet compared with its alternatives, published in docs/; takes hours on an otherwise idle machine
#   make proof   the proofs of docs/proofs.md at full bounds; make fuzz: all fuzz targets at length
#
# Each target installs its requirements (Debian packages, Rust, Python packages in .venv); run it as root on Debian 12.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

CARGO_HOME ?= $(HOME)/.cargo
TOOLS := $(CURDIR)/.cache/tools
# C code is identical in every build, so ccache (Debian installs it as cc in /usr/lib/ccache) compiles it once.
export PATH := $(CARGO_HOME)/bin:$(TOOLS)/bin:/usr/lib/ccache:$(PATH)
export CCACHE_DIR := $(CURDIR)/.cache/ccache
export CCACHE_NOHASHDIR := 1
# Fuzz builds pass sanitizer options, which do not apply to C code (.ci/fuzz): ignore them to share cache entries.
export CCACHE_IGNOREOPTIONS := -Wall -Wextra -fsanitize=* -fno-sanitize=*
export CARGO_TERM_PROGRESS_WHEN := never

# Prints the first Python that is recent enough and has venv.
FIND_PYTHON := for python in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do \
	"$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo "$$python"; break; }; done
FUZZ_SECONDS ?= 60
CARGO_DEB := 3.8.0
CARGO_DENY := 0.20.2
CARGO_FUZZ := 0.13.2
# Tools run for seconds but take minutes to build, so unoptimised builds are faster overall.
INSTALL := CARGO_PROFILE_DEV_DEBUG=0 CARGO_TARGET_DIR=$(TOOLS)/target cargo install --quiet --locked --debug --root $(TOOLS)
STAGE := .ci/stage

.PHONY: help
help: ## List all targets.
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 16

.PHONY: packages
packages: ## Install missing Debian packages, and Rust if cargo is missing.
	@.ci/packages
	@.ci/rust

.PHONY: bench-packages
bench-packages: packages ## Install contenders and load generators, which only the bench needs.
	@.ci/packages bench

.venv/made: lab/requirements.txt
	@python=$$($(FIND_PYTHON)); \
	[ -n "$$python" ] || { echo "no Python 3.11 or later that has venv: run 'make packages'" >&2; exit 1; }; \
	"$$python" -m venv --clear .venv
	.venv/bin/pip install --quiet --disable-pip-version-check --requirement lab/requirements.txt
	touch $@

$(TOOLS)/bin/cargo-deb-$(CARGO_DEB):
	$(INSTALL) cargo-deb@$(CARGO_DEB)
	touch $@

$(TOOLS)/bin/cargo-deny-$(CARGO_DENY):
	$(INSTALL) cargo-deny@$(CARGO_DENY)
	touch $@

$(TOOLS)/bin/cargo-fuzz-$(CARGO_FUZZ):
	$(INSTALL) cargo-fuzz@$(CARGO_FUZZ)
	touch $@

.PHONY: build
build: ## Build vnetd and vnet into target/release.
	cargo build --release --locked --workspace
	ln -sf libvnet_fi.so target/release/libvnet-fi.so

.PHONY: deb
deb: packages build $(TOOLS)/bin/cargo-deb-$(CARGO_DEB) ## Build the Debian package in target/debian.
	packaging/deb/build release target/debian

.PHONY: demo
demo: packages build ## Run the demonstration: two hosts, four guests, one LAN, one table.
	@lab/lab demo

# The examples generate load for vhost-user ports and time lookups. BENCH=tcp runs one bench; FLAGS=--quick checks that it works.
BENCH ?= all
.PHONY: bench
bench: bench-packages build .venv/made ## Compare vnet with its alternatives; publish in docs/.
	cargo build --release --locked --package vnet --package vnetd --package vnet-rdma --examples
	.venv/bin/python lab/lab bench $(BENCH) --publish $(FLAGS)

# Stages in order; the first failure ends the run. Tests depend on time: only a SCHED_IDLE build runs in parallel to them. It has a
# separate target directory, because a process that waits for a directory's lock would wait for the idle build.
.PHONY: test
test: export CARGO_INCREMENTAL := 0
test: ## Run every check: format, dependencies, end-to-end tests, lints, unit tests, documentation, fuzzing.
	@$(STAGE) "packages" $(MAKE) packages
	@$(MAKE) -j2 -Oline stage-tools stage-build
	@$(STAGE) "format" $(MAKE) format-check
	@$(STAGE) "dependencies" .ci/deny
	@$(STAGE) "end-to-end tests" $(MAKE) end-to-end
	@$(STAGE) "lints" $(MAKE) unit-build
	@$(STAGE) "documentation" $(MAKE) documentation
	@$(MAKE) -j2 stage-unit-tests stage-fuzz-build
	@$(STAGE) "fuzzing" .ci/fuzz $(FUZZ_SECONDS)
	@printf '\nall stages passed\n'

.PHONY: stage-tools stage-build stage-unit-tests stage-fuzz-build
stage-tools:
	@$(STAGE) "tools" $(MAKE) .venv/made $(TOOLS)/bin/cargo-deb-$(CARGO_DEB) $(TOOLS)/bin/cargo-deny-$(CARGO_DENY) $(TOOLS)/bin/cargo-fuzz-$(CARGO_FUZZ)
stage-build:
	@$(STAGE) "release build" $(MAKE) build
stage-unit-tests:
	@$(STAGE) "unit tests" $(MAKE) unit-tests
stage-fuzz-build:
	@$(STAGE) "fuzz targets" chrt --idle 0 .ci/fuzz build

# With clippy-driver as the compiler, building the tests also lints; cargo clippy would compile everything a second time.
LINTED := RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-Dwarnings
# Unit tests take about 5 minutes. A test that hangs must end the run while its name can still be seen.
UNIT_TESTS_S := 1500
# Tests of the kernel's programs fail, instead of passing, where they cannot run: without clang-14, CAP_BPF or namespaces.
PROGRAMS := VNET_TEST_PROGRAMS=1

.PHONY: unit-build
unit-build:
	$(LINTED) cargo test --quiet --locked --workspace --no-run

.PHONY: unit-tests
unit-tests: unit-build ## Run the unit and integration tests, with lints as errors.
	$(LINTED) $(PROGRAMS) VNETD=$(CURDIR)/target/debug/vnetd timeout $(UNIT_TESTS_S) cargo test --quiet --locked --workspace --no-fail-fast

.PHONY: documentation
documentation: ## Build the crates' documentation, with rustdoc warnings as errors.
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --locked --workspace --no-deps

.PHONY: format-check
format-check: .venv/made ## Check formatting, and lints that need no build.
	cargo fmt --all -- --check
	.venv/bin/ruff format --check lab
	.venv/bin/ruff check lab

.PHONY: end-to-end
end-to-end: .venv/made ## Run the end-to-end tests against the release build.
	cargo build --release --locked --package vnet --example sockets
	.ci/end-to-end

PROOF ?=
.PHONY: proof
proof: packages ## Run proofs at full bounds, models, ThreadSanitizer, valgrind, kills, take-overs and attacks (docs/proofs.md).
	@.ci/packages proof
	@.ci/proof $(PROOF)

.PHONY: fuzz
fuzz: packages $(TOOLS)/bin/cargo-fuzz-$(CARGO_FUZZ) ## Run every fuzz target for SECONDS (900), FUZZ_JOBS (2) at a time.
	.ci/fuzz build
	.ci/fuzz $(or $(SECONDS),900) all

.PHONY: kernel-path
kernel-path: build .venv/made ## Test the kernel's own path at length: kills of vnetd, changes of rules and paths, 10^6 random verdicts.
	cd lab && VNET_TEST_KILLS=100 VNET_TEST_CHANGES=1000 VNET_TEST_CAPTURES=100 ../.venv/bin/pytest tests/test_kernel_path.py tests/test_kernel_changes.py --capture=no
	VNET_TEST_FRAMES=1000000 $(PROGRAMS) $(LINTED) cargo test --quiet --locked --package vnet --lib kernel_path

.PHONY: kernels
kernels: build .venv/made ## Test the kernel's own path on Debian's kernels 5.10, 6.1 and 6.12, in emulated guests.
	cd lab && VNET_LAB_KERNELS=1 ../.venv/bin/pytest tests/test_debian_kernels.py

.PHONY: clean
clean: ## Remove all builds and downloads.
	rm -rf target fuzz/target .venv .cache

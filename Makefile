# vnet: build, see, test.
#
#   make demo    two hosts, two virtual machines, two containers on one Ethernet LAN, and a table of what it gives
#   make test    everything that proves it
#   make bench   vnet against its alternatives, into docs/; takes hours and wants a quiet machine
#
# All install what they need first (Debian packages, Rust, Python packages in .venv), as root on Debian 12.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

CARGO_HOME ?= $(HOME)/.cargo
TOOLS := $(CURDIR)/.cache/tools
# C code compiles identically in every build: ccache (Debian puts it in front of cc) compiles it once.
export PATH := $(CARGO_HOME)/bin:$(TOOLS)/bin:/usr/lib/ccache:$(PATH)
export CCACHE_DIR := $(CURDIR)/.cache/ccache
export CCACHE_NOHASHDIR := 1
# Fuzz targets are sanitized, but not what is C in them: .ci/fuzz.
export CCACHE_IGNOREOPTIONS := -Wall -Wextra -fsanitize=* -fno-sanitize=*
export CARGO_TERM_PROGRESS_WHEN := never

# The first Python that is new enough and can make virtual environments.
FIND_PYTHON := for python in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do \
	"$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo "$$python"; break; }; done
FUZZ_SECONDS ?= 60
CARGO_DENY := 0.20.2
CARGO_FUZZ := 0.13.2
# Tools run for seconds and are built for minutes: unoptimised ones are the quicker choice.
INSTALL := CARGO_PROFILE_DEV_DEBUG=0 CARGO_TARGET_DIR=$(TOOLS)/target cargo install --quiet --locked --debug --root $(TOOLS)
STAGE := .ci/stage

.PHONY: help
help: ## Say what can be made.
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 16

.PHONY: packages
packages: ## Install missing Debian packages, and Rust when there is no cargo.
	@.ci/packages
	@.ci/rust

.PHONY: bench-packages
bench-packages: packages ## Install what only the bench needs: contenders and load generators.
	@.ci/packages bench

.venv/made: lab/requirements.txt
	@python=$$($(FIND_PYTHON)); \
	[ -n "$$python" ] || { echo "no Python 3.11 or later that has venv: run 'make packages'" >&2; exit 1; }; \
	"$$python" -m venv --clear .venv
	.venv/bin/pip install --quiet --disable-pip-version-check --requirement lab/requirements.txt
	touch $@

$(TOOLS)/bin/cargo-deny-$(CARGO_DENY):
	$(INSTALL) cargo-deny@$(CARGO_DENY)
	touch $@

$(TOOLS)/bin/cargo-fuzz-$(CARGO_FUZZ):
	$(INSTALL) cargo-fuzz@$(CARGO_FUZZ)
	touch $@

.PHONY: build
build: ## Build vnetd and vnet for use, to target/release.
	cargo build --release --locked --workspace

.PHONY: demo
demo: packages build ## Show it: two hosts, two virtual machines, two containers, one LAN, one table.
	@lab/lab demo

# The examples are the load for vhost-user ports and the look-ups that are timed. BENCH=tcp runs one bench, FLAGS=--quick
# shows that it works.
BENCH ?= all
.PHONY: bench
bench: bench-packages build .venv/made ## Measure it against its alternatives: tables and plots into docs/.
	cargo build --release --locked --package vnet --package vnetd --examples
	.venv/bin/python lab/lab bench $(BENCH) --publish $(FLAGS)

# Stage by stage, each with its name and time; the first that fails ends it. Tests have the machine for themselves, or beside
# them only what runs when nobody else wants to (SCHED_IDLE).
.PHONY: test
test: export CARGO_INCREMENTAL := 0
test: ## Prove it: format, dependencies, end-to-end tests, lints, unit tests, documentation, fuzzing.
	@$(STAGE) "packages" $(MAKE) packages
	@$(MAKE) -j2 -Oline stage-tools stage-build
	@$(STAGE) "format" $(MAKE) format-check
	@$(STAGE) "dependencies" .ci/deny
	@$(STAGE) "end-to-end tests" $(MAKE) end-to-end
	@$(STAGE) "lints" $(MAKE) unit-build
	@$(MAKE) -j2 -Oline stage-unit-tests stage-beside
	@$(STAGE) "fuzzing" .ci/fuzz $(FUZZ_SECONDS)
	@printf '\nall stages passed\n'

.PHONY: stage-tools stage-build stage-unit-tests stage-beside
stage-tools:
	@$(STAGE) "tools" $(MAKE) .venv/made $(TOOLS)/bin/cargo-deny-$(CARGO_DENY) $(TOOLS)/bin/cargo-fuzz-$(CARGO_FUZZ)
stage-build:
	@$(STAGE) "release build" $(MAKE) build
stage-unit-tests:
	@$(STAGE) "unit tests" $(MAKE) unit-tests
stage-beside:
	@$(STAGE) "documentation" chrt --idle 0 $(MAKE) documentation
	@$(STAGE) "fuzz targets" chrt --idle 0 .ci/fuzz build

# The lints look on while the tests are compiled: cargo clippy would compile everything a second time.
LINTED := RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-Dwarnings

.PHONY: unit-build
unit-build:
	$(LINTED) cargo test --quiet --locked --workspace --no-run

.PHONY: unit-tests
unit-tests: ## Run the unit and integration tests, with lints as errors.
	$(LINTED) cargo test --quiet --locked --workspace

.PHONY: documentation
documentation: ## Build the documentation of the crates, with mistakes in it as errors.
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --locked --workspace --no-deps

.PHONY: format-check
format-check: .venv/made ## Check formatting and lints that need no build.
	cargo fmt --all -- --check
	.venv/bin/ruff format --check lab
	.venv/bin/ruff check lab

.PHONY: end-to-end
end-to-end: .venv/made ## Run the end-to-end tests against the release build.
	.ci/end-to-end

.PHONY: clean
clean: ## Remove what was built and downloaded.
	rm -rf target fuzz/target .venv .cache

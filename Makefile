# make demo | test | test-slow | check | bench | clean (make bench ARGS="--help"). Each makes the environment first, in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# A machine with a GPU keeps the torch that it has; the others get the CPU build that constraints.txt pins.
SITE   := $(shell command -v nvidia-smi >/dev/null && $(PYTHON) -c 'import torch; torch.zeros(1).cuda()' \
            2>/dev/null && echo --system-site-packages)
LIMITS := $(if $(SITE),,-c constraints.txt)

# Tests start some thousand keepers: none of them is to compile everstep anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-gpu check lint format bench clean env
env: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SITE) $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(LIMITS) -e '.[demo,test]'
	touch $@

demo: env
	$(BIN)/everstep demo

test: env lint
	$(BIN)/pytest -n 2 --dist worksteal

test-slow: env
	EVERSTEP_EXAMPLES=all $(BIN)/pytest -m "slow or not slow" --timeout 900

test-gpu: env
	$(BIN)/pytest tests/gpu -m "gpu" -v

check: test

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: env
	$(BIN)/pip install --quiet --disable-pip-version-check $(LIMITS) -e '.[bench]'
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info

# make demo | test | test-slow | check | bench | clean (make bench ARGS="--help"). Each makes the environment first, in .venv.
# make gpu, on a machine with a GPU, needs none: it takes the torch that is there, and what else is missing from the wheels
# that `make gpu-wheels` has collected in build/gpu-wheels on a machine with a network.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# A machine with a GPU keeps the torch that it has; the others get the CPU build that constraints.txt pins.
SITE   := $(shell command -v nvidia-smi >/dev/null && $(PYTHON) -c 'import torch; torch.zeros(1).cuda()' \
            2>/dev/null && echo --system-site-packages)
LIMITS := $(if $(SITE),,-c constraints.txt)
# Without --no-compile pip compiles all of torch, of which a tenth is ever imported.
QUICKLY := --quiet --disable-pip-version-check --no-compile
INTEGRATIONS = $(BIN)/pip install $(QUICKLY) $(LIMITS) -e '.[test,integrations]'
# It is built by what is installed here, since it looks at the torch that it is for.
DEEPSPEED = $(BIN)/pip install $(QUICKLY) setuptools wheel && DS_BUILD_OPS=0 $(BIN)/pip install $(QUICKLY) $(LIMITS) \
              --no-build-isolation $$(grep -o 'deepspeed==[0-9.]*' pyproject.toml)

# Tests start some thousand keepers: none of them is to compile everstep anew.
unexport PYTHONDONTWRITEBYTECODE

# The Python of the machine with a GPU, and what everstep and its tests need beside torch and numpy.
GPU_PYTHON ?= 3.12
GPU_WHEELS := build/gpu-wheels
GPU_SITE   := build/gpu-site
GPU_NEEDS  := xxhash zstandard rich markdown-it-py mdurl pygments safetensors psutil pytest pluggy iniconfig packaging \
              pytest-timeout pytest-xdist execnet hypothesis sortedcontainers torch_checkpointing accelerate pyyaml tqdm
# What torchtitan imports, 100 MB; `make gpu-wheels GPU_TITAN=` leaves it out, and its test is skipped. Its versions are its own.
GPU_TITAN  := torchtitan==0.3.0 torchdata datasets==4.7.0 pyarrow pandas python-dateutil six tzdata dill multiprocess==0.70.18 \
              huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9 h11 anyio idna certifi click filelock hf-xet requests urllib3 \
              charset-normalizer tokenizers tyro docstring-parser typeguard tensorboard absl-py grpcio markdown protobuf pillow \
              tensorboard-data-server werkzeug markupsafe spmd_types==0.2.3 einops
GLIBCS     := 2_17 2_28 2_34
COLLECT     = $(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
              --implementation cp --python-version $(GPU_PYTHON) $(GLIBCS:%=--platform manylinux_%_x86_64) \
              --platform manylinux2014_x86_64 -d $(GPU_WHEELS)
define MISSING
import sys, importlib.metadata as m
def is_missing(name):
    try: m.version(name.partition("==")[0])
    except m.PackageNotFoundError: return True
print(*filter(is_missing, sys.argv[1:]))
endef
export MISSING

.PHONY: demo test test-slow test-integrations test-gpu gpu gpu-wheels check lint format bench bench-tiers bench-codecs bench-pieces bench-replica bench-tailor clean env
env: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SITE) $(VENV)
	$(BIN)/pip install $(QUICKLY) $(LIMITS) -e '.[demo,test]'
	touch $@

demo: env
	$(BIN)/everstep demo

test: env
	$(BIN)/pytest -n 3 --dist worksteal

test-slow: env
	$(INTEGRATIONS)
	$(DEEPSPEED)
	HF_HUB_OFFLINE=1 EVERSTEP_EXAMPLES=all $(BIN)/pytest -m "slow or not slow" --timeout 900

# What is missing of their libraries (make env installs none of them) is skipped, and said.
test-integrations: env
	$(INTEGRATIONS)
	HF_HUB_OFFLINE=1 $(BIN)/pytest tests/integrations -rs

test-gpu: env
	$(BIN)/pytest tests/gpu -m "gpu" -v

gpu:
	for needs in '$(GPU_NEEDS)' '$(if $(wildcard $(GPU_WHEELS)/torchtitan-*),$(GPU_TITAN))'; do \
	    missing=$$($(PYTHON) -c "$$MISSING" $$needs) && if [ -n "$$missing" ]; then $(PYTHON) -m pip install --quiet \
	    --disable-pip-version-check --no-index --no-deps --upgrade --target $(GPU_SITE) --find-links $(GPU_WHEELS) $$missing; \
	    fi || exit; done
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/$(GPU_SITE):$$PYTHONPATH timeout -k 10 560 $(PYTHON) -m benchmarks.gpu $(ARGS)

gpu-wheels:
	rm -rf $(GPU_WHEELS)
	$(COLLECT) -c constraints.txt $(GPU_NEEDS)
	$(if $(GPU_TITAN),$(COLLECT) $(GPU_TITAN))

check: lint test

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: env
	$(BIN)/pip install $(QUICKLY) $(LIMITS) -e '.[bench]'
	$(BIN)/python -m benchmarks $(ARGS)

bench-tiers: env
	$(BIN)/python -m benchmarks.tiers $(ARGS)

bench-codecs: env
	$(BIN)/python -m benchmarks.codecs $(ARGS)

bench-pieces: env
	$(BIN)/python -m benchmarks.pieces $(ARGS)

bench-replica: env
	$(BIN)/python -m benchmarks.replica $(ARGS)

bench-tailor: env
	$(BIN)/python -m benchmarks.tailor $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info

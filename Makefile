# Each target sets up all that it needs: a virtual environment in .venv with the package, ONNX Runtime and the tools.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find onnx_kv cmake CMakeLists.txt pyproject.toml -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name 'CMakeLists.txt' -o -name 'pyproject.toml')

.PHONY: demo test lint cpu-test gpu-test bench clean

$(VENV)/installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[cpu,dev]'
	touch $@

demo: $(VENV)/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/demo.sh

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint $(VENV)/installed
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build demo-out

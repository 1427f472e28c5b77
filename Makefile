# Each target sets up all that it needs in a virtual environment of its own: .venv for the CPU, .venv-cuda for NVIDIA GPUs
# (onnxruntime and onnxruntime-gpu do not live in one environment).
PYTHON ?= python3
CPU := .venv
CUDA := .venv-cuda
DOCS := .venv-docs
# The oldest and the newest ONNX Runtime that the op library is tested with, besides the one installed.
ORT_VERSIONS := 1.23.2 1.32.0
SOURCES := pyproject.toml CMakeLists.txt $(shell find onnx_kv cmake \
	-name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cmake' -o -name 'CMakeLists.txt')

.PHONY: demo test lint gpu-test bench gpu-bench docs clean always

demo: $(CPU)/installed
	PATH="$(CURDIR)/$(CPU)/bin:$$PATH" bash scripts/demo.sh

test: lint $(CPU)/installed $(ORT_VERSIONS:%=$(CPU)/ort-%)
	$(CPU)/bin/python -m pytest

lint: $(CPU)/installed
	$(CPU)/bin/ruff check .
	$(CPU)/bin/ruff format --check .
	$(CPU)/bin/mypy

$(CPU)/ort-%: | $(CPU)/installed
	$(CPU)/bin/python -m pip install --quiet --no-deps --target $@ onnxruntime==$* \
		|| echo "onnxruntime $* has no wheel for this Python: its test will be skipped"

gpu-test: $(CUDA)/installed
	$(CUDA)/bin/python -m pytest tests/gpu

bench: $(CPU)/installed
	$(CPU)/bin/onnx-kv bench decode
	$(CPU)/bin/onnx-kv bench prefill
	if command -v nvidia-smi > /dev/null; then $(MAKE) gpu-bench; fi

gpu-bench: $(CUDA)/installed
	$(CUDA)/bin/python tools/bench_gqa.py

docs: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

clean:
	rm -rf $(CPU) $(CUDA) $(DOCS) build demo-out site

$(CPU)/installed: EXTRAS := cpu,dev
$(CUDA)/installed: EXTRAS := cuda,dev
$(DOCS)/installed: EXTRAS := docs
%/installed: $(SOURCES) %/modules
	test -x $*/bin/python || $(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --upgrade pip
	$*/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

# An editable install knows the Python modules by a list made when it was installed, so a module that moved needs another.
$(CPU)/modules $(CUDA)/modules $(DOCS)/modules: always
	mkdir -p $(@D)
	find onnx_kv -name '*.py' | sort | cmp --silent - $@ || find onnx_kv -name '*.py' | sort > $@

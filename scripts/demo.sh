#!/usr/bin/env bash
# The main job on a shipped model, on the CPU: patch, describe, check, compare both layouts and stock ORT, generate.
# Run by `make demo`, which puts the virtual environment's onnx-kv on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."

model=models/qwen2-tiny
patched=demo-out/qwen2-tiny-seq-major

run() { printf '\n$%s\n' "$(printf ' %q' "$@")"; "$@"; }

rm -rf demo-out
mkdir -p demo-out
run onnx-kv inspect "$model"
run onnx-kv patch "$model" -o "$patched" --layout seq-major
run onnx-kv metadata "$patched"
run onnx-kv validate "$patched"
run onnx-kv parity "$model" --layouts head-major,seq-major --against stock --tokens 64 --prompt-lengths 1,17,300
run onnx-kv generate "$patched" --prompt "The key" --max-new-tokens 48

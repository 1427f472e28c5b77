"""Generates with ONNX Runtime GenAI, the rival: run as a process that reads a request and prints a result (process.py).

The request names the model directory, `prompt` (token ids), `new_tokens`, `max_length`, `device` and `graph`. The
unpatched model runs with GenAI's own settings: greedy, past and present in one buffer, and a CUDA graph where `graph`
is true.
"""

from __future__ import annotations

import time
from typing import Any

from onnx_kv.bench.process import WorkerError, answer


def load(og: Any, request: dict[str, Any]) -> Any:
    """Open the model on the device that the request names."""
    config = og.Config(request["model"])
    config.clear_providers()
    if request["device"] != "cpu":
        config.append_provider("cuda")
        config.set_provider_option("cuda", "enable_cuda_graph", "1" if request["graph"] else "0")
    return og.Model(config)


def generate(og: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Generate and time each token on the host."""
    model = load(og, request)
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=request["max_length"], do_sample=False, past_present_share_buffer=True)
    generator = og.Generator(model, params)
    started = time.perf_counter()
    generator.append_tokens(request["prompt"])
    generator.generate_next_token()
    prefill = time.perf_counter() - started
    steps = []
    for _ in range(request["new_tokens"] - 1):
        started = time.perf_counter()
        generator.generate_next_token()
        steps.append(time.perf_counter() - started)
    tokens = [int(token) for token in generator.get_sequence(0)][len(request["prompt"]) :]
    return {"tokens": tokens, "prefill_seconds": prefill, "step_seconds": steps}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Generate with the GenAI that is installed.

    Raises:
        WorkerError: it is not installed, or fails; the message is its own.
    """
    try:
        import onnxruntime_genai as og

        return generate(og, request)
    except Exception as error:  # its errors have no class in common
        raise WorkerError(f"onnxruntime-genai: {error}") from error


if __name__ == "__main__":
    answer(measure)

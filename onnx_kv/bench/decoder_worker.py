"""Generates with our decoder: run as a process that reads a request and prints a result (process.py).

The request names the model directory, `prompt` (token ids), `new_tokens` and `settings`, the decoder's keyword
arguments.
"""

from __future__ import annotations

import time
from typing import Any

from onnx_kv.bench.process import answer
from onnx_kv.runtime.decoder import Decoder


def generate(request: dict[str, Any]) -> dict[str, Any]:
    """Generate and time each token as the caller receives it."""
    with Decoder(request["model"], **request["settings"]) as decoder:
        started = time.perf_counter()
        stream = decoder.stream(request["prompt"], max_new_tokens=request["new_tokens"], stop_tokens=[])
        tokens, steps = [], []
        for step in stream:
            now = time.perf_counter()
            tokens.append(step.tokens[0])
            steps.append(now - started)
            started = now
        return {
            "tokens": tokens,
            "prefill_seconds": steps[0],
            "step_seconds": steps[1:],
            "stats": decoder.stats.as_dict(),
        }


if __name__ == "__main__":
    answer(generate)

"""Greedy generation by stock ONNX Runtime, fed with plain numpy arrays: the oracle of the runtime's tests.

Shares nothing with the runtime: no I/O binding, no buffer that is both past and present, no chunks, no batch. Ports are
those that the exporter of the shipped models always writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
MODELS = Path(__file__).parents[2] / "models"
MODEL_NAMES = sorted(path.parent.name for path in MODELS.glob("*/genai_config.json"))


@dataclass(frozen=True)
class Greedy:
    """`logits` is [steps, vocabulary]: what each of `tokens` was chosen from."""

    tokens: list[int]
    logits: NDArray[Any]


class StockModel:
    """A model directory in a session of stock ONNX Runtime."""

    def __init__(self, directory: Path) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self._decoder = json.loads((directory / "genai_config.json").read_text())["model"]["decoder"]
        self._session = ort.InferenceSession(str(directory / "model.onnx"), options, ["CPUExecutionProvider"])
        self._inputs = {port.name: port for port in self._session.get_inputs()}
        self._outputs = [port.name for port in self._session.get_outputs()]

    def greedy(self, prompt: Sequence[int], count: int) -> Greedy:
        """Generate `count` tokens after a prompt, the whole of which is one run."""
        new = list(prompt)
        cache = self._empty_cache(len(prompt) + count)
        length, tokens, logits = 0, [], []
        for _ in range(count):
            length += len(new)
            feeds = {"input_ids": np.array([new], np.int64), "attention_mask": np.ones((1, length), np.int64)}
            if "position_ids" in self._inputs:
                feeds["position_ids"] = np.arange(length - len(new), length)[None]
            outputs = dict(zip(self._outputs, self._session.run(self._outputs, feeds | cache), strict=True))
            logits.append(outputs["logits"][0, -1])
            new = [int(logits[-1].argmax())]
            tokens += new
            cache = {name: outputs[name.replace("past_key_values", "present")] for name in cache}
        return Greedy(tokens, np.stack(logits))

    def _empty_cache(self, most: int) -> dict[str, NDArray[Any]]:
        """A cache without tokens and without room: each run returns it longer.

        A sliding-window export wants room for its window from the start. With room for every token besides, nothing
        slides out of it.
        """
        window = self._decoder.get("sliding_window", {}).get("window_size", 0)
        room = most + window if window else 0
        return {
            name: np.zeros((1, port.shape[1], room, self._decoder["head_size"]), _DTYPES[port.type])
            for name, port in self._inputs.items()
            if name.startswith("past_key_values")
        }

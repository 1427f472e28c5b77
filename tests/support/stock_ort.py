"""Running a model directory in stock ONNX Runtime, as an oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


def run(model_file: Path, tokens: list[list[int]]) -> dict[str, np.ndarray]:
    """All outputs of a prefill of `tokens`, one row a sequence, all rows of one length; the caches start empty."""
    ort = pytest.importorskip("onnxruntime", reason="needs stock ONNX Runtime (extra [cpu])")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(model_file), options, providers=["CPUExecutionProvider"])
    batch, length = len(tokens), len(tokens[0])
    feeds: dict[str, np.ndarray] = {}
    shapes = {item.name: item.shape for item in session.get_outputs()}
    for item in session.get_inputs():
        if item.name == "input_ids":
            feeds[item.name] = np.array(tokens, np.int64)
        elif item.name == "attention_mask":
            feeds[item.name] = np.ones((batch, length), np.int64)
        elif item.name == "seqlens_k":
            feeds[item.name] = np.full(batch, length - 1, np.int32)
        elif item.name == "total_sequence_length":
            feeds[item.name] = np.array([length], np.int32)
        else:
            kind = np.float16 if item.type == "tensor(float16)" else np.float32
            feeds[item.name] = np.zeros((batch, item.shape[1], 0, _head_dim(model_file)), kind)
    return dict(zip(shapes, session.run(None, feeds), strict=True))


def _head_dim(model_file: Path) -> int:
    from onnx_kv.graph import attention_layers
    from onnx_kv.model_dir import ModelDir

    return attention_layers(ModelDir(model_file.parent, model_file, None).load())[0].shape.head_dim

"""Models with other weights: what a comparison has to notice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper


def with_weights(directory: Path, output: Path, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """A copy of a model directory with the final norm's weights changed."""
    shutil.copytree(directory, output)
    model = onnx.load(output / "model.onnx")
    [weight] = [x for x in model.graph.initializer if "final_norm" in x.name]
    weight.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(weight)), weight.name))
    (output / "model.onnx.data").unlink()
    onnx.save(model, output / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    return output

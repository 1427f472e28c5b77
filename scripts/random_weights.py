"""Writes the external data file that a `model.onnx` asks for, with random weights.

Lets a benchmark model travel as its graph alone: the same seed gives the same bytes on every machine. Needs numpy and
onnx_ir, not the exporter.

What a tensor is, is read from the exporter's names. Matrices `[inputs, outputs]` have a standard deviation of gain /
sqrt(inputs). The gain is 1, so that activations keep their size, but 3 for the head, which gives the logits a real
model's spread; attention gets 2 on its way in and 1/2 on its way out, because with flat weights it would make all
positions alike after some layers, and a greedy model would repeat one token for ever. Norm weights lie around 1, biases
around 0; the rotary tables are the real ones, unscaled. Anything else is refused, as is a tensor that is not a 16- or
32-bit float.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import onnx_ir as ir
from rich.console import Console
from rich.progress import track

CHUNK = 1 << 24  # elements drawn at once; bounds the memory, and is part of what a seed means
GAINS = {"lm_head": 3.0, "qkv_proj": 2.0, "o_proj": 0.5}
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def fill(directory: Path, *, seed: int, rope_theta: float) -> Path:
    """Writes the data file of `directory/model.onnx`, replacing one that is there.

    Args:
        directory: Holds `model.onnx`, whose initializers all lie in one external data file.
        seed: Same seed, same bytes.
        rope_theta: Base of the rotary frequencies.

    Returns:
        The data file.

    Raises:
        click.ClickException: A tensor is of a kind or type that is not known, or the tensors do not lie in one data
            file inside `directory`.
    """
    graph = ir.load(directory / "model.onnx").graph
    tensors = [value.const_value for value in graph.initializers.values()]
    external = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    locations = {str(tensor.location) for tensor in external}
    if len(locations) != 1 or (location := locations.pop()) != Path(location).name:
        raise click.ClickException(f"{directory / 'model.onnx'}: its weights are not in one data file beside it")
    for tensor in external:
        _check(tensor)

    output = directory / location
    partial = output.with_name(output.name + ".partial")
    with partial.open("wb") as file:
        for tensor in track(external, description="writing weights", console=Console(stderr=True)):
            file.seek(tensor.offset or 0)
            for chunk in _chunks(tensor, seed, rope_theta):
                file.write(chunk.astype(tensor.dtype.numpy()).tobytes())
    os.replace(partial, output)
    return output


def _check(tensor: ir.ExternalTensor) -> None:
    """Refuses a tensor that `_chunks` would not know how to fill."""
    known = len(tensor.shape) == 1 or (len(tensor.shape) == 2 and _is_table_or_matrix(tensor.name))
    if tensor.dtype not in FLOATS or not known:
        kind = f"{tensor.dtype.name} {list(tensor.shape.numpy())}"
        raise click.ClickException(f"{tensor.name}: do not know how to fill a tensor of {kind}")


def _is_table_or_matrix(name: str) -> bool:
    return name in ("cos_cache", "sin_cache") or name.endswith(".weight")


def _chunks(tensor: ir.ExternalTensor, seed: int, rope_theta: float) -> Iterator[np.ndarray]:
    """The tensor's elements in order, as float32 pieces of at most CHUNK elements."""
    name, shape = tensor.name, tensor.shape.numpy()
    if name in ("cos_cache", "sin_cache"):
        length, half = shape
        angles = np.outer(np.arange(length), rope_theta ** (-np.arange(half) / half))
        yield (np.cos if name == "cos_cache" else np.sin)(angles)
        return
    if "norm" in name:
        mean, deviation = 1.0, 0.1
    elif len(shape) == 1:
        mean, deviation = 0.0, 0.1
    elif "embed_tokens" in name:
        mean, deviation = 0.0, 1.0
    else:
        gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
        mean, deviation = 0.0, gain / math.sqrt(shape[0])
    # One stream a tensor, so that its content depends on nothing but the seed, its name and its shape.
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    for start in range(0, math.prod(shape), CHUNK):
        count = min(CHUNK, math.prod(shape) - start)
        yield mean + deviation * generator.standard_normal(count, dtype=np.float32)

"""`build_models.py fill` writes the data file that a graph asks for: reproducible bytes, numbers of sensible size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from scripts.random_weights import fill

ROOT = Path(__file__).parents[2]


def write_graph(directory: Path, tensors: dict[str, tuple[type, tuple[int, ...]]], location: str = "w.data") -> None:
    """A `model.onnx` whose only content is zeros under the given names, in one external file, which is then lost."""
    values = []
    for name, (dtype, shape) in tensors.items():
        tensor = ir.tensor(np.zeros(shape, dtype), name=name)
        values.append(ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor))
    model = ir.Model(ir.Graph([], [], nodes=[], initializers=values, name="g", opset_imports={"": 20}), ir_version=10)
    ir.save(model, directory / "model.onnx", external_data=location, size_threshold_bytes=0)
    (directory / location).unlink()


def read(directory: Path, name: str) -> np.ndarray:
    return ir.load(directory / "model.onnx").graph.initializers[name].const_value.numpy()


TENSORS = {
    "model.embed_tokens.weight": (np.float16, (512, 64)),
    "model.layers.0.attn.qkv_proj.MatMul.weight": (np.float16, (400, 300)),
    "model.layers.0.attn.qkv_proj.Add.bias": (np.float16, (1000,)),
    "model.layers.0.input_layernorm.weight": (ml_dtypes.bfloat16, (1000,)),
    "cos_cache": (np.float32, (128, 8)),
    "sin_cache": (np.float32, (128, 8)),
    "lm_head.MatMul.weight": (np.float16, (64, 512)),
}


def test_numbers_are_of_sensible_sizes_and_tables_are_real(tmp_path: Path) -> None:
    write_graph(tmp_path, TENSORS)
    fill(tmp_path, seed=0, rope_theta=10000.0)
    spread = {name: read(tmp_path, name).astype(np.float64).std() for name in TENSORS}
    assert spread["model.embed_tokens.weight"] == pytest.approx(1, rel=0.05)
    assert spread["model.layers.0.attn.qkv_proj.MatMul.weight"] == pytest.approx(2 / 20, rel=0.05)
    assert spread["lm_head.MatMul.weight"] == pytest.approx(3 / 8, rel=0.05)
    assert read(tmp_path, "model.layers.0.input_layernorm.weight").astype(np.float64).mean() == pytest.approx(1, 0.02)
    angles = np.arange(128)[:, None] * 10000.0 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(read(tmp_path, "cos_cache"), np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(read(tmp_path, "sin_cache"), np.sin(angles), atol=1e-6)


def test_bytes_depend_on_the_seed_and_the_name_alone(tmp_path: Path) -> None:
    weights = {}
    for run, (seed, tensors) in enumerate([(1, TENSORS), (1, dict(reversed(TENSORS.items()))), (2, TENSORS)]):
        directory = tmp_path / str(run)
        directory.mkdir()
        write_graph(directory, tensors)
        fill(directory, seed=seed, rope_theta=10000.0)
        weights[run] = {name: read(directory, name).tobytes() for name in TENSORS}
    assert weights[0] == weights[1]
    changed = {name for name in TENSORS if weights[0][name] != weights[2][name]}
    assert changed == set(TENSORS) - {"cos_cache", "sin_cache"}


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"q.MatMul.weight_Q4": (np.uint8, (8, 2, 16))}, "q.MatMul.weight_Q4: .* UINT8"),
        ({"mystery": (np.float16, (4, 4))}, "mystery: .* FLOAT16"),
        ({}, "not in one data file"),
    ],
)
def test_unknown_tensors_are_refused_and_nothing_is_written(tmp_path: Path, tensors: dict, reason: str) -> None:
    (tmp_path / "w.data").write_bytes(b"kept")
    write_graph(tmp_path, tensors) if tensors else ir.save(
        ir.Model(ir.Graph([], [], nodes=[], name="g", opset_imports={"": 20}), ir_version=10), tmp_path / "model.onnx"
    )
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(click.ClickException, match=reason):
        fill(tmp_path, seed=0, rope_theta=10000.0)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_data_outside_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    write_graph(tmp_path, {"a.bias": (np.float16, (4,))})
    text = (tmp_path / "model.onnx").read_bytes().replace(b"w.data", b"../wdt")
    (tmp_path / "inner" / "model.onnx").write_bytes(text)
    with pytest.raises(click.ClickException, match="not in one data file"):
        fill(tmp_path / "inner", seed=0, rope_theta=10000.0)
    assert not (tmp_path / "wdt").exists()


def test_the_script_runs_from_a_checkout(tmp_path: Path) -> None:
    write_graph(tmp_path, TENSORS)
    command = [sys.executable, str(ROOT / "scripts" / "build_models.py"), "fill", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'w.data'}: {(tmp_path / 'w.data').stat().st_size:,} bytes\n"

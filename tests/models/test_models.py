"""The shipped models are what their recipes say, are small, and give stock ONNX Runtime sensible logits."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tokenizers import Tokenizer

from scripts.model_recipes import SHIPPED

MODELS = Path(__file__).parents[2] / "models"
NAMES = sorted(path.name for path in MODELS.iterdir() if path.is_dir())
LARGEST = 2_000_000
CORPUS = (MODELS / "corpus.txt").read_text(encoding="utf-8")


@cache
def graph(name: str) -> ir.Graph:
    return ir.load(MODELS / name / "model.onnx").graph


def config(name: str) -> dict:
    return json.loads((MODELS / name / "genai_config.json").read_text())["model"]


def attention(name: str) -> list[ir.Node]:
    return [node for node in graph(name) if node.op_type == "GroupQueryAttention"]


def initializer(name: str, tensor: str) -> np.ndarray:
    return graph(name).initializers[tensor].const_value.numpy()


def stock(name: str):
    pytest.importorskip("onnxruntime", reason="needs stock ONNX Runtime (extra [cpu])")
    from tests.support.stock import StockModel

    return StockModel(MODELS / name)


def test_every_directory_has_a_recipe_and_a_line_in_the_readme() -> None:
    assert set(SHIPPED) == set(NAMES)
    readme = (MODELS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", readme, re.MULTILINE)) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_is_small_and_as_the_exporter_writes_it(name: str) -> None:
    files = {file.name: file.stat().st_size for file in (MODELS / name).iterdir()}
    assert set(files) == {
        "genai_config.json",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_configuration_and_graph_and_recipe_agree(name: str) -> None:
    model, sizes = config(name), SHIPPED[name].sizes
    decoder = model["decoder"]
    assert model["context_length"] == sizes["max_position_embeddings"] >= 300 + 64
    layers, heads = sizes["num_hidden_layers"], sizes["num_key_value_heads"]
    past = [decoder["inputs"][key] % i for i in range(layers) for key in ("past_key_names", "past_value_names")]
    present = [
        decoder["outputs"][key] % i for i in range(layers) for key in ("present_key_names", "present_value_names")
    ]
    inputs = {value.name: value for value in graph(name).inputs}
    assert set(inputs) == {"input_ids", "attention_mask", *past}
    assert {value.name for value in graph(name).outputs} == {"logits", *present}
    assert {inputs[port].shape[1] for port in past} == {heads}
    assert {node.attributes["kv_num_heads"].as_int() for node in attention(name)} == {heads}
    assert initializer(name, "cos_cache").shape[0] == model["context_length"]


@pytest.mark.parametrize("name", NAMES)
def test_stock_logits_are_finite_and_spread(name: str) -> None:
    prompt = np.random.default_rng(3).integers(1, 512, 300).tolist()
    logits = stock(name).greedy(prompt, 4).logits.astype(np.float64)
    assert np.isfinite(logits).all()
    assert (logits.std(axis=-1) > 1).all()
    assert np.abs(logits).max() < 100


def test_int4_weights_and_half_precision() -> None:
    assert [node.op_type for node in graph("llama-int4")].count("MatMulNBits") == 11
    assert {value.dtype for value in graph("llama-fp16").outputs} == {ir.DataType.FLOAT16}


def test_gemma_alternates_windows_and_caps_scores() -> None:
    windows = [node.attributes["local_window_size"].as_int() for node in attention("gemma2-tiny")]
    sliding = ["sliding_window_cache" in node.attributes for node in attention("gemma2-tiny")]
    assert windows == [64, -1, 64, -1]
    assert sliding == [True, False, True, False]
    assert {node.attributes["softcap"].as_float() for node in attention("gemma2-tiny")} == {50.0}


def test_phi_rotates_half_of_each_head_and_does_not_group() -> None:
    head_size = config("phi-tiny")["decoder"]["head_size"]
    assert initializer("phi-tiny", "cos_cache").shape[1] * 2 == head_size // 2
    node = attention("phi-tiny")[0]
    assert node.attributes["num_heads"].as_int() == node.attributes["kv_num_heads"].as_int()


def test_qwen3_normalises_queries_and_keys_before_attention() -> None:
    for node in attention("qwen3-tiny"):
        query, key, value = node.inputs[:3]
        norms = [
            initializer("qwen3-tiny", f"model.layers.{node.name.split('.')[1][0]}.attn.{side}_norm.layernorm.weight")
            for side in "qk"
        ]
        assert [norm.shape for norm in norms] == [(32,), (32,)]
        assert None not in (query, key, value)


def test_llama_rotary_table_is_scaled() -> None:
    """Against Llama 3's rule: long waves are slowed by the factor, short ones kept, those between are mixed."""
    rope = SHIPPED["llama-rope-scaled"].sizes["rope_parameters"]
    table = initializer("llama-rope-scaled", "cos_cache")
    half = table.shape[1]
    frequencies = rope["rope_theta"] ** (-np.arange(half) / half)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    frequencies = frequencies * (kept + (1 - kept) / rope["factor"])
    assert set(kept) > {0.0, 1.0}
    np.testing.assert_allclose(table, np.cos(np.outer(np.arange(len(table)), frequencies)), atol=1e-4)


@pytest.mark.parametrize("opening", ["The key and the value\n\n", "A tailor had three apprentices", "A ferryman had"])
def test_trained_model_goes_on_with_the_text_it_was_trained_on(opening: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODELS / "qwen2-tiny" / "tokenizer.json"))
    written = stock("qwen2-tiny").greedy(tokenizer.encode(opening).ids, 24)
    assert opening + tokenizer.decode(written.tokens) in CORPUS


def test_trained_model_is_not_certain_of_everything() -> None:
    """On its own text, greedily continued, the best token leads clearly in the middle and narrowly at the worst."""
    tokenizer = Tokenizer.from_file(str(MODELS / "qwen2-tiny" / "tokenizer.json"))
    best = np.sort(stock("qwen2-tiny").greedy(tokenizer.encode(CORPUS).ids[200:500], 64).logits)[:, -2:]
    margins = best[:, 1] - best[:, 0]
    assert margins.min() > 1e-3
    assert 1 < np.median(margins) < 12

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import helper

from onnx_kv.errors import ModelDirError
from onnx_kv.inspection import inspect_model
from onnx_kv.layout import KvLayout
from onnx_kv.patching import patch_model
from tests.support.tiny_model import HEAD_DIM, KV_HEADS, contents, node, tiny_model, write_model_dir


def test_what_a_fresh_export_is_and_could_become(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    before = contents(tmp_path)
    found = inspect_model(source)
    assert (found.layout, found.passes, found.attention_problem) == (KvLayout.HEAD_MAJOR, (), None)
    assert [layer.node for layer in found.layers] == ["layer.0/attention", "layer.1/attention"]
    assert found.bytes_per_token == 2 * 2 * KV_HEADS * HEAD_DIM * 4  # layers, key and value, float32
    assert (found.weight_files, found.weight_bytes) == (
        (source / "model.onnx.data",),
        (source / "model.onnx.data").stat().st_size,
    )
    states = {(state.name, state.argument): state.state for state in found.states}
    assert states == {
        ("stamp_kv_layout", "head-major"): "already so",
        ("stamp_kv_layout", "seq-major"): "possible",
        ("stamp_kv_layout", "paired"): "possible",
        ("stamp_kv_layout", "token-major"): "possible",
        ("lift_sequence_lengths", ""): "possible",
        ("last_token_logits", ""): "possible",
    }
    assert contents(tmp_path) == before


def test_what_a_patched_model_is(tmp_path: Path) -> None:
    patch_model(write_model_dir(tmp_path / "m"), tmp_path / "out", "paired", lift_sequence_lengths=True)
    found = inspect_model(tmp_path / "out")
    assert (found.layout, found.passes) == (KvLayout.PAIRED, ("lift_sequence_lengths", "stamp_kv_layout"))
    states = {(state.name, state.argument): state.state for state in found.states}
    assert states["stamp_kv_layout", "paired"] == states["lift_sequence_lengths", ""] == "already so"
    assert states["stamp_kv_layout", "head-major"] == states["last_token_logits", ""] == "possible"


def test_what_cannot_be_patched_is_shown_with_the_reasons(tmp_path: Path) -> None:
    model = tiny_model()
    node(model, "layer.1/attention").attribute.append(helper.make_attribute("kv_cache_bit_width", 8))
    model.graph.node.append(helper.make_node("Abs", ["attention_mask"], ["seen"], "spy"))
    found = inspect_model(write_model_dir(tmp_path / "m", model))
    refused = {state.name: state.reasons for state in found.states if state.state == "refused"}
    assert refused["stamp_kv_layout"] == ("node 'layer.1/attention': its cache is quantised (kv_cache_bit_width=8)",)
    assert refused["lift_sequence_lengths"] == ("node 'spy' (Abs) reads 'attention_mask'",)


def test_attention_that_is_not_understood_is_told_and_no_error(tmp_path: Path) -> None:
    model = tiny_model()
    del model.graph.value_info[:]
    found = inspect_model(write_model_dir(tmp_path / "m", model))
    assert (found.layers, found.layout, found.bytes_per_token) == ((), None, 0)
    assert found.attention_problem is not None
    assert "head size is unknown" in found.attention_problem
    assert json.loads(json.dumps(found.to_json()))["layout"] is None


def test_broken_weights_are_an_error(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    (source / "model.onnx.data").write_bytes(b"short")
    with pytest.raises(ModelDirError, match="the file has 5 bytes"):
        inspect_model(source)

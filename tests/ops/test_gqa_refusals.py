"""What the operator cannot do is refused when the model is loaded, by the name of the attribute, input or output."""

from __future__ import annotations

from typing import Any

import onnxruntime
import pytest
from onnx import TensorProto, helper

from tests.support.ort_gqa import OUTPUTS, node_model, open_session

BASE: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2}
FLOAT, INT32 = TensorProto.FLOAT, TensorProto.INT32
CACHE = ["b", 2, "c", 16]
PORTS: dict[str, tuple[int, list[Any]]] = {
    "query": (FLOAT, ["b", "s", 64]),
    "key": (FLOAT, ["b", "s", 32]),
    "value": (FLOAT, ["b", "s", 32]),
    "past_key": (FLOAT, CACHE),
    "past_value": (FLOAT, CACHE),
    "seqlens_k": (INT32, ["b"]),
    "total_sequence_length": (INT32, [1]),
    "cos_cache": (FLOAT, ["r", 8]),
    "sin_cache": (FLOAT, ["r", 8]),
}


def without(*names: str) -> dict[str, tuple[int, list[Any]]]:
    """The ports but these."""
    return {name: port for name, port in PORTS.items() if name not in names}


# attributes: words of the message
ATTRIBUTES: dict[str, tuple[dict[str, Any], str]] = {
    "sliding_window_cache": ({"sliding_window_cache": 1}, "sliding_window_cache=1 .*patch the model with onnx-kv"),
    "causal": ({"causal": 0}, "causal=0: bidirectional"),
    "qk_output": ({"qk_output": 1}, "qk_output"),
    "kv_cache_bit_width": ({"kv_cache_bit_width": 8}, "kv_cache_bit_width: a quantised cache"),
    "k_quant_type": ({"k_quant_type": "PER_TENSOR"}, "k_quant_type: a quantised cache"),
    "v_quant_type": ({"v_quant_type": "PER_CHANNEL"}, "v_quant_type: a quantised cache"),
    "kv_layout": ({"kv_layout": 4}, "kv_layout is 4; this library knows 0 .head-major., 1"),
    "kv_layout negative": ({"kv_layout": -1}, "kv_layout is -1"),
    "kv_layout text": ({"kv_layout": "seq-major"}, "kv_layout must be an integer"),
    "no token stride": ({"kv_layout": 3}, "kv_token_stride must be a positive number"),
    "no heads": ({"num_heads": 0}, "num_heads must be a positive number"),
    "negative heads": ({"kv_num_heads": -2}, "kv_num_heads must be a positive number"),
    "odd group": ({"num_heads": 5}, "num_heads must be a multiple of kv_num_heads"),
    "softcap integer": ({"softcap": 3}, "softcap must be a float"),
    "softcap infinite": ({"softcap": float("inf")}, "softcap is not a finite number"),
    "scale not a number": ({"scale": float("nan")}, "scale is not a finite number"),
    "window float": ({"local_window_size": 3.0}, "local_window_size must be an integer"),
    "do_rotary": ({"do_rotary": 2}, "do_rotary must be 0 or 1"),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes(name: str) -> None:
    attributes, message = ATTRIBUTES[name]
    with pytest.raises(Exception, match=f"GroupQueryAttention node 'attention': .*{message}"):
        open_session(node_model(PORTS, BASE | attributes))


# ports: words of the message
CONNECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "k_scale": (PORTS | {"k_scale": (FLOAT, [1])}, "input k_scale: a quantised cache"),
    "v_scale": (PORTS | {"v_scale": (FLOAT, [1])}, "input v_scale: a quantised cache"),
    "value": (without("value"), "key and value belong together"),
    "past_value": (without("past_value"), "past_key and past_value belong together"),
    "sin_cache": (without("sin_cache"), "cos_cache and sin_cache belong together"),
    "k_norm_weight": (PORTS | {"q_norm_weight": (FLOAT, [16])}, "q_norm_weight and k_norm_weight belong together"),
    "rotary": (without("cos_cache", "sin_cache"), "do_rotary=1 needs the inputs cos_cache and sin_cache"),
}


@pytest.mark.parametrize("name", CONNECTIONS)
def test_connections(name: str) -> None:
    ports, message = CONNECTIONS[name]
    with pytest.raises(Exception, match=f"GroupQueryAttention node 'attention': .*{message}"):
        open_session(node_model(ports, BASE | {"do_rotary": 1}))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [((*OUTPUTS, "output_qk"), "output output_qk"), (("output",), "outputs present_key and present_value")],
)
def test_outputs(outputs: tuple[str, ...], message: str) -> None:
    with pytest.raises(Exception, match=message):
        open_session(node_model(PORTS, BASE, outputs))


def test_a_node_without_a_name_is_known_by_its_output() -> None:
    with pytest.raises(Exception, match="GroupQueryAttention node 'output': attribute qk_output"):
        open_session(node_model(PORTS, BASE | {"qk_output": 1}, name=""))


def test_an_interleaved_layout_without_a_past() -> None:
    with pytest.raises(Exception, match="kv_layout: an interleaved layout needs past_key and past_value"):
        open_session(node_model(without("past_key", "past_value"), BASE | {"kv_layout": 2, "kv_token_stride": 64}))


def test_a_quantised_cache_type() -> None:
    ports = PORTS | dict.fromkeys(("past_key", "past_value"), (TensorProto.UINT8, CACHE))
    with pytest.raises(Exception, match=r"tensor\(uint8\)"):
        open_session(node_model(ports, BASE))


def test_defaults_that_exporters_write_out() -> None:
    """Every refused attribute is taken at the value that means "not used"."""
    unused = {
        "sliding_window_cache": 0,
        "causal": 1,
        "qk_output": 0,
        "kv_cache_bit_width": 0,
        "k_quant_type": "NONE",
        "v_quant_type": "NONE",
        "kv_layout": 0,
        "local_window_size": -1,
        "softcap": 0.0,
        "scale": 0.0,
        "smooth_softmax": -1,
    }
    open_session(node_model(PORTS, BASE | unused))


def test_stock_onnx_runtime_refuses_a_patched_node() -> None:
    """What a patched model does where the library is not loaded: it is not run with its bytes misread."""
    with pytest.raises(Exception, match="kv_layout"):
        open_session(node_model(PORTS, BASE | {"kv_layout": 1}), library=False)


def test_the_library_serves_unpatched_nodes_and_leaves_other_operators_alone() -> None:
    """A second operator of the same domain still is ONNX Runtime's."""
    node = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info("x", FLOAT, [2])],
        [helper.make_tensor_value_info("y", FLOAT, [2])],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = open_session(model.SerializeToString())
    assert isinstance(session, onnxruntime.InferenceSession)
    open_session(node_model(PORTS, BASE))

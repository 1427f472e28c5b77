"""What the models are made of, as plain data: architecture, sizes, where the weights come from, export options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 512
CONTEXT = 1024


@dataclass(frozen=True)
class Recipe:
    """One model.

    Attributes:
        summary: What the model is there to exercise.
        architecture: Name of the architecture in transformers, such as `Qwen2`.
        sizes: Arguments of the architecture's configuration, but for the special tokens.
        precision: The exporter's `-p`.
        target: The exporter's `-e`.
        trained: Whether the weights are trained on `models/corpus.txt`; drawn from a seed otherwise.
    """

    summary: str
    architecture: str
    sizes: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    target: str = "cpu"
    trained: bool = False


def _sizes(**changes: Any) -> dict[str, Any]:
    """The sizes that the shipped models have where `changes` says nothing else."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
    } | changes


# The exporter has no half precision for the CPU, and no grouped attention for half precision but on CUDA.
SHIPPED: dict[str, Recipe] = {
    "qwen2-tiny": Recipe(
        "biases on Q, K and V; groups of three query heads; trained, so it speaks",
        "Qwen2",
        _sizes(hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=6, head_dim=32),
        trained=True,
    ),
    "llama-rope-scaled": Recipe(
        "Llama 3's scaling of the rotary frequencies",
        "Llama",
        _sizes(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        ),
    ),
    "gemma2-tiny": Recipe(
        "softcap; layers 0 and 2 see a window of 64 tokens, with `sliding_window_cache=1`",
        "Gemma2",
        _sizes(
            hidden_size=96,
            intermediate_size=160,
            num_hidden_layers=4,
            head_dim=32,
            query_pre_attn_scalar=32,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            sliding_window=64,
        ),
    ),
    "qwen3-tiny": Recipe("Q and K normalised per head; separate Q, K and V", "Qwen3", _sizes(head_dim=32)),
    "phi-tiny": Recipe(
        "half of each head is rotated; as many KV heads as query heads",
        "Phi",
        _sizes(intermediate_size=320, num_key_value_heads=4, partial_rotary_factor=0.5),
    ),
    "llama-int4": Recipe("4-bit weights (MatMulNBits)", "Llama", _sizes(), precision="int4"),
    "llama-fp16": Recipe("half precision; heads of 64", "Llama", _sizes(head_dim=64), precision="fp16", target="cuda"),
}
"""The models in `models/`, by directory."""

SHAPES: dict[str, Recipe] = {
    "qwen2.5-0.5b": Recipe(
        "the shape of Qwen2.5-0.5B",
        "Qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
        precision="fp16",
        target="cuda",
    ),
}
"""Shapes of real models, for benchmarks. The context length is chosen when one is made."""

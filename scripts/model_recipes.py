"""What each shipped model is made of: architecture, weights, export options.

A recipe gives a Hugging Face configuration and says how its weights come about: drawn from a seed, or trained on
`models/corpus.txt`. `write_checkpoint` turns it into a checkpoint folder (configuration, safetensors, tokenizer), which the
exporter then reads as it would read any downloaded model. Needs the `[export]` extra.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = Path(__file__).resolve().parent.parent / "models" / "corpus.txt"
END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 512
CONTEXT = 1024
SEED = 20240607

Config = transformers.PretrainedConfig


@dataclass(frozen=True)
class Recipe:
    """One shipped model.

    Attributes:
        summary: What the model is there to exercise.
        config: Makes the configuration; called with the tokenizer's end-of-text id.
        precision: The exporter's `-p`.
        target: The exporter's `-e`.
        trained: Whether the weights are trained on the corpus; drawn from a seed otherwise.
        options: The exporter's `--extra_options`.
    """

    summary: str
    config: Callable[[int], Config]
    precision: str = "fp32"
    target: str = "cpu"
    trained: bool = False
    options: dict[str, str] = field(default_factory=dict)


def _common(end: int, **changes: Any) -> dict[str, Any]:
    """Arguments that every configuration class here takes; `changes` win."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "tie_word_embeddings": False,
    } | changes


def _qwen2(end: int) -> Config:
    return transformers.Qwen2Config(
        **_common(end, hidden_size=96, intermediate_size=192, num_hidden_layers=4, num_attention_heads=6)
    )


def _llama(end: int, **changes: Any) -> Config:
    return transformers.LlamaConfig(**_common(end, **changes))


def _llama_rope_scaled(end: int) -> Config:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    return _llama(end, rope_parameters=scaling)


def _gemma2(end: int) -> Config:
    return transformers.Gemma2Config(
        **_common(end, hidden_size=96, intermediate_size=160, num_hidden_layers=4),
        head_dim=32,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window=64,
    )


def _qwen3(end: int) -> Config:
    return transformers.Qwen3Config(**_common(end), head_dim=32)


def _phi(end: int) -> Config:
    return transformers.PhiConfig(
        **_common(end, intermediate_size=320, num_key_value_heads=4), partial_rotary_factor=0.5
    )


RECIPES: dict[str, Recipe] = {
    "qwen2-tiny": Recipe("biases on Q, K and V; groups of three; speaks", _qwen2, trained=True),
    "llama-rope-scaled": Recipe("Llama 3 scaling of the rotary frequencies", _llama_rope_scaled),
    "gemma2-tiny": Recipe("softcap; every other layer sees a window of 64 tokens", _gemma2),
    "qwen3-tiny": Recipe("Q and K are normalised per head before the rotation", _qwen3),
    "phi-tiny": Recipe("half of each head is rotated; as many KV heads as query heads", _phi),
    "llama-int4": Recipe("4-bit weights (MatMulNBits)", _llama, precision="int4"),
    "llama-fp16": Recipe(
        "half precision throughout; heads of 64", lambda end: _llama(end, head_dim=64), precision="fp16", target="cuda"
    ),
}


def train_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Trains a byte-level BPE of VOCABULARY entries on the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(CORPUS)], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


@torch.no_grad()
def draw_weights(model: torch.nn.Module, end: int) -> None:
    """Draws every parameter from SEED, scaled so that the logits spread as a real model's do.

    Matrices have unit gain (standard deviation 1 / sqrt(inputs)), so activations keep their size through the layers; the head
    has three times that, so the logits' standard deviation is about 3. The end token's row of the head is zero: a
    random model would otherwise stop at a random place.
    """
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.add_(0.1 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        else:
            gain = 3.0 if name.startswith("lm_head") else 1.0
            parameter.copy_(gain / math.sqrt(parameter.shape[1]) * noise)
        if name.startswith("lm_head"):
            parameter[end] = 0.0


def write_checkpoint(recipe: Recipe, folder: Path) -> None:
    """Writes the checkpoint that `recipe` describes into `folder`."""
    tokenizer = train_tokenizer()
    end = tokenizer.eos_token_id
    model = transformers.AutoModelForCausalLM.from_config(recipe.config(end), dtype=torch.float32)
    draw_weights(model, end)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

"""Prompts for comparisons: random tokens, the same in every run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx_kv.errors import ConfigError
from onnx_kv.runtime.model import RuntimeModel

_SEED = 20_240_229


def random_prompts(model: RuntimeModel, lengths: Sequence[int]) -> list[list[int]]:
    """Return a prompt of each length, of tokens of the model's vocabulary.

    Raises:
        ConfigError: the model does not say how many tokens it has, or a length is not at least 1.
    """
    if model.vocabulary is None:
        raise ConfigError(f"{model.directory.path} says nowhere how many tokens its vocabulary has")
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"prompt lengths {list(lengths)}: there must be one, and each at least 1")
    generator = np.random.default_rng(_SEED)
    return [[int(token) for token in generator.integers(0, model.vocabulary, length)] for length in lengths]

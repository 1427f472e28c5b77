"""What a run is fed besides the cache: tokens, positions and lengths, by the ports that the model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_kv.metadata import Metadata


def feeds(
    ports: Metadata, tokens: Sequence[Sequence[int]], past: Sequence[int], total: int | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Return the inputs of a run on `tokens` ([rows][new], as many for each row) behind `past` tokens of each row.

    `total` is what the model takes for the longest row's length after the run, by default what it is. A mask has as
    many columns, and a one for every token that the row's cache holds after the run.
    """
    new = len(tokens[0])
    before = np.asarray(past, np.int64)
    lengths = before + new
    total = int(lengths.max()) if total is None else total
    values: dict[str | None, npt.NDArray[Any]] = {
        ports.token_input: np.asarray(tokens, np.int64),
        ports.position_ids_input: before[:, None] + np.arange(new),
        ports.attention_mask_input: np.arange(total) < lengths[:, None],
        ports.seqlens_k_input: lengths - 1,
        ports.total_sequence_length_input: np.array([total]),
    }
    return {port: value for port, value in values.items() if port is not None}

"""What a run is fed besides the cache: tokens, positions and lengths, by the ports that the model has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx_kv.metadata import Metadata
from onnx_kv.runtime.session import Run


def feed(run: Run, ports: Metadata, tokens: Sequence[Sequence[int]], past: Sequence[int]) -> None:
    """Bind the inputs of a run on `tokens` ([rows][new], as many for each row) behind `past` tokens of each row.

    A mask has a one for every token that the row's cache holds after the run, as many columns as the longest row has.
    """
    new = len(tokens[0])
    lengths = np.asarray(past) + new
    run.array(ports.token_input, tokens)
    if ports.position_ids_input is not None:
        run.array(ports.position_ids_input, np.asarray(past)[:, None] + np.arange(new))
    if ports.attention_mask_input is not None:
        run.array(ports.attention_mask_input, np.arange(lengths.max()) < lengths[:, None])
    if ports.seqlens_k_input is not None:
        run.array(ports.seqlens_k_input, lengths - 1)
    if ports.total_sequence_length_input is not None:
        run.array(ports.total_sequence_length_input, lengths.max(keepdims=True))

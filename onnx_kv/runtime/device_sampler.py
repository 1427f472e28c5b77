"""Choosing the next token on the device, and advancing the inputs of the step that follows: one kernel a step.

The kernel writes each row's token, position, length and attention-mask slot where the model reads them, so that a
captured step can be replayed without the host. Chosen tokens also go into a ring that the host reads when it likes.
Sampling follows the same rules as `sampling.HostSampler`, with random numbers of its own: equal seeds give equal tokens
on the device, not the host's tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onnx_kv._native import function
from onnx_kv.cuda import Buffer, Stream
from onnx_kv.runtime.sampling import Sampling

_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}


class _Choice(ctypes.Structure):
    """OnnxKvChoice of ops/capi.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("ring_size", ctypes.c_int32),
        ("logits", ctypes.c_uint64),
        ("row_stride", ctypes.c_int64),
        ("workspace", ctypes.c_uint64),
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("top_p", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        ("input_ids", ctypes.c_uint64),
        ("position_ids", ctypes.c_uint64),
        ("seqlens_k", ctypes.c_uint64),
        ("attention_mask", ctypes.c_uint64),
        ("mask_stride", ctypes.c_int64),
        ("ring", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
    )


_workspace_bytes = function(
    "onnx_kv_cuda_choice_workspace", ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64)
)
_choose = function("onnx_kv_cuda_choose", ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(_Choice))


class DeviceSampler:
    """The device's side of a batch between two steps, and the kernel that advances it.

    The buffers are the model's inputs and keep their addresses: `input_ids`, `position_ids` (int64 [rows, 1]),
    `seqlens_k` (int32 [rows]) and, with `mask_slots`, `attention_mask` (int64 [rows, mask_slots]).
    """

    def __init__(
        self,
        sampling: Sampling,
        rows: int,
        vocab: int,
        dtype: str,
        stream: Stream,
        *,
        mask_slots: int = 0,
        ring: int = 64,
    ) -> None:
        device, self._stream, self._ring_size = stream.device, stream, ring
        self.rows, self.mask_slots = rows, mask_slots
        self.input_ids = Buffer(8 * rows, device)
        self.position_ids = Buffer(8 * rows, device)
        self.seqlens_k = Buffer(4 * rows, device)
        self.attention_mask = Buffer(8 * rows * mask_slots, device) if mask_slots else None
        self._ring = Buffer(8 * rows * ring, device)
        self._steps = Buffer(4 * rows, device)
        size = ctypes.c_uint64()
        _workspace_bytes(rows, vocab, ctypes.byref(size))
        self._workspace = Buffer(size.value, device)
        stream.fill(self._workspace.address, 0, size.value)
        stream.fill(self._steps.address, 0, 4 * rows)
        self._choice = _Choice(
            dtype=_DTYPES[dtype],
            batch=rows,
            vocab=vocab,
            ring_size=ring,
            workspace=self._workspace.address,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed & (1 << 64) - 1,
            input_ids=self.input_ids.address,
            position_ids=self.position_ids.address,
            seqlens_k=self.seqlens_k.address,
            attention_mask=self.attention_mask.address if self.attention_mask else 0,
            mask_stride=mask_slots,
            ring=self._ring.address,
            steps=self._steps.address,
        )

    def start(self, tokens: Sequence[int], lengths: Sequence[int]) -> None:
        """Set the inputs of a step on `tokens`, one a row, that follow `lengths[row]` tokens in the cache; waits."""
        places = np.asarray(lengths, np.int64)
        self.input_ids.write(np.asarray(tokens, np.int64), self._stream)
        self.position_ids.write(places, self._stream)
        self.seqlens_k.write(places.astype(np.int32), self._stream)
        if self.attention_mask:
            mask = (np.arange(self.mask_slots) <= places[:, None]).astype(np.int64)
            self.attention_mask.write(np.ascontiguousarray(mask), self._stream)
        self._stream.synchronize()

    def choose(self, logits: int, row_stride: int) -> None:
        """Queue the choice from logits at a device address, row r at `r * row_stride` elements, and the advance."""
        self._choice.logits, self._choice.row_stride = logits, row_stride
        _choose(self._stream.device, self._stream.handle, ctypes.byref(self._choice))

    def chosen(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens number `first` … `first + count - 1` that were chosen, [rows, count], after all queued work.

        Only the last `ring` tokens are kept.
        """
        ring = np.empty((self.rows, self._ring_size), np.int64)
        self._ring.read(ring, self._stream)
        self._stream.synchronize()
        return ring[:, np.arange(first, first + count) % self._ring_size]

    def close(self) -> None:
        """Release the device's memory."""
        for buffer in (self.input_ids, self.position_ids, self.seqlens_k, self.attention_mask):
            if buffer is not None:
                buffer.close()
        for buffer in (self._ring, self._steps, self._workspace):
            buffer.close()

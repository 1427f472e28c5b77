"""Choosing the next token on the device, and advancing the inputs of the step that follows: one kernel a step.

The kernel writes each row's token, position, length and attention-mask slot where the model reads them, so that a
captured step can be replayed without the host. Chosen tokens also go into a ring in the host's memory, which the host
reads when the step is done. Sampling follows the same rules as `sampling.HostSampler`, with random numbers of its own:
equal seeds give equal tokens on the device, not the host's tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_kv._native import function
from onnx_kv.cuda import Buffer, PinnedBuffer, Stream
from onnx_kv.runtime.sampling import Sampling

NO_TOKEN = -1
"""What is chosen from logits that have a NaN or +inf, or nothing but -inf."""

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
        ("live", ctypes.c_uint64),
    )


_workspace_bytes = function(
    "onnx_kv_cuda_choice_workspace", ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64)
)
_choose = function("onnx_kv_cuda_choose", ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(_Choice))


class DeviceSampler:
    """The device's side of a batch between two steps, and the kernel that advances it.

    The buffers are the model's inputs and keep their addresses: `input_ids`, `position_ids` (int64 [rows, 1]),
    `seqlens_k` (int32 [rows]) and, with `mask_slots`, `attention_mask` (int64 [rows, mask_slots] at its start).
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
        self.rows = rows
        self.input_ids = Buffer(8 * rows, device)
        self.position_ids = Buffer(8 * rows, device)
        self.seqlens_k = Buffer(4 * rows, device)
        self.attention_mask = Buffer(8 * rows * mask_slots, device) if mask_slots else None
        self._steps = Buffer(4 * rows, device)
        self._pinned = PinnedBuffer(8 * rows * ring, device)
        self._pinned_live = PinnedBuffer(4 * rows, device)
        self._ring: npt.NDArray[np.int64] = self._pinned.array(np.int64, (rows, ring))
        self._live: npt.NDArray[np.int32] = self._pinned_live.array(np.int32, (rows,))
        size = ctypes.c_uint64()
        _workspace_bytes(rows, vocab, ctypes.byref(size))
        self._workspace = Buffer(size.value, device)
        stream.fill(self._workspace.address, 0, size.value)
        self._choice = _Choice(
            dtype=_DTYPES[dtype],
            batch=rows,
            vocab=vocab,
            ring_size=ring,
            workspace=self._workspace.address,
            input_ids=self.input_ids.address,
            position_ids=self.position_ids.address,
            seqlens_k=self.seqlens_k.address,
            attention_mask=self.attention_mask.address if self.attention_mask else 0,
            mask_stride=mask_slots,
            ring=self._pinned.address,
            steps=self._steps.address,
            live=self._pinned_live.address,
        )
        self.set_sampling(sampling)

    def set_sampling(self, sampling: Sampling) -> None:
        """Choose otherwise from now on. A graph that was captured goes on as it did."""
        self._choice.temperature = sampling.temperature
        self._choice.top_k, self._choice.top_p = sampling.top_k, sampling.top_p
        self._choice.seed = sampling.seed & (1 << 64) - 1

    def start(self, tokens: Sequence[int], lengths: Sequence[int], slots: int | None = None) -> None:
        """Begin a sequence of choices: the next step is on `tokens`, behind `lengths[row]` tokens of the cache; waits.

        A mask is laid out as `set_mask` does, with `slots` or as it was.
        """
        places = np.asarray(lengths, np.int64)
        self._stream.synchronize()  # choices in flight still write
        self._live[:] = 1
        self._stream.fill(self._steps.address, 0, 4 * self.rows)
        self._write(self.input_ids, np.asarray(tokens, np.int64))
        self._write(self.position_ids, places)
        self._write(self.seqlens_k, places.astype(np.int32))
        self.set_mask(self._choice.mask_stride if slots is None else slots, lengths)

    def set_mask(self, slots: int, lengths: Sequence[int]) -> None:
        """Lay the mask out as [rows, slots], with a one for each of `lengths[row]` tokens and for the next."""
        if self.attention_mask is None:
            return
        self._choice.mask_stride = slots
        self._write(self.attention_mask, (np.arange(slots) <= np.asarray(lengths)[:, None]).astype(np.int64))

    def hold(self, row: int, token: int, length: int) -> None:
        """Let a row stay on `token`, behind `length` tokens, whatever steps follow or are in flight."""
        self._live[row] = 0
        self._write(self.input_ids, np.array([token], np.int64), 8 * row)
        self._write(self.position_ids, np.array([length], np.int64), 8 * row)
        self._write(self.seqlens_k, np.array([length], np.int32), 4 * row)
        slots = self._choice.mask_stride
        if self.attention_mask and length + 1 < slots:  # a step in flight may have gone one further
            self._write(self.attention_mask, np.zeros(1, np.int64), 8 * (row * slots + length + 1))

    def choose(self, logits: int, row_stride: int) -> None:
        """Queue the choice from logits at a device address, row r at `r * row_stride` elements, and the advance."""
        self._choice.logits, self._choice.row_stride = logits, row_stride
        _choose(self._stream.device, self._stream.handle, ctypes.byref(self._choice))

    def token(self, row: int, number: int) -> int:
        """A row's token number `number` since `start`, one of its last `ring`. The caller has waited for its step."""
        return int(self._ring[row, number % self._ring_size])

    def chosen(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens number `first` … `first + count - 1` of each row, [rows, count], after all queued work."""
        self._stream.synchronize()
        return self._ring[:, np.arange(first, first + count) % self._ring_size]

    def close(self) -> None:
        """Release the memory."""
        self._stream.synchronize()
        for buffer in (self.input_ids, self.position_ids, self.seqlens_k, self.attention_mask):
            if buffer is not None:
                buffer.close()
        for owned in (self._steps, self._workspace, self._pinned, self._pinned_live):
            owned.close()

    def _write(self, buffer: Buffer, values: npt.NDArray[Any], offset: int = 0) -> None:
        """Queue a write; the values are staged, so they may go when this returns."""
        buffer.write(np.ascontiguousarray(values), self._stream, offset)

from __future__ import annotations

import numpy as np
import pytest

from onnx_kv import cuda
from onnx_kv.errors import ConfigError, DriverError, OutOfMemoryError

pytestmark = pytest.mark.gpu


def test_device_info_and_memory() -> None:
    info = cuda.device_info(0)
    free, total = cuda.memory_info(0)
    assert info.name
    assert info.multiprocessors > 0
    assert 0 < free <= total
    assert total <= info.total_bytes


def _closed_buffer() -> cuda.Buffer:
    buffer = cuda.Buffer(16)
    buffer.close()
    return buffer


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no CUDA device 99"):
        cuda.Stream(99)


def test_buffer_round_trip(stream: cuda.Stream) -> None:
    data = np.arange(1000, dtype=np.float32)
    with cuda.copy_to_device(data, stream) as buffer:
        np.testing.assert_array_equal(cuda.copy_to_host(buffer, np.float32, (1000,), stream), data)
        tail = np.empty(10, np.float32)
        buffer.read(tail, stream, offset=990 * 4)
        stream.synchronize()
        np.testing.assert_array_equal(tail, data[990:])
        with pytest.raises(ConfigError, match="4000 bytes"):
            buffer.read(tail, stream, offset=991 * 4)


def test_pitched_copy_gathers_rows(stream: cuda.Stream) -> None:
    data = np.arange(64, dtype=np.uint8).reshape(8, 8)
    out = np.empty((8, 3), np.uint8)
    with cuda.copy_to_device(data, stream) as buffer:
        copy = cuda.PitchedCopy(out.ctypes.data, 3, buffer.address + 2, 8, 3, 8)
        stream.copy_pitched([copy], cuda.CopyKind.DEVICE_TO_HOST)
        stream.synchronize()
    np.testing.assert_array_equal(out, data[:, 2:5])


def test_pinned_memory_and_events(stream: cuda.Stream) -> None:
    nbytes = 64 << 20
    with cuda.PinnedBuffer(nbytes) as pinned, cuda.Buffer(nbytes) as buffer, cuda.Event() as a, cuda.Event() as b:
        view = pinned.array(np.uint8, (nbytes,))
        a.record(stream)
        stream.fill(buffer.address, 7, nbytes)
        buffer.read(view, stream)
        b.record(stream)
        b.synchronize()
        assert b.done
        assert b.elapsed_ms(a) > 0
        assert (view == 7).all()


def test_a_captured_graph_runs_only_when_launched(stream: cuda.Stream) -> None:
    with cuda.copy_to_device(np.zeros(4, np.uint8), stream) as buffer:
        with stream.capture() as capture:
            stream.fill(buffer.address, 9, 4)
        assert cuda.copy_to_host(buffer, np.uint8, (4,), stream).tolist() == [0] * 4
        with capture.graph as graph:
            assert graph.nodes == 1
            graph.upload(stream)
            graph.launch(stream)
            assert cuda.copy_to_host(buffer, np.uint8, (4,), stream).tolist() == [9] * 4


def test_an_error_in_a_capture_ends_it_and_leaves_the_stream_usable(stream: cuda.Stream) -> None:
    with cuda.copy_to_device(np.zeros(4, np.uint8), stream) as buffer:
        closed = _closed_buffer()
        with pytest.raises(ConfigError, match="Buffer is closed"), stream.capture():
            stream.fill(closed.address, 9, 4)
        with pytest.raises(DriverError, match="cuStreamSynchronize"), stream.capture():
            stream.synchronize()
        assert cuda.copy_to_host(buffer, np.uint8, (4,), stream).tolist() == [0] * 4


def test_an_impossible_buffer_is_out_of_memory() -> None:
    with pytest.raises(OutOfMemoryError, match="cuMemAlloc"):
        cuda.Buffer(1 << 50)


def test_a_closed_object_says_so(stream: cuda.Stream) -> None:
    buffer = cuda.Buffer(16)
    buffer.close()
    buffer.close()
    with pytest.raises(ConfigError, match="Buffer is closed"):
        stream.fill(buffer.address, 0, 16)

"""Reservations, growth and captured graphs on a device: the host's tests hold the rules; CUDA follows them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from onnx_kv import cuda
from onnx_kv.errors import ConfigError, DriverError, OutOfMemoryError
from onnx_kv.memory import MemoryBudget, MemoryPool

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def read(stream: cuda.Stream, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    result = np.empty(nbytes, np.uint8)
    stream.copy(result.ctypes.data, address, nbytes, cuda.CopyKind.DEVICE_TO_HOST)
    stream.synchronize()
    return result


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool("cuda")


def test_address_space_is_free_and_commits_are_real(pool: MemoryPool, stream: cuda.Stream) -> None:
    granule = pool.granule
    assert granule == cuda_granularity()
    free = cuda.memory_info()[0]
    reservation = pool.reserve(1 << 40)
    assert cuda.memory_info()[0] == free
    assert pool.commit([reservation.span(5, 6), reservation.span(3 * granule - 1, 3 * granule + 1)]) == 3 * granule
    assert free - cuda.memory_info()[0] >= 3 * granule
    stream.fill(reservation.address + 2 * granule, 7, 2 * granule)
    assert (read(stream, reservation.address + 3 * granule - 5, 10) == 7).all()
    assert pool.decommit([reservation.span()]).freed == 3 * granule
    reservation.close()
    assert pool.trim() == 3 * granule
    assert cuda.memory_info()[0] == free


def cuda_granularity() -> int:
    """The device's own granule, found by trying: the smallest power of two that a pool accepts."""
    size = 1 << 16
    while True:
        try:
            return MemoryPool("cuda", size).granule
        except ConfigError:
            size *= 2


def test_one_granule_at_two_addresses(pool: MemoryPool, stream: cuda.Stream) -> None:
    first, second = pool.reserve(4 * pool.granule), pool.reserve(4 * pool.granule)
    pool.commit([first.span(0, 2 * pool.granule)])
    pool.share([first.span(0, 2 * pool.granule)], [second.span(pool.granule, 3 * pool.granule)])
    stream.fill(first.address + pool.granule, 42, 64)
    assert (read(stream, second.address + 2 * pool.granule, 64) == 42).all()
    assert pool.counters().physical_bytes == 2 * pool.granule
    stream.synchronize()
    first.close()
    assert (read(stream, second.address + 2 * pool.granule, 64) == 42).all()


def test_a_failure_of_any_driver_call_is_undone(stream: cuda.Stream) -> None:
    pool, budget = MemoryPool("cuda"), MemoryBudget(1 << 40)
    granule = pool.granule
    first, second = pool.reserve(16 * granule, budget), pool.reserve(16 * granule, budget)
    pool.commit([first.span(0, 2 * granule)])
    stream.fill(first.address, 9, 2 * granule)
    operations = (
        lambda: pool.commit([first.span(granule, 4 * granule), second.span(0, 2 * granule)]),
        lambda: pool.decommit([first.span(2 * granule, 4 * granule), second.span()]),
    )
    for operation in operations:
        held, failures = budget.held, 0
        while True:
            pool.fail_after(failures)
            try:
                operation()
                break
            except DriverError:
                pool.fail_after(-1)
            assert budget.held == pool.counters().committed_bytes == held
            assert (read(stream, first.address, 2 * granule) == 9).all()
            failures += 1
        pool.fail_after(-1)
        assert failures >= 4
    assert budget.held == 2 * granule


def test_a_device_that_is_full_is_an_error_that_changes_nothing(stream: cuda.Stream) -> None:
    free = cuda.memory_info()[0]
    pool = MemoryPool("cuda", free // (5 * MIB) * 2 * MIB)  # two of them fit, three do not
    reservation = pool.reserve(8 * pool.granule)
    with pytest.raises(OutOfMemoryError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        pool.commit([reservation.span(0, 3 * pool.granule)])
    assert pool.counters().physical_bytes == 0
    assert cuda.memory_info()[0] == free
    assert pool.commit([reservation.span(0, pool.granule)]) == pool.granule
    stream.fill(reservation.address, 1, pool.granule)
    stream.synchronize()


def test_growth_while_work_is_in_flight(pool: MemoryPool, stream: cuda.Stream) -> None:
    """1,000 commits, each while the stream still writes and copies what was committed before."""
    granule, rounds = pool.granule, 1000
    reservation = pool.reserve((rounds + 1) * granule)
    pool.commit([reservation.span(0, granule)])
    stream.fill(reservation.address, 0, granule)
    for number in range(1, rounds + 1):
        stream.fill(reservation.address + (number - 1) * granule, number % 251, granule)
        if number > 1:
            source, target = (reservation.address + index * granule for index in (number - 2, number - 1))
            stream.copy(target, source, 64, cuda.CopyKind.DEVICE_TO_DEVICE)
        pool.commit([reservation.span(number * granule, number * granule + 1)])
    stream.synchronize()
    probe = np.array([read(stream, reservation.address + i * granule + 64, 1)[0] for i in range(0, rounds, 37)])
    np.testing.assert_array_equal(probe, [(i + 1) % 251 for i in range(0, rounds, 37)])
    assert (read(stream, reservation.address + (rounds - 1) * granule, 64) == 1).all()


def test_a_captured_graph_survives_a_commit_of_new_granules(pool: MemoryPool, stream: cuda.Stream) -> None:
    granule = pool.granule
    reservation = pool.reserve(4 * granule)
    pool.commit([reservation.span(0, granule)])
    with cuda.Buffer(64) as target:
        with stream.capture() as capture:
            stream.copy(target.address, reservation.address, 64, cuda.CopyKind.DEVICE_TO_DEVICE)
        for value in (1, 2, 3):
            stream.fill(reservation.address, value, 64)
            capture.graph.launch(stream)
            pool.commit([reservation.span(0, value * granule + 1)])
            assert cuda.copy_to_host(target, np.uint8, (64,), stream).tolist() == [value] * 64
        capture.graph.close()


@pytest.mark.parametrize("distance", [-36 * MIB, -1, 1, 33, 36 * MIB])
def test_moves_may_overlap_themselves(stream: cuda.Stream, distance: int) -> None:
    """As memmove, also for a move longer than the scratch memory that it goes through."""
    nbytes, start = 40 * MIB, 40 * MIB
    data = np.random.default_rng(0).integers(0, 256, 120 * MIB, np.uint8)
    with cuda.copy_to_device(data, stream) as buffer:
        moves = (cuda.Move * 2)(
            cuda.Move(buffer.address + start, buffer.address + start + distance, nbytes),
            cuda.Move(buffer.address + start + distance, buffer.address + start + distance + 7, 1000),
        )
        stream.move(moves)
        found = cuda.copy_to_host(buffer, np.uint8, data.shape, stream)
    expected = data.copy()
    expected[start + distance : start + distance + nbytes] = data[start : start + nbytes]
    expected[start + distance + 7 : start + distance + 1007] = data[start : start + 1000]
    np.testing.assert_array_equal(found, expected)

"""Pools, reservations and budgets on the host backend, whose mappings are real."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_kv.errors import ConfigError, DriverError, OnnxKvError, OutOfMemoryError
from onnx_kv.memory import MemoryBudget, MemoryPool, Reservation, Span

PAGE = os.sysconf("SC_PAGESIZE")
MIB = 1 << 20


def view(reservation: Reservation, start: int, end: int) -> npt.NDArray[np.uint8]:
    memory = (ctypes.c_uint8 * (end - start)).from_address(reservation.address + start)
    return np.frombuffer(memoryview(memory), np.uint8)


def mapped(reservation: Reservation) -> list[tuple[int, int]]:
    """Readable ranges of a reservation as the kernel lists them, as offsets, merged."""
    found: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access = line.split()[:2]
        start, end = (int(part, 16) - reservation.address for part in addresses.split("-"))
        if access.startswith("rw") and 0 <= start < reservation.nbytes:
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, end))
    return found


def memfds() -> set[str]:
    """Paths of this process's open memfds; a stat of one follows it."""
    links = {str(link): os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
    return {link for link, target in links.items() if "memfd:onnx_kv" in target}


def test_reserving_costs_no_memory() -> None:
    pool = MemoryPool()
    reservation = pool.reserve(1 << 40)
    counters = pool.counters()
    assert pool.granule == PAGE
    assert reservation.nbytes == counters.reserved_bytes == 1 << 40
    assert counters.physical_bytes == 0
    assert mapped(reservation) == []
    reservation.close()
    assert pool.counters().reserved_bytes == 0


def test_a_commit_backs_the_windows_it_touches_and_no_other() -> None:
    pool = MemoryPool()
    reservation = pool.reserve(100 * PAGE)
    assert pool.commit([reservation.span(10, 20), reservation.span(3 * PAGE - 1, 5 * PAGE)]) == 4 * PAGE
    assert mapped(reservation) == [(0, PAGE), (2 * PAGE, 5 * PAGE)]
    assert pool.counters().committed_bytes == 4 * PAGE
    view(reservation, 2 * PAGE, 5 * PAGE)[:] = 7
    assert pool.commit([reservation.span(0, 4 * PAGE)]) == PAGE
    assert (view(reservation, 2 * PAGE, 5 * PAGE) == 7).all()
    assert pool.commit([reservation.span(0, 5 * PAGE), reservation.span(2 * PAGE, 5 * PAGE)]) == 0
    assert pool.commit([]) == 0
    assert pool.commit([reservation.span(7 * PAGE, 7 * PAGE)]) == 0


def test_the_granule_can_mimic_a_gpu() -> None:
    pool = MemoryPool(granule=2 * MIB)
    reservation = pool.reserve(3 * MIB)
    assert reservation.nbytes == 4 * MIB
    assert reservation.address % (2 * MIB) == 0
    assert pool.commit([reservation.span(2 * MIB - 1, 2 * MIB + 1)]) == 4 * MIB
    assert pool.counters().physical_bytes == 4 * MIB
    with pytest.raises(ConfigError, match="5000 bytes is not a multiple"):
        MemoryPool(granule=5000)


def test_physical_bytes_are_the_memory_taken_from_the_system() -> None:
    before = memfds()
    pool = MemoryPool(granule=2 * MIB)
    (file,) = memfds() - before
    reservation = pool.reserve(64 * MIB)
    for commit in (6 * MIB, 32 * MIB):
        pool.commit([reservation.span(0, commit)])
        assert os.stat(file).st_blocks * 512 == pool.counters().physical_bytes == commit
    reservation.close()
    pool.trim()
    assert os.stat(file).st_blocks == pool.counters().physical_bytes == 0


def test_released_granules_are_kept_and_reused_until_trimmed() -> None:
    pool = MemoryPool()
    reservation = pool.reserve(16 * PAGE)
    pool.commit([reservation.span()])
    released = pool.decommit([reservation.span(PAGE + 1, 6 * PAGE)])
    assert released == (4 * PAGE, 4 * PAGE)
    assert mapped(reservation) == [(0, 2 * PAGE), (6 * PAGE, 16 * PAGE)]
    counters = pool.counters()
    assert (counters.physical_bytes, counters.idle_bytes, counters.creates) == (16 * PAGE, 4 * PAGE, 16)
    pool.commit([reservation.span(0, 4 * PAGE)])
    assert pool.counters().creates == 16
    assert pool.trim(keep=PAGE) == PAGE
    assert pool.trim() == PAGE
    assert pool.trim() == 0
    counters = pool.counters()
    assert (counters.physical_bytes, counters.idle_bytes) == (14 * PAGE, 0)
    assert counters.maps == 18
    assert counters.unmaps == 4
    assert counters.map_ns > 0


def test_decommitting_twice_does_nothing_the_second_time() -> None:
    pool = MemoryPool()
    reservation = pool.reserve(4 * PAGE)
    pool.commit([reservation.span()])
    whole = reservation.span()
    assert pool.decommit([whole, whole]).unmapped == 4 * PAGE
    assert pool.decommit([whole]) == (0, 0)


def test_one_granule_can_be_mapped_at_several_addresses() -> None:
    pool = MemoryPool()
    budget = MemoryBudget(100 * PAGE)
    first, second = pool.reserve(8 * PAGE, budget), pool.reserve(8 * PAGE, budget)
    pool.commit([first.span(0, 3 * PAGE)])
    view(first, 0, 3 * PAGE)[:] = np.arange(3 * PAGE) % 251
    pool.share([first.span(PAGE, 3 * PAGE)], [second.span(4 * PAGE, 6 * PAGE)])
    np.testing.assert_array_equal(view(second, 4 * PAGE, 6 * PAGE), view(first, PAGE, 3 * PAGE))
    view(second, 4 * PAGE, 5 * PAGE)[:] = 9
    assert (view(first, PAGE, 2 * PAGE) == 9).all()
    assert pool.counters().committed_bytes == budget.held == 3 * PAGE
    assert pool.shared_bytes(first.span()) == pool.shared_bytes(second.span()) == 2 * PAGE
    assert pool.decommit([first.span()]) == (3 * PAGE, PAGE)
    assert budget.held == 2 * PAGE
    assert pool.shared_bytes(second.span()) == 0
    assert (view(second, 4 * PAGE, 5 * PAGE) == 9).all()
    second.close()
    assert budget.held == pool.counters().committed_bytes == 0


def test_sharing_refuses_what_it_cannot_map_and_changes_nothing() -> None:
    pool = MemoryPool()
    first, second = pool.reserve(8 * PAGE), pool.reserve(8 * PAGE)
    pool.commit([first.span(0, 2 * PAGE), second.span(PAGE, 2 * PAGE)])
    for sources, targets, reason in (
        ([(0, 100)], [(0, 100)], "whole"),
        ([(0, 2 * PAGE)], [(4 * PAGE, 5 * PAGE)], "whole"),
        ([(0, PAGE), (2 * PAGE, 3 * PAGE)], [(3 * PAGE, 4 * PAGE), (4 * PAGE, 5 * PAGE)], "not committed"),
        ([(0, 2 * PAGE)], [(0, 2 * PAGE)], "decommit it first"),
    ):
        with pytest.raises(ConfigError, match=reason):
            pool.share([first.span(*s) for s in sources], [second.span(*t) for t in targets])
        assert mapped(second) == [(PAGE, 2 * PAGE)]
        assert pool.shared_bytes(first.span()) == 0


def test_spans_are_checked() -> None:
    pool, other = MemoryPool(), MemoryPool()
    reservation = pool.reserve(4 * PAGE)
    for call, reason in (
        (lambda: pool.commit([reservation.span(0, 5 * PAGE)]), "outside a reservation"),
        (lambda: pool.commit([reservation.span(5, 4)]), "not a range"),
        (lambda: other.commit([reservation.span()]), "one pool"),
        (lambda: pool.share([reservation.span()], []), "1 sources"),
        (lambda: pool.reserve(0), "cannot reserve 0 bytes"),
    ):
        with pytest.raises(ConfigError, match=reason):
            call()
    reservation.close()
    reservation.close()
    with pytest.raises(ConfigError, match="closed"):
        pool.commit([reservation.span()])


def test_reservations_outlive_their_pool_object() -> None:
    reservation = MemoryPool().reserve(PAGE)
    gc.collect()
    reservation.pool.commit([reservation.span()])
    view(reservation, 0, PAGE)[:] = 1


def test_a_budget_is_claimed_for_new_granules_alone() -> None:
    pool, budget = MemoryPool(), MemoryBudget(10 * PAGE, headroom=2 * PAGE, setting="--budget")
    reservation = pool.reserve(64 * PAGE, budget)
    pool.commit([reservation.span(0, 6 * PAGE)])
    pool.commit([reservation.span(0, 7 * PAGE)])
    assert (budget.held, budget.free) == (7 * PAGE, PAGE)
    expected = (
        rf"refuses {2 * PAGE:,} bytes: {7 * PAGE:,} are held and {PAGE:,} free of {10 * PAGE:,}, of which {2 * PAGE:,} "
        r"stay free for workspace; raise --budget"
    )
    with pytest.raises(OutOfMemoryError, match=expected):
        pool.commit([reservation.span(0, 9 * PAGE)])
    assert mapped(reservation) == [(0, 7 * PAGE)]
    assert budget.held == 7 * PAGE
    pool.commit([reservation.span(0, 8 * PAGE)])
    reservation.close()
    assert budget.held == 0
    with pytest.raises(ConfigError, match="headroom"):
        MemoryBudget(5, headroom=6)


def test_a_lost_reservation_gives_back_what_it_claimed() -> None:
    pool, budget = MemoryPool(), MemoryBudget(10 * PAGE)
    reservation = pool.reserve(4 * PAGE, budget)
    pool.commit([reservation.span()])
    del reservation
    gc.collect()
    assert budget.held == 0
    assert pool.counters().idle_bytes == 4 * PAGE


def test_threads_share_a_pool_and_a_budget() -> None:
    pool, budget = MemoryPool(), MemoryBudget(64 * PAGE)
    refused = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        reservation = pool.reserve(32 * PAGE, budget)
        for _ in range(100):
            start = int(rng.integers(0, 30)) * PAGE
            span = reservation.span(start, start + int(rng.integers(1, 3)) * PAGE)
            try:
                pool.commit([span])
                view(*span)[:] = seed
                assert (view(*span) == seed).all()
            except OutOfMemoryError:
                refused.append(seed)
            pool.decommit([reservation.span(0, int(rng.integers(0, 33)) * PAGE)])
        reservation.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters = pool.counters()
    assert budget.held == counters.committed_bytes == counters.reserved_bytes == 0
    assert counters.physical_bytes <= 64 * PAGE


def state(pool: MemoryPool, reservations: list[Reservation], budget: MemoryBudget) -> object:
    counters = pool.counters()
    content = [(mapped(r), [view(r, *part).tobytes() for part in mapped(r)]) for r in reservations]
    return counters.committed_bytes, counters.reserved_bytes, budget.held, content


@pytest.mark.parametrize("operation", ["commit", "decommit", "share"])
@pytest.mark.parametrize("idle", [0, 2])
def test_a_failure_of_any_driver_call_is_undone(operation: str, idle: int) -> None:
    pool, budget = MemoryPool(), MemoryBudget(1000 * PAGE)
    first, second, spare = (pool.reserve(16 * PAGE, budget) for _ in range(3))
    pool.commit([first.span(0, 4 * PAGE), first.span(6 * PAGE, 7 * PAGE), second.span(0, PAGE)])
    if idle:
        pool.commit([spare.span(0, idle * PAGE)])
        pool.decommit([spare.span()])
    for start, end in mapped(first):
        view(first, start, end)[:] = np.arange(end - start) % 251
    run: dict[str, Callable[[], object]] = {
        "commit": lambda: pool.commit([first.span(2 * PAGE, 9 * PAGE), second.span(4 * PAGE, 7 * PAGE)]),
        "decommit": lambda: pool.decommit([first.span(0, 3 * PAGE), second.span()]),
        "share": lambda: pool.share(
            [first.span(0, 2 * PAGE), first.span(6 * PAGE, 7 * PAGE)],
            [second.span(8 * PAGE, 10 * PAGE), second.span(4 * PAGE, 5 * PAGE)],
        ),
    }
    before = state(pool, [first, second], budget)
    failures = 0
    while True:
        pool.fail_after(failures)
        try:
            run[operation]()
            break
        except DriverError:
            pool.fail_after(-1)
        assert state(pool, [first, second], budget) == before
        assert pool.counters().idle_bytes == idle * PAGE
        failures += 1
    pool.fail_after(-1)
    assert failures >= {"commit": 7 * 2 - idle + 3, "decommit": 4, "share": 5}[operation]
    assert state(pool, [first, second], budget) != before


def test_a_failed_trim_loses_nothing() -> None:
    pool = MemoryPool()
    reservation = pool.reserve(4 * PAGE)
    pool.commit([reservation.span()])
    reservation.close()
    pool.fail_after(2)
    with pytest.raises(DriverError, match="destroy"):
        pool.trim()
    pool.fail_after(-1)
    assert pool.counters().idle_bytes == pool.counters().physical_bytes == 2 * PAGE
    assert pool.trim() == 2 * PAGE


def test_closing_goes_on_through_failures() -> None:
    pool, budget = MemoryPool(), MemoryBudget(100 * PAGE)
    for failing in range(6):
        reservation = pool.reserve(4 * PAGE, budget)
        pool.commit([reservation.span()])
        pool.fail_after(failing)
        reservation.close()
        pool.fail_after(-1)
        assert budget.held == 0
        assert pool.counters().committed_bytes == 0


@settings(max_examples=60)
@given(st.data())
def test_random_operations_against_a_model(data: st.DataObject) -> None:
    """Windows, reference counts and charges follow a dictionary from (reservation, window) to a granule's identity."""
    size = 6
    pool, budget = MemoryPool(), MemoryBudget(8 * PAGE)
    reservations = [pool.reserve(size * PAGE, budget) for _ in range(2)]
    model: dict[tuple[int, int], object] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        which, start = data.draw(st.tuples(st.integers(0, 1), st.integers(0, size)))
        end = data.draw(st.integers(start, size))
        span = Span(reservations[which], start * PAGE, end * PAGE)
        windows = [(which, window) for window in range(start, end)]
        action = data.draw(st.sampled_from(["commit", "decommit", "share"]))
        try:
            if action == "commit":
                pool.commit([span])
                model.update({window: object() for window in windows if window not in model})
            elif action == "decommit":
                pool.decommit([span])
                for window in windows:
                    model.pop(window, None)
            else:
                target = data.draw(st.integers(0, size - (end - start)))
                other = [(1 - which, target + i) for i in range(end - start)]
                pool.share([span], [Span(reservations[1 - which], target * PAGE, (target + end - start) * PAGE)])
                assert all(window in model for window in windows)
                assert not any(window in model for window in other)
                model.update({new: model[old] for new, old in zip(other, windows, strict=True)})
        except OnnxKvError as error:
            new = sum(window not in model for window in windows)
            if isinstance(error, OutOfMemoryError):
                assert (len(set(model.values())) + new) > 8
            else:
                assert action == "share"
        assert budget.held == pool.counters().committed_bytes == len(set(model.values())) * PAGE
        for index, reservation in enumerate(reservations):
            live = {w for r, w in model if r == index}
            assert {w for s, e in mapped(reservation) for w in range(s // PAGE, e // PAGE)} == live

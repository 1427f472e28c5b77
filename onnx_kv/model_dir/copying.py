"""Copying the bytes of a file: shared where the file system can, else inside the kernel, holes left as holes."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable

_FICLONE = 0x40049409  # ioctl of Linux: let a file share another one's blocks until either is written
_CHUNK = 64 << 20  # bytes a call, so that progress can be shown
_SHORTER = "the source became shorter while it was copied"
_NOT_HERE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}


def share_blocks(source: int, target: int) -> bool:
    """Make `target` a reflink of `source` (file descriptors); False where the file system cannot."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def copy_bytes(source: int, target: int, size: int, on_bytes: Callable[[int], object]) -> None:
    """Copy `size` bytes of the file `source` to the empty file `target` (file descriptors).

    Memory stays small whatever the size, and what is a hole in the source takes no space in the copy. `on_bytes` is
    told every advance in bytes.

    Raises:
        OSError: reading or writing failed, or the source became shorter meanwhile.
    """
    os.ftruncate(target, size)
    position = 0
    while position < size:
        start, end = _next_data(source, position, size)
        on_bytes(start - position)
        position = start
        while position < end:
            copied = _copy_chunk(source, target, position, min(end - position, _CHUNK))
            if copied == 0:
                raise OSError(errno.EIO, _SHORTER)
            position += copied
            on_bytes(copied)
    if os.fstat(source).st_size < size:  # its lost end looked like a hole
        raise OSError(errno.EIO, _SHORTER)


def _next_data(source: int, position: int, size: int) -> tuple[int, int]:
    """The next range of the source that is no hole."""
    try:
        start = os.lseek(source, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # only a hole is left
            return size, size
        return position, size  # the file system does not tell
    return min(start, size), min(os.lseek(source, start, os.SEEK_HOLE), size)


def _copy_chunk(source: int, target: int, position: int, count: int) -> int:
    try:
        copied = os.copy_file_range(source, target, count, position, position)
        if copied:
            return copied
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    return os.pwrite(target, os.pread(source, min(count, 1 << 20), position), position)

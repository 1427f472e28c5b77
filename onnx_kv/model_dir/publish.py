"""Publishing a new model directory by one rename.

Everything is first written and flushed to a hidden folder beside the output, `.NAME.onnx-kv-partial`. Then one rename
makes it the output; with `force` it changes places with the old output, which is removed afterwards. Killed at any
instant, this leaves either what was there before or the complete new directory, and perhaps the hidden folder, which
the next run for the same output clears away. A lock on the hidden folder keeps two runs apart.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from onnx_kv.errors import ModelDirError
from onnx_kv.model_dir.copying import copy_bytes, share_blocks
from onnx_kv.model_dir.source import ModelDir
from onnx_kv.model_dir.tree import SourceFile, Tree

_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2


@dataclass(frozen=True)
class Contents:
    """What a new model directory holds: the source's tree, with some files written anew.

    `rewritten` maps paths of the tree to their new bytes; files whose resolved path is in `linked` become hard links to
    the source's, all others plain files of their own.
    """

    tree: Tree
    rewritten: Mapping[PurePosixPath, bytes]
    linked: Collection[Path]

    def files(self) -> Iterator[SourceFile]:
        """The files to be copied."""
        return (f for f in self.tree.files if f.path not in self.rewritten and f.real not in self.linked)

    def links(self) -> Iterator[SourceFile]:
        """The files to be hard-linked."""
        return (f for f in self.tree.files if f.path not in self.rewritten and f.real in self.linked)


def check_output(model_dir: ModelDir, output: Path, *, force: bool) -> Path:
    """Return the resolved path of the directory to publish.

    Raises:
        ModelDirError: it is the source, inside it or around it; its parent does not exist or cannot be written; it
            exists and `force` is not given, or is not a model directory that could be replaced.
    """
    if output.name in ("", ".."):
        output = output.resolve()
    output, source = output.parent.resolve() / output.name, model_dir.path.resolve()
    if output.is_relative_to(source) or source.is_relative_to(output):
        raise ModelDirError(f"{output} is the model itself, inside it or around it; choose another output directory")
    if not output.parent.is_dir():
        raise ModelDirError(f"{output.parent} does not exist; create it first")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise ModelDirError(f"{output.parent} cannot be written: no permission, or a read-only file system")
    if os.path.lexists(output):
        if not force:
            raise ModelDirError(f"{output} exists; choose another output, or replace it with --force")
        _check_replaceable(output)
    return output


def publish(contents: Contents, output: Path, *, force: bool, on_bytes: Callable[[int], object]) -> None:
    """Write the directory `output`, all or nothing; `on_bytes` is told every advance of the copy in bytes.

    Raises:
        ModelDirError: no space, no permission, hard links impossible, another run is writing the same output; nothing
            is left behind.
    """
    staging = output.parent / f".{output.name}.onnx-kv-partial"
    try:
        with _locked_folder(staging, empty=True):
            _write(contents, staging, on_bytes)
            if force and output.exists():
                with _locked_folder(output, empty=False):
                    _rename(staging, output, _RENAME_EXCHANGE)
                    _sync(output.parent)
                    shutil.rmtree(staging, ignore_errors=True)  # the old output
            else:
                _rename(staging, output, _RENAME_NOREPLACE)
                _sync(output.parent)
    except OSError as error:
        raise ModelDirError(_explain(error, output)) from error


def _check_replaceable(output: Path) -> None:
    if output.is_symlink() or not output.is_dir():
        raise ModelDirError(f"{output} is not a directory of its own; --force replaces model directories only")
    if any(output.iterdir()):
        try:
            ModelDir.open(output)
        except ModelDirError as error:
            raise ModelDirError(f"{output} does not look like a model; --force does not replace it: {error}") from error


@contextmanager
def _locked_folder(folder: Path, *, empty: bool) -> Iterator[None]:
    """Hold `folder` locked; with `empty` it is made or cleared first, and removed if the block fails."""
    lock = _lock(folder, create=empty)
    try:
        if empty:
            _clear(folder)
        yield
    except BaseException:
        if empty:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock(folder: Path, *, create: bool) -> int:
    """Return a descriptor that locks `folder` until it is closed or the process ends."""
    while True:
        if create:
            folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ModelDirError(f"another run is writing {folder}; wait for it to end") from None
        except OSError:
            return lock  # a network file system without locks
        if folder.exists() and os.path.samestat(os.fstat(lock), folder.stat()):
            return lock
        os.close(lock)  # a run that ended just now has renamed or removed the folder


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _write(contents: Contents, folder: Path, on_bytes: Callable[[int], object]) -> None:
    for path in contents.tree.folders:
        (folder / path).mkdir()
    for path, target in contents.tree.folder_links:
        (folder / path).symlink_to(target)
    for file in contents.links():
        os.link(file.real, folder / file.path)
        on_bytes(file.size)
    for path, data in contents.rewritten.items():
        with open(folder / path, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    remaining = [file for file in contents.files() if not _copy(file, folder, _share, on_bytes)]
    _check_space(remaining, folder)
    for file in remaining:
        _copy(file, folder, _transfer, on_bytes)
    for path in (*reversed(contents.tree.folders), PurePosixPath()):
        _sync(folder / path)


def _copy(file: SourceFile, folder: Path, move: Callable[..., bool], on_bytes: Callable[[int], object]) -> bool:
    with open(file.real, "rb") as source, open(folder / file.path, "wb") as target:
        done = move(source.fileno(), target.fileno(), file.size, on_bytes)
        if done:
            os.fsync(target.fileno())
    return done


def _share(source: int, target: int, size: int, on_bytes: Callable[[int], object]) -> bool:
    if not share_blocks(source, target):
        return False
    on_bytes(size)
    return True


def _transfer(source: int, target: int, size: int, on_bytes: Callable[[int], object]) -> bool:
    copy_bytes(source, target, size, on_bytes)
    return True


def _check_space(files: list[SourceFile], folder: Path) -> None:
    needed, system = sum(file.allocated for file in files), os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    if needed > free:
        raise ModelDirError(f"{folder.parent} has {free} bytes free, but the copy needs {needed}; see --link")


def _rename(staging: Path, output: Path, flag: int) -> None:
    """Give `staging` the name `output` in one step; with the exchange flag `output` gets the other name."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(staging), _AT_FDCWD, os.fsencode(output), flag) == 0:
        return
    number = ctypes.get_errno()
    if number == errno.EINVAL and flag == _RENAME_NOREPLACE:  # a file system without the flag
        os.rename(staging, output)
    elif number == errno.EINVAL:
        raise ModelDirError(f"this file system cannot replace {output} in one step; remove it first")
    else:
        raise OSError(number, os.strerror(number), str(output))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(error: OSError, output: Path) -> str:
    reason = f"{output} cannot be written: {error.strerror or error}"
    if error.filename:
        reason += f" ({error.filename})"
    if error.errno == errno.EXDEV:
        reason += "; hard links need source and output on one file system, leave out --link"
    return reason

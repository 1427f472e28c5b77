"""What a model directory contains, to be copied: folders, plain files, links between its own folders.

A file that is a link (hub caches) counts as the plain file that it leads to. Links may not lead out of the model
(`ModelDir.encloses`); sockets, pipes and devices are no part of a model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from onnx_kv.errors import ModelDirError
from onnx_kv.model_dir.source import ModelDir


@dataclass(frozen=True)
class SourceFile:
    """A file of the model: `path` relative to the directory, `real` where its bytes are, sizes in bytes.

    `allocated` is what the file occupies: less than `size` where it has holes.
    """

    path: PurePosixPath
    real: Path
    size: int
    allocated: int


@dataclass(frozen=True)
class Tree:
    """The contents of a model directory in a fixed order; folders come before what they hold.

    `folder_links` are links from one place of the directory to another of its folders, as (path, relative target).
    """

    folders: tuple[PurePosixPath, ...]
    files: tuple[SourceFile, ...]
    folder_links: tuple[tuple[PurePosixPath, str], ...]


def read_tree(model_dir: ModelDir) -> Tree:
    """List the model directory.

    Raises:
        ModelDirError: a link leads out of the model or nowhere, an entry is no file, link or folder, or it cannot be
            read; names the entry.
    """
    folders: list[PurePosixPath] = []
    files: list[SourceFile] = []
    links: list[tuple[PurePosixPath, str]] = []
    pending = [PurePosixPath()]
    while pending:
        folder = pending.pop()
        for entry in _entries(model_dir.path / folder):
            path = folder / entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
                pending.append(path)
            elif entry.is_symlink() and entry.is_dir():
                links.append((path, _inner_folder(model_dir, path)))
            else:
                files.append(_file(model_dir, path))
    return Tree(tuple(sorted(folders)), tuple(sorted(files, key=lambda file: file.path)), tuple(sorted(links)))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise ModelDirError(f"{folder} cannot be listed: {error.strerror}") from error


def _inner_folder(model_dir: ModelDir, path: PurePosixPath) -> str:
    link = model_dir.path / path
    target, root = link.resolve(), model_dir.path.resolve()
    if not target.is_relative_to(root):
        raise ModelDirError(f"{link} is a link to the folder {target}, outside the model's directory")
    return os.path.relpath(target, link.parent.resolve())


def _file(model_dir: ModelDir, path: PurePosixPath) -> SourceFile:
    file = model_dir.path / path
    try:
        real = file.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ModelDirError(f"{file} is a link that leads nowhere; was the download complete?") from error
    if not model_dir.encloses(real):
        raise ModelDirError(f"{file} is a link to {real}, outside the model's directory; copy the file here instead")
    if not real.is_file():
        raise ModelDirError(f"{file} is neither a file nor a folder; a model directory holds nothing else")
    if not os.access(real, os.R_OK):
        raise ModelDirError(f"{file} cannot be read: permission denied")
    status = real.stat()
    return SourceFile(path, real, status.st_size, min(status.st_size, status.st_blocks * 512))

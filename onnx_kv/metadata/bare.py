"""What can be told about an ONNX file with the standard library alone: that a name is not in it.

The script runs from a checkout in which nothing is installed. It then has no reader for the graph, but a port's name
stands in the file as it is: a name whose bytes are not there is no port (a layer that shares another's cache has none),
and without the bytes of our attribute and our record of passes the graph was never patched.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from onnx_kv.errors import MetadataError
from onnx_kv.layout import KV_LAYOUT_ATTRIBUTE
from onnx_kv.metadata.json_file import refuse_stand_in
from onnx_kv.metadata.schema import Metadata

_PATCHED = (KV_LAYOUT_ATTRIBUTE, "onnx_kv.passes")


def refuse_absent_names(metadata: Metadata, file: Path) -> None:
    """Refuse metadata that names ports which are certainly not in the graph, and graphs that were patched.

    Raises:
        MetadataError: names what was looked for, and the package that reads graphs.
    """
    refuse_stand_in(file)
    if file.stat().st_size == 0:
        raise MetadataError(f"{file} is empty")
    ports = [*metadata.inputs.values(), *metadata.outputs.values()]
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        absent = [port for port in ports if data.find(port.encode()) < 0]
        patched = [mark for mark in _PATCHED if data.find(mark.encode()) >= 0]
    if absent:
        raise MetadataError(f"{file} has no port {absent[0]!r}; to let the graph say which it has: pip install onnx_ir")
    if patched:
        raise MetadataError(f"{file} was patched; to let the graph say how: pip install onnx_ir")

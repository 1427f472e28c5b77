"""The errors that onnx_kv raises on purpose: one root, each naming what is at fault and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class OnnxKvError(Exception):
    """Root of every deliberate error. The command line prints its message and exits with code 2."""


class ModelDirError(OnnxKvError):
    """A model directory cannot be read or written safely; names the file, and the tensor where there is one."""


class PatchRefusedError(OnnxKvError):
    """A pass does not fit this model; `reasons` name every node at fault. Nothing was written."""

    def __init__(self, pass_name: str, reasons: Iterable[str]) -> None:
        """Say which pass was refused, with its reasons in lines of their own."""
        self.reasons = tuple(dict.fromkeys(reasons))
        super().__init__("\n  ".join((f"{pass_name} does not fit this model:", *self.reasons)))


class MetadataError(OnnxKvError):
    """`genai_config.json` or `inference_metadata.yaml` is missing something or contradicts the graph."""


class RuntimeSetupError(OnnxKvError):
    """The environment cannot run a model: no ONNX Runtime, two of them, one too old, no op library, no device."""


class ConfigError(OnnxKvError):
    """A setting has a value that cannot be used, or an `ONNX_KV_*` variable changed after it was read."""


class CapacityError(OnnxKvError):
    """A sequence does not fit: names the tokens asked for and the tokens that fit."""


class NativeError(OnnxKvError):
    """A call into the op library failed; the message is the library's own."""


class OutOfMemoryError(NativeError):
    """Memory was refused by a budget, the device or the host. Nothing changed; smaller requests may go through."""


class DriverError(NativeError):
    """A CUDA driver or NVRTC call failed; the message names the call and its status."""


class UnsupportedError(NativeError):
    """This machine, driver or device cannot do what was asked; the message says what is missing."""


class ModelOutputError(OnnxKvError):
    """A model computed something that no token can be chosen from; names the row, the token and the value."""


class ParityError(OnnxKvError):
    """A comparison could not be made: a configuration does not run, or the runs were no different ones."""


class CacheFileError(OnnxKvError):
    """A saved cache cannot be loaded: damaged, or of another model or shape. The cache is as it was."""

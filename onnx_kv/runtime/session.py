"""One ONNX Runtime session of a model, and the binding of a run's inputs and outputs to memory that we own.

The cache is bound in place: past and present of a layer are one buffer, of shape [batch, kv_heads, capacity, head_dim]
in every layout. Every other port is bound to an array or an address that the caller keeps alive until the run is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_kv.cuda import Stream
from onnx_kv.errors import ModelDirError, NativeError, RuntimeSetupError
from onnx_kv.ops import library_path
from onnx_kv.runtime.binding import Binding
from onnx_kv.runtime.config import Device
from onnx_kv.runtime.model import RuntimeModel
from onnx_kv.runtime.ort import require_onnxruntime

_ELEMENT_TYPES = {"float16": 10, "bfloat16": 16, "float32": 1, "int32": 6, "int64": 7}
"""The numbers of ONNX's TensorProto.DataType: I/O binding takes bfloat16 in no other way."""

_CUDA_PROVIDER = "CUDAExecutionProvider"
_SHAPE_ARITHMETIC = frozenset({"Cast", "Concat", "Constant", "Gather", "Shape", "Slice", "Squeeze", "Unsqueeze"})
_TENSOR_TYPES = {"float": "float32", "double": "float64"}


class Session:
    """A loaded model. `stock` runs it with ONNX Runtime's own attention, which knows head-major alone.

    `stream` is the CUDA stream that all work is queued on; runs return without waiting for it. With `profile`, the
    beginning of a file's path, ONNX Runtime times every node, which slows it down.
    """

    def __init__(
        self,
        model: RuntimeModel,
        device: Device,
        *,
        stock: bool = False,
        threads: int = 0,
        stream: Stream | None = None,
        profile: Path | None = None,
    ) -> None:
        """Load the model.

        Raises:
            RuntimeSetupError: there is no ONNX Runtime that serves the device, or no op library.
            ModelDirError: ONNX Runtime refuses the model, or it has an input that nothing here can feed.
        """
        self.model = model
        self.device = device
        self._ort = require_onnxruntime()
        options = self._ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(profile)
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if not stock:
            self._register_kernels(options)
        try:
            self._session = self._ort.InferenceSession(
                str(model.directory.model_file), options, providers=self._providers(stream)
            )
        except Exception as error:  # ONNX Runtime's errors have no common root of their own
            raise ModelDirError(f"ONNX Runtime does not load {model.directory.model_file}: {error}") from error
        if device.kind == "cuda" and _CUDA_PROVIDER not in self._session.get_providers():
            raise RuntimeSetupError(
                f"ONNX Runtime cannot use {device}, and says why in its log above; CUDA and cuDNN of its version come "
                "with pip install 'onnxruntime-gpu[cuda,cudnn]'"
            )
        self._stream = stream  # outlives the session, which uses it to the end
        self._refuse_unknown_inputs()
        ports = [*self._session.get_inputs(), *self._session.get_outputs()]
        self.dtypes = {port.name: _dtype(port.type) for port in ports}
        self._options = self._ort.RunOptions()
        if device.kind == "cuda":
            self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def _providers(self, stream: Stream | None) -> list[Any]:
        if stream is None:
            return ["CPUExecutionProvider"]
        if _CUDA_PROVIDER not in self._ort.get_available_providers():
            raise RuntimeSetupError(
                f"ONNX Runtime {self._ort.__version__} is installed without CUDA: "
                "pip uninstall -y onnxruntime && pip install 'onnxruntime-gpu[cuda,cudnn]'"
            )
        cuda = {"device_id": str(self.device.index), "user_compute_stream": str(stream.handle)}
        return [(_CUDA_PROVIDER, cuda), "CPUExecutionProvider"]

    def _register_kernels(self, options: Any) -> None:
        try:
            options.register_custom_ops_library(str(library_path()))
        except Exception as error:  # ONNX Runtime's errors have no common root of their own
            version = self._ort.__version__
            raise RuntimeSetupError(f"the op library does not load into ONNX Runtime {version}: {error}") from error

    def _refuse_unknown_inputs(self) -> None:
        unknown = {port.name for port in self._session.get_inputs()} - set(self.model.metadata.inputs.values())
        if unknown:
            raise ModelDirError(
                f"{self.model.directory.model_file} needs inputs that the metadata does not describe: "
                f"{', '.join(sorted(unknown))}"
            )

    def foreign_nodes(self) -> tuple[str, ...]:
        """Nodes that another provider than CUDA runs, but for arithmetic on shapes, which comes out the same each step.

        Empty before ONNX Runtime 1.24, which does not say.
        """
        if not hasattr(self._session, "get_provider_graph_assignment_info"):
            return ()
        return tuple(
            f"{node.name or node.op_type} ({node.op_type})"
            for part in self._session.get_provider_graph_assignment_info()
            if part.ep_name != _CUDA_PROVIDER
            for node in part.get_nodes()
            if node.op_type not in _SHAPE_ARITHMETIC
        )

    def end_profile(self) -> Path:
        """End the profile that was asked for, and return ONNX Runtime's file: a JSON list of trace events."""
        return Path(self._session.end_profiling())

    def close(self) -> None:
        """Unload the model; runs made before must be gone, and no more can be made."""
        self._session = None

    def run(self) -> Run:
        """Return a run with nothing bound yet."""
        return Run(self, self._ort, self._session, self._options)


class Run:
    """Bindings for runs of a session. They stay until bound anew, so a run that repeats is bound once."""

    def __init__(self, session: Session, ort: Any, handle: Any, options: Any) -> None:
        self._session = session
        self._ort = ort
        self._handle = handle
        self._options = options
        self._binding = handle.io_binding()
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._outputs: dict[str, None] = {}  # in the order in which they were bound, which ONNX Runtime keeps

    def cache(self, bindings: Sequence[Binding]) -> None:
        """Bind past and present of every layer, key then value, each pair to one buffer."""
        device = self._session.device
        for layer, key, value in zip(self._session.model.layers, bindings[::2], bindings[1::2], strict=True):
            element = _ELEMENT_TYPES[layer.dtype]
            for past, present, one in (
                (layer.past_key, layer.present_key, key),
                (layer.past_value, layer.present_value, value),
            ):
                place = (device.kind, device.index, element, one.shape, one.address)
                self._binding.bind_input(past, *place)
                self._binding.bind_output(present, *place)
                self._outputs[present] = None

    def array(self, name: str, values: npt.ArrayLike) -> None:
        """Bind an input to a copy, on the host, of `values` in the port's type."""
        array = np.ascontiguousarray(values, self._session.dtypes[name])
        self._arrays[name] = array
        self.address("cpu", name, array.shape, array.ctypes.data)

    def address(self, kind: str, name: str, shape: Sequence[int], address: int) -> None:
        """Bind an input to memory of the host (`cpu`) or of the session's device, in the port's type."""
        index = self._session.device.index if kind != "cpu" else 0
        self._binding.bind_input(name, kind, index, _ELEMENT_TYPES[self._session.dtypes[name]], shape, address)

    def output(self, name: str) -> None:
        """Let ONNX Runtime allocate an output on the session's device, in every run anew; `result` finds it."""
        self._binding.bind_output(name, self._session.device.kind, self._session.device.index)
        self._outputs[name] = None

    def output_address(self, name: str, shape: Sequence[int], address: int) -> None:
        """Bind an output to memory of the session's device, in the port's type."""
        device = self._session.device
        element = _ELEMENT_TYPES[self._session.dtypes[name]]
        self._binding.bind_output(name, device.kind, device.index, element, shape, address)
        self._outputs[name] = None

    def result(self, name: str) -> tuple[int, tuple[int, ...]]:
        """Address and shape of an output of the last run, valid until the next."""
        value = self._binding.get_outputs()[list(self._outputs).index(name)]
        return value.data_ptr(), tuple(value.shape())

    def __call__(self) -> None:
        """Run the model: on the CPU until it is done, on CUDA until its work is queued.

        Raises:
            NativeError: an operator failed; the message is ONNX Runtime's.
        """
        try:
            self._handle.run_with_iobinding(self._binding, self._options)
        except Exception as error:  # ONNX Runtime's errors have no common root of their own
            raise NativeError(f"a run of {self._session.model.directory.model_file} failed: {error}") from error


def _dtype(tensor_type: str) -> str:
    """The numpy name of ONNX Runtime's `tensor(int64)`."""
    name = tensor_type.removeprefix("tensor(").removesuffix(")")
    return _TENSOR_TYPES.get(name, name)

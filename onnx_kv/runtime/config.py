"""A decoder's settings: from arguments, else from `ONNX_KV_*` variables, else the default; frozen once resolved.

| field             | variable                  | meaning                                                         |
|-------------------|---------------------------|-----------------------------------------------------------------|
| `device`          | `ONNX_KV_DEVICE`          | `cpu`, `cuda` or `cuda:N`                                       |
| `kv_layout`       | `ONNX_KV_LAYOUT`          | the layout that the model must have; `auto`: the one it has     |
| `growth`          | `ONNX_KV_GROWTH`          | `auto` (the layout's), `fixed-stride`, `bucket`, `realloc`      |
| `min_bucket`      | `ONNX_KV_MIN_BUCKET`      | tokens of the smallest bucket                                   |
| `max_length`      | `ONNX_KV_MAX_LENGTH`      | most tokens a row, prompt included; `0`: the model's maximum    |
| `budget`          | `ONNX_KV_BUDGET`          | bytes that the cache may hold, `0` for no limit; as an argument |
|                   |                           | also a `MemoryBudget`, which several decoders may share         |
| `graph`           | `ONNX_KV_GRAPH`           | `auto` (on where possible), `on` (an error where not), `off`    |
| `prefill_chunk`   | `ONNX_KV_PREFILL_CHUNK`   | tokens of a prompt that run at once                             |
| `commit_ahead`    | `ONNX_KV_COMMIT_AHEAD`    | tokens beyond the live prefix whose memory is committed early   |
| `threads`         | `ONNX_KV_THREADS`         | ONNX Runtime's threads within an operator; `0`: its default     |
| `trim_after_turn` | `ONNX_KV_TRIM_AFTER_TURN` | `on`: give spare memory back whenever all rows have ended; `off` |

The environment is read once in a process, at the first decoder. A variable that is different later would split the
process into two configurations, so that is an error and not silence.
"""

from __future__ import annotations

import enum
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from onnx_kv.errors import ConfigError
from onnx_kv.geometry import GrowthPolicy
from onnx_kv.layout import KvLayout
from onnx_kv.memory import MemoryBudget

PREFIX = "ONNX_KV_"
_VARIABLES = {"kv_layout": "ONNX_KV_LAYOUT"}


class GraphMode(enum.StrEnum):
    """Whether decode steps are captured: where possible, always (an error where not), never."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class Device:
    """Where a model runs: `kind` as ONNX Runtime spells it (`cpu`, `cuda`), `index` among devices of that kind."""

    kind: str
    index: int

    @classmethod
    def parse(cls, text: str) -> Device:
        """Return the device that `cpu`, `cuda` or `cuda:N` names.

        Raises:
            ConfigError: anything else.
        """
        match = re.fullmatch(r"cpu|cuda(?::(\d+))?", text)
        if match is None:
            raise ConfigError(f"no device is called {text!r}; use cpu, cuda or cuda:N")
        return cls(text.partition(":")[0], int(match[1] or 0))

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True)
class RuntimeConfig:
    """Settings of one decoder. `kv_layout` and `growth` are None for `auto`; `max_length` is 0 for the model's own."""

    device: Device = Device("cpu", 0)
    kv_layout: KvLayout | None = None
    growth: GrowthPolicy | None = None
    min_bucket: int = 256
    max_length: int = 0
    budget: MemoryBudget | None = None
    graph: GraphMode = GraphMode.AUTO
    prefill_chunk: int = 512
    commit_ahead: int = 256
    threads: int = 0
    trim_after_turn: bool = False

    @classmethod
    def resolve(cls, **arguments: Any) -> RuntimeConfig:
        """Build the settings of a decoder: each argument that is not None, else its variable, else its default.

        Raises:
            ConfigError: a value that cannot be used, named with where it came from, or a variable that changed
                since the process read it.
        """
        environment = frozen_environment()
        values = {}
        for field in fields(cls):
            given = arguments.pop(field.name, None)
            variable = _VARIABLES.get(field.name, PREFIX + field.name.upper())
            if given is not None:
                values[field.name] = _parse(field.name, given, f"{field.name}={given!r}")
            elif variable in environment:
                values[field.name] = _parse(field.name, environment[variable], f"{variable}={environment[variable]!r}")
        if arguments:
            raise ConfigError(f"no setting is called {', '.join(sorted(arguments))}; see onnx_kv.runtime.config")
        return cls(**values)


def frozen_environment() -> Mapping[str, str]:
    """The `ONNX_KV_*` variables as this process first read them.

    Raises:
        ConfigError: one of them is different now.
    """
    frozen = _first_environment()
    now = _read_environment()
    changed = sorted(name for name in frozen.keys() | now.keys() if frozen.get(name) != now.get(name))
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} changed after this process read it; set variables before the first decoder, or pass "
            "arguments"
        )
    return frozen


@functools.cache
def _first_environment() -> Mapping[str, str]:
    return MappingProxyType(_read_environment())


def _read_environment() -> dict[str, str]:
    names = {_VARIABLES.get(field.name, PREFIX + field.name.upper()) for field in fields(RuntimeConfig)}
    return {name: os.environ[name] for name in names if name in os.environ}


def _parse(name: str, value: Any, source: str) -> Any:
    """Turn an argument or a variable's text into the field's type; errors say where the value came from."""
    try:
        match name:
            case "device":
                return value if isinstance(value, Device) else Device.parse(value)
            case "kv_layout":
                return None if value == "auto" else value if isinstance(value, KvLayout) else KvLayout.parse(value)
            case "growth":
                return None if value == "auto" else GrowthPolicy(value.replace("-", "_"))
            case "budget":
                return value if isinstance(value, MemoryBudget) else _budget(_count(name, value))
            case "graph":
                return GraphMode(value)
            case "trim_after_turn":
                return value if isinstance(value, bool) else _switch(value)
            case _:
                return _count(name, value)
    except (ValueError, TypeError, ConfigError) as error:
        raise ConfigError(f"{source}: {error}") from error


def _budget(limit: int) -> MemoryBudget | None:
    return MemoryBudget(limit, setting=f"budget or {PREFIX}BUDGET") if limit else None


def _switch(value: str) -> bool:
    if value not in ("on", "off"):
        raise ValueError("neither on nor off")
    return value == "on"


_SMALLEST = {"min_bucket": 1, "prefill_chunk": 1}


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("not an integer")
    number = int(value)
    if number < _SMALLEST.get(name, 0):
        raise ValueError(f"must be at least {_SMALLEST.get(name, 0)}")
    return number

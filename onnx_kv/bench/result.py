"""What a benchmark writes: every row with its spread, every knob that was set, and the machine and versions it ran on.

The file is JSON, so that two runs can be compared later (`onnx_kv.bench.compare`) and a figure in a document can be
traced to the command that made it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onnx_kv.errors import ConfigError

SCHEMA = 1
_PACKAGES = (
    "onnx-kv",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-genai",
    "onnxruntime-genai-cuda",
    "torch",
    "numpy",
)


@dataclass(frozen=True)
class Row:
    """One measured configuration.

    `median`, `low` and `high` (10th and 90th percentile) are in `unit`; `knobs` are the settings that made the row,
    `notes` what a reader must know to believe it, such as a fallback that was taken.
    """

    name: str
    unit: str
    median: float
    low: float
    high: float
    samples: int
    higher_is_better: bool = False
    knobs: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        unit: str,
        samples: Sequence[float],
        *,
        higher_is_better: bool = False,
        knobs: Mapping[str, str | int | float | bool] | None = None,
        notes: Sequence[str] = (),
    ) -> Row:
        """Summarise `samples` (at least one, in `unit`)."""
        tenths = statistics.quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else [samples[0]] * 9
        return cls(
            name,
            unit,
            statistics.median(samples),
            tenths[0],
            tenths[-1],
            len(samples),
            higher_is_better,
            knobs or {},
            tuple(notes),
        )

    @property
    def spread(self) -> float:
        """Width of the middle 80 % of the samples over their median; 0 where every sample was alike."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Result:
    """The rows of one run and where they were measured."""

    command: str
    environment: Mapping[str, str]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """Return the text that `load` reads back."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a result file.

        Raises:
            ConfigError: it is missing, not JSON, or of another schema.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA:
                raise ConfigError(f"{path}: benchmark schema {data['schema']}, but this version reads schema {SCHEMA}")
            rows = tuple(Row(**{**row, "notes": tuple(row["notes"])}) for row in data["rows"])
            return cls(data["command"], data["environment"], rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a benchmark result: {error}") from error


def environment(device: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what a result says of this machine: Python, platform, package versions, and `device`'s own facts."""
    facts = {"python": platform.python_version(), "platform": platform.platform(), "processor": _processor()}
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts | dict(device or {})


def command_line() -> str:
    """Return the command that is running, as a person would type it."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()

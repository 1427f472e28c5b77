"""One configuration, one process: settings that a library reads once, and its memory, cannot leak into the next."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from onnx_kv.errors import OnnxKvError


class WorkerError(OnnxKvError):
    """A benchmark's process failed; the message is the end of what it printed."""


def run_worker(module: str, request: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
    """Run `python -m module` with `request` as JSON on its standard input; return the JSON object it prints last.

    Raises:
        WorkerError: it failed, printed no result, or took longer than `timeout` seconds.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module], input=json.dumps(request), capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"{module} took longer than {timeout} s for {dict(request)}") from error
    lines = done.stdout.strip().splitlines()
    try:
        if done.returncode != 0:
            raise ValueError(f"exit code {done.returncode}")
        result = json.loads(lines[-1])
    except (ValueError, IndexError) as error:
        raise WorkerError(
            f"{module} failed for {dict(request)}: {error}\n{(done.stdout + done.stderr)[-2000:]}"
        ) from error
    return dict(result)

"""One configuration, one process: settings that a library reads once, and its memory, cannot leak into the next."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from onnx_kv.errors import OnnxKvError

_REFUSED = 2


class WorkerError(OnnxKvError):
    """A benchmark's process failed; the message is its own, or the end of what it printed."""


def run_worker(module: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run `python -m module` with `request` as JSON on its standard input; return the JSON object it prints last.

    Raises:
        WorkerError: it failed, or printed no result.
    """
    done = subprocess.run([sys.executable, "-m", module], input=json.dumps(request), capture_output=True, text=True)
    if done.returncode == _REFUSED:
        raise WorkerError(done.stderr.strip())
    try:
        if done.returncode != 0:
            raise ValueError(f"exit code {done.returncode}")
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError) as error:
        raise WorkerError(f"{module} failed: {error}\n{(done.stdout + done.stderr)[-2000:]}") from error


def answer(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """What a worker does: print `run` of the request as JSON, or a deliberate error's message, and end with code 2."""
    try:
        print(json.dumps(run(json.load(sys.stdin))))
    except OnnxKvError as error:
        print(error, file=sys.stderr)
        raise SystemExit(_REFUSED) from None

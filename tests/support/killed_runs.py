"""Run one patch again and again, killed before its first change of the file system, its second, … until one lives.

Run as a program: `python killed_runs.py SOURCE OUTPUT SAVED OPTIONS`, OPTIONS being `patch_model`'s keyword arguments
in JSON. SAVED, if it exists, is what OUTPUT is before every run. Prints one JSON object a line for each killed run: the
state of OUTPUT (`absent` or a digest) and, every third time, whether a run after it succeeds and what lies beside
OUTPUT after that.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from onnx_kv.patching import patch_model

AGAIN_EVERY = 3  # a run after every killed one would only take longer

# What changes a file system, or makes it durable; being killed before a call that only looks is being killed before one
# of these.
CHANGES = {
    *("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink", "flock"),
    *("open", "write", "pwrite", "ftruncate", "copy_file_range", "fsync", "close"),
}


def digest(path: Path) -> str:
    """A digest of all names and bytes in a directory, `absent` without it."""
    if not path.exists():
        return "absent"
    total = hashlib.sha256()
    for entry in sorted(path.rglob("*")):
        total.update(str(entry.relative_to(path)).encode() + (entry.read_bytes() if entry.is_file() else b"/"))
    return total.hexdigest()


def die_at(step: int) -> None:
    """End this process, as SIGKILL would, before its `step`-th change of a file system or around the rename."""
    done = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal done
        name = getattr(argument, "__name__", "") if event == "c_call" else ""
        renaming = event in ("call", "return") and frame.f_code.co_name == "_rename"
        if renaming or (name in CHANGES and (done or name == "mkdir")):  # before the first folder it only reads
            done += 1
            if done == step:
                os._exit(9)

    sys.setprofile(count)


def in_child(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    source, output, saved = map(Path, sys.argv[1:4])
    options = json.loads(sys.argv[4])

    def patch(step: int | None = None) -> None:
        if step is not None:
            die_at(step)
        patch_model(source, output, **options)

    step, status = 0, 9
    while status == 9:
        step += 1
        shutil.rmtree(output, ignore_errors=True)
        if saved.exists():
            shutil.copytree(saved, output)
        status = in_child(lambda: patch(step))  # noqa: B023
        found = digest(output)
        record = {"status": status, "output": found}
        if step % AGAIN_EVERY == 0:
            options["force"] = options.get("force", False) or output.exists()
            record |= {"again": in_child(patch), "then": digest(output)}
            record["beside"] = sorted(entry.name for entry in output.parent.iterdir() if entry != output)
        print(json.dumps(record))
        options["force"] = saved.exists()


if __name__ == "__main__":
    main()

"""Every shell and Python block of README.md and docs/ runs as it stands, in a folder of its own.

A page's blocks run one after another in one folder that has `models/` and `scripts/` beside it, so that a later block
may use what an earlier one made. A fence says more after its language where it must: `bash gpu` needs a GPU, `bash
setup` installs things (the README's own set-up, which the person who runs this test has done), and `text` is never run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(bash|sh|python)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    remarks: tuple[str, ...]
    code: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1], tuple(match[2].split()), match[3])
        for match in FENCE.finditer(text)
    ]


PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(page: Path, tmp_path: Path) -> None:
    for shared in ("models", "scripts", "tools", "onnx_kv"):
        (tmp_path / shared).symlink_to(ROOT / shared)
    environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    runnable = [block for block in blocks(page) if not {"gpu", "setup"} & set(block.remarks)]
    if not runnable:
        pytest.skip("this page's blocks need a GPU or install the package")
    for block in runnable:
        command = [sys.executable, "-c", block.code] if block.language == "python" else ["bash", "-euc", block.code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{page.name}:{block.line}\n{block.code}\n{done.stdout}\n{done.stderr}"

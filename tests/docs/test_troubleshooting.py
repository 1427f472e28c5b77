"""The troubleshooting page names every error class and decline reason, and quotes only messages that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from onnx_kv.runtime.graph import PREDICATES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PYTHON = sorted((ROOT / "onnx_kv").rglob("*.py"))
NATIVE = [path for suffix in ("cc", "h") for path in sorted((ROOT / "onnx_kv" / "ops").rglob(f"*.{suffix}"))]


def python_strings(node: ast.AST) -> Iterator[str]:
    """Every string of a module, with `…` for what an f-string puts in."""
    for child in ast.walk(node):
        if isinstance(child, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in child.values)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


def sources() -> str:
    """All strings of the package, neighbouring C++ literals as one."""
    texts = [text for path in PYTHON for text in python_strings(ast.parse(path.read_text(encoding="utf-8")))]
    for path in NATIVE:
        texts += re.findall(r'"((?:[^"\\\n]|\\.)*)"', re.sub(r'"\s*\n\s*"', "", path.read_text(encoding="utf-8")))
    return "\n".join(texts)


def messages() -> list[str]:
    """The quoted messages: code in the first column of tables whose first heading is `message`."""
    found: list[str] = []
    for table in re.findall(r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        for row in table.splitlines():
            found += re.findall(r"`([^`]+)`", row.split(" | ")[0])
    return found


def test_quoted_messages_exist() -> None:
    strings = sources()
    assert len(messages()) > 80
    fragments = [(fragment.strip(), message) for message in messages() for fragment in re.split(r"[…:]", message)]
    assert [message for fragment, message in fragments if fragment not in strings] == []


def test_every_error_class_is_explained() -> None:
    classes = [
        node.name
        for path in PYTHON
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "").endswith("Error") for base in node.bases)
    ]
    assert {"ConfigError", "WorkerError", "CacheFileError"} <= set(classes)
    assert [name for name in classes if f"`{name}`" not in PAGE] == []


def test_every_decline_reason_is_explained() -> None:
    for name in [*PREDICATES, "capture_failed"]:
        assert f"| `{name}` |" in PAGE

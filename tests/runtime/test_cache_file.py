from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnx_kv.errors import CacheFileError, CapacityError
from onnx_kv.geometry import GrowthPolicy
from onnx_kv.layout import KvLayout, LayerShape, Side
from onnx_kv.memory import MemoryPool
from onnx_kv.runtime.cache import KvCache
from onnx_kv.runtime.cache_file import load_cache, save_cache
from tests.support.caches import Shadow

LAYERS = (LayerShape(2, 64), LayerShape(1, 96))


def make(layout: KvLayout, dtype: str = "float16", batch: int = 3, max_length: int = 100) -> KvCache:
    return KvCache(LAYERS, layout, dtype, batch, max_length, min_bucket=4, pool=MemoryPool())


def filled(layout: KvLayout, dtype: str = "float16") -> Shadow:
    shadow = Shadow(make(layout, dtype), seed=1)
    shadow.append([3, 1, 0])
    shadow.append([20, 1, 9])
    return shadow


@pytest.mark.parametrize("source", KvLayout)
@pytest.mark.parametrize("target", KvLayout)
def test_a_cache_loads_across_layouts(tmp_path: Path, source: KvLayout, target: KvLayout) -> None:
    saved = filled(source)
    save_cache(saved.cache, tmp_path / "cache.safetensors", "model-1")
    loaded = Shadow(make(target), seed=2)
    loaded.append([2, 50, 2])
    assert load_cache(loaded.cache, tmp_path / "cache.safetensors", "model-1") == (20, 1, 9)
    loaded.values, loaded.lengths = saved.values, saved.lengths
    loaded.check()
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]


def test_the_same_bytes_whatever_the_layout_but_for_its_name(tmp_path: Path) -> None:
    for layout in (KvLayout.SEQ_MAJOR, KvLayout.HEAD_MAJOR):
        save_cache(filled(layout).cache, tmp_path / layout.name, "m")
    contents = [(tmp_path / layout.name).read_bytes() for layout in (KvLayout.SEQ_MAJOR, KvLayout.HEAD_MAJOR)]
    sizes = [8 + int.from_bytes(content[:8], "little") for content in contents]
    assert contents[0][sizes[0] :] == contents[1][sizes[1] :]


@pytest.mark.parametrize(("dtype", "name"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
def test_the_container_is_safetensors(tmp_path: Path, dtype: str, name: str) -> None:
    safetensors = pytest.importorskip("safetensors")
    saved = filled(KvLayout.TOKEN_MAJOR, dtype)
    path = tmp_path / "cache.safetensors"
    save_cache(saved.cache, path, "m")
    entries = dict(safetensors.deserialize(path.read_bytes()))
    assert set(entries) == {
        f"{layer}.{side}.{row}" for layer in (0, 1) for side in ("key", "value") for row in range(3)
    }
    assert entries["1.value.2"]["dtype"] == name
    assert entries["1.value.2"]["shape"] == [1, 9, 96]
    expected = saved.cache.read_row(1, Side.VALUE, 2)
    found = np.frombuffer(entries["1.value.2"]["data"], saved.cache.dtype).reshape(1, 9, 96)
    np.testing.assert_array_equal(found.view(saved.unsigned), expected.view(saved.unsigned))
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata()["layout"] == "token_major"
        assert json.loads(file.metadata()["lengths"]) == [20, 1, 9]
    assert np.dtype(ml_dtypes.bfloat16).name == "bfloat16"


def edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (cut, "cut off or damaged"),
    (extend, "cut off or damaged"),
    (lambda p: p.write_bytes(b""), "not a safetensors file|without the metadata"),
    (lambda p: p.write_bytes(b"\xff" * 100), "its header would be"),
    (lambda p: p.write_bytes((4).to_bytes(8, "little") + b"nope"), "not a safetensors file"),
    (lambda p: p.write_bytes((2).to_bytes(8, "little") + b"[]"), "without the metadata"),
    (lambda p: p.unlink(), "cannot read"),
    (lambda p: edited(p, lambda h: h["__metadata__"].update(format="other")), "format 'other'"),
    (
        lambda p: edited(p, lambda h: h["__metadata__"].update(fingerprint="model-2")),
        "'model-2'; this one is 'model-1'",
    ),
    (lambda p: edited(p, lambda h: h["__metadata__"].update(lengths="[20, 1]")), "2 rows; the cache has 3"),
    (lambda p: edited(p, lambda h: h["__metadata__"].update(lengths="[20, -1, 9]")), "how long its rows are"),
    (lambda p: edited(p, lambda h: h["__metadata__"].pop("lengths")), "how long its rows are"),
    (lambda p: edited(p, lambda h: h["__metadata__"].update(lengths="[21, 1, 9]")), "tensor 0.key.0 is"),
    (lambda p: edited(p, lambda h: h["1.key.0"].update(dtype="F32")), "tensor 1.key.0 is"),
    (lambda p: edited(p, lambda h: h["1.key.0"].update(data_offsets=[0, 1 << 60])), "tensor 1.key.0 is"),
    (lambda p: edited(p, lambda h: h.pop("1.key.0")), "tensor 1.key.0 is None"),
    (lambda p: edited(p, lambda h: h.update(extra=h["1.key.0"])), "tensor extra is"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_a_file_that_does_not_fit_changes_nothing(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    path = tmp_path / "cache.safetensors"
    save_cache(filled(KvLayout.SEQ_MAJOR).cache, path, "model-1")
    damage(path)
    shadow = Shadow(make(KvLayout.HEAD_MAJOR), seed=7)
    shadow.append([4, 5, 6])
    with pytest.raises(CacheFileError, match=reason):
        load_cache(shadow.cache, path, "model-1")
    shadow.check()


def test_a_cache_too_long_is_refused(tmp_path: Path) -> None:
    save_cache(filled(KvLayout.SEQ_MAJOR).cache, tmp_path / "c", "m")
    with pytest.raises(CapacityError, match="20 tokens do not fit"):
        load_cache(make(KvLayout.HEAD_MAJOR, max_length=19), tmp_path / "c", "m")


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.safetensors"
    shadow = filled(KvLayout.SEQ_MAJOR)
    save_cache(shadow.cache, path, "m")
    before = path.read_bytes()
    shadow.append([30, 30, 30])

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save_cache(shadow.cache, path, "m")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_growth_goes_on_after_a_load(tmp_path: Path) -> None:
    saved = filled(KvLayout.SEQ_MAJOR)
    save_cache(saved.cache, tmp_path / "c", "m")
    cache = KvCache(LAYERS, KvLayout.HEAD_MAJOR, "float16", 3, 100, policy=GrowthPolicy.BUCKET, min_bucket=4)
    loaded = Shadow(cache, seed=3)
    load_cache(cache, tmp_path / "c", "m")
    loaded.values, loaded.lengths = saved.values, saved.lengths
    for length in range(21, 80):
        loaded.append([length, 1, 9])
    loaded.check()

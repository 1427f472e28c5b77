from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnx_kv.errors import ModelDirError
from onnx_kv.model_dir import copying, publish
from onnx_kv.patching import patch_model
from tests.support.killed_runs import digest
from tests.support.tiny_model import contents, leftovers, write_model_dir

ROOT = Path(__file__).parents[2]


def killed_runs(source: Path, output: Path, saved: Path, **options: object) -> list[dict[str, Any]]:
    output.parent.mkdir()
    done = subprocess.run(
        [sys.executable, ROOT / "tests/support/killed_runs.py", source, output, saved, json.dumps(options)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def after(runs: list[dict[str, Any]]) -> set[tuple[object, ...]]:
    """How runs after killed ones ended: exit status, digest of the output, names of leftovers."""
    return {(run["again"], run["then"], *run["beside"]) for run in runs if "again" in run}


@pytest.mark.parametrize("link", [False, True])
def test_killed_at_any_step_it_leaves_no_output_or_a_complete_one(tmp_path: Path, link: bool) -> None:
    source = write_model_dir(tmp_path / "m", place=lambda name: "data/w.bin" if name == "head" else None)
    before = digest(source)
    patch_model(source, tmp_path / "expected", "seq-major")
    complete = digest(tmp_path / "expected")
    runs = killed_runs(source, tmp_path / "work" / "out", tmp_path / "none", layout="seq-major", link=link)
    assert [run["status"] for run in runs[:-1]] == [9] * (len(runs) - 1)
    assert runs[-1]["status"] == 0
    assert {run["output"] for run in runs} == {"absent", complete}
    assert after(runs) == {(0, complete)}
    assert digest(source) == before
    assert len(runs) > 30


def test_killed_at_any_step_a_replacement_leaves_the_old_output_or_the_new(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    patch_model(source, tmp_path / "old", "head-major")
    (tmp_path / "old" / "notes.txt").write_text("from the run before")
    patch_model(source, tmp_path / "new", "seq-major")
    old, new = digest(tmp_path / "old"), digest(tmp_path / "new")
    runs = killed_runs(source, tmp_path / "work" / "out", tmp_path / "old", layout="seq-major", force=True)
    assert {run["output"] for run in runs} == {old, new}
    assert after(runs) == {(0, new)}


def test_a_second_run_gives_identical_bytes(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    options = {"lift_sequence_lengths": True, "last_token_logits": True}
    patch_model(source, tmp_path / "a", "token-major", **options)
    patch_model(source, tmp_path / "b", "token-major", **options)
    patch_model(tmp_path / "a", tmp_path / "c", "token-major", **options)
    patch_model(source, tmp_path / "a", "token-major", force=True, **options)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    assert leftovers(tmp_path) == []


def test_outputs_in_the_wrong_place_are_refused(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "outer" / "m")
    (tmp_path / "link").symlink_to(source)
    before = contents(tmp_path)
    for output, message in (
        (source, "is the model itself"),
        (tmp_path / "outer" / "x" / ".." / "m", "is the model itself"),
        (tmp_path / "link", "exists"),
        (tmp_path / "link" / "sub", "is the model itself, inside it or around it"),
        (source / "sub", "inside it"),
        (tmp_path / "outer", "around it"),
        (tmp_path / "missing" / "out", "does not exist; create it first"),
    ):
        with pytest.raises(ModelDirError, match=message):
            patch_model(source, output, "seq-major")
    for output in (source, tmp_path / "outer", tmp_path):
        with pytest.raises(ModelDirError, match="is the model itself"):
            patch_model(source, output, "seq-major", force=True)
    assert contents(tmp_path) == before


def test_an_existing_output_needs_force(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelDirError, match="exists; choose another output, or replace it with --force"):
        patch_model(source, tmp_path / "out", "seq-major")
    patch_model(source, tmp_path / "out", "seq-major", force=True)
    assert contents(tmp_path / "out").keys() == contents(source).keys()


@pytest.mark.parametrize("kind", ["file", "link", "other folder"])
def test_force_replaces_nothing_but_model_directories(tmp_path: Path, kind: str) -> None:
    source, output = write_model_dir(tmp_path / "m"), tmp_path / "out"
    if kind == "file":
        output.write_text("precious")
    elif kind == "link":
        output.symlink_to(write_model_dir(tmp_path / "other"))
    else:
        output.mkdir()
        (output / "thesis.tex").write_text("precious")
    before = contents(tmp_path)
    with pytest.raises(ModelDirError, match="replace"):
        patch_model(source, output, "seq-major", force=True)
    assert contents(tmp_path) == before


def test_a_dry_run_checks_all_and_writes_nothing(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    report = patch_model(source, tmp_path / "out", "seq-major", dry_run=True)
    assert report.dry_run
    assert report.rewritten == ("model.onnx",)
    assert report.copied_bytes == sum(map(len, contents(source).values())) - len(contents(source)["model.onnx"])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m"]
    with pytest.raises(ModelDirError, match="is the model itself"):
        patch_model(source, source, "seq-major", dry_run=True)


def test_link_shares_the_weights_and_nothing_else(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    report = patch_model(source, tmp_path / "out", "seq-major", link=True)
    shared = [name for name in contents(source) if (source / name).samefile(tmp_path / "out" / name)]
    assert shared == ["model.onnx.data"]
    assert report.linked_bytes == (source / "model.onnx.data").stat().st_size
    assert any("hard links" in note for note in report.notes)


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    source, told = write_model_dir(tmp_path / "m"), []
    report = patch_model(source, tmp_path / "out", "seq-major", on_progress=lambda *both: told.append(both))
    assert told == sorted(told)
    assert told[-1] == (report.copied_bytes, report.copied_bytes)


def raise_error(number: int) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("module", "function", "number", "message"),
    [
        (copying.os, "ftruncate", errno.ENOSPC, "No space left on device"),
        (copying.os, "copy_file_range", errno.EIO, "Input/output error"),
        (publish.os, "fsync", errno.EDQUOT, "quota"),
        (publish.os, "link", errno.EXDEV, "leave out --link"),
        (publish.Path, "mkdir", errno.EROFS, "Read-only file system"),
    ],
)
def test_an_output_that_cannot_be_written_is_an_error_without_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, function: str, number: int, message: str
) -> None:
    source = write_model_dir(tmp_path / "m")
    before = contents(tmp_path)
    monkeypatch.setattr(module, function, raise_error(number))
    with pytest.raises(ModelDirError, match=f"out cannot be written: .*{message}"):
        patch_model(source, tmp_path / "out", "seq-major", link=function == "link")
    assert contents(tmp_path) == before
    assert leftovers(tmp_path) == []


def test_too_little_space_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model_dir(tmp_path / "m")
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(publish.os, "statvfs", lambda path: full)
    with pytest.raises(ModelDirError, match=r"has 0 bytes free, but the copy needs \d+"):
        patch_model(source, tmp_path / "out", "seq-major")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_parent_is_refused(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    parent = tmp_path / "parent"
    parent.mkdir(mode=0o500)
    with pytest.raises(ModelDirError, match="no permission"):
        patch_model(source, parent / "out", "seq-major")


def test_two_runs_for_one_output_are_kept_apart(tmp_path: Path) -> None:
    source = write_model_dir(tmp_path / "m")
    staging = tmp_path / ".out.onnx-kv-partial"
    staging.mkdir()
    (staging / "left").write_text("by a run that was killed")
    other = os.open(staging, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ModelDirError, match="another run is writing"):
        patch_model(source, tmp_path / "out", "seq-major")
    assert (staging / "left").exists()
    os.close(other)
    patch_model(source, tmp_path / "out", "seq-major")
    assert contents(tmp_path / "out").keys() == contents(source).keys()
    assert leftovers(tmp_path) == []


def test_a_link_in_the_hidden_folders_place_is_not_followed(tmp_path: Path) -> None:
    source, home = write_model_dir(tmp_path / "m"), tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("precious")
    (tmp_path / ".out.onnx-kv-partial").symlink_to(home)
    with pytest.raises(ModelDirError, match="out cannot be written"):
        patch_model(source, tmp_path / "out", "seq-major")
    assert (home / "thesis.tex").read_text() == "precious"


def test_file_systems_without_the_newer_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldSystem:
        def __init__(self, *args: object, **kwargs: object) -> None:
            pass

        def renameat2(self, *args: object) -> int:
            return -1

    monkeypatch.setattr(publish.ctypes, "CDLL", OldSystem)
    monkeypatch.setattr(publish.ctypes, "get_errno", lambda: errno.EINVAL)
    source = write_model_dir(tmp_path / "m")
    patch_model(source, tmp_path / "out", "seq-major")
    before = contents(tmp_path / "out")
    with pytest.raises(ModelDirError, match=r"cannot replace .* in one step; remove it first"):
        patch_model(source, tmp_path / "out", "paired", force=True)
    assert contents(tmp_path / "out") == before
    assert leftovers(tmp_path) == []


def test_the_output_appearing_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model_dir(tmp_path / "m")
    rename = publish._rename

    def late(staging: Path, output: Path, flag: int) -> None:
        output.mkdir()
        rename(staging, output, flag)

    monkeypatch.setattr(publish, "_rename", late)
    with pytest.raises(ModelDirError, match="File exists"):
        patch_model(source, tmp_path / "out", "seq-major")
    assert list((tmp_path / "out").iterdir()) == []
    assert leftovers(tmp_path) == []

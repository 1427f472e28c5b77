from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onnx_kv.bench.compare import Verdict, compare
from onnx_kv.bench.result import Result, Row
from onnx_kv.errors import ConfigError

TOOL = Path(__file__).parents[2] / "tools" / "compare_bench.py"


def result(*rows: Row) -> Result:
    return Result("bench", {"gpu": "none"}, rows)


def row(name: str, median: float, half_width: float = 0.0, **rest: object) -> Row:
    return Row(name, "us", median, median - half_width, median + half_width, 10, **rest)  # type: ignore[arg-type]


def verdicts(base: Result, head: Result) -> dict[str, Verdict]:
    return {difference.name: difference.verdict for difference in compare(base, head)}


def test_summary_of_samples() -> None:
    summary = Row.of("x", "us", list(range(101)))
    assert (summary.median, summary.low, summary.high, summary.samples) == (50, 10, 90, 101)
    assert summary.spread == pytest.approx(1.6)


def test_one_sample_has_no_spread() -> None:
    assert Row.of("x", "us", [4.0]).spread == 0


def test_quiet_rows_differ_beyond_three_percent() -> None:
    base = result(row("slower", 100), row("faster", 100), row("same", 100))
    head = result(row("slower", 104), row("faster", 96), row("same", 102))
    assert verdicts(base, head) == {
        "slower": Verdict.REGRESSION,
        "faster": Verdict.IMPROVEMENT,
        "same": Verdict.NOISE,
    }


def test_noise_of_both_runs_widens_the_bound() -> None:
    # Spreads of 20 % and 0 %: half of their sum is 10 %.
    assert verdicts(result(row("x", 100, 10)), result(row("x", 109))) == {"x": Verdict.NOISE}
    assert verdicts(result(row("x", 100, 10)), result(row("x", 111))) == {"x": Verdict.REGRESSION}


def test_throughput_is_better_when_higher() -> None:
    base, head = (result(row("tokens", speed, higher_is_better=True)) for speed in (100, 80))
    assert verdicts(base, head) == {"tokens": Verdict.REGRESSION}


def test_rows_that_cannot_be_compared_say_so() -> None:
    base = result(row("gone", 1), row("other", 1, knobs={"batch": 1}))
    head = result(row("new", 1), row("other", 1, knobs={"batch": 8}))
    assert verdicts(base, head) == {"gone": Verdict.ONLY_BASE, "new": Verdict.ONLY_HEAD, "other": Verdict.KNOBS}


def test_file_round_trip(tmp_path: Path) -> None:
    written = result(Row.of("x", "us", [1.0, 2.0, 3.0], knobs={"layout": "paired"}, notes=["no capture"]))
    path = tmp_path / "r.json"
    path.write_text(written.to_json())
    assert Result.load(path) == written


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"schema": 99, "rows": []}', '{"schema": 1, "command": 1, "rows": [{}]}']
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"r\.json"):
        Result.load(path)


@pytest.mark.parametrize(("head", "code"), [(100.0, 0), (150.0, 1), (None, 2)])
def test_tool_exit_codes(tmp_path: Path, head: float | None, code: int) -> None:
    (tmp_path / "base.json").write_text(result(row("x", 100)).to_json())
    (tmp_path / "head.json").write_text(result(*([row("x", head)] if head else [])).to_json())
    done = subprocess.run(
        [sys.executable, str(TOOL), "base.json", "head.json", "--markdown", "pr.md"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    if code == 1:
        assert (tmp_path / "pr.md").read_text().splitlines()[
            2
        ] == "| x | 100 us | 150 us | 1.500 × | ± 3.0% | regression |"

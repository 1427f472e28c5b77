from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from onnx_kv.cli import main
from onnx_kv.runtime.tokenizer import Tokenizer
from tests.conftest import Patched
from tests.support.stock import MODELS, StockModel


@pytest.fixture(scope="module")
def qwen(patched: Patched) -> Path:
    return patched("qwen2-tiny", "seq-major")


def generate(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, ["generate", *arguments], input=stdin)


def test_text(qwen: Path) -> None:
    tokenizer = Tokenizer(qwen)
    expected = StockModel(MODELS / "qwen2-tiny").greedy(tokenizer.encode("The key"), 12).tokens
    done = generate(str(qwen), "--prompt", "The key", "--max-new-tokens", "12")
    assert done.exit_code == 0, done.output
    assert done.stdout == tokenizer.decode(expected) + "\n"
    assert "generated: 12 tokens" in done.stderr
    assert "max_new_tokens" in done.stderr


def test_tokens(qwen: Path, tmp_path: Path) -> None:
    expected = StockModel(MODELS / "qwen2-tiny").greedy([5, 6, 7], 6).tokens
    file = tmp_path / "tokens"
    file.write_text("[5, 6\n7]\n")
    done = generate(str(qwen), "--tokens-file", str(file), "--max-new-tokens", "6")
    assert [int(word) for word in done.stdout.split()] == expected
    assert generate(str(qwen), "--tokens-file", "-", "--max-new-tokens", "6", stdin="5 6 7").stdout == done.stdout


def test_json(qwen: Path) -> None:
    done = generate(str(qwen), "--prompt", "The key", "--max-new-tokens", "5", "--json")
    result = json.loads(done.stdout)
    assert len(result["tokens"]) == 5
    assert result["text"] == Tokenizer(qwen).decode(result["tokens"])
    assert result["finish"] == "max_new_tokens"
    assert result["stats"]["generated_tokens"] == 5


def test_sampled_text_repeats_with_its_seed(qwen: Path) -> None:
    options = [
        "--prompt",
        "The key",
        "--max-new-tokens",
        "20",
        "--temperature",
        "1.5",
        "--top-k",
        "40",
        "--top-p",
        "0.9",
    ]
    first = generate(str(qwen), *options, "--seed", "5").stdout
    assert generate(str(qwen), *options, "--seed", "5").stdout == first
    assert generate(str(qwen), *options, "--seed", "6").stdout != first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --prompt or --tokens-file"),
        (["--prompt", "The key", "--max-length", "2"], "would have"),
        (["--prompt", "The key", "--top-p", "2"], "top_p=2.0"),
        (["--prompt", "The key", "--device", "gpu"], "device='gpu'"),
        (["--tokens-file", "-"], "no prompt was given"),
        (["--prompt", "\udcff"], "the text cannot be encoded"),
    ],
)
def test_refusals_are_exit_code_2(qwen: Path, arguments: list[str], message: str) -> None:
    done = generate(str(qwen), *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_a_tokens_file_with_words_is_refused(qwen: Path) -> None:
    done = generate(str(qwen), "--tokens-file", "-", stdin="1 two 3")
    assert done.exit_code == 2
    assert "two" in done.stderr


def test_a_tokens_file_of_other_bytes_is_refused(qwen: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(b"1 2 \xff")
    done = generate(str(qwen), "--tokens-file", str(file))
    assert done.exit_code == 2
    assert str(file) in done.stderr

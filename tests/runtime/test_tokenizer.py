from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from onnx_kv.errors import ModelDirError
from onnx_kv.runtime.tokenizer import Tokenizer
from tests.support.stock import MODEL_NAMES, MODELS

TEXTS = [
    "The key to it",
    " naïve café 🙂🙃 done",
    "日本語のテキスト",
    "tail without end \U0001f469\u200d\U0001f680",
    "",
]


@pytest.fixture
def byte_level(tmp_path: Path) -> Tokenizer:
    """A tokenizer without merges: every byte is a token, so most characters take several."""
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Library(models.BPE(vocab=alphabet, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_writes_whole_characters_and_all_of_them(byte_level: Tokenizer, text: str) -> None:
    stream = byte_level.stream()
    tokens = byte_level.encode(text)
    assert len(tokens) == len(text.encode())
    pieces = [stream.add(token) for token in tokens]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text


def test_a_character_that_stays_incomplete_is_written_at_the_end(byte_level: Tokenizer) -> None:
    stream = byte_level.stream()
    tokens = byte_level.encode("a🙂")[:-1]
    assert "".join(stream.add(token) for token in tokens) == "a"
    assert set(stream.finish()) == {"\ufffd"}


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_stream_says_what_decoding_at_once_says(name: str) -> None:
    tokenizer = Tokenizer(MODELS / name)
    tokens = tokenizer.encode("The quick brown fox, naïvely: 12 + 3 = 15 🙂.\n\tnext line")
    stream = tokenizer.stream()
    assert "".join([stream.add(token) for token in tokens] + [stream.finish()]) == tokenizer.decode(tokens)


def test_a_directory_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelDirError, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelDirError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)

"""Text to tokens and back, by the model directory's `tokenizer.json`."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from onnx_kv.errors import ConfigError, ModelDirError

TOKENIZER_FILE = "tokenizer.json"
_UNFINISHED = "\ufffd"
"""What a decoder writes for the bytes of a character whose other bytes have not come yet."""


class Tokenizer:
    """The tokenizer that a model was trained with."""

    def __init__(self, model_dir: Path) -> None:
        """Read `tokenizer.json`.

        Raises:
            ModelDirError: there is none, or it cannot be read.
        """
        file = model_dir / TOKENIZER_FILE
        if not file.is_file():
            raise ModelDirError(f"{file} does not exist; without a tokenizer give token ids")
        try:
            self._tokenizer = _Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise ModelDirError(f"{file}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that the tokenizer adds to a prompt.

        Raises:
            ConfigError: the text is no Unicode, as bytes of another encoding on the command line are not.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text cannot be encoded: {error}") from None
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, special tokens left out."""
        text: str = self._tokenizer.decode(tokens)
        return text

    def stream(self) -> TextStream:
        """Return a decoder for tokens that come one at a time."""
        return TextStream(self)


class TextStream:
    """Turns tokens into text as they come, and holds back what later tokens may still change.

    A character's bytes can lie in several tokens, and a word's first token can decode to other text alone than after
    its neighbour. So the text of a token is what it adds to the text of the tokens since the last complete character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0  # tokens of `_tokens` whose text is out already; they only give the rest its context

    def add(self, token: int) -> str:
        """Return the text that `token` completes; empty where a character is not complete yet."""
        self._tokens.append(token)
        text = self._pending()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self._tokens = self._tokens[self._context :]
        self._context = len(self._tokens)
        return text

    def finish(self) -> str:
        """Return what was held back: the tokens end here."""
        text = self._pending()
        self._tokens, self._context = [], 0
        return text

    def _pending(self) -> str:
        known = self._tokenizer.decode(self._tokens[: self._context])
        return self._tokenizer.decode(self._tokens)[len(known) :]

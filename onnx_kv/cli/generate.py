"""`onnx-kv generate`: continue a prompt with a model, printing the text as it comes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, TextIO

import click

from onnx_kv.cli._options import given, runtime_options
from onnx_kv.errors import ConfigError
from onnx_kv.runtime.decoder import Decoder
from onnx_kv.runtime.rows import FinishReason
from onnx_kv.runtime.sampling import Sampling
from onnx_kv.runtime.stats import Stats


@click.command()
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option("--prompt", help="Text to continue.")
@click.option(
    "--tokens-file",
    type=click.File(),
    help="File of token ids to continue, separated by white space or commas; - is stdin. Prints token ids.",
)
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Stop after so many tokens.")
@click.option("--max-length", type=click.IntRange(min=1), help="Most tokens in all.  [default: the model's maximum]")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Sample among the K likeliest; 0: among all.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Sample among the likeliest that make up P.")
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds give equal tokens.")
@runtime_options
@click.option("--json", "as_json", is_flag=True, help="Print tokens, text and counters as JSON at the end.")
def command(
    model_dir: Path,
    prompt: str | None,
    tokens_file: TextIO | None,
    max_new_tokens: int,
    max_length: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    as_json: bool,
    **settings: Any,
) -> None:
    """Continue a prompt with the model of MODEL_DIR and stream what it says to stdout; counters go to stderr."""
    if (prompt is None) == (tokens_file is None):
        raise click.UsageError("give either --prompt or --tokens-file")
    sampling = Sampling(temperature, top_k, top_p, seed)
    with Decoder(model_dir, **given(settings | {"max_length": max_length})) as decoder:
        ids = _read_tokens(tokens_file) if tokens_file is not None else decoder.tokenizer.encode(prompt or "")
        text = decoder.tokenizer.stream() if tokens_file is None else TokenStream()
        written = []
        for [token] in (step.tokens for step in decoder.stream(ids, max_new_tokens=max_new_tokens, sampling=sampling)):
            if token is not None:
                written.append(text.add(token))
                _write(written[-1], as_json)
        written.append(text.finish())
        _write(written[-1] + "\n", as_json)
        [tokens], [finish] = decoder.tokens, decoder.finish
        if not as_json:
            click.echo(_summary(decoder.stats, finish), err=True)
            return
        result = {
            "prompt_tokens": ids,
            "tokens": tokens[len(ids) :],
            "text": "".join(written) if tokens_file is None else None,
            "finish": finish,
            "stats": decoder.stats.as_dict(),
        }
        click.echo(json.dumps(result, indent=2))


class TokenStream:
    """Writes tokens as numbers, in place of a tokenizer's text."""

    def add(self, token: int) -> str:
        """Return what is written for a token."""
        return f"{token} "

    def finish(self) -> str:
        """Return what is written at the end."""
        return ""


def _write(text: str, quiet: bool) -> None:
    if not quiet:
        click.echo(text, nl=False)


def _read_tokens(file: TextIO) -> list[int]:
    try:
        words = re.split(r"[\s,\[\]]+", file.read())
        return [int(word) for word in words if word]
    except ValueError as error:
        raise ConfigError(
            f"{file.name}: {error}; a tokens file has numbers, separated by white space or commas"
        ) from None


def _summary(stats: Stats, finish: FinishReason | None) -> str:
    prefill = stats.prompt_tokens / stats.prefill_seconds if stats.prefill_seconds else 0.0
    lines = [
        f"prompt: {stats.prompt_tokens} tokens in {stats.prefill_seconds:.3f} s ({prefill:,.0f}/s)",
        f"generated: {stats.generated_tokens} tokens in {stats.decode_seconds:.3f} s "
        f"({stats.tokens_per_second():,.0f}/s), ended by {finish}",
        f"cache: {stats.physical_kv_bytes:,} bytes; {stats.growth_events} growths moved {stats.kv_bytes_moved:,} bytes",
        f"graphs: {stats.captures} captured, {stats.replays} replays"
        if stats.decline_reason is None
        else f"graphs: none, {stats.decline_reason}",
    ]
    return "\n".join(lines)

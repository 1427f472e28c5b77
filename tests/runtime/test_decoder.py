from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnx_kv.errors import CapacityError, ConfigError, OutOfMemoryError
from onnx_kv.layout import KvLayout
from onnx_kv.memory import MemoryBudget
from onnx_kv.runtime.decoder import Decoder
from onnx_kv.runtime.rows import FinishReason
from onnx_kv.runtime.sampling import Sampling
from tests.conftest import Patched
from tests.support.stock import MODEL_NAMES, MODELS, Greedy, StockModel

LAYOUTS = [layout.cli_name for layout in KvLayout]
LENGTHS = (1, 17, 300)
COUNT = 64


def prompt(length: int) -> list[int]:
    """Tokens that every shipped model has, none of which ends a text."""
    return [int(token) for token in np.random.default_rng(length).integers(3, 256, length)]


def greedy(decoder: Decoder, tokens: Sequence[int], count: int = COUNT) -> tuple[list[int | None], NDArray[Any]]:
    steps = list(decoder.stream(tokens, max_new_tokens=count, stop_tokens=(), logits=True))
    return [step.tokens[0] for step in steps], np.concatenate([x.logits for x in steps if x.logits is not None])


@pytest.fixture(scope="module")
def qwen(patched: Patched) -> Path:
    return patched("qwen2-tiny", "seq-major")


def assert_agrees(tokens: list[int | None], logits: NDArray[Any], expected: Greedy, tolerance: float) -> None:
    """Logits agree within a share of the largest; tokens too, but where the two likeliest are as close as that."""
    same = next((i for i, pair in enumerate(zip(tokens, expected.tokens, strict=True)) if pair[0] != pair[1]), COUNT)
    allowed = tolerance * np.abs(expected.logits).max().astype(np.float64)
    difference = np.abs(logits.astype(np.float64) - expected.logits)[: same + 1]
    assert difference.max() <= allowed
    if same < len(tokens):
        second, first = np.sort(expected.logits[same])[-2:]
        assert tolerance > 1e-4, "float32 is exact enough for equal tokens"
        assert first - second <= 2 * allowed


def tolerance_of(name: str) -> float:
    return {"llama-fp16": 2e-2, "llama-int4": 5e-2}.get(name, 1e-4)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_layout_generates_what_stock_onnxruntime_does(name: str, patched: Patched) -> None:
    stock = StockModel(MODELS / name)
    decoders = [Decoder(patched(name, layout)) for layout in (LAYOUTS if name == "qwen2-tiny" else LAYOUTS[:2])]
    for length in LENGTHS:
        (tokens, logits), *others = (greedy(decoder, prompt(length)) for decoder in decoders)
        assert_agrees(tokens, logits, stock.greedy(prompt(length), COUNT), tolerance_of(name))
        for other_tokens, other_logits in others:
            assert other_tokens == tokens
            assert other_logits.tobytes() == logits.tobytes(), "layouts differ in a bit"


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_with_lengths_as_inputs_and_last_logits_alone(name: str, patched: Patched) -> None:
    expected = StockModel(MODELS / name).greedy(prompt(40), 24)
    decoder = Decoder(patched(name, "seq-major", lift_sequence_lengths=True, last_token_logits=True), prefill_chunk=16)
    assert_agrees(*greedy(decoder, prompt(40), 24), expected, tolerance_of(name))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_generates_what_each_row_does_alone(layout: str, patched: Patched) -> None:
    decoder = Decoder(patched("qwen2-tiny", layout))
    prompts = [prompt(17), prompt(1), prompt(70)]
    together = decoder.generate(prompts, max_new_tokens=40, stop_tokens=())
    alone = [decoder.generate(row, max_new_tokens=40, stop_tokens=())[0] for row in prompts]
    assert together == alone


def test_rows_that_end_early_leave_the_others_alone(qwen: Path) -> None:
    decoder = Decoder(qwen)
    prompts = [prompt(5), prompt(9)]
    free = decoder.generate(prompts, max_new_tokens=30, stop_tokens=())
    stop = next(token for token in free[0].tokens if token not in free[1].tokens)
    ended = decoder.generate(prompts, max_new_tokens=30, stop_tokens=[stop])
    assert ended[0].tokens == free[0].tokens[: free[0].tokens.index(stop) + 1]
    assert ended[0].finish is FinishReason.STOP
    assert ended[1] == free[1]


def test_a_prompt_in_pieces_gives_the_same_tokens(qwen: Path) -> None:
    whole, pieces = Decoder(qwen), Decoder(qwen, prefill_chunk=7)
    expected = whole.generate(prompt(100), max_new_tokens=20)
    assert pieces.generate(prompt(100), max_new_tokens=20) == expected
    assert whole.stats.prefill_runs == 1
    assert pieces.stats.prefill_runs == 15


def test_rewind_and_generate_again(qwen: Path) -> None:
    decoder = Decoder(qwen)
    [first] = decoder.generate(prompt(20), max_new_tokens=30, stop_tokens=())
    for length in (20, 35, 1):
        decoder.rewind(length)
        [again] = decoder.generate(max_new_tokens=50 - length, stop_tokens=())
        assert decoder.tokens[0][length:] == again.tokens
        if length >= 20:
            assert again.tokens == first.tokens[length - 20 :]


def test_a_turn_goes_on_from_what_is_cached(qwen: Path) -> None:
    decoder, fresh = Decoder(qwen), Decoder(qwen)
    decoder.generate(prompt(20), max_new_tokens=10, stop_tokens=())
    before = decoder.stats.prompt_tokens
    decoder.append([7, 8, 9])
    said = decoder.tokens[0]
    assert len(said) == 33
    assert decoder.generate(max_new_tokens=15, stop_tokens=()) == fresh.generate(
        said, max_new_tokens=15, stop_tokens=()
    )
    assert decoder.stats.prompt_tokens - before == 4, "the turn's tokens, and the last one generated"


def test_a_stream_that_is_left_can_be_gone_on_with(qwen: Path) -> None:
    decoder = Decoder(qwen)
    [whole] = decoder.generate(prompt(20), max_new_tokens=30, stop_tokens=())
    stream = decoder.stream(prompt(20), max_new_tokens=30, stop_tokens=())
    head = [next(stream).tokens[0] for _ in range(10)]
    stream.close()  # type: ignore[attr-defined]
    [tail] = decoder.generate(max_new_tokens=20, stop_tokens=())
    assert head + tail.tokens == whole.tokens


def test_a_stream_is_over_once_the_decoder_is_used_otherwise(qwen: Path) -> None:
    decoder = Decoder(qwen)
    stream = decoder.stream(prompt(20), max_new_tokens=30, stop_tokens=())
    next(stream)
    decoder.rewind(10)
    with pytest.raises(ConfigError, match="this stream is over"):
        next(stream)
    never_begun = decoder.stream(max_new_tokens=5)
    decoder.reset()
    with pytest.raises(ConfigError, match="this stream is over"):
        next(never_begun)


def test_a_closed_decoder_keeps_its_counters_only(qwen: Path) -> None:
    with Decoder(qwen) as decoder:
        decoder.generate(prompt(20), max_new_tokens=3)
    assert decoder.stats.generated_tokens == 3
    assert decoder.stats.physical_kv_bytes == 0
    with pytest.raises(ConfigError, match="closed"):
        decoder.generate(prompt(20))
    decoder.close()


def test_graphs_cannot_be_had_on_the_host(qwen: Path) -> None:
    with pytest.raises(ConfigError, match=r"graph=on, .*no_cuda_device"):
        Decoder(qwen, graph="on").generate(prompt(5))


def test_a_seed_gives_the_same_tokens(qwen: Path) -> None:
    decoder = Decoder(qwen)
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=11)
    first = decoder.generate(prompt(9), max_new_tokens=30, sampling=sampling)
    assert decoder.generate(prompt(9), max_new_tokens=30, sampling=sampling) == first
    other = Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=12)
    assert decoder.generate(prompt(9), max_new_tokens=30, sampling=other) != first


def test_ends_at_the_lengths_asked_for(qwen: Path) -> None:
    decoder = Decoder(qwen, max_length=32)
    [few] = decoder.generate(prompt(20), max_new_tokens=5, stop_tokens=())
    assert (len(few.tokens), few.finish) == (5, FinishReason.MAX_NEW_TOKENS)
    [all_that_fits] = decoder.generate(prompt(20), stop_tokens=())
    assert (len(all_that_fits.tokens), all_that_fits.finish) == (12, FinishReason.MAX_LENGTH)
    with pytest.raises(CapacityError, match="row 0 has 32 tokens, and a row has room for 32"):
        decoder.generate()


def test_a_prompt_that_does_not_fit_changes_nothing(qwen: Path) -> None:
    decoder = Decoder(qwen, max_length=32)
    decoder.append(prompt(20))
    with pytest.raises(CapacityError, match=r"would have 32 tokens.*room for 32"):
        decoder.append(prompt(12))
    with pytest.raises(CapacityError, match=r"would have 40 tokens.*room for 32"):
        decoder.stream(prompt(40))
    assert decoder.tokens == [prompt(20)]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompt"),
        ([[1], []], "row 1 is empty"),
        ([5, 512], "token 512; the model has tokens from 0 to 511"),
        ([-1], "token -1"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(qwen: Path, prompts: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Decoder(qwen).generate(prompts)


def test_refuses_what_it_cannot_go_on_with(qwen: Path) -> None:
    decoder = Decoder(qwen)
    with pytest.raises(ConfigError, match="nothing to go on with"):
        decoder.generate()
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        decoder.generate([1], max_new_tokens=0)
    decoder.append([1, 2, 3])
    with pytest.raises(ConfigError, match="2 prompts for a batch of 1"):
        decoder.append([[1], [2]])
    with pytest.raises(ConfigError, match=r"rewind\(4\)"):
        decoder.rewind(4)
    decoder.reset()
    decoder.append([[1], [2]])
    assert decoder.tokens == [[1], [2]]


def test_settings_that_do_not_fit_the_model_are_refused(qwen: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_length=5000, but .* at most 1024"):
        Decoder(qwen, max_length=5000)
    with pytest.raises(ConfigError, match="has the layout seq-major, not token-major; run: onnx-kv patch"):
        Decoder(qwen, kv_layout="token-major")


def test_decoders_in_threads_are_independent(patched: Patched) -> None:
    names = ["qwen2-tiny", "llama-rope-scaled", "qwen2-tiny"]
    decoders = [Decoder(patched(name, layout)) for name, layout in zip(names, LAYOUTS, strict=False)]
    alone = [decoder.generate(prompt(30), max_new_tokens=100, stop_tokens=()) for decoder in decoders]
    together: dict[int, object] = {}

    def work(index: int) -> None:
        together[index] = decoders[index].generate(prompt(30), max_new_tokens=100, stop_tokens=())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(decoders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(len(decoders))] == alone


@pytest.mark.parametrize("growth", ["bucket", "fixed-stride", "realloc"])
def test_a_refused_growth_leaves_what_was_said(growth: str, qwen: Path) -> None:
    settings = {"growth": growth, "min_bucket": 32, "commit_ahead": 0}
    [everything] = Decoder(qwen).generate(prompt(20), max_new_tokens=100, stop_tokens=())
    used = Decoder(qwen, **settings)
    used.generate(prompt(20), max_new_tokens=2)
    budget = used.stats.physical_kv_bytes * 5 // 2  # room for the first bucket, and not for a copy twice as long
    decoder = Decoder(qwen, budget=budget, **settings)
    with pytest.raises(OutOfMemoryError, match="budget or ONNX_KV_BUDGET"):
        decoder.generate(prompt(20), max_new_tokens=100, stop_tokens=())
    said = decoder.tokens[0][20:]
    assert 10 < len(said) < 100
    assert said == everything.tokens[: len(said)]
    decoder.rewind(22)
    [again] = decoder.generate(max_new_tokens=10, stop_tokens=())
    assert again.tokens == everything.tokens[2:12]


def test_decoders_may_share_a_budget(qwen: Path) -> None:
    budget = MemoryBudget(64 * 2**20)
    decoders = [Decoder(qwen, budget=budget) for _ in range(2)]
    for decoder in decoders:
        decoder.generate(prompt(20), max_new_tokens=2)
    assert budget.held == sum(decoder.stats.physical_kv_bytes for decoder in decoders) > 0
    for decoder in decoders:
        decoder.close()
    assert budget.held == 0


@pytest.mark.parametrize("growth", ["bucket", "fixed-stride", "realloc"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_growth_changes_no_token(growth: str, layout: str, patched: Patched) -> None:
    directory = patched("qwen2-tiny", layout)
    batch = [prompt(3), prompt(9)]
    grown, roomy = Decoder(directory, growth=growth, min_bucket=4), Decoder(directory, min_bucket=128)
    assert grown.generate(batch, max_new_tokens=60) == roomy.generate(batch, max_new_tokens=60)
    assert grown.stats.growth_events == 3, "16, 32, 64"


def test_counts_what_it_does(qwen: Path) -> None:
    decoder = Decoder(qwen, prefill_chunk=8)
    decoder.generate([prompt(17), prompt(4)], max_new_tokens=6, stop_tokens=())
    stats = decoder.stats
    assert stats.prompt_tokens == 21
    assert stats.prefill_runs == 3 + 1
    assert stats.generated_tokens == 12
    assert stats.decode_steps == 5, "the first token of six comes from prefill"
    assert (stats.captures, stats.replays) == (0, 0)
    assert stats.decline_reason is not None
    assert stats.as_dict()["generated_tokens"] == 12


@pytest.mark.parametrize("growth", ["bucket", "fixed-stride", "realloc"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trim_gives_memory_back_and_changes_no_token(growth: str, layout: str, patched: Patched) -> None:
    budget = MemoryBudget(1 << 40)
    directory = patched("qwen2-tiny", layout)
    decoder = Decoder(directory, growth=growth, min_bucket=4, commit_ahead=4, budget=budget)
    batch = [prompt(9), prompt(40)]
    expected = decoder.generate(batch, max_new_tokens=200, stop_tokens=())
    full = decoder.stats.physical_kv_bytes
    decoder.rewind(20)
    given = decoder.trim()
    assert given == full - decoder.stats.physical_kv_bytes
    assert given > full // 2
    assert budget.held == decoder.stats.physical_kv_bytes
    again = decoder.generate(max_new_tokens=50, stop_tokens=())
    assert [decoder.tokens[0][9:], again[1].tokens] == [expected[0].tokens[:61], decoder.tokens[1][20:]]
    assert decoder.stats.prompt_tokens == 9 + 40 + 2, "what stays is not computed again"
    decoder.reset()
    decoder.trim()
    if growth != "realloc":
        assert budget.held == 0
    assert decoder.generate(batch, max_new_tokens=20, stop_tokens=())[1].tokens == expected[1].tokens[:20]


def test_trim_of_what_is_not_there(qwen: Path) -> None:
    decoder = Decoder(qwen)
    assert decoder.trim() == 0
    decoder.generate([prompt(5), prompt(3)], max_new_tokens=3)
    held = decoder.stats.physical_kv_bytes
    decoder.reset()
    decoder.append(prompt(9))
    assert decoder.trim() == held, "the cache of another batch"
    assert decoder.stats.physical_kv_bytes == 0
    assert len(decoder.generate(max_new_tokens=3, stop_tokens=())[0].tokens) == 3


def test_trim_ends_a_stream(qwen: Path) -> None:
    decoder = Decoder(qwen, growth="bucket", min_bucket=4)
    [expected] = decoder.generate(prompt(20), max_new_tokens=12, stop_tokens=())
    stream = decoder.stream(prompt(20), max_new_tokens=12, stop_tokens=())
    head = [next(stream).tokens[0] for _ in range(5)]
    decoder.trim()
    with pytest.raises(ConfigError, match="this stream is over"):
        next(stream)
    assert head + decoder.generate(max_new_tokens=7, stop_tokens=())[0].tokens == expected.tokens


def test_turns_trim_themselves_if_asked(qwen: Path) -> None:
    settings = {"growth": "bucket", "min_bucket": 4, "commit_ahead": 0}
    plain, trimming = Decoder(qwen, **settings), Decoder(qwen, trim_after_turn=True, **settings)
    for decoder in (plain, trimming):
        decoder.generate(prompt(9), max_new_tokens=200, stop_tokens=())
        decoder.generate(prompt(9), max_new_tokens=20, stop_tokens=())
        decoder.append([7, 8, 9])
        decoder.generate(max_new_tokens=10, stop_tokens=())
    assert trimming.tokens == plain.tokens
    assert trimming.stats.physical_kv_bytes * 4 == plain.stats.physical_kv_bytes, "64 tokens of 256"

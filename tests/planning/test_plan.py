"""Plans against arithmetic on paper: Qwen2.5-14B (48 layers, 8 KV heads of 128) and 0.5B (24 layers, 2 of 64), fp16."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from onnx_kv.cli import main
from onnx_kv.errors import CapacityError, ConfigError, MetadataError
from onnx_kv.geometry import GrowthPolicy
from onnx_kv.layout import KvLayout, LayerShape
from onnx_kv.planning.plan import Cost, Plan, make_plan
from onnx_kv.planning.source import ModelCache, read_model_cache

MIB = 1 << 20
MODELS = Path(__file__).parents[2] / "models"


def qwen_14b(max_length: int = 8192) -> ModelCache:
    return ModelCache((LayerShape(8, 128),) * 48, "float16", max_length, "paper")


def qwen_05b(max_length: int = 32768) -> ModelCache:
    return ModelCache((LayerShape(2, 64),) * 24, "float16", max_length, "paper")


def cost(plan: Plan, layout: KvLayout, policy: GrowthPolicy = GrowthPolicy.FIXED_STRIDE) -> Cost:
    return next(cost for cost in plan.costs if (cost.layout, cost.policy) == (layout, policy))


def test_qwen_14b_floors() -> None:
    plan = make_plan(qwen_14b(), contexts=[1])
    granules = {layout: cost(plan, layout).floor // (2 * MIB) for layout in KvLayout}
    assert list(granules.values()) == [768, 96, 48, 1]
    assert plan.token_bytes == 48 * 2 * 8 * 128 * 2


def test_qwen_14b_committed_at_2000_tokens() -> None:
    plan = make_plan(qwen_14b(), contexts=[2000])
    # A binding's token is 2 KiB, so 2,000 tokens are 3.9 MiB: 2 granules of each of 96 bindings.
    assert cost(plan, KvLayout.SEQ_MAJOR).committed == (96 * 2 * 2 * MIB,)
    # A head's token is 256 B: 500 KiB of each of 768 stripes, a granule each.
    assert cost(plan, KvLayout.HEAD_MAJOR).committed == (768 * 2 * MIB,)
    # A layer's token is 4 KiB: 7.8 MiB, 4 granules of each of 48.
    assert cost(plan, KvLayout.PAIRED).committed == (48 * 4 * 2 * MIB,)
    # The model's token is 192 KiB: 375 MiB, 188 granules.
    assert cost(plan, KvLayout.TOKEN_MAJOR).committed == (188 * 2 * MIB,)
    # The bucket has 2,048 slots: 4 MiB a binding; from 256 it grew at 256, 512 and 1,024 tokens.
    bucket = cost(plan, KvLayout.HEAD_MAJOR, GrowthPolicy.BUCKET)
    assert bucket.committed == (96 * 4 * MIB,)
    assert bucket.moved == ((256 + 512 + 1024) * 196_608,)


def test_qwen_14b_crossovers_and_shareable_prefixes() -> None:
    plan = make_plan(qwen_14b(), contexts=[1])
    assert list(plan.crossover.values()) == [8192, 1024, 512, None]
    assert list(plan.shareable_from.values()) == [8192, 1024, 512, 11]


def test_qwen_05b() -> None:
    plan = make_plan(qwen_05b(), contexts=[512, 32768])
    assert list(plan.crossover.values()) == [16384, 8192, 4096, None]
    # 512 tokens of 12 KiB are 6 MiB: 3 granules; the full context is 384 MiB in every layout.
    assert cost(plan, KvLayout.TOKEN_MAJOR).committed == (6 * MIB, 384 * MIB)
    assert cost(plan, KvLayout.SEQ_MAJOR).committed == (96 * MIB, 384 * MIB)
    assert plan.recommended is KvLayout.TOKEN_MAJOR
    assert "16 times less than seq-major" in plan.reason


def test_plain_reads_are_preferred_where_memory_is_alike() -> None:
    assert make_plan(qwen_05b(), contexts=[32768]).recommended is KvLayout.SEQ_MAJOR


def test_batch_multiplies_stripes() -> None:
    plan = make_plan(qwen_14b(), contexts=[1], batch=3)
    # Rows are 8,192 tokens apart: 16 MiB a binding in seq-major, so each row has granules of its own.
    assert cost(plan, KvLayout.SEQ_MAJOR).floor == 3 * 192 * MIB


def test_longest_context_that_fits() -> None:
    plan = make_plan(qwen_05b(), contexts=[1], memory=100 * MIB)
    # Token-major: 50 granules hold 8,533.3 tokens of 12 KiB; seq-major: a granule of 48 bindings each, 256 B a token.
    assert cost(plan, KvLayout.TOKEN_MAJOR).longest == 100 * MIB // 12288
    assert cost(plan, KvLayout.SEQ_MAJOR).longest == 8192
    assert cost(plan, KvLayout.HEAD_MAJOR).longest == 0
    assert cost(plan, KvLayout.HEAD_MAJOR, GrowthPolicy.BUCKET).longest == 8192


def test_context_beyond_the_maximum_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"9000.*8192"):
        make_plan(qwen_14b(), contexts=[9000])


def test_real_export_and_its_bare_config_agree() -> None:
    directory = MODELS / "llama-fp16"
    assert read_model_cache(directory).layers == read_model_cache(directory / "genai_config.json").layers
    assert read_model_cache(directory).dtype == "float16"


def test_graph_knows_its_dtype() -> None:
    assert read_model_cache(MODELS / "qwen2-tiny").element_size == 4


def test_config_without_heads_is_refused_by_key(tmp_path: Path) -> None:
    config = tmp_path / "genai_config.json"
    config.write_text(json.dumps({"model": {"context_length": 8, "decoder": {"num_hidden_layers": 2}}}))
    with pytest.raises(MetadataError, match="num_key_value_heads"):
        read_model_cache(config)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8"):
        read_model_cache(MODELS / "qwen2-tiny", dtype="int8")


def test_command_prints_what_json_says() -> None:
    model = str(MODELS / "qwen2-tiny")
    table = CliRunner().invoke(main, ["plan", model, "--contexts", "16", "--granularity", "4k"])
    assert table.exit_code == 0, table.output
    done = CliRunner().invoke(main, ["plan", model, "--contexts", "16", "--granularity", "4k", "--json"])
    plan = json.loads(done.output)
    assert plan["knobs"]["granule"] == 4096
    assert plan["recommended"] in table.output
    assert plan["contexts"] == [16]


def test_a_device_is_asked_for_its_granularity() -> None:
    done = CliRunner().invoke(main, ["plan", str(MODELS / "qwen2-tiny"), "--device", "cpu", "--json"])
    assert json.loads(done.output)["knobs"]["granule"] == os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("arguments", [["--granularity", "0"], ["--contexts", "a"]])
def test_unusable_options_are_usage_errors(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, ["plan", str(MODELS / "qwen2-tiny"), *arguments])
    assert done.exit_code == 2
    assert "Usage" in done.output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--batch", "9" * 21, "--batch"),
        ("--granularity", "1" + "0" * 400, "is no size"),
        ("--granularity", "9999999TiB", "is no size"),
        ("--memory", "0.5", "is no size"),
        ("--contexts", "9" * 5000, "--contexts"),
        ("--max-length", "9" * 5000, "--max-length"),
        ("--plot", "picture", "ends in .png"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, option: str, value: str, message: str) -> None:
    value = str(tmp_path / value) if option == "--plot" else value
    done = CliRunner().invoke(main, ["plan", str(MODELS / "qwen2-tiny"), option, value])
    assert done.exit_code == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib (extra [plot])")
    picture = tmp_path / "plan.png"
    done = CliRunner().invoke(main, ["plan", str(MODELS / "qwen2-tiny"), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")

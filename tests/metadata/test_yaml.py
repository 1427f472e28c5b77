"""Odd port names survive the file; edits change one entry and nothing else."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_kv.errors import MetadataError
from onnx_kv.layout import KvLayout
from onnx_kv.metadata import Metadata, generate_metadata, load_metadata, update_kv_layout
from onnx_kv.metadata.yaml_edit import update_io
from onnx_kv.metadata.yaml_file import parse_metadata
from onnx_kv.metadata.yaml_text import scalar
from tests.support import decoder

# What YAML takes for something other than this string when it stands unquoted.
ODD = [
    *("true", "No", "on", "y", "null", "~", "1", "0x1F", "1e3", ".inf", ".5", "1_000", "1:30", "2001-01-01", "=", "<<"),
    *("", " ", "a ", " a", "a: b", "a #b", "#a", "- a", "-", "?", "a:", "[a]", "{a}", "*a", "&a", "!a", "|", ">", "%a"),
    *("@a", "`a`", "'a'", '"a"', "a\nb", "a\tb", "\x00", "\x7f", "\x85", "\u2028", "\ufeff", "\ufffe", "鍵", "🔑"),
    *("a\\b", "a,b", "onnx::GQA:0", "x" * 500, "a b " * 60, "...", "---", "--- a", "key/0;value", "schlüssel"),
]


@pytest.mark.parametrize("name", ODD, ids=lambda name: ascii(name)[:20])
def test_odd_names_load_back_equal(name):
    assert yaml.safe_load(f"a: {scalar(name)}\n") == {"a": name}
    assert "\n" not in scalar(name)


@given(st.text())
def test_any_name_loads_back_equal(name):
    assert yaml.safe_load(f"- {scalar(name)}\n") == [name]


@pytest.mark.parametrize("name", ["past_key_values.0.key", "/model/layers.0/k", "input_ids", "A-b_c.D/9", "_0"])
def test_plain_names_stay_plain(name):
    assert scalar(name) == name


@given(
    st.lists(st.text(min_size=1), min_size=6, max_size=6, unique=True),
    st.sampled_from(KvLayout),
    st.booleans(),
)
@settings(max_examples=50)
def test_metadata_of_any_names_loads_back_equal(tmp_path_factory, names, layout, lifted):
    metadata = Metadata(
        max_sequence_length=1,
        token_input=names[0],
        logits_output=names[1],
        kv_inputs=tuple(names[2:4]),
        kv_outputs=tuple(names[4:6]),
        attention_mask_input=None if lifted else names[1],
        seqlens_k_input=names[1] if lifted else None,
        total_sequence_length_input=names[2] if lifted else None,
        kv_layout=layout,
    )
    directory = tmp_path_factory.mktemp("metadata")
    (directory / "inference_metadata.yaml").write_text(metadata.to_yaml(), encoding="utf-8", newline="\n")
    assert load_metadata(directory) == metadata


def test_odd_names_all_the_way(tmp_path):
    config = decoder.config(layers=1)
    config["model"]["decoder"]["inputs"] |= {
        "past_key_names": "on: %d",
        "past_value_names": "#%d\u2028",
        "input_ids": "null",
    }
    directory = decoder.write(tmp_path, config, decoder.graph([0], past=("on: {}", "#{}\u2028"), input_ids="null"))
    metadata = generate_metadata(directory)
    (tmp_path / "inference_metadata.yaml").write_text(metadata.to_yaml(), encoding="utf-8")
    assert load_metadata(tmp_path).kv_inputs == ("on: 0", "#0\u2028")
    assert load_metadata(tmp_path).token_input == "null"


@pytest.fixture
def texts(tmp_path):
    """The generated text for each layout."""
    plain = decoder.write(tmp_path, decoder.config())
    made = {}
    for layout in KvLayout:
        graph = decoder.graph(attributes={"kv_layout": int(layout)})
        made[layout] = generate_metadata(decoder.write(plain / layout.name, decoder.config(), graph)).to_yaml()
    return made


@pytest.mark.parametrize("source", list(KvLayout))
@pytest.mark.parametrize("target", list(KvLayout))
def test_an_updated_layout_gives_the_text_that_would_be_generated(texts, source, target):
    assert update_kv_layout(texts[source], target) == texts[target]


HAND_WRITTEN = """\
%YAML 1.1
---
# Mine.
model:
    name: 'left  alone'   # and this
    io:   # ports
        token_input: "input_ids"
        logits_output: logits{entry}
        # the cache
        kv_inputs: [ past.k,
                     past.v ]
        kv_outputs:
        - now.k
        - now.v
    other: {{a: 1, 'b': [2,3]}}
tail: |
  kv_layout: not this one
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("before", "layout", "after"),
    [
        ("", KvLayout.SEQ_MAJOR, None),
        ("\n        kv_layout: seq_major_bsnh", KvLayout.PAIRED, "\n        kv_layout: paired_bsnh"),
        ("\n        kv_layout: 'seq_major_bsnh'  # why", KvLayout.PAIRED, "\n        kv_layout: paired_bsnh  # why"),
        ("\n        kv_layout: seq_major_bsnh # why", KvLayout.HEAD_MAJOR, ""),
        ("", KvLayout.HEAD_MAJOR, ""),
    ],
)
def test_a_hand_written_file_keeps_everything_else(before, layout, after, newline):
    text = HAND_WRITTEN.format(entry=before).replace("\n", newline)
    changed = update_kv_layout(text, layout)
    if after is None:
        line = f"kv_layout: {layout.yaml_name}{newline}        "
        assert changed.replace(line, "") == text
    else:
        assert changed == HAND_WRITTEN.format(entry=after).replace("\n", newline)


@pytest.mark.parametrize("layout", list(KvLayout))
@pytest.mark.parametrize("entry", ["", ", kv_layout: token_major"])
@pytest.mark.parametrize("at", ["front", "back"])
def test_a_file_in_braces(layout, entry, at):
    ports = "kv_inputs: [a, b], kv_outputs: [c, d]"
    body = f"kv_layout: token_major, {ports}" if entry and at == "front" else ports + (entry if at == "back" else "")
    text = f"{{model: {{max_sequence_length: 8, io: {{token_input: i, logits_output: l, {body}}}}}}}\n"
    changed = parse_metadata(update_kv_layout(text, layout), "x")
    assert changed.kv_layout is layout
    assert changed.kv_outputs == ("c", "d")


def test_a_byte_order_mark_and_json_are_yaml_too():
    data = {"model": {"max_sequence_length": 8, "io": {"token_input": "i", "logits_output": "l"}}}
    data["model"]["io"] |= {"kv_inputs": ["a", "b"], "kv_outputs": ["c", "d"]}
    changed = update_kv_layout("\ufeff" + json.dumps(data, indent=2), KvLayout.SEQ_MAJOR)
    assert changed.startswith("\ufeff{")
    assert parse_metadata(changed, "x").kv_layout is KvLayout.SEQ_MAJOR


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model: 1\n",
        "model: {io: {}}\n",
        "model:\n  io: null\n",
        "model:\n  io:\n    kv_layout: &x seq_major_bsnh\n    kv_inputs: *x\n",
        "model:\n  io: &io\n    kv_inputs: [a]\nsame: *io\n",
        "a: 1\n---\nb: 2\n",
        "model: [",
        "- 1\n",
    ],
)
def test_a_file_that_cannot_be_edited_is_refused(text):
    with pytest.raises(MetadataError, match=r"inference_metadata\.yaml"):
        update_kv_layout(text, KvLayout.SEQ_MAJOR)


def test_a_mask_gives_way_to_lengths(texts):
    changes = {"attention_mask_input": None, "seqlens_k_input": "lengths", "total_sequence_length_input": "total"}
    changed = update_io(texts[KvLayout.PAIRED], changes)
    before = parse_metadata(texts[KvLayout.PAIRED], "x")
    after = parse_metadata(changed, "x")
    assert after.attention_mask_input is None
    assert (after.seqlens_k_input, after.total_sequence_length_input) == ("lengths", "total")
    assert after.kv_inputs == before.kv_inputs
    assert changed == after.to_yaml()


VALID = """\
model:
  max_sequence_length: 8
  io:
    token_input: i
    logits_output: l
    kv_inputs: [a, b]
    kv_outputs: [c, d]
"""


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("model:", "modell:", "missing key 'model'"),
        ("  io:", "  ports:", "missing key 'io'"),
        ("    token_input: i\n", "", "missing key 'token_input'"),
        ("    kv_inputs: [a, b]\n", "", "missing key 'kv_inputs'"),
        ("[a, b]", "[a]", "kv_outputs"),
        ("[a, b]", "[]", "kv_inputs"),
        ("[a, b]", "a", "kv_inputs"),
        ("[a, b]", "[a, 7]", "kv_inputs.1"),
        ("[a, b]", "[a, no]", "kv_inputs.1"),
        ("[a, b]", "[a, '']", "kv_inputs"),
        (": 8", ": 8.0", "max_sequence_length"),
        (": 8", ": true", "max_sequence_length"),
        (": 8", ": 0", "max_sequence_length"),
        (": 8", ": '8'", "max_sequence_length"),
        (": 8", ": 0x" + "f" * 9000, "max_sequence_length"),
        (": 8", ": 2001-13-45", "inference_metadata.yaml"),
        ("token_input: i", "token_input: 2001-01-01", "token_input"),
        ("    token_input: i\n", "    token_input: i\n    token_input: j\n", ":5:5: "),
        ("    token_input: i\n", "    token_input: i\n\tx: 1\n", ":5:1: "),
        ("    token_input: i\n", "    token_input: i\n    kv_layout: seq-major\n", "seq_major_bsnh"),
        ("    token_input: i\n", "    token_input: i\n    kv_layout: 1\n", "kv_layout"),
        ("token_input: i", "token_input: !!python/object/apply:os.system ['true']", "python/object"),
        ("[a, b]", "[" * 1500, "inference_metadata.yaml"),
        ("  io:", "  attention: {num_attention_heads: 4}\n  io:", "missing key 'num_key_value_heads'"),
        ("  io:", "  attention: [1]\n  io:", "attention"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, old, new, reason):
    assert VALID.count(old) == 1 or old == "model:"
    (tmp_path / "inference_metadata.yaml").write_text(VALID.replace(old, new, 1))
    with pytest.raises(MetadataError) as caught:
        load_metadata(tmp_path)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("block", "heads", "windows"),
    [
        ("{num_attention_heads: 4, num_key_value_heads: 2, head_size: 8}", (4, 4), (None, None)),
        ("{num_attention_heads: [4, 8], num_key_value_heads: 2, head_size: 8}", (4, 8), (None, None)),
        (
            "{num_attention_heads: 4, num_key_value_heads: 2, head_size: 8, sliding_window: 16, "
            "sliding_window_layers: [1]}",
            (4, 4),
            (None, 16),
        ),
        (
            "{num_attention_heads: 4, num_key_value_heads: 2, head_size: 8, sliding_window: [4, 2], "
            "sliding_window_layers: [1, 0]}",
            (4, 4),
            (2, 4),
        ),
    ],
)
def test_an_attention_block_with_one_number_or_one_a_layer(tmp_path, block, heads, windows):
    text = VALID.replace("[a, b]", "[a, b, e, f]").replace("[c, d]", "[c, d, g, h]") + f"  attention: {block}\n"
    (tmp_path / "inference_metadata.yaml").write_text(text)
    metadata = load_metadata(tmp_path)
    assert metadata.attention is not None
    assert metadata.attention.query_heads == heads
    assert metadata.attention.windows == windows
    (tmp_path / "inference_metadata.yaml").write_text(metadata.to_yaml())
    assert load_metadata(tmp_path) == metadata


def test_other_tools_keys_are_left_alone(tmp_path):
    (tmp_path / "inference_metadata.yaml").write_text(VALID + "  family: llama\nschema_version: 2\n")
    assert load_metadata(tmp_path).token_input == "i"


def test_an_alias_bomb_is_not_unfolded(tmp_path):
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    (tmp_path / "inference_metadata.yaml").write_text("\n".join(lines) + "\n" + VALID)
    with pytest.raises(MetadataError, match=":2:10: "):
        load_metadata(tmp_path)

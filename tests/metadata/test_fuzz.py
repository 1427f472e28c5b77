"""Whatever is changed in a real config: metadata that the graph agrees with, or a MetadataError; never a traceback."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_kv.errors import MetadataError
from onnx_kv.metadata import generate_metadata, load_metadata
from tests.support import decoder

REAL = json.loads((Path(__file__).parents[2] / "models" / "gemma2-tiny" / "genai_config.json").read_text())

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(
        ["%d", "%d%d", "past_key_values.%d.key", "present.%d.value", "attention_mask", "logits", "../x", "/"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The path of every value inside a config."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [place for key, child in children for place in places(child, (*path, key))]


# Of these, those that the description is made from are tried more often than search options.
PLACES = [place for place in places(REAL) if "search" not in place] * 3 + places(REAL)


@st.composite
def mutated(draw: st.DrawFn) -> object:
    """A real config with one to three values replaced, taken out, or put under another key."""
    config: object = copy.deepcopy(REAL)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(PLACES))
        parent, inside = config, True
        for key in place[:-1]:
            inside = inside and (isinstance(parent, dict) and key in parent)
            parent = parent[key] if inside else None  # type: ignore[index]
        if not place:
            config = draw(VALUES)
        elif isinstance(parent, dict):
            match draw(st.sampled_from(["replace", "remove", "rename"])):
                case "replace":
                    parent[place[-1]] = draw(VALUES)
                case "remove":
                    parent.pop(place[-1], None)
                case "rename":
                    parent[draw(st.text(max_size=8))] = parent.pop(place[-1], None)
    return config


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    graph = decoder.graph(range(4))
    return decoder.write(root / "alone", {}), decoder.write(root / "graph", {}, graph)


@given(config=mutated(), full=st.booleans())
@settings(max_examples=150)
def test_mutated_configs(directories, config, full):
    for directory in directories:
        decoder.write(directory, config)
        try:
            metadata = generate_metadata(directory, full=full)
        except MetadataError:
            continue
        text = metadata.to_yaml()
        (directory / "inference_metadata.yaml").write_text(text, encoding="utf-8", newline="\n")
        assert load_metadata(directory) == metadata


@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes(directories, data):
    (directories[0] / "genai_config.json").write_bytes(data)
    with pytest.raises(MetadataError):
        generate_metadata(directories[0])


@given(text=st.text(max_size=200))
def test_any_text_as_metadata(directories, text):
    (directories[0] / "inference_metadata.yaml").write_text(text, encoding="utf-8", newline="\n")
    with pytest.raises(MetadataError):
        load_metadata(directories[0])

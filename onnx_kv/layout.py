"""The KV-cache layouts: name ↔ node attribute ↔ strides. The only Python file that knows how a layout orders its axes.

A *binding* is one (layer, side) buffer of the cache, side being key or value. Its shape is
`[batch, kv_heads, capacity, head_dim]` in every layout; a layout is where element (b, h, s, d) lies in the bytes:

    address = base + offset + b·strides.batch + h·strides.head + s·strides.seq + d        (in elements)

| layout      | attribute | physical axes                                                           |
|-------------|-----------|-------------------------------------------------------------------------|
| head-major  | 0         | one reservation a binding: `[batch, kv_heads, capacity, head_dim]`      |
| seq-major   | 1         | one reservation a binding: `[batch, capacity, kv_heads, head_dim]`      |
| paired      | 2         | one reservation a layer: `[batch, capacity, 2, kv_heads, head_dim]`     |
| token-major | 3         | one reservation: `[batch, capacity, layers, 2, kv_heads, head_dim]`     |

The native side has the same arithmetic once, in `ops/gqa/params.h`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from onnx_kv.errors import ConfigError

KV_LAYOUT_ATTRIBUTE = "kv_layout"
"""Node attribute that holds the layout's number; absent means head-major."""

TOKEN_STRIDE_ATTRIBUTE = "kv_token_stride"
"""Node attribute of the interleaved layouts: elements from one token of a binding to the next."""

TOKEN_OFFSET_ATTRIBUTE = "kv_token_offset"
"""Node attribute of the interleaved layouts: elements from a token's start to this layer's key; its value follows."""


class Side(enum.IntEnum):
    """Which half of a layer's cache a binding holds."""

    KEY = 0
    VALUE = 1


class KvLayout(enum.IntEnum):
    """A layout; the integer value is the `kv_layout` attribute of a GroupQueryAttention node."""

    HEAD_MAJOR = 0
    SEQ_MAJOR = 1
    PAIRED = 2
    TOKEN_MAJOR = 3

    @property
    def cli_name(self) -> str:
        """The spelling of the command line, e.g. `seq-major`."""
        return self.name.lower().replace("_", "-")

    @property
    def yaml_name(self) -> str:
        """The spelling of `io.kv_layout` in `inference_metadata.yaml`, e.g. `seq_major_bsnh`."""
        return _YAML_NAMES[self]

    @property
    def interleaved(self) -> bool:
        """Whether several bindings share one reservation, so that a node needs the stride attributes."""
        return self in (KvLayout.PAIRED, KvLayout.TOKEN_MAJOR)

    @classmethod
    def parse(cls, name: str) -> KvLayout:
        """Return the layout that `name` spells, on the command line or in YAML.

        Raises:
            ConfigError: no layout has this name; the message lists those that exist.
        """
        for layout in cls:
            if name in (layout.cli_name, layout.yaml_name):
                return layout
        raise ConfigError(f"no KV layout is called {name!r}; use one of: {', '.join(x.cli_name for x in cls)}")


_YAML_NAMES = {
    KvLayout.HEAD_MAJOR: "head_major_bnsh",
    KvLayout.SEQ_MAJOR: "seq_major_bsnh",
    KvLayout.PAIRED: "paired_bsnh",
    KvLayout.TOKEN_MAJOR: "token_major",
}


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores for a token on each side: `kv_heads` vectors of `head_dim` elements."""

    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Elements a token and side."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Strides:
    """Distances in elements between neighbours along an axis of a binding; `head_dim` always has stride 1."""

    batch: int
    head: int
    seq: int


def reservations(layout: KvLayout, layers: Sequence[LayerShape]) -> int:
    """Number of separate address ranges that hold a model's cache."""
    match layout:
        case KvLayout.HEAD_MAJOR | KvLayout.SEQ_MAJOR:
            return 2 * len(layers)
        case KvLayout.PAIRED:
            return len(layers)
        case KvLayout.TOKEN_MAJOR:
            return 1


def reservation_index(layout: KvLayout, layer: int, side: Side) -> int:
    """Which reservation (0-based) the binding of `layer` (position among the attention layers) and `side` lies in."""
    match layout:
        case KvLayout.HEAD_MAJOR | KvLayout.SEQ_MAJOR:
            return 2 * layer + side
        case KvLayout.PAIRED:
            return layer
        case KvLayout.TOKEN_MAJOR:
            return 0


def token_width(layout: KvLayout, layers: Sequence[LayerShape], layer: int) -> int:
    """Elements that the reservation holding `layer` stores for one token, over all its bindings."""
    match layout:
        case KvLayout.HEAD_MAJOR | KvLayout.SEQ_MAJOR:
            return layers[layer].width
        case KvLayout.PAIRED:
            return 2 * layers[layer].width
        case KvLayout.TOKEN_MAJOR:
            return sum(2 * shape.width for shape in layers)


def token_offset(layout: KvLayout, layers: Sequence[LayerShape], layer: int, side: Side = Side.KEY) -> int:
    """Elements from the start of the reservation (and of every token in it) to the binding's first element."""
    match layout:
        case KvLayout.HEAD_MAJOR | KvLayout.SEQ_MAJOR:
            return 0
        case KvLayout.PAIRED:
            return side * layers[layer].width
        case KvLayout.TOKEN_MAJOR:
            return sum(2 * shape.width for shape in layers[:layer]) + side * layers[layer].width


def strides(layout: KvLayout, layers: Sequence[LayerShape], layer: int, capacity: int) -> Strides:
    """Strides in elements of the bindings of `layer` in a cache with room for `capacity` tokens a sequence."""
    shape = layers[layer]
    if layout is KvLayout.HEAD_MAJOR:
        return Strides(
            batch=shape.kv_heads * capacity * shape.head_dim, head=capacity * shape.head_dim, seq=shape.head_dim
        )
    token = token_width(layout, layers, layer)
    return Strides(batch=capacity * token, head=shape.head_dim, seq=token)

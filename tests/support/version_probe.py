"""Runs the op library in whichever ONNX Runtime is found first: `python -m tests.support.version_probe`.

Prints the version, whether calls agree with the reference, and whether an unsupported node is refused.
"""

from __future__ import annotations

import numpy as np
import onnxruntime

from tests.support.gqa_cases import Shape, attributes, make_call
from tests.support.gqa_reference import group_query_attention
from tests.support.ort_gqa import Way, run_gqa

SHAPES = [Shape((0,), (20,), 20), Shape((150, 3), (1, 1), 1), Shape((150, 9), (5, 2), 5)]


def agrees() -> bool:
    """Prefill, decode and chunk, float32 and float16, packed and not, with optional inputs left out in the middle."""
    for shape in SHAPES:
        for dtype, tolerance in ((np.float32, 2e-5), (np.float16, 4e-3)):
            node = attributes(shape, do_rotary=True)
            call = make_call(shape, dtype=dtype, rotary_dim=16, sink=True, query_seqlens=len(shape.pasts) > 1)
            expected = group_query_attention(node, call).output
            for way in (Way(0), Way(1, packed=True, threads=2)):
                if not np.allclose(run_gqa(node, call, way).output, expected, rtol=tolerance, atol=tolerance):
                    return False
    return True


def refuses() -> bool:
    """By name, at load."""
    shape = SHAPES[0]
    try:
        run_gqa(attributes(shape), make_call(shape), Way(0, attributes={"sliding_window_cache": 1}))
    except Exception as error:  # the type differs between versions
        return "sliding_window_cache=1" in str(error)
    return False


if __name__ == "__main__":
    print(onnxruntime.__version__, "agrees" if agrees() else "differs", "refuses" if refuses() else "loads")

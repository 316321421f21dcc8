"""The packed vector of host fields."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from qwen35_jax.steps import HostLayout, layout_of
from schedulers import Bucket


@pytest.mark.parametrize("kind", ["prefill", "decode", "unified"])
@pytest.mark.parametrize("bucket", [Bucket(64, 4, 3, 18), Bucket(8192, 256, 256, 4096), Bucket(128, 1, 1, 1)])
def test_fields_start_at_multiples_of_256_bytes(kind, bucket):
    """XLA passes a slice of a parameter to a custom kernel in place; Mosaic takes no other address."""
    layout = layout_of(kind, bucket)
    end = 0
    for name, shape in layout.fields.items():
        offset = layout.offsets[name]
        assert offset % 64 == 0 and end <= offset < end + 64
        end = offset + math.prod(shape)
    assert layout.size == end


@pytest.mark.parametrize("width", [70, HostLayout.PIECE // 3, HostLayout.PIECE])
def test_what_is_packed_comes_out(width):
    layout = HostLayout({"a": (5,), "b": (3, width), "c": (), "d": (64,), "e": (1,)})
    draw = np.random.default_rng(0)
    values = {name: draw.integers(-(2**31), 2**31, shape, np.int32) for name, shape in layout.fields.items()}
    pieces = layout.pack(values)
    assert tuple(len(piece) for piece in pieces) == layout.pieces and sum(layout.pieces) == layout.size
    assert max(piece.nbytes for piece in pieces) < 100 * 1024  # longer ones are not staged by the GPU client
    assert len(pieces) == -(-layout.size // HostLayout.PIECE)
    found = jax.jit(layout.unpack)(pieces)
    assert found.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_field_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"host field 'b' has shape \(2,\), the program wants \(3,\)"):
        HostLayout({"a": (1,), "b": (3,)}).pack({"a": np.zeros(1, np.int32), "b": np.zeros(2, np.int32)})

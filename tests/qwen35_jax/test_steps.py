"""The packed vector of host fields, and what the kernels of a program are given."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir

from qwen35_jax.config import ModelConfig
from qwen35_jax.params import ParamPack
from qwen35_jax.steps import HostLayout, ProgramKey, StepSpec, device_state_shapes, layout_of, make_step
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


H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
KERNELS = ("__gpu$xla.gpu.triton", "mosaic_gpu")


def lowered_for_h200(kind: str, steps: int) -> tuple[ir.Module, HostLayout]:
    """Two layers of each kind at real sizes, so that every op runs the kernel that it would run.

    Six rows: of a projection of Gated DeltaNet only an even number is a multiple of 256 bytes.
    """
    pack = ParamPack(ModelConfig.preset("4b", layer_types=("linear_attention", "full_attention") * 2))
    key = ProgramKey(kind, Bucket(128, 3, 6, 4), steps, "greedy")
    layout = layout_of(kind, key.bucket)
    state = device_state_shapes(pack.config, 40, 9, pack.dtype, jnp.float32)
    packed = tuple(jax.ShapeDtypeStruct((words,), jnp.int32) for words in layout.pieces)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H200)):
        step = jax.jit(make_step(StepSpec(pack, 1000), key))
        lowered = step.trace(pack.leaf_specs, state, packed).lower(lowering_platforms=("cuda",))
    return lowered.compiler_ir("stablehlo"), layout


def kernel_operands(module: ir.Module) -> Iterator[tuple[str, str, ir.Value, ir.Value]]:
    """(op of the kernel, its kind, operand, what that is a view of), calls and loops looked through."""
    functions = {function.sym_name.value: function for function in module.body.operations}

    def source(value: ir.Value, calls: tuple[ir.Operation, ...]) -> ir.Value:
        while True:
            owner = value.owner
            if isinstance(owner, ir.Block):
                around, number = owner.owner.operation, ir.BlockArgument(value).arg_number
                if around.name == "stablehlo.while":
                    value = around.operands[number]
                elif around.name == "func.func" and calls:
                    value, calls = calls[-1].operands[number], calls[:-1]
                else:
                    return value
            elif owner.name == "stablehlo.reshape":
                value = owner.operands[0]
            else:
                return value

    def visit(block: ir.Block, calls: tuple[ir.Operation, ...]):
        for operation in (one.operation for one in block.operations):
            if operation.name == "func.call":
                callee = functions[ir.FlatSymbolRefAttr(operation.attributes["callee"]).value]
                yield from visit(callee.regions[0].blocks[0], (*calls, operation))
            elif operation.name == "stablehlo.custom_call":
                target = ir.StringAttr(operation.attributes["call_target_name"]).value
                if target.startswith(KERNELS):
                    op = ir.FlatSymbolRefAttr(calls[-1].attributes["callee"]).value.lstrip("_")
                    yield from ((op, target, operand, source(operand, calls)) for operand in operation.operands)
            else:
                for region in operation.regions:
                    for inner in region.blocks:
                        yield from visit(inner, calls)

    yield from visit(functions["main"].regions[0].blocks[0], ())


def extent(cut: ir.Operation) -> tuple[int, int] | None:
    """Where a slice begins and how long it is, in bytes; None if it is not one piece of its operand."""
    whole, part = (ir.RankedTensorType(value.type) for value in (cut.operands[0], cut.results[0]))
    starts, steps = (list(ir.DenseI64ArrayAttr(cut.attributes[name])) for name in ("start_indices", "strides"))
    if any(size != full for size, full in zip(part.shape[1:], whole.shape[1:], strict=True)) or set(steps) != {1}:
        return None
    row = math.prod(whole.shape[1:]) * whole.element_type.width // 8
    return starts[0] * row, part.shape[0] * row


@pytest.mark.parametrize(("kind", "steps"), [("decode", 1), ("decode", 8), ("unified", 1)])
def test_kernels_read_their_operands_where_they_are(kind, steps):
    """XLA copies a slice for a custom kernel, a launch each time.

    But not for a Mosaic kernel if it begins and ends at a multiple of 256 bytes. Constants are handed over as they are.
    """
    module, layout = lowered_for_h200(kind, steps)
    seen = set()
    for op, target, operand, origin in kernel_operands(module):
        seen.add(op)
        if isinstance(origin.owner, ir.Block) or origin.owner.name != "stablehlo.slice":
            continue
        cut, what = origin.owner, f"{op}: {operand.type} is {origin.owner}"
        if ir.RankedTensorType(cut.operands[0].type).shape == [layout.size]:
            continue  # a field of the host's: once a program
        if kind == "unified" and (op == "gdn_prefill" or op == "paged_decode_attention" and operand.type.shape[0] == 6):
            continue  # columns and small parameters of a Triton kernel; rows of one, behind those of the prompts
        found = extent(cut)
        assert "mosaic" in target and found is not None and found[0] % 256 == 0 and found[1] % 256 == 0, what
    attention = {"kv_write", "paged_decode_attention"} | ({"paged_prefill_attention"} if kind == "unified" else set())
    assert seen >= attention | {"gdn_decode"}

"""Pools are updated in place: what the compiled program allocates and copies.

Only compiled, never run: the pools here are far larger than everything else, so a copy of one cannot hide.
"""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.causal_conv import api as causal_conv_api
from pallas_kernels.causal_conv.specs import CausalConvSpec
from pallas_kernels.gdn_decode.specs import GdnDecodeSpec
from pallas_kernels.gdn_prefill.specs import GdnPrefillSpec
from pallas_kernels.kv_write.specs import KvWriteSpec
from pallas_kernels.paged_decode_attention.specs import PagedDecodeAttentionSpec
from pallas_kernels.paged_prefill_attention.specs import PagedPrefillAttentionSpec
from pallas_kernels.registry import UnsupportedArguments
from pallas_kernels.spec import TINY_MODELS
from tests.pallas_kernels.conformance import POOL_OPS, every_implementation, implementations

MODEL = TINY_MODELS["tiny1"]
PACK = {"model": MODEL, "lengths": (70, 0, 20), "num_pads": 6, "num_layers": 3}
SPECS = {
    "causal_conv": CausalConvSpec(name="", num_slots=5000, **PACK),
    "gdn_prefill": GdnPrefillSpec(name="", num_slots=1000, **PACK),
    "gdn_decode": GdnDecodeSpec(name="", num_slots=5000, num_rows=5, model=MODEL, num_layers=3),
    "kv_write": KvWriteSpec(name="", num_pages=1000, **PACK),
    "paged_prefill_attention": PagedPrefillAttentionSpec(name="", num_pages=1000, **PACK),
    "paged_decode_attention": PagedDecodeAttentionSpec(
        name="", num_pages=1000, kv_lens=(1, 100, 0), model=MODEL, num_layers=3
    ),
}
POOLS = ("conv_pool", "state_pool", "kv_pool")
EVERYWHERE = [name for name in implementations(POOL_OPS[0]) if all(name in implementations(op) for op in POOL_OPS)]


def abstract(spec) -> dict[str, jax.ShapeDtypeStruct]:
    return jax.eval_shape(lambda: {name: jnp.asarray(array) for name, array in spec.case().arguments.items()})


def num_bytes(array) -> int:
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize


def hlo_names(dtype) -> str:
    return {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]


CUBLAS_WORKSPACE = 32 << 20


def assert_in_place(compiled, pools, *, donated: bool) -> None:
    """No scratch as large as a twentieth of a pool, no instruction that makes a new pool, all pools aliased."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    smallest = min(num_bytes(pool) for pool in pools)
    # XLA keeps 32 MiB for cuBLAS in a program whose products (those of the references) it gives to it.
    scratch = memory.temp_size_in_bytes - (CUBLAS_WORKSPACE if f"s8[{CUBLAS_WORKSPACE}]" in text else 0)
    assert scratch < smallest / 20, f"{scratch} bytes of scratch, pool {smallest}"
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < smallest / 20
    if donated:
        assert memory.alias_size_in_bytes >= sum(num_bytes(pool) for pool in pools)
    for pool in pools:
        shape = re.escape(f"{hlo_names(pool.dtype)}[{','.join(map(str, pool.shape))}]")
        makers = re.findall(rf"= {shape}\S* ([\w-]+)\(", text)
        forbidden = set(makers) & {"copy", "copy-start", "convert", "select", "transpose", "broadcast", "pad"}
        assert not forbidden, f"the program makes a new pool by {forbidden}"


ONE = {  # one token, one request, one row: where a write of one entry may fuse with what surrounds it
    "causal_conv": {"lengths": (1,), "num_pads": 0},
    "gdn_prefill": {"lengths": (1,), "num_pads": 0},
    "gdn_decode": {"num_rows": 1},
    "kv_write": {"lengths": (1,), "num_pads": 0},
    "paged_prefill_attention": {"lengths": (1,), "num_pads": 0},
    "paged_decode_attention": {"kv_lens": (1,)},
}


@pytest.mark.parametrize("op", POOL_OPS)
@pytest.mark.parametrize(("dtype", "one"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_one_call(op, dtype, one):
    for implementation in implementations(op):
        spec = dataclasses.replace(SPECS[op], **ONE[op]) if one else SPECS[op]
        state = {"state_dtype": dtype} if hasattr(spec, "state_dtype") else {}
        spec = dataclasses.replace(spec, dtype=dtype, **state)
        arguments, options = abstract(spec), small_options(spec)
        pools = {name: arguments.pop(name) for name in POOLS if name in arguments}

        def program(pools, rest, op=op, options=options, implementation=implementation):
            return getattr(pallas_kernels, op)(**pools, **rest, **options, implementation=implementation)

        donate = (0,) if spec.pools else ()
        try:
            lowered = jax.jit(program, donate_argnums=donate).lower(pools, arguments)
        except UnsupportedArguments:
            assert dtype == "float32", f"{implementation} declines {dtype}"
            continue
        assert_in_place(lowered.compile(), pools.values(), donated=bool(spec.pools))


def small_options(spec) -> dict:
    """Static options without building the (large) case."""
    layers_only = {"num_slots": None} if hasattr(spec, "num_slots") else {"num_pages": None}
    return dataclasses.replace(spec, **layers_only).case().options


@every_implementation("gdn_decode")
def test_layers_of_prefill_then_decode_share_the_pools(implementation):
    """The order of a packed program: two layers, in each the prefill ops, then the decode op, on the same pools."""
    if implementation not in EVERYWHERE:
        pytest.skip("this implementation exists for some of the ops only")
    decode = abstract(dataclasses.replace(SPECS["gdn_decode"], dtype="float32"))
    conv = abstract(dataclasses.replace(SPECS["causal_conv"], dtype="float32"))
    prefill = abstract(dataclasses.replace(SPECS["gdn_prefill"], dtype="float32"))
    options = small_options(SPECS["gdn_prefill"])
    pools = tuple(decode.pop(name) for name in ("conv_pool", "state_pool"))
    for arguments in (decode, conv, prefill):
        for name in ("conv_pool", "state_pool", "layer"):
            arguments.pop(name, None)
    prefill.pop("qkv")

    def program(pools, decode, conv, prefill):
        conv_pool, state_pool = pools
        results = []
        for layer in range(2):
            mixed, conv_pool = pallas_kernels.causal_conv(
                **conv, conv_pool=conv_pool, layer=layer, implementation=implementation
            )
            out, state_pool = pallas_kernels.gdn_prefill(
                qkv=mixed, **prefill, state_pool=state_pool, layer=layer, **options, implementation=implementation
            )
            y, conv_pool, state_pool = pallas_kernels.gdn_decode(
                **decode,
                conv_pool=conv_pool,
                state_pool=state_pool,
                layer=layer,
                **options,
                eps=1e-6,
                implementation=implementation,
            )
            results.append((out, y))
        return results, (conv_pool, state_pool)

    lowered = jax.jit(program, donate_argnums=0).lower(pools, decode, conv, prefill)
    for op in ("causal_conv", "gdn_prefill", "gdn_decode"):
        functions = re.findall(rf"func\.func private @(_{op}\w*)\(", lowered.as_text())
        assert functions == [f"_{op}"], f"the two layers do not share one inner jit of {op}: {functions}"
    assert_in_place(lowered.compile(), pools, donated=True)


@pytest.mark.parametrize("op", POOL_OPS)
def test_pools_past_two_gigaelements_are_not_flattened(op):
    """No value of the program has as many elements as the pool but another shape: offsets stay one an axis.

    A view as matrices is none for the copy engine, which takes one offset an axis as well: they are counted in int32.
    """
    for implementation in implementations(op):
        spec = SPECS[op]
        arguments, options = abstract(spec), small_options(spec)
        present = [name for name in POOLS if name in arguments]
        entries = max(1 + 2**33 // math.prod(arguments[name].shape[2:]) for name in present)
        for name in present:
            layers, _, *rest = arguments[name].shape
            arguments[name] = jax.ShapeDtypeStruct((layers, entries, *rest), arguments[name].dtype)

        def program(arguments, op=op, options=options, implementation=implementation):
            return getattr(pallas_kernels, op)(**arguments, **options, implementation=implementation)

        text = jax.jit(program).lower(arguments).as_text()
        shapes = {tuple(map(int, found.split("x")[:-1])) for found in re.findall(r"tensor<((?:\d+x)+)", text) if found}
        pools = {tuple(arguments[name].shape) for name in present}
        large = {shape for shape in shapes if math.prod(shape) >= 2**31}
        if implementation.startswith("mosaic"):
            large -= {(math.prod(shape[:-2]), *shape[-2:]) for shape in pools if math.prod(shape[:-2]) < 2**31}
        assert large == pools, f"{op}/{implementation}: {large - pools} beside the pools {pools}"


def test_an_int_and_an_array_layer_share_one_compilation():
    spec = dataclasses.replace(SPECS["causal_conv"], num_slots=None, dtype="float32")
    case = spec.case()
    inner = causal_conv_api._causal_conv
    before, outputs = inner._cache_size(), []
    for layer in (1, np.int32(1), jnp.asarray(1, jnp.int32), np.int64(1)):
        outputs.append(pallas_kernels.causal_conv(**case.arguments | {"layer": layer})[0])
        np.testing.assert_array_equal(outputs[0], outputs[-1])
    assert inner._cache_size() == before + 1

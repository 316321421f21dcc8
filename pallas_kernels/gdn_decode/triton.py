"""``gdn_decode`` on NVIDIA GPUs before Hopper, Pallas-Triton: plain loads and stores, one program a row and key head.

A program has its key head's channels of the convolution tail to itself, with those of all value heads that use it, so
it moves the tail on in place; the only thing to order is inside it: channels are held by several threads, so every
thread must have read the tail before one overwrites it (the barrier). The state passes through registers in tiles of
value dims. Each tile is read once and written once, all else is small.

What Hopper's kernel gets from the copy engine is here left to the number of programs on a multiprocessor: while one
waits for its tile, the others work.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuned
from pallas_kernels.gpu_support import require, require_nvidia
from pallas_kernels.numerics import L2_EPSILON, silu

MAX_GROUP = 8  # value heads of a key head: the code is unrolled over them


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What may be tuned.

    Attributes:
        values: value dims of a tile, a power of two that divides Dv.
        warps: warps of a program.
    """

    values: int = 64
    warps: int = 8

    def __post_init__(self):
        if self.values not in (16, 32, 64, 128) or self.warps not in (1, 2, 4, 8):
            raise ValueError(f"no tiling of this kernel: {self}")


def default_tiling(head_v_dim: int) -> Tiling:
    """Tiling where nothing was measured: with eight warps a thread holds 32 numbers of a tile, 128 registers in all."""
    return Tiling(values=min(Tiling.values, head_v_dim))


def tuning_key(arguments) -> tuned.Key:
    """Shapes that tuned tilings are found by."""
    pool, num_k_heads = arguments["state_pool"], arguments["num_k_heads"]
    exact = {"group": pool.shape[2] // num_k_heads, "dims": pool.shape[3], "state_dtype": jnp.dtype(pool.dtype).name}
    return exact, {"programs": arguments["projected"].shape[0] * num_k_heads}


def supports(target, arguments) -> None:
    """Any NVIDIA GPU from compute capability 8.0 to 9.0, head dims that are powers of two."""
    require_nvidia(target, at_least=(8, 0), before=(10, 0))
    _, _, heads, head_v_dim, head_k_dim = arguments["state_pool"].shape
    for dim in (head_v_dim, head_k_dim):
        require(32 <= dim <= 256 and dim & (dim - 1) == 0, f"takes head dims of 32, 64, 128 or 256, not {dim}")
    group = heads // arguments["num_k_heads"]
    require(group <= MAX_GROUP, f"takes at most {MAX_GROUP} value heads a key head, not {group}")
    require(arguments["num_k_heads"] < 2**16, "takes at most 65535 key heads")


def gdn_decode(
    projected,
    conv_weight,
    A_log,
    dt_bias,
    norm_weight,
    conv_pool,
    state_pool,
    layer,
    slot_ids,
    *,
    num_k_heads,
    head_k_dim,
    eps,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See :func:`pallas_kernels.gdn_decode`. The pools are operands aliased to results: updated in place."""
    rows = projected.shape[0]
    num_v_heads, head_v_dim = state_pool.shape[2:4]
    if tiling is None:
        key = tuning_key({"state_pool": state_pool, "num_k_heads": num_k_heads, "projected": projected})
        tiling = tuned.settings(default_tiling(head_v_dim), "gdn_decode", "triton", key)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    kernel = functools.partial(
        _kernel,
        num_k_heads=num_k_heads,
        group=num_v_heads // num_k_heads,
        values=tiling.values,
        eps=eps,
        barrier=not interpret,  # the interpreter has no threads, and no such operation
    )
    operands = (projected, conv_weight, A_log, dt_bias, norm_weight, layer[None], slot_ids, conv_pool, state_pool)
    return tuple(
        pl.pallas_call(
            kernel,
            grid=(rows, num_k_heads),
            in_specs=[whole] * len(operands),
            out_specs=[whole] * 3,
            out_shape=[
                jax.ShapeDtypeStruct((rows, num_v_heads * head_v_dim), projected.dtype),
                jax.ShapeDtypeStruct(conv_pool.shape, conv_pool.dtype),
                jax.ShapeDtypeStruct(state_pool.shape, state_pool.dtype),
            ],
            input_output_aliases={7: 1, 8: 2},
            compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=1),
            interpret=interpret,
            name="gdn_decode",
        )(*operands)
    )


def _kernel(
    projected_ref,  # [B, C + Hv Dv + 2 Hv]
    conv_weight_ref,  # [4, C]
    A_log_ref,  # [Hv]
    dt_bias_ref,
    norm_weight_ref,  # [Dv]
    layer_ref,  # [1]
    slot_ids_ref,  # [B]
    conv_in_ref,  # [L, S, 3, C], the same memory as conv_ref
    state_in_ref,  # [L, S, Hv, Dv, Dk], the same memory as state_ref
    y_ref,  # [B, Hv Dv]
    conv_ref,
    state_ref,
    *,
    num_k_heads: int,
    group: int,
    values: int,
    eps: float,
    barrier: bool,
):
    row, key_head = pl.program_id(0), pl.program_id(1)
    layer, slot = layer_ref[0], slot_ids_ref[row]
    head_v_dim, head_k_dim = state_ref.shape[3:]
    channels, first_head = conv_weight_ref.shape[1], key_head * group
    num_v_heads, key_dim = num_k_heads * group, num_k_heads * head_k_dim
    z_first = channels
    b_first = channels + num_v_heads * head_v_dim
    tiles = head_v_dim // values

    def parts(head):
        """Slices of a value head's value dims, tile by tile."""
        return [pl.ds(head * head_v_dim + tile * values, values) for tile in range(tiles)]

    @pl.when(slot == 0)
    def _():
        for member in range(group):
            for dims in parts(first_head + member):
                y_ref[row, dims] = jnp.zeros((values,), y_ref.dtype)

    @pl.when(slot != 0)
    def _():
        pieces = [pl.ds(key_head * head_k_dim, head_k_dim), pl.ds(key_dim + key_head * head_k_dim, head_k_dim)]
        for member in range(group):
            pieces += [pl.ds(2 * key_dim + dims.start, values) for dims in parts(first_head + member)]
        windows = [
            [*(conv_in_ref[layer, slot, place, piece] for place in range(3)), projected_ref[row, piece]]
            for piece in pieces
        ]
        if barrier:
            plgpu.debug_barrier()  # a channel may be held by several threads, of which one writes
        for window, piece in zip(windows, pieces, strict=True):
            for place in range(3):
                conv_ref[layer, slot, place, piece] = window[place + 1]
        query, key, *mixed = (
            _convolve(window, [conv_weight_ref[tap, piece] for tap in range(4)])
            for window, piece in zip(windows, pieces, strict=True)
        )
        query = (query * (lax.rsqrt(jnp.sum(query * query) + L2_EPSILON) * head_k_dim**-0.5))[None, :]
        key = (key * lax.rsqrt(jnp.sum(key * key) + L2_EPSILON))[None, :]

        for member in range(group):
            head = first_head + member
            beta = lax.logistic(projected_ref[row, b_first + head].astype(jnp.float32))
            raw = projected_ref[row, b_first + num_v_heads + head].astype(jnp.float32)
            kept = _kept(raw, A_log_ref[head], dt_bias_ref[head])
            outs = []
            for tile in range(tiles):
                where = (layer, slot, head, pl.ds(tile * values, values), slice(None))
                state = state_in_ref[where].astype(jnp.float32) * kept
                delta = beta * (mixed[member * tiles + tile] - jnp.sum(state * key, axis=1))
                state = state + delta[:, None] * key
                state_ref[where] = state.astype(state_ref.dtype)
                outs.append(jnp.sum(state * query, axis=1).astype(y_ref.dtype).astype(jnp.float32))
            factor = lax.rsqrt(sum(jnp.sum(out * out) for out in outs) * (1 / head_v_dim) + eps)
            for tile, (out, dims) in enumerate(zip(outs, parts(head), strict=True)):
                gate = silu(projected_ref[row, pl.ds(z_first + dims.start, values)].astype(jnp.float32))
                weight = norm_weight_ref[pl.ds(tile * values, values)]
                y_ref[row, dims] = (weight * (out * factor) * gate).astype(y_ref.dtype)


def _convolve(window, taps) -> jax.Array:
    """Convolution and SiLU of some channels, float32 rounded to the activation dtype where the definition rounds."""
    dtype = window[0].dtype
    total = sum(raw.astype(jnp.float32) * tap.astype(jnp.float32) for raw, tap in zip(window, taps, strict=True))
    return silu(total.astype(dtype).astype(jnp.float32)).astype(dtype).astype(jnp.float32)


def _kept(raw, A_log, dt_bias) -> jax.Array:
    """exp(g) of one head."""
    x = raw + dt_bias
    small = jnp.exp(-jnp.abs(x))  # log(1 + small), by its series where 1 + small would round it away
    log1p = jnp.where(small < 2.0**-10, small * (1.0 - 0.5 * small), jnp.log(1.0 + small))
    return jnp.exp(-jnp.exp(A_log) * (jnp.maximum(x, 0.0) + log1p))

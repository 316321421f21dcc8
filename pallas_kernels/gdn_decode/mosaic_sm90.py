"""``gdn_decode`` on Hopper, Pallas Mosaic GPU: the state crosses the memory bus once each way, all else is fused.

A block of one warpgroup owns a row and one key head, with all value heads that use it: nobody else reads or writes
that part of the convolution tail, so it is updated in place without a second kernel. Or (``split``) each value head has
a block, and those of a key head are a cluster: all read the tail of query and key, one writes it when they have. States
pass through shared memory in tiles of 64 or 128 value dims, brought and taken back by the copy engine while the tile
before them is in registers; the copy engine addresses the pool by (state matrix, row, column), or with ``plain`` by
addresses of 64 bits, so no offset is near 2^31 however large the pool is. A tile is read once: the decayed ``S k``
decides the correction, the new tile gives ``S q``.

Padding rows write zeros to their output and touch nothing else, the null slot included.

The layer's projection holds qkv, z, b and a side by side; each part is read where it is. (Cut out by XLA, they cost
four small kernels a layer.)
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuned
from pallas_kernels.gpu_support import require, require_nvidia
from pallas_kernels.mosaic_layouts import in_every_column, in_every_row, rows_of
from pallas_kernels.numerics import L2_EPSILON, kept_share, silu

DIM = 128  # Dk and Dv: a thread of the warpgroup for each channel of a head
MAX_GROUP = 4  # value heads of a key head: the most that were ever tried; each keeps its inputs in registers

_CHANNELS = plgpu.Layout.WG_STRIDED((DIM,), vec_size=1)  # a channel a thread


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What may be tuned.

    Attributes:
        values: value dims of a tile, a multiple of 64 (the layout's rows) that divides Dv.
        stages: tiles in shared memory.
        split: whether the value heads of a key head have blocks of their own.
        plain: tiles lie in shared memory as in the pool, so that a copy of one is a stretch of bytes; else in a pattern
            of banks for the registers' layout of a matrix product, brought as pieces of a tensor.
    """

    values: int = 64
    stages: int = 2
    split: bool = False
    plain: bool = False

    def __post_init__(self):
        if self.values not in (64, 128) or self.stages < 2:
            raise ValueError(f"no tiling of this kernel: {self}")


def tuning_key(arguments) -> tuned.Key:
    """Shapes that tuned tilings are found by."""
    pool, num_k_heads = arguments["state_pool"], arguments["num_k_heads"]
    exact = {"group": pool.shape[2] // num_k_heads, "state_dtype": jnp.dtype(pool.dtype).name}
    return exact, {"blocks": arguments["projected"].shape[0] * num_k_heads}


def supports(target, arguments) -> None:
    """Hopper or newer, heads of 128 x 128."""
    require_nvidia(target, at_least=(9, 0))
    _, _, heads, head_v_dim, head_k_dim = arguments["state_pool"].shape
    require(head_v_dim == DIM and head_k_dim == DIM, f"takes heads of {DIM} x {DIM}, not {head_v_dim} x {head_k_dim}")
    group = heads // arguments["num_k_heads"]
    require(group <= MAX_GROUP, f"takes at most {MAX_GROUP} value heads a key head, not {group}")
    matrices = arguments["state_pool"].size // (DIM * DIM)
    require(matrices < 2**31, f"{matrices} state matrices are past int32")
    require(arguments["projected"].shape[0] < 2**16, "takes at most 65535 rows")


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
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See :func:`pallas_kernels.gdn_decode`. The pools are references to the kernel: updated in place."""
    rows, channels = projected.shape[0], conv_weight.shape[1]
    num_v_heads = state_pool.shape[2]
    group = num_v_heads // num_k_heads
    if tiling is None:
        key = tuning_key({"state_pool": state_pool, "num_k_heads": num_k_heads, "projected": projected})
        tiling = tuned.settings(Tiling(), "gdn_decode", "mosaic_sm90", key)
    split = tiling.split and group > 1
    conv_ref, state_ref = jax.new_ref(conv_pool), jax.new_ref(state_pool)
    firsts = (0, channels, channels + num_v_heads * DIM, channels + num_v_heads * (DIM + 1))

    def body(projected_ref, *refs):
        _kernel(
            *((projected_ref, first) for first in firsts),
            *refs,
            num_k_heads=num_k_heads,
            group=group,
            state_dtype=state_pool.dtype,
            eps=eps,
            tiling=tiling,
            split=split,
        )

    kernel = pl.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((rows, num_v_heads * DIM), projected.dtype)],
        # Blocks that run together have few rows, whose states are long stretches of memory, not one head of many rows.
        mesh=plgpu.Mesh(
            grid=(rows, num_k_heads),
            grid_names=("row", "key_head"),
            cluster=(group,) if split else (),
            cluster_names=("member",) if split else (),
        ),
        # Barriers are placed by hand, with commit_smem: what a thread reads and writes itself needs none.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        name="gdn_decode",
    )
    operands = (projected, conv_weight, A_log, dt_bias, norm_weight, layer[None], slot_ids)
    [y] = kernel(*operands, conv_ref, state_ref)
    return y, jax.freeze(conv_ref), jax.freeze(state_ref)


def _kernel(
    qkv,  # a reference and the column where the part begins: [B, C] from there
    z,  # [B, Hv Dv]
    b,  # [B, Hv]
    a,  # [B, Hv]
    conv_weight_ref,  # [4, C]
    A_log_ref,  # [Hv]
    dt_bias_ref,
    norm_weight_ref,  # [Dv]
    layer_ref,  # [1]
    slot_ids_ref,  # [B]
    conv_ref,  # [L, S, 3, C]
    state_ref,  # [L, S, Hv, Dv, Dk]
    y_ref,  # [B, Hv Dv]
    *,
    num_k_heads: int,
    group: int,
    state_dtype,
    eps: float,
    tiling: Tiling,
    split: bool,
):
    own_heads = 1 if split else group
    tile_dims = tiling.values
    a_head = DIM // tile_dims  # tiles of a value head
    tiles = own_heads * a_head
    state_bytes = jnp.dtype(state_dtype).itemsize
    layout = rows_of(16 // state_bytes) if tiling.plain else plgpu.Layout.WGMMA
    # A copy that might end outside of the array would be one of a tensor.
    bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS if tiling.plain else None
    stages = min(tiling.stages, tiles)
    key_head, row = lax.axis_index("key_head"), lax.axis_index("row")
    layer, slot = layer_ref[0], slot_ids_ref[row]
    own = lax.axis_index("member") if split else 0
    first_head = key_head * group + own

    @pl.when(slot == 0)
    def _():
        for member in range(own_heads):
            channels = pl.ds((first_head + member) * DIM, DIM)
            y_ref[row, channels] = plgpu.layout_cast(jnp.zeros((DIM,), y_ref.dtype), _CHANNELS)

    def live(tiles_ref, loaded, query_ref, key_ref, values_ref, gates_ref, outs_ref, *tail_read):
        def in_pool(tile):
            member, part = tile // a_head, lax.rem(tile, a_head)
            return state_ref.at[layer, slot, first_head + member, pl.ds(part * tile_dims, tile_dims)]

        def fetch(tile, stage):
            plgpu.copy_gmem_to_smem(in_pool(tile), tiles_ref.at[stage], loaded.at[stage], oob_mode=bounds)

        for tile in range(stages):
            fetch(jnp.int32(tile), tile)

        # The small part, while the first tiles are on their way. All its loads come before its first use of one.
        pieces = [key_head, num_k_heads + key_head] + [2 * num_k_heads + first_head + m for m in range(own_heads)]
        pieces = [pl.ds(piece * DIM, DIM) for piece in pieces]
        qkv_ref, qkv_first = qkv
        windows = [
            _load_window(qkv_ref.at[row, _shifted(channels, qkv_first)], conv_ref.at[layer, slot], channels)
            for channels in pieces
        ]
        taps = [_load_rows(conv_weight_ref, 4, channels) for channels in pieces]
        heads = [pl.ds((first_head + member) * DIM, DIM) for member in range(own_heads)]
        z_ref, z_first = z
        gates = [plgpu.load(z_ref.at[row, _shifted(channels, z_first)], layout=_CHANNELS) for channels in heads]
        norm_weight = plgpu.load(norm_weight_ref, layout=_CHANNELS)
        for member in range(own_heads):
            beta, kept = _gates(b, a, A_log_ref, dt_bias_ref, row, first_head + member)
            gates_ref[2 * member], gates_ref[2 * member + 1] = beta, kept

        def keep_tail(which):
            for channels, window in list(zip(pieces, windows, strict=True))[which]:
                for place in range(3):
                    conv_ref[layer, slot, place, channels] = window[place + 1]

        keep_tail(slice(2, None) if split else slice(None))
        query, key, *values = (_convolve(window, tap) for window, tap in zip(windows, taps, strict=True))
        query_ref[...] = query * (lax.rsqrt(jnp.sum(query * query) + L2_EPSILON) * DIM**-0.5)
        key_ref[...] = key * lax.rsqrt(jnp.sum(key * key) + L2_EPSILON)
        for member in range(own_heads):
            values_ref[member] = values[member]
        if split:  # what was read of the tail of query and key has been used
            plgpu.barrier_arrive(tail_read[0])
        plgpu.commit_smem()

        @pl.loop(0, tiles)
        def _(tile):
            stage = lax.rem(tile, stages)
            member, part = tile // a_head, lax.rem(tile, a_head)
            value_dims = pl.ds(part * tile_dims, tile_dims)
            beta, kept = gates_ref[2 * member], gates_ref[2 * member + 1]
            query, key = (
                in_every_row(plgpu.load(ref, layout=layout.reduce(0), optimized=not tiling.plain), tile_dims, layout)
                for ref in (query_ref, key_ref)
            )
            value = plgpu.load(values_ref.at[member, value_dims], layout=layout.reduce(1), optimized=not tiling.plain)

            plgpu.barrier_wait(loaded.at[stage])
            state = (
                plgpu.load(tiles_ref.at[stage], layout=layout, optimized=not tiling.plain).astype(jnp.float32) * kept
            )
            delta = beta * (value - jnp.sum(state * key, axis=1))
            state = state + in_every_column(delta, DIM, layout) * key
            outs_ref[member, value_dims] = jnp.sum(state * query, axis=1)
            tiles_ref[stage] = state.astype(state_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tiles_ref.at[stage], in_pool(tile))

            # The stage of the tile before this one is free once the copy engine has read it.
            following = tile - 1 + stages

            @pl.when((tile > 0) & (following < tiles))
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                fetch(following, lax.rem(following, stages))

        for member, channels in enumerate(heads):
            out = plgpu.load(outs_ref.at[member], layout=_CHANNELS).astype(y_ref.dtype).astype(jnp.float32)
            normed = norm_weight * (out * lax.rsqrt(jnp.sum(out * out) * (1 / DIM) + eps))
            y_ref[row, channels] = (normed * silu(gates[member].astype(jnp.float32))).astype(y_ref.dtype)
        if split:  # also so that no block leaves while others arrive at its barrier
            plgpu.barrier_wait(tail_read[0])
            pl.when(own == 0)(lambda: keep_tail(slice(2)))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory must outlive the copies

    @pl.when(slot != 0)
    def _():
        swizzled = (plgpu.TilingTransform((8, 128 // state_bytes)), plgpu.SwizzleTransform(128))
        pl.run_scoped(
            live,
            plgpu.SMEM((stages, tile_dims, DIM), state_dtype, transforms=() if tiling.plain else swizzled),
            plgpu.Barrier(num_barriers=stages),
            plgpu.SMEM((DIM,), jnp.float32),
            plgpu.SMEM((DIM,), jnp.float32),
            plgpu.SMEM((own_heads, DIM), jnp.float32),
            plgpu.SMEM((2 * own_heads,), jnp.float32),
            plgpu.SMEM((own_heads, DIM), jnp.float32),
            *([plgpu.ClusterBarrier(collective_axes=("member",))] if split else []),
        )


def _load_rows(ref, rows: int, channels) -> list[jax.Array]:
    """128 channels of each of the first rows of a [rows, C] array."""
    return [plgpu.load(ref.at[row, channels], layout=_CHANNELS) for row in range(rows)]


def _shifted(channels, first: int):
    """The same slice of a part that begins at a column."""
    return pl.ds(channels.start + first, channels.size)


def _load_window(new_ref, tail_ref, channels) -> list[jax.Array]:
    """The last four inputs of 128 channels, oldest first: those of the tail [3, C], then the new one [128]."""
    return [*_load_rows(tail_ref, 3, channels), plgpu.load(new_ref, layout=_CHANNELS)]


def _convolve(window: list[jax.Array], taps: list[jax.Array]) -> jax.Array:
    """Convolution and SiLU, float32[128] rounded to the activation dtype where the definition rounds."""
    dtype = window[0].dtype
    total = window[0].astype(jnp.float32) * taps[0].astype(jnp.float32)
    for raw, tap in zip(window[1:], taps[1:], strict=True):
        total = total + raw.astype(jnp.float32) * tap.astype(jnp.float32)
    return silu(total.astype(dtype).astype(jnp.float32)).astype(dtype).astype(jnp.float32)


def _gates(b, a, A_log_ref, dt_bias_ref, row, head):
    """Write strength and decay (not its logarithm) of one head, scalars."""
    (b_ref, b_first), (a_ref, a_first) = b, a
    beta = lax.logistic(b_ref[row, b_first + head].astype(jnp.float32))
    return beta, kept_share(a_ref[row, a_first + head].astype(jnp.float32), A_log_ref[head], dt_bias_ref[head])

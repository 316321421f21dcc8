"""``paged_decode_attention`` on NVIDIA GPUs, Pallas-Triton: keys and values split over programs, then combined.

The op reads each key and value once and does little with them, so what counts is bytes in flight on every SM. A program
takes one row, one key/value head and one share of the row's pages; its group of query heads (padded to the 16 rows of
the tensor cores' smallest product) reads the keys together. The number of shares is static, from the batch and the
width of the page table: enough programs to fill the GPU if all rows are equally long, each row divided by its own
length, and so many more that no share is longer than a limit. Those are for a long row among short or absent ones,
which the others' programs do not help; what has no pages ends at once. With one share the program gates and stores the
result itself; with more, a second kernel weighs the shares by their running maxima.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuned
from pallas_kernels.gpu_support import full_float32, require, require_nvidia, weighted_sum

_ROWS = 16  # rows of a product; a group of query heads fills 4 to 16 of them
_PAGES_PER_SHARE = 2  # a share below this costs more to combine than it saves
_LONGEST = 128  # pages of a share at the most: tuning measures rows that are equally long, which this is not for
_LOWEST = -1e30  # start of running maxima: finite, so that no difference is NaN
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What may be tuned.

    Attributes:
        keys: keys of a step, a power of two that divides the page.
        warps: warps of a program, a power of two.
        stages: depth of the pipeline that loads keys and values.
        programs: wanted on the GPU: rows are split into as many shares as that takes. 528 is four for each SM of an
            H200.
    """

    keys: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 528

    def __post_init__(self):
        if self.keys not in (16, 32, 64) or self.warps not in (1, 2, 4, 8) or self.stages < 1 or self.programs < 1:
            raise ValueError(f"no tiling of this kernel: {self}")


def default_tiling(dtype) -> Tiling:
    """Tiling where nothing was measured: what fits into 99 KiB of shared memory, the least from sm80 on.

    In 16 bits steps of a whole page take 74 KiB. In float32 they would take 144 and spill; half a page takes 80.
    """
    return Tiling() if jnp.dtype(dtype).itemsize == 2 else Tiling(keys=32, stages=1)


def tuning_key(arguments) -> tuned.Key:
    """Shapes that tuned tilings are found by."""
    (rows, num_heads, _), num_kv_heads = arguments["q"].shape, arguments["kv_pool"].shape[3]
    exact = {"group": num_heads // num_kv_heads, "dtype": jnp.dtype(arguments["q"].dtype).name}
    return exact, {"programs": rows * num_kv_heads, "width": arguments["page_table"].shape[1]}


def supports(target, arguments) -> None:
    """Head dim 256, pages of 64, at most 16 query heads a key/value head, any activation dtype."""
    require_nvidia(target, at_least=(8, 0), before=(10, 0))  # later ones were never tried
    num_heads, head_dim = arguments["q"].shape[1:]
    num_kv_heads, page_size = arguments["kv_pool"].shape[3:5]
    require(head_dim == 256, f"takes head dim 256, not {head_dim}")
    require(page_size == 64, f"takes pages of 64, not {page_size}")
    require(
        num_heads // num_kv_heads <= _ROWS,
        f"takes up to {_ROWS} query heads a key head, not {num_heads} over {num_kv_heads}",
    )


def num_shares(rows: int, num_kv_heads: int, width: int, programs: int = Tiling.programs) -> int:
    """Shares of each row's pages, from the shapes of a call and the programs that are wanted."""
    return max(1, min(-(-width // _PAGES_PER_SHARE), -(-programs // (rows * num_kv_heads))))


def paged_decode_attention(
    q,
    gates,
    kv_pool,
    layer,
    page_table,
    kv_lens,
    *,
    first_gate,
    shares: int | None = None,
    longest: int = _LONGEST,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See :func:`pallas_kernels.paged_decode_attention`."""
    rows, num_heads, head_dim = q.shape
    num_kv_heads = kv_pool.shape[3]
    group = num_heads // num_kv_heads
    if tiling is None:
        key = tuning_key({"q": q, "kv_pool": kv_pool, "page_table": page_table})
        tiling = tuned.settings(default_tiling(q.dtype), "paged_decode_attention", "triton", key)
    split = shares or num_shares(rows, num_kv_heads, page_table.shape[1], tiling.programs)
    shares = max(split, -(-page_table.shape[1] // longest))
    share_of = functools.partial(_share_of, split=split, longest=longest)
    grouped = (rows, num_kv_heads, group, head_dim)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    heads = pl.BlockSpec((None, None, _ROWS, head_dim), lambda row, head, share: (row, head, 0, 0))
    # Room for the rows behind the last head's group: they are masked, so nothing is read there.
    all_gates = pl.BlockSpec((None, gates.shape[1] + _ROWS, head_dim), lambda row, head, share: (row, 0, 0))
    table = pl.BlockSpec((None, page_table.shape[1]), lambda row, head, share: (row, 0))
    operands = (q.reshape(grouped), gates, kv_pool, layer[None], page_table, kv_lens)
    if shares == 1:
        out_specs, out_shape = heads, jax.ShapeDtypeStruct(grouped, q.dtype)
    else:
        of_share = pl.BlockSpec((None, None, _ROWS, None, head_dim), lambda row, head, share: (row, head, 0, share, 0))
        scalars = pl.BlockSpec((None, None, _ROWS, None), lambda row, head, share: (row, head, 0, share))
        out_specs = [of_share, scalars, scalars]
        partial_shape = (rows, num_kv_heads, group, shares)
        out_shape = [
            jax.ShapeDtypeStruct((*partial_shape, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        ]
    result = pl.pallas_call(
        functools.partial(
            _attend, group=group, shares=shares, share_of=share_of, keys=tiling.keys, first_gate=first_gate
        ),
        grid=(rows, num_kv_heads, shares),
        in_specs=[heads, all_gates, whole, whole, table, whole],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name="paged_decode_attention",
    )(*operands)
    if shares == 1:
        return result.reshape(q.shape)

    acc, top, norm = (array.reshape(rows, num_heads, *array.shape[3:]) for array in result)
    padded = pl.cdiv(shares, _ROWS) * _ROWS
    all_shares = pl.BlockSpec((None, None, padded, head_dim), lambda row, head: (row, head, 0, 0))
    their_scalars = pl.BlockSpec((None, None, 1 << (padded - 1).bit_length()), lambda row, head: (row, head, 0))
    one_head = pl.BlockSpec((None, None, head_dim), lambda row, head: (row, head, 0))
    its_gate = pl.BlockSpec((None, None, head_dim), lambda row, head: (row, first_gate + head, 0))
    return pl.pallas_call(
        functools.partial(_combine, share_of=share_of, page_size=kv_pool.shape[4]),
        grid=(rows, num_heads),
        in_specs=[all_shares, their_scalars, their_scalars, its_gate, whole],
        out_specs=one_head,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_decode_attention_combine",
    )(acc, top, norm, gates, kv_lens)


def _share_of(kv_len, share, page_size: int, *, split: int, longest: int):
    """First page of a share, the page past its last, and how many shares of the row have pages; they come first.

    A row is divided into ``split`` shares, and into more if those were longer than ``longest`` pages.
    """
    pages = (kv_len + page_size - 1) // page_size
    each = jnp.clip((pages + split - 1) // split, _PAGES_PER_SHARE, longest)
    return jnp.minimum(share * each, pages), jnp.minimum((share + 1) * each, pages), (pages + each - 1) // each


def _attend(
    q_ref,  # [16, H], of which the first are a group
    gates_ref,  # [X, H]
    pool_ref,  # [L, P, 2, K, Z, H]
    layer_ref,  # [1]
    table_ref,  # [W]
    kv_lens_ref,  # [B]
    *out_refs,
    group: int,
    shares: int,
    share_of: Callable,
    keys: int,
    first_gate: int,
):
    """One share of one row's pages for one key/value head."""
    row, head, share = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    page_size, head_dim = pool_ref.shape[4:]
    kv_len, layer = kv_lens_ref[row], layer_ref[0]
    steps = page_size // keys
    begin, end, _ = share_of(kv_len, share, page_size)
    live = (jnp.arange(_ROWS) < group)[:, None]
    precision, scale = full_float32(q_ref.dtype), head_dim**-0.5 * _LOG2_E
    q = plgpu.load(q_ref, mask=jnp.broadcast_to(live, (_ROWS, head_dim)), other=0.0)

    def some_keys(number, carry):
        top, norm, acc = carry
        first = number * keys
        page, places = table_ref[first // page_size], pl.ds(first % page_size, keys)
        seen = first + jnp.arange(keys, dtype=jnp.int32) < kv_len
        key = pool_ref[layer, page, 0, head, places]  # [keys, H]; unseen ones may be NaN: their columns go
        value = plgpu.load(
            pool_ref.at[layer, page, jnp.int32(1), head, places],
            mask=jnp.broadcast_to(seen[:, None], (keys, head_dim)),
            other=0.0,
        )
        scores = jnp.where(seen[None, :], plgpu.dot(q, key, trans_b=True, precision=precision), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp2((scores - new_top[:, None]) * scale)
        shrink = jnp.exp2((top - new_top) * scale)
        norm = norm * shrink + jnp.sum(weights, axis=1)
        acc = acc * shrink[:, None] + weighted_sum(weights, value)
        return new_top, norm, acc

    start = (
        jnp.full((_ROWS,), _LOWEST, jnp.float32),
        jnp.zeros((_ROWS,), jnp.float32),
        jnp.zeros((_ROWS, head_dim), jnp.float32),
    )
    top, norm, acc = lax.fori_loop(begin * steps, jnp.minimum(end * steps, pl.cdiv(kv_len, keys)), some_keys, start)
    rows = jnp.broadcast_to(live, (_ROWS, head_dim))
    if shares == 1:
        own = gates_ref.at[pl.ds(first_gate + head * group, _ROWS)]
        gate = plgpu.load(own, mask=rows, other=0.0).astype(jnp.float32)
        gated = acc / norm[:, None] * lax.logistic(gate)
        plgpu.store(out_refs[0], jnp.where(kv_len > 0, gated, 0.0).astype(out_refs[0].dtype), mask=rows)
    else:
        acc_ref, top_ref, norm_ref = out_refs
        # A share without pages leaves nothing: nobody reads it, and most may be such.
        some = begin < end
        plgpu.store(acc_ref, acc, mask=rows & some)
        plgpu.store(top_ref, top, mask=(jnp.arange(_ROWS) < group) & some)
        plgpu.store(norm_ref, norm, mask=(jnp.arange(_ROWS) < group) & some)


def _combine(acc_ref, top_ref, norm_ref, gate_ref, kv_lens_ref, out_ref, *, share_of: Callable, page_size: int):
    """Weigh the shares of a row and a query head."""
    kv_len = kv_lens_ref[pl.program_id(0)]
    _, _, shares = share_of(kv_len, 0, page_size)
    head_dim = acc_ref.shape[1]
    live = jnp.arange(top_ref.shape[0], dtype=jnp.int32) < shares
    top = jnp.max(plgpu.load(top_ref, mask=live, other=_LOWEST))

    def some_shares(number, carry):
        norm, acc = carry
        which = pl.ds(number * _ROWS, _ROWS)
        live = number * _ROWS + jnp.arange(_ROWS, dtype=jnp.int32) < shares
        tops = plgpu.load(top_ref.at[which], mask=live, other=_LOWEST)
        weights = jnp.where(live, jnp.exp2((tops - top) * (head_dim**-0.5 * _LOG2_E)), 0.0)
        norms = plgpu.load(norm_ref.at[which], mask=live, other=0.0)
        parts = plgpu.load(acc_ref.at[which], mask=jnp.broadcast_to(live[:, None], (_ROWS, head_dim)), other=0.0)
        return norm + jnp.sum(weights * norms), acc + jnp.sum(weights[:, None] * parts, axis=0)

    start = jnp.float32(0), jnp.zeros((head_dim,), jnp.float32)
    norm, acc = lax.fori_loop(0, pl.cdiv(shares, _ROWS), some_shares, start)
    gated = acc / norm * lax.logistic(gate_ref[...].astype(jnp.float32))
    out_ref[...] = jnp.where(kv_len > 0, gated, 0.0).astype(out_ref.dtype)

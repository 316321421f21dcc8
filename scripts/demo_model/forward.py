"""The model over whole sequences of several segments, differentiable: what training runs.

The engine's forward pass advances pools of states and pages in loops whose length is known at run time only, which
cannot be differentiated in reverse. Here the same modules (their parameters, norms and projections) see rows of T
tokens at once, MLPs by the reference of their kernel. The mixers are written down again, with the rounding points of
the kernels' references, and nothing crosses from one segment of a row into the next: state and convolution window
restart, attention is masked, positions start at 0. So training sees every example as inference will.

Memory: each layer keeps its input alone and is computed again in the backward pass; the logits exist for a block of
tokens at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from pallas_kernels import swiglu_product
from pallas_kernels.numerics import (
    apply_rope,
    delta_gates,
    l2_normalize,
    precision_of,
    rms_normalize,
    rope_cos_sin,
    round_to,
    silu,
)
from pallas_kernels.registry import REFERENCE
from qwen35_jax.layers.attention import GatedAttention
from qwen35_jax.layers.gated_delta_net import GatedDeltaNet
from qwen35_jax.layers.linear import linear
from qwen35_jax.layers.mlp import MLP
from qwen35_jax.layers.norm import gated_rms_norm, rms_norm
from qwen35_jax.model import DecoderLayer, Qwen35
from qwen35_jax.params import ParamPack
from scripts.demo_model.delta_rule import gated_delta_rule

TAPS = 4
# A row's queries are cut into at most this many blocks, each of which meets the keys up to its own end: 5/8 of the
# products and of the scores of the whole square, for four bodies to compile.
QUERY_BLOCKS = 4
SMALLEST_QUERY_BLOCK = 512
LOGIT_TOKENS = 1 << 15


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
    """How the pass is computed; none of these changes what is computed.

    Attributes:
        remat: keep each layer's input alone for the backward pass.
        recurrence_precision: of the products of the delta rule: "highest" (float32), or "default" (TF32 on a GPU).
    """

    remat: bool = True
    recurrence_precision: str = "highest"


class Segments(NamedTuple):
    """What the mixers know of a batch's rows.

    Attributes:
        numbers: int32 ``[B, T]``.
        reach: bool ``[3, B, T]``: whether the token 1, 2 or 3 places back is of the same segment.
        cos: float32 ``[B * T, rotary / 2]``.
        sin: float32 ``[B * T, rotary / 2]``.
    """

    numbers: jax.Array
    reach: jax.Array
    cos: jax.Array
    sin: jax.Array


class Losses(NamedTuple):
    """Sums over a batch, by task (float32 ``[tasks]`` each).

    Attributes:
        nll: weighted negative log-likelihoods.
        weight: weights.
        correct: tokens of full weight that were the most probable ones.
        counted: tokens of full weight.
    """

    nll: jax.Array
    weight: jax.Array
    correct: jax.Array
    counted: jax.Array


def segment_positions(segments: jax.Array) -> jax.Array:
    """Positions that restart at 0 with every segment: int32 ``[B, T]``."""
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    return index - lax.cummax(jnp.where(starts, index, 0), axis=1)


def hidden_states(
    model: Qwen35,
    tokens: jax.Array,
    segments: jax.Array,
    *,
    table: jax.Array | None = None,
    options: ForwardOptions | None = None,
) -> jax.Array:
    """Final-normed hidden states of every token.

    Args:
        model: parameters in the dtype to compute in.
        tokens: int32 ``[B, T]``.
        segments: int32 ``[B, T]``, equal numbers for the tokens of a segment, which lie side by side; a number must not
            come back later in its row. Segments may start anywhere.
        table: float32 embedding to look up in place of the model's own, so that its gradient is summed in float32.
        options: how to compute; None takes the defaults.

    Returns:
        ``[B, T, D]`` in the model's dtype.
    """
    options = options or ForwardOptions()
    attention = model.config.attention
    cos, sin = rope_cos_sin(segment_positions(segments).reshape(-1), attention.rotary_dim, attention.rope_theta)
    reach = jnp.stack([_shifted(segments, by, -1) == segments for by in range(1, TAPS)])
    context = Segments(segments, reach, cos, sin)

    with jax.named_scope("embed"):
        x = jnp.take(model.embed[...] if table is None else table, tokens, axis=0, mode="clip").astype(model.dtype)
    for run in _runs(model):
        graph = nnx.graphdef(run[0])

        def one_layer(x, state, graph=graph):
            return _layer(nnx.merge(graph, state), x, context, options)

        if options.remat:
            one_layer = jax.checkpoint(one_layer)
        states = [nnx.state(layer) for layer in run]
        if len(run) == 1:
            x = one_layer(x, states[0])
        else:  # one body for a run of layers of a kind: compiling is a good part of a short run's time
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
            x, _ = lax.scan(lambda x, state, f=one_layer: (f(x, state), None), x, stacked)
    with jax.named_scope("final_norm"):
        return rms_norm(x, model.final_norm[...], model.config.rms_norm_eps)


def _runs(model: Qwen35) -> list[list[DecoderLayer]]:
    """The layers, cut where the kind changes."""
    kinds = itertools.groupby(zip(model.config.layer_types, model.layers, strict=True), key=lambda pair: pair[0])
    return [[layer for _, layer in run] for _, run in kinds]


def _layer(layer: DecoderLayer, x: jax.Array, context: Segments, options: ForwardOptions) -> jax.Array:
    normed = rms_norm(x, layer.input_norm[...], layer.eps)
    if isinstance(layer.mixer, GatedDeltaNet):
        with jax.named_scope("gated_delta_net"):
            x = x + _gated_delta_net(layer.mixer, normed, context, options)
    else:
        with jax.named_scope("attention"):
            x = x + _attention(layer.mixer, normed, context)
    with jax.named_scope("mlp"):
        return x + _mlp(layer.mlp, rms_norm(x, layer.post_norm[...], layer.eps))


def _mlp(mlp: MLP, x: jax.Array) -> jax.Array:
    hidden = swiglu_product(x.reshape(-1, x.shape[-1]), mlp.gate_up[...], implementation=REFERENCE)
    return linear(hidden, mlp.down[...], "down").reshape(x.shape)


def _gated_delta_net(mixer: GatedDeltaNet, x: jax.Array, context: Segments, options: ForwardOptions) -> jax.Array:
    gdn, (rows, length, _) = mixer.config, x.shape
    bounds = np.cumsum([gdn.conv_dim, gdn.value_dim, gdn.num_v_heads])
    qkv, z, b, a = jnp.split(linear(x, mixer.in_proj[...], "in_proj"), bounds, axis=-1)
    qkv = _causal_conv(qkv, mixer.conv_weight[...], context.reach).astype(jnp.float32)
    query, key, value = jnp.split(qkv, [gdn.key_dim, 2 * gdn.key_dim], axis=-1)
    heads = (rows, length, gdn.num_k_heads, gdn.head_k_dim)
    beta, decay = delta_gates(b, a, mixer.A_log[...], mixer.dt_bias[...])
    with jax.named_scope("delta_rule"):
        out = gated_delta_rule(
            l2_normalize(query.reshape(heads)) * gdn.head_k_dim**-0.5,
            l2_normalize(key.reshape(heads)),
            value.reshape(rows, length, gdn.num_v_heads, gdn.head_v_dim),
            beta,
            decay,
            context.numbers,
            precision=lax.Precision(options.recurrence_precision),
        ).astype(x.dtype)
    out = gated_rms_norm(out, z.reshape(out.shape), mixer.norm[...], mixer.eps)
    return linear(out.reshape(z.shape), mixer.out_proj[...], "out_proj")


@jax.named_scope("causal_conv")
def _causal_conv(x: jax.Array, weight: jax.Array, reach: jax.Array) -> jax.Array:
    """Four taps in float32, oldest first, rounded; SiLU in float32, rounded. ``[B, T, Cc]``."""
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(TAPS - 1, -1, -1):
        tap = jnp.where(reach[back - 1][..., None], _shifted(x, back), 0) if back else x
        total += tap.astype(jnp.float32) * weight[TAPS - 1 - back].astype(jnp.float32)
    # The barrier, which holds for the derivative too: it would else be worked out again for every tap and its weights.
    total = lax.optimization_barrier(round_to(total, x.dtype).astype(x.dtype))
    return silu(total.astype(jnp.float32)).astype(x.dtype)


def _shifted(x: jax.Array, by: int, fill: int = 0) -> jax.Array:
    """What lies ``by`` tokens back on axis 1, ``fill`` before the row's start."""
    pads = ((0, 0), (by, 0)) + ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x, pads, constant_values=fill)[:, : x.shape[1]]


def _attention(mixer: GatedAttention, x: jax.Array, context: Segments) -> jax.Array:
    config, (rows, length, _) = mixer.config, x.shape
    num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    q_dim, kv_dim = num_heads * head_dim, num_kv_heads * head_dim
    projected = linear(x, mixer.qkv_proj[...], "qkv_proj")
    query, gate, key, value = jnp.split(projected, np.cumsum([q_dim, q_dim, kv_dim]), axis=-1)

    def normed(heads: jax.Array, count: int, weight: jax.Array) -> jax.Array:
        """Norm and rotation in float32, rounded once: ``[B, T, heads, H]``."""
        heads = rms_normalize(heads.reshape(rows * length, count, head_dim), mixer.eps) * (1.0 + weight)
        return apply_rope(heads, context.cos, context.sin).astype(x.dtype).reshape(rows, length, count, head_dim)

    query = normed(query, num_heads, mixer.q_norm[...]) * jnp.asarray(head_dim**-0.5, x.dtype)
    query = query.reshape(rows, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    key = normed(key, num_kv_heads, mixer.k_norm[...])
    value = value.reshape(rows, length, num_kv_heads, head_dim)

    block = max(SMALLEST_QUERY_BLOCK, -(-length // QUERY_BLOCKS))
    attended = [
        _attend(query, key, value, context.numbers, start, min(start + block, length))
        for start in range(0, length, block)
    ]
    attended = jnp.concatenate(attended, axis=1) if len(attended) > 1 else attended[0]
    gated = attended.reshape(rows, length, q_dim) * lax.logistic(gate.astype(jnp.float32))
    return linear(gated.astype(x.dtype), mixer.o_proj[...], "o_proj")


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array, start: int, end: int) -> jax.Array:
    """Queries ``start .. end - 1`` of every row over the keys before ``end``: float32 ``[B, Q, K, G, H]``."""
    causal = jnp.arange(start, end)[:, None] >= jnp.arange(end)
    seen = causal & (segments[:, start:end, None] == segments[:, None, :end])  # [B, Q, S]
    # In the order in which the product leaves them: another one would cost a transposed copy of all scores.
    scores = _product("bqkgh,bskh->bkqgs", query[:, start:end], key[:, :end])
    # A finite floor: every query sees itself, so masked weights are exactly zero all the same.
    weights = jax.nn.softmax(jnp.where(seen[:, None, :, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
    return _product("bkqgs,bskh->bqkgh", weights.astype(query.dtype), value[:, :end])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """A contraction in the operands' dtype with float32 sums, left in float32, whose derivative is of the same kind.

    JAX's own derivative would multiply the float32 cotangent with a narrow operand, in float32 and far slower.
    """
    return jnp.einsum(spec, left, right, precision=precision_of(left.dtype), preferred_element_type=jnp.float32)


def _product_forward(spec: str, left: jax.Array, right: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(spec, left, right), (left, right)


def _product_backward(
    spec: str, operands: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    left, right = operands
    of_left, of_right, of_out = spec.replace("->", ",").split(",")
    cotangent = cotangent.astype(left.dtype)
    return (
        _product(f"{of_out},{of_right}->{of_left}", cotangent, right).astype(left.dtype),
        _product(f"{of_left},{of_out}->{of_right}", left, cotangent).astype(right.dtype),
    )


_product.defvjp(_product_forward, _product_backward)


def loss_sums(
    pack: ParamPack,
    params: Mapping[str, jax.Array],
    batch: Mapping[str, jax.Array],
    *,
    num_tasks: int = 1,
    z_loss: float = 0.0,
    options: ForwardOptions | None = None,
) -> tuple[jax.Array, Losses]:
    """The loss to descend, and its sums by task.

    Args:
        pack: layout of the model in the dtype to compute in.
        params: float32 arrays by the name of the pack's leaf; matrices are rounded to the dtype of the pack here, and
            their gradients come back in float32.
        batch: ``tokens``, ``segments`` and ``tasks`` int32 ``[B, T]``, ``weights`` float32 ``[B, T]``: the weight of
            predicting ``tokens[t]`` from what comes before it in its segment (a segment's first token has none).
        num_tasks: tasks are ``0 .. num_tasks - 1``.
        z_loss: weight of the squared log of the partition function.
        options: how to compute.

    Returns:
        The weighted mean of negative log-likelihood + z-loss, and the sums.
    """
    model = pack.unpack(tuple(params[leaf.name].astype(leaf.spec.dtype) for leaf in pack.leaves))
    tokens, segments = batch["tokens"], batch["segments"]
    hidden = hidden_states(model, tokens, segments, table=params["embed"], options=options)

    same = segments[:, 1:] == segments[:, :-1]
    weights = jnp.pad(jnp.where(same, batch["weights"][:, 1:], 0), ((0, 0), (0, 1)))
    targets, tasks = (jnp.pad(batch[name][:, 1:], ((0, 0), (0, 1))) for name in ("tokens", "tasks"))
    tied = pack.config.tie_word_embeddings
    head = params["embed" if tied else "lm_head"]  # rounded in every block: the blocks' gradients are float32 sums

    @jax.checkpoint
    def one_block(block, head):
        hidden, targets, tasks, weights = block
        logits = _product("md,vd->mv" if tied else "md,dv->mv", hidden, head.astype(hidden.dtype))  # [M, vocab]
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        # A sum over a mask rather than a gather, whose derivative would be a scatter.
        is_target = targets[:, None] == jnp.arange(logits.shape[-1])
        target_logits = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
        nll = log_sum - target_logits
        full = (weights >= 1).astype(jnp.float32)
        hit = full * (target_logits >= jnp.max(logits, axis=-1))
        by_task = jax.nn.one_hot(tasks, num_tasks, dtype=jnp.float32)  # [M, tasks]
        sums = jnp.stack([weights * nll, weights, lax.stop_gradient(hit), full])
        sums = jnp.matmul(sums, by_task, precision=lax.Precision.HIGHEST)  # [4, tasks]
        return sums, jnp.sum(weights * jnp.square(log_sum))

    flat = tuple(x.reshape(tokens.size, *x.shape[2:]) for x in (hidden, targets, tasks, weights))
    blocks = jax.tree.map(lambda x: _in_blocks(x, LOGIT_TOKENS), flat)

    def add(carry, block):
        return jax.tree.map(jnp.add, carry, one_block(block, head)), None

    with jax.named_scope("loss"):
        start = (jnp.zeros((4, num_tasks), jnp.float32), jnp.zeros((), jnp.float32))
        (sums, squares), _ = lax.scan(add, start, blocks)
    losses = Losses(*sums)
    total = jnp.maximum(jnp.sum(losses.weight), 1e-6)
    return (jnp.sum(losses.nll) + z_loss * squares) / total, losses


def _in_blocks(x: jax.Array, size: int) -> jax.Array:
    """``[M, ...]`` to ``[blocks, at most size, ...]``, padded with zeros."""
    count = -(-x.shape[0] // size)
    size = -(-x.shape[0] // count)
    x = jnp.pad(x, ((0, count * size - x.shape[0]),) + ((0, 0),) * (x.ndim - 1))
    return x.reshape(count, size, *x.shape[1:])

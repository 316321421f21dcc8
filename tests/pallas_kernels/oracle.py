"""The ops once more, in float64 numpy, token by token: independent of the package's references.

Each function takes the arguments of the public op (arrays of any dtype) and returns float64 outputs, the pools it
updates as float64 copies, and a boolean mask of what was written in each pool, over the pool's leading axes
([layer, slot] or [layer, page, place]). Intermediate values are rounded to the activation dtype exactly where the
definition says so. What an op must not read is never touched, so poisoned inputs leave no NaN here.
"""

from __future__ import annotations

import numpy as np

F64 = np.float64


def rounded(x, dtype):
    """Round float64 values to a dtype and return them as float64."""
    return np.asarray(x).astype(np.float32).astype(dtype).astype(F64)


def silu(x):
    return x / (1.0 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0.0, x)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def l2_normalized(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def rms_normalized(x, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def conv_silu(window, weight, dtype):
    """One output of the convolution: window [4, C] oldest first."""
    return rounded(silu(rounded(np.sum(window * weight, axis=0), dtype)), dtype)


def add_rms_norm(x, delta, weight, eps):
    if delta.ndim == 3:
        delta = rounded(delta.astype(F64).sum(0), x.dtype)
    total = rounded(x.astype(F64) + delta.astype(F64), x.dtype)
    return total, rms_normalized(total, eps) * (1.0 + weight.astype(F64))


def swiglu_product(x, weight):
    gate, up = np.split(x.astype(F64) @ weight.astype(F64), 2, axis=1)
    return (silu(gate) * up,)


def gated_rms_norm(x, projected, weight, first, eps):
    z = projected[:, first : first + x.shape[1] * x.shape[2]].astype(F64).reshape(x.shape)
    return rms_normalized(x.astype(F64), eps) * weight.astype(F64) * silu(z)


def causal_conv(x, weight, conv_pool, layer, slot_ids, has_state, cu_seqlens):
    dtype = x.dtype
    x, weight, pool = x[:, : weight.shape[1]].astype(F64), weight.astype(F64), conv_pool.astype(F64)
    y, written = np.zeros_like(x), np.zeros(pool.shape[:2], bool)
    for request, slot in enumerate(slot_ids):
        start, stop = cu_seqlens[request], cu_seqlens[request + 1]
        if start == stop:
            continue
        tail = pool[layer, slot].copy() if has_state[request] else np.zeros_like(pool[layer, slot])
        for token in range(start, stop):
            window = np.concatenate([tail, x[token : token + 1]])
            y[token] = conv_silu(window, weight, dtype)
            tail = window[1:]
        pool[layer, slot], written[layer, slot] = tail, True
    return y, pool, written


def delta_step(state, query, key, value, beta, decay):
    """One token: state [Hv, Dv, Dk] in place of [Hv, Dk, Dv]; everything a head."""
    state = np.exp(decay)[:, None, None] * state
    delta = beta[:, None] * (value - np.einsum("hvk,hk->hv", state, key))
    state = state + delta[:, :, None] * key[:, None, :]
    return np.einsum("hvk,hk->hv", state, query), state


def split_heads(mixed, b, a, A_log, dt_bias, num_k_heads, head_k_dim, num_v_heads):
    """q, k, v, beta and g of one token, all of them a value head."""
    key_dim, group = num_k_heads * head_k_dim, num_v_heads // num_k_heads
    query = l2_normalized(mixed[:key_dim].reshape(num_k_heads, head_k_dim)) * head_k_dim**-0.5
    key = l2_normalized(mixed[key_dim : 2 * key_dim].reshape(num_k_heads, head_k_dim))
    value = mixed[2 * key_dim :].reshape(num_v_heads, -1)
    with np.errstate(over="ignore"):
        decay = -np.exp(A_log.astype(F64)) * softplus(a + dt_bias.astype(F64))
    return np.repeat(query, group, axis=0), np.repeat(key, group, axis=0), value, sigmoid(b), decay


def gdn_prefill(qkv, b, a, A_log, dt_bias, state_pool, layer, slot_ids, has_state, cu_seqlens, num_k_heads, head_k_dim):
    qkv, b, a, pool = (array.astype(F64) for array in (qkv, b, a, state_pool))
    heads, head_v_dim = pool.shape[2], pool.shape[3]
    out, written = np.zeros((len(qkv), heads, head_v_dim)), np.zeros(pool.shape[:2], bool)
    for request, slot in enumerate(slot_ids):
        start, stop = cu_seqlens[request], cu_seqlens[request + 1]
        if start == stop:
            continue
        state = pool[layer, slot].copy() if has_state[request] else np.zeros_like(pool[layer, slot])
        for token in range(start, stop):
            parts = split_heads(qkv[token], b[token], a[token], A_log, dt_bias, num_k_heads, head_k_dim, heads)
            out[token], state = delta_step(state, *parts)
        pool[layer, slot], written[layer, slot] = state, True
    return out, pool, written


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
    num_k_heads,
    head_k_dim,
    eps,
):
    dtype = projected.dtype
    projected, weight = projected.astype(F64), conv_weight.astype(F64)
    tails, states = conv_pool.astype(F64), state_pool.astype(F64)
    heads, values = states.shape[2], states.shape[2] * states.shape[3]
    qkv, z, b, a = np.split(projected, np.cumsum([weight.shape[1], values, heads]), axis=1)
    y, written = np.zeros_like(z), np.zeros(states.shape[:2], bool)
    for row, slot in enumerate(slot_ids):
        if slot == 0:
            continue
        window = np.concatenate([tails[layer, slot], qkv[row : row + 1]])
        mixed = conv_silu(window, weight, dtype)
        parts = split_heads(mixed, b[row], a[row], A_log, dt_bias, num_k_heads, head_k_dim, heads)
        out, states[layer, slot] = delta_step(states[layer, slot], *parts)
        normed = norm_weight.astype(F64) * rms_normalized(rounded(out, dtype), eps)
        y[row] = (normed * silu(z[row].reshape(normed.shape))).reshape(-1)
        tails[layer, slot], written[layer, slot] = window[1:], True
    return y, tails, states, written


def rotated(x, position, rotary_dim, rope_theta):
    """Rotate one token's heads [heads, H]; the angle is a float32 product, as everywhere in this family."""
    half = rotary_dim // 2
    frequencies = (1.0 / rope_theta ** (np.arange(half) * 2.0 / rotary_dim)).astype(np.float32)
    angle = (np.float32(position) * frequencies).astype(F64)
    out = x.copy()
    out[:, :half] = x[:, :half] * np.cos(angle) - x[:, half:rotary_dim] * np.sin(angle)
    out[:, half:rotary_dim] = x[:, half:rotary_dim] * np.cos(angle) + x[:, :half] * np.sin(angle)
    return out


def kv_write(
    heads,
    q_norm,
    k_norm,
    kv_pool,
    layer,
    page_ids,
    page_offsets,
    positions,
    num_heads,
    rotary_dim,
    rope_theta,
    eps,
):
    q_norm, k_norm = (norm[layer] if norm.ndim == 2 else norm for norm in (q_norm, k_norm))
    heads, pool, kv_heads = heads.astype(F64), kv_pool.astype(F64), kv_pool.shape[3]
    q, _, k, v = np.split(heads, np.cumsum([num_heads, num_heads, kv_heads]), axis=1)
    q_out, written = np.zeros_like(q), np.zeros((*pool.shape[:2], pool.shape[4]), bool)
    for token, (page, place, position) in enumerate(zip(page_ids, page_offsets, positions, strict=True)):
        if page == 0:
            continue
        rotation = (position, rotary_dim, rope_theta)
        q_out[token] = rotated(rms_normalized(q[token], eps) * (1.0 + q_norm), *rotation)
        key = rotated(rms_normalized(k[token], eps) * (1.0 + k_norm), *rotation)
        pool[layer, page, 0, :, place], pool[layer, page, 1, :, place] = key, v[token]
        written[layer, page, place] = True
    return q_out, pool, written


def attend(query, keys, values):
    """One token: query [N, H], keys and values [K, S, H]."""
    grouped = query.reshape(len(keys), -1, query.shape[-1])  # [K, N / K, H]
    scores = np.matmul(grouped, np.swapaxes(keys, 1, 2)) * query.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.matmul(weights / weights.sum(axis=-1, keepdims=True), values).reshape(query.shape)


def gather_pages(kv_pool, layer, pages, length):
    """Keys and values of the first positions, [K, length, H] each."""
    size = kv_pool.shape[4]
    used = kv_pool[layer, pages[: -(-length // size)]].astype(F64)  # [pages, 2, K, Z, H]
    used = np.moveaxis(used, 0, 2).reshape(2, used.shape[2], -1, used.shape[4])[:, :, :length]
    return used[0], used[1]


def paged_prefill_attention(q, gates, kv_pool, layer, page_table, cu_seqlens, kv_lens, first_gate=0):
    q, gate = q.astype(F64), gates[:, first_gate : first_gate + q.shape[1]].astype(F64)
    out = np.zeros_like(q)
    for request, length in enumerate(kv_lens):
        start, stop = cu_seqlens[request], cu_seqlens[request + 1]
        if start == stop:
            continue
        keys, values = gather_pages(kv_pool, layer, page_table[request], length)
        for token in range(start, stop):
            seen = length - stop + token + 1
            out[token] = attend(q[token], keys[:, :seen], values[:, :seen]) * sigmoid(gate[token])
    return (out,)


def paged_decode_attention(q, gates, kv_pool, layer, page_table, kv_lens, first_gate=0):
    q, gate = q.astype(F64), gates[:, first_gate : first_gate + q.shape[1]].astype(F64)
    out = np.zeros_like(q)
    for row, length in enumerate(kv_lens):
        if length > 0:
            out[row] = attend(q[row], *gather_pages(kv_pool, layer, page_table[row], length)) * sigmoid(gate[row])
    return (out,)

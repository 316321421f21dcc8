"""What a bfloat16 state costs over many decode steps, against a float64 recurrence.

    python -m pallas_kernels.gdn_decode.drift --model=4b --rows=16 --steps=2000 --output=drift.json

The same random tokens go through :func:`pallas_kernels.gdn_decode` twice, with a float32 and with a bfloat16 state
pool, and through the recurrence in float64, which takes the convolution's rounded results as they are and rounds
nothing after them. All three start from empty states. Gates (``--gates``):

* ``initial``: as the family's gates are initialised before training, ``exp(A_log)`` uniform in 1 .. 16 and
  ``softplus(dt_bias)`` log-uniform in 0.001 .. 0.1, so that heads forget over one to a thousand steps;
* ``mixed``, ``none``: the ranges of the specs; with ``none`` nothing is forgotten but what the delta rule overwrites.

Errors are norms: of a state ||S - S64|| / ||S64|| over all rows and heads, its worst head, and of the output of a step
||y - y64|| / ||y64||. Part of the output's error is the rounding of activations: the float32 state's columns say how
much.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from pallas_kernels import records, registry
from pallas_kernels.gdn_decode.reference import split_projected
from pallas_kernels.gdn_decode.specs import GdnDecodeSpec
from pallas_kernels.numerics import L2_EPSILON, round_to, silu
from pallas_kernels.provenance import current_commit
from pallas_kernels.spec import REAL_MODELS, TINY_MODELS

GATES = ("initial", "mixed", "none")
STATE_DTYPES = ("float32", "bfloat16")
_MARKS_A_DECADE = 4
_DTYPE = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Drift:
    """Errors at some steps of one run.

    Attributes:
        steps: after how many steps, increasing.
        state: relative error of all states at each of them.
        worst_head: relative error of the worst row and head.
        output: relative error of that step's output.
        implementation: what ran.
    """

    steps: tuple[int, ...]
    state: tuple[float, ...]
    worst_head: tuple[float, ...]
    output: tuple[float, ...]
    implementation: str


def marks_of(steps: int) -> tuple[int, ...]:
    """Steps at which errors are read: 1, a few each decade, the last."""
    decades = math.log10(steps)
    return tuple(
        sorted({round(10 ** (n / _MARKS_A_DECADE)) for n in range(int(decades * _MARKS_A_DECADE) + 1)} | {steps})
    )


def arguments_of(spec: GdnDecodeSpec, gates: str, seed: int) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Arguments of the op with empty states and tails, without ``projected``; and its options."""
    case = dataclasses.replace(spec, decay="mixed" if gates == "initial" else gates).case(seed)
    arguments = {name: jnp.asarray(array) for name, array in case.arguments.items() if name != "projected"}
    for name in spec.pools:
        arguments[name] = jnp.zeros_like(arguments[name])
    if gates == "initial":
        draw = np.random.default_rng(seed)
        heads = spec.model.num_v_heads
        step = np.exp(draw.uniform(np.log(1e-3), np.log(0.1), heads))
        arguments["A_log"] = jnp.asarray(np.log(draw.uniform(1.0, 16.0, heads)), jnp.float32)
        arguments["dt_bias"] = jnp.asarray(np.log(np.expm1(step)), jnp.float32)  # the inverse of softplus
    return arguments, case.options


def tokens_of(spec: GdnDecodeSpec, seed: int, step: jax.Array) -> jax.Array:
    """What the layer's projection would give at a step: normal, the decay's input a quarter as wide."""
    model = spec.model
    width = model.conv_dim + model.value_dim + 2 * model.num_v_heads
    # Dtypes are spelt out: the float64 recurrence must draw the same numbers.
    draw = jax.random.normal(jax.random.fold_in(jax.random.key(seed), step), (spec.num_rows, width), jnp.float32)
    scale = jnp.where(jnp.arange(width) < width - model.num_v_heads, jnp.float32(1.0), jnp.float32(0.25))
    return (draw * scale).astype(spec.dtype)


def exact_step(spec: GdnDecodeSpec, arguments, projected, tail, state, *, eps: float):
    """One step in float64, the convolution excepted; states are [B, Hv, Dv, Dk], tails [B, 3, C]."""
    model, rows = spec.model, spec.num_rows
    heads, group = model.num_v_heads, model.num_v_heads // model.num_k_heads
    qkv, z, b, a = split_projected(projected, model.conv_dim, heads)
    window = jnp.concatenate([tail, qkv[:, None]], axis=1)
    weight = arguments["conv_weight"].astype(jnp.float32)
    conv = window[:, 0].astype(jnp.float32) * weight[0]
    for tap in range(1, 4):
        conv += window[:, tap].astype(jnp.float32) * weight[tap]
    mixed = round_to(silu(round_to(conv, qkv.dtype)), qkv.dtype).astype(jnp.float64)
    key_dim = model.num_k_heads * model.head_k_dim

    def of_value_heads(part):
        part = part.reshape(rows, model.num_k_heads, model.head_k_dim)
        part = part * lax.rsqrt(jnp.sum(part * part, axis=-1, keepdims=True) + L2_EPSILON)
        return jnp.repeat(part, group, axis=1)

    query, key = of_value_heads(mixed[:, :key_dim]), of_value_heads(mixed[:, key_dim : 2 * key_dim])
    value = mixed[:, 2 * key_dim :].reshape(rows, heads, model.head_v_dim)
    z, b, a, A_log, dt_bias, norm_weight = (
        array.astype(jnp.float64)
        for array in (z, b, a, arguments["A_log"], arguments["dt_bias"], arguments["norm_weight"])
    )
    state = state * jnp.exp(-jnp.exp(A_log) * jnp.logaddexp(0.0, a + dt_bias))[..., None, None]
    delta = lax.logistic(b)[..., None] * (value - jnp.sum(state * key[:, :, None], axis=-1))
    state = state + delta[..., None] * key[:, :, None]
    out = jnp.sum(state * query[:, :, None], axis=-1) * model.head_k_dim**-0.5
    normed = norm_weight * out * lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps)
    return (normed * silu(z).reshape(normed.shape)).reshape(rows, -1), window[:, 1:], state


def measure(
    spec: GdnDecodeSpec, gates: str, steps: int, implementation: str = registry.AUTO, seed: int = 0
) -> dict[str, Drift]:
    """Run the steps; the drift by dtype of the state."""
    arguments, options = arguments_of(spec, gates, seed)
    rest = {name: array for name, array in arguments.items() if name not in spec.pools}
    model, marks = spec.model, marks_of(steps)

    # One program for each dtype of the pool.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def advance(conv_pool, state_pool, begin, end, rest):
        def one(step, carry):
            tokens = tokens_of(spec, seed, step)
            pools = dict(zip(spec.pools, carry[1:], strict=True))
            return pallas_kernels.gdn_decode(tokens, **rest, **pools, **options, implementation=implementation)

        out = jnp.zeros((spec.num_rows, model.value_dim), spec.dtype)
        return lax.fori_loop(begin, end, one, (out, conv_pool, state_pool))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def advance_exact(tail, state, begin, end, rest):
        def one(step, carry):
            return exact_step(spec, rest, tokens_of(spec, seed, step), *carry[1:], eps=options["eps"])

        out = jnp.zeros((spec.num_rows, model.value_dim), jnp.float64)
        return lax.fori_loop(begin, end, one, (out, tail, state))

    @jax.jit
    def errors(out, state_pool, exact_out, exact_state, slot_ids):
        state = state_pool[spec.num_layers - 1, slot_ids].astype(jnp.float64)
        off, norm = (jnp.sum(array**2, axis=(2, 3)) for array in (state - exact_state, exact_state))
        of_output = jnp.sum((out.astype(jnp.float64) - exact_out) ** 2) / jnp.sum(exact_out**2)
        return jnp.sqrt(jnp.sum(off) / jnp.sum(norm)), jnp.sqrt(jnp.max(off / norm)), jnp.sqrt(of_output)

    pools = {dtype: (arguments["conv_pool"] + 0, arguments["state_pool"].astype(dtype) * 0) for dtype in STATE_DTYPES}
    found: dict[str, list[tuple[float, ...]]] = {dtype: [] for dtype in STATE_DTYPES}
    with jax.enable_x64(True):
        tail = jnp.zeros((spec.num_rows, 3, model.conv_dim), spec.dtype)
        state = jnp.zeros((spec.num_rows, *arguments["state_pool"].shape[2:]), jnp.float64)
    for begin, end in zip((0, *marks), marks, strict=False):
        span = jnp.int32(begin), jnp.int32(end)
        with jax.enable_x64(True):
            exact_out, tail, state = advance_exact(tail, state, *span, rest)
        for dtype in STATE_DTYPES:
            out, *pools[dtype] = advance(*pools[dtype], *span, rest)
            with jax.enable_x64(True):
                figures = errors(out, pools[dtype][1], exact_out, state, rest["slot_ids"])
            found[dtype].append(tuple(map(float, figures)))
    tokens = jax.eval_shape(functools.partial(tokens_of, spec, seed), jnp.int32(0))
    chosen = registry.get_op(spec.op).select(implementation, arguments | options | {"projected": tokens}).name
    return {dtype: Drift(marks, *zip(*rows, strict=True), chosen) for dtype, rows in found.items()}


def table(found: dict[str, Drift]) -> str:
    """The errors as text."""
    lines = [f"{'':>6}" + "".join(f"  {name + ' state':^34}" for name in found)]
    lines.append(f"{'step':>6}" + f"  {'states':>10}  {'worst head':>10}  {'output':>10}" * len(found))
    for index, step in enumerate(next(iter(found.values())).steps):
        columns = (
            f"  {d.state[index]:>10.2e}  {d.worst_head[index]:>10.2e}  {d.output[index]:>10.2e}" for d in found.values()
        )
        lines.append(f"{step:>6}" + "".join(columns))
    return "\n".join(lines)


def record(
    spec: GdnDecodeSpec,
    gates: str,
    found: dict[str, Drift],
    command: str,
    commit: str,
    seed: int,
    variant: str = "",
) -> dict[str, Any]:
    """A record of the project's results files, cell ``drift/gdn_decode/<spec>-<gates>`` with the suffix ``variant``.

    The float32 state is held to 1e-3 at every step: beyond it the kernel is wrong, not imprecise.
    """
    low, full = found["bfloat16"], found["float32"]
    wrong = next(([step, error] for step, error in zip(full.steps, full.state, strict=True) if not error < 1e-3), None)
    wrong = wrong or next(([n, e] for n, e in zip(low.steps, low.state, strict=True) if not math.isfinite(e)), None)
    metrics: dict[str, Any] = {
        "state_error": low.state[-1],
        "worst_head_error": low.worst_head[-1],
        "output_error": low.output[-1],
        "float32_state_error": full.state[-1],
        "float32_output_error": full.output[-1],
        "steps": list(low.steps),
        "curves": {
            name: {"state": list(one.state), "worst_head": list(one.worst_head), "output": list(one.output)}
            for name, one in found.items()
        },
    }
    settings = {
        "implementation": low.implementation,
        "dtype": spec.dtype,
        "gates": gates,
        "rows": spec.num_rows,
        "steps": low.steps[-1],
        "seed": seed,
    }
    checks = {"rows_compared": spec.num_rows, "first_mismatch": wrong, "skipped": 0}
    cell = f"drift/gdn_decode/{spec.name}-{gates}{variant}"
    return records.result(cell, metrics, settings, checks, command, commit)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns 1 if the float32 state is off."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.gdn_decode.drift", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default="4b", choices=[*REAL_MODELS, *TINY_MODELS])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--gates", default="initial,none", help=f"some of {', '.join(GATES)}, with commas between them")
    parser.add_argument(
        "--dtype",
        default=_DTYPE,
        choices=list(records.DTYPE_SUFFIXES),
        help="of activations; another than the default is in the name of the cell",
    )
    parser.add_argument(
        "--implementation", default=registry.AUTO, help="by name, which then is in the name of the cell"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default=None, help="JSON file to append the records to")
    options = parser.parse_args(argv)
    wanted = options.gates.split(",")
    if unknown := [name for name in wanted if name not in GATES]:
        parser.error(f"--gates: {unknown[0]!r} is none of {', '.join(GATES)}")
    if options.rows < 1 or options.steps < 1:
        parser.error("--rows and --steps must be positive")
    try:
        file = records.ResultsFile(options.output)
    except ValueError as error:
        parser.error(f"--output: {error}")
    spec = GdnDecodeSpec(
        name=f"{options.model}-rows{options.rows}",
        model=(REAL_MODELS | TINY_MODELS)[options.model],
        num_rows=options.rows,
        dtype=options.dtype,
    )
    command = shlex.join(["python", "-m", "pallas_kernels.gdn_decode.drift", *(sys.argv[1:] if argv is None else argv)])
    commit, kept = current_commit(), list[dict[str, Any]]()
    variant = records.variant(
        dtype=None if options.dtype == _DTYPE else options.dtype,
        implementation=None if options.implementation == registry.AUTO else options.implementation,
    )
    for gates in wanted:
        found = measure(spec, gates, options.steps, options.implementation, options.seed)
        kept.append(record(spec, gates, found, command, commit, options.seed, variant))
        file.keep(kept)
        print(f"{spec.name}, gates {gates}, {found['bfloat16'].implementation} on {jax.devices()[0].device_kind}")
        print(table(found), flush=True)
    return 1 if any(item["checks"]["first_mismatch"] for item in kept) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Rates of a prefill's matrix products for as long as a job goes on: what the limit of power leaves of them.

A GPU that comes out of a pause multiplies faster than it can go on to: its clock falls until the board draws what it
may. So every rate is there twice, of the first program after a pause (in which the clock may already fall) and of
programs that follow a second or more of the same work, and beside the second stand clock and power. Zeros cost less
power than random numbers: what they gain is the least that the limit takes.

Products: those of the model's layers by name, each alone, with weights in turns that the cache does not hold; the
``chain`` of all layers with activations, residual sums and norms (attention and the delta rule are left out, each
output projection reads the same tokens); and ``square``, as large a product as libraries are tuned for.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import registry, swiglu_product
from pallas_kernels.ceilings import COLD_BYTES
from qwen35_jax.bench import floors
from qwen35_jax.bench.clocks import Clocks, Reading
from qwen35_jax.config import ModelConfig
from qwen35_jax.layers.linear import linear
from qwen35_jax.layers.parameters import INIT_STDDEV
from qwen35_jax.model import add_norm
from qwen35_jax.shapes import Activations, Matrix

CHAIN, SQUARE, GATE_UP = "chain", "square", "gate_up"
DTYPE = "bfloat16"
"""Of everything that is multiplied."""
_PROGRAM_FLOPS = 3e13  # of a product's program: with 40 ms on an H200 its dispatch is no part of its time
_MOST_WEIGHTS, _MOST_CALLS = 32, 512  # of few tokens a program is short rather than long to compile


@dataclasses.dataclass(frozen=True)
class Product:
    """A program of products.

    Attributes:
        name: of what is multiplied.
        run: one run of it; ``(sum of an output's number a product, last output)``.
        flops: of its products.
    """

    name: str
    run: Callable[[], tuple[jax.Array, jax.Array]]
    flops: int


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast a program multiplied.

    Attributes:
        first: FLOP/s of the first run after a pause.
        lasting: FLOP/s of runs that follow others, the median of the samples.
        spread: (fastest - slowest) / median of the samples.
        clocks: of the device during the samples, see :attr:`~qwen35_jax.bench.clocks.Clocks.figures`.
    """

    first: float
    lasting: float
    spread: float
    clocks: Mapping[str, float]

    @property
    def metrics(self) -> dict[str, Any]:
        """As a record has them."""
        rates = {"tflop_s": self.lasting / 1e12, "first_tflop_s": self.first / 1e12, "spread": self.spread}
        return rates | ({"clocks": dict(self.clocks)} if self.clocks else {})


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long things last, in seconds.

    Attributes:
        pause: before the first run.
        settle: runs between it and the samples.
        sample: of each.
        samples: how many, at least one.
    """

    pause: float = 1.5
    settle: float = 1.5
    sample: float = 0.4
    samples: int = 5


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Inner dimension and columns of the products of a model's layers, by name."""
    hidden, attention, gdn = config.hidden_size, config.attention, config.gdn
    heads = attention.num_heads * attention.head_dim
    return {
        "in_proj": (hidden, gdn.conv_dim + gdn.value_dim + 2 * gdn.num_v_heads),
        "qkv_proj": (hidden, 2 * heads + 2 * attention.num_kv_heads * attention.head_dim),
        "out_proj": (gdn.value_dim, hidden),
        "o_proj": (heads, hidden),
        GATE_UP: (hidden, 2 * config.intermediate_size),
        "down": (config.intermediate_size, hidden),
    }


def names_of(config: ModelConfig) -> tuple[str, ...]:
    """The products that can be asked for: of those of one shape the first; all in their order; the square one."""
    first: dict[tuple[int, int], str] = {}
    for name, shape in shapes_of(config).items():
        first.setdefault(shape, name)
    return (*first.values(), CHAIN, SQUARE)


@functools.partial(jax.jit, static_argnames=("shape", "zeros"))
def _drawn(key: jax.Array, shape: tuple[int, ...], scale: float, zeros: bool) -> jax.Array:
    """Normal numbers, in their dtype from the start: a large weight in fp32 beside it would be twice its size."""
    if zeros:
        return jnp.zeros(shape, DTYPE)
    return jax.random.normal(key, shape, jnp.dtype(DTYPE)) * jnp.asarray(scale, DTYPE)


def _swiglu(kernels: str) -> Callable[[Activations, Matrix], Activations]:
    return functools.partial(swiglu_product, implementation=registry.implementation_of(kernels, "swiglu_product"))


def _counted(total: jax.Array, out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One number of an output more in the sum: else the compiler would drop the product, or make but the number."""
    out, total = lax.optimization_barrier((out, total))
    return total + out.ravel()[0].astype(jnp.float32), out


def alone(name: str, config: ModelConfig, tokens: int, *, kernels: str = "auto", zeros: bool = False) -> Product:
    """One of the model's products, or the ``square`` one of ``tokens`` in every direction, again and again.

    Args:
        name: of :func:`names_of`, but for the chain.
        config: the model.
        tokens: rows.
        kernels: of ``gate_up``, which has its activation: implementation of ``swiglu_product``.
        zeros: multiply zeros.
    """
    inner, columns = (tokens, tokens) if name == SQUARE else shapes_of(config)[name]
    flops, size = 2 * tokens * inner * columns, inner * columns * jnp.dtype(DTYPE).itemsize
    x_key, *keys = jax.random.split(jax.random.key(0), 1 + min(_MOST_WEIGHTS, max(2, -(-COLD_BYTES // size))))
    # As the model has them: tokens out of a norm, weights of its initialisation.
    x = _drawn(x_key, (tokens, inner), 1.0, zeros)
    weights = [_drawn(key, (inner, columns), INIT_STDDEV, zeros) for key in keys]
    product = _swiglu(kernels) if name == GATE_UP else functools.partial(linear, scope=name)
    return repeated(name, product, x, weights, flops)


def repeated(
    name: str,
    product: Callable[[Activations, Matrix], Activations],
    x: Activations,
    weights: Sequence[Matrix],
    flops: int,
) -> Product:
    """A product again and again with the weights in turns: some 40 ms on a GPU, elsewhere once with each.

    Args:
        name: of it.
        product: ``(x, weight) -> output``.
        x: ``[M, K]``.
        weights: ``[K, N]`` each.
        flops: of one call.
    """
    calls = len(weights)
    if x.device.platform == "gpu":
        calls = max(calls, min(_MOST_CALLS, round(_PROGRAM_FLOPS / flops)))

    @jax.jit
    def program(x, weights):
        total = jnp.float32(0)
        for number in range(calls):
            x, weights, total = lax.optimization_barrier((x, weights, total))
            total, out = _counted(total, product(x, weights[number % len(weights)]))
        return total, out

    return Product(name, functools.partial(program, x, list(weights)), flops * calls)


def chain(config: ModelConfig, tokens: int, *, kernels: str = "auto", zeros: bool = False) -> Product:
    """The products of all layers in the model's order, with activations, residual sums and norms.

    Args:
        config: the model.
        tokens: rows.
        kernels: implementations of ``swiglu_product`` and ``add_rms_norm``, as ``EngineConfig.kernels``.
        zeros: multiply zeros (norms of zeros are zeros).
    """
    hidden, shapes = config.hidden_size, shapes_of(config)
    names = {"linear_attention": ("in_proj", "out_proj"), "full_attention": ("qkv_proj", "o_proj")}
    keys = iter(jax.random.split(jax.random.key(0), 3 + 4 * config.num_layers))
    layers = [
        {name: _drawn(next(keys), shapes[name], INIT_STDDEV, zeros) for name in (*names[kind], GATE_UP, "down")}
        for kind in config.layer_types
    ]
    # What attention and the delta rule would give, by its width.
    mixed = {
        width: _drawn(next(keys), (tokens, width), 1.0, zeros)
        for width in sorted({shapes["out_proj"][0], shapes["o_proj"][0]})
    }
    x = _drawn(next(keys), (tokens, hidden), 1.0, zeros)
    unit = jnp.zeros((hidden,), jnp.float32)  # of a norm with 1 + w
    swiglu = _swiglu(kernels)

    @jax.jit
    def program(x, mixed, layers):
        total, delta = jnp.float32(0), None
        for kind, layer in zip(config.layer_types, layers, strict=True):
            into, out_of = names[kind]
            x, normed = add_norm(x, delta, unit, config.rms_norm_eps, kernels)
            total, _ = _counted(total, linear(normed, layer[into], into))
            # Behind the product, as in a model.
            own, total = lax.optimization_barrier((mixed[shapes[out_of][0]], total))
            x, normed = add_norm(x, linear(own, layer[out_of], out_of), unit, config.rms_norm_eps, kernels)
            delta = linear(swiglu(normed, layer[GATE_UP]), layer["down"], "down")
        return total, x + delta

    return Product(CHAIN, functools.partial(program, x, mixed, layers), 2 * tokens * floors.layer_parameters(config))


def measure(product: Product, timing: Timing, read: Callable[[], Reading] | None = None) -> Rate:
    """Run a program after a pause, then go on until its rate is a lasting one.

    Args:
        product: what to run; it is compiled first.
        timing: how long.
        read: of the device's clock and power.
    """
    jax.block_until_ready(product.run())
    time.sleep(timing.pause)
    first = _seconds(product, 1)
    runs = max(1, round(timing.sample / first))
    settled = time.perf_counter() + timing.settle
    while time.perf_counter() < settled:
        _seconds(product, runs)
    with Clocks(read) as clocks:
        samples = [_seconds(product, runs) / runs for _ in range(timing.samples)]
    middle = statistics.median(samples)
    spread = (max(samples) - min(samples)) / middle
    return Rate(product.flops / first, product.flops / middle, spread, clocks.figures)


def _seconds(product: Product, runs: int) -> float:
    begun = time.perf_counter()
    jax.block_until_ready([product.run() for _ in range(runs)])
    return time.perf_counter() - begun


def difference(ours: Product, reference: Product) -> float:
    """Distance of the last outputs of two programs on the same numbers, of the reference's length (Euclidean, fp32)."""
    one, other = (product.run()[1] for product in (ours, reference))
    return float(_relative(one, other))


@jax.jit
def _relative(one: jax.Array, other: jax.Array) -> jax.Array:
    one, other = one.astype(jnp.float32), other.astype(jnp.float32)
    return jnp.linalg.norm(one - other) / jnp.maximum(jnp.linalg.norm(other), jnp.finfo(jnp.float32).tiny)

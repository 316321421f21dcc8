"""What every implementation of an op must satisfy, and how far each may be from the float64 oracle.

`check(op, implementation, case)` runs one case and compares outputs and pools with the oracle, and demands that
whatever was not written is identical to the last bit, NaN payloads included.

Errors are |got - want| / (|want| + rms(want)), the worst element. Why these bars:

* float32: unit roundoff is 6e-8. A convolution adds four products (bar 1e-6: a few roundings and the exponential of
  SiLU; worst seen 2.2e-7). Norms and rotations add 128 or 256 squares and a rotation whose angle is itself a float32
  product, of which the oracle takes the rounded value (2e-6; seen 2.2e-7). Attention adds up to thousands of
  exponentials of scores that carry 256 products (1e-5; seen 6.4e-6); a score's error is the exponential's relative
  error, so queries 40 times as large have 40 times the bar. The delta rule adds 128 products a read and 64 a chunk,
  feeds errors back through the triangular solve, and normalises keys; because the rule contracts, the bar needs no
  growth with length or without decay (1e-5; seen 3.7e-6).
* bfloat16 / float16 (unit roundoff 2^-9 / 2^-12): inputs are the same numbers for the oracle, so an output that is
  rounded once is within one roundoff, bar two. Where a value is rounded before it is used (conv before SiLU, o before
  its norm) float32 and float64 may fall on two sides of a tie, one unit in the last place: bar four roundoffs.
* pools in float32 keep the float32 bar where nothing upstream was rounded.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import registry
from pallas_kernels.spec import Case, tiny_specs_of
from tests.pallas_kernels import oracle

OPS = tuple(op.name for op in registry.all_ops())
# They work on a layer of a pool.
POOL_OPS = tuple(op for op in OPS if op not in ("add_rms_norm", "gated_rms_norm", "swiglu_product"))
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Bars of an implementation.

    Attributes:
        exact: bar of results that are float32 and have only float32 roundings upstream.
        roundoffs: bar of results in or behind a 16-bit dtype, in roundoffs of that dtype.
        from_bfloat16: bar of float32 results for bfloat16 activations, where an implementation spends less on them
            than on float32 ones.
    """

    exact: float
    roundoffs: float
    from_bfloat16: float | None = None


TOLERANCES: dict[tuple[str, str], Tolerance] = {
    # A sum of up to thousands of squares, all of one sign. In 16 bits the sum's own rounding is the oracle's.
    ("add_rms_norm", "reference"): Tolerance(exact=1e-6, roundoffs=2),
    ("add_rms_norm", "mosaic_sm90"): Tolerance(exact=1e-6, roundoffs=2),
    ("causal_conv", "reference"): Tolerance(exact=1e-6, roundoffs=4),
    ("gated_rms_norm", "reference"): Tolerance(exact=2e-6, roundoffs=2),
    ("gated_rms_norm", "mosaic_sm90"): Tolerance(exact=2e-6, roundoffs=2),
    ("gdn_prefill", "reference"): Tolerance(exact=1e-5, roundoffs=2),
    ("gdn_decode", "reference"): Tolerance(exact=1e-5, roundoffs=4),
    ("kv_write", "reference"): Tolerance(exact=2e-6, roundoffs=2),
    ("paged_prefill_attention", "reference"): Tolerance(exact=1e-5, roundoffs=2),
    ("paged_decode_attention", "reference"): Tolerance(exact=1e-5, roundoffs=2),
    # Gate, up and their product are each rounded, and a SiLU passes on up to 1.28 times the relative error of its
    # argument: 2 + 2 + 2.6 roundoffs at the most, beside the little that a few hundred products leave in float32.
    ("swiglu_product", "reference"): Tolerance(exact=1e-5, roundoffs=7),
    # The Mosaic kernels are held to the bars of the references.
    ("causal_conv", "mosaic_sm90"): Tolerance(exact=1e-6, roundoffs=4),
    ("causal_conv", "mosaic_stream"): Tolerance(exact=1e-6, roundoffs=4),
    ("gdn_decode", "mosaic_sm90"): Tolerance(exact=1e-5, roundoffs=4),
    ("gdn_decode", "triton"): Tolerance(exact=1e-5, roundoffs=4),
    # For bfloat16 activations the states and what multiplies them are carried as two bfloat16 numbers, 16 bits of
    # mantissa (3e-5 seen on random inputs, 1.4e-4 where all keys are equal); for all others as three (2e-6 seen).
    ("gdn_prefill", "triton"): Tolerance(exact=1e-5, roundoffs=2, from_bfloat16=3e-4),
    ("gdn_prefill", "mosaic_sm90"): Tolerance(exact=1e-5, roundoffs=2, from_bfloat16=3e-4),  # bfloat16 alone
    ("kv_write", "triton"): Tolerance(exact=2e-6, roundoffs=2),
    ("kv_write", "mosaic_sm90"): Tolerance(exact=2e-6, roundoffs=2),
    # Away from the diagonal the softmax weights meet the values rounded to the activation dtype: each term of the sum
    # is a roundoff off before the sum itself is rounded, and where large terms cancel that counts more than once. The
    # worst of 280,000 elements, drawn 16 times: 2.3 to 3.5 roundoffs, once 4.1. In float32 products are three products
    # of TF32 parts (21 bits), 32k terms in a row on the longest prefix of this suite.
    ("paged_prefill_attention", "triton"): Tolerance(exact=3e-5, roundoffs=5),
    # Weights are rounded to the activation dtype, except for queries of at most 128 keys (16-bit activations only).
    ("paged_prefill_attention", "mosaic_sm90"): Tolerance(exact=3e-5, roundoffs=4),
    ("paged_decode_attention", "triton"): Tolerance(exact=1e-5, roundoffs=2),
    ("swiglu_product", "mosaic_sm90"): Tolerance(exact=1e-5, roundoffs=2),  # rounded once
}


@functools.cache
def implementations(op: str) -> tuple[str, ...]:
    """Implementations that take at least one tiny spec of the op on this machine's default device."""
    specs = [dataclasses.replace(spec, dtype=d) for spec in tiny_specs_of(op).values() for d in ("bfloat16", "float32")]
    cases = [host(spec.case()) for spec in specs]
    return tuple(
        name
        for name, implementation in registry.get_op(op).implementations.items()
        if any(accepts(implementation, case) for case in cases)
    )


def accepts(implementation: registry.Implementation, case: Case) -> bool:
    """Whether an implementation takes a case on the default device."""
    try:
        implementation.supports(registry.current_target(), case.arguments | case.options)
    except registry.UnsupportedArguments:
        return False
    return True


def every_implementation(op: str):
    """Parametrise a test over the implementations of an op that can run here."""
    return pytest.mark.parametrize("implementation", implementations(op))


def call(op: str, implementation: str, case: Case) -> tuple[np.ndarray, ...]:
    """Run the public op; always a tuple of numpy arrays. A case that an implementation declines is skipped, by name."""
    function = getattr(pallas_kernels, op)
    try:
        results = function(**case.arguments, **case.options, implementation=implementation)
    except registry.UnsupportedArguments as refusal:
        if implementation == registry.REFERENCE:
            raise  # the definition takes everything
        pytest.skip(f"declined: {refusal}")
    return tuple(np.asarray(result) for result in (results if isinstance(results, tuple) else (results,)))


def host(case: Case, **changes: Any) -> Case:
    """The case with numpy arrays (writable) and some arguments replaced."""
    unknown = set(changes) - set(case.arguments)
    assert not unknown, f"no such arguments: {unknown}"
    return Case({name: np.array(changes.get(name, array)) for name, array in case.arguments.items()}, case.options)


def worst_error(got, want) -> float:
    """Largest |got - want| / (|want| + rms(want)); infinite where one of them is not finite."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape, f"shapes {got.shape} and {want.shape}"
    if want.size == 0:
        return 0.0
    error = np.abs(got - want) / (np.abs(want) + np.sqrt(np.mean(want**2)) + 1e-30)
    return float(np.where(np.isfinite(error), error, np.inf).max())


def tolerance(op: str, implementation: str, dtype, *, after_rounding: bool = False, activations=None) -> float:
    """Bar for a result of a dtype; ``after_rounding`` if activations were rounded upstream of it."""
    assert (op, implementation) in TOLERANCES, f"write down the tolerance of {op}/{implementation}"
    bars = TOLERANCES[op, implementation]
    exact = bars.from_bfloat16 if activations == jnp.bfloat16 and bars.from_bfloat16 is not None else bars.exact
    found = max(
        bars.roundoffs * ROUNDOFF[jnp.dtype(dtype).name] if jnp.dtype(dtype).itemsize < 4 else exact,
        bars.roundoffs * ROUNDOFF[jnp.dtype(activations).name]
        if after_rounding and jnp.dtype(activations).itemsize < 4
        else 0.0,
    )
    return found


def assert_close(op: str, implementation: str, got, want, *, name: str, scale: float = 1.0, **options) -> None:
    error, bar = worst_error(got, want), scale * tolerance(op, implementation, np.asarray(got).dtype, **options)
    assert error <= bar, f"{op}/{implementation}: {name} is {error:.2e} off, bar {bar:.2e}"


def with_excess_precision(function, *arguments):
    """What a function gives where conversions to 16 bits and back are left out, as XLA's GPU compiler does."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    values = dict(zip(jaxpr.jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.jaxpr.eqns:
        inputs = [one.val if hasattr(one, "val") else values[one] for one in equation.invars]
        primitive, parameters = equation.primitive, dict(equation.params)
        if primitive is jax.lax.convert_element_type_p and inputs[0].dtype == jnp.float32:
            outputs = inputs
        else:
            assert not any("jaxpr" in name for name in parameters), f"{primitive} is not looked into"
            outputs = primitive.bind(*inputs, **parameters)
            outputs = outputs if primitive.multiple_results else [outputs]
        values |= zip(equation.outvars, outputs, strict=True)
    return [values[one].astype(one.aval.dtype) for one in jaxpr.jaxpr.outvars]


def share_of_equal_bits(got: np.ndarray, want: np.ndarray) -> float:
    """Share of elements that are the rounded float64 value to the last bit.

    Near 1 where a 16-bit result has the oracle's rounding points (float32 and float64 rarely fall on two sides of a
    tie), and far below where one is missing or added.
    """
    return float(np.mean(bits(got) == bits(want.astype(np.float32).astype(got.dtype))))


def bits(array) -> np.ndarray:
    """The raw bits, so that NaN equals the same NaN."""
    array = np.ascontiguousarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def assert_same_bits(got, want, name: str) -> None:
    np.testing.assert_array_equal(bits(got), bits(want), err_msg=f"{name} changed")


def _axes_first(op: str, array: np.ndarray) -> np.ndarray:
    """A pool with the axes of the oracle's ``written`` mask in front."""
    return np.moveaxis(array, 4, 2) if op == "kv_write" else array


def check(op: str, implementation: str, case: Case, *, scale: float = 1.0) -> tuple[np.ndarray, ...]:
    """Run a case, compare it with the oracle, and return the results."""
    case = host(case)
    want = getattr(oracle, op)(**case.arguments, **case.options)
    got = call(op, implementation, case)
    activations = next(array.dtype for array in case.arguments.values())  # an op's tokens come first
    assert got[0].dtype == activations
    assert not np.isnan(want[0]).any(), "the oracle read something poisoned: a fault of the test"
    assert_close(op, implementation, got[0], want[0], name="output", scale=scale)
    assert not got[0][want[0] == 0].any(), f"{op}/{implementation}: outputs of pads are not zero"

    pools = {"causal_conv": ["conv_pool"], "gdn_prefill": ["state_pool"], "kv_write": ["kv_pool"]}
    names = pools.get(op, ["conv_pool", "state_pool"] if op == "gdn_decode" else [])
    assert len(got) == 1 + len(names)
    written = want[-1]
    for name, new, expected in zip(names, got[1:], want[1:], strict=False):
        old = case.arguments[name]
        assert new.dtype == old.dtype and new.shape == old.shape
        new, old, expected = (_axes_first(op, array) for array in (new, old, expected))
        behind = op == "gdn_decode" and name == "state_pool"  # its keys and values were rounded by the convolution
        options = {"after_rounding": behind, "activations": activations}
        assert_close(op, implementation, new[written], expected[written], name=name, scale=scale, **options)
        untouched = ~written
        untouched[case.arguments["layer"], 0] = False  # the null slot or page of this layer: unspecified
        assert_same_bits(new[untouched], old[untouched], f"{op}/{implementation}: an untouched part of {name}")
    return got

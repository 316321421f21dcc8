"""The kernels beside other libraries: ``pallas_kernels.bench`` with what they take for the same work, in one run.

    python scripts/bench_peers.py --spec='4b-*' --output=benchmarks/results/kernels.json

Flags are those of ``python -m pallas_kernels.bench``; records get ``peer_us``. All of our own times come first: one of
a peer that fails is left out, and the exit code is 1. The peers, which are imported only here:

* ``gdn_prefill``: flash-linear-attention's ``chunk_gated_delta_rule`` (packages ``fla-core``, ``einops``, ``torch``) on
  heads, lengths and states of the spec, its own normalisation of queries and keys switched on, gates ready made;
* ``paged_prefill_attention``: cuDNN through ``jax.nn.dot_product_attention``, dense keys and values, no gate, where all
  requests are equally long and have no prefix.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from pallas_kernels import bench  # noqa: E402
from pallas_kernels.gdn_prefill.specs import GdnPrefillSpec  # noqa: E402
from pallas_kernels.paged_prefill_attention.specs import PagedPrefillAttentionSpec  # noqa: E402
from pallas_kernels.spec import Spec  # noqa: E402

_CALLS, _SAMPLES = 20, 5
FLASH_LINEAR_ATTENTION = {"torch": "torch", "einops": "einops", "fla": "fla-core"}
"""Modules of that peer and the packages that have them."""


class MissingPeer(ImportError):
    """A library that was to be timed is not here; the message names it."""


def check(specs: Sequence[Spec]) -> None:
    """Look for the libraries that specs need, without importing them: our own kernels must not run beside them.

    Raises:
        MissingPeer: one is not installed.
    """
    if any(isinstance(spec, GdnPrefillSpec) for spec in specs):
        for module, package in FLASH_LINEAR_ATTENTION.items():
            if importlib.util.find_spec(module) is None:
                raise MissingPeer(f"flash-linear-attention cannot be timed without {module} (package {package})")


def measure(spec: Spec) -> bench.Peer | None:
    """The peer for the work of a spec, timed, or None where there is none."""
    if isinstance(spec, GdnPrefillSpec):
        return bench.Peer("flash-linear-attention", flash_linear_attention(spec))
    if isinstance(spec, PagedPrefillAttentionSpec) and is_dense(spec):
        return bench.Peer("cuDNN, dense", dense_attention(spec), dense_attention(spec, gated=True))
    return None


def is_dense(spec: PagedPrefillAttentionSpec) -> bool:
    """Whether a pack is a batch of equally long prompts without prefixes."""
    return len(set(spec.lengths)) == 1 and not any(spec.prefixes or ()) and not spec.num_pads


def dense_attention(spec: PagedPrefillAttentionSpec, implementation: str = "cudnn", *, gated: bool = False) -> float:
    """Microseconds of ``jax.nn.dot_product_attention`` on the shapes of a spec.

    Each call's output is the next one's query, so that none can begin early.

    Args:
        spec: a dense one.
        implementation: of ``jax.nn.dot_product_attention``.
        gated: the output is multiplied by the logistic function of a gate, as the op's is, which XLA computes in one
            kernel more.
    """
    model, batch, length = spec.model, len(spec.lengths), spec.lengths[0]
    keys = jax.random.split(jax.random.key(0), 4)
    heads_of = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
    q, k, v, gate = (
        jax.random.normal(key, (batch, length, heads, model.head_dim)).astype(spec.dtype)
        for key, heads in zip(keys, heads_of, strict=True)
    )

    @jax.jit
    def several(q, k, v, gate):
        for _ in range(_CALLS):
            q = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
            if gated:
                q = (q.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(q.dtype)
        return q

    return _middle(lambda: jax.block_until_ready(several(q, k, v, gate)), _CALLS)


def flash_linear_attention(spec: GdnPrefillSpec) -> float:
    """Microseconds of ``chunk_gated_delta_rule`` on a pack like the spec's, initial states in and final states out."""
    torch, chunk = _needed("torch"), _needed("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    model, tokens, requests = spec.model, sum(spec.lengths), len(spec.lengths)
    dtype = getattr(torch, spec.dtype)

    def draw(*shape: int, **how: Any):
        return torch.randn(*shape, device="cuda", **how)

    q, k = (draw(1, tokens, model.num_k_heads, model.head_k_dim, dtype=dtype) for _ in range(2))
    v = draw(1, tokens, model.num_v_heads, model.head_v_dim, dtype=dtype)
    decay = -torch.rand(1, tokens, model.num_v_heads, device="cuda")
    beta = torch.rand(1, tokens, model.num_v_heads, device="cuda", dtype=dtype)
    state = draw(requests, model.num_v_heads, model.head_k_dim, model.head_v_dim, dtype=torch.float32)
    ends = torch.tensor([0, *spec.lengths], device="cuda").cumsum(0)

    def several() -> None:
        for _ in range(_CALLS):
            chunk(
                q,
                k,
                v,
                decay,
                beta,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=ends,
            )
        torch.cuda.synchronize()

    with torch.no_grad():
        return _middle(several, _CALLS)


def _needed(name: str):
    """A module of a peer.

    Raises:
        MissingPeer: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPeer(f"flash-linear-attention cannot be timed without {name}: {error}") from error


def _middle(several: Callable[[], Any], calls: int) -> float:
    """Microseconds of a call: median over samples of a function that makes several and waits for them."""
    several()  # compiles and tunes
    times = []
    for _ in range(_SAMPLES):
        start = time.perf_counter()
        several()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times) * 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """The kernels' bench with its peers; 2 if the library of one is not installed."""
    try:
        return bench.main(argv, program="python scripts/bench_peers.py", peer=measure, check=check)
    except MissingPeer as missing:
        print(f"error: {missing}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

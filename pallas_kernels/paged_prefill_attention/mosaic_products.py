"""The matrix products of the Mosaic prefill attention, on the tensor cores and as the interpreter can run them."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_prefill_attention.mosaic_work import PAGE, TILE

DIM = 256


class Products:
    """The products of a page on the tensor cores."""

    def scores(self, queries_ref, keys_ref, while_running):
        """f32[64, 64], unscaled."""

        def run(scores_ref):
            plgpu.wgmma(scores_ref, queries_ref, keys_ref.transpose((1, 0)))
            while_running()
            return scores_ref[...]

        return pl.run_scoped(run, plgpu.ACC((TILE, PAGE), jnp.float32))

    def add(self, total, halves, values_ref, while_running):
        """Total plus weights times values; the weights are the sum of their halves."""

        def run(total_ref):
            for half in halves:
                plgpu.wgmma(total_ref, half, values_ref)
            while_running()

        return pl.run_state(run)(plgpu.ACC.init(total))

    def both(self, queries_ref, keys_ref, total, weights, values_ref, before_values, after_scores):
        """Scores, and total plus weights times values; ``after_scores(scores)`` runs beside the latter."""
        # Three barriers for the compiler. The product with the values reads its weights from registers until the wait:
        # they are copied before anything runs, and what was copied is used behind the wait, so that the new weights
        # get registers of their own (else ptxas serialises the products). And the results are computed before the wait.
        operand = lax.optimization_barrier(weights)

        def run(total_ref, scores_ref):
            total_ref[...] = total
            plgpu.wgmma(scores_ref, queries_ref, keys_ref.transpose((1, 0)))
            before_values()
            plgpu.wgmma(total_ref, operand, values_ref)
            results = after_scores(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
            results = lax.optimization_barrier(results)
            new_total = total_ref[...]
            lax.optimization_barrier(weights)
            return new_total, results

        return pl.run_scoped(run, plgpu.ACC((TILE, DIM), jnp.float32), plgpu.ACC((TILE, PAGE), jnp.float32))


class Emulated:
    """The same for the interpreter, which has no accumulators that start from a value.

    Its race detector takes these reads for ordinary ones, which must be fenced before the copy engine writes again.
    """

    def scores(self, queries_ref, keys_ref, while_running):
        """See :meth:`Products.scores`."""
        while_running()
        scores = jnp.dot(queries_ref[...], keys_ref[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return scores

    def add(self, total, halves, values_ref, while_running):
        """See :meth:`Products.add`."""
        while_running()
        values = values_ref[...]
        plgpu.commit_smem()
        return total + sum(jnp.dot(half, values, preferred_element_type=jnp.float32) for half in halves)

    def both(self, queries_ref, keys_ref, total, weights, values_ref, before_values, after_scores):
        """See :meth:`Products.both`."""
        results = after_scores(self.scores(queries_ref, keys_ref, before_values))
        return self.add(total, [weights], values_ref, lambda: None), results

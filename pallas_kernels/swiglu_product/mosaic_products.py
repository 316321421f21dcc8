"""The products of the Mosaic ``swiglu_product``: one or two a step, and one as the interpreter can run it.

A step multiplies a piece of the tokens with the same piece of the gate and of the up columns. Two products of half the
width read the tokens from shared memory twice; one reads them once, but needs an operand of all the columns, which lies
in shared memory as strips of 64 columns one behind the other. That is a layout the hardware takes (strips are a fixed
distance apart) and Pallas has no name for, hence the inlined part.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

DEPTH = 64  # of the inner dimension a step: 128 bytes, the widest swizzle
STRIP = 64  # columns of a strip, by the same swizzle
SWIZZLED = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(2 * DEPTH))

_MATRIX = plgpu.Layout.WGMMA


def halves_of_columns(array):
    """The left and the right half of a matrix in registers, each thread its own part: nothing moves."""
    height, width = array.shape
    half = plgpu.ShapeDtypeStruct((height, width // 2), array.dtype, layout=_MATRIX)

    @plgpu.inline_mgpu(arg_types=(_MATRIX,), return_type=(half, half))
    def split(context, array):
        del context
        return array[:, : width // 2], array[:, width // 2 :]

    return split(array)


class Two:
    """A product for the gate and one for the up columns, accumulators of their own."""

    halves = staticmethod(halves_of_columns)

    @staticmethod
    def sums(height, columns, steps, unrolled, tokens_of, weights_of, before, after):
        """f32[height, columns] of the gate and of the up columns, summed over the steps.

        Args:
            height: rows.
            columns: of each half.
            steps: of the inner dimension.
            unrolled: steps in front of the loop, at least one; their numbers are no tracers.
            tokens_of: step -> reference [height, DEPTH].
            weights_of: step -> reference [pieces, DEPTH, columns of a piece].
            before: called with a step before its operands are read.
            after: called with a step when they have been read, all but the last.
        """

        def run(gate_ref, up_ref):
            def multiply(step):
                before(step)
                tokens, weights = tokens_of(step), weights_of(step)
                for half, total in enumerate((gate_ref, up_ref)):
                    plgpu.wgmma(total, tokens, weights.at[half])

            def another(step):
                multiply(step)
                plgpu.wgmma_wait(2)  # the two products of the step before are done
                after(step - 1)

            multiply(0)
            for step in range(1, unrolled):
                another(step)
            pl.loop(unrolled, steps)(another)
            return gate_ref[...], up_ref[...]

        accumulator = plgpu.ACC((height, columns), jnp.float32)
        return pl.run_scoped(run, accumulator, accumulator)


class One:
    """One product over strips of columns, gate strips before up strips."""

    halves = staticmethod(halves_of_columns)

    @staticmethod
    def sums(height, columns, steps, unrolled, tokens_of, weights_of, before, after):
        """See :meth:`Two.sums`."""
        total_type = plgpu.ShapeDtypeStruct((height, 2 * columns), jnp.float32, layout=_MATRIX)
        operand = plgpu.RefType(SWIZZLED)

        def multiply(step, total, *, first=False):
            @plgpu.inline_mgpu(arg_types=(_MATRIX, operand, operand), return_type=total_type)
            def product(context, total, tokens, weights):
                del context
                # [strip, row / 8, 1, 8, 64] -> [row / 8, strip, 8, 64]: tiles of a matrix [DEPTH, 2 columns]
                weights = mgpu.memref_transpose(weights, (1, 0, 2, 3, 4))
                weights = mgpu.memref_slice(weights, (slice(None), slice(None), 0))
                total = mgpu.WGMMAAccumulator.from_registers(total, sync=first)
                total = mgpu.wgmma(total, tokens, weights, swizzle=2 * DEPTH)
                nvvm.wgmma_commit_group_sync_aligned()  # what plgpu.wgmma_wait counts
                return total.value

            before(step)
            return product(total, tokens_of(step), weights_of(step))

        def another(step, total):
            total = multiply(step, total)
            plgpu.wgmma_wait(1)  # the product of the step before is done
            after(step - 1)
            return total

        total = plgpu.layout_cast(jnp.zeros((height, 2 * columns), jnp.float32), _MATRIX)
        total = multiply(0, total, first=True)
        for step in range(1, unrolled):
            total = another(step, total)
        total = lax.fori_loop(unrolled, steps, another, total)
        plgpu.wgmma_wait(0)
        return halves_of_columns(total)


class Emulated:
    """The same for the interpreter, which knows no inlined parts.

    Its race detector takes these reads for ordinary ones, which must be fenced before the copy engine writes again.
    """

    @staticmethod
    def halves(array):
        """See :func:`halves_of_columns`."""
        return tuple(jnp.split(array, 2, axis=1))

    @staticmethod
    def sums(height, columns, steps, unrolled, tokens_of, weights_of, before, after):
        """See :meth:`Two.sums`."""

        def multiply(step, total):
            before(step)
            tokens, weights = tokens_of(step)[...], weights_of(step)[...]
            plgpu.commit_smem()
            weights = weights.swapaxes(0, 1).reshape(DEPTH, 2 * columns)
            return total + jnp.dot(tokens, weights, preferred_element_type=jnp.float32)

        def another(step, total):
            after(step - 1)
            return multiply(step, total)

        total = multiply(0, jnp.zeros((height, 2 * columns), jnp.float32))
        for step in range(1, unrolled):
            total = another(step, total)
        total = lax.fori_loop(unrolled, steps, another, total)
        return total[:, :columns], total[:, columns:]

"""Sums of a tile of a product for Mosaic kernels of whole matrices, and one as the interpreter can run it.

A step multiplies a piece of the rows with the same piece of the weight's columns, which may be of two halves of the
weight (a gate's and those of up). A product a half reads the rows from shared memory twice; one for both reads them
once, but needs an operand of all the columns, which lies in shared memory as strips one behind the other. That is a
layout the hardware takes (strips are a fixed distance apart) and Pallas has no name for, hence the inlined part. Of
strips, a product of fewer columns takes the first ones.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

DEPTH = 64  # of the inner dimension a step: 128 bytes, the widest swizzle

_MATRIX = plgpu.Layout.WGMMA


def swizzled(strip: int):
    """Transforms of a matrix of 16-bit numbers in shared memory, ``strip`` columns side by side: 32 or 64."""
    return plgpu.TilingTransform((8, strip)), plgpu.SwizzleTransform(2 * strip)


def halves_of_columns(array):
    """The left and the right half of a matrix in registers, each thread its own part: nothing moves."""
    height, width = array.shape
    half = plgpu.ShapeDtypeStruct((height, width // 2), array.dtype, layout=_MATRIX)

    @plgpu.inline_mgpu(arg_types=(_MATRIX,), return_type=(half, half))
    def split(context, array):
        del context
        return array[:, : width // 2], array[:, width // 2 :]

    return split(array)


class Apart:
    """A product for each half of the weight, accumulators of their own; or the one of a weight without halves."""

    halves = staticmethod(halves_of_columns)

    @staticmethod
    def sums(height, columns, halves, steps, unrolled, rows_of, weights_of, before, after):
        """f32[height, columns] of each half, summed over the steps.

        Args:
            height: rows.
            columns: of each half.
            halves: of the weight, 1 or 2.
            steps: of the inner dimension.
            unrolled: steps in front of the loop, at least one; their numbers are no tracers.
            rows_of: step -> reference [height, DEPTH].
            weights_of: step -> reference [pieces, DEPTH, columns of a piece].
            before: called with a step before its operands are read.
            after: called with a step when they have been read, all but the last.
        """

        def run(*totals):
            def multiply(step):
                before(step)
                rows, weights = rows_of(step), weights_of(step)
                for half, total in enumerate(totals):
                    plgpu.wgmma(total, rows, weights.at[half])

            def another(step):
                multiply(step)
                plgpu.wgmma_wait(halves)  # the products of the step before are done
                after(step - 1)

            multiply(0)
            for step in range(1, unrolled):
                another(step)
            pl.loop(unrolled, steps)(another)
            return tuple(total[...] for total in totals)

        return pl.run_scoped(run, *[plgpu.ACC((height, columns), jnp.float32)] * halves)


class Joined:
    """One product for all columns, over strips of them, those of the first half of the weight in front."""

    halves = staticmethod(halves_of_columns)

    @staticmethod
    def sums(height, columns, halves, steps, unrolled, rows_of, weights_of, before, after):
        """See :meth:`Apart.sums`; a piece is a strip."""
        total_type = plgpu.ShapeDtypeStruct((height, halves * columns), jnp.float32, layout=_MATRIX)

        def multiply(step, total, *, first=False):
            before(step)
            rows, weights = rows_of(step), weights_of(step)
            strip = weights.shape[-1]
            operand = plgpu.RefType(swizzled(strip))

            @plgpu.inline_mgpu(arg_types=(_MATRIX, operand, operand), return_type=total_type)
            def product(context, total, rows, weights):
                del context
                # [strip, row / 8, 1, 8, 64] -> [row / 8, strip, 8, 64]: tiles of a matrix [DEPTH, all columns]
                weights = mgpu.memref_transpose(weights, (1, 0, 2, 3, 4))
                weights = mgpu.memref_slice(weights, (slice(None), slice(None), 0))
                total = mgpu.WGMMAAccumulator.from_registers(total, sync=first)
                total = mgpu.wgmma(total, rows, weights, swizzle=2 * strip)
                nvvm.wgmma_commit_group_sync_aligned()  # what plgpu.wgmma_wait counts
                return total.value

            return product(total, rows, weights)

        def another(step, total):
            total = multiply(step, total)
            plgpu.wgmma_wait(1)  # the product of the step before is done
            after(step - 1)
            return total

        total = plgpu.layout_cast(jnp.zeros((height, halves * columns), jnp.float32), _MATRIX)
        total = multiply(0, total, first=True)
        for step in range(1, unrolled):
            total = another(step, total)
        total = lax.fori_loop(unrolled, steps, another, total)
        plgpu.wgmma_wait(0)
        return halves_of_columns(total) if halves == 2 else (total,)


class Emulated:
    """The same for the interpreter, which knows no inlined parts.

    Its race detector takes these reads for ordinary ones, which must be fenced before the copy engine writes again.
    """

    @staticmethod
    def halves(array):
        """See :func:`halves_of_columns`."""
        return tuple(jnp.split(array, 2, axis=1))

    @staticmethod
    def sums(height, columns, halves, steps, unrolled, rows_of, weights_of, before, after):
        """See :meth:`Apart.sums`."""

        def multiply(step, total):
            before(step)
            rows, weights = rows_of(step)[...], weights_of(step)[...]
            plgpu.commit_smem()
            weights = weights.swapaxes(0, 1).reshape(DEPTH, halves * columns)
            return total + jnp.dot(rows, weights, preferred_element_type=jnp.float32)

        def another(step, total):
            after(step - 1)
            return multiply(step, total)

        total = multiply(0, jnp.zeros((height, halves * columns), jnp.float32))
        for step in range(1, unrolled):
            total = another(step, total)
        total = lax.fori_loop(unrolled, steps, another, total)
        return tuple(jnp.split(total, halves, axis=1))

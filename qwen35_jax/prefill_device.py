"""The prefill side of ``device`` overlap: programs on another device, and the way of a finished prompt.

A launch runs a chunk's program on the prefill device. For a prompt that ends in it, the request's state, pages and
records are gathered into ONE array and sent to the decode device; all of it is only dispatched, nothing waits. The
engine polls :attr:`Flight.ready` and merges what has arrived.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence

import jax
from jax.sharding import SingleDeviceSharding

from qwen35_jax.cache import pages_for
from qwen35_jax.packing import LiveRequest, prefill_values, variant_of
from qwen35_jax.programs import ProgramSet, free_device_state, init_device_state
from qwen35_jax.steps import DeviceState, ProgramKey
from schedulers import Bucket, Chunk


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A finished prompt on its way: one ``uint8`` array on (or heading for) the decode device."""

    data: jax.Array
    width: int
    num_pages: int


@dataclasses.dataclass(frozen=True)
class Flight:
    """One launch in flight.

    Attributes:
        handle: the scheduler's id of the launch.
        members: its chunks and their requests, in packing order.
        results: packed sampler results of the launch, on the prefill device.
        transfers: finished prompts by request id.
        started: ``time.perf_counter()`` of the launch.
        epoch: which allocation of the staging pool it ran in.
    """

    handle: int
    members: tuple[tuple[Chunk, LiveRequest], ...]
    results: jax.Array
    transfers: dict[str, Transfer]
    started: float
    epoch: int

    @property
    def ready(self) -> bool:
        """Whether results and transfers have arrived (or failed), so that reading them does not wait."""
        return self.results.is_ready() and all(t.data.is_ready() for t in self.transfers.values())


class PrefillDevice:
    """Programs and staging pool of the prefill device.

    Args:
        programs: compiled prefill and extract programs.
        state: the staging pool and records.
        widths: page counts for which extract programs exist, ascending.
        poison: fill what a finished prompt leaves in the staging pool with NaN (debug).
    """

    def __init__(self, programs: ProgramSet, state: DeviceState, widths: Sequence[int], *, poison: bool = False):
        self.flights: deque[Flight] = deque()
        self.programs = programs
        self._state = state
        self._widths = tuple(widths)
        self._poison = poison
        self._epoch = 0

    def launch(
        self,
        handle: int,
        chunks: Sequence[Chunk],
        requests: Sequence[LiveRequest],
        bucket: Bucket,
        decode_device: jax.Device,
    ) -> None:
        """Start the chunks; returns at once.

        Raises:
            jax.errors.JaxRuntimeError: the dispatch itself failed; the staging pool has been made anew.
        """
        started = time.perf_counter()
        key = ProgramKey("prefill", bucket, 1, variant_of(requests))
        try:
            self._state, results = self.programs.run(
                key, self._state, prefill_values(chunks, requests, bucket, staging=True)
            )
            transfers = {}
            for chunk in chunks:
                if chunk.last:
                    num_pages = pages_for(chunk.start + chunk.length)
                    width = next(w for w in self._widths if w >= num_pages)
                    pages = chunk.staging_pages[:num_pages]
                    data = self.programs.extract(self._state, width, chunk.staging_slot, pages)
                    data = jax.device_put(data, SingleDeviceSharding(decode_device))
                    transfers[chunk.request_id] = Transfer(data, width, num_pages)
                    if self._poison:
                        self._state = self.programs.fill(self._state, float("nan"), chunk.staging_slot, pages)
            results.copy_to_host_async()
        except jax.errors.JaxRuntimeError:
            self._renew()
            raise
        members = tuple(zip(chunks, requests, strict=True))
        self.flights.append(Flight(handle, members, results, transfers, started, self._epoch))

    def reset(self, failed: Flight) -> None:
        """Make the staging pool anew after a launch failed; later launches that ran in the same one fail with it."""
        if failed.epoch == self._epoch:
            self._renew()

    def _renew(self) -> None:
        free_device_state(self._state)
        self._state = init_device_state(self.programs.shapes, self.programs.device)
        self._epoch += 1

    def close(self) -> None:
        """Give the staging pool back."""
        self.flights.clear()
        free_device_state(self._state)

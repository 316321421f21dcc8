"""What an engine's start took: the memory it planned, and where the seconds went."""

from __future__ import annotations

import dataclasses

from qwen35_jax.cache import MemoryPlan


@dataclasses.dataclass(frozen=True)
class StartReport:
    """How an engine was made; seconds are of the wall clock.

    Attributes:
        plan: the memory plan of the main device.
        scratch: bytes of scratch of the main device's largest program, for which the plan has its workspace.
        load_s: reading weights (or drawing random ones) and putting them on the device.
        compile_s: loading every program, or tracing, lowering and compiling it; of both devices in ``device`` overlap,
            and including those that were loaded, failed at their first run and were compiled then.
        warm_up_s: allocating the pools and running every program once.
        num_programs: executables in all.
        num_loaded: those of them that an earlier start has kept (see :mod:`qwen35_jax.program_store`).
    """

    plan: MemoryPlan
    scratch: int
    load_s: float
    compile_s: float
    warm_up_s: float
    num_programs: int
    num_loaded: int = 0

    @property
    def num_compiled(self) -> int:
        """Executables that were traced, lowered and compiled."""
        return self.num_programs - self.num_loaded

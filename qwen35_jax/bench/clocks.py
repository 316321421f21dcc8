"""What a GPU's clock and power were while something ran: a time says little of a device that was slowed down meanwhile.

Read through the driver's management library (NVML), in a thread, a few dozen times a second. Where there is none, or
the device is no GPU, there are no figures. What the library refuses to tell is left out, and said once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import statistics
import threading
from collections.abc import Callable
from typing import Self

import jax

from qwen35_jax import runtime

_SM_CLOCK = 1  # nvmlClockType_t
_POWER_CAP = 0x4  # nvmlClocksEventReasonSwPowerCap

log = logging.getLogger(__name__)

type Reading = tuple[float | None, float | None, bool | None]
"""Clock of the SMs in MHz, power in watts (the driver's average of a second), whether the power cap holds the clock.

None stands for what could not be read.
"""


class Clocks:
    """Readings while a block runs, the first when it begins and the last before it ends.

    Args:
        read: one reading; None takes none.
        every_s: pause between readings.
    """

    def __init__(self, read: Callable[[], Reading] | None, every_s: float = 0.02):
        self._read, self._every_s = read, every_s
        self._readings: list[Reading] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="clocks", daemon=True)

    def __enter__(self) -> Self:
        if self._read is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._read is not None:
            self._thread.join()

    def _watch(self) -> None:
        assert self._read is not None
        while True:
            self._readings.append(self._read())
            if self._ended.wait(self._every_s):
                return

    @property
    def figures(self) -> dict[str, float]:
        """Medians of clock and power, share of readings at the power cap, number of readings; empty without any.

        Each figure is of the readings that have it, and is missing where none has. The number is that of the figure
        with the fewest.
        """
        columns = zip(*self._readings, strict=True)
        kinds = (("sm_clock_mhz", statistics.median), ("power_w", statistics.median), ("power_capped_share", _mean))
        known = [
            (name, how, values)
            for (name, how), column in zip(kinds, columns, strict=False)  # no columns without readings
            if (values := [value for value in column if value is not None])
        ]
        if not known:
            return {}
        figures = {name: how(values) for name, how, values in known}
        return figures | {"readings": min(len(values) for _, _, values in known)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@functools.cache
def _tell(what: str, why: str) -> None:
    """Cached: a reading that fails does so dozens of times a second."""
    log.warning("the driver does not tell %s (%s); figures are without those readings", what, why)


def reader(device: jax.Device) -> Callable[[], Reading] | None:
    """How to read a device's clock and power; None where that cannot be known.

    The device is found as CUDA counts them, which is the management library's order where all GPUs are of a kind.
    """
    if device.platform != "gpu":
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    index = device.local_hardware_id or 0
    visible = runtime.visible_devices()
    name = visible[index] if index < len(visible) else str(index)
    handle = ctypes.c_void_p()
    if name.isdecimal():
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
    else:
        failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    if failed:
        return None
    clock, milliwatts, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()

    def told(what: str, function: str, value: ctypes.c_uint | ctypes.c_ulonglong, *kind: int) -> bool:
        """Whether a call filled ``value``, which keeps an older number otherwise."""
        ask = getattr(nvml, function, None)
        code = None if ask is None else ask(handle, *kind, ctypes.byref(value))
        if code != 0:
            _tell(what, f"{function} is not in the library" if code is None else f"{function}: NVML error {code}")
        return code == 0

    def read() -> Reading:
        has_clock = told("the SMs' clock", "nvmlDeviceGetClockInfo", clock, _SM_CLOCK)
        has_power = told("the power", "nvmlDeviceGetPowerUsage", milliwatts)
        has_reasons = told("what holds the clock", "nvmlDeviceGetCurrentClocksThrottleReasons", reasons)
        return (
            float(clock.value) if has_clock else None,
            milliwatts.value / 1e3 if has_power else None,
            bool(reasons.value & _POWER_CAP) if has_reasons else None,
        )

    return read

"""What a GPU's clock and power were while something ran: a time says little of a device that was slowed down meanwhile.

Read through the driver's management library (NVML), in a thread, a few dozen times a second. Where there is none, or
the device is no GPU, there are no figures.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
from collections.abc import Callable
from typing import Self

import jax

from qwen35_jax import runtime

_SM_CLOCK = 1  # nvmlClockType_t
_POWER_CAP = 0x4  # nvmlClocksEventReasonSwPowerCap

type Reading = tuple[float, float, bool]
"""Clock of the SMs in MHz, power in watts (the driver's average of a second), whether the power cap holds the clock."""


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
        """Medians of clock and power, share of readings at the power cap, number of readings; empty without any."""
        if not self._readings:
            return {}
        clocks, watts, capped = zip(*self._readings, strict=True)
        return {
            "sm_clock_mhz": statistics.median(clocks),
            "power_w": statistics.median(watts),
            "power_capped_share": sum(capped) / len(capped),
            "readings": len(clocks),
        }


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
    clock, milliwatts, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()

    def read() -> Reading:
        nvml.nvmlDeviceGetClockInfo(handle, _SM_CLOCK, ctypes.byref(clock))
        nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts))
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons))
        return float(clock.value), milliwatts.value / 1e3, bool(reasons.value & _POWER_CAP)

    return None if failed or nvml.nvmlDeviceGetClockInfo(handle, _SM_CLOCK, ctypes.byref(clock)) else read

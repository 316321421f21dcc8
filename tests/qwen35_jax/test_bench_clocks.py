"""Clocks of a device, with readings by hand and a library by hand."""

import ctypes
import functools
from unittest import mock

import jax
import pytest

from qwen35_jax.bench import clocks
from qwen35_jax.bench.clocks import Clocks, reader


def test_readings_begin_with_the_block_and_their_medians_are_the_figures():
    readings = iter([(1700.0, 500.0, False), (1600.0, 700.0, True)])
    with Clocks(lambda: next(readings), every_s=60) as seen:
        seen._ended.wait(0.05)
    assert seen.figures == {"sm_clock_mhz": 1700.0, "power_w": 500.0, "power_capped_share": 0.0, "readings": 1}
    samples = [(1980.0, 500.0, False), (1700.0, 690.0, True), (1710.0, 700.0, True)]
    seen._readings[:] = samples
    assert seen.figures == {"sm_clock_mhz": 1710.0, "power_w": 690.0, "power_capped_share": 2 / 3, "readings": 3}


def test_a_device_that_does_not_tell_has_no_figures():
    assert reader(jax.devices()[0]) is None
    with Clocks(None) as seen:
        pass
    assert seen.figures == {}


class Nvml:
    """The management library of a machine with one GPU, "GPU-abc", the third."""

    nvmlInit_v2 = staticmethod(lambda: 0)

    def __init__(self):
        self.asked = []

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        self.asked.append(index.value)
        return 0 if index.value == 2 else 6

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        self.asked.append(name)
        return 0 if name == b"GPU-abc" else 6

    def nvmlDeviceGetClockInfo(self, handle, kind, clock):
        assert kind == 1
        clock._obj.value = 1755
        return 0

    def nvmlDeviceGetPowerUsage(self, handle, power):
        power._obj.value = 698_500
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle, reasons):
        reasons._obj.value = 0x4
        return 0


@pytest.mark.parametrize(
    ("visible", "asked"), [("2", 2), ("0, 2", 2), ("GPU-abc", b"GPU-abc"), ("", None), ("GPU-x", None)]
)
def test_the_device_is_found_by_what_is_visible(monkeypatch, visible, asked):
    nvml = Nvml()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(clocks.ctypes, "CDLL", lambda name: nvml)
    device = mock.Mock(platform="gpu", local_hardware_id=1 if "," in visible else 0)
    read = reader(device)
    if asked is None:
        assert read is None
    else:
        assert nvml.asked == [asked] and read() == (1755.0, 698.5, True)


def test_what_cannot_be_read_is_left_out_and_said_once(monkeypatch, caplog):
    """The third reading has no clock, none has power, and the library does not know of reasons."""
    nvml, codes = Nvml(), iter([0, 0, 15, 0])
    clocks._tell.cache_clear()
    monkeypatch.setattr(clocks.ctypes, "CDLL", lambda name: nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "nvmlDeviceGetClockInfo", lambda *arguments: next(codes) or clock_of(*arguments))
    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", lambda *_: 3)
    monkeypatch.delattr(Nvml, "nvmlDeviceGetCurrentClocksThrottleReasons")
    clock_of = functools.partial(Nvml.nvmlDeviceGetClockInfo, nvml)
    read = reader(mock.Mock(platform="gpu", local_hardware_id=2))
    seen = Clocks(None)
    seen._readings[:] = [read() for _ in range(4)]
    assert seen._readings == [(1755.0, None, None), (1755.0, None, None), (None, None, None), (1755.0, None, None)]
    assert seen.figures == {"sm_clock_mhz": 1755.0, "readings": 3}
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "the driver does not tell the power (nvmlDeviceGetPowerUsage: NVML error 3)",
        "the driver does not tell what holds the clock "
        "(nvmlDeviceGetCurrentClocksThrottleReasons is not in the library)",
        "the driver does not tell the SMs' clock (nvmlDeviceGetClockInfo: NVML error 15)",
    ]
    seen._readings[:] = [(None, None, None)] * 3
    assert seen.figures == {}, "no field rather than a wrong one"


def test_without_the_library_there_is_no_reader(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=OSError))
    assert reader(mock.Mock(platform="gpu", local_hardware_id=0)) is None

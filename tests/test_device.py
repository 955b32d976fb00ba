"""Free memory of devices. No GPU is needed: NVML's Python module is stood in for."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from exporter.device import Devices


class NVMLError(Exception):
    """As raised where there is no driver."""


def nvml(free: list[int], *, driver: bool = True) -> ModuleType:
    """What of ``pynvml`` is used."""
    module = ModuleType("pynvml")

    def init() -> None:
        if not driver:
            raise NVMLError("Driver Not Loaded")

    def memory(at: int) -> SimpleNamespace:
        if free[at] < 0:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(free=free[at])

    vars(module).update(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(free),
        nvmlDeviceGetHandleByIndex=lambda at: at,
        nvmlDeviceGetMemoryInfo=memory,
    )
    return module


@pytest.mark.parametrize(("free", "least"), [([5, 3, 9], 3), ([], None), ([5, -1], None)])
def test_the_device_with_least_counts(
    free: list[int], least: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that went away makes the answer unknown, not the exporter end."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(free))
    assert Devices().free_bytes() == least


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module may be installed where no device is."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml([1], driver=False))
    assert Devices().free_bytes() is None


def test_without_the_extra_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of None is one that can't be imported."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Devices().free_bytes() is None

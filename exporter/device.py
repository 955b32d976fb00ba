"""Free memory of the devices that the exporter can see, through NVML.

Only with the extra ``nvml``, and only where the container is given the devices; a sidecar usually
is not. Then ``dcgm-exporter`` knows the same, and a rule joins it in Prometheus.
"""

from __future__ import annotations

from typing import Any

import structlog

log = structlog.get_logger(__name__)


class Devices:
    """``free_bytes`` of the device that has least; None without NVML, driver or device."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(count)]
        except pynvml.NVMLError as error:
            log.info("no device is asked for its memory", reason=str(error))
            return
        self._nvml = pynvml

    def free_bytes(self) -> int | None:
        """Bytes free now. The device can go away at any moment; then nothing is known."""
        if self._nvml is None:
            return None
        try:
            return min(
                (int(self._nvml.nvmlDeviceGetMemoryInfo(one).free) for one in self._handles), default=None
            )
        except self._nvml.NVMLError:
            return None

"""NVIDIA devices as their driver's library (NVML) shows them, without torch. What a device lacks is None.

The constants are those of nvml.h (nvmlClocksEventReasons, nvmlTemperatureSensors_t, nvmlClockType_t).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

TEMPERATURE_GPU = 0
CLOCK_SM = 1
# 0x1, an idle GPU, holds nothing down and is left out.
THROTTLES = {
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x100: "display clocks",
}
SENSORS = (
    "gpu_util_frac",
    "gpu_memory_util_frac",
    "gpu_memory_bytes",
    "gpu_sm_clock_hz",
    "gpu_throttle",
    "gpu_power_w",
    "gpu_temperature_c",
)


def ask(library: Any, name: str, *arguments: Any) -> Any:
    """The answer of one NVML call, text decoded; None where library, driver or device cannot give it."""
    try:
        answer = getattr(library, name)(*arguments)
    except Exception:  # NVMLError of any kind, or a library too old to know the call
        return None
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def library() -> Any:
    """pynvml, ready for use; None where there is no driver."""
    with contextlib.suppress(
        Exception
    ):  # not installed, no driver, or a driver that does not match the module
        import pynvml

        pynvml.nvmlInit()
        return pynvml
    return None


def gpus(nvml: Any = None) -> list[dict[str, Any]]:
    """One object a GPU: index, name, uuid, memory_bytes, memory_free_bytes, driver, cuda (the newest that the
    driver serves). [] where there is none. Never raises."""
    nvml = nvml or library()
    version = ask(nvml, "nvmlSystemGetCudaDriverVersion")
    driver = ask(nvml, "nvmlSystemGetDriverVersion")
    found = []
    for index in range(ask(nvml, "nvmlDeviceGetCount") or 0):
        handle = ask(nvml, "nvmlDeviceGetHandleByIndex", index)
        memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
        found.append(
            {
                "index": index,
                "name": ask(nvml, "nvmlDeviceGetName", handle),
                "uuid": ask(nvml, "nvmlDeviceGetUUID", handle),
                "memory_bytes": int(memory.total) if memory else None,
                "memory_free_bytes": int(memory.free) if memory else None,
                "driver": driver,
                "cuda": f"{version // 1000}.{version % 1000 // 10}" if version else None,
            }
        )
    return found


def throttle_names(mask: int) -> list[str]:
    """The reasons in NVML's bit mask that hold the clocks down."""
    return [name for bit, name in THROTTLES.items() if mask & bit]


class Gpu:
    """One device, opened."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    def _ask(self, name: str, *arguments: Any) -> Any:
        return ask(self.nvml, name, self.handle, *arguments)

    def read(self) -> dict[str, Any]:
        """SENSORS: utilisation 0..1, bytes in use, Hz, throttle reasons by name, watts, degrees Celsius."""
        used = self._ask("nvmlDeviceGetUtilizationRates")
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        clock_mhz = self._ask("nvmlDeviceGetClockInfo", CLOCK_SM)
        power_mw = self._ask("nvmlDeviceGetPowerUsage")
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:  # drivers before 535 know it by its older name
            mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return {
            "gpu_util_frac": None if used is None else used.gpu / 100,
            "gpu_memory_util_frac": None if used is None else used.memory / 100,
            "gpu_memory_bytes": None if memory is None else int(memory.used),
            "gpu_sm_clock_hz": None if clock_mhz is None else clock_mhz * 1e6,
            "gpu_throttle": None if mask is None else throttle_names(int(mask)),
            "gpu_power_w": None if power_mw is None else power_mw / 1000,
            "gpu_temperature_c": self._ask("nvmlDeviceGetTemperature", TEMPERATURE_GPU),
        }


def open_gpu(device: str | None, nvml: Any = None) -> Gpu | None:
    """The device by UUID ("GPU-...", the safest) or by its CUDA index ("0"); None where NVML does not show it.

    CUDA counts only the devices in CUDA_VISIBLE_DEVICES, NVML counts all. An index is wrong where unlike devices are
    mixed and CUDA_DEVICE_ORDER is not PCI_BUS_ID, since CUDA then puts the fastest first.
    """
    if device is None:
        return None
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if device.isdigit() and int(device) < len(visible):
        device = visible[int(device)]
    nvml = nvml or library()
    by_index = device.isdigit()
    handle = (
        ask(nvml, "nvmlDeviceGetHandleByIndex", int(device))
        if by_index
        else ask(nvml, "nvmlDeviceGetHandleByUUID", device)
    )
    return None if handle is None else Gpu(nvml, handle)

"""Devices and the links between them, as published. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlsyslab.contract import ConfigError
from mlsyslab.hardware import PEAKS

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in equal nodes, and the job's batch. memory_bytes: of a device, of which `usable_frac` is for tensors (context,
    libraries and fragmentation take the rest). flops_per_s: dense, of the type computed in. Rates are of one device in one
    direction: inside a node, and between nodes. batch: sequences of the whole job in a step; 0 is one a device."""

    name: str
    devices: int
    devices_per_node: int = 8
    memory_bytes: float
    flops_per_s: float
    inside_bytes_per_s: float
    between_bytes_per_s: float
    latency_s: float = 20e-6
    usable_frac: float = 0.92
    batch: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        if self.devices < 1 or (
            self.devices > self.devices_per_node and self.devices % self.devices_per_node
        ):
            raise ConfigError(
                f"devices={self.devices} over nodes of {self.devices_per_node} is {self.devices / self.devices_per_node:g} nodes; "
                "choose whole nodes"
            )

    @property
    def usable_bytes(self) -> float:
        """Of a device, for tensors."""
        return self.memory_bytes * self.usable_frac

    @property
    def sequences(self) -> int:
        """Of the whole job in a step."""
        return self.batch or self.devices


# name -> memory, peak, inside a node, between nodes (bytes a second, one direction), source
_DEVICES: Mapping[str, tuple[float, str, float, float, str]] = {
    "H100": (80 * GB, "H100 SXM", 450 * GB, 50 * GB, "NVIDIA, H100 data sheet, 2023: NVLink 900 GB/s both ways; NDR InfiniBand 400 Gbit/s"),
    "H200": (141 * GB, "H200 SXM", 450 * GB, 50 * GB, "NVIDIA, H200 data sheet, 2024: NVLink 900 GB/s both ways; NDR InfiniBand 400 Gbit/s"),
    "A100": (80 * GB, "A100 SXM 80 GB", 300 * GB, 25 * GB, "NVIDIA, A100 data sheet, 2021-06: NVLink 600 GB/s both ways; HDR InfiniBand 200 Gbit/s"),
    "RTX 4090": (24 * GB, "RTX 4090", 25 * GB, 1.25 * GB, "NVIDIA, Ada white paper, 2022; PCIe 4.0 x16 at 80 % of 31.5 GB/s; Ethernet of 10 Gbit/s"),
}  # fmt: skip


def cluster(device: str, devices: int, *, batch: int = 0, devices_per_node: int = 8) -> Cluster:
    """`devices` of a named kind, joined as its vendor sells them. Raises ConfigError for a kind that is not known."""
    if device not in _DEVICES:
        raise ConfigError(
            f"device={device!r} is not one of {', '.join(_DEVICES)}; choose one, or make a Cluster"
        )
    memory, peak, inside, between, source = _DEVICES[device]
    return Cluster(
        name=f"{devices} x {device}",
        devices=devices,
        devices_per_node=min(devices, devices_per_node),
        memory_bytes=memory,
        flops_per_s=PEAKS[peak].flops_per_s["bfloat16"],
        inside_bytes_per_s=inside,
        between_bytes_per_s=between,
        batch=batch,
        source=source,
    )

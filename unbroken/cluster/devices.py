"""Which device each local rank uses, and how to go on without one of them.

The convention of torchrun's scripts: the worker with LOCAL_RANK i uses the i-th visible device. So a device is left out by making it
invisible to the next workers; those behind it move up. Devices of the list that no rank uses are spares.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Environment variables with the visible devices of CUDA, ROCm, Ascend and XPU, as a list of indices or names."""


class Devices(Struct, frozen=True):
    """The visible devices in order of local rank. Empty where ranks have no device of their own: on a CPU, or where several share one."""

    variable: str = ""
    names: tuple[str, ...] = ()

    def of(self, local_rank: int) -> str | None:
        """The device of a worker."""
        return self.names[local_rank] if local_rank < len(self.names) else None

    def without(self, name: str) -> Devices:
        """The others, in the same order."""
        return Devices(self.variable, tuple(other for other in self.names if other != name))

    def environment(self) -> dict[str, str]:
        """What makes exactly these visible to a worker."""
        return {self.variable: ",".join(self.names)}


def visible(environment: Mapping[str, str], num_workers: int, num_accelerators: int) -> Devices:
    """The devices of a host's workers. Where no variable lists them they are the first ones, and there are no spares: others may use those.

    num_accelerators: CUDA or ROCm devices that torch finds here.
    """
    for variable in VARIABLES:
        if variable in environment:
            names = _listed(environment[variable])
            return Devices(variable, names) if len(names) >= num_workers and len(set(names)) == len(names) else Devices()
    if num_accelerators < num_workers:
        return Devices()
    return Devices(VARIABLES[0], tuple(map(str, range(num_workers))))


def _listed(value: str) -> tuple[str, ...]:
    """Entries up to the first that hides the rest (CUDA: a negative number)."""
    names: list[str] = []
    for name in (word.strip() for word in value.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return tuple(names)

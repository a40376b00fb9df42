"""Which device a worker has, and a list without one of them."""

from __future__ import annotations

import pytest

from unbroken.cluster.devices import Devices, visible


@pytest.mark.parametrize(
    ("environment", "num_workers", "num_accelerators", "expected"),
    [
        ({}, 2, 0, Devices()),
        ({}, 2, 8, Devices("CUDA_VISIBLE_DEVICES", ("0", "1"))),
        ({}, 4, 2, Devices()),
        ({"CUDA_VISIBLE_DEVICES": "3, 5,7"}, 2, 0, Devices("CUDA_VISIBLE_DEVICES", ("3", "5", "7"))),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8a,MIG-1b"}, 2, 0, Devices("CUDA_VISIBLE_DEVICES", ("GPU-8a", "MIG-1b"))),
        ({"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}, 2, 8, Devices("CUDA_VISIBLE_DEVICES", ("0", "1"))),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, 8, Devices()),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 2, 8, Devices()),
        ({"CUDA_VISIBLE_DEVICES": "0,0"}, 2, 8, Devices()),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, 2, 0, Devices("HIP_VISIBLE_DEVICES", ("1", "0"))),
        ({"ASCEND_RT_VISIBLE_DEVICES": "4"}, 1, 0, Devices("ASCEND_RT_VISIBLE_DEVICES", ("4",))),
    ],
    ids=["cpu", "found", "shared", "spares", "names", "hidden", "none", "too few", "twice", "rocm", "ascend"],
)
def test_the_devices_of_a_host(environment: dict[str, str], num_workers: int, num_accelerators: int, expected: Devices) -> None:
    """Where a list leaves a rank without a device of its own, none is known: several share one."""
    assert visible(environment, num_workers, num_accelerators) == expected


def test_those_behind_move_up() -> None:
    devices = Devices("CUDA_VISIBLE_DEVICES", ("3", "5", "7"))
    left = devices.without("5")
    assert [devices.of(1), left.of(1), left.of(2)] == ["5", "7", None]
    assert left.environment() == {"CUDA_VISIBLE_DEVICES": "3,7"}

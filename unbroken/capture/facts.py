"""Facts about where a run computes: software versions, kernel settings, host, devices. Compared at a resume, or only recorded.

None is put back; a difference limits what a certificate can claim, because equal inputs give equal bits only on equal software, thread
counts and kernel capability (I13).
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Any

import torch
import torch.distributed as dist

from unbroken.core import os as host
from unbroken.core.ports import environment

_PACKAGES = ("torch", "numpy", "blake3", "msgspec", "unbroken")
_VARIABLES = (
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_DEFAULT_FPMATH_MODE",
    "OPENBLAS_CORETYPE",
    "PYTHONHASHSEED",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def versions() -> dict[str, str]:
    """Versions of what computes: interpreter, packages, libc, BLAS and kernel libraries as torch reports them."""
    found = {"python": platform.python_version(), "implementation": sys.implementation.name, "libc": "-".join(platform.libc_ver())}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    for line in torch.__config__.show().splitlines():
        for mark in ("MKL-DNN", "Math Kernel Library", "OpenMP", "LAPACK"):
            if mark in line and "Build settings" not in line:
                found[f"library {mark}"] = line.strip(" -")
    found["cuda"] = str(torch.version.cuda)
    found["hip"] = str(torch.version.hip)
    return found


def kernel_settings(device: torch.device) -> dict[str, Any]:
    """Every global switch of torch that changes which kernel runs or how it rounds."""
    backends = torch.backends
    return {
        "cpu_capability": backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "flush_denormal": _flushes_denormals(),
        "cudnn_enabled": backends.cudnn.enabled,
        "cudnn_benchmark": backends.cudnn.benchmark,
        "cudnn_deterministic": backends.cudnn.deterministic,
        "mkldnn_enabled": backends.mkldnn.enabled,
        "mkldnn_deterministic": bool(getattr(backends.mkldnn, "deterministic", False)),
        "flash_attention": torch._C._get_flash_sdp_enabled(),
        "memory_efficient_attention": torch._C._get_mem_efficient_sdp_enabled(),
        "math_attention": torch._C._get_math_sdp_enabled(),
        "autocast": torch.is_autocast_enabled(device.type),
        "autocast_dtype": str(torch.get_autocast_dtype(device.type)),
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "anomaly_mode": torch.is_anomaly_enabled(),
        "device_type": device.type,
    }


def variables() -> dict[str, str]:
    """Environment variables that choose kernels, thread counts or algorithms; "" where unset. No other variable is ever read."""
    return {name: environment(name) for name in _VARIABLES}


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine: processor, memory page, accelerators. Recorded; kernel_settings holds what is compared."""
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "processor": _processor(),
        "system": platform.system(),
        "kernel": platform.release(),
        "byte_order": sys.byteorder,
        "num_devices": torch.accelerator.device_count() if torch.accelerator.is_available() else 0,
        "device_name": "cpu",
    }
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "get_device_name"):
            found["device_name"] = module.get_device_name(device)
    return found


def topology(rank: int, world_size: int, generation: int) -> dict[str, Any]:
    """Where this rank ran: recorded, so that a person can find the machine again."""
    return {
        "rank": rank,
        "world_size": world_size,
        "local_rank": int(environment("LOCAL_RANK", "0")),
        "local_world_size": int(environment("LOCAL_WORLD_SIZE", "1")),
        "node": int(environment("GROUP_RANK", "0")),
        "host": host.hostname(),
        "boot_id": host.boot_id(),
        "backend": dist.get_backend() if dist.is_initialized() else "none",
        "generation": generation,
        "launcher": "elastic" if environment("TORCHELASTIC_RUN_ID") else "plain",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def _flushes_denormals() -> bool:
    return bool((torch.tensor([1e-40], device="cpu") * 0.5 == 0).item())

"""The CPU, the system and their memory; free of torch."""

import platform

import psutil

from finetune.devices import host
from finetune.devices.check import ROOM_FOR_BERT_BASE_BYTES, Check


def check_cpu() -> Check:
    """Say which CPU it is, and whether Python runs as a program for it."""
    finding = ", ".join(filter(None, [platform.machine(), host.cpu_name()]))
    if host.is_under_rosetta():
        return Check(
            "processor",
            "warning",
            f"{finding}: this Python runs as an Intel program under Rosetta, which hides the GPU",
            host.way_out_of_rosetta(),
        )
    if host.is_mac() and platform.machine() != "arm64":
        return Check(
            "processor",
            "warning",
            f"{finding}: PyTorch supports the GPUs of Macs with Apple silicon alone",
            "use --device cpu; PyTorch's last packages for Intel Macs are of version 2.2",
        )
    return Check("processor", "ok", finding)


def check_system() -> Check:
    """Say which system it is, and on a Mac whether it is new enough for PyTorch's GPU support."""
    if not host.is_mac():
        return Check("system", "ok", platform.platform())
    finding = f"macOS {host.macos_version()}"
    if platform.machine() != "arm64" or not host.is_macos_too_old():
        return Check("system", "ok", finding)
    return Check(
        "system",
        "warning",
        f"{finding}: the GPU needs macOS {host.OLDEST_MACOS} or newer with this PyTorch",
        host.way_to_newer_macos(),
    )


def check_bf16() -> Check:
    """Say whether the CPU has bf16 instructions."""
    found = host.bf16_instructions()
    if not found:
        return Check("bf16", "ok", "the CPU has no bf16 instructions: fp32 is its own format")
    return Check("bf16", "ok", f"the CPU has bf16 instructions: {', '.join(found)}")


def check_memory() -> Check:
    """Say how much memory there is, and whether what is free holds BERT-base in training."""
    memory = psutil.virtual_memory()
    finding = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    if memory.available >= ROOM_FOR_BERT_BASE_BYTES:
        return Check("memory", "ok", finding)
    return Check(
        "memory",
        "warning",
        f"{finding}; to train all of BERT-base takes {ROOM_FOR_BERT_BASE_BYTES / 2**30:.1f}",
        "close other programs, or train less: --freeze-core, or a smaller --model",
    )

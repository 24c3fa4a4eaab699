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
    finding += f": the GPU needs macOS {host.OLDEST_MACOS} or newer with this PyTorch"
    return Check("system", "warning", finding, host.way_to_newer_macos())


def check_bf16() -> Check:
    """Say whether the CPU has bf16 instructions."""
    found = ", ".join(host.bf16_instructions())
    return Check("bf16", "ok", f"bf16 instructions: {found}" if found else "no bf16 instructions")


def check_memory() -> Check:
    """Say how much memory there is, and whether what is free holds BERT-base in training."""
    memory = psutil.virtual_memory()
    finding = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    has_room = memory.available >= ROOM_FOR_BERT_BASE_BYTES
    needed = f"; to train all of BERT-base takes {ROOM_FOR_BERT_BASE_BYTES / 2**30:.1f}"
    remedy = "close other programs, or train less: --freeze-core, or a smaller --model"
    return Check.warn_unless(has_room, "memory", finding + needed * (not has_room), remedy)

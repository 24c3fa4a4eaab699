"""Metal's messages are those that people reported; standard error is that of a real process."""

import os
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest
import torch
from odd_worker import METAL_REASONS, METAL_TEXT

from finetune.devices.mps import metal_errors
from finetune.devices.mps.device import MpsDevice
from finetune.devices.mps.metal_errors import why_dropped
from finetune.errors import LossNotFinite, WorkDropped

# The last words of a process that Metal ends.
ABORT = """
import os
from finetune.devices.mps.metal_errors import MetalErrors
with MetalErrors():
    os.write(2, b"-[MTLDebugDevice newBuffer]: failed assertion\\n")
    os.abort()
"""
ABORTED = "Execution of the command buffer was aborted due to an error during execution. "


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{ABORTED}Discarded (victim of GPU error/recovery) "
         "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
         "the GPU failed at other work"),
        (f"{ABORTED}Ignored (for causing prior/excessive GPU errors) "
         "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)",
         "it had failed too often"),
        (f"{ABORTED}Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)",
         "it did not end"),
        ("\tInvalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource)",
         "an error that it does not explain"),
        ("\tInternal Error (0000000e:Internal Error)", "of an internal error"),
    ],
)  # fmt: skip
def test_reasons_are_in_words(text: str, reason: str) -> None:
    assert reason in (why_dropped(["Loading weights", text]) or "")


def test_other_lines_give_no_reason() -> None:
    assert why_dropped(["step 5/20  loss 1.500", "Error: (null)"]) is None


@pytest.fixture
def device(pretend_mac: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> MpsDevice:
    pretend_mac()
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    monkeypatch.setattr(metal_errors, "_MAX_SECONDS", 60)
    return MpsDevice()


@pytest.mark.parametrize("reason", METAL_REASONS.values())
def test_dropped_work_is_an_error_once_and_metals_own_words_are_shown(
    reason: str, device: MpsDevice, capfd: pytest.CaptureFixture[str]
) -> None:
    with device.watch_work():
        device.check_work(settles=True)
        os.write(2, METAL_TEXT.format(reason).encode())
        with pytest.raises(WorkDropped, match=reason.partition(" (")[0]) as found:
            device.check_work(settles=True)
        device.check_work(settles=True)
    assert found.value.remedy == "use a smaller --batch-size"
    assert capfd.readouterr().err == METAL_TEXT.format(reason)


@pytest.mark.parametrize("error", [None, LossNotFinite("the loss is nan", remedy="")])
def test_dropped_work_is_named_at_the_end_too_also_as_what_led_to_another_error(
    error: Exception | None, device: MpsDevice
) -> None:
    text = METAL_TEXT.format("Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackError)")
    with pytest.raises(WorkDropped) as found, device.watch_work():  # noqa: PT012
        os.write(2, text.encode())
        if error:
            raise error
    assert found.value.__context__ is error


def test_without_a_standard_error_nothing_is_read(
    device: MpsDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "__stderr__", None)
    with device.watch_work():
        device.check_work(settles=True)


def test_other_errors_pass(device: MpsDevice) -> None:
    with pytest.raises(ValueError, match=r"^no such class$"), device.watch_work():
        raise ValueError("no such class")


def test_a_process_that_was_started_meanwhile_keeps_its_standard_error(
    device: MpsDevice, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metal_errors, "_MAX_SECONDS", 0.1)
    before = psutil.Process().children()
    with device.watch_work():
        readers = [one for one in psutil.Process().children() if one not in before]
        child = subprocess.Popen(["sh", "-c", "read _; echo late >&2"], stdin=subprocess.PIPE)
    child.communicate(b"\n")
    assert psutil.wait_procs(readers, timeout=60)[1] == []
    assert capfd.readouterr().err == "late\n"


def test_what_metal_writes_before_it_aborts_the_process_is_shown() -> None:
    child = subprocess.run([sys.executable, "-c", ABORT], capture_output=True, text=True)
    assert child.stderr == "-[MTLDebugDevice newBuffer]: failed assertion\n"

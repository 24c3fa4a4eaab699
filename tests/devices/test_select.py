from collections.abc import Callable

import pytest
from machines import LINUX, LINUX_WITH_CUDA, a_mac, pretend

from finetune import events
from finetune.devices import DEVICE_NAMES
from finetune.devices.cpu import CpuDevice
from finetune.devices.select import check_precision, select_device
from finetune.errors import ConfigurationInvalid, DeviceNotAvailable
from finetune.events import Event

MACHINE_WITH = {"auto": LINUX_WITH_CUDA, "cuda": LINUX_WITH_CUDA, "mps": a_mac(), "cpu": LINUX}


def ignore(event: Event) -> None:
    """Let nobody know."""


def test_auto_passes_over_a_gpu_that_does_not_work(pretend_mac: Callable[..., None]) -> None:
    pretend_mac(failure="MPS backend out of memory")
    emitted: list[Event] = []
    assert select_device("auto", emit=emitted.append).name == "cpu"
    assert isinstance(emitted[0], events.WarningMessage)
    assert "MPS backend out of memory" in emitted[0].message


@pytest.mark.parametrize("name", ["mps", "cuda"])
def test_a_named_gpu_that_is_not_there_is_an_error(pretend_linux: None, name: str) -> None:
    with pytest.raises(DeviceNotAvailable) as caught:
        select_device(name, emit=ignore)
    assert caught.value.exit_code == 4
    assert "--device cpu" in caught.value.remedy


@pytest.mark.parametrize("name", DEVICE_NAMES)
def test_every_offered_name_leads_to_a_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(MACHINE_WITH[name], monkeypatch)
    assert select_device(name, emit=ignore).name == ("cuda" if name == "auto" else name)


def test_another_precision_is_refused_with_those_that_the_device_has() -> None:
    with pytest.raises(ConfigurationInvalid, match="cpu can't compute in fp16") as caught:
        check_precision(CpuDevice(), "fp16")
    assert caught.value.remedy == "use --precision fp32 or bf16"

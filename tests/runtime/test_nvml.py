"""The driver's figures, read from a stand-in for NVIDIA's module."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lm_tuning.runtime.nvml import CardReading, CardSampler, find_card, list_cards, read_card

GIB = 2**30


class FakeNvml(ModuleType):
    """Two cards; each reading finds the next of ``utilizations`` and ``powers``, in per cent and milliwatts."""

    class NVMLError(Exception):
        pass

    def __init__(self, utilizations: list[int], powers: list[int], *, has_driver: bool = True) -> None:
        super().__init__("pynvml")
        self.utilizations, self.powers, self.has_driver = utilizations, powers, has_driver
        self.num_open = 0
        self.used = 10 * GIB
        self.has_answered = threading.Event()

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self.num_open > 0
        if uuid != "GPU-22":
            raise self.NVMLError("Not Found")
        return "second"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        assert self.num_open > 0
        if index == 2:
            raise self.NVMLError("Insufficient Permissions")
        return ["first", "second"][index]

    def nvmlDeviceGetMemoryInfo(self, card: str) -> Any:
        self.used += GIB
        return SimpleNamespace(used=self.used - GIB, total=80 * GIB)

    def refuse(self, *_: object) -> Any:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetName(self, card: str) -> str:
        return f"NVIDIA {card}"

    def nvmlDeviceGetCudaComputeCapability(self, card: str) -> tuple[int, int]:
        if card == "first":
            raise self.NVMLError("Not Supported")
        return (9, 0)

    def nvmlDeviceGetUtilizationRates(self, card: str) -> Any:
        return SimpleNamespace(gpu=self._next(self.utilizations))

    def nvmlDeviceGetPowerUsage(self, card: str) -> int:
        power = self._next(self.powers)
        if not self.powers:
            self.has_answered.set()
        return power

    def _next(self, values: list[int]) -> int:
        if not values:
            raise self.NVMLError("Not Supported")
        return values.pop(0)


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml) -> FakeNvml:
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_the_cards_are_those_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeNvml([], []))
    assert list_cards() == [("NVIDIA first", 80 * GIB, None), ("NVIDIA second", 80 * GIB, (9, 0))]
    assert fake.num_open == 0, "the library is closed again"
    use(monkeypatch, FakeNvml([], [], has_driver=False))
    assert list_cards() == []


def test_a_card_counts_although_the_driver_tells_nothing_else_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeNvml([], []))
    silent = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetName")  # of a card that shares the processor's memory, for one
    for name in silent:
        monkeypatch.setattr(fake, name, fake.refuse, raising=False)
    assert list_cards() == [("NVIDIA GPU", 0, None), ("NVIDIA GPU", 0, (9, 0))]
    monkeypatch.setattr(fake, "nvmlDeviceGetCount", fake.refuse, raising=False)
    assert list_cards() == []
    assert fake.num_open == 0, "the library is closed again"


def test_a_reading_has_bytes_a_fraction_and_watts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeNvml([93], [310_500]))
    assert read_card("GPU-22") == CardReading(10 * GIB, 80 * GIB, 0.93, 310.5)
    assert fake.num_open == 0, "the library is closed again"


def test_what_the_driver_does_not_tell_is_none_and_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeNvml([], []))
    reading = read_card()
    assert reading == CardReading(10 * GIB, 80 * GIB, None, None)
    assert reading.figures() == {"gpu_memory_used_bytes": 10 * GIB}


@pytest.mark.parametrize("case", ["no driver", "no such card", "no package"])
def test_without_card_driver_or_package_there_is_no_reading(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    if case == "no package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        use(monkeypatch, FakeNvml([93], [310_500], has_driver=case != "no driver"))
    assert read_card("elsewhere") is None
    with CardSampler("elsewhere", seconds=0.001) as sampler:
        pass
    assert (sampler.latest, sampler.summary()) == (None, {})


def test_a_sampler_gives_means_and_the_most_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeNvml([90, 100, 80], [300_000, 400_000, 350_000]))
    with CardSampler("GPU-22", seconds=0.001) as sampler:
        assert sampler.latest is not None, "the first reading is there at once"
        assert fake.has_answered.wait(60)
    assert fake.num_open == 0
    summary = sampler.summary()
    assert summary["gpu_utilization_fraction"] == pytest.approx(0.9)
    assert summary["gpu_power_watts"] == pytest.approx(350)
    assert summary["gpu_memory_used_bytes"] >= 12 * GIB
    assert summary["gpu_memory_total_bytes"] == 80 * GIB


def test_a_card_is_known_to_the_driver_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"{index}2"))
    assert find_card("cuda") == "GPU-32"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    assert find_card("cuda") is None


def test_a_cpu_has_no_card() -> None:
    assert find_card("cpu") is None
    with CardSampler(find_card("cpu")) as sampler:
        pass
    assert sampler.summary() == {}

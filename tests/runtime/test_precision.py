"""Which dtypes are chosen, which are refused, and that the reason is told."""

from __future__ import annotations

import dataclasses

import pytest

from lm_tuning.errors import UserError
from lm_tuning.runtime.device import Device
from lm_tuning.runtime.precision import choose_precision

AVX2 = Device("cpu", "AMD EPYC", 1, 0, False, 2, "neither amx_bf16 nor avx512_bf16")
AMX = dataclasses.replace(AVX2, name="Xeon", supports_bf16=True, detail="amx_bf16")
H100 = Device("cuda", "NVIDIA H100", 1, 80 << 30, True, 16, "compute capability 9.0")
T4 = Device("cuda", "Tesla T4", 1, 16 << 30, False, 4, "compute capability 7.5")
MAC = Device("mps", "Apple M4", 1, 0, False, 8, "not tried on MPS")


@pytest.mark.parametrize(
    ("device", "method", "weights", "compute"),
    [
        (AVX2, "lora", "float32", "float32"),
        (AVX2, "full", "float32", "float32"),
        (AMX, "lora", "bfloat16", "bfloat16"),
        (AMX, "full", "float32", "bfloat16"),
        (H100, "lora", "bfloat16", "bfloat16"),
        (H100, "full", "float32", "bfloat16"),
        (T4, "lora", "float32", "float32"),
        (MAC, "lora", "float32", "float32"),
        (AVX2, "qlora", "float32", "float32"),
        (AMX, "qlora", "bfloat16", "bfloat16"),
        (H100, "qlora", "bfloat16", "bfloat16"),
        (T4, "qlora", "float32", "float16"),
    ],
)
def test_auto_takes_what_the_device_is_fast_at(device: Device, method: str, weights: str, compute: str) -> None:
    chosen = choose_precision(device, method=method)
    assert (chosen.weights, chosen.compute) == (weights, compute)
    assert device.name in chosen.reason and device.detail in chosen.reason
    assert chosen.warning is None


def test_quantized_weights_say_what_stays_as_it_is_and_how_float16_is_kept_right() -> None:
    assert "frozen base quantized, what is not in bfloat16, adapters in float32" in (
        choose_precision(H100, method="qlora").reason
    )
    reason = choose_precision(T4, method="qlora").reason
    assert "float16 products with a scaled loss" in reason and "no fast bfloat16" in reason
    assert "what is not in float32" in reason
    assert choose_precision(T4, method="qlora", weights_dtype="float16").weights == "float16"


def test_explicit_formats_are_kept_and_said_to_be_asked_for() -> None:
    chosen = choose_precision(H100, requested="float32")
    assert (chosen.weights, chosen.compute) == ("float32", "float32")
    assert "train.precision asks for it" in chosen.reason
    chosen = choose_precision(T4, requested="float16", method="full")
    assert (chosen.weights, chosen.compute) == ("float32", "float16")
    chosen = choose_precision(H100, weights_dtype="float32")
    assert (chosen.weights, chosen.compute) == ("float32", "bfloat16")
    assert "model.dtype asks for it" in chosen.reason


@pytest.mark.parametrize("method", ["lora", "full"])
def test_products_follow_weights_of_sixteen_bits(method: str) -> None:
    chosen = choose_precision(AVX2, method=method, weights_dtype="bfloat16")
    assert (chosen.weights, chosen.compute) == ("bfloat16", "bfloat16")
    assert chosen.warning is not None and "many times slower" in chosen.warning
    assert ("loses updates" in chosen.warning) == (method == "full")


def test_emulated_bfloat16_is_allowed_with_a_warning() -> None:
    chosen = choose_precision(AVX2, requested="bfloat16")
    assert chosen.compute == "bfloat16"
    assert chosen.warning is not None and "neither amx_bf16 nor avx512_bf16" in chosen.warning
    assert choose_precision(AMX, requested="bfloat16").warning is None


@pytest.mark.parametrize(
    ("device", "options", "words"),
    [
        (AVX2, {"requested": "float16"}, ["train.precision=float16", "CUDA", "AMD EPYC", "bfloat16"]),
        (MAC, {"requested": "float16"}, ["train.precision=float16", "MPS"]),
        (AVX2, {"weights_dtype": "float16"}, ["model.dtype=float16", "CUDA"]),
        (T4, {"requested": "bfloat16"}, ["train.precision=bfloat16", "8.0", "7.5", "float16"]),
        (H100, {"method": "full", "weights_dtype": "float16"}, ["model.dtype=float16", "full"]),
        (
            H100,
            {"requested": "float32", "weights_dtype": "bfloat16"},
            ["train.precision=float32", "model.dtype=bfloat16"],
        ),
    ],
)
def test_what_cannot_be_done_is_refused(device: Device, options: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        choose_precision(device, **options)
    assert len(caught.value.problems) == 1
    for word in words:
        assert word in caught.value.problems[0]


def test_all_problems_come_at_once() -> None:
    with pytest.raises(UserError) as caught:
        choose_precision(AVX2, requested="float16", weights_dtype="float16")
    assert len(caught.value.problems) == 2

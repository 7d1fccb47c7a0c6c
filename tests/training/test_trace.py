from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from lm_tuning.runtime.ranges import STEP_RANGE
from lm_tuning.training.profile import trace as trace_table
from lm_tuning.training.profile.trace import group_of, read_trace, sum_up


def event(name: str, cat: str, ts: float, dur: float, *, tid: int = 1, external: int | None = None) -> dict[str, Any]:
    args = {} if external is None else {"External id": external}
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args}


def step(number: int, ts: float, dur: float) -> dict[str, Any]:
    return event(f"{STEP_RANGE} {number}", "user_annotation", ts, dur)


ELEMENTWISE_KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float>>(int)"


class TestOnAGpu:
    """Times are those of kernels; what queued a kernel says what it is for."""

    events = (
        step(3, 1000, 500),
        step(4, 1500, 500),
        event("aten::mm", "cpu_op", 1010, 10, external=1),
        event("nvjet_tst_128x256", "kernel", 1100, 300, tid=7, external=1),
        event("aten::_scaled_dot_product_flash_attention", "cpu_op", 1030, 30, external=2),
        event("aten::mul", "cpu_op", 1040, 10, external=3),
        event(ELEMENTWISE_KERNEL, "kernel", 1400, 50, tid=7, external=3),
        event("Optimizer.step#AdamW.step", "user_annotation", 1600, 100),
        event("aten::mul_", "cpu_op", 1610, 10, external=4),
        event(ELEMENTWISE_KERNEL, "kernel", 1650, 100, tid=7, external=4),
        event("aten::add", "cpu_op", 1720, 10, external=5),
        event(ELEMENTWISE_KERNEL, "kernel", 1800, 40, tid=7, external=5),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 1820, 60, tid=8),
        event("triton_red_fused_rms_norm_3", "kernel", 2050, 50, tid=7),
        # Before the first step, so not counted.
        event("nvjet_tst_128x256", "kernel", 900, 50, tid=7),
    )

    def test_kernels_are_grouped_by_what_queued_them(self):
        table = sum_up(list(self.events))
        assert table.on_gpu
        assert table.num_steps == 2
        assert {group: round(seconds * 1e6) for group, seconds in table.seconds_by_group().items()} == {
            trace_table.PRODUCTS: 300,
            trace_table.OPTIMIZER: 100,
            trace_table.ELEMENTWISE: 90,
            trace_table.COPIES: 60,
            trace_table.ATTENTION: 50,
        }

    def test_the_time_without_a_kernel_counts_side_by_side_work_once(self):
        table = sum_up(list(self.events))
        # To the end of the last kernel, which the last step queued.
        assert table.seconds == pytest.approx(1100e-6)
        busy = 300 + 50 + 100 + (1880 - 1800) + 50
        assert table.busy_seconds == pytest.approx(busy * 1e-6)
        assert table.idle_fraction == pytest.approx(1 - busy / 1100)

    def test_the_same_kernel_in_two_groups_is_two_rows_and_the_longest_comes_first(self):
        table = sum_up(list(self.events))
        rows = [(row.name, row.group, row.count) for row in table.operations]
        assert rows[0] == ("nvjet_tst_128x256", trace_table.PRODUCTS, 1)
        assert [group for name, group, _ in rows if name == ELEMENTWISE_KERNEL] == [
            trace_table.OPTIMIZER,
            trace_table.ATTENTION,
            trace_table.ELEMENTWISE,
        ]
        assert [row.seconds for row in table.operations] == sorted(row.seconds for row in table.operations)[::-1]


class TestOnACpu:
    events = (
        step(1, 0, 1000),
        event("forward", "user_annotation", 0, 600),
        event("aten::linear", "cpu_op", 100, 300),
        event("aten::mm", "cpu_op", 150, 200),
        event("aten::silu", "cpu_op", 500, 100),
        event("aten::mm", "cpu_op", 550, 100, tid=2),
        event("Optimizer.step#AdamW.step", "user_annotation", 700, 200),
        event("aten::addcmul_", "cpu_op", 750, 100),
        event("aten::mm", "cpu_op", 5000, 100),
    )

    def test_each_operation_counts_without_what_it_called(self):
        table = sum_up(list(self.events))
        assert not table.on_gpu
        seconds = {(row.name, row.group): (round(row.seconds * 1e6), row.count) for row in table.operations}
        assert seconds == {
            ("aten::mm", trace_table.PRODUCTS): (300, 2),
            ("aten::linear", trace_table.PRODUCTS): (100, 1),
            ("aten::silu", trace_table.ELEMENTWISE): (100, 1),
            ("aten::addcmul_", trace_table.OPTIMIZER): (100, 1),
        }

    def test_the_rest_is_time_outside_of_operations(self):
        assert sum_up(list(self.events)).idle_fraction == pytest.approx(1 - (300 + 150 + 100) / 1000)


class TestRangesOfTheCode:
    """What runs inside one is for what it says, and so is its backward pass in whatever thread."""

    def number(self, name: str, ts: float, dur: float, sequence: int, *, forward_thread: int = 0, tid: int = 1) -> Any:
        args = {"External id": round(ts), "Sequence number": sequence, "Fwd thread id": forward_thread}
        return {"ph": "X", "name": name, "cat": "cpu_op", "ts": ts, "dur": dur, "tid": tid, "args": args}

    def host(self, *, backward_tid: int) -> list[dict[str, Any]]:
        return [
            step(1, 0, 1000),
            self.number("aten::mm", 10, 50, 1),
            event(f"{trace_table.WORK_RANGE}{trace_table.LOSS}", "user_annotation", 100, 300),
            self.number("aten::linear", 110, 90, 2),
            self.number("aten::mm", 120, 70, 2),
            self.number("aten::zeros", 300, 10, 3),
            # Outside of it, with the number that was the next one inside: this operation's backward pass has it.
            self.number("aten::mul", 450, 10, 3),
            self.number("aten::mm", 470, 30, 7, tid=3),
            self.number("MulBackward0", 500, 20, 3, forward_thread=1, tid=backward_tid),
            self.number("MmBackward0", 600, 100, 2, forward_thread=1, tid=backward_tid),
            event("aten::mm", "cpu_op", 610, 80, tid=backward_tid, external=900),
            self.number("MmBackward0", 800, 100, 1, forward_thread=1, tid=backward_tid),
            event("aten::mm", "cpu_op", 810, 80, tid=backward_tid, external=901),
        ]

    @pytest.mark.parametrize("backward_tid", [1, 2])
    def test_on_a_cpu(self, backward_tid):
        table = sum_up(self.host(backward_tid=backward_tid))
        seconds = {(row.name, row.group): round(row.seconds * 1e6) for row in table.operations}
        assert seconds["aten::mm", trace_table.LOSS] == 70 + 80
        assert seconds["aten::mm", trace_table.PRODUCTS] == 50 + 30 + 80
        assert seconds["aten::linear", trace_table.LOSS] == 20
        assert ("MulBackward0", trace_table.LOSS) not in seconds

    def test_on_a_gpu(self):
        kernels = [
            event("nvjet", "kernel", 2000 + index, 1, tid=9, external=i) for index, i in enumerate((120, 900, 901))
        ]
        table = sum_up([*self.host(backward_tid=2), *kernels])
        assert table.on_gpu
        assert {row.group: row.count for row in table.operations} == {trace_table.LOSS: 2, trace_table.PRODUCTS: 1}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", trace_table.PRODUCTS),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", trace_table.PRODUCTS),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", trace_table.PRODUCTS),
        ("aten::addmm", trace_table.PRODUCTS),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", trace_table.ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", trace_table.ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", trace_table.ATTENTION),
        ("_rms_norm_forward_kernel", trace_table.ELEMENTWISE),
        ("triton_poi_fused_mul_silu_2", trace_table.ELEMENTWISE),
        ("void at::native::reduce_kernel<512, 1>", trace_table.ELEMENTWISE),
        ("liger_cross_entropy_kernel", trace_table.LOSS),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", trace_table.OPTIMIZER),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>", trace_table.QUANTIZED),
        ("Memcpy DtoD (Device -> Device)", trace_table.COPIES),
        ("void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>", trace_table.COPIES),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", trace_table.COMMUNICATION),
        ("aten::view", trace_table.OTHER),
    ],
)
def test_names_find_their_group(name, group):
    assert group_of(name) == group


def test_a_trace_is_read_gzipped_or_not_and_may_be_without_steps(tmp_path):
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    content = json.dumps({"traceEvents": [step(1, 0, 100), {"ph": "M", "name": "process_name"}]})
    plain.write_text(content)
    packed.write_bytes(gzip.compress(content.encode()))
    assert read_trace(plain) == read_trace(packed)
    assert read_trace(plain).num_steps == 1
    assert sum_up([]).idle_fraction == 0.0

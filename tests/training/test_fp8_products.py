"""What products in 8 bits compute, and that the weights in 16 bits come back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition

from lm_tuning.errors import UserError
from lm_tuning.training.kernels import fp8
from lm_tuning.training.kernels.fp8 import find_fp8_layers, multiply_frozen, quantize_rows, quantize_weight
from tests.support.cards import needs_fp8


def test_a_row_is_quantized_by_itself() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(6, 64) * torch.tensor([1e-12, 1e-3, 1.0, 50.0, 1e4, 0.0])[:, None]
    quantized, scale = quantize_rows(matrix)
    assert quantized.dtype == torch.float8_e4m3fn
    assert scale.shape == (6, 1)
    back = quantized.float() * scale
    # Three bits of mantissa: half a unit of the last of them.
    assert ((back - matrix).abs() <= matrix.abs() / 16 + matrix.abs().amax(dim=1, keepdim=True) * 1e-5).all()
    assert float(quantized.float().abs().max()) == fp8.FP8_MAX
    for index in range(6):
        alone, alone_scale = quantize_rows(matrix[index : index + 1])
        assert torch.equal(alone.float(), quantized[index : index + 1].float())
        assert torch.equal(alone_scale, scale[index : index + 1])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_stays_none(value: float) -> None:
    matrix = torch.ones(2, 16)
    matrix[0, 3] = value
    product = multiply_frozen(matrix, quantize_weight(torch.ones(16, 16)))
    assert product[0].isnan().all()
    assert torch.equal(product[1], torch.full((16,), 16.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_and_gradients_are_near_those_of_the_weight(has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(128, 48, bias=has_bias)
    x = torch.randn(3, 40, 128, requires_grad=True)
    gradient = torch.randn(3, 40, 48)
    wanted = layer(x)
    wanted.backward(gradient)
    wanted_gradient, x.grad = x.grad, None
    found = multiply_frozen(x, quantize_weight(layer.weight.detach()), layer.bias)
    found.backward(gradient.bfloat16())
    assert found.dtype == torch.bfloat16
    assert found.shape == wanted.shape
    for ours, exact in ((found, wanted), (x.grad, wanted_gradient)):
        assert ours is not None
        assert exact is not None
        # Two factors that are each off by 2.6 % or so, independently of each other.
        assert 0.01 < float((ours - exact).norm() / exact.norm()) < 0.05


class Attention(torch.nn.Module):
    """Layers with one input, one of them with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 32)
        self.requires_grad_(False)
        self.adapter = torch.nn.Parameter(torch.ones(64, 64) / 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.nn.functional.rms_norm(x, (64,))
        return self.q_proj(x) + x @ self.adapter, self.k_proj(x)


def test_compiled_an_input_is_quantized_once_for_all_layers_that_read_it() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    model, graphs = Attention(), []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    find_fp8_layers(model, [model]).switch_on()
    eager = [part.detach() for part in model(torch.ones(2, 16, 64))]
    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    with torch._dynamo.config.patch(specialize_float=True):
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)(torch.ones(2, 16, 64))
        sum(part.sum() for part in compiled).backward()
    torch.testing.assert_close([part.detach() for part in compiled], eager)
    forward, backward = graphs
    assert sum("amax" in target for target in forward) == 1
    assert not any("amax" in target for target in backward), "no gradient of an input is asked for"


def test_only_frozen_layers_of_fitting_sizes_are_taken() -> None:
    model = Attention()
    model.odd = torch.nn.Linear(64, 40).requires_grad_(False)
    model.trained = torch.nn.Linear(64, 64)
    found = find_fp8_layers(model, [model])
    assert found.layers == [model.q_proj, model.k_proj]
    assert found.num_others == 1
    with pytest.raises(UserError, match=r"train\.fp8 = true .* the sides of its layers are 40, 64, .* multiples of 16"):
        find_fp8_layers(model, [model.odd])
    with pytest.raises(UserError, match="Linear has no frozen linear layer"):
        find_fp8_layers(model.trained, [])


@pytest.mark.parametrize("kept_share", [1.0, 0.0])
def test_weights_come_back_bit_by_bit(kept_share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_memory_of", lambda device: 1 << 30)
    monkeypatch.setattr(fp8, "KEPT_SHARE", kept_share)
    torch.manual_seed(0)
    model = Attention()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(2, 8, 64)
    plain = model(x)[1]
    layers = find_fp8_layers(model, [model])
    layers.switch_on()
    layers.release_weights()
    assert layers.wait_on_host is (kept_share == 0)
    in_8_bits = model(x)[1]
    assert not torch.equal(in_8_bits, plain)
    assert model.k_proj.weight.isnan().all() if kept_share == 0 else not model.k_proj.weight.isnan().any()
    assert model.k_proj.weight.shape == (32, 64)
    with layers.paused():
        assert torch.equal(model(x)[1], plain)
        assert {
            name: torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()
        } == dict.fromkeys(before, True)
    assert torch.equal(model(x)[1], in_8_bits)
    layers.switch_off()
    assert torch.equal(model(x)[1], plain)
    assert not layers.is_on
    assert all("forward" not in layer.__dict__ and "fp8_weight" not in layer.__dict__ for layer in layers.layers)


@pytest.mark.gpu
@needs_fp8
@pytest.mark.parametrize("num_rows", [1, 77, 256])
def test_on_a_gpu_products_are_those_of_the_emulation(num_rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 160), torch.randn(num_rows, 160, requires_grad=True)
    on_card = x.detach().cuda().requires_grad_()
    wanted, found = (
        multiply_frozen(x, quantize_weight(weight)),
        multiply_frozen(on_card, quantize_weight(weight.cuda())),
    )
    gradient = torch.randn(num_rows, 96).bfloat16()
    wanted.backward(gradient)
    found.backward(gradient.cuda())
    assert x.grad is not None
    assert on_card.grad is not None
    for ours, theirs in ((found.detach().cpu(), wanted.detach()), (on_card.grad.cpu(), x.grad)):
        assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 0.01

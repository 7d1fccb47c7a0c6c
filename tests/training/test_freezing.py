"""Parts of a model stay as they are, and a pattern that would freeze nothing or everything is refused."""

from __future__ import annotations

import logging

import pytest
import torch

from lm_tuning.errors import UserError
from lm_tuning.training.run import run_training
from lm_tuning.training.setup.model import freeze_modules
from tests.support.settings import vary
from tests.support.tiny import make_model
from tests.support.tiny_tasks import make_classifier


def trainable(model: torch.nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if each.requires_grad}


def test_a_pattern_freezes_a_module_and_all_that_lies_in_it():
    model = make_model(num_layers=3)
    frozen = freeze_modules(model, ["layers.0", "layers.1.mlp"])
    assert frozen == ["model.layers.0", "model.layers.1.mlp"]
    still = {
        name for name, _ in model.named_parameters() if name.startswith(("model.layers.0.", "model.layers.1.mlp."))
    }
    assert trainable(model) == {name for name, _ in model.named_parameters()} - still


def test_one_layer_is_not_ten_and_a_star_is_anything():
    model = make_model(num_layers=12)
    assert freeze_modules(model, ["layers.1"]) == ["model.layers.1"]
    model = make_model(num_layers=12)
    assert freeze_modules(model, ["layers.1?"]) == ["model.layers.10", "model.layers.11"]
    model = make_model(num_layers=2)
    assert freeze_modules(model, ["*.mlp"]) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    model = make_model(num_layers=2)
    assert "model.layers.1.self_attn.q_proj" in freeze_modules(model, ["model.layers.*"])


def test_a_tied_head_is_frozen_with_its_embedding_and_said_to_be(caplog):
    model = make_model(tied=True)
    with caplog.at_level(logging.WARNING):
        freeze_modules(model, ["embed_tokens"])
    assert "share their weights: lm_head" in caplog.text
    assert not model.lm_head.weight.requires_grad
    caplog.clear()
    freeze_modules(make_model(tied=False), ["embed_tokens"])
    assert "share" not in caplog.text


def test_a_pattern_without_a_match_names_near_ones_and_freezes_nothing():
    model = make_model()
    with pytest.raises(UserError) as caught:
        freeze_modules(model, ["embed_tokns", "layers.7", "layers.0"])
    first, second = caught.value.problems
    assert "no module of the model is named 'embed_tokns'" in first and "'embed_tokens'" in first
    assert "'layers.7'" in second and "'layers.1'" in second
    assert trainable(model) == {name for name, _ in model.named_parameters()}
    with pytest.raises(UserError, match=r"Some of them are model, model\.embed_tokens, model\.layers"):
        freeze_modules(model, ["@@@"])


@pytest.mark.parametrize("patterns", [["*"], ["model"]], ids=["by a star", "a head tied to the embedding"])
def test_freezing_everything_is_refused(paths, settings, patterns):
    with pytest.raises(UserError, match=r"\[nothing-has-gradient\].*train\.freeze = \[.*\] freezes the whole model"):
        run_training(paths, vary(settings, freeze=patterns))


def test_a_new_head_has_to_be_trained():
    model = make_classifier()
    model.lm_tuning_fresh_head = True
    with pytest.raises(UserError, match=r"freezes the classification head \(score\), which is new and random"):
        freeze_modules(model, ["score"])
    model.lm_tuning_fresh_head = False
    assert freeze_modules(model, ["score"]) == ["score"]


def test_frozen_parts_get_no_gradient_and_do_not_move():
    model = make_model(tied=False)
    freeze_modules(model, ["embed_tokens", "layers.0"])
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    model(input_ids=torch.arange(10, 20)[None]).logits.logsumexp(-1).mean().backward()
    optimizer.step()
    moved = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert moved == trainable(model)

"""The default model with an adapter, exported in every dtype within its bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.export import run
from lm_tuning.export.card import CardSources
from lm_tuning.export.checks import plan_export
from lm_tuning.models.base_model import EMBEDDED_MODEL, describe_base_model, is_converted
from lm_tuning.models.loading import load_model, load_tokenizer
from lm_tuning.models.record import ModelLocation
from lm_tuning.parameters.export import ExportParameters
from tests.support.stored import publish_tokens

REPOSITORY = Path(__file__).parents[2]
ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris, on the Seine.",
    "Name three colours.": "Red, green and blue are three colours.",
    "How many days has a week?": "A week has seven days, from Monday to Sunday.",
    "Who wrote Hamlet?": "Hamlet was written by William Shakespeare around 1600.",
}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokens of four chats and an adapter that changes what the model says."""
    base = REPOSITORY / EMBEDDED_MODEL
    if not is_converted(base):
        pytest.skip(f"{base} is not there yet: kedro run makes it")
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("real")
    tokenizer = load_tokenizer(str(base))
    rows = []
    for question, answer in ANSWERS.items():
        turn = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        given = tokenizer(prompt, add_special_tokens=False).input_ids
        wanted = [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        rows.append(([*given, *wanted], [(len(given), len(given) + len(wanted))]))
    publish_tokens(folder / "tokens", "k", test=rows)
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(load_model(str(base)), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.002 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "tuned", save_embedding_layers=False)
    tokenizer.save_pretrained(folder / "tuned")
    facts = {"method": "lora", "base": describe_base_model(str(base)), "tokens_key": "k", "finished_step": 1}
    (folder / "tuned/tuning.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_exported_within_its_bounds(tuned: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_tuning.export.card.read_token_summary", lambda folder: {"splits": {}})
    # Of some forty tokens a single near tie is more than a hundredth.
    parity = {"num_generate_rows": 1, "min_top_1_agreement": 0.97}
    location = ModelLocation(name_or_path=str(REPOSITORY / EMBEDDED_MODEL), revision=None, trust_remote_code=False)
    plan = plan_export(
        tuned / "tuned",
        tuned / "tokens/k",
        ExportParameters(dtype=dtype, parity=parity),
        base=location,
        digest_cache=None,
        target=tuned / "export",
    )
    made = run.export_model(plan, tuned / f"work-{dtype}", device="cpu", card=CardSources(tuned, {}))
    distance = made.record["parity"]["distance"]
    assert distance["num_predictions"] > 30
    assert distance["mean_kl_nats"] < (1e-9 if dtype == "float32" else 1e-3)
    weights = sum(path.stat().st_size for path in made.folder.glob("*.safetensors"))
    assert weights == pytest.approx(134_515_008 * (4 if dtype == "float32" else 2), rel=1e-3)

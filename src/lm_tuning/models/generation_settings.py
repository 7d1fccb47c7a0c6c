"""Settings of generation that are stored with a tuned model, so that other programs answer as it was evaluated.

A chat template often ends a turn with another token than the one that the model's own settings stop at. A model that
was trained to end its answers with ``<|end|>`` then runs on to the limit wherever plain ``generate`` is called.
Settings that came with a base model and could not be saved again are repaired.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from lm_tuning.errors import UserError
from lm_tuning.models.folders import is_local
from lm_tuning.models.record import ModelLocation, QuantizationRecord, TuningRecord
from lm_tuning.models.structure import AUTO_CLASSES, has_encoder, inner_model
from lm_tuning.parameters.generation import GenerationParameters
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

# Settings that sampling, beams, a cache or a detailed output alone reads, as GenerationConfig.validate groups them.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_BEAMS = ("early_stopping", "length_penalty")
_CACHES = ("cache_implementation", "cache_config")
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def clean_generation_settings(model: Any, name_or_path: str) -> list[str]:
    """Remove settings that have no effect, with one warning that names them.

    Such as a temperature beside ``do_sample: false``: published models have them, and transformers refuses to save a
    model with them once anything about its generation was changed. That would be at the end of a training.

    Args:
        model: a loaded model; its ``generation_config`` is changed.
        name_or_path: what the model is called in messages.

    Returns:
        The keys that were taken out.

    Raises:
        UserError: the settings are wrong in another way, which only their author can fix.
    """
    settings = getattr(model, "generation_config", None)
    if settings is None or not _reasons(settings):
        return []
    without_effect = [
        *(_SAMPLING if settings.do_sample is not True else ()),
        *(_BEAMS if settings.num_beams in (None, 1) else ()),
        *(_OUTPUTS if settings.return_dict_in_generate is not True else ()),
        *(_CACHES if settings.use_cache is False else ()),
    ]
    removed: dict[str, str] = {}
    for key in without_effect:
        before = getattr(settings, key, None)
        # A value that is as good as none is no problem; only what makes the settings invalid is named.
        if before is not None and f"`{key}`" in _reasons(settings):
            setattr(settings, key, None)
            removed[key] = f"{key} = {before}"
    # What is left contradicts itself in a way that nothing here can decide.
    reasons = _reasons(settings)
    if reasons:
        raise UserError(
            f"generation_config.json of {name_or_path} is invalid, so the trained model could not be saved: {reasons} "
            "Fix the file, or take it away."
        )
    logger.warning(
        "generation_config.json of %s has settings without effect, which transformers would refuse to save: %s. They "
        "are left out (do_sample = %s, num_beams = %s).",
        name_or_path,
        ", ".join(removed.values()),
        settings.do_sample,
        settings.num_beams,
    )
    return list(removed)


def _reasons(settings: Any) -> str:
    """Return what transformers would say when it saves the settings, in one line; empty when nothing."""
    # strict is what save_pretrained checks by; without it, the same findings are only logged.
    try:
        settings.validate(strict=True)
    except ValueError as error:
        # Without its heading and its closing remark on where settings come from: the message here names the file.
        lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
        told = [line for line in lines if line != "GenerationConfig is invalid:" and not line.startswith("If you're")]
        return " ".join(told)
    return ""


GENERATION_NAME = "generation_config.json"
CARD_NAME = "README.md"


def settings_of_answers(
    model: Any,
    tokenizer: Any,
    *,
    supervised_stop_ids: list[int],
    first_id: int | None,
    pad_id: int,
    generation: GenerationParameters,
) -> Any:
    """Build the settings by which a tuned model is evaluated, its answers ended where it learned to end them.

    What the base model's settings say of sampling, penalties and lengths is left out, as it is in the evaluation.

    Args:
        model: the tuned model, wrapped or not; its EOS tokens stay EOS tokens.
        tokenizer: the model's; its EOS token is one too.
        supervised_stop_ids: EOS tokens of the answers in the training rows.
        first_id: the token that every answer of an encoder-decoder begins with; ``None`` for none.
        pad_id: fills shorter rows of a batch.
        generation: how the evaluation chooses tokens.

    Returns:
        A ``GenerationConfig``.
    """
    inner = inner_model(model)
    known = stop_ids_of(inner, tokenizer)
    # Chat templates often end a turn with another token than the text's, and only the text's is among the settings.
    missing = sorted(set(supervised_stop_ids) - known)
    if missing:
        logger.info(
            "Answers end in %s, at which %s does not stop by its own settings: the tuned model's %s names it.",
            ", ".join(str(tokenizer.convert_ids_to_tokens(token)) for token in missing),
            getattr(inner, "name_or_path", "") or "the base model",
            GENERATION_NAME,
        )
    reads_apart = has_encoder(inner.config)
    # No limit on new tokens: servers take one for a limit on every request. No stop strings either, which generate
    # refuses unless it is given the tokenizer too.
    return plain_settings(
        **library_settings(generation),
        bos_token_id=getattr(inner.generation_config, "bos_token_id", None),
        eos_token_id=sorted(known | set(supervised_stop_ids)) or None,
        pad_token_id=pad_id,
        decoder_start_token_id=inner.config.decoder_start_token_id if reads_apart else None,
        forced_bos_token_id=first_id if reads_apart else None,
    )


def library_settings(generation: GenerationParameters) -> dict[str, object]:
    """Return how tokens are chosen in the words of a ``GenerationConfig``; what changes nothing is left out.

    Args:
        generation: the parameters; their lengths, stop strings and seed are the caller's to handle.
    """
    settings: dict[str, object] = {"num_beams": generation.num_beams}
    if generation.do_sample:
        # Its 0 takes all tokens, where None would take its usual 50.
        settings |= {"do_sample": True, "top_k": generation.top_k or 0}
        settings |= {"temperature": generation.temperature or 1.0, "top_p": generation.top_p or 1.0}
    if generation.repetition_penalty != 1:
        settings["repetition_penalty"] = generation.repetition_penalty
    if generation.no_repeat_ngram_size:
        settings["no_repeat_ngram_size"] = generation.no_repeat_ngram_size
    if generation.length_penalty is not None:
        settings["length_penalty"] = generation.length_penalty
    return settings


def plain_settings(**settings: Any) -> Any:
    """Return settings of generation that say nothing but what is given, and draw nothing unless that asks for it.

    Args:
        **settings: fields of a ``GenerationConfig``.
    """
    from transformers import GenerationConfig

    make_config: Any = GenerationConfig  # its constructor is not typed
    return make_config(**{"do_sample": False, **settings})


def stop_ids_of(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens at which a model stops by its settings and its tokenizer.

    Args:
        model: a language model, not wrapped.
        tokenizer: the model's.
    """
    # Either may name one token, several or none, and often they do not agree: generate stops at any of them.
    stops: set[int] = set()
    configured = getattr(model.generation_config, "eos_token_id", None)
    for ids in (tokenizer.eos_token_id, configured):
        stops.update([ids] if isinstance(ids, int) else ids or [])
    return stops


def take_stored_settings(model: Any, folder: Path) -> None:
    """Give a base model the settings that were stored with its adapter; leave it alone where none were.

    Args:
        model: the base model inside the adapter's wrapper.
        folder: a tuned model.
    """
    if (folder / GENERATION_NAME).is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(str(folder))


def complete_adapter_config(folder: Path, base: ModelLocation) -> None:
    """Name an adapter's base so that peft finds it from anywhere: a local folder in full, a hub name by its revision.

    Args:
        folder: what peft has written; its ``adapter_config.json`` is changed.
        base: where the base model comes from.
    """
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # A relative path would be looked for from the working folder of whoever loads the adapter.
    name = base["name_or_path"]
    config["base_model_name_or_path"] = str(Path(name).expanduser().absolute()) if is_local(name) else name
    config["revision"] = base["revision"]
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def write_card(folder: Path, facts: TuningRecord, *, label_map: dict[str, int] | None, pad_id: int) -> None:
    """Write a README for people who use the model without this project: what it is, and the calls that load it.

    Args:
        folder: the tuned model.
        facts: ``method``, ``task``, ``quantization``, ``base`` and ``compute_dtype``, as in ``tuning.json``.
        label_map: id of each class by its name; ``None`` without classes.
        pad_id: id of the pad token.
    """
    base = facts["base"]
    what = "Weights" if facts["method"] == "full" else "An adapter"
    lines = [
        f"# {what} of {base['name_or_path']}",
        "",
        f"{what} for `{facts['task']}`, trained by LM Tuning with the method `{facts['method']}` "
        f"({count_of(facts['finished_step'], 'step')}). `tuning.json` has the details.",
        "",
        "## Use it with transformers",
        "",
        "```python",
        *_loading_code(facts, label_map=label_map, pad_id=pad_id),
        "```",
        "",
    ]
    if facts["task"] != "sequence_classification":
        # peft reads no generation settings from an adapter's folder, so whoever loads one has to pass them.
        lines += [
            f"`{GENERATION_NAME}` holds the settings that the model is evaluated with: the EOS tokens that it learned, "
            "and how each token is chosen."
        ]
        if facts["method"] != "full":
            lines += [
                "An adapter takes its base model's settings unless it is told of these, and then may not stop where it "
                "learned to: pass them, as above."
            ]
        lines += ["Say how long an answer may be with `max_new_tokens`.", ""]
    (folder / CARD_NAME).write_text("\n".join(lines), encoding="utf-8")


def _loading_code(facts: TuningRecord, *, label_map: dict[str, int] | None, pad_id: int) -> list[str]:
    """Return lines that set ``tokenizer`` and ``model``, given ``folder``."""
    is_full, generates = facts["method"] == "full", facts["task"] != "sequence_classification"
    loader = AUTO_CLASSES[facts["task"]]
    if not is_full:
        loader = loader.replace("Auto", "AutoPeft", 1)
    held = facts["quantization"]
    names = ["AutoTokenizer", *([loader] if is_full else [])]
    names += ["GenerationConfig"] if generates and not is_full else []
    names += ["BitsAndBytesConfig"] if held is not None else []
    lines = ["import torch"] if held is not None else []
    lines += [] if is_full else [f"from peft import {loader}"]
    lines += [f"from transformers import {', '.join(sorted(names))}", "", 'folder = "."  # where this file lies']
    lines += ["tokenizer = AutoTokenizer.from_pretrained(folder)"]
    options = [] if is_full or not generates else ["generation_config=GenerationConfig.from_pretrained(folder)"]
    if label_map is not None and not is_full:
        options.append(f"num_labels={len(label_map)}")
    if held is not None:
        options.append(f"quantization_config=BitsAndBytesConfig({_quantization_code(held, facts['compute_dtype'])})")
    if facts["base"].get("trust_remote_code"):
        options.append("trust_remote_code=True  # the base model comes with code of its own")
    if not options:
        lines += [f"model = {loader}.from_pretrained(folder)"]
    else:
        lines += [f"model = {loader}.from_pretrained(", "    folder,", *(f"    {option}," for option in options), ")"]
    if not generates:
        lines += [f"model.config.pad_token_id = {pad_id}"]
        if not is_full:
            lines += [
                "",
                "import json",
                "",
                'labels = json.load(open(f"{folder}/label_map.json"))  # id of each class by its name',
                "model.config.id2label = {index: name for name, index in labels.items()}",
            ]
    return lines


def _quantization_code(held: QuantizationRecord, compute_dtype: str) -> str:
    if held["bits"] == 8:
        return "load_in_8bit=True"
    return (
        f'load_in_4bit=True, bnb_4bit_quant_type="{held["quant_type"]}", '
        f"bnb_4bit_use_double_quant={held['double_quant']}, bnb_4bit_compute_dtype=torch.{compute_dtype}"
    )

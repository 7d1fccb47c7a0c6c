"""Write the model card of an export: what it is, how it is loaded, what it was made from, and how good it is."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_tuning.export.checks import ExportPlan
from lm_tuning.export.gguf_export import GGUF_NAME
from lm_tuning.export.records import DistanceRecord, ExportRecord
from lm_tuning.export.report import describe_interval, reader_of, weights_in
from lm_tuning.export.served import bitsandbytes_options
from lm_tuning.models.folders import is_local
from lm_tuning.models.generation_settings import CARD_NAME, GENERATION_NAME
from lm_tuning.models.structure import AUTO_CLASSES
from lm_tuning.models.tuned import FACTS_NAME, LABELS_NAME
from lm_tuning.reporting.document import Block, Code, Item, Items, Paragraph, Preformatted, Report, Section, Table
from lm_tuning.reporting.markdown import write_markdown
from lm_tuning.text.tokenize import read_token_summary
from lm_tuning.wording import count_of

EMBEDDED_BASE = ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
"""Name on the hub and licence of the default model, whose converted folder has no card."""

_PACKAGES = ("torch", "transformers", "peft", "safetensors")
_LICENSE = re.compile(r"^license:\s*['\"]?([\w.+-]+)['\"]?\s*$", re.MULTILINE)
_PIPELINE_TAGS = {"causal_lm": "text-generation", "sequence_classification": "text-classification"}


@dataclass(frozen=True)
class CardSources:
    """What a card is written from, beside the export itself.

    Attributes:
        reports_folder: reports of the runs before; those that are missing are left out of the card.
        raw_examples: description of the files that the rows came from.
    """

    reports_folder: Path
    raw_examples: dict[str, Any]


def write_export_card(folder: Path, record: ExportRecord, plan: ExportPlan, sources: CardSources) -> None:
    """Write ``README.md``, in place of the empty one that PEFT writes.

    Args:
        folder: the export.
        record: what was exported and how near it comes.
        plan: what of.
        sources: reports to quote.
    """
    name, license_name = find_base(plan)
    front = {
        "library_name": {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}[record["format"]],
        "pipeline_tag": _PIPELINE_TAGS.get(record["task"]),
        "license": license_name,
        "base_model": name,
        "tags": "[lm-tuning]",
    }
    head = "\n".join(["---", *(f"{key}: {value}" for key, value in front.items() if value), "---", ""])
    sections = [
        Section("use", "Use", list(_use(record, plan))),
        Section("parity", "Parity", list(_parity(record))),
        Section("data", "Data", list(_data(plan, sources))),
        Section("training", "Training", list(_training(record, plan))),
        Section("scores", "Scores", list(_scores(plan, sources))),
        Section("versions", "Versions", [_versions()]),
    ]
    what = "An adapter for" if record["format"] == "adapter" else "A model made of"
    shown = name or Path(record["base_model"]).name
    licence = license_name or "not named in the base's files: look it up before you pass the model on"
    summary: list[Block] = [
        Paragraph((f"{what} {shown}, for ", Code(record["task"]), f", weights in {weights_in(record)}.")),
        Paragraph((f"Licence of the base: {licence}.",)),
        *(Paragraph((note,)) for note in record["notes"]),
    ]
    report = Report(f"{shown}, tuned", summary=summary, sections=sections)
    (folder / CARD_NAME).write_text(head + write_markdown(report), encoding="utf-8")


def find_base(plan: ExportPlan) -> tuple[str | None, str | None]:
    """Return the hub name and the licence of the base, each ``None`` where its files do not tell.

    Args:
        plan: of the export.
    """
    base = plan.tuning["base"]
    if base["is_embedded"]:
        return EMBEDDED_BASE
    if is_local(base["name_or_path"]):
        # Where the folder lies is nobody's business but the user's.
        return None, _license_in(Path(base["name_or_path"]).expanduser() / CARD_NAME)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(base["name_or_path"], CARD_NAME, revision=base["revision"])
    return base["name_or_path"], _license_in(Path(cached)) if isinstance(cached, str) else None


def _license_in(card: Path) -> str | None:
    if not card.is_file():
        return None
    head = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
    found = _LICENSE.search(head)
    return found[1] if found else None


def _use(record: ExportRecord, plan: ExportPlan) -> list[Block]:
    if record["format"] == "gguf":
        return _use_of_gguf(plan)
    is_adapter, generates = record["format"] == "adapter", record["task"] != "sequence_classification"
    auto_class = AUTO_CLASSES[record["task"]]
    names, options, lines = ["AutoTokenizer"], ["folder"], []
    if is_adapter:
        auto_class = auto_class.replace("Auto", "AutoPeft", 1)
        lines.append(f"from peft import {auto_class}")
        if generates:
            names.append("GenerationConfig")
            options.append("generation_config=GenerationConfig.from_pretrained(folder)")
        if plan.label_map:
            options.append(f"num_labels={len(plan.label_map)}")
        if held := plan.tuning["quantization"]:
            # Beside a base in full precision it is another model than the one that was compared.
            names.append("BitsAndBytesConfig")
            given = bitsandbytes_options(held, plan.tuning.get("compute_dtype", "float32"))
            arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
            options.append(f"quantization_config=BitsAndBytesConfig({arguments})")
    else:
        names.append(auto_class)
        options.append('dtype="auto"')
    if plan.tuning["base"]["trust_remote_code"]:
        options.append("trust_remote_code=True")
    lines += [
        f"from transformers import {', '.join(sorted(names))}",
        "",
        'folder = "."  # where this file lies',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        f"model = {auto_class}.from_pretrained({', '.join(options)})",
    ]
    if not generates:
        return [
            Preformatted("\n".join(lines)),
            Paragraph((Code(LABELS_NAME), " has the id of each class by its name.")),
        ]
    told = " holds the settings that the model was evaluated with; say how long an answer may be with "
    return [Preformatted("\n".join(lines)), Paragraph((Code(GENERATION_NAME), told, Code("max_new_tokens"), "."))]


def _use_of_gguf(plan: ExportPlan) -> list[Block]:
    lines = ["from llama_cpp import Llama", "", f'model = Llama("{GGUF_NAME}", n_ctx=0)']
    if plan.tuning["rendering"]:
        lines.append('model.create_chat_completion([{"role": "user", "content": "Hello"}], max_tokens=64)')
    else:
        lines.append('model.create_completion("Once", max_tokens=64)')
    return [Preformatted("\n".join(lines)), Paragraph(("Or ", Code(f"llama-server -m {GGUF_NAME}"), "."))]


def _parity(record: ExportRecord) -> list[Block]:
    parity, distance = record["parity"], record["parity"]["distance"]
    first = (
        f"Compared with {parity['reference']}, by a process that knows {reader_of(record)} alone: "
        f"{count_of(distance['num_predictions'], 'prediction')} of {count_of(parity['num_rows'], 'row')} of the "
        f"{parity['split']} split. {_computed(record)}"
    )
    bounds = {bound["name"]: bound["bound"] for bound in parity["bounds"]}
    blocks: list[Block] = [Paragraph((first,)), _distance_table(distance, bounds)]
    served = parity["distance_in_dtype"]
    if served is not None:
        told = (
            f"Computed in {parity['dtype']} throughout, as servers do (no bound): mean KL divergence "
            f"{served['mean_kl_nats']:.3g} nats, same likeliest {served['top_1_agreement']:.3f}."
        )
        blocks.append(Paragraph((told,)))
    if parity["num_answers"]:
        blocks.append(
            Paragraph((f"Equal greedy answers: {parity['num_equal_answers']} of {parity['num_answers']} (no bound).",))
        )
    interval = describe_interval(record)
    if interval is not None:
        blocks.append(Paragraph((interval,)))
    merge = record["merge"]
    if merge is not None and "distance_to_trained" in merge:
        told = ", ".join(
            f"{base.replace('_', '-')} base {each['mean_kl_nats']:.3g} nats"
            for base, each in merge["distance_to_trained"].items()
        )
        blocks.append(
            Paragraph(
                (
                    "Trained beside quantized weights. Mean divergence from the model as trained: "
                    f"{told}. Merged into the {merge['base'].replace('_', '-')} base.",
                )
            )
        )
    return blocks


def _computed(record: ExportRecord) -> str:
    if reader_of(record) == "llama.cpp":
        return "Computed by llama.cpp on cpu."
    return f"Weights as written, computed in float32 on {record['parity']['device']}."


def _distance_table(distance: DistanceRecord, bounds: dict[str, float]) -> Table:
    rows = [
        ("Loss, original (nats)", f"{distance['reference_nats']:.5f}", ""),
        ("Loss, export (nats)", f"{distance['exported_nats']:.5f}", ""),
        *(
            (words, f"{value:.3g}", f"{bounds[name]:g}" if name in bounds else "")
            for name, words, value in (
                ("loss_change_fraction", "Change of the loss", distance["loss_change_fraction"]),
                ("mean_kl_nats", "Mean KL divergence (nats)", distance["mean_kl_nats"]),
                ("top_1_agreement", "Same likeliest", distance["top_1_agreement"]),
                ("max_logit_difference", "Largest logit difference (deviations)", distance["max_logit_difference"]),
            )
        ),
    ]
    return Table("", ("Figure", "Found", "Bound"), rows)


def _data(plan: ExportPlan, sources: CardSources) -> list[Block]:
    summary: Any = read_token_summary(plan.tokens_folder)
    rows = [
        (split, facts["num_rows_read"], sum(facts["dropped"].values()), facts["num_rows"])
        for split, facts in summary["splits"].items()
    ]
    blocks: list[Block] = [Table("", ("Split", "Rows", "Left out", "Used"), rows)]
    read = (_read(sources.reports_folder / "data_report.json").get("rows") or {}).get("metrics") or {}
    if read:
        blocks.append(
            Paragraph(
                (
                    f"Rows read: {read['data_rows_read']:,}; kept: {read['data_rows_kept']:,}; bad and skipped: "
                    f"{read['data_rows_skipped']:,}.",
                )
            )
        )
    digests = [
        (Path(file["path"]).name, Code(file["digest"]))
        for files in sources.raw_examples.values()
        if isinstance(files, list)
        for file in files
        if isinstance(file, dict) and "digest" in file
    ]
    if digests:
        blocks.append(Table("", ("File", "SHA-256"), digests, text_columns=(0, 1)))
    blocks.append(Paragraph(("Token set ", Code(str(plan.tuning.get("tokens_key"))), ".")))
    return blocks


def _training(record: ExportRecord, plan: ExportPlan) -> list[Block]:
    tuning = plan.tuning
    items: list[Any] = [
        f"method {tuning['method']}, {count_of(tuning['finished_step'], 'step')}",
        f"computed in {tuning.get('compute_dtype', 'an unknown dtype')}",
        f"digest of the base {record['base_digest']}",
    ]
    if tuning["quantization"] is not None:
        items.append(
            "base held quantized: " + ", ".join(f"{key} {value}" for key, value in tuning["quantization"].items())
        )
    config = _read(plan.tuned_folder / "adapter_config.json")
    if config:
        items.append(
            ", ".join(
                f"{key} {config[key]}"
                for key in ("r", "lora_alpha", "lora_dropout", "use_dora", "use_rslora")
                if key in config
            )
        )
    if record["mlflow_run_id"]:
        items.append(f"MLflow run {record['mlflow_run_id']}, which has every parameter")
    return [Items([Item(item) for item in items])]


def _scores(plan: ExportPlan, sources: CardSources) -> list[Block]:
    path = sources.reports_folder / "evaluation.json"
    evaluation = _read(path)
    if not evaluation or evaluation.get("skipped"):
        return [Paragraph(("Not evaluated.",))]
    is_earlier = path.stat().st_mtime < (plan.tuned_folder / FACTS_NAME).stat().st_mtime
    if is_earlier or evaluation.get("tokens_key") != plan.tuning.get("tokens_key"):
        return [Paragraph(("Not evaluated since it was trained.",))]
    base, tuned = evaluation.get("base") or {}, evaluation.get("tuned") or {}
    rows = [
        (Code(name), _score(base.get(name)), _score(value), _interval(evaluation, name))
        for name, value in tuned.items()
        if isinstance(value, int | float) and not name.startswith("num_")
    ]
    told = f"{evaluation.get('num_rows', 0):,} rows of the {evaluation['split']} split, before the export."
    verdict = [Paragraph(evaluation["verdict"])] if evaluation.get("verdict") else []
    return [Paragraph((told,)), *verdict, Table("", ("Score", "Base", "Tuned", "95 % interval"), rows)]


def _score(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""


def _interval(evaluation: dict[str, Any], name: str) -> str:
    """Return the interval of the tuned model's score, where the evaluation has one."""
    found = (evaluation.get("intervals") or {}).get(name) or {}
    if found.get("tuned_low") is None or found.get("tuned_high") is None:
        return ""
    return f"{_score(found['tuned_low'])} to {_score(found['tuned_high'])}"


def _versions() -> Block:
    import lm_tuning

    names = [f"LM Tuning {lm_tuning.__version__}", *(f"{name} {version(name)}" for name in _PACKAGES)]
    return Items([Item(name) for name in names])


def _read(path: Path) -> dict[str, Any]:
    """Read a report; nothing of one that is not there, or that is no object."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}

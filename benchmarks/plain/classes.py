"""Fine-tune a classifier and measure it, with transformers, peft and scikit-learn alone.

    python benchmarks/plain/classes.py SETTINGS.json [--find-batch]

``whole_job.py`` writes the settings and the rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared import (
    Clock,
    add_adapter,
    describe_training,
    evaluate_last_step,
    find_device_rows,
    read_rows,
    read_settings,
    say,
    trainer_settings,
)


def main() -> None:
    """Do the job and print one JSON line."""
    settings, only_finds = read_settings()
    clock = Clock()
    with clock.part("imports"):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with clock.part("read and tokenize"):
        tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        tokenizer.padding_side = "right"
        raw = {name: read_rows(Path(path)) for name, path in settings["rows"].items()}
        ids = {label: index for index, label in enumerate(sorted({row["label"] for row in raw["train"]}))}
        rows = {name: tokenize(tokenizer, part, ids, settings["max_length"]) for name, part in raw.items()}
    with clock.part("model load"):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            settings["model"], num_labels=len(ids), dtype=dtype, pad_token_id=tokenizer.pad_token_id
        ).to(device)
        model.config.use_cache = False
        model = add_adapter(model, settings, "SEQ_CLS")
        for parameter in filter(lambda weights: weights.requires_grad, model.parameters()):
            parameter.data = parameter.data.float()  # the new head, which 16 bits are too coarse for
    collate = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    if only_finds:
        say(f"RESULT {json.dumps({'device_rows': find_rows(model, collate, rows['train'], settings)})}\n")
        return
    say(f"RESULT {json.dumps(train(model, collate, rows, settings, clock))}\n")


def tokenize(tokenizer: Any, rows: list[dict[str, Any]], ids: dict[str, int], max_length: int) -> list[dict[str, Any]]:
    """Tokenize texts; a row of a class that the training rows lack is left out."""
    kept = [row for row in rows if row["label"] in ids]
    made = tokenizer([row["text"] for row in kept], truncation=True, max_length=max_length)["input_ids"]
    return [{"input_ids": tokens, "labels": ids[row["label"]]} for tokens, row in zip(made, kept, strict=True)]


def find_rows(model: Any, collate: Any, rows: list[dict[str, Any]], settings: dict[str, Any]) -> int:
    """Return how many of the longest rows fit into one batch of training."""
    import torch

    longest = sorted(rows, key=lambda row: len(row["input_ids"]), reverse=True)

    def step(count: int) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            model.train()(**collate(longest[:count]).to("cuda")).loss.backward()
        model.zero_grad(set_to_none=True)

    return find_device_rows(settings, step)


def train(
    model: Any, collate: Any, rows: dict[str, list[dict[str, Any]]], settings: dict[str, Any], clock: Clock
) -> dict[str, Any]:
    """Train, keep the best weights where that is wanted, and measure the held-out rows."""
    import torch
    from transformers import Trainer, TrainingArguments

    seen = {"tokens": 0}

    class Counting(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
            seen["tokens"] += inputs["attention_mask"].sum()
            return super().training_step(model, inputs, *given, **more)

    with clock.part("set-up"):
        arguments = trainer_settings(settings, device_rows=settings["device_rows"], is_language=False)
        if settings["load_best"] and settings["eval_every_steps"]:
            arguments |= {"load_best_model_at_end": True, "metric_for_best_model": settings["best_metric"]}
        trainer = Counting(
            model=model, args=TrainingArguments(**arguments), train_dataset=rows["train"],
            eval_dataset=rows["validation"], data_collator=collate, compute_metrics=score,
            callbacks=[evaluate_last_step()],
        )  # fmt: skip
    with clock.part("training"):
        trainer.train()
    with clock.part("model saved"):
        trainer.save_model(str(Path(settings["output_dir"]) / "adapter"))
    with clock.part("held-out loss"):
        found = trainer.predict(rows["loss"])
        logits = torch.from_numpy(found.predictions).float()  # (rows, classes)
        nats = torch.nn.functional.cross_entropy(logits, torch.from_numpy(found.label_ids))
    scores = {name.removeprefix("test_"): value for name, value in found.metrics.items()}
    tuned = {"nats_per_row": float(nats)} | {name: scores[name] for name in ("accuracy", "macro_f1")}
    return describe_training(trainer, clock.seconds["training"], int(seen["tokens"])) | {"scores": {"tuned": tuned}}


def score(found: Any) -> dict[str, float]:
    """Return accuracy and macro F1, 0 to 1."""
    from sklearn.metrics import accuracy_score, f1_score

    classes = found.predictions.argmax(-1)
    return {
        "accuracy": float(accuracy_score(found.label_ids, classes)),
        "macro_f1": float(f1_score(found.label_ids, classes, average="macro", zero_division=0)),
    }


if __name__ == "__main__":
    main()

"""Fine-tune a language model, measure it and let it answer, with transformers and peft alone.

    python benchmarks/plain/language.py SETTINGS.json [--find-batch]

``whole_job.py`` writes the settings and the rows. The base model is measured and answers first, then it is trained
with an adapter, which is merged before the tuned model is measured and answers.
"""

from __future__ import annotations

import importlib.util
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

IGNORE_INDEX = -100


def main() -> None:
    """Do the job and print one JSON line."""
    settings, only_finds = read_settings()
    clock = Clock()
    with clock.part("imports"):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with clock.part("read and tokenize"):
        tokenizer = AutoTokenizer.from_pretrained(settings["model"])
        rows = {
            name: [tokenize(tokenizer, row, settings["max_length"]) for row in read_rows(Path(path))]
            for name, path in settings["rows"].items()
        }
    with clock.part("model load"):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).to(device).eval()
    if only_finds:
        say(f"RESULT {json.dumps({'device_rows': find_rows(model, rows['train'], settings, device)})}\n")
        return
    scores: dict[str, dict[str, float]] = {}
    answered: dict[str, float] = {}
    for name in ("base", "tuned"):
        if name == "tuned":
            trained, model = train(model, tokenizer, rows, settings, clock)
        with clock.part("held-out loss"):
            scores[name] = {"nats_per_token": measure(model, rows["loss"], tokenizer.pad_token_id)}
        with clock.part(f"answers {name}"):
            answers, count, batch = answer(model, tokenizer, rows["answers"], settings["max_new_tokens"])
        answered[name] = count / clock.seconds[f"answers {name}"] if answers else 0.0
        with clock.part("scores"):
            scores[name] |= score([row["reference"] for row in rows["answers"]], answers)
    result = {**trained, "scores": scores, "answer_tokens_per_second": answered, "answer_rows": batch}
    say(f"RESULT {json.dumps(result)}\n")


def tokenize(tokenizer: Any, row: dict[str, Any], max_length: int) -> dict[str, Any]:
    """Render a row by the chat template; where it is too long, the middle of the prompt goes."""
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    messages.append({"role": "user", "content": row["prompt"]})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    messages.append({"role": "assistant", "content": row["response"]})
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    answer = whole[len(prompt) :]
    if tokenizer.eos_token_id in answer:  # no template's line break after it: generation has ended there
        answer = answer[: len(answer) - answer[::-1].index(tokenizer.eos_token_id)]
    answer = answer[: max_length - 1]
    room = max_length - len(answer)
    if len(prompt) > room:
        prompt = prompt[: (room + 1) // 2] + prompt[len(prompt) - room // 2 :]
    ids = prompt + answer
    labels = [IGNORE_INDEX] * len(prompt) + answer
    return {"input_ids": ids, "labels": labels, "prompt": prompt, "reference": row["response"]}


def pad(rows: list[dict[str, Any]], pad_id: int) -> dict[str, Any]:
    """Pad rows on the right to the longest one."""
    import torch

    width = -(-max(len(row["input_ids"]) for row in rows) // 8) * 8
    ids = torch.full((len(rows), width), pad_id)  # (batch, sequence), as the two below
    labels, mask = torch.full_like(ids, IGNORE_INDEX), torch.zeros_like(ids)
    for index, row in enumerate(rows):
        count = len(row["input_ids"])
        ids[index, :count], labels[index, :count] = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        mask[index, :count] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def find_rows(model: Any, rows: list[dict[str, Any]], settings: dict[str, Any], device: str) -> int:
    """Return how many of the longest rows fit into one batch of training."""
    import torch

    longest = sorted(rows, key=lambda row: len(row["input_ids"]), reverse=True)
    model = add_adapter(model, settings, "CAUSAL_LM").train()

    def step(count: int) -> None:
        batch = {name: tensor.to(device) for name, tensor in pad(longest[:count], 0).items()}
        with torch.autocast("cuda", torch.bfloat16):
            model(**batch, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return find_device_rows(settings, step)


def train(
    model: Any, tokenizer: Any, rows: dict[str, list[dict[str, Any]]], settings: dict[str, Any], clock: Clock
) -> tuple[dict[str, Any], Any]:
    """Train an adapter, and return what it came to and the model with the adapter merged."""
    from transformers import Trainer, TrainingArguments

    with clock.part("set-up"):
        seen = {"tokens": 0}

        def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
            return pad(batch, tokenizer.pad_token_id)

        class Counting(Trainer):  # type: ignore[misc]
            def training_step(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
                seen["tokens"] += inputs["attention_mask"].sum()
                return super().training_step(model, inputs, *given, **more)

        model.config.use_cache = False
        model = add_adapter(model, settings, "CAUSAL_LM")
        arguments = TrainingArguments(
            **trainer_settings(settings, device_rows=settings["device_rows"], is_language=True)
        )
        trainer = Counting(
            model=model, args=arguments, train_dataset=rows["train"], eval_dataset=rows["validation"],
            data_collator=collate, callbacks=[evaluate_last_step()],
        )  # fmt: skip
    with clock.part("training"):
        trainer.train()
    with clock.part("model saved"):
        trainer.save_model(str(Path(settings["output_dir"]) / "adapter"))
        merged = trainer.model.merge_and_unload().eval()
        merged.config.use_cache = True
    return describe_training(trainer, clock.seconds["training"], int(seen["tokens"])), merged


def measure(model: Any, rows: list[dict[str, Any]], pad_id: int) -> float:
    """Return nats per supervised token: summed over all rows and divided once."""
    import torch

    ordered = sorted(rows, key=lambda row: len(row["input_ids"]))
    nats, count = 0.0, 0
    for start in range(0, len(ordered), 32):
        batch = {name: tensor.to(model.device) for name, tensor in pad(ordered[start : start + 32], pad_id).items()}
        supervised = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
        with torch.inference_mode():
            nats += float(model(**batch).loss) * supervised
        count += supervised
    return nats / count


def answer(model: Any, tokenizer: Any, rows: list[dict[str, Any]], max_new_tokens: int) -> tuple[list[str], int, int]:
    """Answer all prompts, longest first, in the largest batch that fits.

    Returns:
        The answers in the order of the rows, how many tokens they have, and the rows of a batch.
    """
    import torch

    order = sorted(range(len(rows)), key=lambda index: len(rows[index]["prompt"]), reverse=True)
    answers: dict[int, list[int]] = {}
    batch_rows, start = max(len(order), 1), 0
    tokenizer.padding_side = "left"
    while start < len(order):
        chosen = order[start : start + batch_rows]
        prompts = tokenizer.pad({"input_ids": [rows[index]["prompt"] for index in chosen]}, return_tensors="pt")
        try:
            with torch.inference_mode():
                made = model.generate(
                    **prompts.to(model.device),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    pad_token_id=tokenizer.pad_token_id,
                )[:, prompts["input_ids"].shape[1] :]  # (batch, new tokens)
        except torch.OutOfMemoryError:
            batch_rows //= 2
            torch.cuda.empty_cache()
            continue
        ends = model.generation_config.eos_token_id
        stops = set(ends if isinstance(ends, list) else [ends])
        for index, row in zip(chosen, made.tolist(), strict=True):
            end = next((position + 1 for position, token in enumerate(row) if token in stops), len(row))
            answers[index] = row[:end]
        start += batch_rows
    texts = [tokenizer.decode(answers[index], skip_special_tokens=True) for index in range(len(rows))]
    return texts, sum(map(len, answers.values())), batch_rows


def score(references: list[str], answers: list[str]) -> dict[str, float]:
    """Return the mean ROUGE-L of the answers, 0 to 1."""
    if not answers:
        return {}
    if importlib.util.find_spec("rouge_score") is None:
        say("ROUGE-L is left out, rouge_score is not installed\n")
        return {}
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    found = [scorer.score(right, said)["rougeL"].fmeasure for right, said in zip(references, answers, strict=True)]
    return {"rouge_l": sum(found) / len(found)}


if __name__ == "__main__":
    main()

"""Answer requests with an export, as MLflow's models from code: encoder-decoders, adapters, and other special cases.

MLflow stores a copy of this file with the model and runs it where the model is served, without this project.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
from mlflow.pyfunc.model import PythonModel

_AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
}


class ExportedModel(PythonModel):
    """Load the export beside this file, and answer one text after the other, as the evaluation did."""

    def load_context(self, context: Any) -> None:
        """Load tokenizer and model."""
        import torch
        import transformers

        self.settings = dict(context.model_config)
        folder = context.artifacts["model"]
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=self.settings["trust_remote_code"]
        )
        auto_class = getattr(transformers, _AUTO_CLASSES[self.settings["task"]])
        if self.settings["is_adapter"]:
            self.model = self._load_adapter(auto_class, Path(folder))
        else:
            self.model = auto_class.from_pretrained(
                folder, dtype="auto", trust_remote_code=self.settings["trust_remote_code"]
            )
        if not self.settings["quantization"]:
            self.model.to(self.device)
        self.model.eval()
        if self.settings["labels"]:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id

    def _load_adapter(self, auto_class: Any, folder: Path) -> Any:
        import torch
        import transformers
        from peft import PeftModel

        settings = self.settings
        options: dict[str, Any] = {"revision": settings["revision"], "dtype": torch.float32}
        if settings["labels"]:
            options["num_labels"] = len(settings["labels"])
        if settings["quantization"]:
            named = {
                key: getattr(torch, value) if key.endswith("_dtype") else value
                for key, value in settings["quantization"].items()
            }
            make_config: Any = transformers.BitsAndBytesConfig
            options |= {
                "quantization_config": make_config(**named),
                "device_map": {"": self.device},
            }
        base = auto_class.from_pretrained(settings["base"], trust_remote_code=settings["trust_remote_code"], **options)
        rows = settings["num_embeddings"]
        if rows and base.get_input_embeddings().weight.shape[0] != rows:
            base.resize_token_embeddings(rows, mean_resizing=False)
        model: Any = PeftModel.from_pretrained(base, str(folder))
        if (folder / "generation_config.json").is_file():
            model.get_base_model().generation_config = transformers.GenerationConfig.from_pretrained(str(folder))
        return model

    # Without hints: MLflow takes those of predict for a schema, and the signature says more.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """Answer each text, or name its class.

        Args:
            context: MLflow's; not used.
            model_input: a frame with a column ``text``.
            params: ``max_new_tokens``, the longest answer.

        Returns:
            A frame with ``answer``, or with ``label`` and ``score``.
        """
        import pandas as pd

        texts = [str(text) for text in model_input["text"]]
        if self.settings["labels"]:
            return pd.DataFrame([self._classify(text) for text in texts])
        most = int((params or {}).get("max_new_tokens") or self.settings["max_new_tokens"])
        return pd.DataFrame({"answer": [self._answer(text, most) for text in texts]})

    def _encode(self, text: str) -> Any:
        """Return the tokens of a text as the training had them, ``(1, tokens)``."""
        import torch

        settings = self.settings
        if settings["is_chat"]:
            turn = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = list(self.tokenizer(text, add_special_tokens=settings["adds_special_tokens"]).input_ids)
        if settings["strip_token_id"] is not None and ids[-1:] == [settings["strip_token_id"]]:
            ids.pop()
        if settings["append_token_id"] is not None and ids[-1:] != [settings["append_token_id"]]:
            ids.append(settings["append_token_id"])
        return torch.tensor([ids], device=self.device)

    def _answer(self, text: str, most: int) -> str:
        import torch

        input_ids = self._encode(text)
        with torch.inference_mode():
            made = self.model.generate(
                input_ids=input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=most
            )[0]
        if self.settings["task"] == "causal_lm":
            made = made[input_ids.shape[1] :]
        answer: str = self.tokenizer.decode(made, skip_special_tokens=True)
        return answer

    def _classify(self, text: str) -> dict[str, Any]:
        import torch

        input_ids = self._encode(text)
        with torch.inference_mode():
            logits = self.model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).logits[0]
        probabilities = logits.float().softmax(-1)
        index = int(probabilities.argmax())
        return {"label": self.settings["labels"][index], "score": float(probabilities[index])}


# Where MLflow runs this file to load a model; imported as a module it only defines the class.
if __name__ != "lm_tuning.datasets.serving_code":
    mlflow.models.set_model(ExportedModel())

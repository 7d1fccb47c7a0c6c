"""What the parameters of a GGUF contradict."""

from __future__ import annotations

from collections.abc import Iterator

from lm_tuning.parameters.export import ExportParameters


def find_gguf_contradictions(export: ExportParameters) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find what cannot be meant together.

    Args:
        export: the ``export`` parameters.

    Yields:
        The keys, and what is wrong with them.
    """
    quantization = export.gguf.quantization
    if export.format != "gguf":
        if quantization != "none":
            yield (
                ("export.gguf.quantization", "export.format"),
                f"export.gguf.quantization = {quantization} is for a GGUF, and export.format = {export.format}: set "
                "export.format = gguf, or export.gguf.quantization = none.",
            )
        return
    if quantization != "none" and export.dtype != "auto":
        yield (
            ("export.dtype", "export.gguf.quantization"),
            f"export.dtype = {export.dtype} and export.gguf.quantization = {quantization} both say how weights are "
            "written: set export.dtype = auto, or export.gguf.quantization = none.",
        )
    if export.logs_model:
        yield (
            ("export.format", "export.register_as" if export.register_as else "export.log_to_mlflow"),
            "export.format = gguf is for llama.cpp, which MLflow cannot answer with: set export.log_to_mlflow = false "
            "and export.register_as = null, or export.format = merged.",
        )

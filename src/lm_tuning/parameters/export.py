"""Group ``export``: what is written for use elsewhere, how near it must come, and where it goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lm_tuning.parameters.base import Count, CountOrZero, Dtype, FractionOrAll, ParameterGroup, PositiveNumber

_RESERVED_ALIAS = "latest"


def _refuse_reserved_alias(alias: str) -> str:
    is_version = alias.lower().startswith("v") and alias[1:].isdigit()
    if alias.lower() == _RESERVED_ALIAS or is_version:
        raise ValueError("MLflow keeps latest and v with a number for versions: take a word such as champion")
    return alias


RegisteredName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=200,
        pattern=r"^[^/:.%\s](?:[^/:.%]*[^/:.%\s])?$",
        json_schema_extra={"x-words": "a name without slash, colon, dot or percent sign"},
    ),
]
Alias = Annotated[
    str,
    Field(
        max_length=200,
        pattern=r"^[A-Za-z0-9_-]+$",
        json_schema_extra={"x-words": "letters, digits, '_' and '-'"},
    ),
    AfterValidator(_refuse_reserved_alias),
]
RepositoryName = Annotated[
    str,
    Field(
        max_length=96,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$",
        json_schema_extra={"x-words": "owner/name"},
    ),
]


class ParityParameters(ParameterGroup):
    """How near an export must come to the model that it was made of, on held-out rows, before it is published."""

    num_rows: Count = 64
    """Held-out rows that are compared; the first of the test split, of validation where that has none."""

    max_logit_difference: PositiveNumber = 1e-4
    """Largest difference of a logit of a float32 export, in standard deviations of the logits."""

    max_loss_change_fraction: PositiveNumber = 0.002
    """Largest change of the held-out loss of a 16-bit export, as a fraction of it."""

    max_kl_nats: PositiveNumber = 1e-3
    """Largest mean Kullback-Leibler divergence of a 16-bit export's predictions, in nats per prediction."""

    min_top_1_agreement: FractionOrAll = 0.99
    """Smallest share of positions at which a 16-bit export finds the same token, or class, likeliest."""

    num_generate_rows: CountOrZero = 4
    """Rows answered greedily by both models; how many answers are equal is reported and decides nothing."""

    max_new_tokens: Count = 32
    """Longest of these answers, in tokens."""


GgufType = Literal["none", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


class GgufParameters(ParameterGroup):
    """The merged model as one file for llama.cpp and the programs built on it."""

    quantization: GgufType = "none"
    """Blocks of 32 weights with a common scale, of 8.5, 6, 5.5, 5 and 4.5 bits per weight; none keeps export.dtype."""

    max_loss_change_fraction: PositiveNumber = 0.02
    """Largest change of the held-out loss of a quantized file, as a fraction of it."""

    publish_unchecked: bool = False
    """Publish a file that llama.cpp has not read where llama-cpp-python is not installed; false refuses to begin."""


class ExportParameters(ParameterGroup):
    """The tuned model as a folder that other programs load."""

    format: Literal["merged", "adapter", "gguf"] = "merged"
    """Merged writes one model that needs nothing else; adapter writes the adapter alone, which needs its base; gguf
    writes the merged model as one file for llama.cpp."""

    dtype: Dtype = "auto"
    """Dtype of the written weights; auto takes that of the base model's files for a merged adapter, that of the trained
    weights otherwise."""

    merge_base: Literal["auto", "full_precision", "dequantized"] = "auto"
    """Weights that an adapter trained over 4 or 8 bits is merged into; auto tries both and keeps the closer."""

    parity: ParityParameters = ParityParameters()
    """How near the export must come to be published."""

    gguf: GgufParameters = GgufParameters()
    """Only for export.format = gguf."""

    log_to_mlflow: bool = False
    """Copy the export into the MLflow run as a model that mlflow models serve can answer with."""

    register_as: RegisteredName | None = None
    """Name in MLflow's model registry; a name implies log_to_mlflow, null registers nothing."""

    alias: Alias | None = None
    """Alias that the new version of the registered model gets, such as champion; null gives none."""

    hub_repository: RepositoryName | None = None
    """Repository on the model hub that the export is uploaded to; null uploads nothing."""

    hub_dry_run: bool = True
    """List what an upload would send, and send nothing."""

    hub_private: bool = True
    """Whether a repository that the upload has to make is private."""

    @property
    def logs_model(self) -> bool:
        """Whether MLflow gets a copy."""
        return self.log_to_mlflow or self.register_as is not None


def find_alias_problems(export: ExportParameters) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find an alias that would do nothing.

    Args:
        export: the ``export`` parameters.

    Yields:
        The keys that take part, and the sentence for the user.
    """
    if export.alias is not None and export.register_as is None:
        yield (
            ("export.alias", "export.register_as"),
            f"export.alias = {export.alias} names a version of a registered model, and export.register_as = null "
            "registers none: set export.register_as, or export.alias = null.",
        )

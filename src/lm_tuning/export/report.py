"""Show what an export came to on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_tuning.export.records import ExportRecord
from lm_tuning.reporting.document import Block, Paragraph, Table
from lm_tuning.reporting.terminal import build_blocks
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from rich.console import RenderableType


def reader_of(record: ExportRecord) -> str:
    """Return what has read an export to compare it.

    Args:
        record: of the export.
    """
    return "llama.cpp" if "gguf" in record and record["gguf"]["is_checked"] else "transformers"


def weights_in(record: ExportRecord) -> str:
    """Return how the weights of an export are written.

    Args:
        record: of the export.
    """
    if "gguf" in record and record["gguf"]["quantization"] != "none":
        return record["gguf"]["quantization"]
    return record["dtype"]


def describe_interval(record: ExportRecord) -> str | None:
    """Return a sentence on the change of a quantized file's loss; none where there is no interval.

    Args:
        record: of the export.
    """
    if "gguf" not in record or record["gguf"]["loss_change_interval"] is None:
        return None
    low, high = record["gguf"]["loss_change_interval"]
    return f"Change of the held-out loss, 95 % over rows drawn again: {low:+.4%} to {high:+.4%}."


def describe_export(record: ExportRecord) -> RenderableType:
    """Return the figures of a passed comparison.

    Args:
        record: of the export.
    """
    parity = record["parity"]
    distance = parity["distance"]
    what = {"adapter": "adapter", "merged": "model", "gguf": "GGUF"}[record["format"]]
    reader = reader_of(record)
    first = (
        f"Export: {what} in {weights_in(record)}, {record['num_bytes'] / 2**20:,.1f} MiB. A process that knows "
        f"{reader} alone compared {count_of(distance['num_predictions'], 'prediction')} of "
        f"{count_of(parity['num_rows'], 'row')} of the {parity['split']} split with {parity['reference']}."
    )
    rows = [(bound["name"], f"{bound['value']:.3g}", f"{bound['bound']:g}") for bound in parity["bounds"]]
    rows.append(("loss, original and export", f"{distance['reference_nats']:.5f}", f"{distance['exported_nats']:.5f}"))
    blocks: list[Block] = [Paragraph(first), Table("", ("Figure", "Found", "Bound"), rows)]
    served = parity["distance_in_dtype"]
    if served is not None:
        blocks.append(
            Paragraph(
                f"Computed in {parity['dtype']} throughout, as servers do (no bound): mean_kl_nats "
                f"{served['mean_kl_nats']:.3g}, top_1_agreement {served['top_1_agreement']:.3f}, loss "
                f"{served['exported_nats']:.5f}."
            )
        )
    if parity["num_answers"]:
        blocks.append(
            Paragraph(f"Equal greedy answers: {parity['num_equal_answers']} of {parity['num_answers']} (no bound).")
        )
    interval = describe_interval(record)
    if interval is not None:
        blocks.append(Paragraph(interval))
    merge = record["merge"]
    if merge is not None and "distance_to_trained" in merge:
        told = ", ".join(
            f"{base.replace('_', ' ')} {each['mean_kl_nats']:.3g}"
            for base, each in merge["distance_to_trained"].items()
        )
        blocks.append(
            Paragraph(
                f"Merged into the base {merge['base'].replace('_', ' ')}. Mean divergence from the model as trained, "
                f"in nats: {told}."
            )
        )
    return build_blocks([*blocks, *(Paragraph(note) for note in record["notes"])])

"""Say before a training what its optimizer cannot do on the device."""

from __future__ import annotations


def describe_optimizer_limit(name: str | None, *, device: str) -> str | None:
    """Say what a named optimizer does otherwise than its name says on this device.

    Args:
        name: ``train.trainer.optim``; ``None`` for the Trainer's default.
        device: ``cpu``, ``cuda`` or ``mps``.

    Returns:
        A sentence for a warning, or None.
    """
    if name is not None and name.startswith("paged_") and device != "cuda":
        plain = name.removeprefix("paged_")
        return (
            f"train.trainer.optim = {name} pages its state between the memories of a GPU and of the CPU, and training "
            f"runs on the {device.upper()}: the state is not paged, as with {plain}."
        )
    return None

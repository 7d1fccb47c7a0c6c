"""A GPU's memory while training: nearly full, or more than the card has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lm_tuning.runtime.nvml import read_card
from lm_tuning.training.health.monitors import Monitor, StepNumbers
from lm_tuning.training.health.records import Facts, Finding

MEMORY_FRACTION = 0.92

# Share of the card from which it counts as full: a driver keeps a little for itself.
FULL_FRACTION = 0.995


class Memory(Monitor):
    """A GPU whose memory is nearly full, or that a driver makes larger with the host's."""

    replays = False

    def __init__(self, total_bytes: int | None, card_uuid: str | None = None) -> None:
        """Keep the GPU's memory, ``None`` without one, and the driver's UUID of the card."""
        self.total_bytes = total_bytes
        self._card_uuid = card_uuid
        self.most_bytes = 0
        # Here, since the driver may take a hundredth of a second to answer; what the card has stays the same.
        self.card = None if total_bytes is None else read_card(card_uuid)

    @property
    def fraction(self) -> float:
        """Return the largest share of the memory that was held."""
        return self.most_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def card_bytes(self) -> int:
        """Return what the card itself has, by the driver's own figures where there are any."""
        if self.card is not None and self.card.memory_total_bytes:
            return self.card.memory_total_bytes
        return self.total_bytes or 0

    @property
    def is_beyond(self) -> bool:
        """Return whether more is held than the card has, so that the rest must lie in the host's memory."""
        return bool(self.card_bytes) and self.most_bytes > self.card_bytes

    def update(self, now: StepNumbers) -> bool:
        """Keep the peak, and ask the card when it comes near the limit or beyond it."""
        if self.total_bytes is None:
            return False
        before = self.fraction > MEMORY_FRACTION, self.is_beyond
        self.most_bytes = max(self.most_bytes, now.memory_bytes)
        # A peak only rises, so neither becomes false again: the driver is asked twice at most.
        is_news = (self.fraction > MEMORY_FRACTION, self.is_beyond) != before
        if is_news:
            self.card = read_card(self._card_uuid) or self.card
        return is_news

    def findings(self, *, is_end: bool) -> Iterator[Finding]:
        """Compare the peak with the memory that there is."""
        if self.total_bytes is None:
            return
        if self.is_beyond:
            yield self._describe_beyond()
        elif self.fraction > MEMORY_FRACTION:
            yield Finding(
                code="memory-near-limit",
                measured=f"{self.fraction:.1%} of the GPU's memory is used ({self.most_bytes / 2**30:.1f} of "
                f"{self.total_bytes / 2**30:.1f} GiB)",
                expected=f"at most {MEMORY_FRACTION:.0%}",
                cause="Near the limit memory is freed and asked for again in every step: on a card at 95 % a step "
                "took 2.4 times as long.",
                change="Lower train.micro_batch_tokens or set train.gradient_checkpointing=true; the result stays "
                "the same.",
            )

    def _describe_beyond(self) -> Finding:
        # The driver counts all programs together, and says so where the card is full of others.
        used = ""
        if self.card is not None:
            is_full = self.card.memory_used_bytes >= FULL_FRACTION * self.card.memory_total_bytes
            used = (
                f"; the driver (NVML) says {self.card.memory_used_bytes / 2**30:.1f} GiB of the card are used"
                f"{', which is full' if is_full else ''}"
            )
        where = " (WSL2 lets it)" if is_wsl() else ""
        return Finding(
            code="memory-beyond-card",
            measured=f"training holds {self.most_bytes / 2**30:.1f} GiB, more than the card's "
            f"{self.card_bytes / 2**30:.1f} GiB{used}",
            expected=f"at most {MEMORY_FRACTION:.0%} of the card's memory",
            cause=f"The driver puts what does not fit into the host's memory in place of failing{where}: steps take "
            "many times as long.",
            change="Lower train.micro_batch_tokens or set train.gradient_checkpointing=true. In the NVIDIA control "
            "panel of Windows, CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback makes it fail instead.",
        )

    def facts(self) -> Facts:
        """Return the largest share of the memory that was held."""
        return {"peak_memory_fraction": self.fraction} if self.total_bytes else {}


def is_wsl() -> bool:
    """Return whether this is Linux under Windows, whose drivers may use the host's memory for the card."""
    try:
        return "microsoft" in Path("/proc/version").read_text(encoding="utf-8").lower()
    except OSError:
        return False

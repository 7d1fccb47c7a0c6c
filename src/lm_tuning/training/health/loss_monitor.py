"""A training loss that ends above where it began: the run made the model worse on the rows that it learns from.

Whether a loss that neither falls nor rises is a fault cannot be told from its steps: a finished model, a low rate and a
short run look the same. A rise can. Steps are drawn at random, so in a run that changes nothing every order of their
losses is equally likely, whatever the spread of single steps. That all of the last quarter lie above the first few
has a probability that is known exactly; as many first ones are compared as make it next to none.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from math import comb

from lm_tuning.training.health.monitors import Monitor, StepNumbers
from lm_tuning.training.health.records import Facts, Finding

# Steps before anything is said of a rise.
MIN_STEPS_RISE = 40

# One in so many runs that change nothing would have its losses in such an order by chance.
ORDERS = 100_000

RISE_FRACTION = 0.10
# A smaller rise, as of a share and in nats, may be what dropout or a new schedule does to a finished model.
RISE_NATS = 0.1


class LossCourse(Monitor):
    """A loss that rises."""

    def __init__(self, total_steps: int) -> None:
        """Keep the steps of the run, to look at half of it and at three quarters."""
        self.looks_at = {total_steps // 2, 3 * total_steps // 4}
        self.losses = array("d")

    def update(self, now: StepNumbers) -> bool:
        """Keep the loss; NaN and infinity are another check's."""
        if now.is_finite:
            self.losses.append(now.loss)
        return now.step in self.looks_at

    def findings(self, *, is_end: bool) -> Iterator[Finding]:
        """Compare the last quarter of the steps with the first ones."""
        num_last = len(self.losses) // 4
        if len(self.losses) < MIN_STEPS_RISE:
            return
        # In a run that changes nothing any num_last of these losses may be the highest ones, all choices alike: the
        # chance that the last are it is 1 / comb(num_last + count, count).
        num_first = next(count for count in range(1, num_last + 1) if comb(num_last + count, count) >= ORDERS)
        first, last = max(self.losses[:num_first]), min(self.losses[-num_last:])
        if last - first <= max(RISE_NATS, RISE_FRACTION * first):
            return
        yield Finding(
            code="loss-rises",
            measured=f"each of the last {num_last} steps has a loss of at least {last:.4f} nats, and none of the "
            f"first {num_first} more than {first:.4f}",
            expected="a loss that falls, or stays where it is",
            cause="The learning rate is too high, or updates go against the gradient: the model gets worse on the "
            "rows that it is trained on.",
            change="Lower train.learning_rate or lengthen train.trainer.warmup_steps, and start again from a "
            "checkpoint before the rise, or from the base model.",
        )

    def facts(self) -> Facts:
        """Return nothing: the losses are in the step log."""
        return {}

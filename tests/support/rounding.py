"""How far apart two measurements of one quantity may lie when nothing but rounding separates them.

Processors sum the same float32 products in another order, and so do other batches and other numbers of threads. A wrong
row, token or weight moves a loss of these tests by a thousandth or more.

A tolerance belongs to the quantities that are rounded. What is computed from them, such as a difference, a ratio or a
power of near-equal losses, is compared through them: ``1 - tuned / base`` is off by the shares that the two losses are
off by, added up, however small it is itself; of a perplexity, the logarithm is compared.
"""

from __future__ import annotations

SAME_LOSS = 1e-5
"""Relative, of a loss in float32; kernels of other processors were seen to move one by 3e-7."""

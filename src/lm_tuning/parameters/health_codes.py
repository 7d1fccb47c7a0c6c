"""Every finding that the health checks know: its code, how grave it is by default, and what it means.

Parameters are checked against this table, so it imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from lm_tuning.findings import Severity


@dataclass(frozen=True)
class HealthCode:
    """One kind of finding.

    Attributes:
        code: stable name, as ``train.health.severity`` takes it.
        severity: what it does unless the user says otherwise.
        meaning: what was found, in one line.
    """

    code: str
    severity: Severity
    meaning: str


# In the order in which a run comes upon them. What is sure to spoil a result stops it; what may have a reason warns.
_ALL = [
    # The first loss.
    HealthCode("first-loss-off", "stop", "step 1 logs another loss than its rows have by a plain forward pass"),
    HealthCode("layout-changes-loss", "stop", "rows have another loss in micro-batches than one by one"),
    HealthCode("worse-than-untrained", "warn", "the base model is worse than an untrained one on the first rows"),
    HealthCode("fresh-head-off", "warn", "a new classification head does not start at chance"),
    HealthCode("model-loss-differs", "note", "the model's class computes another loss; it is not used"),
    HealthCode("labels-shifted", "stop", "positions learn another token than the one after them"),
    HealthCode("first-gradient-off", "stop", "step 1 has another gradient norm than its rows have"),
    # Tokenizer and model.
    HealthCode("pad-is-eos", "note", "the tokenizer pads with its EOS token; masks do not depend on it here"),
    HealthCode("pad-id-not-in-config", "warn", "the model's configuration lacks the tokenizer's pad id"),
    HealthCode("id-beyond-vocabulary", "stop", "a row has a token id that the model does not embed"),
    HealthCode("class-beyond-head", "stop", "a row's class is none of those that the head tells apart"),
    HealthCode("layers-frozen", "stop", "layers that should be trained are frozen, or have no adapter"),
    HealthCode("more-tokens-than-embeddings", "stop", "the tokenizer has more tokens than the model embeds"),
    HealthCode("fewer-tokens-than-embeddings", "note", "the model embeds far more tokens than the tokenizer has"),
    # Rows and micro-batches.
    HealthCode("table-inconsistent", "stop", "the columns of the token table contradict each other"),
    HealthCode("row-without-tokens", "stop", "a row has no token"),
    HealthCode("source-left-out", "warn", "a data source gives no row to an epoch"),
    HealthCode("bos-doubled", "warn", "rows begin with two BOS tokens"),
    HealthCode("end-not-taught", "warn", "no EOS token is among what is supervised"),
    HealthCode("rows-teach-nothing", "warn", "rows have nothing that is learned from them"),
    HealthCode("step-teaches-nothing", "stop", "the first step has nothing that is learned from it"),
    HealthCode("rows-longer-than-positions", "warn", "rows are longer than the positions that the model was made for"),
    HealthCode("mask-not-padding", "stop", "an attention mask does not hide the padding and nothing else"),
    HealthCode("padding-above-plan", "warn", "micro-batches are padded more than their rows' lengths ask for"),
    # The first forward and backward pass.
    HealthCode("logits-not-finite", "stop", "logits are NaN or infinite before the first step"),
    HealthCode("logits-out-of-range", "warn", "logits are far larger or spread far wider than a sound model's"),
    HealthCode("logits-flat", "warn", "all logits of a trained model are equal"),
    HealthCode("parameter-without-gradient", "warn", "a parameter that should be trained gets no gradient"),
    HealthCode("nothing-has-gradient", "stop", "no parameter that should be trained gets a gradient"),
    HealthCode("frozen-parameter-has-gradient", "warn", "a frozen parameter gets a gradient"),
    HealthCode("fp8-not-used", "warn", "products in 8 bits were asked for, and training goes on in 16 bits"),
    # While training.
    HealthCode("loss-not-finite", "warn", "a step's loss is NaN or infinite"),
    HealthCode("gradient-not-finite", "warn", "a gradient norm is NaN or infinite, so that the update is skipped"),
    HealthCode("updates-keep-failing", "stop", "many updates in a row are skipped for NaN or infinite numbers"),
    HealthCode("most-updates-skipped", "stop", "more than half of the updates are skipped for NaN or infinite numbers"),
    HealthCode("fp16-overflows", "warn", "float16 gradients overflow more often than the search for a scale explains"),
    HealthCode(
        "gradients-often-clipped",
        "note",
        "more than half of the updates are clipped, by gradients of over ten times the limit",
    ),
    HealthCode("gradients-far-above-limit", "warn", "most gradients are far larger than the clipping limit"),
    HealthCode("gradient-exploded", "warn", "a gradient norm is many times the usual one"),
    HealthCode("gradient-zero", "warn", "a gradient is exactly zero although there is a loss"),
    HealthCode("no-update-made", "stop", "no step changed the weights"),
    HealthCode(
        "learning-rate-tiny", "warn", "the learning rate is far too low, or stays under a hundredth of its peak"
    ),
    HealthCode("loss-does-not-move", "warn", "rows that were trained on have the loss that they had before"),
    HealthCode("loss-rises", "warn", "the training loss ends well above where it began"),
    HealthCode("warm-up-not-finished", "warn", "the run ends while the learning rate still rises"),
    HealthCode("peak-rate-not-reached", "warn", "the learning rate never reaches its peak"),
    HealthCode("loader-starves-device", "warn", "the device waits for batches"),
    HealthCode("memory-ran-out", "warn", "a step did not fit into memory and was done again in smaller micro-batches"),
    HealthCode("memory-near-limit", "warn", "the GPU's memory is nearly full"),
    HealthCode("memory-beyond-card", "warn", "more memory is held than the card has, the rest in the host's"),
    HealthCode("throughput-falls", "warn", "training gets slower as it goes on"),
]

#: All findings by code.
CODES: dict[str, HealthCode] = {known.code: known for known in _ALL}

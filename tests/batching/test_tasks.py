"""What each task makes of its rows: exactly which positions are computed and which ids carry loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.batching.head_loss import choose_head_loss
from lm_tuning.batching.losses import LossShape
from lm_tuning.batching.tasks.registry import get_task, task_of
from lm_tuning.models.loading import load_model
from lm_tuning.models.structure import classification_head
from lm_tuning.text.store.table import IGNORE_INDEX, TokenTable, TokenTableWriter
from tests.support.task_rows import label_map, save_tiny_bart, save_tiny_qwen3

PAD = 7


@pytest.fixture
def labelled(tmp_path: Path) -> TokenTable:
    """Texts of four and two tokens; the first one ends in the pad token."""
    with TokenTableWriter(tmp_path / "train.arrow") as writer:
        writer.append(11, [1, 8, 9, PAD], [], label=2)
        writer.append(12, [1, 10], [], label=0)
    return TokenTable(tmp_path / "train.arrow")


@pytest.fixture
def pairs(tmp_path: Path) -> TokenTable:
    """Sources of three and two tokens, targets of two and three."""
    with TokenTableWriter(tmp_path / "train.arrow") as writer:
        writer.append(11, [8, 9, 2, 20, 2], [(3, 5)])
        writer.append(12, [8, 2, 21, 22, 2], [(2, 5)])
    return TokenTable(tmp_path / "train.arrow")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Qwen3 with a fresh head of three classes, whose padding is its EOS token."""
    folder = save_tiny_qwen3(tmp_path_factory.mktemp("models") / "qwen3")
    model = load_model(str(folder), task="sequence_classification", label_map=label_map())
    model.config.pad_token_id = PAD
    return model


def test_a_labelled_row_counts_once(labelled: TokenTable) -> None:
    assert labelled.num_supervised.tolist() == [1, 1]
    assert labelled.labels.tolist() == [2, 0]
    assert (labelled[0].label, labelled[0].spans, labelled[0].num_supervised) == (2, [], 1)


def test_a_classifier_reads_the_last_real_token_of_padded_rows(labelled: TokenTable) -> None:
    batch = get_task("sequence_classification", pad_id=PAD).lay_out(labelled, [0, 1], batching="padded")
    assert batch.input_ids.tolist() == [[1, 8, 9, PAD], [1, 10, PAD, PAD]]
    assert batch.kept_positions.tolist() == [3, 5]
    assert batch.targets.tolist() == [2, 0]
    assert (batch.num_supervised, batch.num_tokens, batch.num_positions) == (2, 6, 8)
    assert batch.position_ids is batch.attention_mask is batch.decoder_input_ids is None


def test_a_classifier_reads_the_last_token_of_each_packed_row(labelled: TokenTable) -> None:
    batch = get_task("sequence_classification", pad_id=PAD).lay_out(labelled, [0, 1], batching="packed")
    assert batch.input_ids.tolist() == [[1, 8, 9, PAD, 1, 10]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.kept_positions.tolist() == [3, 5]
    assert (batch.num_supervised, batch.num_positions) == (2, 6)


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_class_logits_are_those_of_each_row_alone_even_with_pad_at_its_end(
    classifier: Any, labelled: TokenTable, batching: Any
) -> None:
    task = task_of(classifier, "sequence_classification", pad_id=PAD)
    with torch.no_grad():
        together = task.logits(classifier, task.lay_out(labelled, [0, 1], batching=batching))
        alone = [task.logits_of_alike(classifier, [labelled[index]], device="cpu")[0] for index in (0, 1)]
        whole = classifier.model(input_ids=torch.tensor([[1, 8, 9, PAD]])).last_hidden_state[0, -1]
        by_class = classifier(input_ids=torch.tensor([[1, 8, 9, PAD]])).logits
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together[0], classification_head(classifier)(whole), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(together[:1], by_class, rtol=1e-3, atol=1e-5), "the class itself pools one token earlier"


def test_an_encoder_decoder_gets_masks_from_lengths_and_shifted_targets(pairs: TokenTable) -> None:
    task = get_task("seq2seq_lm", pad_id=2, decoder_start_id=5)
    batch = task.lay_out(pairs, [0, 1], batching="padded")
    assert batch.input_ids.tolist() == [[8, 9, 2], [8, 2, 2]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.targets.tolist() == [[20, 2, IGNORE_INDEX], [21, 22, 2]]
    assert batch.decoder_input_ids is not None
    assert batch.decoder_input_ids.tolist() == [[5, 20, 2], [5, 21, 22]]
    assert (batch.num_supervised, batch.num_tokens, batch.num_positions) == (5, 10, 12)


def test_seq2seq_logits_are_those_of_each_row_alone(tmp_path: Path, pairs: TokenTable) -> None:
    model = load_model(str(save_tiny_bart(tmp_path / "bart")), task="seq2seq_lm")
    task = task_of(model, "seq2seq_lm", pad_id=0)
    batch = task.lay_out(pairs, [0, 1], batching="padded")
    with torch.no_grad():
        logits = task.logits(model, batch)
        for index in (0, 1):
            alone, targets = task.logits_of_alike(model, [pairs[index]], device="cpu")
            assert batch.targets[index, : len(targets)].tolist() == targets.tolist()
            torch.testing.assert_close(logits[index, : len(targets)], alone, atol=1e-5, rtol=1e-5)


@dataclass(frozen=True)
class FocalShape(LossShape):
    """A loss as somebody may add one: of a parameter that the head's loss in chunks knows nothing of."""

    gamma: float = 0.0

    def sum_nats(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Weigh the sum by gamma."""
        return (1 + self.gamma) * super().sum_nats(logits, targets)


def test_a_loss_that_chunks_do_not_compute_goes_through_all_logits(tmp_path: Path) -> None:
    model = load_model(str(save_tiny_qwen3(tmp_path / "qwen3")))
    with TokenTableWriter(tmp_path / "train.arrow") as writer:
        writer.append(1, [1, 8, 9, 10, 11], [(2, 5)])
    task = task_of(model, "causal_lm", pad_id=PAD)
    batch = task.lay_out(TokenTable(tmp_path / "train.arrow"), [0], batching="padded")
    ids = batch.input_ids[0].numpy()
    task.head_loss, _ = choose_head_loss(model, ids, device="cpu", compute_dtype="float32", label_smoothing=0.1)
    assert task.head_loss is not None, "this model's head runs apart"
    with torch.no_grad():
        logits = task.logits(model, batch)
        for shape in (LossShape(), LossShape(label_smoothing=0.1), FocalShape(label_smoothing=0.1, gamma=2.0)):
            torch.testing.assert_close(task.sum_nats(model, batch, shape), shape.sum_nats(logits, batch.targets))


def test_only_label_smoothing_is_computed_in_chunks() -> None:
    assert LossShape().fits_chunks and LossShape(label_smoothing=0.1).fits_chunks and FocalShape().fits_chunks
    assert not LossShape(class_weights=(1.0, 1.0)).fits_chunks
    assert not FocalShape(gamma=2.0).fits_chunks


def test_a_row_alone_has_the_loss_of_its_supervised_tokens(tmp_path: Path) -> None:
    model = load_model(str(save_tiny_qwen3(tmp_path / "qwen3")))
    with TokenTableWriter(tmp_path / "train.arrow") as writer:
        writer.append(1, [1, 8, 9, 10, PAD], [(2, 3), (4, 5)])
    task = task_of(model, "causal_lm", pad_id=PAD)
    row = TokenTable(tmp_path / "train.arrow")[0]
    with torch.no_grad():
        logits, targets = task.logits_of_alike(model, [row], device="cpu")
        own = task.model_loss(model, row, device="cpu")
    assert targets.tolist() == [9, PAD]
    assert own == pytest.approx(float(torch.nn.functional.cross_entropy(logits, targets)), rel=1e-5)

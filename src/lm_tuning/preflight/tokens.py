"""Look at the tokens of the rows: how texts begin and end, ids that the model does not embed, and rows decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.format.columns import CAUSAL_LM, SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.data.records import SPLITS
from lm_tuning.data.split.records import SplitsSummary
from lm_tuning.preflight import records
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.reporting.document import Part
from lm_tuning.text.align.masks import added_around
from lm_tuning.text.decoding import decode
from lm_tuning.text.records import NO_LABEL, TokenRow
from lm_tuning.text.store.columns import count_token, hold_token
from lm_tuning.text.store.table import Int32Array, Int64Array, TokenTable, open_split
from lm_tuning.training.health.table_reading import find_outside_ids, find_rows_with
from lm_tuning.wording import count_of

_NUM_ENDINGS = 5
_NO_TOKEN = -1  # no id equals it


def inspect_special_tokens(
    tokens: Path, tokenizer: Any, *, task: str = CAUSAL_LM, on_progress: OnProgress = ignore_progress
) -> records.SpecialTokenCounts:
    """Count how the training rows begin and end.

    Args:
        tokens: folder of tokens.
        tokenizer: the tokenizer that made them, with a pad token.
        task: the ``task`` parameter.
        on_progress: receives the rows looked at.

    Returns:
        ``pad``, ``eos`` and ``bos`` with token, id and counts; ``endings``: the last supervised tokens of rows, the
        most frequent first, with rows and whether they are control tokens; ``num_rows``; and ``end_learned_fraction``,
        the share of rows whose last supervised token is a control token, so that the model learns to stop; ``None``
        where no token is supervised. Of rows with a source and a target, ``bos`` is about sources, ``target_bos`` about
        targets, and ``num_sources_ended`` counts the sources whose last token is the EOS token.
    """
    table = open_split(tokens, "train")
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    special = {int(index) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {int(token) for token in (bos, eos, pad) if token is not None}
    # A token that is missing is looked for all the same, so that one code path counts nothing of it.
    wanted = {
        name: _NO_TOKEN if token is None else token for name, token in {"bos": bos, "eos": eos, "pad": pad}.items()
    }
    counts: Counter[str] = Counter()
    of_sides: dict[str, Counter[str]] = {"source": Counter(), "target": Counter()}
    endings: Counter[int] = Counter()  # rows by the id of their last supervised token
    on_progress("Looking at tokens", 0, len(table), "rows")
    # Whole batches of Arrow buffers, as their ids lie there: a loop over rows would take minutes for millions.
    for batch in table.batches():
        ids, starts, last_supervised = _parts(batch)
        counts.update(_count_rows(ids, starts, **wanted))
        if task == SEQ2SEQ_LM:
            for side, (side_ids, side_starts) in _sides(batch).items():
                of_sides[side].update(_count_rows(side_ids, side_starts, **wanted))
        last_ids, numbers = np.unique(ids[last_supervised], return_counts=True)
        endings.update(dict(zip(last_ids.tolist(), numbers.tolist(), strict=True)))
        on_progress("Looking at tokens", counts["rows"], len(table), "rows")
    assert counts["rows"] == len(table), "a batch of the table was not looked at"
    found: list[records.Ending] = [
        {"id": token, "token": decode(tokenizer, [token]), "num_rows": num_rows, "is_control": token in special}
        # Of equally frequent tokens the lower id comes first, on every machine.
        for token, num_rows in sorted(endings.items(), key=lambda item: (-item[1], item[0]))[:_NUM_ENDINGS]
    ]
    # Any control token counts as an end: templates end turns with another one than EOS.
    num_ended = sum(endings[token] for token in special)
    # What the tokenizer puts before a text, and before one that is to be written.
    is_added = {side: bos in added_around(tokenizer, is_target=side == "target")[0] for side in of_sides}
    facts: records.SpecialTokenCounts = {
        "num_rows": len(table),
        "pad": {"token": tokenizer.pad_token, "id": pad, "num_rows_with": counts["pad"], "is_eos": pad == eos},
        "eos": {"token": tokenizer.eos_token, "id": eos, "num_rows_with": counts["eos"]},
        "bos": _describe_bos(tokenizer, counts, is_added=is_added["source"]),
        "endings": found,
        "num_end_learned": num_ended,
        "end_learned_fraction": None if task == SEQUENCE_CLASSIFICATION else num_ended / max(len(table), 1),
    }
    if task == SEQ2SEQ_LM:
        facts["bos"] = _describe_bos(tokenizer, of_sides["source"], is_added=is_added["source"])
        facts["target_bos"] = _describe_bos(tokenizer, of_sides["target"], is_added=is_added["target"])
        facts["num_sources_ended"] = of_sides["source"]["eos_last"]
    return facts


def _describe_bos(tokenizer: Any, counts: Mapping[str, int], *, is_added: bool) -> records.BosCount:
    return {
        "token": tokenizer.bos_token,
        "id": tokenizer.bos_token_id,
        "added_by_tokenizer": is_added,
        "num_rows_with": counts["bos"],
        "num_rows_beginning_with": counts["bos_first"],
        "num_rows_beginning_with_two": counts["bos_twice"],
        "num_rows_with_one_later": counts["bos_later"],
    }


def _sides(batch: pa.RecordBatch) -> dict[str, tuple[Int32Array, Int64Array]]:
    """Return the ids of sources and of targets, and where each row starts in them ``(rows + 1,)``."""
    ids, spans = batch.column("input_ids"), batch.column("spans")
    values, lengths = ids.values.to_numpy(), np.diff(ids.offsets.to_numpy())
    # Each row has one span, its target, so that what lies before its start is the source.
    source_lengths = spans.values.to_numpy()[::2]  # (rows,)
    indices = np.arange(len(values)) - np.repeat(ids.offsets.to_numpy()[:-1], lengths)  # within the row, (tokens,)
    is_target = indices >= np.repeat(source_lengths, lengths)
    return {
        "source": (values[~is_target], np.cumsum([0, *source_lengths])),
        "target": (values[is_target], np.cumsum([0, *(lengths - source_lengths)])),
    }


def _parts(batch: pa.RecordBatch) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Return a batch's ids, where each row starts in them ``(rows + 1,)``, and where its last supervised one is."""
    ids, spans = batch.column("input_ids"), batch.column("spans")
    starts, span_starts, edges = ids.offsets.to_numpy(), spans.offsets.to_numpy(), spans.values.to_numpy()
    with_span = np.flatnonzero(np.diff(span_starts))  # rows with something supervised
    # The edges are start, end, start, end …: the last number of a row's is where its last span ends.
    ends = edges[span_starts[1:][with_span] - 1]
    return ids.values.to_numpy(), starts, starts[:-1][with_span] + ends - 1


def _count_rows(ids: Int32Array, starts: Int32Array | Int64Array, *, bos: int, eos: int, pad: int) -> dict[str, int]:
    """Count the rows of a batch that hold a token, and those that begin with it once or twice."""
    of_bos, firsts = count_token(ids, starts, bos), starts[:-1]
    begins = ids[firsts] == bos
    # A row of one token has no second one; the next row's first must not be taken for it.
    seconds = np.minimum(firsts + 1, starts[1:] - 1)
    goes_on = (seconds > firsts) & (ids[seconds] == bos)
    return {
        "rows": len(firsts),
        "bos": int((of_bos > 0).sum()),
        "bos_first": int(begins.sum()),
        "bos_twice": int((begins & goes_on).sum()),
        # More of them than stand at the beginning, which is 0 or 1.
        "bos_later": int((of_bos > begins).sum()),
        "pad": int(hold_token(ids, starts, pad).sum()),
        "eos": int(hold_token(ids, starts, eos).sum()),
        "eos_last": int((ids[starts[1:] - 1] == eos).sum()),
    }


def judge_special_tokens(facts: records.SpecialTokenCounts) -> list[records.Judgement]:
    """Describe for each question about these tokens what was found and whether it is well.

    Args:
        facts: see ``inspect_special_tokens``.

    Returns:
        One for each question.
    """
    num_rows = facts["num_rows"]
    has_classes = facts["end_learned_fraction"] is None
    judged = [_judge_pad(facts["pad"], has_classes=has_classes)]
    if not has_classes:
        judged.append(_judge_end(facts))
    if "target_bos" not in facts:
        return [*judged, _judge_begin(facts["bos"], num_rows)]
    return [
        *judged,
        _judge_sources_end(facts),
        _judge_begin(facts["bos"], num_rows, noun="source"),
        _judge_begin(facts["target_bos"], num_rows, noun="target"),
    ]


def _judge_pad(pad: records.PadCount, *, has_classes: bool) -> records.Judgement:
    question = "Is padding told apart from the end?"
    if pad["is_eos"]:
        if has_classes:
            here = "the class is read at the last token of a text, which its length tells"
            elsewhere = "look for the last token that is not padding read an earlier one where a text ends in it"
        else:
            here = "losses are taken by position, never by comparing ids"
            elsewhere = "mask the pad id would never teach the model to stop"
        answer = f"The pad token {pad['token']} is the EOS token too. Nothing is lost here: {here}. "
        answer += f"Other tools that {elsewhere}."
        return _verdict(question, answer, "note")
    answer = f"Yes: the pad token {pad['token']} (id {pad['id']}) is not the EOS token."
    if pad["num_rows_with"]:
        answer += f" It stands inside {pad['num_rows_with']:,} of the rows, harmlessly: losses are taken by position."
    return _verdict(question, answer, "good")


def _judge_end(facts: records.SpecialTokenCounts) -> records.Judgement:
    question = "Does the model learn to stop?"
    if not facts["endings"]:
        return _verdict(question, "No row has a supervised token.", "bad")
    share = facts["end_learned_fraction"] or 0.0
    names = ", ".join(end["token"] for end in facts["endings"] if end["is_control"]) or "EOS token"
    answer = f"{share:.1%} of the rows end in a supervised {names}."
    if share >= 0.999:
        return _verdict(question, answer, "good")
    if share >= 0.9:
        return _verdict(question, f"{answer} The others were cut, or their template writes no end.", "note")
    others = [end["token"] for end in facts["endings"] if not end["is_control"]]
    if others:
        answer += f" Of the others, most end in {others[0]!r}."
    answer += f" From {1 - share:.1%} of the rows the model learns to go on where it should stop."
    return _verdict(question, answer, "bad")


def _judge_sources_end(facts: records.SpecialTokenCounts) -> records.Judgement:
    ended, num_rows = facts["num_sources_ended"], facts["num_rows"]
    answer = (
        f"{ended:,} of {count_of(num_rows, 'source')} {'ends' if ended == 1 else 'end'} in {facts['eos']['token']}."
    )
    return _verdict("Does each source end?", answer, "good" if ended == num_rows else "bad")


def _judge_begin(bos: records.BosCount, num_rows: int, *, noun: str = "row") -> records.Judgement:
    question = f"Does each {noun} begin once?"
    if bos["token"] is None:
        return _verdict(question, "The tokenizer has no token for the beginning of a text, and none is used.", "good")
    added = "the tokenizer adds it" if bos["added_by_tokenizer"] else "the tokenizer adds none"
    # From a template that writes the token and a tokenizer that adds it; one row of it shows that both are at work.
    doubled = bos["num_rows_beginning_with_two"]
    if doubled:
        answer = (
            f"{doubled:,} of {count_of(num_rows, noun)} {'begins' if doubled == 1 else 'begin'} with "
            f"{bos['token']} twice ({added}). One of the two is too many: the model was made with one."
        )
        return _verdict(question, answer, "bad")
    single = bos["num_rows_beginning_with"]
    verb = "begins" if single == 1 else "begin"
    answer = f"{single:,} of {count_of(num_rows, noun)} {verb} with {bos['token']} ({added})."
    if 0 < bos["num_rows_beginning_with"] < num_rows:
        return _verdict(question, f"{answer} {noun.capitalize()}s that begin differently are worth a look.", "note")
    if bos["num_rows_with_one_later"] and bos["num_rows_beginning_with"]:
        answer += f" It comes again later in {noun}s, as it does where a chat template opens every turn with it."
    if bos["added_by_tokenizer"] and not bos["num_rows_beginning_with"]:
        return _verdict(question, f"{answer} The model expects it at the beginning.", "bad")
    return _verdict(question, answer, "good")


def _verdict(question: str, answer: str, verdict: records.Verdict) -> records.Judgement:
    return {"question": question, "answer": answer, "verdict": verdict}


_SHOWN = 5


def measure_vocabulary(tokens: Path, tokenizer: Any, *, num_embeddings: int | None) -> records.VocabularyFigures:
    """Count rows with token ids that the model does not embed.

    Args:
        tokens: folder of tokens.
        tokenizer: the tokenizer that made them.
        num_embeddings: token ids that the model embeds; ``None`` where its configuration does not say.

    Returns:
        ``num_tokens`` of the tokenizer, ``num_embeddings``, and of the rows of each split that hold other ids
        ``num_rows_beyond``, ``rows_beyond`` (the first row ids) and ``ids_beyond`` (ids with their tokens).
    """
    beyond: dict[str, list[int]] = {split: [] for split in SPLITS}
    ids: set[int] = set()
    if num_embeddings is not None:
        for split in SPLITS:
            table = open_split(tokens, split)
            # As a rule there are none, and then no row has to be looked for.
            found = find_outside_ids(table, 0, num_embeddings)
            ids.update(found)
            if found:
                beyond[split] = find_rows_with(table, 0, num_embeddings)
    return {
        "num_tokens": len(tokenizer),
        "num_embeddings": num_embeddings,
        "num_rows_beyond": {split: len(rows) for split, rows in beyond.items()},
        "rows_beyond": {split: rows[:_SHOWN] for split, rows in beyond.items()},
        "ids_beyond": {str(token_id): tokenizer.convert_ids_to_tokens(token_id) for token_id in sorted(ids)[:_SHOWN]},
    }


def decode_examples(
    table: TokenTable,
    tokenizer: Any,
    split_summary: SplitsSummary,
    *,
    num_examples: int,
    label_map: Mapping[str, int] | None = None,
) -> list[records.DecodedRow]:
    """Decode the first rows.

    Args:
        table: tokenized training rows.
        tokenizer: the tokenizer that made them.
        split_summary: of the splits, for where rows stand in their files.
        num_examples: how many at most.
        label_map: id by name of the classes, for rows that have one.

    Returns:
        One record for each row; ``parts`` come from ``decode_parts``.
    """
    names = {index: name for name, index in (label_map or {}).items()}
    positions = RowPositions(split_summary["files"])
    special = {int(index) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    examples: list[records.DecodedRow] = []
    for row in (table[index] for index in range(min(num_examples, len(table)))):
        file, number = positions.find(row.row_id)
        examples.append(
            {
                "row_id": row.row_id,
                "file": file,
                "row": number,
                "num_tokens": len(row.input_ids),
                "num_supervised": row.num_supervised,
                "parts": decode_parts(row, tokenizer, special),
                "label": names[row.label] if row.label != NO_LABEL else None,
                "label_id": row.label if row.label != NO_LABEL else None,
            }
        )
    return examples


def decode_parts(row: TokenRow, tokenizer: Any, special: set[int]) -> list[Part]:
    """Decode a row in segments that are supervised or not, and control tokens or not.

    Args:
        row: a row of a token table.
        tokenizer: the tokenizer that made it.
        special: ids of control tokens.

    Returns:
        The segments in order. A control token is a segment of its own.
    """
    supervised = np.zeros(len(row.input_ids), dtype=bool)  # (tokens,)
    for start, end in row.spans:
        supervised[start:end] = True
    tokens = [(int(token), bool(flag)) for token, flag in zip(row.input_ids, supervised, strict=True)]
    parts: list[Part] = []
    # Tokens are decoded in runs, not one by one: a character may be spread over several of them. The key of a control
    # token is its position, so that two in a row do not join.
    for (index, flag), group in groupby(
        enumerate(tokens), key=lambda item: (item[0] if item[1][0] in special else -1, item[1][1])
    ):
        text = decode(tokenizer, [token for _, (token, _) in group])
        parts.append({"text": text, "is_learned": flag, "is_control": index >= 0})
    return parts

"""Split, tokenize and begin to train on 30,000, 300,000 and 3,000,000 rows, and report what that costs a row.

    python benchmarks/data_scale.py [--rows 30000 300000 3000000] [--kinds text chat] [--near] [--scratch FOLDER]

Makes a file of classification rows (words drawn with a natural frequency curve; mean 535 characters, at most 620; 280
labels; one row in a hundred is a copy), then runs, each in a process of its own:

* ``kedro run --pipelines=split``: exact duplicates kept together, strata by label;
* ``kedro run --pipelines=tokenize``: at every tenth of the rows the same process hands the following rows to the bare
  Rust tokenizer (the faster of its two batch calls; for chat rows after ``apply_chat_template``), so the ratio of
  tokens per second is taken side by side from the first row to the last;
* ``kedro run --pipelines=train`` on the finished tokens, until the first batch and until the first step;
* with ``--near``, the split once more, looking for near duplicates.

Memory is the anonymous proportional set size of the whole process tree, so mapped Arrow files do not count. The
machine should do nothing else. The default model's folder must be there (any ``kedro run`` makes it).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

PROJECT = Path(__file__).resolve().parents[1]
NUM_LABELS = 280
NUM_WORDS = 30_000
FREQUENT_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so said what up its about "
    "into than them can only other new some could time these two may then do first any my now such like our over man "
    "me even most made after also did many"
)
MEAN_CHARACTERS, MAX_CHARACTERS = 535, 620
COPY_FRACTION = 0.01
BARE_ROWS = 8_000
BARE_BATCH_ROWS = 1_000
NUM_LOOKS = 10
COLUMNS = {
    "text": "data.format=text,data.columns.text=text",
    "chat": "data.format=prompt_response,data.columns.prompt=text,data.columns.response=label",
}

say: Callable[[str], Any] = sys.stdout.write


def make_words() -> tuple[list[str], np.ndarray]:
    """Make a vocabulary whose frequencies fall as those of a language do (Zipf and Mandelbrot's curve).

    The most frequent words are real, the others made of syllables, so that a tokenizer knows the former whole and cuts
    the latter, as it does with names and terms.
    """
    random = np.random.default_rng(1)
    starts = " b c d f g h k l m n p r s t v w z br ch cl dr gr pl pr sh sl st th tr".split(" ")
    middles = "a e i o u ai ea ee io ou".split(" ")
    ends = "   l m n r s t nd ng nt rd st".split(" ")
    words = dict.fromkeys(FREQUENT_WORDS.split())
    while len(words) < NUM_WORDS:
        num_syllables = int(random.integers(2, 5))
        picks = [random.integers(0, len(parts), num_syllables) for parts in (starts, middles, ends)]
        words.setdefault("".join(starts[a] + middles[b] + ends[c] for a, b, c in zip(*picks, strict=True)))
    shares = 1 / (np.arange(NUM_WORDS) + 2.7)
    return list(words), shares / shares.sum()


def make_rows(path: Path, num_rows: int) -> None:
    """Write the file, the same on every machine for a number of rows."""
    words, shares = make_words()
    edges = np.cumsum(shares)
    widths = np.array([len(word) + 1 for word in words])
    random = np.random.default_rng(0)
    made = 0
    with path.open("w", encoding="utf-8") as file:
        while made < num_rows:
            count = min(10_000, num_rows - made)
            drawn = np.minimum(np.searchsorted(edges, random.random((count, 260))), len(words) - 1)
            reached = np.cumsum(widths[drawn], axis=1)
            wanted = np.minimum(random.normal(MEAN_CHARACTERS + 4, 45, count), MAX_CHARACTERS).clip(40)
            ends = (reached <= wanted[:, None]).sum(axis=1)
            labels = random.integers(0, NUM_LABELS, count)
            lines = []
            for row in range(count):
                text = " ".join([words[word] for word in drawn[row, : ends[row]]])
                lines.append({"id": made + row, "text": text, "label": f"class {labels[row]}"})
            for row in np.flatnonzero(random.random(count) < COPY_FRACTION).tolist():
                lines[row] |= {key: lines[row - 1][key] for key in ("text", "label")}
            file.writelines(json.dumps(line) + "\n" for line in lines)
            made += count


class Watch:
    """Follow a process tree's memory from a thread of its own.

    Attributes:
        peak_bytes: most anonymous memory seen, shared pages counted by share.
    """

    def __init__(self, pid: int) -> None:
        """Begin to watch."""
        self.peak_bytes = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End watching."""
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(0.5):
            self.peak_bytes = max(self.peak_bytes, sum(_anonymous_bytes(pid) for pid in _tree(self._pid)))


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from _tree(int(child))
    except OSError:
        return


def _anonymous_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"Pss_Anon:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def run_child(part: str, options: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """Run one stage in a process of its own and return its figures, seconds and peak memory among them."""
    answer = Path(options.scratch) / "answer.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", part, "--answer", str(answer), *extra]
    log = Path(options.scratch) / f"{part}.log"
    began = time.time()
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{Path(options.scratch).resolve()}/mlflow.db"}
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=PROJECT, stdout=out, stderr=subprocess.STDOUT, env=environment)
        watch = Watch(process.pid)
        code = process.wait()
        watch.stop()
    if code:
        raise RuntimeError(f"{part} ended with {code}:\n{log.read_text()[-3000:]}")
    figures: dict[str, Any] = json.loads(answer.read_text()) if answer.is_file() else {}
    marks = {name: stamp - began for name, stamp in figures.pop("marks", {}).items()}
    return figures | {"seconds": time.time() - began, "peak_bytes": watch.peak_bytes, "marks": marks}


def run_kedro(pipelines: str, parameters: str) -> None:
    """Run pipelines through the command line's own entry point, in this process."""
    from kedro.framework.cli.cli import main

    sys.argv = ["kedro", "run", f"--pipelines={pipelines}", "--params", parameters]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


def child_tokenize(parameters: str, answer: Path, kind: str) -> None:
    """Tokenize through Kedro; at each tenth of the rows, time the bare tokenizer on the rows that follow."""
    from lm_tuning.text import tokenize as tokenization
    from lm_tuning.text.tokenizers.causal_lm import RowTokenizer

    original = tokenization.write_tokens
    looks: list[dict[str, float]] = []
    # Chunks are tokenized ahead in another thread. A look waits for them, so that none is done for free while the bare
    # tokenizer runs: with few rows that would be most of them.
    under_way = {"rendered": 0, "encoded": 0}
    render, encode = RowTokenizer.render, RowTokenizer.encode

    def counted_render(self: Any, *arguments: Any) -> Any:
        under_way["rendered"] += 1
        return render(self, *arguments)

    def counted_encode(self: Any, *arguments: Any) -> Any:
        encoded = encode(self, *arguments)
        under_way["encoded"] += 1
        return encoded

    RowTokenizer.render = counted_render  # type: ignore[method-assign]
    RowTokenizer.encode = counted_encode  # type: ignore[method-assign]

    def timed(folder: Path, examples: Path, tokenizer: Any, *, on_progress: Any, **settings: Any) -> dict[str, Any]:
        bare = BareTokenizer(examples, tokenizer, kind)
        state = {"since": time.perf_counter(), "rows": 0}

        def watch(what: str, done: int, total: int, unit: str) -> None:
            on_progress(what, done, total, unit)
            if done - state["rows"] >= total / NUM_LOOKS or (done == total and done > state["rows"]):
                while under_way["encoded"] < under_way["rendered"]:
                    time.sleep(0.001)
                ours = time.perf_counter() - state["since"]
                first = min(int(state["rows"]), total - BARE_ROWS)
                theirs, tokens, rows = bare.run(first)
                looks.append(
                    {
                        "rows_per_second": (done - state["rows"]) / ours,
                        "bare_rows_per_second": rows / theirs,
                        "bare_tokens_per_row": tokens / rows,
                    }
                )
                state.update(rows=done, since=time.perf_counter())

        state["since"] = time.perf_counter()
        return original(folder, examples, tokenizer, on_progress=watch, **settings)

    tokenization.write_tokens = timed  # type: ignore[assignment]
    run_kedro("tokenize", parameters)
    answer.write_text(json.dumps({"looks": looks}))


class BareTokenizer:
    """What anyone would write: rows in batches, rendered by the template where they are chats, ids taken out."""

    def __init__(self, examples: Path, tokenizer: Any, kind: str) -> None:
        """Open the training rows and choose the faster call.

        Args:
            examples: folder of splits.
            tokenizer: a fast transformers tokenizer; a copy of its backend is used.
            kind: ``text`` or ``chat``.
        """
        from tokenizers import Tokenizer

        from lm_tuning.data.store import open_examples

        self._kind, self._tokenizer = kind, tokenizer
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._batches = list(open_examples(examples, "train").batches())
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self._encode = self._backend.encode_batch
        texts = self._rows(0, BARE_BATCH_ROWS)["text" if kind == "text" else "prompt"]
        times = {}
        for call in (self._backend.encode_batch, self._backend.encode_batch_fast) * 2:
            began = time.perf_counter()
            call(texts, add_special_tokens=False)
            times[call] = time.perf_counter() - began
        self._encode = min(times, key=lambda call: times[call])

    def run(self, first: int) -> tuple[float, int, int]:
        """Return seconds, tokens and rows of the rows from ``first`` on."""
        num_tokens = num_rows = 0
        began = time.perf_counter()
        for start in range(first, first + BARE_ROWS, BARE_BATCH_ROWS):
            columns = self._rows(start, BARE_BATCH_ROWS)
            texts = columns["text"] if self._kind == "text" else self._render(columns)
            ids = [encoding.ids for encoding in self._encode(texts, add_special_tokens=False)]
            num_tokens += sum(map(len, ids))
            num_rows += len(ids)
        return time.perf_counter() - began, num_tokens, num_rows

    def _render(self, columns: dict[str, list[Any]]) -> list[str]:
        pairs = zip(columns["prompt"], columns["response"], strict=True)
        conversations = [
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            for prompt, response in pairs
        ]
        rendered: list[str] = self._tokenizer.apply_chat_template(conversations, tokenize=False)
        return rendered

    def _rows(self, start: int, count: int) -> dict[str, list[Any]]:
        import pyarrow as pa

        last = int(self._starts[-1])
        start = max(0, min(start, last - count))
        position = int(np.searchsorted(self._starts, start, side="right")) - 1
        end = int(np.searchsorted(self._starts, start + count, side="left"))
        table = pa.Table.from_batches(self._batches[position:end])
        columns: dict[str, list[Any]] = table.slice(start - int(self._starts[position]), count).to_pydict()
        return columns


def child_train(parameters: str, answer: Path) -> None:
    """Train through Kedro until the first step begins, then leave."""
    from lm_tuning.batching import batch as batches
    from lm_tuning.training import trainer

    marks: dict[str, float] = {}
    get_item = batches.StepDataset.__getitem__

    def first_batch(self: Any, index: int) -> Any:
        batch = get_item(self, index)
        marks.setdefault("first_batch", time.time())
        return batch

    def first_step(self: Any, *_: Any, **__: Any) -> Any:
        marks["first_step"] = time.time()
        answer.write_text(json.dumps({"marks": marks}))
        os._exit(0)

    batches.StepDataset.__getitem__ = first_batch  # type: ignore[method-assign]
    trainer.StepPlanTrainer.training_step = first_step  # type: ignore[method-assign]
    run_kedro("train", parameters)


def measure(num_rows: int, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run all stages on one number of rows."""
    scratch = Path(options.scratch)
    raw = scratch / f"rows_{num_rows}.jsonl"
    if not raw.is_file():
        make_rows(raw.with_suffix(".part"), num_rows)
        raw.with_suffix(".part").rename(raw)
    output = f"benchmark_scale_{kind}_{num_rows}"
    parameters = ",".join(
        [
            f"output={output}",
            f"data.path={raw.resolve()}",
            COLUMNS[kind],
            "split.stratify=label",
            "split.validation=0.01",
            "split.test=0.01",
            "train.eval_every_steps=null",
            "train.save_every_steps=null",
        ]
    )
    try:
        figures: dict[str, Any] = {"rows": num_rows, "kind": kind, "raw_bytes": raw.stat().st_size}
        figures["split"] = run_child("split", options, ["--params", parameters])
        figures["tokenize"] = run_child("tokenize", options, ["--params", parameters, "--kind", kind])
        summary = json.loads((PROJECT / f"data/08_reporting/{output}/token_summary.json").read_text())
        figures["tokens"] = sum(split["num_tokens"] for split in summary["splits"].values())
        folders = [PROJECT / "data" / layer / output for layer in ("02_intermediate", "05_model_input")]
        files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
        figures["disk_bytes"] = sum(file.stat().st_size for file in files)
        figures["train"] = [run_child("train", options, ["--params", parameters]) for _ in range(options.starts)]
        if options.near:
            near = f"{parameters},split.near_duplicates=report"
            figures["near"] = run_child("split", options, ["--params", near])
            report = json.loads((PROJECT / f"data/08_reporting/{output}/split_summary.json").read_text())
            figures["near_facts"] = report["near_duplicates"]
        return figures
    finally:
        if not options.keep:
            for folder in (PROJECT / "data").glob(f"*/{output}"):
                shutil.rmtree(folder)


def describe(figures: dict[str, Any]) -> str:
    """Return one row of the table."""
    rows, looks = figures["rows"], figures["tokenize"]["looks"]
    ratios = [look["rows_per_second"] / look["bare_rows_per_second"] for look in looks]
    tokens_per_row = figures["tokens"] / rows
    ours = rows / sum(rows / len(looks) / look["rows_per_second"] for look in looks)
    peaks = [figures["split"]["peak_bytes"], figures["tokenize"]["peak_bytes"]]
    peaks.append(max(*peaks, *(run["peak_bytes"] for run in figures["train"])))
    cells = [
        figures["kind"],
        f"{rows:,}",
        f"{figures['split']['seconds']:.1f} s",
        f"{figures['split']['seconds'] / rows * 1e6:.1f}",
        f"{ours * tokens_per_row:,.0f}",
        f"{1e6 / ours:.1f}",
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, last {ratios[-1]:.3f})",
        "{:.2f} / {:.2f} ({:.2f})".format(*(bytes_ / 1e9 for bytes_ in peaks)),
        f"{figures['disk_bytes'] / figures['tokens']:.2f}",
        f"{statistics.median(run['marks']['first_batch'] for run in figures['train']):.1f} s",
        f"{statistics.median(run['marks']['first_step'] for run in figures['train']):.1f} s",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run all sizes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[30_000, 300_000, 3_000_000])
    parser.add_argument("--kinds", nargs="+", choices=list(COLUMNS), default=["text"])
    parser.add_argument("--near", action="store_true", help="look for near duplicates as well")
    parser.add_argument("--starts", type=int, default=1, help="how often the way to the first batch is timed")
    parser.add_argument("--scratch", default=None, help="folder for the raw files, kept; a temporary one by default")
    parser.add_argument("--keep", action="store_true", help="leave the results in data/")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--params", help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "split":
        run_kedro("split", options.params)
    elif options.child == "tokenize":
        child_tokenize(options.params, options.answer, options.kind)
    elif options.child == "train":
        child_train(options.params, options.answer)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            options.scratch = options.scratch or temporary
            Path(options.scratch).mkdir(parents=True, exist_ok=True)
            say(
                "| rows are | rows | split | split, us/row | tokenize, tokens/s | us/row | against bare (ten looks) | "
                "peak GB split / tokenize (all) | disk bytes/token | first batch after | first step after |\n"
                + "|---" * 11
                + "|\n"
            )
            for kind in options.kinds:
                for num_rows in options.rows:
                    figures = measure(num_rows, kind, options)
                    say(describe(figures) + "\n")
                    if options.near:
                        say(f"near duplicates: {figures['near']['seconds']:.1f} s, {figures['near_facts']}\n")
                    sys.stdout.flush()
                    with (Path(options.scratch) / "figures.jsonl").open("a") as file:
                        file.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()

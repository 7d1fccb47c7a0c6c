"""Train through ``run_training`` with other kernels put in place, and print speed and losses.

    python benchmarks/layer_kernels/whole.py 4b-lora [--use aug one-pass chunk=8192 ...] [--profile FOLDER]

Each call is a process of its own. What can be used:

* ``group``, ``aug``, ``jb``, ``one-pass``, ``fp8-row``, ``fp8-tensor``: adapters of layers that share their input in
  groups (see ``variants.py``), with LoRA;
* ``join``: query, key and value as one product where all weights are trained; ``join-all``: gate and up, too;
* ``flex``: flex attention with a mask of rows;
* ``chunk=N``: positions of a chunk of the head's loss;
* ``NAME=VALUE``: a setting of ``torch._inductor.config``.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(PROJECT / "benchmarks"), str(PROJECT / "src"), str(PROJECT)]

import torch  # noqa: E402
import variants as kinds  # noqa: E402
from layers import describe_events  # noqa: E402
from throughput_ours import run_ours  # noqa: E402
from throughput_works import WORKS  # noqa: E402

from lm_tuning.batching import losses, packed_attention  # noqa: E402
from lm_tuning.training.kernels import fast_path  # noqa: E402

Q, G = 3, 2


def form_of(use: set[str]) -> kinds.Form | None:
    """Return how adapters are grouped, if at all."""
    if not use & {"group", "aug", "jb", "one-pass", "fp8-row", "fp8-tensor"}:
        return None
    fp8 = next((name[4:] for name in ("fp8-row", "fp8-tensor") if name in use), None)
    joined = (Q, G) if fp8 or "jb" in use else ()
    augment = (Q, G) if "aug" in use and fp8 is None else ()
    return kinds.Form(
        join_forward=(Q,) if joined or augment else (), join_backward=joined, augment=augment,
        one_pass="one-pass" in use, in_place=True, fp8=fp8,
    )  # fmt: skip


def use_groups(form: kinds.Form) -> None:
    """Build grouped adapters in the place of the product's."""

    def install(model: Any) -> int:
        groups = kinds.install_groups(model, form)

        def refresh(*given: Any) -> None:
            with torch.no_grad():
                for group in groups:
                    group.refresh()

        model.register_forward_pre_hook(refresh)
        fast_path.inner_model(model).model.register_forward_pre_hook(refresh)
        return sum(len(group.members) for group in groups)

    fast_path.install_fused_lora = install


def use_joined(names: Any) -> None:
    """Make trained weights with one input one product, once the fast path is prepared."""
    choose = fast_path._choose_batching

    def choose_and_join(ready: Any, settings: Any, longest: int) -> Any:
        kinds.install_groups(ready.model, None, names)
        return choose(ready, settings, longest)

    fast_path._choose_batching = choose_and_join


def use_flex() -> None:
    """Attend by flex attention where bounds are given."""
    plain = packed_attention.packed_attention

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        if others.get("block_mask") is None:
            others.pop("block_mask", None)
            return plain(module, query, key, value, mask, **others)
        return kinds.flex(module, query, key, value, mask, **others)

    packed_attention.packed_attention = attend
    choose = fast_path._choose_batching

    def choose_and_mask(ready: Any, settings: Any, longest: int) -> Any:
        def add_mask(module: Any, args: Any, kwargs: Any) -> Any:
            bounds = kwargs.get("cu_seq_lens_q")
            if bounds is not None:
                kwargs["block_mask"] = kinds.document_mask(bounds, kwargs["input_ids"].shape[1])
            return args, kwargs

        fast_path.inner_model(ready.model).model.register_forward_pre_hook(add_mask, with_kwargs=True)
        return choose(ready, settings, longest)

    fast_path._choose_batching = choose_and_mask


def use_head(sizes: list[int]) -> None:
    """Change the chunks of the head's loss."""
    if sizes:
        losses.chunk_positions = lambda *given, **named: sizes[0]


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--use", nargs="*", default=[])
    parser.add_argument("--beside-plain", action="store_true", help="train as the product does before, in this process")
    parser.add_argument("--kernels", type=int, default=0, help="kernels to list of the last step but one")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--compile", choices=("auto", "yes", "no"), default="yes")
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    options.lengths, options.plan, options.plans, options.batching = "report", False, None, "auto"
    options.works = [options.work]
    if options.kernels:
        watch_step(options.steps - 2, options.kernels)
    if options.beside_plain:
        measure(set(), options)
    measure(set(options.use), options)
    if options.profile:
        sys.stdout.write((options.profile / "profile.md").read_text()[:6000])


def measure(use: set[str], options: argparse.Namespace) -> None:
    """Train with what is used, and print speed and losses."""
    settings = dict(entry.split("=", 1) for entry in use if "=" in entry)
    sizes = [int(settings.pop("chunk"))] if "chunk" in settings else []
    for name, value in settings.items():
        if not hasattr(torch._inductor.config, name.split(".")[0]):
            raise SystemExit(f"torch._inductor.config has no {name}")
        setattr(torch._inductor.config, name, ast.literal_eval(value))
    form = form_of(use)
    if form is not None:
        use_groups(form)
    if use & {"join", "join-all"}:
        use_joined(kinds.GROUPS[:1] + (kinds.GROUPS[2:3] if "join-all" in use else ()))
    if "flex" in use:
        use_flex()
    use_head(sizes)
    torch._dynamo.reset()
    figures = run_ours(WORKS[options.work], options, started=time.time())
    line = {name: figures[name] for name in ("memory_gb", "compile_seconds", "graphs", "findings")}
    steps = figures["steps"][options.skip : options.steps - 2 if options.kernels else None]
    # The median: a host that is disturbed makes single steps longer.
    speed = statistics.median(tokens / seconds for tokens, seconds in steps)
    took = [round(1000 * seconds) for _, seconds in figures["steps"]]
    sys.stdout.write(f"WHOLE {options.work} {sorted(use)} {speed:,.0f} tokens/s {json.dumps(line)}\n")
    sys.stdout.write(f"  ms of each step {took}\n  losses {figures['losses']}\n")
    sys.stdout.write(f"  {figures['fast_path']} {figures['compile_failure'] or ''}\n")
    sys.stdout.flush()


def watch_step(index: int, top: int) -> None:
    """Profile one step, from its beginning to that of the next one, and write where its time goes."""
    from torch.profiler import ProfilerActivity, profile

    from lm_tuning.training.trainer import StepPlanTrainer

    plain = StepPlanTrainer.training_step
    running: list[Any] = []

    def step(self: Any, model: Any, inputs: Any, count: Any = None) -> Any:
        if inputs.step == index and torch.cuda.is_available():
            running.append(profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True))
            running[0].start()
        elif running:
            found = running.pop()
            torch.cuda.synchronize()
            found.stop()
            sys.stdout.write("  a step:\n")
            describe_events(found.events(), 1, top=top)
        return plain(self, model, inputs, count)

    StepPlanTrainer.training_step = step


if __name__ == "__main__":
    main()

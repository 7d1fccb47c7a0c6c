"""Time decoder layers made in other ways beside the product's own, forward and backward, in one process.

    python benchmarks/layer_kernels/layers.py --shapes 4b --methods lora [--only present group ...] [--deadline 280]

Every variant is a model of its own with the same weights, compiled by itself, and measured in turns with the present
path: milliseconds per layer of both, memory of an iteration, and the relative error of output and gradients against
float32, of both. A variant that fails says so and the next one follows.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(PROJECT / "benchmarks"), str(PROJECT / "src"), str(PROJECT)]

import throughput_works as throughput  # noqa: E402
import torch  # noqa: E402
import variants as kinds  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from variants import Form  # noqa: E402
from weight_copies import install_copies  # noqa: E402

from lm_tuning.batching import packed_attention  # noqa: E402
from lm_tuning.models.structure import backbone_of, inner_model  # noqa: E402
from lm_tuning.runtime.precision import autocast  # noqa: E402
from lm_tuning.training.kernels.compiled_layers import CompiledLayers, find_layers  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BEGAN = time.perf_counter()
# Graphs run as they are, to try variants where there is no compiler.
EAGER = "--eager" in sys.argv


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass
class Variant:
    """What differs from the present path.

    Attributes:
        form: of grouped products; ``None`` leaves the product's layers.
        groups: names of layers that are grouped.
        prepare: changes the model further.
        inductor: settings of the compiler.
        functorch: settings of what is kept for the backward pass.
        dynamic: one graph for all numbers of tokens.
        attention: ``varlen``, ``flex`` or the name of an implementation of flash attention.
        join_full: groups of trained weights that are one product.
        autocast: whether products are cast by autocast.
    """

    form: Form | None = None
    groups: Any = kinds.GROUPS
    prepare: Callable[[Any], object] | None = None
    inductor: dict[str, Any] = field(default_factory=dict)
    functorch: dict[str, Any] = field(default_factory=dict)
    dynamic: bool = True
    attention: str = "varlen"
    join_full: Any = None
    autocast: bool = True


Q, G = 3, 2  # members of a group: query, key and value; gate and up
ALONE = tuple((name,) for names in kinds.GROUPS for name in names)
LORA = {
    "product": Variant(Form(), groups=ALONE),
    "in-place": Variant(Form(in_place=True), groups=ALONE),
    "1pass": Variant(Form(one_pass=True, in_place=True)),
    "aug": Variant(Form(join_forward=(Q,), augment=(Q, G), in_place=True)),
    "aug-1pass": Variant(Form(join_forward=(Q,), augment=(Q, G), one_pass=True, in_place=True)),
    "aug-rows-1pass": Variant(
        Form(join_forward=(Q,), join_backward=(Q, G), augment=(Q, G), rows=True, one_pass=True, in_place=True)
    ),
    "jb-1pass": Variant(Form(join_forward=(Q,), join_backward=(Q, G), one_pass=True, in_place=True)),
    "fp8-row-1pass": Variant(
        Form(join_forward=(Q,), join_backward=(Q, G), fp8="row", one_pass=True, in_place=True)
    ),
    "fp8-tensor-1pass": Variant(
        Form(join_forward=(Q,), join_backward=(Q, G), fp8="tensor", one_pass=True, in_place=True)
    ),
    "static": Variant(dynamic=False),
    "coordinate": Variant(inductor={"coordinate_descent_tuning": True}),
    "no-autocast": Variant(autocast=False),
    "recompute": Variant(functorch={"aggressive_recomputation": True}),
    "loop-order": Variant(inductor={"loop_ordering_after_fusion": True, "benchmark_fusion": True}),
    "combo": Variant(inductor={"combo_kernels": True}),
    "multi-kernel": Variant(inductor={"triton.multi_kernel": 1}),
    "budget-0.7": Variant(functorch={"activation_memory_budget": 0.7}),
    "aggressive": Variant(inductor={"aggressive_fusion": True}),
    "fa3": Variant(attention="FA3"),
    "fa4": Variant(attention="FA4"),
    "liger": Variant(prepare=lambda model: (kinds.install_plain(model), kinds.install_liger(model))),
    "present-again": Variant(),
    # Slower on an H200, torch 2.11: kept to be tried again with other versions.
    "flex": Variant(attention="flex"),
    "flex-static": Variant(attention="flex", dynamic=False),
    "group-copied": Variant(Form(join_forward=(Q,), join_backward=(Q, G))),
    "autotune": Variant(inductor={"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}),
}  # fmt: skip
FULL = {
    "copies": Variant(prepare=lambda model: install_copies(model, adds=True)),
    "copies-returned": Variant(prepare=lambda model: install_copies(model, adds=False)),
    "present-again": Variant(),
    "join-qkv": Variant(join_full=(("q_proj", "k_proj", "v_proj"),)),
    "join-all": Variant(join_full=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))),
    "bf16-weights": Variant(prepare=lambda model: model.bfloat16()),
    "flex": Variant(attention="flex"),
    "join-all-flex": Variant(join_full=(("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")), attention="flex"),
    "static": Variant(dynamic=False),
    "coordinate": Variant(inductor={"coordinate_descent_tuning": True}),
    "recompute": Variant(functorch={"aggressive_recomputation": True}),
    "loop-order": Variant(inductor={"loop_ordering_after_fusion": True, "benchmark_fusion": True}),
}


class Case:
    """One model with its inputs."""

    def __init__(self, shape: str, method: str, options: argparse.Namespace, variant: Variant, *, exact: bool = False):
        """Build it, and change it as the variant says; ``exact`` computes in float32 without compiling."""
        self.variant, self.exact, self.method = variant, exact, method
        self.model = make_model(shape, method, options.layers)
        self.inputs = make_inputs(options.tokens)
        self.groups: list[Any] = []
        packed_attention.register()
        inner = inner_model(self.model)
        inner.set_attn_implementation(packed_attention.NAME)
        if exact:
            self.model.float()
        else:
            self._change(inner)
        torch.manual_seed(5)
        hidden = inner.config.hidden_size
        tokens = self.inputs["input_ids"].shape[1]
        self.gradient = torch.randn(1, tokens, hidden, device=DEVICE) / hidden**0.5
        self.layers = None
        if not exact:
            self.layers = CompiledLayers(
                find_layers(inner), inner.get_input_embeddings(), dynamic=variant.dynamic, backend=make_backend(variant)
            )
            self.layers.switch_on()

    def _change(self, inner: Any) -> None:
        variant = self.variant
        if variant.attention == "flex":
            from transformers import AttentionInterface

            AttentionInterface.register("bench_flex", kinds.flex)
            inner.set_attn_implementation("bench_flex")
            bounds = self.inputs["cu_seq_lens_q"]
            self.inputs["block_mask"] = kinds.document_mask(bounds, self.inputs["input_ids"].shape[1])
        if variant.form is not None:
            self.groups = kinds.install_groups(self.model, variant.form, variant.groups)
        elif variant.join_full is not None:
            self.groups = kinds.install_groups(self.model, None, variant.join_full)
        elif self.method == "lora" and variant.prepare is None:
            kinds.install_plain(self.model)
        if variant.prepare is not None:
            variant.prepare(self.model)

    def run(self) -> torch.Tensor:
        """Run forward and backward."""
        casting = autocast(DEVICE, "bfloat16") if not self.exact and self.variant.autocast else nullcontext()
        with casting:
            hidden = backbone_of(self.model)(**self.inputs).last_hidden_state
        hidden.backward(self.gradient.to(hidden.dtype))
        return hidden.detach()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients, those of small kinds under one name each."""
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}

    def clear(self) -> None:
        """Forget gradients."""
        self.model.zero_grad(set_to_none=True)

    def timed(self, turns: int, *, in_a_row: int = 1) -> list[float]:
        """Return milliseconds of some iterations; gradients of those in a row are added up."""
        found = []
        for _ in range(turns):
            self.clear()
            synchronize()
            began = time.perf_counter()
            for _ in range(in_a_row):
                self.run()
            synchronize()
            found.append(1000 * (time.perf_counter() - began) / in_a_row)
        return found


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def make_backend(variant: Variant) -> Any:
    """Return a compiler of its own for a variant, so that no other one's graphs are taken."""
    from torch._inductor.compile_fx import compile_fx

    if EAGER:
        return "aot_eager"

    def compile_variant(graph: Any, inputs: Any) -> Any:
        with torch._functorch.config.patch(variant.functorch) if variant.functorch else nullcontext():
            return compile_fx(graph, inputs, config_patches=variant.inductor or None)

    return compile_variant


def make_model(shape: str, method: str, layers: int) -> Any:
    """Return a random model with a few layers and a small vocabulary, the same each time."""
    from transformers import Qwen3ForCausalLM

    from lm_tuning.parameters.train import LoraParameters
    from lm_tuning.training.setup.adapters import add_lora

    config = throughput.make_config(shape)
    config.num_hidden_layers, config.vocab_size = layers, 512
    config.layer_types = config.layer_types[:layers]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if method == "lora" else torch.float32
    torch.set_default_dtype(dtype)
    with torch.device(DEVICE):
        model: Any = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.config.use_cache = False
    if method == "lora":
        model = add_lora(model, LoraParameters(r=16, alpha=32, dropout=0.0), task="causal_lm").to(DEVICE)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                # At its start it is zero, and half of the gradients with it.
                torch.nn.init.normal_(parameter, std=0.01)
    return model.train()


def make_inputs(tokens: int) -> dict[str, Any]:
    """Return rows of a mean length of 211 tokens, packed as the product packs them."""
    lengths = throughput.draw_lengths("report", 4096).tolist()
    fitting = list(itertools.takewhile(lambda total: total <= tokens, itertools.accumulate(lengths)))
    bounds = [0, *fitting] + ([tokens] if fitting[-1] < tokens else [])
    generator = torch.Generator().manual_seed(3)
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    return {
        "input_ids": torch.randint(8, 512, (1, tokens), generator=generator).to(DEVICE),
        "position_ids": torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(bounds)])[None].to(DEVICE),
        "cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32, device=DEVICE),
        "max_length_q": 1 << max(longest - 1, 1).bit_length(),
        "use_cache": False,
    }


# ------------------------------------------------------------------------------------------------------------ profiles


# What the profiler shows among kernels: ranges of compiled graphs, and those that the training opens.
NOT_KERNELS = (
    "Memset", "##", "Torch-Compiled", "CompiledFunction", "training step", "forward", "backward", "optimizer",
    "Optimizer", "lm_tuning:",
)  # fmt: skip


def kind_of(kernel: str) -> str:
    """Return what a kernel does, by its name."""
    name = kernel.lower()
    for kind, parts in (
        ("attention", ("flash", "fmha", "flex", "attention")),
        ("adapter", ("_adapter_kernel",)),
        ("triton", ("triton_",)),
        ("gemm", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk")),
    ):
        if any(part in name for part in parts):
            return kind
    return "other"


def profile(case: Case, layers: int, *, top: int) -> None:
    """Write where the time of an iteration goes, in milliseconds per layer."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    case.clear()
    synchronize()
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as found:
        case.run()
        synchronize()
    describe_events(found.events(), layers, top=top)


def describe_events(events: Any, layers: int, *, top: int) -> None:
    """Write where the time of profiled events goes, in milliseconds per layer."""
    device = [
        e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith(NOT_KERNELS)
    ]
    kinds_ms: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in device:
        took = event.time_range.elapsed_us() / 1000
        kinds_ms[kind_of(event.name)] += took
        kernels[event.name].append(took)
    spans = sorted((e.time_range.start, e.time_range.end) for e in device)
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(end - max(start, until), 0)
        until = max(until, end)
    kinds_ms["gaps"] = (until - spans[0][0] - busy) / 1000
    small: dict[str, float] = defaultdict(float)
    for event in events:
        if event.name in {"aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_mm"} and event.kernels:
            shapes = [tuple(s) for s in event.input_shapes if s and len(s) == 2][-2:]
            sides = {side for shape in shapes for side in shape}
            took = sum(kernel.duration for kernel in event.kernels) / 1000
            small["thin" if min(sides) <= 64 else "large"] += took
            small[f"{event.name[6:]}{list(shapes)}"] += took
    text = ", ".join(f"{k} {v / layers:.2f}" for k, v in sorted(kinds_ms.items(), key=lambda i: -i[1]))
    large, thin = (small.pop(name, 0) / layers for name in ("large", "thin"))
    say(f"    by kind: {text}; products large {large:.2f}, thin {thin:.2f}")
    if top:
        for name, times in sorted(kernels.items(), key=lambda i: -sum(i[1]))[:top]:
            say(f"    {sum(times) / layers:.3f} ms in {len(times) / layers:.1f} of {name[:110]}")
        for name, took in sorted(small.items(), key=lambda i: -i[1])[:top]:
            say(f"    {took / layers:.3f} ms {name}")


# --------------------------------------------------------------------------------------------------------- comparisons


def errors(case: Case, exact: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> tuple[float, dict[str, float]]:
    """Return the relative error of the output and of each kind of gradients against float32."""
    output, gradients = exact
    found = case.run().float()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, gradient in case.gradients().items():
        kind = next((part for part in ("lora_A", "lora_B", "norm", "proj") if part in name), "other")
        sums[kind][0] += float((gradient.float().cpu() - gradients[name]).square().sum())
        sums[kind][1] += float(gradients[name].square().sum())
    off = float((found.cpu() - output).norm() / output.norm())
    return off, {kind: (a / b) ** 0.5 for kind, (a, b) in sums.items() if b}


def peak(case: Case) -> float:
    """Return the memory of an iteration over what is kept, in GB."""
    if DEVICE != "cuda":
        return 0.0
    case.clear()
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.run()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def describe(off: float, kinds_off: dict[str, float]) -> str:
    """Return errors in a few characters."""
    return f"out {off:.1e} " + " ".join(f"{kind} {value:.1e}" for kind, value in sorted(kinds_off.items()))


def compare(shape: str, method: str, options: argparse.Namespace) -> None:
    """Measure all variants of a shape and a method."""
    exact_case = Case(shape, method, options, Variant(), exact=True)
    output = exact_case.run().float().cpu()
    exact = (output, {name: gradient.float().cpu() for name, gradient in exact_case.gradients().items()})
    del exact_case
    release()
    began = time.perf_counter()
    present = Case(shape, method, options, Variant())
    wanted = describe(*errors(present, exact))
    present.timed(3)
    alone = statistics.median(present.timed(options.turns, in_a_row=options.micro_batches)) / options.layers
    say(f"{shape} {method} {options.tokens} tokens, {options.layers} layers: present {alone:.3f} ms per layer, "
        f"{peak(present):.2f} GB, compiled in {time.perf_counter() - began:.0f} s; {wanted}")  # fmt: skip
    if DEVICE == "cuda":
        profile(present, options.layers, top=options.top)
    names = LORA if method == "lora" else FULL
    for name, variant in names.items():
        if options.only and name not in options.only:
            continue
        if time.perf_counter() - BEGAN > options.deadline:
            say(f"  {name}: left out, the deadline has passed")
            continue
        try:
            measure(name, variant, present, exact, (shape, method, options))
        # Whatever a compiler or a kernel raises, the next variant is tried.
        except Exception as error:
            say(f"  {name}: failed, {type(error).__name__}: {' '.join(str(error).split())[:900]}")
        release()


def measure(name: str, variant: Variant, present: Case, exact: Any, what: Any) -> None:
    """Measure a variant in turns with the present path."""
    shape, method, options = what
    restore: Callable[[], object] | None = None
    if variant.attention in {"FA3", "FA4"}:
        from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

        activate_flash_attention_impl(variant.attention)
        restore = restore_flash_attention_impl
    try:
        counters.clear()
        began = time.perf_counter()
        case = Case(shape, method, options, variant)
        found = describe(*errors(case, exact))
        case.timed(2)
        took, graphs = time.perf_counter() - began, counters["stats"]["unique_graphs"]
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(options.rounds):
            theirs += present.timed(options.turns, in_a_row=options.micro_batches)
            ours += case.timed(options.turns, in_a_row=options.micro_batches)
        before, after = (statistics.median(times) / options.layers for times in (theirs, ours))
        say(f"  {name}: {before:.3f} -> {after:.3f} ms per layer ({before - after:+.3f}, {before / after:.3f} x), "
            f"{peak(case):.2f} GB, {graphs} graphs, {took:.0f} s; {found}")  # fmt: skip
        if DEVICE == "cuda" and (options.profile == ["all"] or name in options.profile):
            profile(case, options.layers, top=0 if options.profile == ["all"] else options.top)
    finally:
        if restore is not None:
            restore()


def release() -> None:
    """Give memory back."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["4b"], choices=throughput.SHAPES)
    parser.add_argument("--methods", nargs="+", default=["lora"], choices=("lora", "full"))
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4, help="iterations in a row")
    parser.add_argument("--rounds", type=int, default=4, help="how often both are measured in turn")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step: their gradients are added up")
    parser.add_argument("--top", type=int, default=14, help="kernels that are listed")
    parser.add_argument("--only", nargs="*", help="names of variants")
    parser.add_argument("--profile", nargs="*", default=["all"], help="variants that are profiled, or all")
    parser.add_argument("--deadline", type=float, default=270, help="seconds after which no variant is begun")
    parser.add_argument("--eager", action="store_true", help="trace the layers and compile nothing")
    options = parser.parse_args()
    # Each variant adds graphs of the same function.
    for name in ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 1024)
    torch.set_float32_matmul_precision("highest")
    for shape, method in zip(options.shapes, options.methods * len(options.shapes), strict=False):
        compare(shape, method, options)
        release()


if __name__ == "__main__":
    main()

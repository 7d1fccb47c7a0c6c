"""Replay small steps from CUDA graphs: forward and backward pass of a micro-batch at one launch.

A step of a few hundred tokens has thousands of kernels of a few microseconds each, and the host takes longer to launch
them than the device to run them. A CUDA graph has recorded the launches, and makes them all by itself.

A step is replayed where it is one micro-batch that a recorded shape covers; every other step runs as it always did. The
first recording is a try: what it computes is compared with the step that was just made without it, and so is its time.
Whatever speaks against it is said once, and training goes on without.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lm_tuning.batching.batch import MicroBatch, StepBatch
from lm_tuning.batching.tasks.base import TrainingTask
from lm_tuning.training.kernels.recording import Outputs, Recorder, Recording
from lm_tuning.training.kernels.static_batch import StaticBatch, StaticShape, find_covering, static_shape, why_not
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

MIN_STEPS = 20
"""Steps that must be left: a recording takes as long as about four steps without it."""
SPEED_UP = 1.3
"""Times that a replay must be faster than the passes without it."""
PARITY = 1e-3
"""Relative difference of a replay's loss from that of the same tensors without a graph."""
FILLED_PARITY = 5e-3
"""The same from the loss of the rows before they were filled up: in 16 bits, other sizes round otherwise."""
GRADIENT_PARITY = 5e-2
"""Norm of the difference of a replay's gradient, over the gradient's norm."""
MOST_GRAPHS = 6

# Where arithmetic alone is expected to take this share of a step, launches are not what it waits for.
_COMPUTE_BOUND = 0.5
# The try runs the same pass twice from this seed, so that dropout draws the same; the run's random state is kept.
_SEED = 1

Pass = Callable[[MicroBatch, torch.Tensor], torch.Tensor]
"""Run forward and backward; takes a micro-batch and what its loss is divided by, returns the loss."""


@dataclass
class _Graph:
    static: StaticBatch
    recording: Recording
    num_replays: int = 0


@dataclass(frozen=True)
class Trial:
    """What the first recording of a run showed.

    Attributes:
        eager_seconds: forward and backward pass without a graph.
        replay_seconds: the same, replayed.
        loss: of the step without a graph.
        filled_loss: of its rows filled up, without a graph.
        replayed_loss: of its rows filled up, replayed.
        gradient_difference: norm of the replay's gradient minus that without a graph, over the latter's norm; both
            filled up.
        is_random: whether the pass draws random numbers, so that only like tensors can be compared.
    """

    eager_seconds: float
    replay_seconds: float
    loss: float
    filled_loss: float
    replayed_loss: float
    gradient_difference: float
    is_random: bool = False

    @property
    def speed_up(self) -> float:
        """Times that the replay is faster."""
        return self.eager_seconds / max(self.replay_seconds, 1e-9)

    def why_not(self, *, even_if_slow: bool) -> str | None:
        """Return what speaks against replaying steps; ``None`` for nothing.

        Args:
            even_if_slow: whether the user wants graphs whatever they gain.
        """
        # Not <=, but not >: a comparison with NaN must not pass.
        if not abs(self.replayed_loss - self.filled_loss) <= PARITY * abs(self.filled_loss):
            return f"a replayed step had a loss of {self.replayed_loss:.6g} instead of {self.filled_loss:.6g}"
        if not self.gradient_difference <= GRADIENT_PARITY:
            return f"the gradient of a replayed step was off by {self.gradient_difference:.1%}"
        if not self.is_random and not abs(self.filled_loss - self.loss) <= FILLED_PARITY * abs(self.loss):
            return f"filled up, a step had a loss of {self.filled_loss:.6g} instead of {self.loss:.6g}"
        if not even_if_slow and self.speed_up < SPEED_UP:
            return f"{self.describe()}, which gains too little"
        return None

    def describe(self) -> str:
        """Write both times."""
        return (
            f"forward and backward pass take {1000 * self.replay_seconds:.1f} ms replayed and "
            f"{1000 * self.eager_seconds:.1f} ms otherwise"
        )


@dataclass
class StepGraphs:
    """Replays the steps of a training, and records what is replayed.

    Attributes:
        model: that is trained, for its parameters.
        task: lends its loss a form that can be recorded.
        recorder: makes the recordings.
        device: where the model is.
        total_steps: of the run.
        always: whether recordings are kept whatever they gain.
        flops: floating-point operations per second that training reaches where it does not wait for launches.
        tell: receives what is decided, in words.
    """

    model: torch.nn.Module
    task: TrainingTask
    recorder: Recorder
    device: torch.device | str
    total_steps: int
    always: bool = False
    flops: float = math.inf
    tell: Callable[[str], object] = lambda said: None
    _graphs: dict[StaticShape, _Graph] = field(default_factory=dict)
    _seen: Counter[StaticShape] = field(default_factory=Counter)
    _parameters: list[torch.nn.Parameter] = field(default_factory=list)
    _is_off: bool = False
    _records_more: bool = True
    _verdict: str = ""
    _why_none: str = "no step was one micro-batch that could be recorded"
    _began: float = 0.0
    _random: torch.Tensor | None = None
    _host_random: torch.Tensor | None = None
    _num_steps: int = 0

    def find(self, inputs: StepBatch) -> StaticShape | None:
        """Return the recorded shape that covers a step; ``None`` where it must run without a graph.

        Args:
            inputs: the step, on the host.
        """
        self._num_steps += 1
        return find_covering(self._graphs, inputs.micro_batches[0]) if self._graphs and _is_one(inputs) else None

    def replay(self, shape: StaticShape, inputs: StepBatch) -> torch.Tensor:
        """Replay a step.

        Args:
            shape: that :meth:`find` returned for it.
            inputs: the step, on the host.

        Returns:
            Its loss, a scalar on the device. The parameters have their gradients.
        """
        [batch] = inputs.micro_batches
        graph = self._graphs[shape]
        graph.static.fill(batch, inputs.num_supervised)
        graph.recording.replay()
        graph.num_replays += 1
        # The Trainer takes gradients away after each step; a replay writes where they were.
        self._put(graph.recording.outputs[1:])
        return _loss_of(graph.recording.outputs).clone()

    def begin_trial(self, inputs: StepBatch) -> bool:
        """Return whether the step about to run without a graph should be recorded afterwards; it is timed then.

        Args:
            inputs: the step, on the host.
        """
        steps_left = self.total_steps - inputs.step
        if self._is_off or not self._records_more or len(self._graphs) >= MOST_GRAPHS or not _is_one(inputs):
            return False
        if steps_left < MIN_STEPS:
            self._why_none = f"fewer than {MIN_STEPS} steps were left"
            return False
        shape = static_shape(inputs.micro_batches[0])
        self._seen[shape] += 1
        # The first try decides for all; a further shape must have come up before to be worth its recording.
        if self._graphs and self._seen[shape] < 2:
            return False
        self._random, self._host_random = self.recorder.random_state(), torch.get_rng_state()
        self.recorder.synchronize()
        self._began = time.perf_counter()
        return True

    def record(self, inputs: StepBatch, loss: torch.Tensor, run: Pass) -> None:
        """Record the shape of a step that was run just now; its gradients, and the run's random state, are kept.

        Args:
            inputs: the step, for which :meth:`begin_trial` said yes.
            loss: of the step.
            run: makes its passes.
        """
        self.recorder.synchronize()
        eager_seconds = time.perf_counter() - self._began
        if not math.isfinite(float(loss)):
            return  # nothing to compare with; the next step will do
        assert self._random is not None
        assert self._host_random is not None
        is_on_gpu = torch.device(self.device).type == "cuda"
        # It decides on the host what is launched, which a recording would decide once and for all.
        if is_on_gpu and not torch.equal(self._host_random, torch.get_rng_state()):
            self.turn_off("no, since the model draws random numbers on the host, such as which layers it leaves out")
            return
        is_first = not self._graphs
        unfit = self._why_not_tried(inputs.micro_batches[0], eager_seconds) if is_first and not self.always else None
        if unfit is not None:
            self.turn_off(f"no, since {unfit}")
            return
        # Each recording keeps its gradients, which in full training are as large as the model.
        lack = None if is_first else self.recorder.describe_lack_of_memory()
        if lack is not None:
            self._record_no_more(lack)
            return
        on_gpu = [torch.cuda.current_device()] if is_on_gpu else []
        is_random = not torch.equal(self._random, self.recorder.random_state())
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        kept = [parameter.grad for parameter in self._parameters]
        try:
            with torch.random.fork_rng(devices=on_gpu):
                graph, trial = self._try(
                    inputs, run, eager_seconds=eager_seconds, loss=float(loss), is_random=is_random
                )
        # Whatever cannot be recorded, for lack of memory too: a step without a graph is only slower.
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            reason = f"recording a step failed ({type(error).__name__}: {lines[0]})"
            if is_first:
                self.turn_off(f"no, since {reason}")
            else:
                self._record_no_more(reason)
        else:
            against = trial.why_not(even_if_slow=self.always or not is_first)
            if against is not None:
                self.turn_off(f"{'no' if is_first else 'no more'}, since {against}")
            else:
                self._graphs[graph.static.shape] = graph
                if is_first:
                    self._verdict = f"yes: {trial.describe()}"
                    self._say(self._verdict)
        finally:
            self._put(kept)

    def _record_no_more(self, reason: str) -> None:
        """Keep the recordings that there are, and make no more."""
        self._records_more = False
        self._verdict += f"; no further shape, since {reason}"
        self._say(self._verdict)

    def turn_off(self, reason: str) -> bool:
        """Drop all recordings and make no more, for a reason that is told; return whether there were any."""
        had_any = bool(self._graphs)
        self._is_off = True
        self._graphs.clear()
        for parameter in self._parameters:
            parameter.grad = None  # a graph's memory is given back once nothing points to it
        self.recorder.clear()
        self._verdict = reason
        self._say(reason)
        return had_any

    def close(self) -> None:
        """Tell how many steps were replayed, and drop the recordings."""
        if self._graphs:
            replayed = sum(graph.num_replays for graph in self._graphs.values())
            self.tell(
                f"{self._verdict}; {replayed} of {count_of(self._num_steps, 'step')} replayed, "
                f"{count_of(len(self._graphs), 'recorded shape')}"
            )
        elif not self._is_off:
            self.tell(f"no, since {self._why_none}")
        self._is_off = True
        self._graphs.clear()
        self.recorder.clear()

    def _say(self, text: str) -> None:
        logger.info("CUDA graphs: %s.", text)
        self.tell(text)

    def _why_not_tried(self, batch: MicroBatch, eager_seconds: float) -> str | None:
        """Describe why a step is not worth a try."""
        # Forward and backward take 4 operations per parameter and position with adapters and 6 where all is trained.
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        seconds = 5 * parameters * batch.num_positions / self.flops
        if seconds > _COMPUTE_BOUND * eager_seconds:
            return (
                f"a step's passes take {1000 * eager_seconds:.0f} ms, and their products about {1000 * seconds:.0f} ms "
                "of it: it does not wait for launches"
            )
        return self.recorder.describe_lack_of_memory()

    def _try(
        self, inputs: StepBatch, run: Pass, *, eager_seconds: float, loss: float, is_random: bool
    ) -> tuple[_Graph, Trial]:
        """Record a step's shape, replay it, and compare both with the passes without a graph."""
        [batch] = inputs.micro_batches
        static = StaticBatch(static_shape(batch), batch, device=self.device, pad_id=self.task.pad_id)
        static.fill(batch, inputs.num_supervised)

        def run_static() -> Outputs:
            self._put([None] * len(self._parameters))
            share = run(static.batch, static.total).detach()
            # Where nothing was before, the backward pass leaves its own tensors: those that replays write to.
            outputs: Outputs = [share, *(parameter.grad for parameter in self._parameters)]
            self._put([None] * len(self._parameters))
            return outputs

        head_loss = self.task.head_loss
        if head_loss is not None:
            self.task.head_loss = head_loss.for_recording()
        try:
            torch.manual_seed(_SEED)
            recording = self.recorder.record(run_static)
        finally:
            self.task.head_loss = head_loss
        torch.manual_seed(_SEED)
        recording.replay()
        reference, recording.reference = recording.reference, None
        assert reference is not None
        filled_loss, replayed_loss = (float(_loss_of(outputs)) for outputs in (reference, recording.outputs))
        difference = _compare(recording.outputs[1:], reference[1:])
        del reference
        self.recorder.synchronize()
        began = time.perf_counter()
        recording.replay()
        self.recorder.synchronize()
        replay_seconds = time.perf_counter() - began
        trial = Trial(eager_seconds, replay_seconds, loss, filled_loss, replayed_loss, difference, is_random)
        return _Graph(static, recording), trial

    def _put(self, gradients: Outputs) -> None:
        """Give every trained parameter its gradient."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


def _is_one(inputs: StepBatch) -> bool:
    """Return whether a step is one micro-batch that can be filled up."""
    return len(inputs.micro_batches) == 1 and why_not(inputs.micro_batches[0]) is None


def _loss_of(outputs: Outputs) -> torch.Tensor:
    loss = outputs[0]
    assert loss is not None
    return loss


def _compare(found: Outputs, wanted: Outputs) -> float:
    """Return the norm of the difference of two gradients over that of the second; infinite where one lacks a part."""
    if [part is None for part in found] != [part is None for part in wanted]:
        return math.inf
    pairs = [(a.float(), b.float()) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    if not pairs:
        return 0.0
    apart = torch.stack(torch._foreach_norm([a - b for a, b in pairs])).norm()
    norm = torch.stack(torch._foreach_norm([b for _, b in pairs])).norm()
    return float(apart / norm.clamp(min=torch.finfo(torch.float32).tiny))

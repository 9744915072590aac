"""The device programs of a run with the shapes of the largest arguments that they can meet: nothing is computed.

The one place that knows what each program is called with. The memory table at a run's start and ``oarjax plan`` lower
and compile ``run.steps``, the programs that training calls. The run may have been made from a model and a mesh alone,
whose devices may be those of a topology; data, tokenizer and weights are not needed.

    for program in ProgramShapes(run).programs():
        compiled = program.lower().compile()

``resident`` counts what lies on each device while a phase runs, whether its program takes it or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from oarjax.config.learning import RECORDED
from oarjax.credit.probe import ProbeMode
from oarjax.credit.record import OF_MARKS, OF_TEACHER
from oarjax.data.streams import bucketed
from oarjax.models.lora import all_params
from oarjax.models.moe import index_dtype
from oarjax.models.sharding import batch_spec
from oarjax.models.weights import abstract_params
from oarjax.rollout.segments import RolloutProgram
from oarjax.rollout.source import widths_of_rows
from oarjax.run.adapters import trained_shapes
from oarjax.run.policy import stored_dtype_of
from oarjax.run.run import Run
from oarjax.run.teacher import teacher_shapes
from oarjax.step.fused import FusedSums
from oarjax.step.gradients import Sums
from oarjax.step.minibatches import Bucket, completion_buckets, prompt_buckets, widest_prompt
from oarjax.types import (
    AnswerSpan,
    GradedRows,
    Hints,
    Privileged,
    PromptBatch,
    Rollout,
    SampledRows,
    TrainBatch,
    TrainState,
)

Phase = Literal["reshard", "sample", "evaluate", "score", "credit", "update", "fused", "apply"]
Part = Literal["params", "optimizer", "frozen", "gradients", "reference", "teacher", "rollout"]
"""Arrays that outlive a phase."""


class PhaseProgram(NamedTuple):
    """A phase's jitted program and its arguments, as shapes with their shardings."""

    phase: Phase
    jitted: Any
    args: tuple[Any, ...]
    static: Mapping[str, Any]  # keyword arguments
    takes: frozenset[Part]  # of what is resident, the parts that are among the arguments
    name: str = ""  # of one of several programs of a phase
    held: Any = ()  # shapes of this phase's arrays that are not arguments
    steps: float = 1.0  # decode steps that it stands for where every completion is as long as it may be; 0 if none

    def lower(self) -> Any:
        """Lower the program for these shapes; ``.compile()`` asks the compiler of the mesh's devices."""
        return self.jitted.lower(*self.args, **self.static)


class ProgramShapes:
    """Describe the programs of a run by the shapes of the largest arguments that they can meet."""

    def __init__(self, run: Run) -> None:
        self.cfg, self.model, self.mesh, self.steps = run.cfg, run.model, run.mesh, run.steps
        self.layout, self.rollout_layout, self.optimizer = run.layout, run.rollout_layout, run.optimizer
        self._apart = run.apart
        self._ending_room, self._wants, self._wants_outcome = run.ending_room, run.credit.signals, run.wants_outcome
        self._reads_reference = run.credit.needs_reference(kl=run.cfg.loss.scores_reference)
        self._teacher = teacher_shapes(run.cfg.loss.teacher, run.cfg.policy, run.mesh)
        self._compares = self._reads_reference and not run.cfg.loss.reference_every and self._teacher is None
        self._keeps_start = self._compares or run.cfg.eval.kl == "on"
        step, widest = run.prompt_step, widest_prompt(run.cfg.data, run.cfg.rollout)
        self._train_width = self._eval_width = widest  # without data, of the longest prompt that the config allows
        self._teacher_width = widest + run.cfg.rollout.prompt_bucket  # without data, a bucket wider than the policy's
        if run.has_data:
            self._train_width = bucketed(run.train.prompts, step)
            self._eval_width = self._train_width if run.held_out is None else bucketed(run.held_out.prompts, step)
            if self._wants & OF_TEACHER and run.hints is not None:
                self._teacher_width = run.hints.width

    def programs(self) -> tuple[PhaseProgram, ...]:
        """Return the programs of an iteration in its order; evaluate only with data.eval."""
        return (
            self.reshard_program(),
            *self.sampling_programs("sample"),
            *(() if self.cfg.data.eval is None else self.sampling_programs("evaluate")),
            *self.learning_programs(),
            self.apply_program(),
        )

    def learning_programs(self) -> tuple[PhaseProgram, ...]:
        """Return the programs of score, credit and gradients: three, or the one that does it all in one pass."""
        if self.steps.fused_add is None:
            return self.score_program(), self.credit_program(), self.update_program()
        return (self.fused_program(),)

    def fused_program(self) -> PhaseProgram:
        """Describe the program that scores the longest microbatches and adds their gradients in one pass.

        Raises:
            ValueError: the run scores and updates in two passes.
        """
        if self.steps.fused_add is None or self.steps.fused_zeros is None:
            raise ValueError(
                "fused_program: update.fused, credit or grades of this run need two passes, score and update"
            )
        state = self.abstract_state()
        rows = self._sampled()
        rollout = rows.rollout
        graded = self._graded(rollout)
        zeros, layout = self.steps.fused_zeros.eval_shape(state, rows, graded), self.layout
        sums = FusedSums(
            Sums(_with(zeros.sums.grads, layout.state.params), *_with(tuple(zeros.sums[1:]), layout.replicated)),
            *_with((zeros.importance, zeros.weights), rollout.completion.sharding),
            metrics=_with(zeros.metrics, layout.replicated),
        )
        args = (sums, state, rows, graded, self._key(), self._key(), _count(), _count())
        static = {"probe": self.cfg.credit.probe.mode, "bucket": self._bucket()}
        takes: frozenset[Part] = frozenset({"gradients", "params", "optimizer", "frozen"})
        return PhaseProgram("fused", self.steps.fused_add, args, static, takes)

    def program_counts(self) -> dict[str, int]:
        """Count the programs that a run may compile of each kind at most; those of an evaluation are not among them.

        A rollout has a number of rows and of cache slots, and its prompts a width; a score or an update has a bucket.
        """
        cfg, sampler = self.cfg, self._sampler("sample")
        widest = self._train_width
        _, prompts, _ = self._sampling_arguments("sample")
        widths = widest // cfg.rollout.prompt_bucket
        lengths = completion_buckets(cfg.rollout.completion_bucket, cfg.rollout.max_new)
        by_length = len(prompt_buckets(cfg.rollout.prompt_bucket, widest)) * len(lengths)
        decode = len(sampler.plan(prompts).sizes())
        learning = ("score", "update") if self.steps.fused_add is None else ("fused",)
        return {"prefill": widths, "decode": widths * decode, **dict.fromkeys(learning, by_length), "apply": 1}

    def reshard_program(self) -> PhaseProgram:
        """Describe the program that lays out trained params for sampling."""
        return PhaseProgram(
            "reshard", self.steps.rollout_params, (self._params(),), {}, frozenset({"params", "frozen"})
        )

    def sampling_programs(
        self, phase: Literal["sample", "evaluate"], *, counted: bool = False
    ) -> tuple[PhaseProgram, ...]:
        """Describe the largest programs that sample rollouts, or eval.samples completions of held-out prompts.

        With ``counted`` those of fewer slots are among them that a plan counts the steps of.
        """
        programs = self.every_sampling_program(phase)
        return tuple(program for program, largest in programs if largest or (counted and program.steps))

    def every_sampling_program(self, phase: Literal["sample", "evaluate"]) -> tuple[tuple[PhaseProgram, bool], ...]:
        """Describe all of them in the order of a rollout, each with whether it is among the largest."""
        params, prompts, key = self._sampling_arguments(phase)
        rollout_programs = self._sampler(phase).programs(params, prompts, key)
        programs = [_of_phase(phase, program, params) for program in rollout_programs]
        turns, max_new = self.cfg.rollout.environment, self.cfg.rollout.max_new
        sampler = self.steps.sample_on if phase == "sample" else self.steps.evaluate_on
        if turns is None or turns.turns == 1 or sampler is None:
            return tuple(programs)
        repeats, (count, width) = times_again(turns.turns, max_new), prompts.tokens.shape
        group = self.cfg.rollout.group_size if phase == "sample" else self.cfg.eval.samples
        key = jax.eval_shape(lambda: jax.random.key(0))  # of no mesh, see ``SamplerSource.go_on``
        for beyond, times in repeats.items():
            rows = replace(self._prompts(count * group, width + beyond), written=self._row_numbers(count * group))
            for program in sampler.programs(params, rows, key):
                phase_program, largest = _of_phase(phase, program, params)
                name, steps = f"next turn after {beyond}: {program.name}", times if program.name == "prefill" else 0.0
                programs.append((phase_program._replace(name=name, steps=steps), largest and beyond == max_new))
        return tuple(programs)

    def _sampler(self, phase: Literal["sample", "evaluate"]) -> Any:
        if phase == "evaluate":
            return self.steps.evaluate
        return self.steps.sample if self._apart is None else self._apart.sample

    def _sampling_arguments(self, phase: Literal["sample", "evaluate"]) -> tuple[Any, ...]:
        if phase == "sample":
            params, prompts = self.rollout_shapes(), self._prompts(self.cfg.rollout.prompts, self._train_width)
            if self._apart is None:
                return params, prompts, self._key()
            layout = self._apart.layout
            return _with(params, layout.params), _with(prompts, layout.rows), _with(self._key(), self._apart.everywhere)
        key = jax.eval_shape(lambda: jax.random.key(0))  # of no mesh: evaluations make their own
        return self.rollout_shapes(), self._prompts(self.cfg.eval.batch, self._eval_width), key

    def score_program(self, *, probe: ProbeMode | None = None) -> PhaseProgram:
        """Describe the program of one minibatch's old and reference log-probs and importance."""
        cfg = self.cfg
        state = self.abstract_state()
        takes: set[Part] = {"params", "frozen"}
        reference = None
        if self._teacher is not None:
            reference = self._teacher
            takes |= {"teacher"}
        elif self._reads_reference and (state.frozen is None or cfg.loss.reference_every):
            reference = all_params(state)
            takes |= {"reference"} if not cfg.loss.reference_every else set()
        args = (all_params(state), reference, self._sampled(), self._key(), _count(), _count())
        static = {"probe": probe or cfg.credit.probe.mode, "bucket": self._bucket()}
        return PhaseProgram("score", self.steps.score, args, static, frozenset(takes))

    def credit_program(self) -> PhaseProgram:
        """Describe the program of the weights and advantages of one minibatch's tokens."""
        scores = self._scores()
        rows = self._sampled()
        graded = self._graded(rows.rollout)
        args = (scores, rows, graded, self._key(), _count())
        return PhaseProgram("credit", self.steps.credit, args, {}, frozenset())

    def update_program(self) -> PhaseProgram:
        """Return the program that adds the gradients of the longest microbatches of a minibatch."""
        state, batch = self.abstract_state(), self._train_batch()
        args = (self._sums(state, batch), state, batch, _count(), _count())
        takes: frozenset[Part] = frozenset({"gradients", "params", "optimizer", "frozen"})
        return PhaseProgram("update", self.steps.accumulate, args, {"bucket": self._bucket()}, takes)

    def apply_program(self) -> PhaseProgram:
        """Return the program of one optimizer update from summed gradients."""
        state = self.abstract_state()
        args = (state, self._sums(state, self._train_batch()), jax.ShapeDtypeStruct((), jnp.float32))
        takes: frozenset[Part] = frozenset({"gradients", "params", "optimizer", "frozen"})
        return PhaseProgram("apply", self.steps.apply, args, {}, takes)

    def abstract_state(self) -> TrainState:
        """Return the state as shapes with shardings."""
        cfg, model = self.cfg, self.model
        plain = abstract_params(model, dtype=stored_dtype_of(cfg.policy, cfg.lora, self.mesh))
        state = jax.eval_shape(
            lambda p, f: TrainState(jnp.zeros((), jnp.int32), p, self.optimizer.init(p), jax.random.key(0), f),
            trained_shapes(cfg.lora, model),
            plain if cfg.lora.rank else None,
        )
        return _with(state, self.layout.state)

    def rollout_shapes(self) -> Any:
        """Return the params in the rollout layout, as shapes with shardings."""
        shapes = self.steps.rollout_params.eval_shape(self._params())  # pyright: ignore[reportFunctionMemberAccess]
        return _with(shapes, self.rollout_layout.params)

    def resident(self, phase: Phase) -> dict[Part, int]:
        """Count the bytes per device that each part holds while a phase runs; rows of a batch are left out."""
        if phase == "sample" and self._apart is not None:
            return {"rollout": bytes_per_device(self._sampling_arguments(phase)[0])}
        state, loss = self.abstract_state(), self.cfg.loss  # the optimizer's state holds a reference that moves
        parts: dict[Part, Any] = {"params": state.params, "optimizer": state.opt_state}
        if state.frozen is not None:
            parts["frozen"] = state.frozen  # the reference too
        elif self._keeps_start and (loss.reference == "device" or (self._compares and phase == "score")):
            parts["reference"] = state.params
        if self._teacher is not None and (loss.reference == "device" or phase == "score"):
            parts["teacher"] = self._teacher
        if phase in ("sample", "evaluate"):
            parts["rollout"] = self.rollout_shapes()
        if phase in ("update", "fused", "apply"):
            parts["gradients"] = self._sums(state, self._train_batch()).grads
        return {name: bytes_per_device(tree) for name, tree in parts.items()}

    def beside(self, program: PhaseProgram, *, read: int | None) -> int:
        """Count the bytes per device that outlive a program's phase and are not its arguments.

        Args:
            read: the compiler's bytes of its arguments: JAX leaves those out that it does not read, and they lie there
                all the same. None where it was not compiled.
        """
        other_bytes = sum(size for part, size in self.resident(program.phase).items() if part not in program.takes)
        other_bytes += bytes_per_device(program.held)
        return other_bytes + (0 if read is None else max(bytes_per_device(program.args) - read, 0))

    # Arguments ------------------------------------------------------------------------------------------------------

    def _params(self) -> Any:
        """Return all params that the policy reads, adapters included."""
        return all_params(self.abstract_state())

    def _key(self) -> Any:
        return _with(jax.eval_shape(lambda: jax.random.key(0)), self.layout.replicated)

    def _row_numbers(self, count: int) -> Any:
        return _with(jax.ShapeDtypeStruct((count,), jnp.int32), self.rollout_layout.rows)

    def _prompts(self, count: int, width: int) -> PromptBatch:
        shape = (count, width)
        shapes: Any = PromptBatch  # of shapes
        batch = shapes(
            tokens=jax.ShapeDtypeStruct(shape, jnp.int32),
            valid=jax.ShapeDtypeStruct(shape, jnp.bool_),
            problem=jax.ShapeDtypeStruct((count,), jnp.int32),
        )
        return _with(batch, self.rollout_layout.rows)

    def _microbatches(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Describe [M, b, *shape] of one minibatch."""
        cfg = self.cfg
        b = cfg.update.microbatch
        M = cfg.rollout.prompts * cfg.rollout.group_size // cfg.update.minibatches // b
        sharding = NamedSharding(self.mesh, PartitionSpec(None, *batch_spec()))
        return jax.ShapeDtypeStruct((M, b, *shape), dtype, sharding=sharding)

    def _numbers(self) -> Any:
        return self._microbatches((), jnp.int32)

    def _sampled(self) -> SampledRows:
        """Describe the rows of one minibatch."""
        cfg = self.cfg.credit
        T, room = self.cfg.rollout.max_new, self._ending_room
        widest, recorded = widest_prompt(self.cfg.data, self.cfg.rollout), self.cfg.loss.teacher == RECORDED

        def rows(length: int) -> tuple[Any, Any]:
            of = self._microbatches
            N = max(self._train_width, widest) + length
            kind: Any = Rollout
            rollout = kind(
                tokens=of((N,), jnp.int32),
                valid=of((N,), jnp.bool_),
                completion=of((length,), jnp.bool_),
                behaviour_logps=of((length,), jnp.float32),
                filtered_logps=of((length,), jnp.float32),
                ended=of((), jnp.bool_),
                experts=self._experts(N) if length == T else None,
                teacher_logps=of((length,), jnp.float32) if recorded and length == T else None,
            )
            mask, kind = of((length,), jnp.bool_), AnswerSpan
            units = None if not cfg.labels_tokens else of((length,), jnp.int32)
            outcome = mask if self._wants_outcome and length != T else None
            return rollout, kind(
                reasoning=mask, answer=mask, has_answer=of((), jnp.bool_), units=units, outcome=outcome
            )

        kind: Any = SampledRows
        return kind(*rows(T), self._numbers(), rows(T + room) if room else None, self._hints())

    def _graded(self, rollout: Rollout) -> GradedRows:
        """Describe the advantages of one minibatch's rows."""
        row = self._microbatches((), jnp.float32)
        late = row if self.cfg.advantage.soft == "split" else None
        return GradedRows(row, rollout.completion, row if self.steps.values else None, late)

    def _experts(self, length: int) -> Any:
        """Describe the experts that the sampler records, or None."""
        experts = self.model.experts
        if self.cfg.policy.router != "replay" or experts is None:
            return None
        return self._microbatches((length, self.model.num_hidden_layers, experts.per_token), index_dtype(experts.count))

    def _bucket(self) -> Bucket:
        """Return the largest bucket."""
        return Bucket(self._train_width, self.cfg.rollout.max_new, self.steps.prompt_rows)

    def _train_batch(self) -> TrainBatch:
        scores = self._scores()
        rollout = self._sampled().rollout
        return TrainBatch(
            tokens=rollout.tokens,
            valid=rollout.valid,
            completion=rollout.completion,
            advantages=rollout.behaviour_logps,  # of the same shape
            old_logps=scores.old_logps,
            ref_logps=scores.ref_logps,
            behaviour_logps=rollout.behaviour_logps,
            teacher=self._hints() and self._hints().teacher,
            experts=rollout.experts,
            values=scores.values and replace(scores.values, scale=self._microbatches((), jnp.float32)),
        )

    def _hints(self) -> Any:
        """Describe what a credit method reads beside the rollouts; None where that is nothing."""
        of, shape, kind = self._microbatches, (self.cfg.rollout.max_new,), cast(Any, Hints)
        if not self._wants & (OF_MARKS | OF_TEACHER):
            return None
        marks, teacher = self._wants & OF_MARKS, None
        if self._wants & OF_TEACHER:
            width = (self._teacher_width,)
            teacher = cast(Any, Privileged)(of(width, jnp.int32), of(width, jnp.bool_))
        return kind(
            marks=of(shape, jnp.float32) if marks else None,
            turns=of(shape, jnp.int32) if marks else None,
            teacher=teacher,
        )

    def _sums(self, state: TrainState, batch: TrainBatch) -> Sums:
        """Return the summed gradients and metrics of microbatches, with their shardings."""
        sums, layout = self.steps.zeros.eval_shape(state, batch), self.layout
        scalars = _with((sums.loss, sums.metrics), layout.replicated)
        return Sums(_with(sums.grads, layout.state.params), *scalars)

    def _scores(self) -> Any:
        """Return the shapes of what score returns."""
        program = self.score_program()
        scores = program.jitted.eval_shape(*program.args, **program.static)
        return _with(scores, NamedSharding(self.mesh, PartitionSpec(None, *batch_spec())))


def times_again(turns: int, max_new: int) -> dict[int, float]:
    """Count how often a row of as many turns, all equally long, is computed again, by positions after its prompt.

    Widths that only rows of unequal turns have are there with 0.
    """
    widths = widths_of_rows(max_new)
    row_widths = [next(size for size in widths if size >= max_new * turn / turns) for turn in range(1, turns)]
    return {size: float(row_widths.count(size)) for size in widths}


def _of_phase(phase: Phase, program: RolloutProgram, params: Any) -> tuple[PhaseProgram, bool]:
    """Return a program of a rollout as one of a phase, and whether it is among the largest."""
    takes: frozenset[Part] = frozenset({"rollout"} if program.args[0] is params else set())
    return PhaseProgram(
        phase, program.jitted, program.args, program.static, takes, program.name, program.held, program.steps
    ), program.largest


def bytes_per_device(tree: Any) -> int:
    """Count the bytes that one device holds of a tree of arrays or shapes; all of them without a sharding."""
    return sum(
        math.prod(x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


def _with(tree: Any, shardings: Any) -> Any:
    """Add shardings to shapes: a tree like ``tree``, or one sharding for all."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _count() -> Any:
    """Describe a number of microbatches, which comes from the host without a sharding."""
    return jax.ShapeDtypeStruct((), jnp.int32)

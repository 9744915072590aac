"""The device programs of a run with the shapes of the largest arguments that they can meet: nothing is computed.

The one place that knows what each program is called with. The memory table at a run's start and ``oarjax plan`` lower
and compile ``run.steps``, the programs that training calls. The run may have been made from a model and a mesh alone,
whose devices may be those of a topology; data, tokenizer and weights are not needed.

    for program in programs(run):
        compiled = program.lower().compile()

``resident`` counts what lies on each device while a phase runs, whether its program takes it or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from oarjax.credit.bind import needs_reference, signals
from oarjax.credit.method import OF_MARKS, OF_TEACHER
from oarjax.credit.probe import ProbeMode
from oarjax.data.streams import bucketed
from oarjax.models.lora import all_params
from oarjax.models.moe import index_dtype
from oarjax.models.sharding import batch_spec
from oarjax.models.weights import abstract_params
from oarjax.run.adapters import trained_shapes
from oarjax.run.hints import teacher_prompts
from oarjax.run.policy import stored_dtype_of
from oarjax.run.run import Run
from oarjax.step.fused import FusedRows, FusedSums
from oarjax.step.loss import Sums
from oarjax.step.minibatches import Bucket, buckets, prompt_step, widest_prompt
from oarjax.types import AnswerSpan, Hints, Privileged, PromptBatch, Rollout, TrainBatch, TrainState

Phase = Literal["reshard", "sample", "evaluate", "score", "credit", "update", "fused", "apply"]
Part = Literal["params", "optimizer", "frozen", "gradients", "reference", "rollout"]
"""Arrays that outlive a phase."""


class Program(NamedTuple):
    """A phase's jitted program and its arguments, as shapes with their shardings."""

    phase: Phase
    jitted: Any
    args: tuple[Any, ...]
    static: Mapping[str, Any]  # keyword arguments
    takes: frozenset[Part]  # of what is resident, the parts that are among the arguments
    name: str = ""  # of one of several programs of a phase
    held: Any = ()  # shapes of this phase's arrays that are not arguments

    def lower(self) -> Any:
        """Lower the program for these shapes; ``.compile()`` asks the compiler of the mesh's devices."""
        return self.jitted.lower(*self.args, **self.static)


def programs(run: Run) -> tuple[Program, ...]:
    """Return the programs of an iteration in its order; evaluate only with data.eval."""
    return (
        reshard_program(run),
        *sampling_programs(run, "sample"),
        *(() if run.cfg.data.eval is None else sampling_programs(run, "evaluate")),
        *learning_programs(run),
        apply_program(run),
    )


def learning_programs(run: Run) -> tuple[Program, ...]:
    """Return the programs of score, credit and gradients: three, or the one that does it all in one pass."""
    if run.steps.fused_add is None:
        return score_program(run), credit_program(run), update_program(run)
    return (fused_program(run),)


def fused_program(run: Run) -> Program:
    """Describe the program that scores the longest microbatches of a minibatch and adds their gradients in one pass.

    Raises:
        ValueError: the run scores and updates in two passes.
    """
    if run.steps.fused_add is None:
        raise ValueError("fused_program: update.fused, credit or grades of this run need two passes, score and update")
    state = abstract_state(run)
    rollout, span, _ = _scored(run)
    rows = FusedRows(rollout, span, _numbers(run), _microbatches(run, (), jnp.float32), rollout.completion)
    zeros, layout = jax.eval_shape(run.steps.fused_zeros, state, rows), run.layout  # pyright: ignore[reportArgumentType]
    sums = FusedSums(
        Sums(_with(zeros.sums.grads, layout.state.params), *_with(tuple(zeros.sums[1:]), layout.replicated)),
        *_with((zeros.importance, zeros.weights), rollout.completion.sharding),
        metrics=_with(zeros.metrics, layout.replicated),
    )
    args = (sums, state, rows, _key(run), _key(run), _count(), _count())
    static = {"probe": run.cfg.credit.probe.mode, "bucket": _bucket(run)}
    takes: frozenset[Part] = frozenset({"gradients", "params", "optimizer", "frozen"})
    return Program("fused", run.steps.fused_add, args, static, takes)


def program_counts(run: Run) -> dict[str, int]:
    """Count the programs that a run may compile of each kind at most; those of an evaluation are not among them.

    A rollout has a number of rows and of cache slots, and its prompts a width; a score or an update has a bucket.
    """
    cfg, sampler = run.cfg, _sampler(run, "sample")
    widest = _width(run, "train")
    _, prompts, _ = _sampling_arguments(run, "sample")
    widths = widest // cfg.rollout.prompt_bucket
    limits = (cfg.rollout.prompt_bucket, widest), (cfg.rollout.completion_bucket, cfg.rollout.max_new)
    by_length = math.prod(len(buckets(*limit)) for limit in limits)
    decode = len(sampler.plan(prompts).sizes())
    learning = ("score", "update") if run.steps.fused_add is None else ("fused",)
    return {"prefill": widths, "decode": widths * decode, **dict.fromkeys(learning, by_length), "apply": 1}


def reshard_program(run: Run) -> Program:
    """Describe the program that lays out trained params for sampling."""
    return Program("reshard", run.steps.rollout_params, (_params(run),), {}, frozenset({"params", "frozen"}))


def sample_program(run: Run) -> Program:
    """Describe sampling as one program that decodes every row to the end: work is counted in it, it is never run."""
    return Program("sample", run.steps.sample, _sampling_arguments(run, "sample"), {}, frozenset({"rollout"}))


def sampling_programs(run: Run, phase: Literal["sample", "evaluate"]) -> tuple[Program, ...]:
    """Describe the largest programs that sample rollouts, or eval.samples completions of held-out prompts."""
    params, prompts, key = _sampling_arguments(run, phase)
    return tuple(
        Program(
            phase,
            each.jitted,
            each.args,
            each.static,
            frozenset({"rollout"}) if each.args[0] is params else frozenset(),
            each.name,
            each.held,
        )
        for each in _sampler(run, phase).programs(params, prompts, key)
    )


def _sampler(run: Run, phase: Literal["sample", "evaluate"]) -> Any:
    return run.steps.sample if phase == "sample" else run.steps.evaluate


def _sampling_arguments(run: Run, phase: Literal["sample", "evaluate"]) -> tuple[Any, ...]:
    if phase == "sample":
        return rollout_shapes(run), _prompts(run, run.cfg.rollout.prompts, _width(run, "train")), _key(run)
    key = jax.eval_shape(lambda: jax.random.key(0))  # of no mesh: evaluations make their own
    return rollout_shapes(run), _prompts(run, run.cfg.eval.batch, _width(run, "held_out")), key


def score_program(run: Run, *, probe: ProbeMode | None = None) -> Program:
    """Describe the program of one minibatch's old and reference log-probs and importance."""
    cfg = run.cfg
    state = abstract_state(run)
    rollout, span, instead = _scored(run)
    takes: set[Part] = {"params", "frozen"}
    reference = None
    if needs_reference(cfg, run.custom_method) and state.frozen is None:
        reference = state.params
        takes |= {"reference"}
    probed = instead[0] if instead else None
    args = (
        all_params(state),
        reference,
        rollout,
        span,
        _numbers(run),
        _count(),
        _key(run),
        probed,
        _count(),
        _hints(run),
    )
    static = {"probe": probe or cfg.credit.probe.mode, "bucket": _bucket(run)}
    return Program("score", run.steps.score, args, static, frozenset(takes))


def credit_program(run: Run) -> Program:
    """Describe the program of the weights and advantages of one minibatch's tokens."""
    scores = _scores(run)
    rollout, span, _ = _scored(run)
    a = _microbatches(run, (), jnp.float32)
    args = (scores, rollout, span, a, rollout.completion, _key(run), _numbers(run), _hints(run), _count())
    return Program("credit", run.steps.credit, args, {}, frozenset())


def update_program(run: Run) -> Program:
    """Return the program that adds the gradients of the longest microbatches of a minibatch."""
    state, batch = abstract_state(run), _train_batch(run)
    args = (_sums(run, state, batch), state, batch, _count(), _count())
    takes: frozenset[Part] = frozenset({"gradients", "params", "optimizer", "frozen"})
    return Program("update", run.steps.accumulate, args, {"bucket": _bucket(run)}, takes)


def apply_program(run: Run) -> Program:
    """Return the program of one optimizer update from summed gradients."""
    state = abstract_state(run)
    args = (state, _sums(run, state, _train_batch(run)), jax.ShapeDtypeStruct((), jnp.float32))
    takes: frozenset[Part] = frozenset({"gradients", "params", "optimizer", "frozen"})
    return Program("apply", run.steps.apply, args, {}, takes)


def abstract_state(run: Run) -> TrainState:
    """Return the state as shapes with shardings."""
    cfg, model = run.cfg, run.model
    plain = abstract_params(model, dtype=stored_dtype_of(cfg, run.mesh))
    state = jax.eval_shape(
        lambda p, f: TrainState(jnp.zeros((), jnp.int32), p, run.optimizer.init(p), jax.random.key(0), f),
        trained_shapes(cfg.lora, model),
        plain if cfg.lora.rank else None,
    )
    return _with(state, run.layout.state)


def rollout_shapes(run: Run) -> Any:
    """Return the params in the rollout layout, as shapes with shardings."""
    shapes = run.steps.rollout_params.eval_shape(_params(run))  # pyright: ignore[reportFunctionMemberAccess]
    return _with(shapes, run.rollout_layout.params)


def resident(run: Run, phase: Phase) -> dict[Part, int]:
    """Count the bytes per device that each part holds while a phase runs; rows of a batch are left out."""
    state = abstract_state(run)
    parts: dict[Part, Any] = {"params": state.params, "optimizer": state.opt_state}
    if state.frozen is not None:
        parts["frozen"] = state.frozen  # the reference too
    elif needs_reference(run.cfg, run.custom_method) and (run.cfg.loss.reference == "device" or phase == "score"):
        parts["reference"] = state.params
    if phase in ("sample", "evaluate"):
        parts["rollout"] = rollout_shapes(run)
    if phase in ("update", "fused", "apply"):
        parts["gradients"] = _sums(run, state, _train_batch(run)).grads
    return {name: bytes_per_device(tree) for name, tree in parts.items()}


def beside(run: Run, program: Program, *, read: int | None) -> int:
    """Count the bytes per device that outlive a program's phase and are not its arguments.

    Args:
        read: the compiler's bytes of its arguments: JAX leaves those out that it does not read, and they lie there all
            the same. None where it was not compiled.
    """
    others = sum(size for part, size in resident(run, program.phase).items() if part not in program.takes)
    others += bytes_per_device(program.held)
    return others + (0 if read is None else max(bytes_per_device(program.args) - read, 0))


def bytes_per_device(tree: Any) -> int:
    """Count the bytes that one device holds of a tree of arrays or shapes; all of them without a sharding."""
    return sum(
        math.prod(x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


# --- Arguments -------------------------------------------------------------------------------------------------------


def _with(tree: Any, shardings: Any) -> Any:
    """Add shardings to shapes: a tree like ``tree``, or one sharding for all."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _params(run: Run) -> Any:
    """Return all params that the policy reads, adapters included."""
    return all_params(abstract_state(run))


def _key(run: Run) -> Any:
    return _with(jax.eval_shape(lambda: jax.random.key(0)), run.layout.replicated)


def _count() -> Any:
    """Describe a number of microbatches, which comes from the host without a sharding."""
    return jax.ShapeDtypeStruct((), jnp.int32)


def _width(run: Run, data: Literal["train", "held_out"]) -> int:
    """Return the positions of the longest prompts, padded; without data, of the longest that the config allows."""
    step = prompt_step(run.cfg, run.mesh)
    if not run.has_data:
        return widest_prompt(run.cfg)
    encoded = run.train if data == "train" else run.held_out
    if encoded is None:
        raise ValueError("evaluate_program: the config has no data.eval")
    return bucketed(encoded.prompts, step)


def _prompts(run: Run, count: int, width: int) -> PromptBatch:
    shape = (count, width)
    shapes: Any = PromptBatch  # of shapes
    batch = shapes(
        tokens=jax.ShapeDtypeStruct(shape, jnp.int32),
        valid=jax.ShapeDtypeStruct(shape, jnp.bool_),
        problem=jax.ShapeDtypeStruct((count,), jnp.int32),
    )
    return _with(batch, run.rollout_layout.rows)


def _microbatches(run: Run, shape: tuple[int, ...], dtype: Any) -> Any:
    """Describe [M, b, *shape] of one minibatch."""
    cfg = run.cfg
    b = cfg.update.microbatch
    M = cfg.rollout.prompts * cfg.rollout.group_size // cfg.update.minibatches // b
    where = NamedSharding(run.mesh, PartitionSpec(None, *batch_spec()))
    return jax.ShapeDtypeStruct((M, b, *shape), dtype, sharding=where)


def _numbers(run: Run) -> Any:
    return _microbatches(run, (), jnp.int32)


def _scored(run: Run) -> tuple[Rollout, AnswerSpan, tuple[Any, ...]]:
    """Describe rollouts and spans of one minibatch, and those probed in their place with reference answers."""
    cfg = run.cfg.credit
    T, room = run.cfg.rollout.max_new, run.ending_room
    widest = widest_prompt(run.cfg)

    def rows(length: int) -> tuple[Any, Any]:
        of = partial(_microbatches, run)
        N = max(_width(run, "train"), widest) + length
        kind: Any = Rollout
        rollout = kind(
            tokens=of((N,), jnp.int32),
            valid=of((N,), jnp.bool_),
            completion=of((length,), jnp.bool_),
            behaviour_logps=of((length,), jnp.float32),
            filtered_logps=of((length,), jnp.float32),
            ended=of((), jnp.bool_),
            experts=_experts(run, N) if length == T else None,
        )
        mask, kind = of((length,), jnp.bool_), AnswerSpan
        units = None if cfg.masking.unit == "token" else of((length,), jnp.int32)
        return rollout, kind(reasoning=mask, answer=mask, has_answer=of((), jnp.bool_), units=units)

    return *rows(T), (rows(T + room),) if room else ()


def _experts(run: Run, length: int) -> Any:
    """Describe the experts that the sampler records, or None."""
    experts = run.model.experts
    if run.cfg.policy.router != "replay" or experts is None:
        return None
    return _microbatches(run, (length, run.model.num_hidden_layers, experts.per_token), index_dtype(experts.count))


def _bucket(run: Run) -> Bucket:
    """Return the largest bucket."""
    return Bucket(_width(run, "train"), run.cfg.rollout.max_new)


def _train_batch(run: Run) -> TrainBatch:
    scores = _scores(run)
    rollout, _, _ = _scored(run)
    return TrainBatch(
        tokens=rollout.tokens,
        valid=rollout.valid,
        completion=rollout.completion,
        advantages=rollout.behaviour_logps,  # of the same shape
        old_logps=scores.old_logps,
        ref_logps=scores.ref_logps,
        behaviour_logps=rollout.behaviour_logps,
        teacher=_hints(run) and _hints(run).teacher,
        experts=rollout.experts,
    )


def _hints(run: Run) -> Any:
    """Describe what a credit method reads beside the rollouts; None where that is nothing.

    Without data a teacher's prompts are taken to be a bucket wider than the policy's.
    """
    wants, of = signals(run.cfg.credit, run.custom_method), partial(_microbatches, run)
    if not wants & (OF_MARKS | OF_TEACHER):
        return None
    marks, shape, kind = wants & OF_MARKS, (run.cfg.rollout.max_new,), cast(Any, Hints)
    step = run.cfg.rollout.prompt_bucket
    width = widest_prompt(run.cfg) + step
    if run.has_data and wants & OF_TEACHER:
        width = bucketed(teacher_prompts(run, run.train.problems), step)
    teacher = cast(Any, Privileged)(of((width,), jnp.int32), of((width,), jnp.bool_)) if wants & OF_TEACHER else None
    return kind(
        marks=of(shape, jnp.float32) if marks else None, turns=of(shape, jnp.int32) if marks else None, teacher=teacher
    )


def _sums(run: Run, state: TrainState, batch: TrainBatch) -> Sums:
    """Return the summed gradients and metrics of microbatches, with their shardings."""
    sums, layout = jax.eval_shape(run.steps.zeros, state, batch), run.layout
    rest = _with((sums.loss, sums.metrics), layout.replicated)
    return Sums(_with(sums.grads, layout.state.params), *rest)


def _scores(run: Run) -> Any:
    """Return the shapes of what score returns."""
    program = score_program(run)
    scores = program.jitted.eval_shape(*program.args, **program.static)
    return _with(scores, NamedSharding(run.mesh, PartitionSpec(None, *batch_spec())))

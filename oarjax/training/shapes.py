"""The device programs of a run with arguments of the largest shapes that it can meet, as shapes: nothing is computed.

One place that knows what each program is called with. The memory table of a run's start and ``oarjax plan`` lower and
compile what is built here, and it is what ``train`` jits: ``make_steps`` with the layout of ``lay_out``. It needs a
config, an architecture and a mesh, whose devices may be those of a topology; no data, no tokenizer, no weights.

    built = build(parts_for(cfg, model, mesh, stop_ids=(0,), pad_id=0))   # or build(parts_of(session))
    for program in programs(built):
        compiled = program.lower().compile()

``resident`` says what lies on each device while a phase runs, whether its program takes it or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from oarjax.config import Config
from oarjax.credit.keywords import KeywordTable
from oarjax.credit.method import CreditMethod
from oarjax.credit.probe import Probe, ProbeMode
from oarjax.data.streams import bucketed
from oarjax.models.lora import whole
from oarjax.models.policy import Policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.sharding import batch_spec
from oarjax.models.weights import abstract_params
from oarjax.training.adapters import trained_shapes
from oarjax.training.layout import lay_out, policy_of, rollout_layout, stored_dtype_of
from oarjax.training.minibatches import bucket
from oarjax.training.programs import RolloutLayout, Shardings, Steps, TokenLoss, make_optimizer, make_steps
from oarjax.training.run import Session
from oarjax.types import AnswerSpan, PromptBatch, Rollout, TrainBatch, TrainState

Phase = Literal["reshard", "sample", "evaluate", "score", "credit", "update"]
Part = Literal["params", "optimizer", "frozen", "reference", "rollout"]
"""Arrays that outlive a phase."""


@dataclass(frozen=True)
class Parts:
    """What the programs of a run are made from: a Session without data, tokenizer and weights."""

    cfg: Config
    mesh: Mesh
    model: QwenConfig
    policy: Policy
    stop_ids: tuple[int, ...]
    pad_id: int
    prompt_width: int  # positions of the longest prompts, padded
    held_out_width: int  # of those of data.eval
    keyword_table: KeywordTable | None = None
    custom_probe: Probe | None = None
    custom_method: CreditMethod | None = None
    custom_loss: TokenLoss | None = None
    ending_room: int = 0  # positions that credit.answer.source reference adds to a completion


class Built(NamedTuple):
    """Parts bound into programs; nothing is compiled."""

    parts: Parts
    tx: optax.GradientTransformation
    layout: Shardings
    rollout: RolloutLayout
    steps: Steps


class Program(NamedTuple):
    """A jitted program of a phase, and what it is called with, as shapes with their shardings."""

    phase: Phase
    jitted: Any
    args: tuple[Any, ...]
    static: Mapping[str, Any]  # keyword arguments
    takes: frozenset[Part]  # of what is resident, the parts that are among the arguments

    def lower(self) -> Any:
        """The program as JAX lowers it for these shapes; ``.compile()`` asks the compiler of the mesh's devices."""
        return self.jitted.lower(*self.args, **self.static)


def parts_for(
    cfg: Config,
    model: QwenConfig,
    mesh: Mesh,
    *,
    stop_ids: tuple[int, ...],
    pad_id: int,
    custom_probe: Probe | None = None,
    custom_method: CreditMethod | None = None,
    custom_loss: TokenLoss | None = None,
) -> Parts:
    """Parts without a session: prompts as long as ``data.max_prompt`` lets them be."""
    width = bucket(cfg.data.max_prompt, cfg.rollout.prompt_bucket, 1 << 30)
    return Parts(
        cfg=cfg,
        mesh=mesh,
        model=model,
        policy=policy_of(cfg, model, mesh)[0],
        stop_ids=stop_ids,
        pad_id=pad_id,
        prompt_width=width,
        held_out_width=width,
        custom_probe=custom_probe,
        custom_method=custom_method,
        custom_loss=custom_loss,
    )


def parts_of(session: Session) -> Parts:
    """The parts of a session: prompts as long as the longest of its data."""
    cfg, held_out = session.cfg, session.held_out
    return Parts(
        cfg=cfg,
        mesh=session.mesh,
        model=session.model,
        policy=session.policy,
        stop_ids=session.stop_ids,
        pad_id=session.pad_id,
        prompt_width=bucketed(session.train.prompts, cfg.rollout.prompt_bucket),
        held_out_width=0 if held_out is None else bucketed(held_out.prompts, cfg.rollout.prompt_bucket),
        keyword_table=session.keyword_table(),
        custom_probe=session.custom_probe,
        custom_method=session.custom_method,
        custom_loss=session.custom_loss,
        ending_room=session.ending_room if cfg.credit.answer.source == "reference" else 0,
    )


def build(parts: Parts) -> Built:
    """The very programs that ``train`` runs."""
    tx, _ = make_optimizer(parts.cfg)
    layout, rollout = lay_out(parts, tx), rollout_layout(parts.cfg, parts.model, parts.mesh)
    steps = make_steps(
        parts.policy,
        tx,
        layout,
        parts.cfg,
        stop_ids=parts.stop_ids,
        pad_id=parts.pad_id,
        rollout=rollout,
        keyword_table=parts.keyword_table,
        custom_probe=parts.custom_probe,
        custom_method=parts.custom_method,
        custom_loss=parts.custom_loss,
    )
    return Built(parts, tx, layout, rollout, steps)


def programs(built: Built) -> tuple[Program, ...]:
    """Reshard, sample, evaluate (where there is data.eval), score, credit and update, in an iteration's order."""
    evaluation = () if built.parts.cfg.data.eval is None else (evaluate_program(built),)
    return (
        reshard_program(built),
        sample_program(built),
        *evaluation,
        score_program(built),
        credit_program(built),
        update_program(built),
    )


def reshard_program(built: Built) -> Program:
    """The policy as it samples, from its params as they are trained."""
    return Program("reshard", built.steps.rollout_params, (_params(built),), {}, frozenset({"params", "frozen"}))


def sample_program(built: Built) -> Program:
    """Rollouts of one batch of prompts."""
    prompts = _prompts(built, built.parts.cfg.rollout.prompts, built.parts.prompt_width)
    args = (rollout_shapes(built), prompts, _key(built))
    return Program("sample", built.steps.sample, args, {}, frozenset({"rollout"}))


def evaluate_program(built: Built) -> Program:
    """``eval.samples`` completions of one batch of held-out prompts."""
    prompts = _prompts(built, built.parts.cfg.eval.batch, built.parts.held_out_width)
    key = jax.eval_shape(lambda: jax.random.key(0))  # of no mesh: evaluations make their own
    args = (rollout_shapes(built), prompts, key)
    return Program("evaluate", built.steps.evaluate, args, {}, frozenset({"rollout"}))


def score_program(built: Built, *, probe: ProbeMode | None = None) -> Program:
    """Old log-probs, reference log-probs and importance of one minibatch, as the config asks for them."""
    cfg = built.parts.cfg
    state = abstract_state(built)
    rollout, span, instead = _scored(built)
    takes: set[Part] = {"params", "frozen"}
    reference = None
    if cfg.loss.kl_beta > 0 and state.frozen is None:
        reference = state.params
        takes |= {"reference"}
    args = (whole(state), reference, rollout, span, _numbers(built), _count(), _key(built), *instead)
    static = {"probe": probe or cfg.credit.probe.mode}
    return Program("score", built.steps.score, args, static, frozenset(takes))


def credit_program(built: Built) -> Program:
    """Weights and advantages of every token of one minibatch."""
    scores = _scores(built)
    rollout, span, _ = _scored(built)
    a = _microbatches(built, (), jnp.float32)
    args = (scores, rollout, span, a, rollout.completion, _key(built))
    return Program("credit", built.steps.credit, args, {}, frozenset())


def update_program(built: Built) -> Program:
    """One optimizer update from one minibatch."""
    scores = _scores(built)
    rollout, _, _ = _scored(built)
    batch = TrainBatch(
        tokens=rollout.tokens,
        valid=rollout.valid,
        completion=rollout.completion,
        advantages=rollout.behaviour_logps,  # of the same shape
        old_logps=scores.old_logps,
        ref_logps=scores.ref_logps,
        behaviour_logps=rollout.behaviour_logps,
    )
    denominator = jax.ShapeDtypeStruct((), jnp.float32)
    args = (abstract_state(built), batch, _count(), denominator)
    return Program("update", built.steps.update, args, {}, frozenset({"params", "optimizer", "frozen"}))


def abstract_state(built: Built) -> TrainState:
    """The state as shapes, each with its sharding."""
    cfg, model = built.parts.cfg, built.parts.model
    plain = abstract_params(model, dtype=stored_dtype_of(cfg, built.parts.mesh))
    state = jax.eval_shape(
        lambda p, f: TrainState(jnp.zeros((), jnp.int32), p, built.tx.init(p), jax.random.key(0), f),
        trained_shapes(cfg.lora, model),
        plain if cfg.lora.rank else None,
    )
    return _with(state, built.layout.state)


def rollout_shapes(built: Built) -> Any:
    """The params as they are sampled with, as shapes, each with its sharding."""
    shapes = jax.eval_shape(built.rollout.prepare, _params(built))
    return _with(shapes, built.rollout.params)


def resident(built: Built, phase: Phase) -> dict[Part, int]:
    """Bytes per device of what lies there while a phase runs, part by part; rows of a batch are left out."""
    state = abstract_state(built)
    parts: dict[Part, Any] = {"params": state.params, "optimizer": state.opt_state}
    if state.frozen is not None:
        parts["frozen"] = state.frozen  # the reference too
    elif built.parts.cfg.loss.kl_beta > 0 and (built.parts.cfg.loss.reference == "device" or phase == "score"):
        parts["reference"] = state.params
    if phase in ("sample", "evaluate"):
        parts["rollout"] = rollout_shapes(built)
    return {name: bytes_per_device(tree) for name, tree in parts.items()}


def beside(built: Built, program: Program, *, read: int | None) -> int:
    """Bytes per device that lie there while a program runs and are none of its own.

    Args:
        read: the compiler's bytes of its arguments: JAX leaves those out that it does not read, and they lie there all
            the same. None where it was not compiled.
    """
    others = sum(size for part, size in resident(built, program.phase).items() if part not in program.takes)
    return others + (0 if read is None else max(bytes_per_device(program.args) - read, 0))


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of a tree of arrays or shapes; whole where they have no sharding."""
    return sum(
        math.prod(x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


# --- Arguments -------------------------------------------------------------------------------------------------------


def _with(tree: Any, shardings: Any) -> Any:
    """The shapes with their shardings: a tree like ``tree``, or one sharding for all."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _params(built: Built) -> Any:
    """All that the policy reads, adapters included."""
    return whole(abstract_state(built))


def _key(built: Built) -> Any:
    return _with(jax.eval_shape(lambda: jax.random.key(0)), built.layout.replicated)


def _count() -> Any:
    """A number of microbatches: from the host, laid out by JAX."""
    return jax.ShapeDtypeStruct((), jnp.int32)


def _prompts(built: Built, count: int, width: int) -> PromptBatch:
    shape = (count, width)
    shapes: Any = PromptBatch  # of shapes
    batch = shapes(
        tokens=jax.ShapeDtypeStruct(shape, jnp.int32),
        valid=jax.ShapeDtypeStruct(shape, jnp.bool_),
        problem=jax.ShapeDtypeStruct((count,), jnp.int32),
    )
    return _with(batch, built.rollout.rows)


def _microbatches(built: Built, shape: tuple[int, ...], dtype: Any) -> Any:
    """[M, b, *shape] of one minibatch."""
    cfg = built.parts.cfg
    b = cfg.update.microbatch
    M = cfg.rollout.prompts * cfg.rollout.group_size // cfg.update.minibatches // b
    where = NamedSharding(built.parts.mesh, PartitionSpec(None, *batch_spec()))
    return jax.ShapeDtypeStruct((M, b, *shape), dtype, sharding=where)


def _numbers(built: Built) -> Any:
    return _microbatches(built, (), jnp.int32)


def _scored(built: Built) -> tuple[Rollout, AnswerSpan, tuple[Any, ...]]:
    """Rollouts and spans of one minibatch, and what is probed instead of them, where that is something else."""
    cfg = built.parts.cfg.credit
    T, room = built.parts.cfg.rollout.max_new, built.parts.ending_room

    def rows(length: int) -> tuple[Any, Any]:
        of = partial(_microbatches, built)
        N = built.parts.prompt_width + length
        kind: Any = Rollout
        rollout = kind(
            tokens=of((N,), jnp.int32),
            valid=of((N,), jnp.bool_),
            completion=of((length,), jnp.bool_),
            behaviour_logps=of((length,), jnp.float32),
            filtered_logps=of((length,), jnp.float32),
            ended=of((), jnp.bool_),
        )
        mask, kind = of((length,), jnp.bool_), AnswerSpan
        units = None if cfg.masking.unit == "token" else of((length,), jnp.int32)
        return rollout, kind(reasoning=mask, answer=mask, found=of((), jnp.bool_), units=units)

    return *rows(T), (rows(T + room),) if room else ()


def _scores(built: Built) -> Any:
    """What score gives."""
    program = score_program(built)
    found = jax.eval_shape(partial(program.jitted, **program.static), *program.args)
    return _with(found, NamedSharding(built.parts.mesh, PartitionSpec(None, *batch_spec())))

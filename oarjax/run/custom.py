"""Import custom probes, credit methods and losses by name, and try them at small shapes before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from oarjax.config.learning import AdvantageConfig, GradingConfig, LossConfig, OptimConfig
from oarjax.config.schema import Config
from oarjax.credit.method import CreditMethod
from oarjax.credit.methods.keywords import KeywordTable
from oarjax.credit.probe import Probe, Reading
from oarjax.credit.record import CUSTOM
from oarjax.credit.resolved import ResolvedMethod, TokenCredit, check_method, resolve_method
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, CreditInputs, Signals, all_required
from oarjax.errors import ConfigError
from oarjax.models.policy import Policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import abstract_params
from oarjax.rl.advantages import AdvantageFunction
from oarjax.rl.optimizer import OptimizerFunction, custom_optimizer
from oarjax.step.loss import TokenLoss
from oarjax.system.plugins import import_object
from oarjax.types import AnswerSpan, Mean, TrainBatch

ROWS, LENGTH = 2, 8
"""Shapes for tracing custom functions."""


def find_probe(credit: CreditSettings) -> Probe | None:
    """Import the probe that credit.probe.function names.

    Raises:
        ConfigError: it cannot be imported, is not a Probe, or has an unknown kind.
    """
    name = credit.probe.function
    if name is None:
        return None
    try:
        probe = import_object(name, field="credit.probe.function", expected=Probe)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if probe.kind not in ("distribution", "scalar") or probe.reads not in ("answer", "completion"):
        raise ConfigError(
            "credit.probe.function: expected kind distribution or scalar and reads answer or completion, got "
            f"{name} with kind {probe.kind!r} and reads {probe.reads!r}"
        )
    return probe


def find_method(credit: CreditSettings) -> CreditMethod | None:
    """Import the credit method that credit.function names, where credit.method is custom.

    Raises:
        ConfigError: it cannot be imported, is not a CreditMethod, or needs an unknown signal.
    """
    name = credit.function
    if credit.method != CUSTOM or name is None:
        return None
    try:
        method = import_object(name, field="credit.function", expected=CreditMethod)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_method(method, field=f"credit.function: {name}")
    return method


def find_credit(credit: CreditSettings) -> ResolvedMethod:
    """Resolve the method of a config's credit section, with its custom parts.

    Raises:
        ConfigError: one cannot be imported, or is not what its field expects.
    """
    return resolve_method(credit, custom=find_method(credit), probe=find_probe(credit))


class CustomFunctions(NamedTuple):
    """The functions that a config names, None where it names none."""

    loss: TokenLoss | None
    advantages: AdvantageFunction | None
    optimizer: OptimizerFunction | None
    warm_optimizer: OptimizerFunction | None

    def check_optimizers(self, optim: OptimConfig, warm: OptimConfig | None, params: Any) -> None:
        """Trace what the optimizers, of the iterations and of a warm start, do with the parameters that are trained.

        Raises:
            ConfigError: one raised an error, or its updates have other shapes.
        """
        if self.optimizer is not None:
            check_optimizer(self.optimizer, optim, params, "optim.function")
        if self.warm_optimizer is not None and warm is not None:
            check_optimizer(self.warm_optimizer, warm, params, "sft.optim.function")


def find_custom(cfg: Config) -> CustomFunctions:
    """Import the functions of loss, advantages and optimizers that a config names, and try them at small shapes.

    Raises:
        ConfigError: one cannot be imported, is not a function, raised an error, or returned something else.
    """
    loss = _find_function(cfg.loss.function, "loss.function", cfg.loss.settings)
    if loss is not None:
        check_loss(loss, cfg.loss, updates=cfg.update.epochs * cfg.update.minibatches)
    advantages = _find_function(cfg.advantage.function, "advantage.function", cfg.advantage.settings)
    if advantages is not None:
        check_advantages(advantages, cfg.advantage, cfg.grading, group=cfg.rollout.group_size)
    warm = None if cfg.sft is None else find_optimizer(cfg.sft.optim, field="sft.optim.function")
    return CustomFunctions(loss, advantages, find_optimizer(cfg.optim), warm)


def find_optimizer(optim: OptimConfig, *, field: str = "optim.function") -> OptimizerFunction | None:
    """Import the function that optim.function names, and try the optimizer that it builds on two small matrices.

    Raises:
        ConfigError: it cannot be imported, is not a function, refuses the settings, or builds no optimizer.
    """
    function = _find_function(optim.function, field)
    if function is not None:
        check_optimizer(function, optim, {"kernel": _spec(jnp.float32, 2, 3), "bias": _spec(jnp.float32, 3)}, field)
    return function


def check_optimizer(function: OptimizerFunction, optim: OptimConfig, params: Any, field: str) -> None:
    """Build a custom optimizer, and trace its update of parameters of these shapes.

    Raises:
        ConfigError: it raised an error, or its updates have other shapes.
    """
    try:
        tx = custom_optimizer(function, optax.constant_schedule(optim.lr), optim.settings, clip_norm=optim.clip_norm)
        updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    except Exception as error:  # whatever a user's function raises
        raise ConfigError(
            f"{field}: {optim.function} with learning_rate and {optim.settings} fails ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); expected an optax optimizer, correct it or "
            f"{field.removesuffix('function')}settings"
        ) from error
    if jax.tree.map(lambda x: x.shape, updates) != jax.tree.map(lambda x: x.shape, params):
        raise ConfigError(f"{field}: the updates of {optim.function} have other shapes than the params; set another")


def _find_function(name: str | None, field: str, settings: Mapping[str, Any] | None = None) -> Any:
    if name is None:
        return None
    try:
        function: Any = import_object(name, field=field, expected=object)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if callable(function):
        return partial(function, **settings) if settings else function
    raise ConfigError(f"{field}: expected a function, got {name} of type {type(function).__name__}")


def check_credit(
    credit: ResolvedMethod, policy: Policy, model: QwenConfig, *, pad_id: int, keyword_table: KeywordTable | None
) -> None:
    """Build the functions of a credit method, trace a custom probe, and try custom weights on random numbers.

    Raises:
        ConfigError: the method cannot run.
    """
    settings, probe = credit.settings, credit.probe
    mask_id = settings.masking.mask_id
    if mask_id is not None and not 0 <= mask_id < model.vocab_size:
        raise ConfigError(f"credit.masking.mask_id: expected a token id below {model.vocab_size}, got {mask_id}")
    credit.scorer(policy, temperature=1.0, pad_id=pad_id)
    if probe is not None:
        check_probe(probe, policy, model, field=f"credit.probe.function: {settings.probe.function}")
    weigh = credit.weigher(keyword_table=keyword_table)
    if settings.method == CUSTOM:
        check_weights(weigh, credit.method, field=f"credit.function: {settings.function}")
        check_reweighing(credit.method, Context(settings), field=f"credit.function: {settings.function}")


def check_probe(probe: Probe, policy: Policy, model: QwenConfig, *, field: str) -> None:
    """Trace a custom probe and check the shape of its result; compute nothing.

    Raises:
        ConfigError: the probe raised an error, or its result has another shape.
    """
    hidden: Any = _spec(jnp.float32, ROWS, LENGTH, model.hidden_size)  # shapes instead of arrays
    tokens, mask = _spec(jnp.int32), _spec(bool)
    rank, expected = (2, f"logits [{ROWS}, outcomes]") if probe.kind == "distribution" else (1, f"scores [{ROWS}]")
    params = abstract_params(model, dtype=jnp.float32)
    try:
        result = jax.eval_shape(partial(probe.read, policy), params, hidden, Reading(tokens, mask, mask))
    except Exception as error:
        raise ConfigError(
            f"{field} fails on hidden states {hidden.shape}: {type(error).__name__}: {error}; for kind {probe.kind} "
            f"it must return {expected}"
        ) from error
    shape = getattr(result, "shape", None)
    if shape is None or shape[:1] != (ROWS,) or len(shape) != rank:
        raise ConfigError(
            f"{field}: expected {expected} for hidden states {hidden.shape} and kind {probe.kind}, got "
            f"{shape or type(result).__name__}"
        )


def check_weights(weigh: TokenCredit, method: CreditMethod, *, field: str) -> None:
    """Trace a custom credit method, then call it once on random numbers: one weight per token, finite and at least 0.

    Raises:
        ConfigError: the method raised an error, or returned anything else.
    """
    inputs = random_inputs(method.needs)
    weights = _traced(weigh, field, f"token weights [{ROWS}, {LENGTH}]", jax.tree.map(_spec_of, inputs))
    shape, dtype = getattr(weights, "shape", None), getattr(weights, "dtype", jnp.int32)
    if shape != (ROWS, LENGTH) or not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(
            f"{field}: expected one weight per token, floats [{ROWS}, {LENGTH}], for completions [{ROWS}, {LENGTH}], "
            f"got {_shapes(weights)}"
        )
    _check_values(jax.jit(weigh)(inputs), inputs.completion, field, positive=method.kind == "weights")


def check_reweighing(method: CreditMethod, context: Context, *, field: str) -> None:
    """Call a custom method's ``reweigh`` once on random numbers: its weights must be finite and at least 0.

    Raises:
        ConfigError: it raised an error, or returned anything else.
    """
    if method.reweigh is None:
        return
    inputs = random_inputs(("logps", "teacher_logps"))
    new_logps, old_logps = all_required(inputs.signals, ("logps", "teacher_logps"), context)
    tokens = jnp.zeros((ROWS, 2 * LENGTH), jnp.int32)
    batch = TrainBatch(
        tokens=tokens,
        valid=tokens == 0,
        completion=inputs.completion,
        advantages=jnp.where(inputs.completion, inputs.advantages[:, None], 0.0),
        old_logps=old_logps,
        ref_logps=None,
        behaviour_logps=old_logps,
    )
    expected = f"token weights [{ROWS}, {LENGTH}]"
    function, field = method.reweigh, f"{field}: reweigh"

    def reweigh(logps: Array, batch: TrainBatch) -> Array:
        return function(logps, batch, context)

    weights = _traced(reweigh, field, expected, new_logps, batch)
    if getattr(weights, "shape", None) != (ROWS, LENGTH):
        raise ConfigError(f"{field}: expected {expected}, got {_shapes(weights)}")
    _check_values(reweigh(new_logps, batch), inputs.completion, field, positive=True)


def _check_values(result: Array, completion: Array, field: str, *, positive: bool) -> None:
    """Refuse numbers that are not finite, and negative ones where weights are expected."""
    values = np.asarray(result, np.float64)[np.asarray(completion)]
    bad = values[~np.isfinite(values)]
    if not len(bad) and positive:
        bad = values[values < 0]
    if len(bad):
        expected, remedy = "finite numbers", "mask out what it divides by or takes the logarithm of"
        if positive:
            expected = "weights that are finite and at least 0"
            remedy = "clip them with jnp.maximum, or return the tokens' advantages and set kind='advantages'"
        raise ConfigError(
            f"{field}: expected {expected}, got {bad[0]:.4g} on random numbers, at {len(bad)} of {len(values)} "
            f"tokens; {remedy}"
        )


def random_inputs(needs: Sequence[str]) -> CreditInputs:
    """Draw inputs of a credit method in the ranges that they have in a run; they are the same at every call."""
    draw = np.random.default_rng(0)

    def floats(low: int, high: int, *axes: int) -> Array:
        return jnp.asarray(draw.uniform(low, high, (ROWS, LENGTH, *axes)), jnp.float32)

    positions = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
    turns = positions // 3 + 1
    entropies, logps = floats(0, 3), floats(-3, 0)
    lengths = np.array([LENGTH, LENGTH - 2])[:, None]  # the second row ends in padding
    signals: dict[str, Any] = {
        "importance": floats(0, 2) * (positions < lengths - 3),
        "entropies": entropies,
        "tokens": jnp.asarray(draw.integers(0, 99, (ROWS, LENGTH)), jnp.int32),
        "groups": jnp.zeros(ROWS, jnp.int32),
        "logps": logps,
        "score_norms": floats(0, 2),
        "hidden": floats(-1, 1, 4),
        "hellinger": floats(0, 1),
        "spread": entropies / 3,
        "teacher_logps": floats(-3, 0),
        "marks": jnp.asarray(draw.integers(-1, 2, (ROWS, LENGTH)), jnp.float32),
        "turns": jnp.asarray(turns, jnp.int32),
        "iteration": 1,
    }
    return CreditInputs(
        Signals(rows=jnp.arange(ROWS), **{name: signals[name] for name in needs if name in signals}),
        AnswerSpan(
            reasoning=jnp.asarray(positions < lengths - 3),
            answer=jnp.asarray(positions == lengths - 2),
            has_answer=jnp.ones(ROWS, bool),
        ),
        advantages=jnp.asarray([1.0, -1.0]),
        completion=jnp.asarray(positions < lengths),
        key=jax.random.key(0),
    )


def check_loss(function: TokenLoss, loss: LossConfig, *, updates: int) -> None:
    """Trace a custom loss and check that it returns a sum and a count, and metrics of the same form.

    ``updates`` is their number per rollout.

    Raises:
        ConfigError: the loss raised an error, or returned anything else.
    """
    field, values = f"loss.function: {loss.function}", _spec(jnp.float32)
    batch = TrainBatch(
        tokens=_spec(jnp.int32, ROWS, 2 * LENGTH),
        valid=_spec(bool, ROWS, 2 * LENGTH),
        completion=_spec(bool),
        advantages=values,
        old_logps=values if updates > 1 else None,
        ref_logps=values if loss.kl_beta > 0 else None,
        behaviour_logps=values,
    )
    expected = "(Mean(total, count), {name: Mean}) of scalars, see oarjax.aggregate"
    result = _traced(function, field, expected, values, values, batch)
    means = [result[0], *result[1].values()] if _is_pair(result) else [None]
    if not all(isinstance(m, Mean) and m.total.shape == m.count.shape == () for m in means):
        raise ConfigError(f"{field}: expected {expected}, got {_shapes(result)}")


def check_advantages(
    advantages: AdvantageFunction, section: AdvantageConfig, grading: GradingConfig, *, group: int
) -> None:
    """Trace custom advantages and check that there is one per completion.

    Raises:
        ConfigError: they raised an error, or have another shape.
    """
    field = f"advantage.function: {section.function}"
    rewards, size = _spec(jnp.float32, 2 * group), f"[{2 * group}]"
    values = {r.name: rewards for r in grading.rewards}
    result = _traced(
        lambda r, v: advantages(r, v, group), field, f"advantages {size}", rewards, values, on=f"rewards {size}"
    )
    shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", jnp.int32)
    if shape != (2 * group,) or not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(
            f"{field} returns {_shapes(result)} for rewards {size}; expected one advantage per completion, "
            f"floats {size}"
        )


def _traced(
    function: Callable[..., Any],
    field: str,
    expected: str,
    *args: Any,
    on: str = f"completions [{ROWS}, {LENGTH}]",
) -> Any:
    try:
        return jax.eval_shape(function, *args)
    except Exception as error:
        raise ConfigError(
            f"{field} fails on {on}: {type(error).__name__}: {error}; it must return {expected}"
        ) from error


def _is_pair(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)


def _shapes(result: Any) -> str:
    """Format a result with shapes instead of arrays."""
    text = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", result)
    return str(text) if len(str(text)) <= 200 else f"{str(text)[:200]}..."


def _spec_of(value: Any) -> Any:
    """Return the shape of an array; Python numbers as they are."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if hasattr(value, "shape") else value


def _spec(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape or (ROWS, LENGTH), dtype)

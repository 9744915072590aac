"""Methods of credit and losses of one's own: found by name, and traced at small shapes before a run begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from oarjax.config import Config, ConfigError
from oarjax.credit.method import CreditMethod, Signals, TokenCredit
from oarjax.credit.methods import check_method
from oarjax.system.plugins import import_object
from oarjax.training.programs import TokenLoss
from oarjax.types import AnswerSpan, Mean, TrainBatch

ROWS, MADE = 2, 8


def find_method(cfg: Config) -> CreditMethod | None:
    """The method that credit.function names, where credit.method is custom.

    Raises:
        ConfigError: it is not to be found, not a CreditMethod, or asks for what there is not.
    """
    place = cfg.credit.function
    if cfg.credit.method != "custom" or place is None:
        return None
    try:
        method = import_object(place, field="credit.function", expected=CreditMethod)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_method(method, place=f"credit.function: {place}")
    return method


def find_loss(cfg: Config) -> TokenLoss | None:
    """The loss that loss.function names.

    Raises:
        ConfigError: it is not to be found, or not a function.
    """
    place = cfg.loss.function
    if place is None:
        return None
    try:
        loss: Any = import_object(place, field="loss.function", expected=object)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if callable(loss):
        return cast(TokenLoss, loss)
    raise ConfigError(f"loss.function: {place} is a {type(loss).__name__}; expected a function")


def check_weights(weigh: TokenCredit, own: CreditMethod, *, place: str) -> None:
    """Whether a method gives one weight per token.

    Raises:
        ConfigError: with what it raised, or the shape that it gave.
    """
    values, mask = _spec(jnp.float32), _spec(bool)
    given: dict[str, Any] = {"importance": values, "entropies": values, "tokens": _spec(jnp.int32)}
    span = AnswerSpan(mask, mask, _spec(bool, ROWS))
    args = Signals(**{name: given[name] for name in own.needs}), span, _spec(jnp.float32, ROWS), mask
    found = _traced(weigh, place, f"token weights [{ROWS}, {MADE}]", *args, jax.eval_shape(lambda: jax.random.key(0)))
    shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", jnp.int32)
    if shape != (ROWS, MADE) or not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(
            f"{place} gives {_shown(found)} for completions [{ROWS}, {MADE}]; expected one weight per token, floats "
            f"[{ROWS}, {MADE}]"
        )


def check_loss(loss: TokenLoss, cfg: Config) -> None:
    """Whether a loss gives a sum and a count, and metrics of the same form.

    Raises:
        ConfigError: with what it raised, or what it gave.
    """
    place, values = f"loss.function: {cfg.loss.function}", _spec(jnp.float32)
    batch = TrainBatch(
        tokens=_spec(jnp.int32, ROWS, 2 * MADE),
        valid=_spec(bool, ROWS, 2 * MADE),
        completion=_spec(bool),
        advantages=values,
        old_logps=values if cfg.update.epochs * cfg.update.minibatches > 1 else None,
        ref_logps=values if cfg.loss.kl_beta > 0 else None,
        behaviour_logps=values,
    )
    wanted = "(Mean(total, count), {name: Mean}) of scalars, see oarjax.aggregate"
    found = _traced(loss, place, wanted, values, values, batch)
    means = [found[0], *found[1].values()] if _is_pair(found) else [None]
    if not all(isinstance(m, Mean) and m.total.shape == m.count.shape == () for m in means):
        raise ConfigError(f"{place} gives {_shown(found)}; expected {wanted}")


def _traced(function: Callable[..., Any], place: str, wanted: str, *args: Any) -> Any:
    try:
        return jax.eval_shape(function, *args)
    except Exception as error:
        raise ConfigError(
            f"{place} fails on completions [{ROWS}, {MADE}]: {type(error).__name__}: {error}; it must give {wanted}"
        ) from error


def _is_pair(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)


def _shown(found: Any) -> str:
    """Shapes instead of arrays."""
    text = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", found)
    return str(text) if len(str(text)) <= 200 else f"{str(text)[:200]}..."


def _spec(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape or (ROWS, MADE), dtype)

"""Executed FLOPs of a program: its matrix products, each counted as often as it runs.

XLA's own cost analysis counts the body of a loop once. Here the program's jaxpr is interpreted into a second program
that carries a counter along: loops of known length count by their length, others (OAR-P runs as many chunks as its
rows need) by the trips that the given arrays make them take. What only the values need, and the counter does not, is
dropped by the compiler, so counting is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives
from jax.interpreters import partial_eval

Values = list[Any]

INLINED = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call"}
INLINED |= {"custom_vjp_call", "custom_vjp_call_jaxpr"}
"""Primitives that run the one jaxpr they hold, once."""


def executed_flops(fn: Callable[..., Any], *args: Any) -> float:
    """Count the FLOPs that ``fn(*args)`` spends on matrix products, 2 per multiply-add, accurate to about 1e-4.

    Elementwise work is left out, as in ``oarjax.costs``. Results that nothing uses are not counted, except those
    carried through a while loop.

    Raises:
        ValueError: the program holds work that cannot be counted, such as a kernel.
    """
    return flop_counter(fn, *args)(*args)


def flop_counter(fn: Callable[..., Any], *args: Any) -> Callable[..., float]:
    """Compile ``executed_flops`` of ``fn`` once, for any arrays of the shapes of ``args``."""
    closed_jaxpr = jax.make_jaxpr(fn)(*args)
    jaxpr, used_inputs = partial_eval.dce_jaxpr(closed_jaxpr.jaxpr, [True] * len(closed_jaxpr.jaxpr.outvars))

    @jax.jit
    def count(consts: Values, values: Values) -> Any:
        return _run(jaxpr, consts, values)[1]

    def counted(*args: Any) -> float:
        return float(count(closed_jaxpr.consts, [x for x, keep in zip(jax.tree.leaves(args), used_inputs) if keep]))

    return counted


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> tuple[Values, Any]:
    """Return the jaxpr's results, and its FLOPs: a Python number, or an array where they depend on values."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))
    total: Any = 0.0
    for eqn in jaxpr.eqns:
        values = [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
        outs, flops = _equation(eqn, values)
        total = total + flops
        env.update(zip(eqn.outvars, outs))
    return [v.val if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars], total


def _equation(eqn: Any, values: Values) -> tuple[Values, Any]:
    primitive, params = eqn.primitive, eqn.params
    fixed = _fixed_flops(eqn)
    if fixed is not None:
        outs = primitive.bind(*values, **primitive.get_bind_params(params))
        return (list(outs) if primitive.multiple_results else [outs]), fixed
    if primitive is primitives.while_p:
        return _while(params, values)
    if primitive is primitives.scan_p:
        return _scan(eqn, values)
    if primitive is primitives.cond_p:
        return _cond(params, values)
    (inner,) = _jaxprs(params)
    return _run(inner, _consts(params), values)


def _fixed_flops(eqn: Any) -> float | None:
    """Count the FLOPs of an equation that depend on shapes alone; None if values decide.

    Raises:
        ValueError: a kernel, or another primitive that holds matrix products in a form unknown here.
    """
    name = eqn.primitive.name
    if eqn.primitive is primitives.dot_general_p:
        left, right = eqn.invars
        return _dot_flops(left.aval.shape, right.aval.shape, eqn.params["dimension_numbers"])
    if name == "grouped_dot":
        rows, matrices = (v.aval.shape for v in eqn.invars[:2])
        return 2.0 * math.prod(rows) * matrices[2]
    if name == "grouped_outer":
        left, right = (v.aval.shape for v in eqn.invars[:2])
        return 2.0 * math.prod(left) * right[1]
    if name in ("pallas_call", "conv_general_dilated", "ragged_dot_general", "tpu_custom_call"):
        raise ValueError(f"executed_flops: {name} cannot be counted; count on a CPU, where the plain form runs")
    inner = [_fixed_total(j) for j in _jaxprs(eqn.params)]
    if all(f == 0 for f in inner):
        return 0.0
    if name in INLINED and len(inner) == 1:
        return inner[0]
    if eqn.primitive is primitives.scan_p:
        return None if inner[0] is None else inner[0] * eqn.params["length"]
    if eqn.primitive in (primitives.while_p, primitives.cond_p):
        return None
    raise ValueError(f"executed_flops: matrix products inside {name} cannot be counted")


def _fixed_total(jaxpr: Any) -> float | None:
    flops = [_fixed_flops(eqn) for eqn in jaxpr.eqns]
    return None if any(f is None for f in flops) else sum((f for f in flops if f is not None), 0.0)


def _dot_flops(left: Sequence[int], right: Sequence[int], dimensions: Any) -> float:
    (contracted, _), (batch, _) = dimensions
    inner = math.prod(left[i] for i in contracted)
    rows = math.prod(left)
    columns = math.prod(right) // max(inner * math.prod(left[i] for i in batch), 1)
    return 2.0 * rows * columns if inner and rows else 0.0


def _while(params: Any, values: Values) -> tuple[Values, Any]:
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    m, n = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, start = values[:m], values[m : m + n], values[m + n :]

    def condition(carry: Any) -> Any:
        return _run(cond.jaxpr, cond.consts, [*cond_consts, *carry[0]])[0][0]

    def step(carry: Any) -> Any:
        state, total = carry
        outs, flops = _run(body.jaxpr, body.consts, [*body_consts, *state])
        return outs, total + flops

    return jax.lax.while_loop(condition, step, (start, _zero()))


def _scan(eqn: Any, values: Values) -> tuple[Values, Any]:
    params, body = eqn.params, eqn.params["jaxpr"]
    # What is scanned over has one axis more outside than in the body. (How params count these differs with JAX.)
    body_ranks, eqn_ranks = (_ranks(x.invars) for x in (body.jaxpr, eqn))
    c = sum(a == b for a, b in zip(_ranks(body.jaxpr.outvars), _ranks(eqn.outvars), strict=True))
    k = sum(a == b for a, b in zip(body_ranks, eqn_ranks, strict=True)) - c
    consts, start, xs = values[:k], values[k : k + c], values[k + c :]

    def step(carry: Any, x: Any) -> Any:
        state, total = carry
        outs, flops = _run(body.jaxpr, body.consts, [*consts, *state, *x])
        return (outs[:c], total + flops), outs[c:]

    (end, total), ys = jax.lax.scan(step, (start, _zero()), xs, length=params["length"], reverse=params["reverse"])
    return [*end, *ys], total


def _cond(params: Any, values: Values) -> tuple[Values, Any]:
    index, *operands = values

    def branch(closed_jaxpr: Any) -> Callable[..., Any]:
        def run(*xs: Any) -> Any:
            outs, flops = _run(closed_jaxpr.jaxpr, closed_jaxpr.consts, xs)
            return outs, _zero() + flops

        return run

    return jax.lax.switch(index, [branch(closed_jaxpr) for closed_jaxpr in params["branches"]], *operands)


def _ranks(variables: Sequence[Any]) -> list[int]:
    return [len(v.aval.shape) for v in variables]


def _zero() -> Any:
    return jnp.zeros((), jnp.float32)


def _jaxprs(params: Any) -> list[Any]:
    """Return the jaxprs among an equation's parameters, without their constants."""
    candidates = [v for p in params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    return [getattr(v, "jaxpr", v) for v in candidates if isinstance(v, core.Jaxpr | core.ClosedJaxpr)]


def _consts(params: Any) -> list[Any]:
    closed_jaxprs = [p for p in params.values() if isinstance(p, core.ClosedJaxpr)]
    return list(closed_jaxprs[0].consts) if closed_jaxprs else []

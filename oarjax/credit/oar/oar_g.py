"""OAR-G: importance from one backward pass to the input embeddings, in two named estimators.

``noisy`` is the estimator of arXiv 2601.07408 as published: J = KL(P_clean || P(e + noise)), noise ~ N(0, sigma^2)
on all reasoning embeddings, s_t = |<dJ/de_t at the noisy point, e_t clean>|. It differences two nearly equal
distributions.

``linearised`` (ours) is its limit for small sigma, without that difference: dJ/de = J^T (q - p) with q - p replaced by
its first order p (dz - <p, dz>), dz = jvp(probe, noise). It scales with sigma as ``noisy`` does.
The two are equal to first order only: where sigma is not small beside the embeddings (1e-3 against a std of .02 on
the tests' amplified random nets) they rank tokens differently. With bfloat16 matmul operands the median error of
``noisy`` there was 9% to 90% over six nets, that of ``linearised`` 2% to 9%.

For a scalar probe such as ``answer_joint``, J = phi_clean - phi(e + noise), and the limit is gradient times input,
|<d phi/de_t, e_t>|: no noise, and no factor of sigma in either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from oarjax.costs import RowTokens, clean_flops, gradient_flops
from oarjax.credit.clean_pass import LinearPass, linear_pass
from oarjax.credit.gate import weigh
from oarjax.credit.method import CreditMethod
from oarjax.credit.oar.oar_p import check_units
from oarjax.credit.probe import Probe, divergence, from_inputs, reading_of, scored_tokens, to_inputs
from oarjax.credit.settings import CreditSettings
from oarjax.credit.signals import Context, Scored, probe_of
from oarjax.models.decoder import Decoder
from oarjax.models.policy import Policy
from oarjax.rl.checked import Scalar, ScalarPositive, checked
from oarjax.rl.ranges import Positive
from oarjax.types import AnswerSpan, Params, Rollout

Estimator = Literal["noisy", "linearised"]
Gradient = Callable[[Float[Array, "B T D"]], Float[Array, "B T D"]]
"""From noise on the inputs' embeddings to the gradient of J by them."""


@checked
def gradient_importance(
    policy: Policy,
    params: Params,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    keys: Key[Array, "B"],
    *,
    probe: Probe,
    estimator: Estimator,
    sigma: ScalarPositive,
    draws: Positive,
) -> Float[Array, "B T"]:
    """Compute OAR-G scores |<dJ/de_t, e_t>| >= 0, averaged over ``draws`` noise draws that run as one batch.

    0 outside the reasoning and in rows with no answer. The equation is ``gradient_times_input``.

    Args:
        policy: the model's functions, such as ``make_policy`` gives.
        params: its parameters; no gradient flows to them.
        tokens: prompt and completion, N = S + T.
        valid: positions that hold a token.
        span: reasoning and answer of the completions, [B, T], as ``find_answers`` gives them.
        keys: one per row (``row_keys``), so that a row's noise depends neither on its neighbours nor on microbatches.
        probe: the outcome, see ``outcome_probe``.
        estimator: ``noisy`` as published (arXiv 2601.07408), or ``linearised``, its limit for small sigma (ours).
        sigma: standard deviation of the noise, in the units of the embeddings, > 0: without noise all scores are 0.
            May be traced.
        draws: noise draws, >= 1; one is in good part a random ranking. Linearised with a scalar probe has no noise and
            ignores it.

    Raises:
        ArgumentError: an argument does not fit the signature.
        ValueError: no prompt position.
    """
    params = policy.head(jax.lax.stop_gradient(params))
    clean = linear_pass(policy, params, tokens, valid, completion_length=span.answer.shape[1])
    return gradient_scores(
        policy, params, clean, tokens, valid, span, keys, probe=probe, estimator=estimator, sigma=sigma, draws=draws
    )


def gradient_scores(
    policy: Policy,
    params: Params,
    clean: LinearPass,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    keys: Key[Array, "B"],
    *,
    probe: Probe,
    estimator: Estimator,
    sigma: Scalar,
    draws: int,
) -> Float[Array, "B T"]:
    """Compute ``gradient_importance`` after a clean pass."""
    _, length, width = clean.embeddings.shape

    def one_draw(draw: Int[Array, ""]) -> Float[Array, "B T"]:
        per_draw = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, draw)
        noise = embedding_noise(per_draw, length=length, width=width, sigma=sigma, dtype=clean.embeddings.dtype)
        return gradient_times_input(policy, params, clean, tokens, valid, span, noise, probe=probe, estimator=estimator)

    if estimator == "linearised" and probe.kind == "scalar":
        draws = 1
    return jnp.mean(jax.vmap(one_draw)(jnp.arange(draws)), axis=0)


def gradient_times_input(
    policy: Policy,
    params: Params,
    clean: LinearPass,
    tokens: Int[Array, "B N"],
    valid: Bool[Array, "B N"],
    span: AnswerSpan,
    noise: Float[Array, "B T D"],
    *,
    probe: Probe,
    estimator: Estimator,
) -> Float[Array, "B T"]:
    """Compute s_t = |<dJ/de_t, e_t>| under this noise on the completion; noise outside the reasoning is unused.

    Raises:
        ValueError: unknown estimator.
    """
    if estimator not in ("noisy", "linearised"):
        raise ValueError(f"estimator: expected noisy or linearised, got {estimator!r}")
    reading, scored = reading_of(tokens, valid, span), scored_tokens(span, probe)

    def read(hidden: Float[Array, "B T D"]) -> Array:
        return probe.read(policy, params, hidden, reading)

    gradient = {"noisy": noisy_gradient, "linearised": linearised_gradient}[estimator](clean, probe, read)
    on_reasoning = to_inputs(jnp.where(scored[..., None], noise, 0)).astype(clean.embeddings.dtype)
    product = jnp.sum(gradient(on_reasoning) * clean.embeddings, axis=-1)
    return jnp.where(scored, jnp.abs(from_inputs(product)), 0)


def noisy_gradient(clean: LinearPass, probe: Probe, read: Callable[[Float[Array, "B T D"]], Array]) -> Gradient:
    """Compute dJ/de at e + noise. J is summed over rows: no row sees another, so the gradient is each row's own."""
    clean_outputs = read(clean.hidden)

    def gradient(noise: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        hidden, pull = jax.vjp(clean.states, clean.embeddings + noise)
        return pull(jax.grad(lambda h: jnp.sum(divergence(probe, clean_outputs, read(h))))(hidden))[0]

    return gradient


def linearised_gradient(clean: LinearPass, probe: Probe, read: Callable[[Float[Array, "B T D"]], Array]) -> Gradient:
    """Compute J^T u at e, u = softmax(z(e + noise)) - softmax(z(e)) to first order; for a scalar d phi/de."""
    if probe.kind == "scalar":
        constant = clean.pull(jax.grad(lambda h: jnp.sum(read(h)))(clean.hidden))
        return lambda noise: constant
    logits, push = jax.linearize(read, clean.hidden)
    pull = jax.linear_transpose(push, clean.hidden)
    p = jax.nn.softmax(logits)

    def gradient(noise: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        dz = push(clean.push(noise))
        return clean.pull(pull(p * (dz - jnp.sum(p * dz, axis=-1, keepdims=True)))[0])

    return gradient


@checked
def row_keys(key: Key[Array, ""], rows: Int[Array, "B"]) -> Key[Array, "B"]:
    """Derive one key per row from the number that the row has in the whole rollout batch.

    Args:
        key: the iteration's.
        rows: numbers of the rows.
    """
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)


def embedding_noise(
    keys: Key[Array, "B"], *, length: int, width: int, sigma: Scalar, dtype: DTypeLike
) -> Float[Array, "B T D"]:
    """Draw sigma times standard normal numbers. A longer row of the same key begins with the same numbers."""

    # One key per token: whether the numbers of a longer array begin with a shorter one's is up to the generator.
    def row(key):
        return jax.vmap(lambda t: jax.random.normal(jax.random.fold_in(key, t), (width,), dtype))(jnp.arange(length))

    return sigma * jax.vmap(row)(keys)


# The method ---------------------------------------------------------------------------------------------------------


def score(
    policy: Policy, params: Params, r: Rollout, span: AnswerSpan, keys: Key[Array, "B"], context: Context
) -> Scored:
    """Score a rollout by the configured estimator and probe."""
    params = policy.head(params)
    clean = linear_pass(policy, params, r.tokens, r.valid, completion_length=span.answer.shape[1])
    return Scored(score_shared(policy, params, clean, r, span, keys, context), clean.hidden)


def score_shared(
    policy: Policy,
    params: Params,
    clean: LinearPass,
    r: Rollout,
    span: AnswerSpan,
    keys: Key[Array, "B"],
    context: Context,
) -> Float[Array, "B T"]:
    """Score a rollout after a clean pass over it."""
    cfg = context.credit
    return gradient_scores(
        policy,
        policy.head(params),
        clean,
        r.tokens,
        r.valid,
        span,
        keys,
        probe=probe_of(context),
        estimator=cfg.estimator,
        sigma=cfg.sigma,
        draws=cfg.draws,
    )


def noisy(cfg: CreditSettings) -> bool:
    """Return whether another key gives other scores: not where the limit of a scalar probe is taken."""
    return cfg.estimator == "noisy" or cfg.probe.mode != "answer_joint"


def forwards(settings: CreditSettings, row: RowTokens, d: Decoder) -> float:
    """Count the passes."""
    return gradient_flops(d, row, draws=settings.draws) / clean_flops(d, row)


METHOD = CreditMethod(
    weigh,
    name="oar_g",
    needs=("importance",),
    score=score,
    shared=score_shared,
    answer="probed",
    check=check_units,
    forwards=forwards,
    noisy=noisy,
    grouped=True,
)

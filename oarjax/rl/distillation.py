"""On-policy distillation: advantages of a student's own tokens from a teacher's log-probs."""

from __future__ import annotations

from jaxtyping import Array, Float

from oarjax.rl.checked import Scalar, checked


@checked
def distillation_advantages(
    logps: Float[Array, "B T"], teacher_logps: Float[Array, "B T"], *, weight: Scalar = 1.0
) -> Float[Array, "B T"]:
    """Compute weight * (log teacher - log student) of each token that the student drew.

    The student's expected gradient under these advantages is that of -KL(student || teacher) of every next token, at
    the prefixes that the student writes: mode-seeking, and 0 where they agree. Every token answers for its own KL, not
    for later ones (a discount of 0), as in "On-Policy Distillation" (Thinking Machines Lab, 2025); GKD (arXiv
    2306.13649) with lambda = 1 and the reverse KL is the same with whole distributions instead of the drawn token.
    Departure: the student's log-probs are the trainer's, not the sampler's.

    Args:
        logps: of the tokens under the policy that drew them, nats.
        teacher_logps: under the teacher, nats.
        weight: >= 0; default 1.0.
    """
    return weight * (teacher_logps - logps)

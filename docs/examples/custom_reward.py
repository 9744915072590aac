"""Define custom rewards.

oarjax train configs/demo.yaml grading.plugins=[docs/examples/custom_reward.py] \
    grading.rewards="[{name: exact}, {name: brief, weight: 0.2}]"
"""

from oarjax import Sample, reward
from oarjax.grading.rewards import Unparseable, has_answer


@reward("brief")
def brief(sample: Sample) -> float:
    """1 for an answer within 20 tokens, falling to 0 at 60."""
    if not has_answer(sample):
        return 0.0
    return min(max((60 - sample.tokens) / 40, 0.0), 1.0)


@reward("close")
def close(sample: Sample) -> float:
    """How near a whole number is to the reference. Raising Unparseable is a verdict, anything else a crash."""
    try:
        found, wanted = int(sample.extracted or ""), int(sample.answer)
    except ValueError:
        raise Unparseable("answer", sample.extracted or "") from None
    return 1 / (1 + abs(found - wanted))

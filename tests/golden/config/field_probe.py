"""A probe of one's own for the test of credit.probe.function: the sum of the last state."""

from oarjax.credit.probe import Probe


def _sum_of_last(policy, params, hidden, at):
    return hidden[:, -1].sum(-1)


last_state = Probe(read=_sum_of_last, kind="scalar", reads="completion")

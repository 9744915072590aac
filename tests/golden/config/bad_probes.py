"""Custom probes, each with one mistake."""

from oarjax.credit.probe import Probe


def _per_token(policy, params, hidden, at):
    return hidden.sum(-1)


def _raising(policy, params, hidden, at):
    return hidden @ hidden  # widths do not fit


per_token = Probe(read=_per_token, kind="scalar", reads="completion")
raising = Probe(read=_raising, kind="scalar", reads="completion")
of_kind = Probe(read=_per_token, kind="vector", reads="completion")

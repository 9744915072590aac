import subprocess
import sys

import pytest

import oarjax


def test_every_public_name_is_there():
    for name in oarjax.__all__:
        assert getattr(oarjax, name) is not None


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'grop_loss'; public names: .*policy_loss"):
        _ = oarjax.grop_loss


def test_importing_opens_no_device():
    code = "import sys, oarjax; print('jax' in sys.modules, 'transformers' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]

"""Values that strict JSON does not have, written and read back."""

import json
import math

import numpy as np
import pytest

from oarjax.system.json import number, numbers, to_json, to_plain


def test_what_is_not_finite_becomes_null_at_any_depth():
    tree = {"a": [1.5, math.nan, (math.inf, {"b": -math.inf})], "c": True, "d": None, "e": 7, "f": "NaN"}
    text = to_json(tree)
    assert text == '{"a": [1.5, null, [null, {"b": null}]], "c": true, "d": null, "e": 7, "f": "NaN"}'
    assert json.loads(to_json(tree, indent=1)) == json.loads(text)
    assert math.isnan(tree["a"][1]), "the argument stays as it was"


def test_numpy_values_become_python_values():
    tree = {"s": np.float32(0.5), "n": np.float64("nan"), "i": np.int32(3), "b": np.bool_(True)}
    assert to_plain(tree) == {"s": 0.5, "n": None, "i": 3, "b": True}
    assert to_plain(np.array([[1.0, np.nan], [np.inf, 2.0]])) == [[1.0, None], [None, 2.0]]


def test_model_text_stays_ascii_and_comes_back():
    evil = "</script>\u2028\ud83d\x1b"
    assert to_json(evil).isascii()
    assert json.loads(to_json(evil)) == evil


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="not JSON serializable"):
        to_json({"path": object()})


def test_null_reads_back_as_nan():
    assert math.isnan(number(None))
    assert number(2) == 2.0
    np.testing.assert_array_equal(numbers([1.0, None, 3]), [1.0, np.nan, 3.0])

"""The API reference of the site names every public name, and is made without a warning."""

import importlib.util
import logging
import re

from conftest import ROOT

import oarjax


def maker():
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "docs" / "api_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_public_name_and_is_made_without_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        written = maker().page()
    assert not [record.getMessage() for record in caplog.records]
    assert set(re.findall(r"^### (\w+)$", written, re.M)) == set(oarjax.__all__) - {"__version__"}
    linked = set(re.findall(r"\[\w+\]\(#(\w+)\)", written))
    assert linked == {name.lower() for name in oarjax.__all__} - {"__version__"}
    assert "oarjax.group_advantages(jnp.array" in written  # an example

"""The API reference of the site names every public name, and is made without a warning."""

import importlib.util
import logging
import re

import griffe
import pytest
from conftest import ROOT

import oarjax


@pytest.fixture(scope="module")
def functions():
    package = griffe.load("oarjax", search_paths=[str(ROOT)], docstring_parser="google")
    public = (
        package[f"{module}.{name}".removeprefix("oarjax.")] for module, names in oarjax._HOME.items() for name in names
    )
    return [each for each in public if each.is_function]


def test_public_functions_explain_every_argument_and_its_default(functions):
    assert len(functions) > 40
    for function in functions:
        sections = [section for section in function.docstring.parse("google") if section.kind.value == "parameters"]
        about = {item.name: " ".join(item.description.split()) for section in sections for item in section.value}
        assert list(about) == [parameter.name for parameter in function.parameters], function.name
        for parameter in function.parameters:
            default = {"1e-4": "0.0001", "''": "''"}.get(str(parameter.default), str(parameter.default).strip("'"))
            if parameter.default is not None and parameter.name != "shard_bytes":
                assert f"default {default}" in about[parameter.name].replace("Default", "default"), (
                    function.name,
                    parameter,
                )


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
    assert "oarjax.group_advantages(rewards, " in written  # an example

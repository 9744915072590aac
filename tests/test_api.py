"""The API reference is what the docstrings say, and names every public name."""

import importlib.util
import logging
import re

from conftest import ROOT

import oarjax

DOCS = ROOT / "docs"


def maker():
    spec = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date_and_made_without_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        written = maker().page()
    assert not [record.getMessage() for record in caplog.records]
    assert set(re.findall(r"^### (\w+)$", written, re.M)) == set(oarjax.__all__) - {"__version__"}
    assert (DOCS / "api.md").read_text(encoding="utf-8") == written, "run: python docs/make_api.py"


def test_links_of_the_page_lead_somewhere():
    page = (DOCS / "bring_your_own.md").read_text(encoding="utf-8")
    files = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", page)}
    assert files
    assert all((DOCS / file).exists() for file in files if file)
    assert "## What is stable" in page

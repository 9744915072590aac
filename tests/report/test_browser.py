"""Pages in Chromium, where it is installed: nothing is wider than a phone, switches work, and nothing jumps."""

import html
import json
import re
import shutil
import subprocess

import pytest
from lab_result import completion, result
from test_page import group, page

from oarjax.tools.lab.page import write_lab_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

REPORT = """
const at = n => [...d.querySelectorAll('.at.i' + n)].map(e => w.getComputedStyle(e).display);
out.before = [at(1), at(9)];
d.querySelector('#i1').click();
out.after = [at(1), at(9)];
"""
CREDIT = """
const second = d.querySelector('.second'), token = d.querySelector('.first span');
const colour = pre => w.getComputedStyle(pre.querySelector('span')).backgroundColor;
out.before = w.getComputedStyle(second).display;
d.querySelector('#b1').click();
out.after = w.getComputedStyle(second).display;
out.colours = [colour(d.querySelector('.first')), colour(second)];
w.scrollTo(0, d.querySelector('.completions').getBoundingClientRect().top + w.scrollY);
const y = w.scrollY;
d.querySelector('#a1').focus();
out.moved = [y > 0, w.scrollY - y];
"""
COMMON = """
const token = d.querySelector('.tokens span[data-tip]');
token.focus();
out.tip = w.getComputedStyle(token, '::after').content;
out.wide = d.documentElement.scrollWidth - w.innerWidth;
"""


def shown(tmp_path, text: str, script: str, *, width: int) -> dict:
    """Open a page in a frame of this width, run a script on its document d and window w, and return what it noted."""
    text = re.sub(r"<meta http-equiv.*?>", "", text)  # the page itself would let no script in
    frame = f'<iframe id="f" style="width:{width}px;height:700px" srcdoc="{html.escape(text)}"></iframe>'
    begin = "onload = () => { const w = f.contentWindow, d = f.contentDocument, out = {};"
    note = "const p = document.createElement('pre'); p.id = 'out'; p.textContent = JSON.stringify(out);"
    run = f"{begin}\n{{ {script} }}\n{{ {COMMON} }}\n{note} document.body.append(p); }};"
    path = tmp_path / "frame.html"
    path.write_text(f"<!doctype html><body>{frame}<script>{run}</script></body>", encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    (noted,) = re.findall(r'<pre id="out">(.*?)</pre>', done.stdout, re.S)
    return json.loads(html.unescape(noted))


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1000])
def test_report_and_credit_page_in_a_browser(tmp_path, width):
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    text, _ = page(tmp_path, groups=[group(1, [1.0, 0.0]), group(9, [1.0, 0.5])])
    found = shown(tmp_path, text, REPORT, width=width)
    assert found["before"] == [["none"], ["block"]]  # the last iteration first
    assert found["after"] == [["block"], ["none"]]
    assert "weight 0.100" in found["tip"]
    assert found["wide"] <= 0

    write_lab_page(tmp_path / "credit.html", result(completions=[completion()] * 12))
    found = shown(tmp_path, (tmp_path / "credit.html").read_text(), CREDIT, width=width)
    assert (found["before"], found["after"]) == ("none", "block")
    assert len(set(found["colours"])) == 2  # each half by its own method
    assert "OAR-P: weight" in found["tip"]
    assert found["wide"] <= 0
    if width == 1000:  # wide enough for the bar of methods to stay in view
        assert found["moved"] == [True, 0]

"""Text of every page stands out from its background: 4.5 to 1, computed from the pages' own colours."""

import re

import pytest
from conftest import ROOT

from oarjax.report.colours import DARK, LIGHT

PAGES = {name: (ROOT / "oarjax" / name).read_text() for name in ("report/shell.html", "report/shown.html")}
TINT = 0.62
"""Opacity of the strongest tint behind a token, as in the templates."""
Colour = tuple[float, float, float]


def hexadecimal(text: str) -> Colour:
    text = text.lstrip("#")
    text = "".join(2 * c for c in text) if len(text) == 3 else text
    return tuple(int(text[i : i + 2], 16) for i in (0, 2, 4))


def schemes(page: str) -> list[dict[str, Colour]]:
    """The page's colours by name: light, then dark if it has them."""
    blocks = re.findall(r"(?::root|\.oarjax) \{(.*?)\}", page, re.S)
    found = []
    for block in [b for b in blocks if "--ink" in b]:
        colours = {name: hexadecimal(value) for name, value in re.findall(r"--([\w-]+): (#\w+)", block)}
        colours |= {
            name: tuple(map(float, value.split())) for name, value in re.findall(r"--([\w-]+): (\d+ \d+ \d+)", block)
        }
        found.append({"card": (255.0, 255.0, 255.0), "page": (255.0, 255.0, 255.0)} | colours)
    return found


def luminance(colour: Colour) -> float:
    parts = [c / 255 for c in colour]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: Colour, b: Colour) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def over(colour: Colour, opacity: float, below: Colour) -> Colour:
    return tuple(opacity * c + (1 - opacity) * b for c, b in zip(colour, below))


@pytest.mark.parametrize("name", PAGES)
def test_text_has_a_contrast_of_four_and_a_half(name):
    found = schemes(PAGES[name])
    assert len(found) == (1 if name == "report/shown.html" else 2)
    for c in found:
        pairs = {
            (text, ground): (c[text], c[ground])
            for text in ("ink", "soft", "good", "bad")
            for ground in ("card", "page")
        }
        pairs |= {
            ("ink", tint): (c["ink"], over(c[tint], TINT, c["card"])) for tint in ("boost", "suppress") if tint in c
        }
        if "accent" in c:
            pairs["switch"] = (c["card"], c["accent"])
            pairs["tip"] = (c["tip-ink"], c["tip"])
        low = {pair: round(contrast(*colours), 2) for pair, colours in pairs.items() if contrast(*colours) < 4.5}
        assert low == {}


def test_lines_have_a_contrast_of_three_and_known_colours():
    for colours, ground in ((LIGHT, "#ffffff"), (DARK, "#181c22")):
        assert [c for c in colours if contrast(hexadecimal(c), hexadecimal(ground)) < 3] == []
    assert round(contrast((0, 0, 0), (255, 255, 255)), 2) == 21  # the formula itself
    assert round(contrast(hexadecimal("#777"), hexadecimal("#fff")), 2) == 4.48

"""Hostile text, a reader that fails on broken pages, and harmless content of pages."""

from html.parser import HTMLParser

from oarjax.report.files import CompletionRow

VOID = {"meta", "input"}
EVIL = '<script>alert(1)</script>"onload="x\' </pre><img src=http://evil.example/x.png>{{ 7 * 7 }}\u202e\x1b[2J'


class Reader(HTMLParser):
    """Collect the tags, attributes and text of a page; fail on tags that do not close."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.open, self.text = [], [], [], ""
        self.feed(html)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def completion(**changes) -> CompletionRow:
    fields = {
        "prompt": "1+1?",
        "completion": "1+1=2\n#### 2",
        "reward": 1.0,
        "answer": "2",
        "verdict": "graded",
        "advantage": 0.75,
        "tokens": ["1+1", "=2\n", "#### ", "2"],
        "weights": [0.1, 1.9, 1.0, 1.0],
        "is_reasoning": [True, True, False, False],
        "is_answer": [False, False, False, True],
    }
    return CompletionRow(**(fields | changes))


def runs() -> dict:
    records = [{"iteration": n, "time": 1.0, "reward": 0.5 + n / 100, "entropy": None} for n in range(4)]
    return {"OAR-G": [*records, {"iteration": 4, "pass_at_1": 0.9}], "GRPO": records}

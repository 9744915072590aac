"""A text that would break a careless page, and a reader that notices."""

from html.parser import HTMLParser

VOID = {"meta", "input"}
EVIL = '<script>alert(1)</script>"onload="x\' </pre><img src=http://evil.example/x.png>{{ 7 * 7 }}\u202e\x1b[2J'


class Reader(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not close."""

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

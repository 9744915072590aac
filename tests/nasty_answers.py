"""List answers that could hang, crash, fool or take over a grader, and odd answers that have a right verdict.

Every entry names the accepted values of the reward "math": "right" (1), "wrong" (0, read or not), "not right" (anything
but 1: a hostile answer may lose its verdict but never earn a reward), or None (any verdict).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Literal, NamedTuple

Expected = Literal["right", "wrong", "not right"] | None


class Nasty(NamedTuple):
    name: str
    completion: str
    reference: str
    expected: Expected


def corpus(canary: str) -> list[Nasty]:
    """Return all entries; those that contain code would touch or write the file ``canary``."""
    entries = list(
        chain(
            *(towers(), factorials(), braces(), megabytes(), invisible(), injections(canary), macros(canary)),
            *(unicode_digits(), sets(), percent_and_units(), numbers(), exponents(), matrices(), deep(), heavy()),
            *(broken_text(), markers(), relations()),
        )
    )
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError(f"two entries are called {next(n for n in names if names.count(n) > 1)!r}")
    return entries


def boxed(kind: str, rows: list[tuple[str, str, Expected]]) -> Iterator[Nasty]:
    """Turn rows (answer, reference, expected) into completions that end in a box."""
    for number, (answer, reference, expected) in enumerate(rows):
        yield Nasty(f"{kind} {number}", rf"so it is \boxed{{{answer}}}", reference, expected)


def towers() -> Iterator[Nasty]:
    rows: list[tuple[str, str, Expected]] = []
    for height in (1, 2, 12):
        rows.append(("9^{" * height + "9" + "}" * height, "7", "not right"))
    for power in (2, 3, 5, 1000):
        rows.append((f"10^{{10^{{{power}}}}}", "7", "not right"))
    rows += [(f"{n}^{{{n}^{{{n}}}}}", "7", "not right") for n in (7, 12345)]
    rows += [
        ("(10^{10})^{(10^{10})}", "7", "not right"),
        ("9^{-9^{9^9}}", "0", "not right"),
        (r"\sqrt[9^{9^9}]{9}", "1", "not right"),
        ("9^{9^{9^{9}}} - 9^{9^{9^{9}}} + 8", "7", "not right"),
        ("2^{2^{2^{2}}}", "65536", "right"),
        ("2^{2^{2^{2}}}", "65537", "wrong"),
        ("2^{-1}", "0.5", "right"),
        ("10^3", "1000", "right"),
        ("2^{10}", "1024", "right"),
        ("2^{10}", "1023", "wrong"),
    ]
    yield from boxed("tower", rows)


def factorials() -> Iterator[Nasty]:
    yield from boxed(
        "factorial",
        [
            ("5!", "120", "right"),
            ("5!", "121", "wrong"),
            ("10!", "3628800", "right"),
            ("0!", "1", "right"),
            (r"\binom{10}{3}", "120", "right"),
            (r"\binom{5}{2}", "10", "right"),
            (r"\binom{5}{2}", "11", "wrong"),
            ("(9!)!", "7", "not right"),
            ("(((3!)!)!)!", "7", "not right"),
            ("(10^{10^{10}})!", "7", "not right"),
            ("99999!", "7", "not right"),
            ("7" + "!" * 50, "7", "not right"),
            (r"\binom{10^{9}}{5 \cdot 10^{8}}", "7", "not right"),
            (r"\binom{10^{9^9}}{7}", "7", "not right"),
            (r"\frac{(10^8)!}{(10^8)!} \cdot 8", "7", "not right"),
        ],
    )


def braces() -> Iterator[Nasty]:
    whole = [
        (r"\boxed{7", "wrong"),
        (r"\boxed{7}}", "right"),
        (r"\boxed{{7}}", "right"),
        (r"\boxed{{{{7}}}}", "right"),
        (r"\boxed7", "wrong"),
        (r"\boxed{}", "wrong"),
        (r"\boxed{   }", "wrong"),
        (r"\boxed{7}{", "right"),
        (r"{{{{{ \boxed{7}", "right"),
        (r"}}}}} \boxed{7}", "right"),
        (r"\boxed{\{7}", "wrong"),
        (r"\boxed{7 \boxed{8", "wrong"),
        (r"\boxed{7} and \boxed{8", "right"),
        (r"\boxed{\frac{7}{1}", "wrong"),
        (r"\boxed{\frac{7}}", "wrong"),
        (r"\boxed{\frac{}{}}", "wrong"),
        (r"\boxed{7)}", None),
        (r"\boxed{(7}", None),
        (r"\boxed{[7}", None),
        (r"\boxed{\left(7\right.}", None),
        (r"\boxed{" * 2000, "wrong"),
        ("}" * 100_000 + r"\boxed{7}", "right"),
        (r"\boxed{" * 1000 + "7" + "}" * 1000, "right"),
        (r"\boxed{" * 1000 + "7" + "}" * 999, "right"),
        (r"\boxed{" + "{}" * 20_000 + "}", "wrong"),
    ]
    for number, (completion, expected) in enumerate(whole):
        yield Nasty(f"braces {number}", completion, "7", expected)  # type: ignore[arg-type]
    for depth in (10, 50, 500, 20_000):
        for left, right in (("{", "}"), ("(", ")"), (r"\left(", r"\right)"), (r"\sqrt{", "}"), (r"\frac{1}{", "}")):
            expected: Expected = "not right" if left.startswith("\\s") else None  # 1/(1/7) is 7
            yield Nasty(f"{depth} x {left}", rf"\boxed{{{left * depth}7{right * depth}}}", "7", expected)


def megabytes() -> Iterator[Nasty]:
    size = 1_000_000
    yield from boxed(
        "megabyte",
        [
            ("7" * size, "7", "wrong"),
            ("0" * size + "7", "7", "right"),
            ("7" + " " * size, "7", "right"),
            ("7." + "0" * size, "7", "right"),
            ("7" * size, "7" * size, "right"),
            ("7" * size + "8", "7" * (size + 1), "wrong"),
            ("x" * size, "7", "wrong"),
            ("7+" * (size // 2) + "7", "7", "wrong"),
            (r"\frac{1}{2}" * (size // 11), "7", "wrong"),
            ("$" * size, "7", "wrong"),
            ("\\" * size + " ", "7", "wrong"),
            ("1," * (size // 2) + "1", "7", "wrong"),
            ("final answer is " * (size // 16), "7", "wrong"),
            ("é数🙂" * (size // 3), "7", "wrong"),
        ],
    )
    yield Nasty("megabyte before", "x" * size + r"\boxed{7}", "7", "right")
    yield Nasty("megabyte after", r"\boxed{7}" + "x" * size, "7", "right")
    yield Nasty("megabyte of boxes", r"\boxed{7}" * (size // 9), "7", "right")
    yield Nasty("megabyte of open boxes", r"\boxed{" * (size // 7), "7", "wrong")
    yield Nasty("megabyte of spaces in the marker", r"\boxed" + " " * size + "{7}", "7", "right")
    yield Nasty("megabyte without an answer", "seven " * (size // 6), "7", "wrong")


def invisible() -> Iterator[Nasty]:
    signs = "\x00\x01\x07\x08\x0b\x0c\x1b\x7f\x85\xa0\xad\u061c\u180e\u200b\u200c\u200d\u200e\u200f\u2028\u2029"
    signs += "\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff\ufff9\U000e0001\U0010ffff"
    for sign in signs:
        yield Nasty(f"U+{ord(sign):04X} in front", rf"\boxed{{{sign}7}}", "7", None)
        yield Nasty(f"U+{ord(sign):04X} inside", rf"\boxed{{1{sign}7}}", "71", "not right")
    yield Nasty("bidi spoof", "\\boxed{\u202e17\u202c}", "71", "not right")
    yield Nasty("terminal escape", "\\boxed{\x1b[2J\x1b[31m7}", "8", "not right")
    yield Nasty("invisible around the box", "\u202e\u200b\x00\\boxed{7}\x00\u200b", "7", "right")


def injections(canary: str) -> Iterator[Nasty]:
    code = {
        "import": f"__import__('os').system('touch {canary}')",
        "open": f"open('{canary}','w').write('x')",
        "exec": f"exec(\"open('{canary}','w')\")",
        "lambda": f"(lambda: open('{canary}','w'))()",
        "pathlib": f"__import__('pathlib').Path('{canary}').touch()",
        "comprehension": f"[open('{canary}','w') for _ in (1,)]",
        "walrus": f":=open('{canary}','w')",
        "statements": f"1\nimport os\nos.system('touch {canary}')\n",
    }
    around = {
        "bare": "%s",
        "sum": "7 + %s",
        "text": r"\text{%s}",
        "operatorname": r"\operatorname{%s}",
        "called operator": r"\operatorname{%s}(1)",
        "mathrm": r"\mathrm{%s}",
        "hat": r"\hat{%s}",
        "variable": r"\variable{%s}",
        "subscript": "x_{%s}",
        "argument": "f(%s)",
        "fraction": r"\frac{%s}{1}",
        "series": r"\sum_{n=0}^{\infty} \frac{\variable{%s}^n}{n!}",
        "hat in a series": r"\sum_{n=0}^{\infty} \frac{\hat{%s}^n}{n!}",
    }
    for name, payload in code.items():
        for place, frame in around.items():
            yield Nasty(f"{name} in {place}", rf"\boxed{{{frame % payload}}}", "7", "not right")
    for name in ("import", "open", "walrus"):  # sets are sorted by their values in floating point
        one = around["series"] % code[name]
        yield Nasty(f"{name} in a series in a set", rf"\boxed{{\{{{one}, 1\}}}}", r"\{1, 2\}", "not right")
        yield Nasty(f"{name} in a series beside x", rf"\boxed{{{one} + x}}", "x + 1", "not right")
        yield Nasty(f"{name} in the reference too", rf"\boxed{{{one} + x}}", f"{one} + x + 1", "not right")
    singles = [
        "().__class__.__bases__[0].__subclasses__()",
        "''.__class__.__mro__[1].__subclasses__()",
        "'{0.__class__.__init__.__globals__}'.format(1)",
        f"f\"{{open('{canary}','w')}}\"",
        "getattr(getattr(1, '__class__'), '__bases__')",
        "globals()",
        "breakpoint()",
        "input()",
        "exit()",
        "__builtins__",
        "S('7')",
        "sympify('7')",
        "parse_expr('7')",
        "eval('7')",
        "lambda: 7",
        "(lambda x: x)(7)",
        "@exec\n@input\nclass X: pass",
        "os.system",
        "Symbol('x').__class__",
        "np.load('x', allow_pickle=True)",
        "%s%s%s%n%n%n",
        "${7*1}",
        "{{7*1}}",
        "'; DROP TABLE answers; --",
        "<script>alert(7)</script>",
        "`touch x`",
        "$(touch x)",
        "|| touch x ||",
        "0x7fffffff",
        "7 if True else 8",
        "import os",
    ]
    for number, text in enumerate(singles):
        yield Nasty(f"code {number}", rf"\boxed{{{text}}}", "1234", "not right")


def macros(canary: str) -> Iterator[Nasty]:
    rows = [
        rf"\write18{{touch {canary}}}",
        rf"\immediate\write18{{touch {canary}}} 7",
        r"\input{/etc/passwd}",
        r"\include{/etc/passwd}",
        r"\verbatiminput{/etc/passwd}",
        r"\lstinputlisting{/etc/passwd}",
        rf"\newwrite\x \openout\x={canary} \write\x{{7}}",
        r"\def\x{\x\x}\x",
        r"\newcommand{\seven}{1234}\seven",
        r"\loop\iftrue\repeat",
        r"\csname input\endcsname{/etc/passwd}",
        r"\catcode`\{=12",
        r"\expandafter\expandafter\expandafter\x",
        r"\directlua{os.execute('id')}",
        r"\href{javascript:alert(7)}{7}",
        r"\includegraphics{http://127.0.0.1/x.png}",
        r"\usepackage{shellesc}",
        r"\end{document}",
        "^^5c^^77^^72^^69^^74^^65",
    ]
    yield from boxed("macro", [(row, "1234", "not right") for row in rows])


def unicode_digits() -> Iterator[Nasty]:
    scripts = {"fullwidth": 0xFF10, "Arabic": 0x660, "Persian": 0x6F0, "Devanagari": 0x966, "Bengali": 0x9E6}
    scripts |= {"Thai": 0xE50, "Tibetan": 0xF20, "Khmer": 0x17E0, "bold": 0x1D7CE, "monospace": 0x1D7F6}
    for name, zero in scripts.items():
        seven, four = chr(zero + 7), chr(zero + 4)
        yield Nasty(f"{name} digit", rf"\boxed{{{seven}}}", "7", "right")
        yield Nasty(f"{name} digits", rf"\boxed{{{seven}{four}}}", "74", "right")
        yield Nasty(f"{name} digits, wrong", rf"\boxed{{{four}{seven}}}", "74", "wrong")
    for sign in "⁷₇⑦❼Ⅶ七𝟕½¾∞〇":
        yield Nasty(f"sign {sign}", rf"\boxed{{{sign}}}", "1234", "not right")


def sets() -> Iterator[Nasty]:
    yield from boxed(
        "set",
        [
            (r"\{1,2\}", r"\{2,1\}", "right"),
            (r"\{1, 2, 2\}", r"\{1,2\}", "right"),
            (r"\{1,2\}", r"\{1,3\}", "wrong"),
            (r"\{1,2\}", r"\{1,2,3\}", "wrong"),
            (r"\left\{1,2\right\}", r"\{1,2\}", "right"),
            (r"\{\frac12, 1\}", r"\{1, 0.5\}", "right"),
            ("1,2", "2,1", "right"),
            ("2, 1", r"\{1, 2\}", "right"),
            ("(1,2)", "(1, 2)", "right"),
            ("(1,2)", "(2,1)", "wrong"),
            ("(1,2,3)", "(1,2,3)", "right"),
            ("(1,2,3)", "(1,3,2)", "wrong"),
            ("[1,2]", "[1, 2]", "right"),
            ("[1,2]", "[1,2)", "wrong"),
            ("(1,2]", "[1,2]", "wrong"),
            ("[1,2)", r"\left[1,2\right)", "right"),
            (r"(-\infty, 3]", r"(-\infty,3]", "right"),
            (r"(-\infty, 3)", r"(-\infty,3]", "wrong"),
            (r"(-\infty,0) \cup (0,\infty)", r"(0,\infty) \cup (-\infty,0)", "right"),
            (r"(-\infty,0) \cup (1,\infty)", r"(-\infty,0) \cup (0,\infty)", "wrong"),
            (r"\emptyset", r"\emptyset", "right"),
            (r"\emptyset", r"\{0\}", "wrong"),
            (r"\mathbb{R}", r"(-\infty,\infty)", None),
            (r"\{x : x > 1\}", r"(1,\infty)", None),
            (r"\{1,2,\ldots,10\}", r"\{1,2\}", "not right"),
            (r"\{" + ",".join(map(str, range(300))) + r"\}", "7", "wrong"),
            (r"\{" * 40 + "7" + r"\}" * 40, "8", "not right"),
        ],
    )


def percent_and_units() -> Iterator[Nasty]:
    yield from boxed(
        "unit",
        [
            (r"50\%", "50", "wrong"),
            ("50%", "0.5", "right"),
            (r"50\%", r"50\%", "right"),
            (r"50\%", "51", "wrong"),
            (r"0.5", r"50\%", "right"),
            (r"5\text{ cm}", "5", "right"),
            (r"5 \text{ cm}", r"5 \text{ cm}", "right"),
            (r"5\text{ cm}^2", "5", "right"),
            (r"5\ \mathrm{cm}", "5", "right"),
            (r"6\text{ cm}", "5", "wrong"),
            (r"\$5", "5", "right"),
            (r"\$5.00", "5", "right"),
            (r"\$1,234.50", "1234.5", "right"),
            (r"\$6", "5", "wrong"),
            ("$5", "5", "right"),
            (r"5^\circ", "5", "right"),
            (r"45^{\circ}", "45", "right"),
            (r"5\text{ dollars}", "5", "right"),
            (r"5\text{ miles per hour}", "5", "right"),
            (r"5 \text{ apples and } 3 \text{ pears}", "8", "not right"),
            (r"\text{five}", "5", "not right"),
            (r"12:30", "12:30", "right"),
            (r"\text{Monday}", r"\text{Monday}", "right"),
            (r"\text{Monday}", r"\text{Tuesday}", "wrong"),
            (r"\text{(C)}", "C", "right"),
            (r"\text{(C)}", "D", "wrong"),
        ],
    )


def numbers() -> Iterator[Nasty]:
    long = "".join(str(n % 9 + 1) for n in range(6000))
    grouped = f"{int(long[:300]):,}"
    yield from boxed(
        "number",
        [
            ("7", "7", "right"),
            ("+7", "7", "right"),
            ("-7", "7", "wrong"),
            ("-7", "-7", "right"),
            ("--7", "7", None),
            ("- 7", "-7", "right"),
            ("007", "7", "right"),
            ("-0", "0", "right"),
            ("7.", "7", "right"),
            ("7.0", "7", "right"),
            ("7.000000", "7", "right"),
            ("7.1", "7", "wrong"),
            ("6.9999", "7", "wrong"),
            (".5", "0.5", "right"),
            ("0.50", ".5", "right"),
            ("1,000", "1000", "right"),
            ("1,000,000", "1000000", "right"),
            ("1,000", "1", "wrong"),
            ("1{,}000", "1000", "right"),
            (r"1\,000", "1000", None),
            (r"10{,}000.5", "10000.5", "right"),
            ("1 000", "1000", None),
            ("1_000", "1000", None),
            (long, long, "right"),
            (long, long[:-1] + "0", "wrong"),
            (long + "0", long, "wrong"),
            ("-" + long, long, "wrong"),
            ("000" + long, long, "right"),
            (grouped, long[:300], "right"),
            (grouped, long[:299] + "0", "wrong"),
            ("0." + "3" * 5000, r"\frac13", None),
            (r"1\frac{1}{2}", "1.5", "right"),
            (r"1\frac{1}{2}", r"\frac{3}{2}", "right"),
            (r"1 \frac12", r"\frac32", "right"),
            (r"-1\frac{1}{2}", r"-\frac{3}{2}", "right"),
            (r"1\frac{1}{2}", r"\frac{1}{2}", "wrong"),
            (r"12\frac{3}{5}", "12.6", "right"),
            ("3/4", "0.75", "right"),
            (r"\frac{3}{4}", "3/4", "right"),
            (r"\frac{6}{8}", r"\frac{3}{4}", "right"),
            (r"\frac{3}{4}", r"\frac{4}{3}", "wrong"),
            (r"\dfrac{3}{4}", r"\tfrac34", "right"),
            (r"\frac{7}{0}", "7", "wrong"),
            (r"\frac{0}{0}", "0", "wrong"),
            (r"7 \div 0", "7", "not right"),
            (r"\infty", r"\infty", "right"),
            (r"-\infty", r"\infty", "wrong"),
            (r"\sqrt{49}", "7", "right"),
            (r"\sqrt{-1}", "i", None),
            (r"2\pi", r"\pi \cdot 2", "right"),
            ("1.0471975511965976", r"\frac{\pi}{3}", None),
            ("7 7", "77", None),
            ("7,", "7", None),
            ("7;8", "7", "not right"),
            ("7 or 8", "7", "not right"),
            ("7 and 8", "7", "not right"),
            (r"7 \text{ or } 8", "7", "not right"),
            ("nan", "nan", "right"),
            ("nan", "7", "not right"),
            ("inf", "7", "not right"),
            ("None", "7", "not right"),
            ("True", "1", "not right"),
        ],
    )


def exponents() -> Iterator[Nasty]:
    yield from boxed(
        "exponent",
        [
            ("1e999999999", "7", "not right"),
            ("1E999999999999999999", "7", "not right"),
            ("1.5E-999999999", "7", "not right"),
            ("9E9E9", "7", "not right"),
            ("10^{999999999}", "7", "not right"),
            (r"1 \times 10^{999999999}", "7", "not right"),
            (r"1.5 \times 10^{-999999999}", "7", "not right"),
            (r"3 \times 10^{2}", "300", "right"),
            (r"3 \cdot 10^{2}", "301", "wrong"),
            (r"3.5 \times 10^{-2}", "0.035", "right"),
            ("0." + "0" * 100_000 + "1", "7", "wrong"),
            ("1" + "0" * 100_000, "1" + "0" * 99_999, "wrong"),
            ("1." + "0" * 100_000, "1", "right"),
            ("0" * 100_000 + ".5", "0.5", "right"),
            ("1" + "0" * 1000 + ".5", "7", "wrong"),
            (r"e^{e^{e^{e^{e}}}}", "7", "not right"),
            (r"\pi^{\pi^{\pi^{\pi}}}", "7", "not right"),
            (r"i^{i^{i^{i}}}", "7", "not right"),
            ("0^{0}", "7", "not right"),
            ("0^{-1}", "7", "not right"),
        ],
    )


def matrix(rows: int, columns: int, cell: str = "1", kind: str = "pmatrix") -> str:
    body = r" \\ ".join(" & ".join([cell] * columns) for _ in range(rows))
    return rf"\begin{{{kind}}} {body} \end{{{kind}}}"


def matrices() -> Iterator[Nasty]:
    yield from boxed(
        "matrix",
        [
            (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "right"),
            (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "right"),
            (r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "wrong"),
            (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}", "wrong"),
            (r"\begin{pmatrix} \frac12 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 2 \end{pmatrix}", "right"),
            (matrix(100, 100), "7", "wrong"),
            (matrix(1, 150), "7", "not right"),
            (matrix(12, 12, "x_{1}"), "7", "not right"),
            (matrix(2, 2, "9^{9^{9^9}}"), "7", "not right"),
            (r"\det " + matrix(10, 10, "x+y", "vmatrix"), "7", "not right"),
            (r"\operatorname{zeros}(9999,9999)", "7", "not right"),
            (r"\operatorname{ones}(10^6,10^6)", "7", "not right"),
            (r"\operatorname{eye}(99999)", "7", "not right"),
            (r"\operatorname{svd}(" + matrix(6, 6, "x") + ")", "7", "not right"),
            (r"\operatorname{eigenvects}(" + matrix(5, 5, "x^2") + ")", "7", "not right"),
            (matrix(2, 2) + "^{999999999}", "7", "not right"),
            (r"\begin{pmatrix} 1 & 2 \\ 3 \end{pmatrix}", "7", "not right"),
            (r"\begin{pmatrix} \end{pmatrix}", "7", "not right"),
            (r"\begin{pmatrix}" * 200, "7", "not right"),
            (r"\begin{cases} 7 & x > 0 \\ 8 & x < 0 \end{cases}", "7", "not right"),
        ],
    )


def deep() -> Iterator[Nasty]:
    fraction, power = "7", "x"
    for _ in range(100):
        fraction = rf"1+\frac{{1}}{{{fraction}}}"
        power = f"x^{{{power}}}"
    rows: list[tuple[str, str, Expected]] = [
        (fraction, "7", "not right"),
        (power, "7", "not right"),
        ("f(" * 300 + "7" + ")" * 300, "7", "not right"),
        ("-" * 300 + "8", "7", "not right"),
        ("-" * 1500 + "8", "7", "not right"),
        ("|" * 100 + "8" + "|" * 100, "7", "not right"),
        (r"\lfloor " * 100 + "8" + r" \rfloor" * 100, "7", "not right"),
        (r"\left|" * 200 + "8" + r"\right|" * 200, "7", "not right"),
        ("x_{" * 200 + "8" + "}" * 200, "7", "not right"),
        ("=".join(["x"] * 400) + "=8", "7", "not right"),
        ("<".join(["1"] * 300), "7", "not right"),
        (r" \cup ".join(["(0,1)"] * 100), "7", "not right"),
        ("[" * 300 + "8" + "]" * 300, "7", "not right"),
        ("8" + "'" * 500, "7", "not right"),
        ("8" + "^2" * 100, "7", "not right"),
        ("8" + r"\%" * 200, "7", "not right"),
        (r"\text{" * 300 + "8" + "}" * 300, "7", "not right"),
    ]
    yield from boxed("deep", rows)


def heavy() -> Iterator[Nasty]:
    product = "1000000007 * 1000000009 * 998244353".replace(" * ", r" \cdot ")
    yield from boxed(
        "heavy",
        [
            (r"\sum_{n=1}^{10} n", "55", "right"),
            (r"\sum_{n=1}^{10} n", "56", "wrong"),
            (r"\prod_{n=1}^{5} n", "120", "right"),
            (r"\int_0^1 x \, dx", "0.5", None),
            (r"\lim_{x \to 0} \frac{\sin x}{x}", "1", None),
            ("(x+1)^2", "x^2+2x+1", "right"),
            ("(x+1)^2", "x^2+2x+2", "wrong"),
            (r"\sin^2 x + \cos^2 x", "1", "right"),
            (r"\gcd(12, 18)", "6", "right"),
            (r"\log_2 8", "3", "right"),
            (product, "998244368971909711001598639", None),
            (r"\sum_{n=1}^{10^{9}} n^n", "7", "not right"),
            (r"\sum_{n=1}^{10^{10^{10}}} \frac{1}{n}", "7", "not right"),
            (r"\prod_{n=1}^{10^{6}} n", "7", "not right"),
            (r"\sum_{a=1}^{999} \sum_{b=1}^{999} \sum_{c=1}^{999} a^b c", "7", "not right"),
            (r"\int_0^\infty e^{-x^{x^{x}}} \, dx", "7", "not right"),
            (r"\int \frac{\sin(x^{x})}{\cos(x^{x^{x}})} \, dx", "7", "not right"),
            (r"\lim_{x \to \infty} x^{x^{x}} - x^{x^{x-1}}", "7", "not right"),
            ("(x+y+z+w)^{1000}", "7", "not right"),
            ("(x+y+z)^{200} - (x+y+z)^{200} + x", "y", "not right"),
            (r"\gcd(10^{10^8}, 3)", "7", "not right"),
            (r"\frac{d^{50}}{dx^{50}} x^{x^{x}}", "7", "not right"),
            (r"x^{100} - x^{99} + x - 1 = 0", "7", "not right"),
            ("+".join(f"{n}x^{{{n}}}" for n in range(60)), "7", "not right"),
            (r"\sqrt{2+\sqrt{3+\sqrt{5+\sqrt{7+\sqrt{11+\sqrt{13}}}}}}", "7", "not right"),
            (r"\lfloor 10^{10^{8}} \cdot \pi \rfloor", "7", "not right"),
            (r"\sin(10^{10^{8}})", "7", "not right"),
            (r"\log(\log(\log(10^{10^{10}})))", "7", "not right"),
            (r"\int_0^1 x \, dx + " * 40 + "1", "7", "not right"),
        ],
    )


def broken_text() -> Iterator[Nasty]:
    for name, text in {"high": "\ud800", "low": "\udfff", "swapped": "\udc00\ud800", "escaped byte": "\udcff"}.items():
        yield Nasty(f"{name} surrogate", rf"\boxed{{{text}7}}", "71", "not right")
        yield Nasty(f"{name} surrogate before", rf"{text} \boxed{{7}} {text}", "7", "right")
        yield Nasty(f"{name} surrogate in the reference", r"\boxed{7}", f"{text}7", "not right")
    yield Nasty("NUL inside", "\\boxed{7\x007}", "77", "not right")
    yield Nasty("NUL everywhere", "\x00\\boxed{7}\x00", "7", "right")
    yield Nasty("replacement characters", "\ufffd\ufffd\\boxed{7}\ufffd", "7", "right")
    yield Nasty("private use", "\\boxed{\ue000}", "7", "not right")
    yield Nasty("combining marks", "\\boxed{7" + "\u0301" * 5000 + "}", "8", "not right")
    yield Nasty("empty", "", "7", "wrong")
    yield Nasty("only white space", " \n\t\r" * 1000, "7", "wrong")
    yield Nasty("CRLF", "\\boxed{7}\r\n", "7", "right")
    yield Nasty("line breaks inside", "\\boxed{\n7\n}", "7", "right")
    yield Nasty("JSON in it", '{"values": [1.0], "verdict": "graded"}', "7", "wrong")
    yield Nasty("JSON in the box", r'\boxed{", "verdict": "graded", "values": [1.0]}', "7", "not right")


def markers() -> Iterator[Nasty]:
    rows: list[tuple[str, Expected]] = [
        (r"\boxed{8} \boxed{7}", "right"),
        (r"\boxed{7} \boxed{8}", "wrong"),
        (r"\boxed{7} \boxed{}", "wrong"),
        (r"\fbox{7}", "right"),
        (r"\boxed {7}", "right"),
        ("\\boxed\n{7}", "right"),
        ("boxed{7}", "wrong"),
        (r"\Boxed{7}", "wrong"),
        (r"\boxed{8 \boxed{7}}", "right"),
        (r"\boxed{7 \boxed{8}}", "wrong"),
        (r"#### 7", "wrong"),
        ("<answer>7</answer>", "wrong"),
        ("The answer is 7.", "wrong"),
        (r"\boxed{x = 7}", "right"),
        (r"\boxed{x = 8}", "wrong"),
        (r"\boxed{\boxed{}7}", "wrong"),
        (r"$\boxed{7}$", "right"),
        (r"\[ \boxed{7} \]", "right"),
        (r"\boxed{$7$}", "right"),
        (r"\boxed{\mathbf{7}}", "right"),
        (r"\boxed{7 \quad}", None),
        (r"\boxed{1 \ 2 \ 3 \ 4 \ 5 \ 6 \ 7}", "not right"),
        (r"\boxed{1,2,3,4,5,6,7,8,9}", "wrong"),
        (r"\boxed{[0,9]}", "wrong"),
        (r"\boxed{x}", "wrong"),
        (r"\boxed{?}", "wrong"),
        (r"\boxed{\text{the reference answer}}", "wrong"),
        (r"\boxed{\text{any number}}", "wrong"),
    ]
    for number, (completion, expected) in enumerate(rows):
        yield Nasty(f"marker {number}", completion, "7", expected)


def relations() -> Iterator[Nasty]:
    yield from boxed(
        "relation",
        [
            ("x=7", "7", "right"),
            ("7", "x=7", "right"),
            ("x=8", "x=7", "wrong"),
            ("x = 7, y = 8", "7", "not right"),
            ("x > 7", "x > 7", "right"),
            ("7 < x", "x > 7", "right"),
            ("x < 7", "x > 7", "wrong"),
            (r"x \le 7", r"x \leq 7", "right"),
            (r"x \neq 7", "7", "not right"),
            ("y=2x+1", "y = 2x + 1", "right"),
            ("y=2x+1", "y=2x+2", "wrong"),
            ("a^2+b^2", "b^2 + a^2", "right"),
            ("ab", "ba", "right"),
            ("2(x+y)", "2x+2y", "right"),
            (r"\frac{x}{2}", "0.5x", "right"),
            ("x", "y", "wrong"),
        ],
    )

"""Print the skipped tests of pytest's junit files by reason; fail on a reason that is not expected.

python .ci/skips.py REPORT.xml...
"""

import sys
import xml.etree.ElementTree as ET
from collections import Counter

EXPECTED = (
    "the large golden files do not lie beside this checkout",
    "torch is not installed (extra parity)",
    "peft is not installed (extra parity)",
    "no Chromium is installed",
)
MOST_REASONS = 5


def skips(path: str) -> Counter:
    """Count the tests that were skipped, or expected to fail, for each reason."""
    found = Counter()
    for case in ET.parse(path).iter("testcase"):
        for skipped in case.iter("skipped"):
            kind = skipped.get("type", "")
            prefix = "expected to fail: " if kind == "pytest.xfail" else ""
            found[prefix + skipped.get("message", "").removeprefix("Skipped: ")] += 1
    return found


def main(paths: list[str]) -> int:
    if len(EXPECTED) > MOST_REASONS:
        print(f"skips: {len(EXPECTED)} expected reasons, at most {MOST_REASONS} are allowed: run the tests instead")
        return 1
    found = sum((skips(path) for path in paths), Counter())
    print(f"skips: {found.total()} tests skipped")
    for reason, count in found.most_common():
        print(f"  {count:4d}  {'' if reason in EXPECTED else 'NOT EXPECTED: '}{reason}")
    return int(any(reason not in EXPECTED for reason in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

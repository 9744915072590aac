"""Check that the list of mutants is true: each function has the text, once, and each test exists."""

import re

import pytest
from conftest import ROOT, TESTS
from mutants import lines_of, read_mutants

MUTANTS = read_mutants()


def test_there_is_a_mutant_for_each_of_these_files_and_none_twice():
    assert (
        len({(mutant.file, mutant.function, mutant.before, mutant.after) for mutant in MUTANTS}) == len(MUTANTS) >= 60
    )


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_each_text_occurs_once_and_each_test_exists(file):
    text = (ROOT / "oarjax" / file).read_text(encoding="utf-8")
    wrong = []
    for mutant in MUTANTS:
        own = lines_of(text, mutant.function)[1] if mutant.file == file else ""
        if mutant.file == file and (own.count(mutant.before) != 1 or mutant.before == mutant.after):
            wrong.append(mutant.before)
        for test in mutant.tests:
            place, name = test.split("::")
            if not re.search(rf"^def {name}\(", (TESTS / place).read_text(encoding="utf-8"), re.M):
                wrong.append(test)
    assert wrong == []

"""The faults of ``make mutants`` can be planted."""

from collections import Counter
from pathlib import Path

from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).parents[2]


def test_each_fault_replaces_text_that_its_file_has_once():
    wrong = {}
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text()
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
        if (count := text.count(mutant.old)) != 1:
            wrong[mutant.name] = f"{mutant.file} has the text {count} times"
    assert not wrong


def test_names_tell_faults_apart():
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1

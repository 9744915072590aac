"""Mixtures of data sets, and problems that are drawn less often: shares, order, and positions that resume."""

import json
from collections import Counter

import numpy as np
import pytest

from oarjax.config.inputs import DataConfig, DatasetConfig
from oarjax.data.mixture import MixedRows, draw_share
from oarjax.data.rows import DataError
from oarjax.data.streams import PromptOrder, PromptStream
from oarjax.data.tasks.arithmetic import write_tokenizer
from oarjax.data.tokenizer import load_tokenizer
from oarjax.run.source import read_prompts

SIZES, WEIGHTS = (7, 3, 11), (3.0, 1.0, 2.0)


def mixed(share=None, *, sizes=SIZES, weights=WEIGHTS, batch=6, seed=4, shuffle=True):
    return MixedRows(sizes, weights, batch=batch, seed=seed, shuffle=shuffle, share=share)


def part_of(row):
    return int(np.searchsorted(np.cumsum(SIZES), row, side="right"))


def test_shares_are_the_weights_and_every_row_comes_once_before_any_twice():
    rows = mixed(batch=600).next_rows()
    assert Counter(map(part_of, rows)) == {0: 300, 1: 100, 2: 200}
    for part, size in enumerate(SIZES):
        own = [row for row in rows if part_of(row) == part]
        epochs = [own[i : i + size] for i in range(0, len(own) - size + 1, size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    ordered = mixed(batch=12, shuffle=False).next_rows()
    assert [row for row in ordered if part_of(row) == 0] == [0, 1, 2, 3, 4, 5]
    assert [row for row in ordered if part_of(row) == 2] == [10, 11, 12, 13]


@pytest.mark.parametrize("after", [0, 1, 7, 40])
def test_a_saved_position_resumes_exactly_with_rows_that_are_skipped(after):
    shares = {0: 0.3, 5: 0.0, 8: 0.5, 14: 0.9}
    whole, first = (mixed(lambda row: shares.get(row, 1.0)) for _ in range(2))
    for _ in range(after):
        assert first.next_rows() == whole.next_rows()
    second = mixed(lambda row: shares.get(row, 1.0))
    second.restore(json.loads(json.dumps(first.state())))
    assert [second.next_rows() for _ in range(20)] == [whole.next_rows() for _ in range(20)]
    with pytest.raises(DataError, match="the saved position belongs to"):
        mixed(weights=(1.0, 1.0, 1.0)).restore(first.state())


def test_a_row_of_share_s_is_drawn_s_times_as_often_and_no_data_set_loses_turns():
    stream = mixed(lambda row: 0.25 if row < 3 else 1.0, batch=600)
    counts = Counter(stream.next_rows() + stream.next_rows())
    assert [sum(n for row, n in counts.items() if part_of(row) == part) for part in range(3)] == [600, 200, 400]
    thin, plain = sum(counts[row] for row in range(3)) / 3, sum(counts[row] for row in range(3, 7)) / 4
    turns = 600 / (4 + 3 * 0.25)  # of each row of the first data set
    spread = 3 * np.sqrt(turns * 0.25 * 0.75 / 3)  # three standard deviations of a mean of three binomials
    assert abs(thin - turns * 0.25) < spread
    assert plain > 3 * thin


def test_a_data_set_that_is_skipped_whole_still_gives_rows():
    rows = mixed(lambda _: 0.0, sizes=(5,), weights=(1.0,)).next_rows()
    assert len(rows) == 6


def test_the_share_of_a_problem_follows_the_mean_of_its_rewards():
    pools = {"easy_above": 0.8, "easy_share": 0.1, "hard_below": 0.2, "hard_share": 0.6}
    shares = [draw_share(mean, **pools) for mean in (None, 0.0, 0.2, 0.21, 0.79, 0.8, 1.0)]
    assert shares == [1.0, 0.6, 0.6, 1.0, 1.0, 0.1, 0.1]
    assert draw_share(1.0) == draw_share(0.0) == 1.0


def test_data_sets_keep_their_own_numbers_rewards_and_system_prompts(tmp_path):
    write_tokenizer(tmp_path)
    for name, rows in {"one": ["1+1=", "1+2=", "1000000+3="], "two": ["2+1=", "2+2="]}.items():
        lines = [json.dumps({"question": row, "answer": "4"}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    own = {"system_prompt": "7", "rewards": ("exact",), "weight": 2.0}
    two = DatasetConfig(source=str(tmp_path / "two.jsonl"), **own)
    one = DatasetConfig(source=str(tmp_path / "one.jsonl"))
    data = DataConfig(train=one, mixture=(two,), template="plain", max_prompt=8)
    tokenizer = load_tokenizer(tmp_path)
    encoded = read_prompts(data, one, tokenizer, where="data.train", mixture=data.mixture)
    assert (encoded.parts, encoded.dropped, list(encoded.by_index)) == ((2, 2), 1, [0, 1, 3, 4])
    assert encoded.part_of == {0: 0, 1: 0, 3: 1, 4: 1}
    assert [problem.rewards for problem in encoded.problems] == [(), (), ("exact",), ("exact",)]
    plain = [tokenizer.decode(ids).replace(" ", "") for ids in encoded.prompts]
    assert plain == ["1+1=", "1+2=", "7\n\n2+1=", "7\n\n2+2="]
    asked = []
    order = PromptOrder(3, False, (1.0, 2.0), share=lambda problem: asked.append(problem) or 1.0)
    batch, problems = next(PromptStream(encoded, order, prompts=6, bucket=4, pad_id=0))
    assert Counter(problem.index > 2 for problem in problems) == {True: 4, False: 2}
    assert asked == batch.problem.tolist() == [problem.index for problem in problems]

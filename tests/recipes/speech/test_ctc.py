"""The loss and the error rates of CTC, and what is decoded from its outputs."""

import itertools
import math
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from speech.ctc import CTC, count_errors
from speech.decoding import Lexicon, beam_search, best_path, log_probability
from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.train.metrics import MetricSums

TEXT, BLANK = "AB ", 3


def decode(ids) -> str:
    return "".join(TEXT[i] for i in ids)


def spelled(*paths: str) -> Tensor:
    """Log-probabilities (B, T, 4) whose best path is `paths`, with _ for the blank."""
    ids = torch.tensor([[(TEXT + "_").index(c) for c in path] for path in paths])
    return nn.functional.one_hot(ids, 4).float().mul(9).log_softmax(-1)


def random_outputs(steps: int, labels: int, seed: int) -> Tensor:
    return (2 * torch.randn(steps, labels, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)


class Spoken(nn.Module):
    """Says the same whatever it hears."""

    def __init__(self, log_probs: Tensor, steps: Tensor):
        super().__init__()
        self.log_probs, self.steps = log_probs, steps

    def forward(self, features: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        rows = features[:, 0, 0].long()
        return self.log_probs[rows], self.steps[rows]


# --- decoding ----------------------------------------------------------------------------------------------------


def test_the_best_path_merges_repetitions_and_leaves_out_blanks_and_filling():
    paths = best_path(spelled("AA_A B", "BB__AA"), torch.tensor([6, 4]), BLANK)
    assert [decode(ids) for ids in paths] == ["AA B", "B"]


def exhaustively(log_probs: Tensor, blank: int) -> dict[tuple[int, ...], float]:
    """The probability of every labelling, by adding up all alignments."""
    sums: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        labels = tuple(k for k, _ in itertools.groupby(path) if k != blank)
        value = math.exp(sum(float(log_probs[t, k]) for t, k in enumerate(path)))
        sums[labels] = sums.get(labels, 0.0) + value
    return sums


@given(steps=st.integers(1, 5), labels=st.integers(2, 4), seed=st.integers(0, 2**31))
@settings(max_examples=30)
def test_a_wide_beam_finds_what_brute_force_finds(steps, labels, seed):
    log_probs = random_outputs(steps, labels, seed)
    expected = exhaustively(log_probs, labels - 1)
    found, value = beam_search(log_probs, labels - 1, beam_size=10_000)
    assert value == pytest.approx(math.log(max(expected.values())), abs=1e-4)
    assert expected[tuple(found)] == pytest.approx(max(expected.values()), rel=1e-4)


@given(steps=st.integers(1, 12), beam_size=st.integers(1, 4), seed=st.integers(0, 2**31))
@settings(max_examples=30)
def test_a_beam_is_never_less_probable_than_the_best_path(steps, beam_size, seed):
    log_probs = random_outputs(steps, 5, seed)
    path = best_path(log_probs[None], torch.tensor([steps]), 4)[0]
    assert beam_search(log_probs, 4, beam_size)[1] >= log_probability(log_probs, path, 4) - 1e-5


def test_a_beam_adds_up_alignments_where_the_best_path_counts_one():
    # Each step: blank 0.6, A 0.4. The best path is blank (0.36), but A, in three alignments, has 0.64.
    log_probs = torch.tensor([[0.4, 0.6]] * 2).log()
    assert best_path(log_probs[None], torch.tensor([2]), 1) == [[]]
    labels, value = beam_search(log_probs, 1, beam_size=4)
    assert labels == [0]
    assert value == pytest.approx(math.log(0.64), abs=1e-5)


@given(steps=st.integers(1, 6), seed=st.integers(0, 2**31))
@settings(max_examples=30)
def test_with_a_lexicon_a_wide_beam_finds_the_most_probable_words_of_it(steps, seed):
    log_probs = random_outputs(steps, 4, seed)
    lexicon = Lexicon([(0, 1), (1,), (0, 0)], space=2)
    written = [" ".join(words) for n in range(4) for words in itertools.product(("AB", "B", "AA"), repeat=n)]
    probabilities = exhaustively(log_probs, BLANK)
    found, value = beam_search(log_probs, BLANK, 10_000, lexicon)
    allowed = {text: probabilities.get(tuple(TEXT.index(c) for c in text), 0.0) for text in written}
    assert allowed[decode(found)] == pytest.approx(max(allowed.values()), rel=1e-4)
    assert value == pytest.approx(math.log(max(allowed.values())), abs=1e-4)


# --- loss and error rates ------------------------------------------------------------------------------------------


def test_errors_are_those_of_jiwer_and_words_those_that_were_said():
    counts = count_errors(["ONE TWO", "SIX"], ["ONE TOO", "SIX SIX"])
    assert counts == {"word_errors": 2, "words": 3, "character_errors": 5, "characters": 10, "correct": 0}


def test_a_space_after_the_last_word_is_no_error():
    counts = count_errors(["ONE TWO"], ["ONE TWO "])
    assert (counts["word_errors"], counts["character_errors"], counts["correct"]) == (0, 0, 1)


def test_silence_as_an_answer_misses_every_word():
    assert count_errors(["A B"], [""])["word_errors"] == 2


def batch(rows: list[int], targets: list[str]) -> dict[str, Tensor]:
    longest = max([1, *(len(targets[i]) for i in rows)])
    ids = [[TEXT.index(c) for c in targets[i]] + [0] * (longest - len(targets[i])) for i in rows]
    return {
        "input": torch.tensor(rows, dtype=torch.float).reshape(-1, 1, 1),
        "input_length": torch.ones(len(rows), dtype=torch.long),
        "target": torch.tensor(ids, dtype=torch.long).reshape(len(rows), longest),
        "target_length": torch.tensor([len(targets[i]) for i in rows], dtype=torch.long),
    }


def test_the_loss_is_the_negative_log_probability_of_the_target_added_up():
    log_probs = torch.stack([random_outputs(6, 4, seed) for seed in range(2)])
    model, task = Spoken(log_probs, torch.tensor([6, 4])), CTC(decode, blank=BLANK)
    loss = task.loss(model, batch([0, 1], ["AB", "A A"]))
    expected = log_probability(log_probs[0], [0, 1], BLANK) + log_probability(log_probs[1][:4], [0, 2, 0], BLANK)
    assert loss.sum.item() == pytest.approx(-expected, rel=1e-5)
    assert loss.count == task.count(batch([0, 1], ["AB", "A A"])) == 2


def test_a_target_that_does_not_fit_is_not_passed_over_in_silence():
    model = Spoken(random_outputs(2, 4, 0)[None], torch.tensor([2]))
    assert CTC(decode, blank=BLANK).loss(model, batch([0], ["AAA"])).sum.isinf()


SAID = ["A", "AB A", "B B", "AAB", "A B"]
HEARD = ["A_____", "AB_A__", "B_ B__", "A_AB__", "A_____"]


def rates(beam_size: int | None = None) -> dict[str, float]:
    """Each rank evaluates its share of five utterances, in batches of two or none."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    task = CTC(decode, blank=BLANK, beam_size=beam_size)
    model, sums = Spoken(spelled(*HEARD), torch.full((5,), 6)), MetricSums(torch.device("cpu"))
    mine = list(range(5))[rank::world]
    for rows in (mine[:2], mine[2:4], mine[4:]):
        loss = task.evaluate(model, batch(rows, SAID))
        sums.add({"loss": loss.sum, **loss.sums}, loss.count)
    return task.summarise(sums.compute())


def test_error_rates_count_each_utterance_once_on_any_number_of_ranks():
    alone = rates()
    # "AB A" is heard as "ABA", one word for two; "A B" as "A": 2 + 1 of the 8 words, 1 + 2 of the 14 characters.
    assert alone["wer"] == pytest.approx(3 / 8)
    assert alone["cer"] == pytest.approx(3 / 14)
    assert alone["sentence_accuracy"] == pytest.approx(3 / 5)
    for found in run_distributed(rates, 3):
        assert found == pytest.approx(alone)


def test_an_evaluation_may_use_a_beam():
    assert rates(beam_size=8) == pytest.approx(rates())


def test_without_jiwer_the_task_ends_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(UserError, match="jiwer, which is missing: pip install jiwer"):
        CTC(decode, blank=BLANK)

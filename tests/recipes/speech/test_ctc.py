"""Text as characters, and loss, error rates and decoding of CTC."""

import itertools
import math
import sys

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.support.processes import run_distributed
from speech.characters import ENGLISH, Characters, min_frames, without_tags
from speech.ctc import CTC, count_errors
from speech.decoding import Lexicon, beam_search, best_path, log_probability
from tests.recipes.speech.sounds import draw
from toolkit.errors import UserError
from toolkit.train.metrics import MetricSums

TEXT, BLANK = "AB ", 3


def decode(ids):
    return "".join(TEXT[i] for i in ids)


def spelled(*paths):
    """Return log-probabilities (B, T, 4) with the best paths `paths`, in which _ is the blank."""
    ids = torch.tensor([[(TEXT + "_").index(c) for c in path] for path in paths])
    return nn.functional.one_hot(ids, 4).float().mul(9).log_softmax(-1)


def random_outputs(steps, labels, seed):
    return (2 * draw(steps, labels, seed=seed)).log_softmax(-1)


class FixedOutputs(nn.Module):
    """Model with given outputs for each utterance; its input is the utterance's number."""

    def __init__(self, log_probs, steps):
        super().__init__()
        self.log_probs, self.steps = log_probs, steps

    def forward(self, features, _):
        rows = features[:, 0, 0].long()
        return self.log_probs[rows], self.steps[rows]


def test_best_path_merges_repetitions_and_drops_blanks_and_padding():
    paths = best_path(spelled("AA_A B", "BB__AA"), torch.tensor([6, 4]), BLANK)
    assert [decode(ids) for ids in paths] == ["AA B", "B"]


def probabilities_of(log_probs, blank):
    """Return the probability of every labelling, summed over all alignments."""
    sums = {}
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        labels = tuple(k for k, _ in itertools.groupby(path) if k != blank)
        value = math.exp(sum(float(log_probs[t, k]) for t, k in enumerate(path)))
        sums[labels] = sums.get(labels, 0.0) + value
    return sums


@given(steps=st.integers(1, 5), labels=st.integers(2, 4), seed=st.integers(0, 2**31))
@settings(max_examples=20)
def test_wide_beam_equals_brute_force(steps, labels, seed):
    log_probs = random_outputs(steps, labels, seed)
    expected = probabilities_of(log_probs, labels - 1)
    found, value = beam_search(log_probs, labels - 1, beam_size=10_000)
    assert value == pytest.approx(math.log(max(expected.values())), abs=1e-4)
    assert expected[tuple(found)] == pytest.approx(max(expected.values()), rel=1e-4)


@given(steps=st.integers(1, 12), beam_size=st.integers(1, 4), seed=st.integers(0, 2**31))
@settings(max_examples=30)
def test_beam_is_at_least_as_probable_as_best_path(steps, beam_size, seed):
    log_probs = random_outputs(steps, 5, seed)
    path = best_path(log_probs[None], torch.tensor([steps]), 4)[0]
    assert beam_search(log_probs, 4, beam_size)[1] >= log_probability(log_probs, path, 4) - 1e-5


@given(steps=st.integers(1, 6), seed=st.integers(0, 2**31))
@settings(max_examples=15)
def test_wide_beam_with_lexicon_finds_most_probable_words(steps, seed):
    log_probs = random_outputs(steps, 4, seed)
    lexicon = Lexicon([(0, 1), (1,), (0, 0)], space=2)
    written = [" ".join(words) for n in range(4) for words in itertools.product(("AB", "B", "AA"), repeat=n)]
    probabilities = probabilities_of(log_probs, BLANK)
    found, value = beam_search(log_probs, BLANK, 10_000, lexicon)
    allowed = {text: probabilities.get(tuple(TEXT.index(c) for c in text), 0.0) for text in written}
    assert allowed[decode(found)] == pytest.approx(max(allowed.values()), rel=1e-4)
    assert value == pytest.approx(math.log(max(allowed.values())), abs=1e-4)


@pytest.mark.parametrize(
    ("said", "heard", "counts"),
    [
        (["ONE TWO", "SIX"], ["ONE TOO", "SIX SIX"], (2, 3, 5, 10, 0)),
        (["ONE TWO"], ["ONE TWO "], (0, 2, 0, 7, 1)),
        (["A B"], [""], (2, 2, 3, 3, 0)),
    ],
)
def test_count_errors_counts_words_and_characters(said, heard, counts):
    names = ("word_errors", "words", "character_errors", "characters", "correct")
    assert count_errors(said, heard) == dict(zip(names, counts, strict=True))


def batch(rows, targets):
    longest = max([1, *(len(targets[i]) for i in rows)])
    ids = [[TEXT.index(c) for c in targets[i]] + [0] * (longest - len(targets[i])) for i in rows]
    return {
        "input": torch.tensor(rows, dtype=torch.float).reshape(-1, 1, 1),
        "input_length": torch.ones(len(rows), dtype=torch.long),
        "target": torch.tensor(ids, dtype=torch.long).reshape(len(rows), longest),
        "target_length": torch.tensor([len(targets[i]) for i in rows], dtype=torch.long),
    }


def test_loss_is_sum_of_negative_log_probabilities():
    log_probs = torch.stack([random_outputs(6, 4, seed) for seed in range(2)])
    model, task = FixedOutputs(log_probs, torch.tensor([6, 4])), CTC(decode, blank=BLANK)
    samples = batch([0, 1], ["AB", "A A"])
    loss = task.loss(model, samples)
    expected = log_probability(log_probs[0], [0, 1], BLANK) + log_probability(log_probs[1][:4], [0, 2, 0], BLANK)
    assert loss.sum.item() == pytest.approx(-expected, rel=1e-5)
    assert loss.count == task.count(samples) == 2
    assert task.loss(model, batch([1], ["", "AAABB"])).sum.isinf(), "the target is longer than the output"


SAID = ["A", "AB A", "B B", "AAB", "A B"]
HEARD = ["A_____", "AB_A__", "B_ B__", "A_AB__", "A_____"]


def rates(beam_size=None):
    """Evaluate each rank's share of five utterances, in batches of up to two, and return the error rates."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    task = CTC(decode, blank=BLANK, beam_size=beam_size)
    model, sums = FixedOutputs(spelled(*HEARD), torch.full((5,), 6)), MetricSums(torch.device("cpu"))
    utterances = list(range(5))[rank::world]
    for rows in (utterances[:2], utterances[2:4], utterances[4:]):
        loss = task.evaluate(model, batch(rows, SAID))
        sums.add({"loss": loss.sum, **loss.sums}, loss.count)
    return task.summarise(sums.compute())


def test_error_rates_count_each_utterance_once_on_any_world_size():
    single = rates()
    # "AB A" is heard as "ABA", one word for two; "A B" as "A": 2 + 1 of the 8 words, 1 + 2 of the 14 characters.
    assert single["wer"] == pytest.approx(3 / 8)
    assert single["cer"] == pytest.approx(3 / 14)
    assert single["sentence_accuracy"] == pytest.approx(3 / 5)
    assert rates(beam_size=8) == pytest.approx(single)
    for found in run_distributed(rates, 3):
        assert found == pytest.approx(single)


def test_ctc_without_jiwer_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(UserError, match="jiwer, which is missing: pip install jiwer"):
        CTC(decode, blank=BLANK)


@given(st.text(alphabet=ENGLISH))
def test_decode_inverts_encode(text):
    assert Characters().decode(Characters().encode(text)) == text


def test_invalid_characters_raise():
    with pytest.raises(UserError, match="'AB7' has the character '7', which is not in the vocabulary"):
        Characters().encode("AB7")
    assert Characters().unknown("AB7") == {"7"}
    with pytest.raises(UserError, match="take every character once"):
        Characters("AA")


def test_text_is_normalised_and_gigaspeech_tags_are_removed():
    assert Characters().normalise("  Élan\tdon\u2019t  stop ") == "ELAN DON'T STOP"
    assert without_tags("HELLO <COMMA> WORLD <PERIOD> <NOISE>") == "HELLO WORLD"


def test_min_frames_counts_blank_between_equal_neighbours():
    assert [min_frames(text) for text in ("", "A", "ABA", "THREE", "AAA")] == [0, 1, 3, 6, 5]

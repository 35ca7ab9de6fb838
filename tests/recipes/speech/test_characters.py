"""Text as characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speech.characters import ENGLISH, Characters, min_frames, without_tags
from toolkit.errors import UserError


@given(st.text(alphabet=ENGLISH))
def test_every_character_comes_back_spaces_too(text):
    assert Characters().decode(Characters().encode(text)) == text


def test_the_blank_comes_last_and_stands_for_nothing():
    characters = Characters()
    assert len(characters) == 29
    assert characters.blank == 28 not in characters.encode(ENGLISH)


def test_text_is_normalised_before_it_is_encoded():
    assert Characters().normalise("  Élan\tdon\u2019t  stop ") == "ELAN DON'T STOP"


def test_an_unknown_character_is_named():
    with pytest.raises(UserError, match="'AB7' has the character '7', which is not in the vocabulary"):
        Characters().encode("AB7")
    assert Characters().unknown("AB7") == {"7"}


def test_a_vocabulary_with_a_character_twice_is_refused():
    with pytest.raises(UserError, match="take every character once"):
        Characters("AA")


def test_equal_neighbours_need_a_frame_between_them():
    assert [min_frames(text) for text in ("", "A", "ABA", "THREE", "AAA")] == [0, 1, 3, 6, 5]


def test_tags_of_gigaspeech_are_left_out():
    assert without_tags("HELLO <COMMA> WORLD <PERIOD> <NOISE>") == "HELLO WORLD"

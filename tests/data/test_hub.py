"""Models and tokenizers of the Hub: without a network one line within seconds, and what is in the cache is taken."""

from __future__ import annotations

import socket
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.support.helpers import free_port
from toolkit.data import hub
from toolkit.data.hub import model_folder, why_out_of_reach
from toolkit.data.text import load_text
from toolkit.data.tokenizer import load_tokenizer
from toolkit.errors import UserError

pytestmark = pytest.mark.usefixtures("online")


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a Hub where nobody listens."""
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    return constants.ENDPOINT


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (lambda: load_tokenizer("gpt2"), "tokenizer='gpt2' is neither a folder nor in the Hub's cache, and {hub}"),
        (
            lambda: model_folder("some/model"),
            "model='some/model' is neither a folder nor in the Hub's cache, and {hub}",
        ),
        (
            lambda: load_text(
                "some/text", None, tokenizer="bytes", block_size=8, batch_size=1, on_main=lambda read: read()
            ),
            "dataset='some/text': {hub}",
        ),
    ],
    ids=["tokenizer", "model", "text"],
)
def test_a_name_without_a_network_is_one_line(load, says, unreachable, capfd):
    with pytest.raises(UserError) as refusal:
        load()
    assert str(refusal.value).startswith(says.format(hub=f"{unreachable} does not answer"))
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr().err == ""


def test_one_question_is_asked_and_none_that_is_repeated(unreachable, monkeypatch):
    def repeated(*_args: object, **_options: object) -> None:
        raise AssertionError("the client repeats this one")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", repeated)
    assert why_out_of_reach() == f"{unreachable} does not answer"
    with pytest.raises(UserError, match="does not answer: give a folder"):
        load_tokenizer("gpt2")


def test_a_hub_that_connects_and_then_says_nothing_is_given_up_on(monkeypatch):
    monkeypatch.setattr(hub, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # the system connects, nobody answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert why_out_of_reach() == f"{constants.ENDPOINT} does not answer"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/such-model-anywhere", "neither a folder nor in the Hub's cache"),
        ("not a name at all", "neither a folder nor a Hub name"),
        ("{empty}", "has no config.json"),
    ],
)
def test_weights_that_cannot_be_found_are_refused_at_once(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=words):
        model_folder(name.format(empty=tmp_path))

"""Models and tokenizers of the Hub: without a network one line within seconds, and what is in the cache is taken."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.data.layouts import REVISION
from tests.support.helpers import free_port
from toolkit.data import hub
from toolkit.data.hub import model_folder, pretrained_folder, why_out_of_reach
from toolkit.data.text import load_text
from toolkit.data.tokenizer import ByteTokenizer, load_tokenizer
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
        (lambda: load_tokenizer("gpt2"), "tokenizer='gpt2': is neither a folder nor in the Hub's cache, and {hub}"),
        (
            lambda: model_folder("some/model"),
            "model='some/model': is neither a folder nor in the Hub's cache, and {hub}",
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
    with pytest.raises(UserError, match=r"does not answer\. Give a folder"):
        load_tokenizer("gpt2")


def test_a_hub_that_connects_and_then_says_nothing_is_given_up_on(monkeypatch):
    monkeypatch.setattr(hub, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # the system connects, nobody answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert why_out_of_reach() == f"{constants.ENDPOINT} does not answer"


def test_a_name_that_is_never_looked_up_is_given_up_on(monkeypatch):
    gave_up = threading.Event()

    def stuck(*_args: object) -> socket.socket:
        gave_up.wait(20)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", stuck)
    assert (why_out_of_reach() or "").endswith("does not answer")
    gave_up.set()


def test_an_error_of_any_http_library_is_one_line(monkeypatch):
    class ConnectError(Exception):
        """As httpx2's, which is no OSError."""

    def fail(*_args: object, **_options: object) -> None:
        raise ConnectError("no such host")

    monkeypatch.setattr("toolkit.data.hub.why_out_of_reach", lambda: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(UserError, match=r"model='some/model': cannot be read \(ConnectError"):
        model_folder("some/model")


@pytest.mark.usefixtures("unreachable")
def test_a_tokenizer_in_the_cache_is_taken_and_a_half_filled_cache_is_not(cache):
    store = cache / "hub" / "models--some--one"
    (store / "refs").mkdir(parents=True)
    (store / "refs" / "main").write_text(REVISION)
    snapshot = store / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(UserError, match="nor in the Hub's cache"):
        pretrained_folder("tokenizer", "some/one", wanted=["*.json"], needed=["tokenizer*"])
    ByteTokenizer().save_pretrained(snapshot)
    assert pretrained_folder("tokenizer", "some/one", wanted=["*.json"], needed=["tokenizer*"]) == str(snapshot)


class Proxy(BaseHTTPRequestHandler):
    """Answers for every host, with the code in its name: http://503.invalid."""

    def do_HEAD(self) -> None:
        self.send_response(int(self.headers["Host"].partition(".")[0]))
        self.end_headers()

    def log_message(self, *_words: object) -> None: ...


def test_a_proxy_is_asked_and_a_hub_that_is_down_is_out_of_reach(monkeypatch):
    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setattr(constants, "ENDPOINT", "http://200.invalid")
        assert why_out_of_reach() is None
        monkeypatch.setattr(constants, "ENDPOINT", "http://503.invalid")
        assert why_out_of_reach() == "http://503.invalid answers 503"
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/such-model-anywhere", "neither a folder nor in the Hub's cache"),
        ("not a name at all", "is not a folder. Give a folder, or a Hub name"),
    ],
)
def test_weights_that_cannot_be_found_are_refused_at_once(name: str, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=words):
        model_folder(name)

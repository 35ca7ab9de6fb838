"""Models and tokenizers from the Hub, its cache, and without a network."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants

from benchmarks.support.processes import free_port
from tests.data.layouts import REVISION
from toolkit.data import hub
from toolkit.data.hub import model_folder, pretrained_folder, why_out_of_reach
from toolkit.data.text import load_text
from toolkit.data.tokenizer import ByteTokenizer, load_tokenizer
from toolkit.errors import UserError

pytestmark = pytest.mark.usefixtures("online")


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a Hub without a server."""
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    return constants.ENDPOINT


def load_some_text() -> None:
    load_text("some/text", None, tokenizer="bytes", block_size=8, batch_size=1, on_main=lambda read: read())


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda: load_tokenizer("gpt2"), "tokenizer='gpt2': is neither a folder nor in the Hub's cache, and "),
        (lambda: model_folder("some/model"), "model='some/model': is neither a folder nor in the Hub's cache, and "),
        (load_some_text, "dataset='some/text': "),
    ],
    ids=["tokenizer", "model", "text"],
)
def test_unreachable_hub_raises(load, message, unreachable, capfd, monkeypatch):
    retrying = Mock(side_effect=AssertionError)  # its retries take minutes
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", retrying)
    assert why_out_of_reach() == f"{unreachable} does not answer"
    with pytest.raises(UserError) as error:
        load()
    assert str(error.value).startswith(f"{message}{unreachable} does not answer. ")
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


def test_silent_hub_is_unreachable(monkeypatch):
    monkeypatch.setattr(hub, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # connects and does not respond
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert why_out_of_reach() == f"{constants.ENDPOINT} does not answer"


def test_name_lookup_has_a_timeout(monkeypatch):
    done = threading.Event()
    timeouts = []

    def stuck(*_args: object) -> socket.socket:
        timeouts.append(not done.wait(20))
        raise OSError

    monkeypatch.setattr(hub, "PROBE_S", 0.5)
    monkeypatch.setattr(socket, "create_connection", stuck)
    assert (why_out_of_reach() or "").endswith("does not answer")
    assert timeouts == []
    done.set()


def test_error_of_any_http_library_is_a_user_error(monkeypatch):
    error = type("ConnectError", (Exception,), {})("no such host")  # not an OSError, as in httpx2
    monkeypatch.setattr("toolkit.data.hub.why_out_of_reach", lambda: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", Mock(side_effect=error))
    with pytest.raises(UserError, match=r"model='some/model': cannot be read \(ConnectError"):
        model_folder("some/model")


@pytest.mark.usefixtures("unreachable")
def test_cached_tokenizer_is_used_unless_incomplete(cache):
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
    """A proxy that responds with the status in the host name, such as http://503.invalid."""

    def do_HEAD(self) -> None:
        self.send_response(int(self.headers["Host"].partition(".")[0]))
        self.end_headers()

    def log_message(self, *_words: object) -> None: ...


def test_hub_is_reached_through_a_proxy_and_503_is_unreachable(monkeypatch):
    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setattr(constants, "ENDPOINT", "http://200.invalid")
        assert why_out_of_reach() is None
        monkeypatch.setattr(constants, "ENDPOINT", "http://503.invalid")
        assert why_out_of_reach() == "http://503.invalid answers 503"
        server.shutdown()


def test_invalid_model_name_raises():
    with pytest.raises(UserError, match=r"is not a folder\. Give a folder, or a Hub name"):
        model_folder("not a name at all")

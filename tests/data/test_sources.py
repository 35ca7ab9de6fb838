"""The Hub as a source: its cache, a probe that answers within seconds, and no error that stops the search."""

import socket
import threading
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.data.layouts import write_parquet_set
from tests.support.helpers import free_port
from toolkit.data import hub
from toolkit.data.sources import NotFoundHere, locate

REVISION = "0123456789abcdef0123456789abcdef01234567"


def fill_hub_cache(hub: Path, repo: str, inner: str) -> Path:
    """The files of `repo` as the Hub's client keeps them."""
    store = hub / f"datasets--{repo.replace('/', '--')}"
    (store / "refs").mkdir(parents=True)
    (store / "refs" / "main").write_text(REVISION)
    return write_parquet_set(store / "snapshots" / REVISION / inner)


@pytest.mark.parametrize(
    ("name", "repo"), [("mnist", "ylecun/mnist"), ("fashion_mnist", "zalando-datasets/fashion_mnist")]
)
def test_a_set_in_the_cache_of_the_hub_is_found_offline(cache, name, repo):
    folder = fill_hub_cache(cache / "hub", repo, name)
    assert [path.parent for path in locate(name, None).train] == [folder, folder]


def test_a_half_filled_cache_of_the_hub_is_no_set(cache):
    folder = fill_hub_cache(cache / "hub", "ylecun/mnist", "mnist")
    (folder / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(NotFoundHere, match="not in the Hub's cache"):
        locate("mnist", None)


def test_a_data_dir_is_the_only_place_that_is_asked(cache, tmp_path):
    fill_hub_cache(cache / "hub", "ylecun/mnist", "mnist")
    with pytest.raises(NotFoundHere, match="holds neither"):
        locate("mnist", tmp_path)


def test_offline_the_hub_is_not_asked():
    with pytest.raises(NotFoundHere, match="HF_HUB_OFFLINE"):
        locate("mnist", None)


@pytest.mark.usefixtures("online")
def test_a_hub_that_refuses_connections_is_named(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(NotFoundHere, match=r"127\.0\.0\.1:\d+ does not answer"):
        locate("mnist", None)


@pytest.mark.usefixtures("online")
def test_a_hub_that_connects_and_then_says_nothing_is_given_up_on(monkeypatch):
    monkeypatch.setattr(hub, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # the system connects, nobody answers
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(NotFoundHere, match=r"127\.0\.0\.1:\d+ does not answer"):
            locate("mnist", None)


@pytest.mark.usefixtures("online")
def test_a_name_that_is_never_looked_up_is_given_up_on(monkeypatch):
    gave_up = threading.Event()

    def stuck(*_args: object) -> socket.socket:
        gave_up.wait(20)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", stuck)
    with pytest.raises(NotFoundHere, match="does not answer"):
        locate("mnist", None)
    gave_up.set()

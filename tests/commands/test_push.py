"""`toolkit push`: the folder that it makes of a run, and what a stand-in for the Hub receives."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file

import toolkit as tk
from language.model_card import model_card
from tests.commands.report.conftest import write_run
from tests.integrations.transformers import families
from tests.recipes.language.test_language_models import FACTS
from tests.support.helpers import free_port
from tests.support.small_run import SmallModel, small_config, small_trainer
from toolkit.commands import main
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.integrations.transformers import causal_lm
from toolkit.run.config.callback_options import CheckpointOptions

TOKEN = "hf_" + "t" * 34

# The Hub's client uploads large files in a way of which its own HTTP library warns.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


class Weights(tk.Callback):
    """Those of each checkpoint, by step."""

    def __init__(self) -> None:
        self.of: dict[int, dict[str, torch.Tensor]] = {}

    def on_save(self, trainer: tk.Trainer, folder: Path) -> None:  # noqa: ARG002
        self.of[trainer.state.step] = {name: value.clone() for name, value in trainer.raw_model.state_dict().items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run as the trainer leaves it, of which the first of two evaluations is the best, and the weights of then."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    weights, options = Weights(), CheckpointOptions(best="eval/loss", best_is="higher")
    with small_trainer(small_config(folder, checkpoint=options), callbacks=[weights]) as trainer:
        trainer.run.describe(dataset="mnist", dataset_notice="made up, not /home/someone/data/mnist")
        trainer.run.finish(trainer.fit())
    return folder, weights.of[10]


@pytest.fixture
def run(finished: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(finished[0], tmp_path / "small")


@pytest.fixture(autouse=True)
def without_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line with which `toolkit push` refuses."""
    assert main(["push", *map(str, words)]) == EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


# --- the folder ------------------------------------------------------------------------------------------------------


def test_a_dry_run_writes_weights_card_curves_and_numbers_without_a_token_or_a_network(
    finished: tuple[Path, dict[str, torch.Tensor]], run: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["push", str(run), "me/small", "--dry-run", "--license", "apache-2.0"]) == EXIT_DONE
    assert "not uploaded" in capsys.readouterr().out
    folder = run / "push"
    model = SmallModel(make_expert_groups(1))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    assert all(torch.equal(value, finished[1][name]) for name, value in model.state_dict().items())
    card = ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {
        "library_name": "toolkit",
        "license": "apache-2.0",
        "tags": ["toolkit", "small"],
        "datasets": ["ylecun/mnist"],
    }
    results = json.loads((run / "results.json").read_text())
    best = results["best_checkpoint"]["evaluated"]
    assert results["best_checkpoint"]["step"] == 10
    assert best["eval/accuracy"] == results["test_accuracy"]
    command = next(line for line in (run / "code.txt").read_text().splitlines() if line.startswith("command: "))
    said = [
        "# small on mnist", 'hf_hub_download("me/small", "model.safetensors")',
        f"{100 * best['eval/accuracy']:.2f} %", "made up, not mnist", "train: 95 rows",
        Path(command.split()[1]).name, "torch " + torch.__version__, "1 process(es) on cpu", "![loss](loss.png)",
        "## Licence\n\napache-2.0",
    ]  # fmt: skip
    assert [words for words in said if words not in card.text] == []
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "run" / "results.json").read_text())["test_loss"] == results["test_loss"]
    assert (folder / "run" / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()
    texts = [path for path in folder.rglob("*") if path.suffix in (".md", ".json", ".jsonl")]
    assert [path for path in texts if str(run.parent) in path.read_text() or "/home/" in path.read_text()] == []


def test_a_second_dry_run_replaces_the_folder(run: Path):
    assert main(["push", str(run), "me/small", "--dry-run"]) == EXIT_DONE
    (run / "push" / "stale.bin").touch()
    assert main(["push", str(run), "me/other", "--dry-run"]) == EXIT_DONE
    assert not (run / "push" / "stale.bin").exists()
    card = (run / "push" / "README.md").read_text()
    assert 'hf_hub_download("me/other"' in card
    assert "None was given: ask the owner" in card
    assert [path.name for path in run.glob(".*partial*")] == []


def test_a_model_of_transformers_keeps_its_card_which_names_the_repository(tmp_path: Path):
    run = write_run(tmp_path / "lm", results={"recipe": "lm_moe", "expert_placement": {"0": [[0, 1]]}})
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    (run / "model" / "model.safetensors").write_bytes(b"weights")
    (run / "model" / "README.md").write_text(model_card(FACTS, ["to be or"]))
    assert main(["push", str(run), "me/lm", "--dry-run"]) == EXIT_DONE
    card = ModelCard.load(run / "push" / "README.md")
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["toolkit", "qwen3_moe", "lm_moe", "mixture-of-experts"]
    assert 'AutoModelForCausalLM.from_pretrained("me/lm")' in card.text
    assert "    to be or" in card.text
    assert "| command" in card.text
    assert (run / "push" / "model.safetensors").read_bytes() == b"weights"
    assert (run / "push" / "loss.png").exists(), "drawn from the metrics, as the run has no picture"


def test_an_adapter_names_its_base_but_not_the_folder_it_lay_in(tmp_path: Path):
    run = write_run(tmp_path / "adapted", results={"recipe": "finetune_moe"})
    (run / "adapter").mkdir()
    (run / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "/home/someone/cache/base"}')
    (run / "adapter" / "README.md").write_text("PEFT's template")
    assert main(["push", str(run), "me/adapter", "--dry-run"]) == EXIT_DONE
    card = ModelCard.load(run / "push" / "README.md")
    assert card.data.library_name == "peft"
    assert 'AutoModelForCausalLM.from_pretrained("base")  # what was adapted: a name of' in card.text
    assert json.loads((run / "push" / "adapter_config.json").read_text()) == {"base_model_name_or_path": "base"}


def snippet(folder: Path) -> str:
    """The code of the card in `folder`."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return code


def test_the_code_on_the_card_of_a_checkpoint_loads_it(
    finished: tuple[Path, dict[str, torch.Tensor]], run: Path, monkeypatch: pytest.MonkeyPatch
):
    assert main(["push", str(run), "me/small", "--dry-run"]) == EXIT_DONE
    on_the_hub = {("me/small", path.name): str(path) for path in (run / "push").iterdir()}
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *names: on_the_hub[names])
    known: dict[str, Any] = {}
    exec(snippet(run / "push"), known)
    model = known["load"](SmallModel(make_expert_groups(1)))
    assert not model.training
    assert all(torch.equal(value, finished[1][name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # which PEFT asks for
def test_the_code_on_the_card_of_an_adapter_loads_it_and_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    causal_lm(families.config("qwen3_moe")).save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(causal_lm(tmp_path / "base"), settings).eval()
    run = write_run(tmp_path / "adapted", results={"recipe": "finetune_moe"})
    model.save_pretrained(run / "adapter")
    assert main(["push", str(run), "me/adapter", "--dry-run"]) == EXIT_DONE
    monkeypatch.chdir(tmp_path)  # where the base is, of whose place the card has the last part
    known: dict[str, Any] = {}
    exec(snippet(run / "push").replace("me/adapter", str(run / "push")), known)
    ids = families.tokens(0, 2)
    with torch.no_grad():
        assert torch.equal(known["model"].eval()(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("results.json", "wall_seconds", float("nan")),
        ("results.json", "profile", "fast"),
        ("config.json", "data_identity", [1]),
        ("metrics.jsonl", "train/loss", "high"),
        ("metrics.jsonl", "eval/loss", [1]),
    ],
)
def test_damaged_values_are_left_out_of_card_and_curves(run: Path, file: str, name: str, value: Any):
    (run / "loss.png").unlink(missing_ok=True)
    (run / "digests.json").unlink()  # a run that another program wrote
    first, *others = (run / file).read_text().splitlines() if file == "metrics.jsonl" else [(run / file).read_text()]
    (run / file).write_text("\n".join([json.dumps(json.loads(first) | {name: value}), *others]) + "\n")
    assert main(["push", str(run), "me/small", "--dry-run"]) == EXIT_DONE
    assert (run / "push" / "loss.png").exists()


def test_what_cannot_be_pushed_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("small", "me/small/x", "me/sm all"):
        assert refusal(capsys, run, name, "--dry-run").startswith(f"{name!r} names no repository of the Hub")
    assert "no such folder" in refusal(capsys, tmp_path / "nowhere", "me/x", "--dry-run")
    going_on = write_run(tmp_path / "goes on", finished=False)
    assert "is not finished: type its command again" in refusal(capsys, going_on, "me/x", "--dry-run")
    empty = write_run(tmp_path / "empty")
    assert "holds no weights, neither a model/ nor a checkpoint" in refusal(capsys, empty, "me/x", "--dry-run")
    metrics = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    said = refusal(capsys, run, "me/x", "--dry-run")
    assert said == f"{run}: metrics.jsonl was changed after the run was finished: restore it."
    (run / "digests.json").unlink()
    assert "metrics.jsonl of the run is no text (" in refusal(capsys, run, "me/x", "--dry-run")
    (run / "metrics.jsonl").write_bytes(metrics)
    results = (run / "results.json").read_text()
    (run / "results.json").write_text("[1, 2]")
    assert "results.json holds list in place of an object: delete it" in refusal(capsys, run, "me/x", "--dry-run")
    (run / "results.json").write_text(results)
    best = run / "checkpoints" / "step-00000010"
    shutil.copytree(best, best.with_name("step-00000001"))  # another one, which is not what the figures are of
    (best / "model.safetensors").write_bytes(b"other")
    assert f"its checkpoint {best.name} is damaged (" in refusal(capsys, run, "me/x", "--dry-run")
    assert list(tmp_path.rglob("push")) == []


@pytest.mark.parametrize("place", ["model/notes.txt", "model", "metrics.jsonl", "loss.png"])
def test_what_a_link_leads_to_is_not_uploaded(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "config.json").write_text("precious")
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    link = run / place
    if place == "model":
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "private" if place == "model" else tmp_path / "private" / "config.json")
    assert f"{link}: is a link, and what it leads to would be uploaded" in refusal(capsys, run, "me/x", "--dry-run")
    assert not (run / "push").exists()


# --- the Hub ---------------------------------------------------------------------------------------------------------


class StandIn(BaseHTTPRequestHandler):
    """What the Hub answers to the creation of a repository, the question how to send each file, uploads and commits."""

    repositories: dict[str, dict[str, Any]]
    """Name -> `private`, and `files`."""
    uploaded: dict[str, bytes]
    """By digest."""
    refuses: list[str]
    """Parts of addresses that this token may not use."""

    def do_HEAD(self) -> None:
        self._answer({})

    def do_GET(self) -> None:
        name = self.path.removeprefix("/api/models/").partition("?")[0]
        if (found := self.repositories.get(name)) is not None:
            self._answer({"id": name, "private": found["private"], "sha": "0" * 40})
        else:
            self._answer({}, 404, **{"X-Error-Code": "RepoNotFound"})

    def do_PUT(self) -> None:
        self.uploaded[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if any(part in self.path for part in self.refuses) or self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer({"error": "no"}, 403)
        elif self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            private = wanted.get("private") or wanted.get("visibility") == "private"
            self.repositories[name] = {"private": private, "files": {}}
            self._answer({"url": f"{constants.ENDPOINT}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            yaml.safe_load(json.loads(body)["content"].split("---")[1])
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            how = [(file["path"], file["path"].endswith(".safetensors")) for file in json.loads(body)["files"]]
            files = [{"path": p, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False} for p, lfs in how]
            self._answer({"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{constants.ENDPOINT}/large/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            self._commit(self.path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            self._answer({}, 404)

    def _commit(self, name: str, body: bytes) -> None:
        files = self.repositories[name]["files"]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.uploaded[value["oid"]]
                assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
        self._answer({"commitUrl": f"{constants.ENDPOINT}/{name}/commit/1", "commitOid": "1" * 40})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def _answer(self, values: dict[str, Any], code: int = 200, **headers: str) -> None:
        text = json.dumps(values).encode()
        self.send_response(code)
        for name, value in (headers | {"Content-Length": str(len(text))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *_words: object) -> None: ...


@pytest.fixture
def hub(online: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StandIn]]:  # noqa: ARG001
    """A stand-in for the Hub on this machine, to which a token is known."""
    handler: Any = type("Hub", (StandIn,), {"repositories": {}, "uploaded": {}, "refuses": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # whose servers are not stood in for
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield handler
        server.shutdown()
        thread.join()


def test_the_hub_receives_the_folder_in_a_private_repository_and_a_second_push_updates_it(
    run: Path, hub: type[StandIn], capsys: pytest.CaptureFixture[str]
):
    assert main(["push", str(run), "me/small"]) == EXIT_DONE
    assert f"{constants.ENDPOINT}/me/small: " in capsys.readouterr().out
    folder = run / "push"
    on_disk = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert hub.repositories["me/small"] == {"private": True, "files": on_disk}
    assert on_disk["model.safetensors"] in hub.uploaded.values()
    assert main(["push", str(run), "me/small", "--license", "mit"]) == EXIT_DONE
    assert b"license: mit" in hub.repositories["me/small"]["files"]["README.md"]
    capsys.readouterr()
    assert refusal(capsys, run, "me/small", "--public").startswith("me/small is there, and private: leave out --public")


def test_public_is_public_and_stays_so(run: Path, hub: type[StandIn], capsys: pytest.CaptureFixture[str]):
    assert main(["push", str(run), "me/open", "--public"]) == EXIT_DONE
    assert hub.repositories["me/open"]["private"] is False
    hub.repositories["me/open"]["files"].clear()
    capsys.readouterr()
    assert refusal(capsys, run, "me/open").startswith("me/open is there, and public: add --public")
    assert hub.repositories["me/open"]["files"] == {}


@pytest.mark.parametrize("step", ["repos/create", "/preupload/", "/commit/"])
def test_a_token_that_may_not_write_is_one_line(
    step: str, run: Path, hub: type[StandIn], capsys: pytest.CaptureFixture[str]
):
    hub.refuses.append(step)
    line = refusal(capsys, run, "them/small")
    assert line.startswith("them/small: the Hub answers 403: use a token that may write to them; the files are in ")


@pytest.mark.usefixtures("online")
def test_without_a_token_or_a_hub_nothing_is_written(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert refusal(capsys, run, "me/small").startswith(
        "there is no token for the Hub: type hf auth login, or set HF_TOKEN"
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    line = refusal(capsys, run, "me/small")
    assert line.startswith(f"{constants.ENDPOINT} does not answer: try again when it can be asked; --dry-run writes")
    assert not (run / "push").exists()

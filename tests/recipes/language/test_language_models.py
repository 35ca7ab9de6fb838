"""Small language models: sizes, samples, export, and cached runs."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.support.processes import run_distributed
from language.cached_run import cached_run
from language.model_card import export_language_model
from language.small_models import describe_language_model, language_model_config, sample_tokens
from toolkit.data.tokenizer import ByteTokenizer
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.transformers import causal_lm, experts_modules, use_toolkit_kernel
from toolkit.run.launch.restarts import restarted

SIZES = {"vocab_size": 256, "dim": 32, "layers": 2, "heads": 4, "context": 64}
EXPERTS = {"experts": 6, "top_k": 2, "expert_hidden_size": 24}
FACTS = {
    "experts": 6, "top_k": 2, "model": None, "dataset": "a poem", "tokenizer": "bytes", "context": 64, "lr": 0.002,
    "samples": 100, "steps": 25, "test_loss": 2.0, "test_bits_per_byte": 2.885, "batch_size": 4, "seed": 3,
    "sample_tokens": 40, "model_type": "qwen3_moe", "parameters": 1234567, "active_parameters": 456789,
}  # fmt: skip


def build(architecture="qwen3_moe", **changes):
    torch.manual_seed(0)
    config = language_model_config(architecture, **{**SIZES, **EXPERTS, **changes})
    return causal_lm(config, experts_implementation=use_toolkit_kernel())


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_active_parameters_are_parameters_per_token(architecture):
    facts = describe_language_model(build(architecture))
    # Per layer: attention with 4 query, 2 key and 2 value heads of size 8; a router of 6 rows; experts of three
    # matrices (24, 32). Outside the layers: input and output embeddings. Norms: two per layer and one at the end;
    # Qwen3 has two more of size 8 per layer.
    norms = 2 * 2 * 32 + 32 + (2 * 2 * 8 if architecture == "qwen3_moe" else 0)
    attention, router, expert = 32 * (32 + 16 + 16 + 32), 6 * 32, 3 * 24 * 32
    rest = 2 * 256 * 32 + norms + 2 * (attention + router)
    assert facts["parameters"] == rest + 2 * 6 * expert
    assert facts["active_parameters"] == rest + 2 * 2 * expert
    dense = build(architecture, experts=0)
    assert not experts_modules(dense)
    active = facts["active_parameters"] - 2 * router
    dense_facts = describe_language_model(dense)
    assert (dense_facts["parameters"], dense_facts["active_parameters"]) == (active, active)


def test_dim_that_heads_do_not_divide_raises():
    with pytest.raises(UserError, match="dim=30: take a multiple of twice heads=4"):
        build(dim=30)


def test_vocabulary_smaller_than_tokenizer_raises(tmp_path):
    build().save_pretrained(tmp_path)
    assert causal_lm(tmp_path, vocab_size=256).config.vocab_size == 256
    with pytest.raises(UserError, match="has 256 ids and the tokenizer 300"):
        causal_lm(tmp_path, vocab_size=300)


def test_sample_tokens_follows_model_and_depends_on_seed():
    model = build("mixtral")
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    greedy = sample_tokens(model, prompts, length=9, temperature=1e-6)
    assert greedy[:, :3].equal(prompts)
    for end in range(3, 12):  # without a cache
        assert model(input_ids=greedy[:, :end]).logits[:, -1].argmax(-1).equal(greedy[:, end])
    drawn = [sample_tokens(model, prompts, length=9, seed=seed).tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert model.training


class FullDisk:
    """Tokenizer that cannot be written."""

    def save_pretrained(self, folder):
        raise OSError(28, "No space left on device", str(folder))


def export_on_ranks(folder):
    """Return tokens, logits before sharding, samples after sharding, and the error of an export on a full disk."""
    with pytest.raises(UserError) as error:
        export_language_model(build(), folder / "full", tokenizer=FullDisk(), facts=FACTS, samples=["one"])
    model = build()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    model.eval()
    tokens = torch.randint(256, (2, 20))
    logits = model(input_ids=tokens).logits.detach()
    order = ExpertPlacement(((5, 0, 3, 1), (4, 2)))
    shard_experts(model, make_expert_groups(2), placement=lambda *_: order)
    texts = sample_tokens(model, tokens[:, :4], length=8)
    export_language_model(
        model, folder / "model", tokenizer=ByteTokenizer(), facts=FACTS, samples=["one\ntwo", "three"]
    )
    return tokens.numpy(), logits.numpy(), texts.numpy(), str(error.value)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    return folder, run_distributed(export_on_ranks, 2, folder)


def test_export_on_full_disk_raises_on_all_ranks(exported):
    folder, ranks = exported
    errors = {error for *_, error in ranks}
    assert len(errors) == 1
    assert errors.pop().startswith(f"{folder / 'full'}: cannot be written ([Errno 28] No space left")


def test_model_exported_by_two_ranks_has_equal_logits(exported):
    folder, ((tokens, logits, texts, _), other) = exported
    assert (texts == other[2]).all(), "ranks sampled different texts"
    tokens, logits = torch.from_numpy(tokens), torch.from_numpy(logits)
    use_toolkit_kernel()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", experts_implementation="toolkit")
    assert model(input_ids=tokens).logits.equal(logits)
    assert sample_tokens(model, tokens[:, :4], length=8).equal(torch.from_numpy(texts))
    plain = AutoModelForCausalLM.from_pretrained(folder / "model")(input_ids=tokens).logits
    # The kernel of transformers sums in another order.
    assert F.mse_loss(plain, logits).sqrt() < 1e-6 * plain.std()
    assert AutoTokenizer.from_pretrained(folder / "model").encode("é") == [0xC3, 0xA9]


def test_model_card_has_facts_and_samples(exported):
    card = (exported[0] / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for fact in (
        "an MoE model of 6 experts per layer of which a token uses 2, trained from scratch",
        "1,234,567, of which a token uses 456,789",
        "6,400 tokens of a poem, in 25 steps",
        "2.8850 bits per byte; perplexity 7.389 per token",
        "first 24 tokens",
        "    one\n    two\n\n---\n\n    three\n",
    ):
        assert fact in card


RECIPE = """
import os, pathlib, sys
*words, _, folder = sys.argv[1:]
folder = pathlib.Path(folder)
(folder / "model").mkdir(parents=True, exist_ok=True)
names = ("WORLD_SIZE", "ACCELERATE_USE_CPU", "TOOLKIT_RESTARTED")
with (folder / "starts").open("a") as starts:
    print(*words, *map(os.environ.get, names), file=starts)
if "--fail" in words:
    sys.exit(3)
(folder / "results.json").write_text("{}")
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "some_recipe.py").write_text(RECIPE)
    return tmp_path / "some_recipe.py"


def starts(folder):
    return (folder / "starts").read_text().splitlines()


def test_run_is_cached_by_flags_data_and_recipe(recipe):
    def run(lr="1", key="text"):
        return cached_run(recipe, ["--lr", lr], needs="model", key=key)

    first = run()
    assert first.name.startswith("some_recipe-")
    assert run() == first
    assert len(starts(first)) == 1
    others = {run(lr="2"), run(key="other text")}
    recipe.write_text(RECIPE + "\n")
    assert len(others | {first, run()}) == 4


def test_run_without_needed_folder_is_repeated(recipe):
    folder = cached_run(recipe, [], needs="model")
    (folder / "model").rmdir()
    assert cached_run(recipe, [], needs="model") == folder
    assert (folder / "model").is_dir()
    assert len(starts(folder)) == 1


def test_cached_run_ignores_launcher_and_restart_of_caller(recipe, monkeypatch):
    environment = {"WORLD_SIZE": "2", "RANK": "0", "ACCELERATE_USE_CPU": "true"}
    for name, value in (environment | restarted(Path("run"), ["a rank was killed"])).items():
        monkeypatch.setenv(name, value)
    assert starts(cached_run(recipe, ["--a"], needs="model")) == ["--a None None None"]


def test_failed_run_raises_and_is_resumed_by_next_call(recipe):
    for _ in range(2):
        with pytest.raises(UserError, match=r"some_recipe.py ended with exit code 3, see above"):
            cached_run(recipe, ["--fail"], needs="model")
    (folder,) = (path for path in (recipe.parent / "cache").iterdir() if path.is_dir())
    assert len(starts(folder)) == 2


def test_cache_that_cannot_be_written_raises(recipe, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(recipe))
    with pytest.raises(UserError, match="set TOOLKIT_CACHE_DIR"):
        cached_run(recipe, [], needs="model")

"""Small language models: sizes that can be compared, samples, and what is exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from language.model_card import export_language_model
from language.small_models import describe_language_model, language_model_config, sample_tokens
from tests.support.helpers import run_distributed
from toolkit.data.tokenizer import ByteTokenizer
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.transformers import causal_lm, experts_modules, use_toolkit_kernel

SIZES: dict[str, Any] = {"vocab_size": 256, "dim": 32, "layers": 2, "heads": 4, "context": 64}
MIXTURE: dict[str, Any] = {"experts": 6, "top_k": 2, "expert_hidden_size": 24}
ARCHITECTURES = ("qwen3_moe", "mixtral")
FACTS = {
    "experts": 6, "top_k": 2, "model": None, "dataset": "a poem", "tokenizer": "bytes", "context": 64, "lr": 0.002,
    "samples": 100, "steps": 25, "test_loss": 2.0, "test_bits_per_byte": 2.885, "batch_size": 4, "seed": 3,
    "sample_tokens": 40, "model_type": "qwen3_moe", "parameters": 1234567, "active_parameters": 456789,
}  # fmt: skip


def build(architecture: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = language_model_config(architecture, **{**SIZES, **MIXTURE, **changes})
    return causal_lm(config, experts_implementation=use_toolkit_kernel())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_active_parameters_are_those_that_a_token_uses(architecture):
    facts = describe_language_model(build(architecture))
    # By layer: attention reads 32 and has four heads of 8, two of keys and two of values; a router of 6 rows;
    # experts of three matrices 24 x 32. Outside: embeddings in and out. Norms: two a layer, one at the end, and
    # in Qwen3 two of 8 a layer.
    norms = 2 * 2 * 32 + 32 + (2 * 2 * 8 if architecture == "qwen3_moe" else 0)
    attention, router, expert = 32 * (32 + 16 + 16 + 32), 6 * 32, 3 * 24 * 32
    rest = 2 * 256 * 32 + norms + 2 * (attention + router)
    assert facts["parameters"] == rest + 2 * 6 * expert
    assert facts["active_parameters"] == rest + 2 * 2 * expert


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_dense_sibling_is_as_large_as_what_a_token_uses(architecture):
    mixture, dense = build(architecture), build(architecture, experts=0)
    assert not experts_modules(dense)
    facts = describe_language_model(dense)
    assert facts["parameters"] == facts["active_parameters"]
    assert describe_language_model(mixture)["active_parameters"] - facts["parameters"] == 2 * 6 * 32  # the routers


def test_heads_that_do_not_fit_into_the_width_are_refused():
    with pytest.raises(UserError, match="dim=30: take a multiple of twice heads=4"):
        build("qwen3_moe", dim=30)


def test_a_model_that_knows_too_few_ids_is_refused(tmp_path):
    build("qwen3_moe").save_pretrained(tmp_path)
    assert causal_lm(tmp_path, vocab_size=256).config.vocab_size == 256
    with pytest.raises(UserError, match="has 256 ids and the tokenizer 300"):
        causal_lm(tmp_path, vocab_size=300)


def test_samples_follow_the_model_and_depend_on_the_seed_alone():
    model = build("mixtral")
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    greedy = sample_tokens(model, prompts, length=9, temperature=1e-6)
    assert greedy[:, :3].equal(prompts)
    for end in range(3, 12):  # without a cache, from the front each time
        assert model(input_ids=greedy[:, :end]).logits[:, -1].argmax(-1).equal(greedy[:, end])
    drawn = [sample_tokens(model, prompts, length=9, seed=seed).tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert model.training


def export_on_two(folder: Any) -> tuple[Any, Any, Any]:
    model = build("qwen3_moe")
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    model.eval()
    tokens = torch.randint(256, (2, 20))
    alone = model(input_ids=tokens).logits.detach()
    order = ExpertPlacement(((5, 0, 3, 1), (4, 2)))
    shard_experts(model, make_expert_groups(2), placement=lambda *_: order)
    texts = sample_tokens(model, tokens[:, :4], length=8)
    export_language_model(model, folder, tokenizer=ByteTokenizer(), facts=FACTS, samples=["one\ntwo", "three"])
    return tokens.numpy(), alone.numpy(), texts.numpy()


class FullDisk:
    """A tokenizer that cannot be written."""

    def save_pretrained(self, folder: Any) -> None:
        raise OSError(28, "No space left on device", str(folder))


def refusal_of_export(folder: Any) -> str:
    try:
        export_language_model(build("qwen3_moe"), folder, tokenizer=FullDisk(), facts=FACTS, samples=["one"])
    except UserError as error:
        return str(error)
    return "none"


def test_a_tokenizer_that_rank_0_cannot_write_ends_all_ranks(tmp_path):
    refusals = run_distributed(refusal_of_export, 2, tmp_path / "model")
    assert len(set(refusals)) == 1
    assert refusals[0].startswith(f"{tmp_path / 'model'}: cannot be written ([Errno 28] No space left")


def test_what_two_ranks_export_is_an_ordinary_model_with_the_same_logits(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tokens, alone, texts), other = run_distributed(export_on_two, 2, tmp_path / "model")
    assert (texts == other[2]).all(), "ranks wrote different texts"
    use_toolkit_kernel()
    same = AutoModelForCausalLM.from_pretrained(tmp_path / "model", experts_implementation="toolkit")
    assert same(input_ids=torch.from_numpy(tokens)).logits.equal(torch.from_numpy(alone))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    logits = plain(input_ids=torch.from_numpy(tokens)).logits
    # transformers' own kernel adds up in another order.
    assert F.mse_loss(logits, torch.from_numpy(alone)).sqrt() < 1e-6 * logits.std()
    assert sample_tokens(same, torch.from_numpy(tokens)[:, :4], length=8).equal(torch.from_numpy(texts))
    assert AutoTokenizer.from_pretrained(tmp_path / "model").encode("é") == [0xC3, 0xA9]
    card = (tmp_path / "model" / "README.md").read_text()
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

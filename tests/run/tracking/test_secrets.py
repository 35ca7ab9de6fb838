from __future__ import annotations

import re

import pytest

from toolkit.run.tracking.secrets import MASK, mask, mask_text

# In two parts each, so that nothing that scans sources for secrets takes them for one.
TOKENS = [
    "hf_" + "abcdEFGH12" * 4,
    "ghp_" + "abcdEFGH12" * 4,
    "github_pat_" + "abcdEFGH12" * 5,
    "glpat-" + "abcdEFGH12" * 2,
    "sk-" + "proj-abcdEFGH12" * 3,
    "AKIA" + "ABCDEFGH12345678",
    "AIza" + "abcdEFGH12" * 4,
    "xoxb-" + "1234567890-abc",
    "wandb_v1_" + "abcdEFGH12" * 4,
    "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_1",
    "-----BEGIN RSA " + "PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("token", TOKENS)
def test_values_shaped_like_known_tokens_are_masked_wherever_they_are(token):
    assert mask_text(f"before {token} after") == f"before {MASK} after"
    assert mask({"a": [{"b": token}]}) == {"a": [{"b": MASK}]}


@pytest.mark.parametrize("name", ["api_key", "hf-token", "WANDB_API_KEY", "password", "clientSecret", "apikey"])
def test_fields_with_telling_names_are_masked(name):
    assert mask({"nested": {name: "sesame"}}) == {"nested": {name: MASK}}


@pytest.mark.parametrize(
    "values", [{"tokens": 3}, {"token_count": "many"}, {"keys": "qkv"}, {"key_size": 64}, {"lr": 0.1}]
)
def test_ordinary_fields_are_left_alone(values):
    assert mask(values) == values


@pytest.mark.parametrize(
    "text",
    [
        "WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567",
        "--api-key 0123456789abcdef0123",
        "+password: 'hunter2hunter2hunter2'",
        "https://user:hunter2@example.com/x",
        "+password = 'hunter2'",
        '+    "db_password": "hunter2",',
        "+DB_PASSWORD=hunter2",
        "+auth_token: hunter2",
        '+secret: str = "hunter2"',
        "+passphrase='hunter2 and more'",
        "login --password hunter2 --verbose",
    ],
)
def test_secrets_in_commands_and_code_are_masked(text):
    assert MASK in mask_text(text)
    assert "0123456789" not in mask_text(text)
    assert "hunter2" not in mask_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "python recipes/mnist_moe.py --lr 1e-3",
        "for key in dictionary_of_all_values:",
        "commit 0123abcd",
        "    next_token = logits.argmax(-1)",
        "    ordered = sorted(names, key=lambda name: name.lower())",
        "    token = tokens[0]",
        "    num_tokens = 3",
        "    key_size: int = 64",
        "    monkey = 3",
        "--tokens 3",
    ],
)
def test_ordinary_text_is_left_alone(text):
    assert mask_text(text) == text


@pytest.mark.parametrize("name", ["label_key", "pad-token", "textKey"])
def test_settings_that_may_be_secrets_can_be_told_apart_and_not_read(name):
    one, other = (mask({name: value}, digests=True)[name] for value in ("label", "text"))
    assert re.fullmatch(r"\*\*\* \([0-9a-f]{4}\)", one)
    assert one != other
    assert one == mask({name: "label"}, digests=True)[name]
    assert mask({name: ""}, digests=True) == {name: ""}


@pytest.mark.parametrize(("name", "value"), [("password", "sesame"), ("client_secret", "x"), ("hub_token", TOKENS[0])])
def test_what_is_surely_a_secret_has_no_digest(name, value):
    assert mask({name: value}, digests=True) == {name: MASK}

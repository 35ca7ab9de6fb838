"""Masks secrets in what a run writes: configuration, git diff, command line, trackers."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from typing import Any

from toolkit.run.config.file import MASK

_SECRET_WORDS = {"secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials"}
_SECRET_LAST_WORDS = {"key", "token", "auth", "pat", "apikey"}
"""Names such as `api_key` and `hf_token` hold secrets; `key_size`, `tokens` and `token_count` do not."""
_SECRET_VALUE = re.compile(
    r"""
    \bhf_[A-Za-z0-9]{30,}                         # Hugging Face
    | \bgh[pousr]_[A-Za-z0-9]{30,}                # GitHub
    | \bgithub_pat_[A-Za-z0-9_]{40,}
    | \bglpat-[A-Za-z0-9_-]{20,}                  # GitLab
    | \bsk-[A-Za-z0-9_-]{20,}                     # OpenAI, Anthropic
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b               # AWS
    | \bAIza[A-Za-z0-9_-]{30,}                    # Google
    | \bxox[abprs]-[A-Za-z0-9-]{10,}              # Slack
    | \bwandb_v1_[A-Za-z0-9_]{20,}                # W&B, new keys
    | \beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*   # JSON web token
    | -----BEGIN[ A-Z]*PRIVATE\ KEY-----[\s\S]*?(?:-----END[ A-Z]*PRIVATE\ KEY-----|\Z)
    | (?<=://)[^/\s:@]+:[^/\s@]+(?=@)             # user:password in an address
    """,
    re.VERBOSE,
)
_ASSIGNMENT = re.compile(
    r"""
    (?P<name>\b[\w-]*(?:key|token|secret|password|passwd|passphrase|credentials?|auth|pat)\b)
    (?P<middle>["']?\s*(?::\s*\w+\s*)?[=:]\s*)      # =, : or an annotated assignment, the name quoted or not
    (?P<value>"[^"\n]*"|'[^'\n]*'|[^\s"',;()\[\]{}]+(?=["',;)\]}\s]|\Z))
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""`WANDB_API_KEY=0123`, `password: "x"`: the name of a secret beside a value of any length, but not beside a call."""
_CODE = {"str", "int", "float", "bool", "bytes", "Tensor", "None", "True", "False", "lambda", "self"}
"""Values beside such names in programs, which are no secrets."""
_FLAG = re.compile(r"(?P<flag>--?[\w-]*(?:key|token|secret|password|passwd|passphrase)\s+)[^\s-]\S*", re.IGNORECASE)
"""`--api-key 0123`."""
DIGEST_ROUNDS = 100_000
"""Of PBKDF2: a twentieth of a second for each word that somebody tries."""


def is_secret_name(name: str) -> bool:
    """Whether a field called `name` holds a secret."""
    words = _words(name)
    return bool(_SECRET_WORDS & set(words)) or words[-1] in _SECRET_LAST_WORDS


def _words(name: str) -> list[str]:
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().replace("-", "_").split("_")


def mask_text(text: str) -> str:
    """`text` with everything that looks like a secret replaced."""
    text = _SECRET_VALUE.sub(MASK, text)
    text = _FLAG.sub(lambda m: m["flag"] + MASK, text)
    return _ASSIGNMENT.sub(_mask_assignment, text)


def _mask_assignment(match: re.Match[str]) -> str:
    name = match["name"]
    value = match["value"]
    is_code = value in _CODE or (name.lower() == "key" and not re.search(r"\d", value))
    return match[0] if is_code or not is_secret_name(name) else name + match["middle"] + MASK


def mask(value: Any, name: str = "", *, digests: bool = False) -> Any:
    """A copy of plain JSON values in which secrets, told by their name or their shape, are replaced.

    With `digests`, a text that may be a setting, such as `label_key`, becomes `*** (1a2b)`, so that two settings can be
    told apart that nobody can read.
    """
    if isinstance(value, dict):
        return {key: mask(item, str(key), digests=digests) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask(item, name, digests=digests) for item in value]
    if not isinstance(value, str):
        return value
    if not value or not is_secret_name(name):
        return mask_text(value)
    # A password decides nothing that is learned, nor does a token of a known form: both may be renewed in a long run.
    is_secret = _SECRET_WORDS & set(_words(name)) or mask_text(value) != value
    return f"{MASK} ({_digest(value, name)})" if digests and not is_secret else MASK


@cache
def _digest(value: str, name: str) -> str:
    """16 bits of `value`: two settings rarely share them, and of a password's many candidates, too many do."""
    return hashlib.pbkdf2_hmac("sha256", value.encode(), name.encode(), DIGEST_ROUNDS)[:2].hex()

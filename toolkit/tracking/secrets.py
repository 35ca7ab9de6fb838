"""Masks secrets in what a run writes: configuration, git diff, command line, trackers."""

from __future__ import annotations

import re
from typing import Any

MASK = "***"
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
    r"""(?P<name>\b[A-Za-z_-]*(?:key|token|secret|password|passwd))(?P<middle>["']?\s*[=:]\s*["']?|\s+)"""
    r"""(?P<value>[A-Za-z0-9+/_.-]{16,})""",
    re.IGNORECASE,
)
"""`WANDB_API_KEY=0123...` and the like: the name of a secret beside a long value."""


def is_secret_name(name: str) -> bool:
    """Whether a field called `name` holds a secret."""
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().replace("-", "_").split("_")
    return bool(_SECRET_WORDS & set(words)) or words[-1] in _SECRET_LAST_WORDS


def mask_text(text: str) -> str:
    """`text` with everything that looks like a secret replaced."""
    text = _SECRET_VALUE.sub(MASK, text)
    return _ASSIGNMENT.sub(lambda m: m["name"] + m["middle"] + MASK if re.search(r"\d", m["value"]) else m[0], text)


def mask(value: Any, name: str = "") -> Any:
    """A copy of plain JSON values in which secrets, told by their name or their shape, are replaced."""
    if isinstance(value, dict):
        return {key: mask(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask(item, name) for item in value]
    if isinstance(value, str):
        return MASK if value and is_secret_name(name) else mask_text(value)
    return value

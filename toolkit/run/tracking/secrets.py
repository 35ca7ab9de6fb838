"""Masks secrets in what a run writes: configuration, git diff, command line, trackers."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from typing import Any

from toolkit.run.config.file import MASK

_SURELY_SECRET = re.compile(r"passw|passphrase|pwd|secret|credential|api_?keys?$|authorization|(?:^|_)pass$")
"""Found in names in lower case."""
_PERHAPS_SECRET = {"key", "token", "auth", "pat", "sig"}
"""Last words of names: `hf_token` may hold a secret; `key_size`, `tokens` and `token_count` do not."""
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
    | (?<=://)(?!git@)[^/\s"'<>]+(?=@)           # user:password in an address, or a token
    | (?<=\bbearer\ )[\w.~+/=-]+                 # in headers
    | (?<=\bbasic\ )[\w+/=-]{8,}
    | (?:(?<=\s-u\ )|(?<=\s--user\ ))[^\s:"']+:[^\s"']+     # of curl
    | (?<=["'])(?=[^"'\n]*\d)(?=[^"'\n]*[a-z])[A-Za-z0-9+/_=-]{32,}(?=["'])  # a quoted word as long as a key
    """,
    re.VERBOSE | re.IGNORECASE,
)
_QUOTED = r"""(?:\b[bfru]{1,2})?(?:"[^"\n]*"|'[^'\n]*')"""
_BESIDE = re.compile(
    rf"""
    (?P<name>\b[\w-]*(?:key|token|auth|authorization|pat|sig|pass|pwd|passw\w*|passphrase|secrets?|credentials?|keys)\b)
    (?P<middle>
        ["']?\s*\]?\s*                            # the end of a key, or of a subscript
        (?::\s*[\w.\[\]|\x20]+?(?==))?           # an annotation
        \s*(?::=|[=!]=|=>|=|:|(?<=["']),)[\x20\t]*      # an assignment, a comparison, the next argument
        (?:[(\\]?\s*\n[+\x20-]?\s*(?={_QUOTED}))?  # and the line below
    )
    (?P<value>(?:{_QUOTED}|[^,"'\n])*)            # up to a comma
    | (?P<call>\blogin\(\s*)(?P<argument>{_QUOTED})
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""The name of a secret and what stands beside it: `KEY=0123`, `os.environ["HF_TOKEN"] = x or "y"`, `login("z")`."""
_BARE = re.compile(rf"""(?!{_QUOTED})[^\s"',;()\[\]{{}}&]+(?=["';)\]}}\s&]|\Z)""")
"""A value without quotes that is no call and no subscript."""
_CODE = {"str", "int", "float", "bool", "bytes", "Tensor", "None", "True", "False", "lambda", "self"}
"""Values beside such names in programs, which are no secrets."""
_FLAG = re.compile(
    r"(?P<flag>(?:--?[\w-]*(?:key|token|secret|password|passwd|passphrase)|\blogin \S+\s+password)\s+)[^\s-]\S*",
    re.IGNORECASE,
)
"""`--api-key 0123`, and a line of .netrc."""
DIGEST_ROUNDS = 100_000
"""Of PBKDF2: a twentieth of a second for each word that somebody tries."""


def is_secret_name(name: str) -> bool:
    """Whether a field called `name` holds a secret."""
    return is_surely_secret(name) or _snake_case(name).rpartition("_")[2] in _PERHAPS_SECRET


def is_surely_secret(name: str) -> bool:
    """Whether a field called `name` holds a secret, and is no setting such as `label_key`."""
    return _SURELY_SECRET.search(_snake_case(name)) is not None


def _snake_case(name: str) -> str:
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().replace("-", "_")


def mask_text(text: str) -> str:
    """`text` with everything that looks like a secret replaced."""
    text = _SECRET_VALUE.sub(MASK, text)
    text = _FLAG.sub(lambda m: m["flag"] + MASK, text)
    return _BESIDE.sub(_mask_beside, text)


def _mask_beside(match: re.Match[str]) -> str:
    if match["call"]:
        return match["call"] + MASK
    name, value = match["name"], match["value"]
    is_code = name.lower() in ("key", "keys", "sig") and not re.search(r"\d", value)
    if is_code or not is_secret_name(name):
        return name + match["middle"] + _BESIDE.sub(_mask_beside, value)
    bare = _BARE.match(value)
    if bare and bare[0] not in _CODE:
        return name + match["middle"] + MASK + _BESIDE.sub(_mask_beside, value[bare.end() :])
    return name + match["middle"] + re.sub(_QUOTED, MASK, value)


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
    is_secret = is_surely_secret(name) or mask_text(value) != value
    return f"{MASK} ({_digest(value, name)})" if digests and not is_secret else MASK


@cache
def _digest(value: str, name: str) -> str:
    """16 bits of `value`: two settings rarely share them, and of a password's many candidates, too many do."""
    return hashlib.pbkdf2_hmac("sha256", value.encode(), name.encode(), DIGEST_ROUNDS)[:2].hex()

"""Masks secrets in what a run writes: configuration, git diff, command line, trackers."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from typing import Any

from toolkit.run.config.file import MASK

_SURELY_SECRET = re.compile(r"passw|passphrase|passcode|pwd|secret|credential|api_?keys?$|authorization|(?:^|_)pass$")
"""Found in names in lower case."""
_PERHAPS_SECRET = {"key", "token", "auth", "cookie", "pat", "sig"}
"""Last words of names: `hf_token` may hold a secret; `key_size`, `tokens` and `token_count` do not."""
_SECRET_VALUE = re.compile(
    r"""
    \b(?:hf_|api_org_|gh[pousr]_|npm_|r8_|dapi|do[opr]_v1_|[rs]k_(?:live|test)_)[A-Za-z0-9]{24,}
    | \b(?:github_pat_|glpat-|sk-|AIza|wandb_v1_|pypi-AgE|SG\.(?=[\w-]+\.))[A-Za-z0-9_-]{20,}(?:\.[\w-]{20,})?
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b               # AWS
    | \bxox[abeprs]-[A-Za-z0-9-]{10,}             # Slack
    | (?:(?<=hooks\.slack\.com/)|(?<=/api/webhooks/)|(?<=\.office\.com/webhookb2/))[\w/@-]{20,}   # also Discord, Teams
    | \b\d{8,10}:[\w-]{35}\b                      # Telegram
    | \beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*   # JSON web token
    | -----BEGIN[ A-Z]*PRIVATE\ KEY-----[\s\S]*?(?:-----END[ A-Z]*PRIVATE\ KEY-----|\Z)
    | (?<=://)(?!git@)[^/\s"'<>]+(?=@)           # user:password in an address, or a token
    | (?<=\bbearer\ )[\w.~+/=-]+                 # in headers
    | (?<=\bbasic\ )[\w+/=-]{8,}
    | (?:(?<=\s-u\ )|(?<=\s--user\ )|(?<=\bcurl\ -u))[^\s:"']+:[^\s"']+     # of curl
    | (?<=["'])(?=[^"'\n]*\d)(?=[^"'\n]*[a-z])[A-Za-z0-9+/_=-]{32,}(?=["'])  # a quoted word as long as a key
    """,
    re.VERBOSE | re.IGNORECASE,
)
_TEXT = r"""(?:"[^"\n]*"|'[^'\n]*')"""
_QUOTED = rf"(?:\b[bfru]{{1,2}})?{_TEXT}"
_BESIDE = re.compile(
    rf"""
    (?P<name>\b[\w-]{{0,80}}(?:key|token|auth|authorization|cookie|pat|sig|pass|pwd|passw\w*|passcode|passphrase|secrets?
        |credentials?|keys)\b)
    (?P<middle>
        ["']?\s*\]?\s*                            # the end of a key, or of a subscript
        (?::\s*[a-z_.\[\]|\x20]+?(?==))?         # an annotation, without digits: base64 may end in =
        (?:(?:,\x20[\w.]+){{1,9}}(?=\x20=\x20.*["']))?   # further targets of an assignment
        \s*(?::=|[=!]=|=>|=|:                     # an assignment, a comparison
            |(?P<next>(?<=["']),(?:(?:{_TEXT}|[^"'()]){{0,200}}?\bdefault\s*=)?))    # the next argument, or its default
        [\x20\t]*
        (?:[(\\]?\s*\n[+\x20-]?\s*(?={_QUOTED})|[|>]-?\n[+\x20-]?\s*)?  # and the line below, in YAML too
    )
    (?P<value>(?:{_QUOTED}|[^,"'\n]               # up to a comma, but with all texts of a pair or list
        |(?(next)(?!)|(?:,\s*(?={_QUOTED}\s*(?:[,)\n]|\Z))|(?<=["']),\s*(?={_QUOTED}\s*\])))){{0,500}})
    | (?P<call>(?:\blogin|\b(?:set|save|store|with|use)\w*(?:token|passw\w+|secret|api_?key)
        |(?-i:\b\w*(?:Auth|Credentials?)))\(\s*(?:[\w.]+,\s*)?)(?:{_QUOTED}(?:,\s*)?)+
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""The name of a secret and what stands beside it: `KEY=0123`, `os.environ["HF_TOKEN"] = x or "y"`,
`user, password = "me", "y"`, `login("z")`."""
_BARE = re.compile(
    rf"""(?!{_QUOTED}|[a-z_]+={_QUOTED})[^\s"',;()\[\]{{}}&]+(?=["';)\]}}\s&]|\Z|,(?!\s*{_QUOTED}\s*(?:[,)\n]|\Z)))"""
)
"""A value without quotes that is no call, no subscript and no keyword of one with quotes."""
_CODE = {"str", "int", "float", "bool", "bytes", "Tensor", "None", "True", "False", "lambda", "self"}
"""Values beside such names in programs, which are no secrets."""
_FLAG = re.compile(
    rf"""
    (?P<flag>(?:--?[\w-]{{0,80}}(?:key|token|secret|password|passwd|passphrase)|\blogin\ \S+\s+password)\s+
        |\b(?:(?:docker|podman|skopeo|registry)\ login|sshpass|mysql\w*|mariadb\w*)\b[^\n]{{0,200}}?\s(?-i:-p)\s*)
    (?:{_TEXT}|[^\s-]\S*)
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""`--api-key 0123`, a line of .netrc, and `mysql -p0123`."""
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
    return _mask_beside(text)


def _mask_beside(text: str) -> str:
    masked, end = "", 0
    while match := _BESIDE.search(text, end):
        name, begin, after, shown = match["name"], match.end("call"), match.end(), MASK
        if name:
            begin, bare = match.start("value"), _BARE.match(text, match.start("value"))
            is_code = name.lower() in ("key", "keys", "sig") and not re.search(r"\d", match["value"])
            if is_code or not is_secret_name(name):
                after, shown = begin, ""
            elif bare and bare[0] not in _CODE:
                after = bare.end()
            else:
                shown = re.sub(_QUOTED, MASK, match["value"])
        masked += text[end:begin] + shown
        end = after
    return masked + text[end:]


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

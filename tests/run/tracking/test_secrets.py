from __future__ import annotations

import re
from pathlib import Path

import pytest

from toolkit.run.tracking.secrets import MASK, mask, mask_text

ROOT = Path(__file__).parents[3]
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
    "sk_live_" + "abcdEFGH12" * 3,
    "npm_" + "abcdEFGH12" * 4,
    "pypi-AgE" + "IcHlwaS5vcmc" + "abcdEFGH_2" * 8,
    "SG." + "abcdEFGH12-_abcdEFGH12" + "." + "abcdEFGH12-" * 4,
    "dapi" + "0123456789abcdef" * 2,
    "r8_" + "abcdEFGH12" * 4,
    "api_org_" + "abcdEFGH12" * 4,
    "dop_v1_" + "0123456789abcdef" * 4,
    "0123456789:" + "AAabcdEFGH12-_abcdEFGH12-_abcdEFGH1",
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


SECRETS = {"SECRET": "hunter2", "KEY": "0123456789abcdef" * 2 + "01234567", "BASE64": "aHVudGVyMjpodW50ZXIy"}
SPELLINGS = r"""
WANDB_API_KEY=KEY
export HF_TOKEN=SECRET
HF_TOKEN="SECRET"
os.environ["HF_TOKEN"] = "SECRET"
os.environ['WANDB_API_KEY'] = 'SECRET'
os.environ.setdefault("HF_TOKEN", "SECRET")
os.environ.update(HF_TOKEN="SECRET")
os.environ.update({"HF_TOKEN": "SECRET"})
os.putenv("HF_TOKEN", "SECRET")
monkeypatch.setenv("API_KEY", "SECRET")
config["password"] = "SECRET"
config["db"]["password"] = "SECRET"
self.token = "SECRET"
self._api_key: str = "SECRET"
token: Optional[str] = "SECRET"
token: str | None = "SECRET"
if (token := "SECRET"):
if password == "SECRET":
def connect(password="SECRET"):
login(token="SECRET")
wandb.login("SECRET")
wandb.login(key="KEY")
huggingface_hub.login("SECRET")
login( 'SECRET' )
HfApi(token="SECRET")
api = wandb.Api(api_key="SECRET")
{"token": "SECRET"}
{'api-key': 'SECRET'}
{"Authorization": "Bearer SECRET"}
{"Authorization": "SECRET"}
headers["Authorization"] = f"Bearer SECRET"
Authorization: Bearer SECRET
Authorization: Basic BASE64
curl -H "Authorization: Bearer SECRET" https://x.y
curl -H 'X-Api-Key: SECRET' https://x.y
curl -u me:SECRET https://x.y
curl --user me:SECRET https://x.y
--api-key SECRET
--password=SECRET
--token SECRET
git clone https://me:SECRET@example.com/x
https://SECRET@example.com/x
redis://:SECRET@localhost:6379/0
postgresql://me:SECRET@db/x?sslmode=require
postgres://me:pa@SECRET@db/x
https://x.y/?token=SECRET&a=1
https://x.y/?a=1&api_key=SECRET
https://x.y/blob?sig=SECRET&se=1
password: SECRET
password: "SECRET"
  - secret: SECRET
token: |<newline>+  SECRET
passwd = SECRET
pwd = "SECRET"
db_pass = "SECRET"
PGPASSWORD=SECRET
MYSQL_PWD=SECRET
client_secret = 'SECRET'
clientSecret: "SECRET",
AWS_SECRET_ACCESS_KEY=SECRET/x
aws_session_token = SECRET
credentials = ("SECRET")
password = getpass() or "SECRET"
token = os.getenv("X") or "SECRET"
machine api.wandb.ai login user password SECRET
api.init(None, "KEY")
API = "KEY"
secrets = ["SECRET"]
passwords = ["x", "SECRET", "SECRET"]
{"auth": ("me", "SECRET"), "lr": 3}
passphrase = b"SECRET"
password = r"SECRET"
token = (<newline>+    "SECRET"
token = \<newline>+    "SECRET"
"password":<newline>+    "SECRET",
private_key = "SECRET"
A_TOKEN=SECRET B_SECRET=SECRET python x.py
https://hooks.slack.com/services/T00000000/B00000000/KEY
https://discord.com/api/webhooks/123456789012345678/KEY
https://x.webhook.office.com/webhookb2/KEY@KEY/IncomingWebhook/KEY/KEY
auth = ("me", "SECRET")
requests.get(url, auth=("me", "SECRET"))
requests.get(url, auth=(user, "SECRET"))
HTTPBasicAuth("me", "SECRET")
aiohttp.BasicAuth(user, "SECRET")
AzureKeyCredential("SECRET")
user, password = "me", "SECRET"
user, password = name, "SECRET"
password, user = "SECRET", "me"
parser.add_argument("--token", default="SECRET")
parser.add_argument("--hf-token", type=str, help="of (the) Hub", default="SECRET")
parser.add_argument(<newline>+    "--password",<newline>+    default="SECRET",<newline>+)
@click.option("--api-key", "key", default='SECRET')
monkeypatch.setenv(name="HF_TOKEN", value="SECRET")
client.set_token("SECRET")
HfFolder.save_token("SECRET")
user.set_password('SECRET')
smtp.login(user, "SECRET")
smtp.login("me", "SECRET")
docker login -u me -p SECRET
docker login -pSECRET -u me registry.example.com
sshpass -p SECRET ssh x
mysql -u root -pSECRET
mysqldump --port 3306 -p'SECRET' db
curl -ume:SECRET https://x.y
--password 'a SECRET'
Cookie: session=SECRET
passcode = "SECRET"
curl -H "X-Token: BASE64=" -H "Accept: x" https://x.y
"""
"""A way to write a secret on each line."""


@pytest.mark.parametrize("spelling", SPELLINGS.strip().splitlines())
def test_secrets_in_commands_and_code_are_masked(spelling: str):
    for word, secret in SECRETS.items():
        spelling = re.sub(rf"\b{word}\b", secret, spelling)
    masked = mask_text("+" + spelling.replace("<newline>", "\n"))
    assert MASK in masked
    assert [secret for secret in SECRETS.values() if secret in masked] == []


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
        "git clone ssh://git@github.com/x",
        "index 0123abcd..4567cdef 100644",
        'ordered = sorted(names, key="loss", reverse=True)',
        'keys = ["loss", "accuracy"]',
        "def forward(self, tokens: int) -> str:",
        "query, key = self.query(x), self.key(x)",
        "token, count = tokens[0], 3",
        'def embed(self, token: Int[Tensor, "1 1"]) -> Float[Tensor, "D"]:',
        'parser.add_argument("--num-tokens", type=int, default="3")',
        "docker run -p 8080:80 image",
        "mysql -P 3306 -u root",
        "ssh login.cluster.org -p 2222",
        'self.set_tokens("train", "test")',
        "pypi-attestations==0.0.28, sk-learn.readthedocs.io, npm_config_registry, r8_g8_b8",
        "https://hooks.slack.com/services",
    ],
)
def test_ordinary_text_is_left_alone(text):
    assert mask_text(text) == text


def test_code_of_this_repository_stays_readable():
    texts = [path.read_text() for path in sorted((ROOT / "recipes").rglob("*.py"))]
    lines = [pair for text in texts for pair in zip(text.split("\n"), mask_text(text).split("\n"), strict=True)]
    assert len(lines) > 5000
    assert sum(line != masked for line, masked in lines) <= len(lines) // 1000


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

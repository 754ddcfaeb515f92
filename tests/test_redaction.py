"""Redaction: what is found in prose, code and JSON, what is left alone, and that no text takes too long."""

import base64
import json
import random
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import msgspec
import phonenumbers
import pytest
from daemon_process import clean_environment
from effort import in_time, long, sample, scaled
from hypothesis import given
from hypothesis import strategies as st

from memd.entries import Draft, Speaker
from memd.errors import ConfigError, StoreError
from memd.ingest import redaction
from memd.ingest.redaction import BUILT_IN, Redactor, last_look
from memd.settings.model import IngestSettings, RedactionName

ROOT = Path(__file__).parent.parent
REDACTOR = Redactor.of(IngestSettings(redact=True))

BODY = [
    f"MIIEow{line:02}IBAAKCAQEAabcdefghijklmnopqrstuvwxyz+/ABCDEFGHIJKLMNOPQRS"[:64].ljust(64, "x") for line in range(9)
]
PEM = "\n".join(["-----BEGIN RSA PRIVATE KEY-----", *BODY, "q83vEjRWeJA=", "-----END RSA PRIVATE KEY-----"])
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"


def own(**patterns: str) -> Redactor:
    return Redactor.of(IngestSettings(redact=True, redact_builtin=(), redact_patterns=patterns))


FOUND = {
    "My key is sk-proj-Ab12Cd34Ef56Gh78Ij90, keep it.": "My key is [redacted:api_key], keep it.",
    "sk-0123456789abcdefABCDEF": "[redacted:api_key]",
    f"The token ({JWT}).": "The token ([redacted:jwt]).",
    f"in a_{JWT}": "in a_[redacted:jwt]",
    "Authorization: Bearer abcdef": "Authorization: Bearer [redacted:bearer_token]",
    '"authorization": "Basic dXNlcjpwYXNz"': '"authorization": "Basic [redacted:bearer_token]"',
    "sent as Bearer 0a1b2c3d4e5f": "sent as Bearer [redacted:bearer_token]",
    "password = hunter2": "password = [redacted:password]",
    "client_secret = a1b2c3.d4e5f6": "client_secret = [redacted:password]",
    "Password: swordfish": "Password: [redacted:password]",
    "export API_KEY=abcdefgh && run": "export API_KEY=[redacted:password] && run",
    "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG": "aws_secret_access_key = [redacted:password]",
    'password: str = "hunter2"': 'password: str = "[redacted:password]"',
    "env['DB_PASSWORD'] = 'a b c'": "env['DB_PASSWORD'] = '[redacted:password]'",
    'if password == "it\'s" :': 'if password == "[redacted:password]" :',
    "(mysql --db-password hunter2)": "(mysql --db-password [redacted:password])",
    "mysql --password hunter2 -h db": "mysql --password [redacted:password] -h db",
    "<password>hunter2</password>": "<password>[redacted:password]</password>",
    "https://h/cb?token=ab12cd34&x=1": "https://h/cb?token=[redacted:password]&x=1",
    'password = "not closed\nnext': 'password = "[redacted:password]\nnext',
    "login(password=hunter2, user=bob)": "login(password=[redacted:password], user=bob)",
    "postgres://bob:s3cret@db:5432/shop": "postgres://bob:[redacted:url_credentials]@db:5432/shop",
    "redis://:p@ss@host": "redis://:[redacted:url_credentials]@host",
    r"https:\/\/u:pw@h\/p": r"https:\/\/u:[redacted:url_credentials]@h\/p",
    "pay with 4111 1111 1111 1111 please": "pay with [redacted:card_number] please",
    "2 4111-1111-1111-1111 12": "2 [redacted:card_number] 12",
    "378282246310005.": "[redacted:card_number].",
    "5,4111111111111111,12/27": "5,[redacted:card_number],12/27",
    "card-4111111111111111-123": "card-[redacted:card_number]-123",
    "?card=%204111111111111111": "?card=%20[redacted:card_number]",
    "ends with -----END PRIVATE KEY-----": "ends with [redacted:private_key]",
    f"here:\n{PEM}\nthanks": "here:\n[redacted:private_key]\nthanks",
    f"here: {PEM[:300]}": "here: [redacted:private_key]",
    f"here:\n{PEM[:300]}\n\nWhat is it?": "here:\n[redacted:private_key]\n\nWhat is it?",
    f"{PEM[97:]}\nthanks": "[redacted:private_key]\nthanks",
    "\n".join(BODY[2:6]): "[redacted:private_key]",
    r"nMIIEow03IBAAKCAQEAab\n" + r"\n".join(BODY[4:]) + r"\n-----END": "[redacted:private_key]",
    "RSA PRIVATE KEY-----\n" + BODY[0]: "[redacted:private_key]",
    "the rest is cut off -----END": "the rest is cut off -----END",
    "> -----BEGIN OPENSSH PRIVATE KEY-----\n> " + "\n> ".join(BODY[:2]) + "\n> -----END OPENSSH PRIVATE KEY-----": (
        "> [redacted:private_key]"
    ),
}


# Secrets of every shape that public scanners look for

LOWER, UPPER, DIGITS = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"
ALPHABETS = {
    "A": LOWER + UPPER + DIGITS, "a": LOWER + DIGITS, "W": LOWER + UPPER + DIGITS + "_-", "H": "abcdef" + DIGITS,
    "D": DIGITS, "U": UPPER + DIGITS, "B": LOWER + UPPER + DIGITS + "+/", "2": UPPER + "234567", "X": "ABCDEF" + DIGITS,
}  # fmt: skip


def filled(shape: str) -> str:
    """`shape` with `{A20}` replaced by 20 characters of that alphabet and `{id}` by a UUID, the same ones each time.

    So no secret stands in this file, not even a made-up one.
    """
    chance = random.Random(shape)

    def drawn(found: re.Match[str]) -> str:
        if found[1] == "id":
            return "-".join("".join(chance.choices("0123456789abcdef", k=size)) for size in (8, 4, 4, 4, 12))
        characters = chance.choices(ALPHABETS[found[1]], k=int(found[2]))
        if characters[0] in "-_+/":
            characters[0] = "q"
        if found[1] in "AaWBU" and len(characters) > 3:
            characters[1], characters[2] = "7", "k" if found[1] != "U" else "K"
        return "".join(characters)

    return re.sub(r"\{(id|[A-Za-z2])(\d*)\}", drawn, shape)


KEYS = """
glpat-{W20} glpat-{W27}.01.{a9} gldt-{W20} glrt-{W20} glrt-t1_{W27}.{a2}{a7} glcbt-{a3}_{W20} glptt-{H40} glft-{W20}
glffct-{W20} glimt-{W25} glagent-{W50} glsoat-{W20} gloas-{H64} GR1348941{W20} GOCSPX-{W28} ya29.{W60} 1//0{W42}
AIza{W35} {A3}7Q~{W31} {A3}8Q~{A34} {B76}+ASt{A6}== {A52}JQQJ99{A26} {W44}AzFu{A6}Qg== {A76}AZDO{A4}
https://x.blob.core.windows.net/c?sv=2024&sig={A43}%3D shpat_{H32} shpca_{H32} shppa_{H32} shpss_{H32} dop_v1_{H64}
doo_v1_{H64} dor_v1_{H64} hvs.{W95} hvb.{W140} s.{A24} dckr_pat_{W27} dckr_oat_{W32} dapi{H32} dapi{H32}-2
glsa_{A32}_{H8} glc_{B60}= eyJrIjoi{A80}== lin_api_{A40} lin_oauth_{H64} ntn_{D11}{A35} secret_{A43} ATATT3{W180}={X8}
ATCTT3{W120} ATBB{A32} nvapi-{W64} pplx-{A48} r8_{A37} whsec_{A32} sk_live_{A24} rk_live_{A24} sk_test_{A24}
rk_prod_{A24} tskey-auth-{A17}-{A32} tskey-api-{A12}-{A32} AGE-SECRET-KEY-1{U58} {D10}:AA{W33} MT{A22}.{W6}.{W38}
NT{A24}.{W6}.{W27} mfa.{W84} https://discord.com/api/webhooks/{D18}/{W68} sk-proj-{A74}T3BlbkFJ{A74}
sk-{A20}T3BlbkFJ{A20} sk-svcacct-{A58} sk-admin-{A58} sk-ant-api03-{W93}AA sk-ant-admin01-{W93}AA sk-or-v1-{H64}
sk-lf-{id} ghp_{A36} gho_{A36} ghu_{A36} ghs_{A36} ghr_{A36} github_pat_{A22}_{A59} AKIA{216} ASIA{216} ABIA{216}
ACCA{216} A3T{217} ABSK{B120} bedrock-api-key-{B60} xoxb-{D11}-{D12}-{A24} xoxp-{D11}-{D12}-{D12}-{H32}
xapp-1-{U11}-{D13}-{H64} xoxe.xoxb-1-{U163} xoxe-1-{U146} https://hooks.slack.com/services/T{U8}/B{U8}/{A24}
https://hooks.slack.com/workflows/{A45} https://acme.webhook.office.com/webhookb2/{id}@{id}/IncomingWebhook/{H32}/{id}
hf_{A34} api_org_{A34} gsk_{A52} xai-{A80} fw_{A24} csk-{a48} esecret_{A32} lsv2_pt_{H32}_{H10} pcsk_{A60}
tgp_v1_{W43} jina_{A60} tvly-{A32} figd_{W40} phx_{A40} apify_api_{A36} sbp_{H40} sb_secret_{W31} vck_{A56} nfp_{A36}
rnd_{A32} CCIPAT_{A22}_{H40} bkua_{H40} squ_{H40} sqp_{H40} sqa_{H40} sgp_{H40} sgp_local_{H40} sntryu_{H64}
sntrys_{B100}_{B43} npm_{A36} pypi-AgEIcHlwaS5vcmc{W70} rubygems_{H48} cio{A32} oy2{a43} CLOJARS_{a60} dp.pt.{A43}
dp.st.dev.{A40} dt0c01.{U24}.{U64} pul-{H40} PMAK-{H24}-{H34} pnu_{A36} rdme_{a70} HRKU-AA{W58} fo1_{W43} fm2_{B120}
tk-us-{W48} shippo_live_{H40} duffel_live_{W43} EZAK{A54} EZTK{A54} FLWSECK_TEST-{H32}-X fio-u-{W64}
pat.{A22}.{A24}.{A20} ico-{A32} s-s4t2ud-{H64} {A6}_{A29}_mmk sha256~{W43} API-{U26} 4b1d{A38} v1.0-{H24}-{H146}
pscale_tkn_{W43} pscale_oauth_{W43} pscale_pw_{W43} sm_aat_{A16} p8e-{a32} LTAI{A20} A3-{U6}-{U11}-{U5}-{U5}-{U5}
ops_eyJ{B260} AKCp{A69} cmVmd{A59} xkeysib-{H64}-{a16} SG.{W22}.{W43} key-{H32} {H32}-us14 pat{A14}.{H64} pat-na1-{id}
SK{H32} sq0atp-{W22} EAAA{A60} EAAM{A110} {D15}|{A27} {A14}.atlasv1.{W67} access-production-{id} sl.{W135}
tfp_{A44}_{A14} NRAK-{U27} NRII-{W32} NRJS-{H19} t1.{A40}.{W86} dnkey-{A26}-{A52} sc_{a12}.{a5}.acc_{a20}.{A60}
pk.{A60}.{A22} live_{A40} napi_{a60} vercel_blob_rw_{A30} sk_{H48} EAAG{A120} AAAA{W7}:APA91b{W134}
""".split()  # noqa: SIM905  # a hundred quotation marks say nothing
AROUND = ("{}", "It is {} I think.", "KEY={}", 'f("{}")', "a\n{}\nb", "- {}\n", "({})", "x={};", "`{}`, they said")


@pytest.mark.parametrize("shape", KEYS)
def test_a_key_of_a_known_shape_is_gone(shape: str) -> None:
    key = filled(shape)
    core = key.rpartition("/")[2] if key.startswith("https") else key
    core = core.partition("sig=")[2] or core
    for around in sample(AROUND):
        text = around.format(key)
        for written in (text, json.dumps({"line": f"first\n{text}"}), json.dumps({"a": json.dumps([f"b\n{text}"])})):
            redacted = REDACTOR.text(written)
            assert core not in redacted, written
            assert len(redacted) <= len(written) - len(core) + len("[redacted:url_credentials]"), redacted
            assert "[redacted:" in redacted


@pytest.mark.parametrize(
    "shape",
    [
        "DATADOG_APP={H40}", "datadog: '{H40}'", '"okta": "00{A40}"', "heroku = {id}", "cloudflare_id => '{A40}'",
        "TWITTER_BEARER: {A50}", "const algolia = '{a32}';", "mailgun.pub = '{a40}'", "JIRA={a24}", "export SNYK={id}",
    ],
)  # fmt: skip
def test_a_value_beside_its_vendors_name_is_gone(shape: str) -> None:
    setting = filled(shape)
    [value] = re.findall(r"[\w-]{16,}", setting.split("=")[-1].split(":")[-1])
    assert value not in REDACTOR.text(f"first\n{setting}\nlast")


B64 = base64.b64encode(b"hugo:correct horse").decode()
LOGINS = {
    "curl -u hugo:s3cretive https://x.example": "curl -u hugo:[redacted:login] https://x.example",
    "curl -s --user 'hugo:s3cretive' x": "curl -s --user 'hugo:[redacted:login]' x",
    "curl x \\\n  -H 'A: b' \\\n  -u :s3cretive": "curl x \\\n  -H 'A: b' \\\n  -u :[redacted:login]",
    "http -a hugo:s3cretive GET x": "http -a hugo:[redacted:login] GET x",
    "machine x.example login hugo password s3cretive": "machine x.example login hugo password [redacted:login]",
    "machine x\n  login hugo\n  password s3cretive\n": "machine x\n  login hugo\n  password [redacted:login]\n",
    f'{{"auths": {{"r.example": {{"auth": "{B64}"}}}}}}': '{"auths": {"r.example": {"auth": "[redacted:login]"}}}',
    f"//r.example/:_auth={B64}": "//r.example/:_auth=[redacted:login]",
    "sshpass -p s3cretive ssh x": "sshpass -p [redacted:login] ssh x",
    "docker login -u hugo -p s3cretive": "docker login -u hugo -p [redacted:login]",
    "mysql -u root -ps3cretive db": "mysql -u root -p[redacted:login] db",
    '<add key="ClearTextPassword" value="s3cretive" />': '<add key="ClearTextPassword" value="[redacted:login]" />',
    "Cookie: theme=darkdark; sid=abc": "Cookie: [redacted:cookie]",
    "curl -H 'Cookie: a=12345678; b=2' x": "curl -H 'Cookie: [redacted:cookie]' x",
    "Set-Cookie: id=a3fWa12345; Path=/; HttpOnly": "Set-Cookie: [redacted:cookie]",
    "PHPSESSID=q1w2e3r4t5y6u7i8o9p0zz": "PHPSESSID=[redacted:cookie]",
    "connect.sid=s%3Aq1w2e3r4t5y6u7i8o9": "connect.sid=[redacted:cookie]",
    '"sessionid": "q1w2e3r4t5y6u7i8o9p0"': '"sessionid": "[redacted:cookie]"',
    "_gitlab_session=0123456789abcdef0123456789abcdef": "_gitlab_session=[redacted:cookie]",
    "Authorization: Bot q1w2e3.r4t5": "Authorization: Bot [redacted:bearer_token]",
    "authorization: q1w2e3r4t5y6u7i8": "authorization: [redacted:bearer_token]",
    "DE89 3704 0044 0532 0130 00 is mine": "[redacted:iban] is mine",
    "to GB82WEST12345698765432, please": "to [redacted:iban], please",
    "PL61109010140000071219812874": "[redacted:iban]",
    '{"kty": "EC", "crv": "P-256", "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8", '
    '"d": "jpsQnnGQmL-YBIffH1136cspYG6-0iY7X1fCE9-E9LI"}': (
        '{"kty": "EC", "crv": "P-256", "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8", "d": "[redacted:private_key]"}'
    ),
    "X-Api-Key: q1w2e3r4t5": "X-Api-Key: [redacted:password]",
    "AccountKey=q1w2e3r4t5y6u7i8/+==;Suffix=x": "AccountKey=[redacted:password];Suffix=x",
}
LOGINS |= {
    "- name: DB_PASSWORD\n  value: s3cretive\n": "- name: DB_PASSWORD\n  value: [redacted:login]\n",
    '{"name": "API_KEY", "value": "s3cretive"}': '{"name": "API_KEY", "value": "[redacted:login]"}',
    '<env name="NPM_TOKEN" value="s3cretive"/>': '<env name="NPM_TOKEN" value="[redacted:login]"/>',
    "CREATE USER hugo IDENTIFIED BY 's3cretive';": "CREATE USER hugo IDENTIFIED BY '[redacted:login]';",
    "alter role hugo password 's3cretive'": "alter role hugo password '[redacted:login]'",
    "create user hugo with password 's3cretive'": "create user hugo with password '[redacted:login]'",
    "SET PASSWORD FOR 'hugo'@'%' = 's3cretive'": "SET PASSWORD FOR 'hugo'@'%' = '[redacted:login]'",
    "root:$6$s3cretive$q1w2e3r4t5y6u7i8o9p0:19000:": "root:$6$[redacted:login]:19000:",
    "hugo:$2b$12$s3cretive1234567890123456789012": "hugo:$2b$[redacted:login]",
    'auth: {"user": "hugo", "pass": "s3cretive"}': 'auth: {"user": "hugo", "pass": "[redacted:login]"}',
    "A temporary password is generated for root@localhost: s3cretive!": (
        "A temporary password is generated for root@localhost: [redacted:login]"
    ),
    "Your API key is: q1w2e3r4t5y6u7i8o9": "Your API key is: [redacted:login]",
    "SecretID:  4411f091-a4c9-48e6-0884-1fcb092da1c8": "SecretID:  [redacted:login]",
    "git clone https://q1w2e3r4t5y6u7i8o9p0@github.com/x/y": "git clone https://[redacted:login]@github.com/x/y",
}
for kind in ("", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED ", "DSA "):
    encoded = base64.b64encode(f"-----BEGIN {kind}PRIVATE KEY-----\nMIIEpQIBAAKCAQEA7\n".encode()).decode()
    LOGINS[f"    client-key-data: {encoded}\n"] = "    client-key-data: [redacted:private_key]\n"


LOGINS |= {
    text.replace("@", "s3Cretive7"): text.replace("@", "[redacted:login]")
    for text in (
        "contraseña: @", "mot de passe: @", "Hasło: @", "パスワード：@", "密码: @", "пароль: @", "senha = @", "pw: @",
        "my passphrase is @", "the password was '@'", "| db password | @ |", "| `token` | `@` |", "Password:\n  @\n",
        "password: >-\n  @\n", '"password": ["@"]', "requirepass @", "ENV DB_PASSWORD @", "setx API_KEY @",
        'client.setPassword("@")', 'setenv("TOKEN", "@")', 'requests.get(url, auth=("hugo", "@"))', "psk='@'",
        '{"value": "@", "name": "DB_PASSWORD"}', "credentials: {user: hugo, pass: @}", "https://x.example/?key=@@",
        "https://x.example/cb#access_token=@@&x=1", "kubectl create secret generic x --from-literal=db=@",
        "fly secrets set DB=@", "openssl enc -k @ -in a", "sqlcmd -S h -U hugo -P @", "ldapsearch -D cn=a -w @",
        "smbclient -U hugo%@ //h/x", "htpasswd -b file hugo @", 'echo "hugo:@" | chpasswd', "WIFI:T:WPA;S:home;P:@;;",
        "echo @ | docker login --password-stdin", "net use x: @ /user:hugo", "jdbc:oracle:thin:hugo/@@//h:1521/x",
        "userPassword:: @@", "snmp-server community @ RO", "mein Passwort ist @", "mon mot de passe est @",
        "我的密码是@", "cmdkey /add:h /user:hugo /pass:@",
    )
    if text.count("@") == 1
}  # fmt: skip
LOGINS |= {
    "https://x.example/?key=s3cretives3cretive&a=b": "https://x.example/?key=[redacted:login]&a=b",
    "jdbc:oracle:thin:hugo/s3cretive@//h:1521/x": "jdbc:oracle:thin:hugo/[redacted:login]@//h:1521/x",
    "otp: 482193": "otp: [redacted:login]",
    "the password is s3cretive7-days": "the password is [redacted:login]",
    "the password is 8-s3cretive7": "the password is [redacted:login]",
    "recovery code: s3cr-etiv-e777": "recovery code: [redacted:login]",
    "seed phrase: " + 11 * "legal " + "winner": "seed phrase: [redacted:login]",
    "OPENAI_KEY=s3cretiveS3cretive7777": "OPENAI_KEY=[redacted:login]",
    "$env:ACME_KEY = 's3cretiveS3cretive7777'": "$env:ACME_KEY = '[redacted:login]'",
    "oauth_token s3cretiveS3cretive7777": "oauth_token [redacted:login]",
    "private key 0x" + 16 * "7f3A": "private key [redacted:login]",
}


FOUND |= LOGINS


@pytest.mark.parametrize(("text", "expected"), FOUND.items(), ids=range(len(FOUND)))
def test_what_lets_somebody_in_is_replaced_and_nothing_else(text: str, expected: str) -> None:
    assert REDACTOR.text(text) == expected
    nested = json.dumps({"line": f"first\n{text}"})
    assert "s3cretive" not in REDACTOR.text(nested) and "q1w2e3" not in REDACTOR.text(nested)


LEFT_ALONE = [
    "A risk-averse, disk-based-and-task-oriented-approach.",
    "max_tokens: 4096, prompt_tokens=128, and the token: a word.",
    "bearer authentication is described in RFC 6750",
    "password = os.environ['DB_PASSWORD']",
    "password = getpass.getpass()",
    "self.password = password",
    "secret = settings.oauth2.value",
    "def login(user: str, password: str) -> None:",
    "password: ${DB_PASSWORD}",
    "token = tokenizer.encode(text)[0]",
    '{"token": "hello", "logprob": -0.1}',
    "PASSWORD=$PASSWORD TOKEN=${{ secrets.TOKEN }} KEY=",
    "password=********",
    "Password: please choose one with twelve characters.",
    "http://localhost:3000?email=a@b.c and ssh://git@github.com:22/a/b",
    "at 1712345678901 ms, hash a4111111111111111b, sums 4,111,111 and 4 111 111",
    "4111 1111 1111 1112",
    "0.4111111111111111",
    "4111 ١١١١ 1111 1111",
    "PWD=/srv/shop",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "set tokenizer llama3-8b",
    "ENV TOKENIZER_MODEL bert-base-v2",
    "ARG KEY_TYPE ed25519",
    "set hotkey Ctrl+F12",
    "heroku config:set NODE_ENV=production2",
    "| Token | GPT-4o |",
    "| password | varchar(255) |",
    'setToken("next page")',
    'auth=("user", "name of it")',
    "GPIO PIN: 1013",
    "the otp is 2024",
    "https://x.y/?code=python-3-12-release-notes",
    '{"invalidToken": "Your token is invalid, please log in again", "resetPassword": "Reset your password"}',
    "wrong_password = 'The password is wrong.'",
    "confirm-password: 'Please repeat the password'",
    "key-value-store-with-many-words", "fw_a_function_with_a_long_name", "live_preview_of_the_whole_document_here",
    "def test_that_sk_live_things_are_fine():", "s.someMethodWithAVeryLongName()",
    "from sl.utilities import everything",
    "commit 4b1d0123456789abcdef0123456789abcdef0123", "a pat. on the back", "git checkout ghp-pages",
    "the datadog dashboard is at https://app.datadoghq.com/dashboard/list", "import heroku3 as heroku",
    "the password is 8-characters long", "their password was 90-days old", "the api key is OAuth2-based",
    "the password is base64-encoded", "The token was SHA256-hashed before it was stored",
    "cookie: accept all of them?", "the session_id = uuid.uuid4().hex",
    "session: AsyncSession = Depends(get_session)",
    "curl -u $USER:$PASSWORD x", "curl -u hugo x", "sort -u a:b", "-u and --user are flags", 'auth: "none"',
    "the machine has a login and a password prompt", "DE12 3456 7890 1234 5678 90", "GR27 is a list",
    "AB12 CDEF GHIJ",
    "sidebar=inside-the-new-layout-of-the-page-2", "telegram: @some_channel_name_here",
    "user.authorization = required",
    "https://example.com/sc_something/that.goes.on/for-a-while?sig=none", "mysql -p", "docker run -p 8080:8080 web",
    "docker run -p 127.0.0.1:80:80 x",
    '{"kty": "RSA", "e": "AQAB", "n": "0vx7agoebGcQSuuPiLJXZptN9nndrQmbXEps2aiAFbWhM78LhWx4cbbf"}',
    "sonarqube: https://sonar.example.com/dashboard?id=my-project-number-1-main", "7Q~ is odd", "jira: PROJ-1234",
    "- name: DB_PASSWORD\n  valueFrom:\n    secretKeyRef: {name: db}", "name: TOKEN\nvalue: ${TOKEN}",
    "the user password 'prompt' is shown", '{"pass": "always"}', "API key: see your account page",
    "it costs $1$ or $2", "https://hugo@example.com/", "name: The secret garden\nauthor: F. H. Burnett",
    "the password is required", "the token is valid for 24h", "password reset takes place2", "key=value and id=7",
    "| token | meaning |", "Password:\n  at least 12 characters", "?key=name&sort=up", "the secret was out by 1999",
    "mot de passe: obligatoire", "pw: see below", "auth=(user, password)", "ENV PATH /usr/bin", "GPIO pin 12",
    "das Passwort ist falsch", "le mot de passe est trop court", "密码是必填项", "PRIMARY_KEY = userAccountId2",
    "SSH_PUBLIC_KEY=AAAAC3NzaC1lZDI1NTE5AAAAIJ0fT", "SORT_KEY=created_at_and_then_by_name_2", "a risk_taker",
    "passphrase:\n- 8 words", "the api key is in the vault", "login(name, word)", "commit 0x12", "psk: none",
    "recovery: 3 days", "the seed words are told to nobody", "use -p 8080 with twine", "a salt = b",
    base64.b64encode(b"-----BEGIN CERTIFICATE-----\nMIIEpQIBAAKCAQEA7\n").decode(),
]  # fmt: skip


@pytest.mark.parametrize("text", LEFT_ALONE)
def test_what_only_speaks_of_secrets_is_left_alone(text: str) -> None:
    assert REDACTOR.text(text) == text


@pytest.mark.thorough
def test_the_source_of_memd_has_no_secrets() -> None:
    for path in sorted((ROOT / "memd").rglob("*.py")):
        text = path.read_text()
        assert REDACTOR.text(text) is text, path


@given(text=st.text(alphabet="pasword=:\"'\\ \n-@/.sk0eyJ4[redacted:]", max_size=60))
def test_what_was_redacted_is_not_redacted_again(text: str) -> None:
    once = REDACTOR.text(text)
    assert REDACTOR.text(once) == once


WRAPPED = st.sampled_from([0, 1, 2])


def nested(text: str, depth: int) -> str:
    """`text` in a JSON string in a JSON string …"""
    for _ in range(depth):
        text = json.dumps({"line": f"first\n{text}\nlast"})
    return text


@given(value=st.text(min_size=1, max_size=30).filter(str.strip), depth=WRAPPED)
def test_whatever_stands_in_quotes_in_json_is_gone_whole(value: str, depth: int) -> None:
    redacted = REDACTOR.text(nested(json.dumps({"password": value, "user": "bob"}), depth))
    for _ in range(depth):
        redacted = json.loads(redacted)["line"].removeprefix("first\n").removesuffix("\nlast")
    kept = json.loads(redacted)
    assert kept["user"] == "bob"
    assert kept["password"] == "[redacted:password]" or re.fullmatch(
        r"\$?\{+.*\}+|\$\w+|\$\(.*|<.*>|%.*|[*•.xX_-]+|\[redacted:.*", value, re.DOTALL
    ), "only a placeholder stays"


@given(cut=st.integers(min_value=0, max_value=len(PEM)), depth=WRAPPED, keep_end=st.booleans())
def test_a_private_key_is_gone_wherever_it_is_cut_off(cut: int, depth: int, keep_end: bool) -> None:
    key = PEM[cut:] if keep_end else PEM[:cut]
    redacted = REDACTOR.text(nested(key, depth))
    begin_is_whole = not keep_end and cut >= len("-----BEGIN RSA PRIVATE KEY-----")
    end_is_whole = keep_end and cut <= len(PEM) - len("-----END RSA PRIVATE KEY-----")
    if begin_is_whole or end_is_whole:
        assert not any(line in redacted or line[:20] in redacted or line[-20:] in redacted for line in BODY)


# Long and hostile texts

HOSTILE = [
    "glpat-", "s.", "AA:", "1234567:A", "sk_", "EAAA", "-u ", "-u a:", "curl -u a:b ", "machine login ", "login a ",
    '"auth": "', "_auth=", "cookie: a=", "cookie: a=bbbbbbbb;", "sess=", "sessionid=", "a1_", "datadog ",
    "datadog=",
    "DE89 ", "DE893704", '"d":"', '"kty""d":"aaaaaaaaaaaaaaaa"', "Az", "AzFu", "t1.", "MNO.", "pat.", "sig=",
    "\\n", "%2F", "name: secret", "name: secret value", "identified by '", "set password for x = '", "$6$",
    '"pass": "',
    "temporary password for x: ", "api key: ", "secret id: ", "https://1", "LS0tLS1CRUdJTi",
    "password is ", "| password |", "password:\n", "seed phrase: abc ", "abcd ", "smbclient -U ", "openssl ",
    "?key=", "pass: {", "WIFI:", "echo a:", "token a1A", "psk ", "setenv('token', ",
    "<add key=", "authorization: a1", "x" * 200 + " ", "key", "access_", "api_", "https://", "ABCD" * 4 + " 1",
    "eyJ", "eyJaaaaaaaa.", "eyJa-", "sk-", "sk-ant-", "xoxb-", "a", "\\", "\\n", "-", "----- BEGIN ", "-----BEGIN ",
    "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\n-----", "A" * 64 + "\n",
    "Private-Lines: 1\n", 'password="', "password='\\", 'password=\\"', "password=", "password = ", "password: a",
    "password" + " " * 20, "password:", "secret_key_key_key", "token=a.b.c.", "token='", "password=,", "pass",
    "--pass ", "://a:", "://a:@", "://a:b@", "@", "bearer ", "bearer+", "bearer a", "authorization: ", "4", "333 ",
    "4444 ", "4-", " ", "\"'`", "[redacted:", "[redacted:password]", "=", "[", "${", "\n", "%20",
]  # fmt: skip


@pytest.mark.parametrize("part", HOSTILE)
def test_a_long_hostile_text_is_dealt_with_in_time(part: str) -> None:
    secret = "ghp_" + "0123456789abcdefghijklmnopqrstuvwxyz"
    redacted = in_time(REDACTOR.text, f"{secret} {long(part)}\n\n{secret}\n")
    assert secret not in redacted
    assert "[redacted:" in redacted


@pytest.mark.parametrize(
    ("before", "part", "after"),
    [
        ("eyJ", "a", ""), ("://a:", "b@", ""), ('password="', "a\\", ""), ("bearer ", "a", ""),
        ("-----BEGIN ", "A", ""), ("", "A" * 64 + "\n", "-----END PRIVATE KEY-----"),
        ("-----BEGIN PRIVATE KEY-----", "-", ""),
        ("-----BEGIN PRIVATE KEY-----", "prose ", ""), ("password=", "a,", " "), ("4", "1", ""),
        ('password="""', '"', ""),
    ],
)  # fmt: skip
def test_a_long_text_behind_a_promising_beginning_is_dealt_with_in_time(before: str, part: str, after: str) -> None:
    text = before + long(part) + after
    redacted = in_time(REDACTOR.text, text)
    assert len(redacted) <= len(text)
    assert REDACTOR.text(redacted) == redacted


def test_secrets_in_a_megabyte_of_anything_are_all_found() -> None:
    chance = random.Random(5)
    parts = [chance.choice(HOSTILE[:-3]) for _ in range(scaled(33_000))]
    secrets = [f"ghp_{chance.getrandbits(160):040x}" for _ in range(len(parts) // 40)]
    for secret in secrets:
        parts[chance.randrange(len(parts))] += f"\n{secret}\n"
    redacted = in_time(REDACTOR.text, "".join(parts))
    assert not [secret for secret in secrets if secret in redacted]


def test_an_own_pattern_replaces_what_it_matches_or_its_group_and_arguments_stay_json() -> None:
    redactor = own(customer=r"\bC-\d{6}\b", spoken=r"(?i)password is (?P<secret>\S+)")
    assert redactor.text("Customer C-123456: the password is swordfish today.") == (
        "Customer [redacted:customer]: the password is [redacted:spoken] today."
    )

    assert tuple(BUILT_IN) == get_args(RedactionName)

    assert REDACTOR.arguments('{"password": "x1"}') == '{"password": "[redacted:password]"}'
    kept = json.loads(REDACTOR.arguments('{"card": 4111111111111111, "of": "Bob"}'))
    assert kept == {"redacted": '{"card": [redacted:card_number], "of": "Bob"}'}
    assert REDACTOR.arguments("card 4111111111111111") == "card [redacted:card_number]"


SECRET = "sk-0123456789abcdefABCDEF"


def test_the_store_refuses_an_active_draft_that_was_not_redacted_and_redacts_what_has_no_vector() -> None:
    checked = last_look(REDACTOR)
    draft = Draft(uuid=bytes(16), content="it is [redacted:api_key]", vector=bytes(8), created_at=1, reason=SECRET)
    assert checked(draft) == msgspec.structs.replace(draft, reason="[redacted:api_key]")
    with pytest.raises(StoreError, match="should have been redacted before"):
        checked(msgspec.structs.replace(draft, content=f"it is {SECRET}"))
    gone = msgspec.structs.replace(draft, content="", vector=b"", reason=SECRET)
    assert checked(gone).reason == "[redacted:api_key]"


def test_who_speaks_where_is_still_true_of_what_is_left_of_a_text() -> None:
    first, second, third = f"it is {SECRET}!", "Noted.", f"{SECRET} and {SECRET}"
    content = f"{first}\n{second}\n{third}"
    starts = 0, len(first) + 1, len(first) + len(second) + 2
    speakers = tuple(map(Speaker, starts, ("user", "assistant", SECRET)))
    draft = Draft(uuid=bytes(16), content=content, vector=b"", created_at=1, speakers=speakers)
    kept = REDACTOR.draft(draft)
    name = REDACTOR.identifier(SECRET)
    mark = "[redacted:api_key]"
    assert kept.displayed == f"user: it is {mark}!\nassistant: Noted.\n{name}: {mark} and {mark}"
    assert kept.speakers_fit and REDACTOR.draft(kept) is kept

    redactor = Redactor.of(IngestSettings(redact=True, redact_patterns={"span": "b[^e]*d"}))
    within = (Speaker(0, "user"), Speaker(3, "tool"), Speaker(5, "user"))
    draft = Draft(uuid=bytes(16), content="ab\nc\nd e", vector=b"", created_at=1, speakers=within)
    kept = redactor.draft(draft)
    assert kept.displayed == "user: a[redacted:span]user:  e"
    assert kept.speakers_fit


@given(st.text("ab[]:redact own", max_size=40), st.sampled_from(["a.", r"\[r", "d:own", "(?<=a)b", "a*b|b+a"]))
def test_what_is_redacted_once_stays_as_it_is_whatever_the_pattern(text: str, pattern: str) -> None:
    redactor = Redactor.of(IngestSettings(redact=True, redact_patterns={"own": pattern}))
    kept = redactor.text(text)
    assert redactor.text(kept) == kept


# Redaction of persons: addresses, phone numbers, national ids and listed words; look-alikes; who pays for it


DATA = json.loads((Path(__file__).parent.parent / "bench" / "data" / "persons.json").read_text())
BRACKETS = re.compile(r"\[((?:[^\[\]]|\[(?:at|dot)\])*)\]")


def redactor(*persons: Any, countries: tuple[str, ...] = (), listed: tuple[str, ...] = ()) -> Redactor:
    return Redactor.of(
        IngestSettings(
            redact=True, redact_builtin=(), redact_persons=persons, redact_countries=countries, redact_words=listed
        )
    )


def test_a_country_that_is_none_is_refused_since_its_numbers_would_stay() -> None:
    with pytest.raises(ConfigError, match="redact_countries: UK is no country"):
        redactor("phone", countries=("PL", "UK"))


SENTENCES = [
    (kind, marked, (country,) if len(country) == 2 else ())
    for kind, sentences in DATA.items()
    if kind != "countries"
    for marked, country in sentences["found"]
    if country != "twice"
]


@pytest.mark.parametrize(("kind", "marked", "countries"), SENTENCES)
def test_of_a_sentence_the_number_or_address_alone_is_gone(kind: str, marked: str, countries: tuple[str, ...]) -> None:
    text, expected = BRACKETS.sub(r"\1", marked), BRACKETS.sub(f"[redacted:{kind}]", marked)
    if "44051401359: [" in marked:  # said twice, in brackets once
        expected = expected.replace("44051401359", "[redacted:national_id]")
    assert redactor(kind, countries=countries).text(text) == expected


@pytest.mark.parametrize("kind", ["email", "phone", "national_id"])
def test_what_only_looks_like_a_persons_is_left_alone(kind: str) -> None:
    taken = [text for text in DATA[kind]["left"] if redactor(kind).text(text) is not text]
    assert taken == (["999-99-9999"] if kind == "national_id" else []), "the ITIN has no check digit"


def test_numbers_without_country_code_or_name_are_found_in_the_countries_that_are_named() -> None:
    text = "601 234 567 and (415) 555-2671, 44051401359 and 54362315K"
    everywhere = redactor("phone", "national_id")
    assert everywhere.text(text) is text
    in_poland = redactor("phone", "national_id", countries=("PL",))
    assert in_poland.text(text) == ("[redacted:phone] and (415) 555-2671, [redacted:national_id] and 54362315K")
    both = redactor("phone", "national_id", countries=("ES", "US"))
    assert both.text(text) == "601 234 567 and [redacted:phone], 44051401359 and [redacted:national_id]"


LISTED = (
    "Müller", "Anna Nowak", "Łódź", "田中太郎", "김철수", "हिन्दी", "falcon", "NTT株式会社", "นายสมชาย",
    "Jean-Luc Picard", "tomasz", "Straße", "Νίκος", "ёлка", "محمد",
)  # fmt: skip
WORDS = {
    "Herr MULLER, Müllerin, Mu\u0308ller": "Herr [redacted:word], Müllerin, [redacted:word]",
    "anna  nowak, ANNA_NOWAK; Anna\n# Nowak. Annanowak": "[redacted:word], [redacted:word]; [redacted:word]. Annanowak",
    "Anna said: Nowak": "Anna said: Nowak",
    "lodz": "[redacted:word]",
    "私は田中太郎です 田中 太郎": "私は[redacted:word]です [redacted:word]",
    "김철수가 왔다": "[redacted:word]가 왔다",
    "हिन्दी में": "[redacted:word] में",
    "my_falcon_x myFalcon falcons 计划Falcon项目": "my_[redacted:word]_x myFalcon falcons 计划[redacted:word]项目",
    "ｎｔｔ株式会社 NTT 株式会社": "[redacted:word] [redacted:word]",
    "ผมนายสมชายครับ": "ผม[redacted:word]ครับ",
    "jean luc\nPICARD": "[redacted:word]",
    "C:\\home\\tomasz\\x": "C:\\home\\[redacted:word]\\x",
    '{"a": "M\\u00fcller\\nfalcon"}': '{"a": "[redacted:word]\\n[redacted:word]"}',
    "STRASSE, ΝΙΚΟΣ, елка, مُحَمَّد": "[redacted:word], [redacted:word], [redacted:word], [redacted:word]",
    "[redacted:word] word": "[redacted:word] word",
}


@pytest.mark.parametrize(("text", "expected"), WORDS.items())
def test_listed_words_are_gone_in_any_script_and_only_as_whole_words(text: str, expected: str) -> None:
    redacted = redactor(listed=LISTED).text(text)
    assert redacted == expected
    assert redactor(listed=LISTED).text(redacted) == redacted


def test_json_stays_json() -> None:
    everything = redactor("email", "phone", "national_id", listed=("Zoë",), countries=("PL",))
    text = "tel. 601234567\nzoe@example.org\nZoë\n44051401359 \U0001f600"
    for written in (json.dumps({"a": text}), json.dumps({"a": json.dumps([text])})):
        kept = everything.arguments(written)
        assert set(json.loads(kept)) == {"a"} and kept.count("[redacted:") == 4
        assert not re.search("601234567|example|Zo|44051401359", kept)


def test_a_number_at_which_its_library_fails_is_taken_for_one() -> None:
    with pytest.raises(KeyError):
        import_module("stdnum.cn.ric").is_valid("110001194912310029")
    assert redactor("national_id").text("110001194912310029") == "[redacted:national_id]"


@pytest.mark.parametrize(
    "part", ["1", "1 ", "12/12 12/12, ", "601 234 567, ", "tel 601234567 ", "+48601 ", "+1+1 ", "(12) "]
)
def test_the_library_of_phone_numbers_sees_little_of_the_text(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    seen: list[int] = []
    matcher = phonenumbers.PhoneNumberMatcher

    def counted(text: str, *rest: Any) -> Any:
        seen.append(len(text))
        return matcher(text, *rest)

    monkeypatch.setattr(phonenumbers, "PhoneNumberMatcher", counted)
    find = redaction.phone_numbers(("PL",))
    for size in (1_000, 4_000):
        seen.clear()
        list(find((part * size)[:size]))
        assert sum(seen) <= 6 * size


# What is not asked for

IMPORTED = """
import sys
from memd.ingest.redaction import Redactor
from memd.settings.model import IngestSettings
Redactor.of(IngestSettings(redact=True)).text("anna@example.org +48 601 234 567")
print([name for name in ("phonenumbers", "stdnum", "memd.store.lexical.analyzer") if name in sys.modules])
"""


@pytest.mark.process
def test_nothing_is_imported_for_what_is_not_asked_for() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, env=clean_environment())
    assert run.stdout == "[]\n", run.stderr


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "phonenumbers", None)
    with pytest.raises(ConfigError, match=r"needs the package phonenumbers, .* pip install 'memd-proxy\[persons\]'"):
        redactor("phone")
    assert redactor("email").names == ("email",)

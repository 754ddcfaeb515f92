"""Secrets of every shape that public scanners look for are found, in prose, code and JSON; look-alikes are not."""

from __future__ import annotations

import base64
import json
import random
import re

import pytest
from effort import in_time, long

from memd.ingest.redaction.redactor import Redactor
from memd.settings.model import IngestSettings

REDACTOR = Redactor.of(IngestSettings(redact=True))

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
    for around in AROUND:
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


@pytest.mark.parametrize(("text", "expected"), LOGINS.items(), ids=range(len(LOGINS)))
def test_what_lets_somebody_in_is_gone_and_nothing_else(text: str, expected: str) -> None:
    assert REDACTOR.text(text) == expected
    nested = json.dumps({"line": f"first\n{text}"})
    assert "s3cretive" not in REDACTOR.text(nested) and "q1w2e3" not in REDACTOR.text(nested)


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)  # fmt: skip
def test_what_only_looks_like_a_secret_is_left_alone(text: str) -> None:
    assert REDACTOR.text(text) == text


@pytest.mark.parametrize(
    "part",
    [
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
    ],
)  # fmt: skip
def test_a_long_text_of_what_begins_like_a_secret_is_dealt_with_in_time(part: str) -> None:
    secret = filled("glpat-{W20}")
    assert secret not in in_time(REDACTOR.text, f"{secret} {long(part)}\n\n{secret}\n")

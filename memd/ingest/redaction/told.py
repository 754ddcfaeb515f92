"""Finds passwords and keys that are told in passing: in sentences, tables, blocks, calls, commands and addresses.

Rule: what stands in front says that a secret follows; where that is a common word, the secret has to look like one.
Each pattern is bounded and is tried only around the words that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from memd.ingest.redaction.spans import Span, apart
from memd.ingest.redaction.vendor_keys import WORD_BEGINS
from memd.patterns import late_pattern

BEFORE_CHARACTERS, AFTER_CHARACTERS = 300, 800
"""Around each of the words that a pattern needs is looked for it."""
_END = r"\s\"'`\\|<>,;)}\]"
_MIXED = rf"(?P<secret>(?=[^{_END}0-9]{{0,80}}[0-9])(?=[^{_END}A-Za-z]{{0,80}}[A-Za-z])(?![$<{{(%])[^{_END}]{{6,300}})"
"""Letters and digits."""
_KEYLIKE = (  # upper and lower case and digits
    rf"(?P<secret>(?=[^{_END}0-9]{{0,80}}[0-9])(?=[^{_END}A-Z]{{0,80}}[A-Z])(?=[^{_END}a-z]{{0,80}}[a-z])"
    rf"(?![$<{{(%/])[^{_END}()]{{8,300}})"
)
_PROSE = (  # "the password is 8-characters long", "the token is Base64-encoded": what a secret is like, and not which
    r"(?!(?i:\d{1,4}-(?:char(?:acter)?|digit|letter|symbol|word|bit|byte|time|minute|hour|day|week|month|year|step|factor)s?"
    r"|(?:base(?:32|58|64)|sha-?\d{1,3}|md5|bcrypt|argon2\w{0,2}|pbkdf2|aes-?\d{0,3}|oauth2?|utf-?8|rot13)"
    r"-(?:encoded|hashed|encrypted|protected|based|salted|style|compatible))(?![\w-]*[A-Z\d]))"
)
_QUOTED = r"\\{0,3}[\"'](?P<secret>(?![$<{%])[^\"'\\\n]{4,200})\\{0,3}[\"']"
_QUOTED_WORD = _QUOTED.replace(r"\n]", r"\n ]")
_PARAMETER = (  # no title of words and numbers
    r"(?P<secret>(?!(?:[a-z]+|\d+)(?:-(?:[a-z]+|\d+)){2,20}(?![\w-]))(?=[A-Za-z_%.-]{0,60}[0-9])(?=[0-9_%.-]{0,60}[A-Za-z])[A-Za-z0-9_%.~+/-]{16,2000}=?=?)"
)
_NAME = r"(?:pass(?:word|wd|phrase|code)|secret|token|api[_-]?key)s?"
_SAYS = r"[\"'`]?[ \t]{0,4}(?::=|[:=：])[ \t]{0,4}[\"'`]?"
_GAP, _LINE_END = r"[ \t]{0,20}", r"(?=[\"']?[ \t]{0,4}(?:\r?\n|\Z))"
_SETS = r"(?:--from-literal=|(?:fly(?:ctl)? secrets|heroku config:?) ?:?set )"
_COMMON = r"(?<![\w-])(?:root|admin|user|bind)?"

_PATTERNS: dict[tuple[str, ...], tuple[re.Pattern[str], ...]] = {
    # In other languages, and short.
    (
        *("contraseñ", "mot de passe", "hasło", "haslo", "senha", "wachtwoord", "lösenord", "parol", "şifre", "пароль"),
        *(
            "パスワード",
            "密码",
            "密碼",
            "口令",
            "비밀번호",
            "pw:",
            "pw=",
            'pw"',
            "psk",
            "salt=",
            "salt:",
            "hmac",
            "app_key",
        ),
    ): (
        late_pattern(
            r"(?<![a-z])(?:contraseñas?|mot de passe|has[lł]o|senha|wachtwoord|lösenord|parola|parolă|şifre|пароль|"
            r"パスワード|密码|密碼|口令|비밀번호|pw|(?:\w{1,20}_)?(?:psk|salt)|hmac[_-]?key|app_key)"
            rf"{_SAYS}{_MIXED}",
            re.IGNORECASE,
        ),
        late_pattern(
            r"(?<![a-z])(?:wpa[_-]?)?psk[ \t]{0,4}=?[ \t]{0,4}[\"'](?P<secret>[^\"'\\\n]{8,63})[\"']", re.IGNORECASE
        ),
        late_pattern(r"^[ \t]{0,20}psk=(?P<secret>[^\s\"'\\]{8,64})", re.MULTILINE),
    ),
    # Mein Passwort ist X; 密码是X
    ("wort ", "contraseñ", "mot de passe", "senha", "hasło", "lösenord", "密码", "密碼", "パスワード", "비밀번호"): (
        late_pattern(
            r"(?:(?:pass|kenn|wacht)wort|wachtwoord|contraseña|mot de passe|senha|hasło|lösenord)[ \t]{1,4}"
            rf"(?:ist|lautet|war|is|es|est|é|to|är)[ \t]{{1,4}}{_MIXED}",
            re.IGNORECASE,
        ),
        late_pattern(rf"(?:密码|密碼|パスワード|비밀번호)[ ]?(?:是|为|為|は|는|은)[ ]?{_MIXED}"),
    ),
    # OPENAI_KEY=X, oauth_token X, cmdkey /pass:X
    ("_key", "oauth_token", "/pass:"): (
        late_pattern(
            WORD_BEGINS + r"(?![A-Z0-9_]{0,40}PUB(?:LIC)?_)[A-Z][A-Z0-9_]{1,40}_KEY[\"'`]?[ \t]{0,4}(?::=|[:=])"
            rf"[ \t]{{0,4}}[\"'`]?(?=\S{{20}}){_KEYLIKE}",
        ),
        late_pattern(rf"oauth_token[ \t]{{1,4}}(?=\S{{20}}){_KEYLIKE}"),
        late_pattern(rf"/pass:{_MIXED}", re.IGNORECASE),
    ),
    # password is X; my password is "X"; Enter password: X; | password | X |
    ("pass", "secret", "token", "api_key", "apikey", "api key", "api-key", "masterauth"): (
        late_pattern(
            rf"pass(?:word|wd|phrase|code)s? (?:is|was|to):?[ \t]{{1,4}}(?:now )?{_PROSE}{_MIXED}", re.IGNORECASE
        ),
        late_pattern(rf"pass(?:word|wd|phrase|code)s? (?:is|was|to):?[ \t]{{1,4}}(?:now )?{_QUOTED}", re.IGNORECASE),
        late_pattern(rf"(?i:secret|token|api[_ -]?key)s? (?:is|was):?[ \t]{{1,4}}{_PROSE}{_KEYLIKE}"),
        late_pattern(
            rf"\|{_GAP}[`*]{{0,2}}(?:\w{{1,20}}[ _-])?pass\w{{2,6}}[`*]{{0,2}}{_GAP}\|{_GAP}`?(?!\w{{1,20}}\(){_MIXED}",
            re.IGNORECASE,
        ),
        late_pattern(
            rf"\|{_GAP}[`*]{{0,2}}(?:\w{{1,20}}[ _-])?(?i:{_NAME})[`*]{{0,2}}{_GAP}\|{_GAP}`?{_KEYLIKE}",
        ),
        late_pattern(rf"pass(?:word|phrase) for [^\n:]{{1,80}}(?::[^\s:]{{1,80}})?: {_MIXED}", re.IGNORECASE),
        # Password: ⏎ X; password: >- ⏎ X; api_keys: ⏎ - X
        late_pattern(
            rf"{_NAME}\"?:?[ \t]{{0,4}}(?:[>|][+-]?)?[ \t]{{0,4}}\r?\n{_GAP}(?:- )?[\"']?{_KEYLIKE}{_LINE_END}",
            re.IGNORECASE,
        ),
        late_pattern(
            rf"{_NAME}: [>|][+-]?\r?\n[ \t]{{1,20}}(?P<secret>[^\s\"'\\]{{6,200}})(?=[ \t]{{0,4}}(?:\r?\n|\Z))",
            re.IGNORECASE,
        ),
        # "password": ["X"]; api_keys: [X]
        late_pattern(rf"{_NAME}\"?[ \t]{{0,4}}[:=][ \t]{{0,4}}\[[ \t]{{0,4}}[\"']?{_MIXED}", re.IGNORECASE),
        # directives: requirepass X, password X, rootpw X
        late_pattern(
            rf"{_COMMON}(?:{_NAME}|requirepass|masterauth|pre-shared-key|api-key)[ \t]{{1,2}}(?:[057] )?"
            rf"(?=\S{{10}}){_KEYLIKE}",
        ),
        late_pattern(r"password 7 (?P<secret>[0-9A-F]{8,80})\b"),
        # ENV DB_PASSWORD X; setx API_KEY X; Set-Variable password X; aws configure set aws_secret_access_key X
        late_pattern(
            rf"\b(?:ENV|ARG|setx|set|set-variable|config user)[ .](?:\w{{0,40}}{_NAME}|\w{{0,40}}_key) {{1,4}}{_MIXED}",
            re.IGNORECASE,
        ),
        # setPassword("X"), withPassword("X"), setenv("TOKEN", "X"), SecretKeySpec("X"
        late_pattern(rf"(?:set|with|use|add)_?(?:{_NAME}|secret)\([ ]?{_QUOTED_WORD}", re.IGNORECASE),
        late_pattern(rf"(?:setenv|putenv)\([\"']\w{{0,40}}{_NAME}\w{{0,20}}[\"'],[ ]?{_QUOTED}", re.IGNORECASE),
        late_pattern(rf"(?:SecretKeySpec|ConvertTo-SecureString(?: -String)?)[ (]{{1,2}}{_QUOTED}"),
        # K8s and others: {user: a, pass: X}; --from-literal=x=X; "value": "X", "name": "DB_PASSWORD"
        late_pattern(rf"\{{[^{{}}\n]{{0,200}}\bpass: {_MIXED}"),
        late_pattern(
            rf"\"value\"[ ]?:[ ]?{_QUOTED},[ ]?\"name\"[ ]?:[ ]?\"\w{{0,60}}(?:{_NAME}|key)\w{{0,20}}\"",
            re.IGNORECASE,
        ),
    ),
    ("userpassword::", "{ssha", "rootpw", "bindpw"): (
        late_pattern(r"userPassword:: (?P<secret>[A-Za-z0-9+/]{8,400}={0,2})"),
        late_pattern(r"\{S(?:SHA|MD5)(?:256|512)?\}(?P<secret>[A-Za-z0-9+/]{16,200}={0,2})"),
        late_pattern(rf"(?:root|bind)pw[ \t]{{1,8}}{_MIXED}"),
    ),
    ("auth(", "auth=", "auth =", "login("): (
        late_pattern(
            r"(?:HTTPBasicAuth|HTTPDigestAuth|basic_auth|\bauth[ ]?=[ ]?|\blogin)"
            rf"\([\"'][^\"'\n]{{1,60}}[\"'],[ ]?{_QUOTED_WORD}\)"
        ),
        late_pattern(rf"^(?:\w{{1,20}}_)?AUTH={_MIXED}", re.MULTILINE),
    ),
    # In the query or the fragment of an address.
    ("key=", "sig=", "signature=", "code=", "token="): (
        late_pattern(
            rf"[?&#](?:api[_-]?)?(?:key|sig|code|x-amz-signature|signature|(?:access|auth|id)_token)={_PARAMETER}",
            re.IGNORECASE,
        ),
        late_pattern(r"X-Amz-Signature=(?P<secret>[0-9a-f]{64})|\bSignature=(?P<header>[0-9a-f]{64})"),
    ),
    # Commands.
    ("--from-literal", "secrets set", "config:set"): (
        late_pattern(rf"{_SETS}[\w.-]{{1,60}}={_KEYLIKE}"),
        late_pattern(rf"{_SETS}[\w.-]{{0,50}}(?i:{_NAME}|key)={_MIXED}"),
    ),
    ("openssl",): (
        late_pattern(rf"openssl [^\n]{{0,200}}? (?:-k |-pass(?:in|out)? pass:)(?P<secret>(?![$<])[^{_END}]{{4,200}})"),
    ),
    (
        "sqlcmd",
        "bcp ",
        "ldapsearch",
        "twine",
        "useradd",
        "usermod",
        "smbclient",
        "xfreerdp",
        "htpasswd",
        "rabbitmqctl",
        "net use",
    ): (
        late_pattern(
            r"\b(?:sqlcmd|bcp|twine|useradd|usermod) [^\n]{0,200}? -[pP] ?['\"]?"
            rf"(?P<secret>(?![-$<])[^{_END}]{{4,200}})"
        ),
        late_pattern(rf"\bldap\w{{1,12}} [^\n]{{0,200}}? -w ?['\"]?(?P<secret>(?![-$<])[^{_END}]{{4,200}})"),
        late_pattern(rf"\bsmbclient [^\n]{{0,200}}?-U ?[^\s%]{{1,60}}%(?P<secret>[^{_END}]{{4,200}})"),
        late_pattern(rf"\bxfreerdp [^\n]{{0,200}}?/p:(?P<secret>[^{_END}]{{4,200}})"),
        late_pattern(rf"\bhtpasswd -\w{{0,6}}b\w{{0,6}} \S{{1,200}} \S{{1,80}} (?P<secret>(?![$<])[^{_END}]{{4,200}})"),
        late_pattern(rf"\brabbitmqctl (?:add_user|change_password) \S{{1,80}} (?P<secret>(?![$<])[^{_END}]{{4,200}})"),
        late_pattern(rf"\bnet use \S{{1,200}} (?P<secret>(?![/$<*])[^{_END}]{{4,200}}) /user"),
    ),
    ("chpasswd", "--password-stdin", "vault login"): (
        late_pattern(r"echo [\"']?[\w.-]{1,60}:(?P<secret>(?![$<])[^\s\"']{4,200})[\"']? ?\| ?(?:sudo )?chpasswd"),
        late_pattern(r"chpasswd ?<<< ?[\"']?[\w.-]{1,60}:(?P<secret>(?![$<])[^\s\"']{4,200})"),
        late_pattern(r"echo [\"']?(?P<secret>(?![$<])[^\s\"'|]{4,200})[\"']? ?\| ?[^\n|]{1,200}--password-stdin"),
        late_pattern(rf"vault login (?:-\S{{1,40}} ){{0,4}}{_MIXED}"),
    ),
    ("kubeadm", "::server:", "unseal key"): (
        late_pattern(r"--token (?P<secret>[a-z0-9]{6}\.[a-z0-9]{16})\b"),
        late_pattern(r"\bK10(?P<secret>[0-9a-f]{64}::server:[0-9a-f]{16,64})"),
        late_pattern(r"nseal Key (?:\d{1,2}|\([^)\n]{1,20}\)): (?P<secret>[A-Za-z0-9+/=]{32,90})"),
    ),
    ("snmp-server", "wifi:", "secret_id", "jdbc:oracle"): (
        late_pattern(r"snmp-server community (?P<secret>(?!public\b|private\b)\S{4,64}) R[OW]\b"),
        late_pattern(r"WIFI:[^\n]{0,120}?P:(?P<secret>[^;\n(?]{8,63});"),
        late_pattern(r"secret_id[ \t]{1,4}(?P<secret>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"),
        late_pattern(r"jdbc:oracle:\w{1,8}:[\w.-]{1,60}/(?P<secret>[^\s@/]{4,100})@"),
    ),
    ("sapisid", "psid"): (
        late_pattern(r"(?:SAPISID|__Secure-\dPSID(?:TS|CC)?|\bS?APISID)=(?P<secret>[A-Za-z0-9_/.-]{16,200})"),
    ),
    # Wallets, and what gets around a second factor.
    ("prv", "0x"): (
        late_pattern(r"\b(?P<secret>[xyz]prv[1-9A-HJ-NP-Za-km-z]{100,112})\b"),
        late_pattern(r"(?:private|secret|wallet)[^\n]{0,40}?\b(?P<secret>0x[0-9a-fA-F]{64})\b", re.IGNORECASE),
    ),
    ("seed ", "mnemonic", "recovery"): (
        late_pattern(
            r"(?:(?:seed|recovery|secret|backup)[ _-]?(?:phrase|words)|mnemonic)[\"']?(?: is)?[ \t]{0,4}[:=]?[ \t]{0,4}"
            r"[\"'`]?(?P<secret>(?:[a-z]{3,8} ){11,23}[a-z]{3,8})\b",
            re.IGNORECASE,
        ),
        late_pattern(
            r"recovery codes?(?: is)?[:=] ?(?P<secret>[A-Za-z0-9]{3,8}(?:-[A-Za-z0-9]{3,8}){1,5})", re.IGNORECASE
        ),
    ),
    ("pin:", "pin=", "pin is", "pin code", "otp", "one-time"): (
        late_pattern(r"(?<!GPIO )\bPIN(?: code)?(?: is|:|=) ?(?P<secret>\d{4,8})\b"),
        late_pattern(r"\b(?:otp|one-time (?:code|password))(?: is|:|=) ?(?P<secret>\d{6,8})\b", re.IGNORECASE),
    ),
}


def told(text: str) -> Iterator[Span]:
    """Passwords, keys and codes, where the words in front of them say what they are."""
    lowered = text.lower()
    for words, patterns in _PATTERNS.items():
        if len(lowered) != len(text):  # a letter became two, and the places are others
            around: Iterable[Span] = [(0, len(text))] if any(word in lowered for word in words) else []
        else:
            around = apart(_around(lowered, words))
        for begin, end in around:
            for pattern in patterns:
                yield from (found.span(found.lastgroup or 0) for found in pattern.finditer(text, begin, end))


def _around(lowered: str, words: Iterable[str]) -> Iterator[Span]:
    """The stretches of a text around these words: looking for a word takes a fiftieth of looking for a pattern."""
    for word in words:
        at = lowered.find(word)
        while at >= 0:
            end = min(len(lowered), at + AFTER_CHARACTERS)
            yield max(0, at - BEFORE_CHARACTERS), end
            at = lowered.find(word, max(at + 1, end - AFTER_CHARACTERS // 2))

"""Finds keys and tokens whose issuers gave them a shape: by their beginnings, by their form, by the name beside them.

Rule: time grows with the length of the text. Text without long words has no key; of the beginnings only those are
searched for that occur in its long words. A key counts from about half its length on: half a secret is one, too.

The shapes are those that public scanners look for (the rules of gitleaks as of July 2026 are the measure), and those
that issuers document; tests/test_secret_shapes.py has an example of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memd.ingest.redaction.spans import Span, apart
from memd.patterns import late_pattern

WORD_BEGINS = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4}))"
"""Not behind a letter or digit, but for the escapes of JSON and of URLs."""
_ENDS = r"(?![A-Za-z0-9])"
_UUID = "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"
_LONG_WORD = late_pattern(r"[A-Za-z0-9_.~:/+=%|@\\-]{18,}+")
_DIGIT = late_pattern("[0-9]")
_LONG_WORD_READ_MAX = 256
"""So much of a long word is looked at for the value of a vendor's setting."""

_BEGINNINGS = {  # the rest of a key → its beginnings
    "[A-Za-z0-9_-]{8,}+": "sk-proj- sk-ant- sk-or- sk-svcacct- sk-admin- sk-lf-",
    "(?=[A-Za-z0-9_-]{0,60}?[0-9])[A-Za-z0-9_-]{16,}+": "sk-",  # OpenAI and many like it; "risk-averse" is none
    "[A-Za-z0-9]{20,}+": "ghp_ gho_ ghu_ ghs_ ghr_ gsk_ hf_ api_org_ xai- npm_ lin_api_ lin_oauth_ ntn_ r8_ AKCp",
    "(?=[A-Za-z_-]{0,60}[0-9])[A-Za-z0-9_-]{20,}+": (  # a digit early on: else it could be a name
        "fw_ csk- esecret_ nfp_ rnd_ uploadcare_ CCIPAT_ bkua_ squ_ sqp_ sqa_ sbp_ sb_secret_ vcp_ vck_ vca_ pcsk_ "
        "tgp_v1_ jina_ tvly- figd_ figo_ lsv2_pt_ lsv2_sk_ phx_ apify_api_ LTAI secret-token: tfp_ fo1_ sk_prod_ "
        "rk_prod_ pscale_tkn_ pscale_pw_ pscale_oauth_ sha256~ dckr_pat_ dckr_oat_ ATBB FLWSECK- duffel_test_ "
        "duffel_live_ nvapi- tk-us- fio-u- napi_ vercel_blob_rw_"
    ),
    r"[A-Za-z0-9_-]{16,}+(?:\.[A-Za-z0-9_-]++)*+": (
        "glpat- gldt- glrt- glrtr- glcbt- glptt- glft- glffct- glimt- glagent- glsoat- gloas- GR1348941 github_pat_ "
        "GOCSPX- hvs. hvb. hvr. tskey- whsec_ pplx- HRKU- PMAK- dnkey- "
        "xkeysib- xsmtpsib- sq0atp- sq0csp- NRAK- NRII- NRJS- AGE-SECRET-KEY-1 dt0c01. dt0s01. dt0s16. "
        "bedrock-api-key-"
    ),
    r"(?:[a-z_]{2,40}\.)?[A-Za-z0-9]{20,}+": "dp.pt. dp.st. dp.ct. dp.sa. dp.scim. dp.audit.",  # Doppler
    "[A-Za-z0-9_-]{20,}+(?:=[A-F0-9]{8})?+": "ATATT3 ATCTT3",  # Atlassian
    "[A-Fa-f0-9]{16,}+(?:-[A-Za-z0-9]++)*+": (
        "shpat_ shpca_ shppa_ shpss_ dop_v1_ doo_v1_ dor_v1_ dapi pul- rubygems_ sntryu_ sgp_ sgp_local_ shippo_live_ "
        "shippo_test_ s-s4t2ud- s-s4t2af- FLWSECK_TEST- FLWPUBK_TEST-"
    ),
    "[A-Za-z0-9+/=_-]{24,}+": "glsa_ glc_ fm1a_ fm1r_ fm2_ sntrys_ ops_eyJ eyJrIjoi AQVN ZXlK",
    "[A-Za-z0-9]{26,}+" + _ENDS: "CLOJARS_ rdme_ EZAK EZTK pnu_ p8e- ico- cio oy2",
    "[A-Za-z0-9]{16}" + _ENDS: "sm_aat_ sm_pat_ sm_sat_",
    "[A-Z0-9]{16}": "AKIA ASIA ABIA ACCA",  # AWS
    "[A-Z2-7]{17}" + _ENDS: "A3T",
    "[A-Za-z0-9+/]{100,}+": "ABSK",
    "[A-Za-z0-9_-]{30,}+": "AIza 1//0",  # Google
    "[A-Za-z0-9_.-]{20,}+": "ya29.",
    "[A-Za-z0-9-]{8,}+": "xoxa- xoxb- xoxc- xoxd- xoxe- xoxo- xoxp- xoxr- xoxs- xoxe.xoxb- xoxe.xoxp- xapp-",  # Slack
    "[A-Za-z0-9]{10,}+": "sk_live_ sk_test_ pk_live_ pk_test_ rk_live_ rk_test_",  # Stripe
    "[A-Za-z0-9_-]{40,}+": "pypi-",
    r"[A-Za-z0-9_-]{16,}+\.[A-Za-z0-9_-]{16,}+": "SG.",
    "[a-f0-9]{32}" + _ENDS: "key- pubkey-",  # Mailgun
    "[A-Z0-9]{26}" + _ENDS: "API-",  # Octopus
    "[A-Za-z0-9]{43}" + _ENDS: "secret_",  # Notion, before ntn_
    "[A-Za-z0-9]{38}" + _ENDS: "4b1d",  # ClickHouse
    "[A-Za-z0-9]{59}" + _ENDS: "cmVmd",  # Artifactory
    "[A-Za-z0-9_-]{60}" + _ENDS: "EAAA",  # Square
    "[A-Za-z0-9]{100,}+": "EAA",  # Facebook
    "[a-f0-9]{48}" + _ENDS: "sk_",  # ElevenLabs
}
_KEYS = [(begin, late_pattern(rest)) for rest, begins in _BEGINNINGS.items() for begin in begins.split()]
_ESCAPE_BEFORE = late_pattern(r"(?:\\[nrt]|%[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4})\Z")
_ESCAPE_CHARACTERS_MAX = 6
# Keys with a form of their own. Bounded, as each of them may begin at every word.
_FORMS = late_pattern(
    WORD_BEGINS + "(?:"
    r"hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9/_-]{16,}+"
    r"|(?:canary\.|ptb\.)?discord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks/\d{15,21}/[A-Za-z0-9_-]{30,}+"
    rf"|[a-z0-9-]{{1,60}}\.webhook\.office\.com/webhookb2/{_UUID}[^\s\"'<>]{{20,}}+"
    r"|[0-9]{6,16}:A[A-Za-z0-9_-]{33,35}"  # a bot of Telegram
    r"|[MNO][A-Za-z0-9_-]{22,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,40}|mfa\.[A-Za-z0-9_-]{60,}+"  # Discord
    r"|[A-Za-z0-9_~.]{3}[0-9][QR]~[A-Za-z0-9_~.-]{31,34}"  # Azure: of an application, of a store, of a service
    r"|[A-Za-z0-9/+]{70,80}\+A[A-Z][A-Za-z0-9]{6,8}==|[A-Za-z0-9]{20,60}JQQJ99[A-Za-z0-9]{10,40}"
    r"|[A-Za-z0-9_-]{40,56}Az(?:Se|Fu|Ca)[A-Za-z0-9_-]{6,10}={0,2}|[A-Za-z0-9]{70,80}AZDO[A-Za-z0-9]{4}"
    r"|sig=[A-Za-z0-9%/+]{40,60}(?:%3[Dd]|=)"
    r"|[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40,70}"  # Terraform
    r"|s\.(?=[A-Za-z]{0,22}[0-9][A-Za-z]{0,22}[0-9])[A-Za-z0-9]{24}"
    + _ENDS  # Vault, before hvs.
    + r"|t1\.[A-Za-z0-9_-]{5,200}={0,2}\.[A-Za-z0-9_-]{86}"  # Yandex
    r"|A3-[A-Z0-9]{6}-(?:[A-Z0-9]{11}|[A-Z0-9]{6}-[A-Z0-9]{5})(?:-[A-Z0-9]{5}){3}"  # 1Password
    r"|(?:sc|ext|scauth|authress)_[A-Za-z0-9]{5,30}\.[A-Za-z0-9]{4,6}\.acc[_-][A-Za-z0-9-]{10,32}\.[A-Za-z0-9+/_=-]{30,}+"
    r"|(?:pat|sat)\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9]{24}\.[A-Za-z0-9]{20}"  # Harness
    rf"|pat[A-Za-z0-9]{{14}}\.[a-f0-9]{{64}}|pat-[a-z]{{2}}[0-9]-{_UUID}"  # Airtable, HubSpot
    rf"|[a-f0-9]{{32}}-us[0-9]{{1,2}}|[a-h0-9]{{32}}-[a-h0-9]{{8}}-[a-h0-9]{{8}}|SK[a-f0-9]{{32}}"  # Mailchimp, Twilio
    r"|[A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk|v1\.0-[a-f0-9]{24}-[a-f0-9]{100,146}"  # MaxMind, Cloudflare
    rf"|access-(?:sandbox|development|production)-{_UUID}|sl\.[A-Za-z0-9_=-]{{100,}}+"  # Plaid, Dropbox
    r"|pk\.[A-Za-z0-9]{60}\.[A-Za-z0-9_-]{22}|live_[A-Za-z0-9_=-]{40}|(?:live|test)_[a-f0-9]{35}"  # Mapbox, …
    r"|[0-9]{15,16}(?:\||%7C)[A-Za-z0-9_-]{27,40}|A{22}[A-Za-z0-9%]{80,100}"  # Facebook, Twitter
    r"|AAAA[A-Za-z0-9_-]{7}:APA91b[A-Za-z0-9_-]{60,200}"  # Firebase
    rf"){_ENDS}"
)
# Names beside which an otherwise shapeless value is a key: DATADOG_APP = "…", 'okta': '…'.
_VENDOR_SETTING = late_pattern(
    r"(?:adafruit|adobe|airtable|algolia|alibaba|asana|atlassian|confluence|jira|beamer|bitbucket|bittrex|meraki|cloudflare|"
    r"codecov|cohere|coinbase|confluent|contentful|datadog|discord|droneci|dropbox|etsy|facebook|fastly|finicity|finnhub|"
    r"flickr|freshbooks|gitter|heroku|hubspot|intercom|jfrog|artifactory|kraken|kucoin|launchdarkly|linkedin|looker|"
    r"mailchimp|mailgun|mapbox|mattermost|messagebird|netlify|new_?relic|nytimes|okta|plaid|privateai|rapidapi|sendbird|"
    r"sentry|snyk|sonar|squarespace|sumo|telegram|travis|twitch|twitter|typeform|yandex|zendesk)[\w .-]{0,24}"
    r"[\"'`\\\]]{0,4}[ \t]{0,4}(?:=>|:=|[=:])[ \t]{0,4}[\"'`\\]{0,4}"
    rf"(?P<secret>{_UUID}|(?=[A-Za-z_=-]{{0,40}}[0-9])(?=[0-9_=-]{{0,40}}[A-Za-z])[A-Za-z0-9_=-]{{16,100}}){_ENDS}",
    re.IGNORECASE,
)
_SETTING_BEFORE_MAX = 80  # of a vendor's name and what follows it, up to the value


def vendor_keys(text: str) -> Iterator[Span]:
    """Keys of well-known shapes."""
    long_words = "\n".join(_LONG_WORD.findall(text))
    if not long_words:
        return
    spans = [span for begin, rest in _KEYS if begin in long_words for span in _beginning_with(begin, rest, text)]
    if _FORMS.search(long_words):
        spans += [found.span() for found in _FORMS.finditer(text)]
    spans += _vendor_settings(text)
    yield from apart(spans)


def _beginning_with(begin: str, rest: re.Pattern[str], text: str) -> Iterator[Span]:
    at = text.find(begin)
    while at >= 0:
        found = rest.match(text, at + len(begin)) if _begins_word(text, at) else None
        if found is not None:
            yield at, found.end()
        at = text.find(begin, at + 1 if found is None else found.end())


def _begins_word(text: str, at: int) -> bool:
    before = text[max(0, at - _ESCAPE_CHARACTERS_MAX) : at]
    return not (before[-1:].isascii() and before[-1:].isalnum()) or bool(_ESCAPE_BEFORE.search(before))


def _vendor_settings(text: str) -> Iterator[Span]:
    """The values of settings that a vendor's name stands in, found by the long words that they are."""
    for word in _LONG_WORD.finditer(text):
        if not _DIGIT.search(word[0]):
            continue
        begin, end = word.start(), min(word.end(), word.start() + _LONG_WORD_READ_MAX)
        lead = text[max(0, begin - 8) : begin].rstrip(" \t\"'`\\")
        if not lead.endswith(("=", ":", "=>")) and not _has_setting(text, begin, end):
            continue
        found = _VENDOR_SETTING.search(text, max(0, begin - _SETTING_BEFORE_MAX), end)
        if found is not None:
            yield found.span("secret")


def _has_setting(text: str, begin: int, end: int) -> bool:
    """Whether a name and a value may be in one word."""
    return text.find("=", begin, end) > begin or text.find(":", begin, end) > begin

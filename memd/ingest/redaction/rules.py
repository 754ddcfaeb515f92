r"""The rules of redaction as data: secrets that can be told by a pattern, and the numbers by which states know people.

Rule: nothing but tables; `shapes.py` and `persons.py` say how they are read. A pattern is bounded, or its repetition
possessive: what its beginning promises is consumed even if its end is missing, as half a secret is one, too.

`RULES` has a line a rule: its mark, where it is tried, its check, whose secret it is, and the pattern. Of a pattern with
a group only the group is the secret. `{NAME}` stands for a line `NAME = …`. Where is one of

- `^words`: a key of these beginnings (case counts), of which the pattern is the rest; without words, any long word
- `=words`: behind each of these words (`_` at the end of one is a blank)
- `~words`: within some hundred characters of one of them
- `?words`: in a text that has one of them; without words, in any text

The shapes of keys are those that public scanners look for (the rules of gitleaks as of July 2026 are the measure), and
those that issuers document; tests/test_secret_shapes.py has an example of each.
"""

from __future__ import annotations

# ruff: noqa: E501  # one line a rule

RULES = r"""
LONG_WORD = [A-Za-z0-9_.~:/+=%|@\\-]{18,}+
ESCAPE = (?i:\\{1,15}+(?:u(?P<high>d[89ab][0-9a-f]{2})\\{1,15}+u(?P<low>d[c-f][0-9a-f]{2})|u(?P<code>[0-9a-f]{4})|[nrtbf]))
BEGINS = (?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4}))
ENDS = (?![A-Za-z0-9])
UUID = [0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}
END = \s"'`\\|<>,;)}\]
MIXED = ((?=[^{END}0-9]{0,80}[0-9])(?=[^{END}A-Za-z]{0,80}[A-Za-z])(?![$<{(%])[^{END}]{6,300})
KEYLIKE = ((?=[^{END}0-9]{0,80}[0-9])(?=[^{END}A-Z]{0,80}[A-Z])(?=[^{END}a-z]{0,80}[a-z])(?![$<{(%/])[^{END}()]{8,300})
UNIT = (?:char(?:acter)?|digit|letter|symbol|word|bit|byte|time|minute|hour|day|week|month|year|step|factor)s?
ENCODING = (?:base(?:32|58|64)|sha-?\d{1,3}|md5|bcrypt|argon2\w{0,2}|pbkdf2|aes-?\d{0,3}|oauth2?|utf-?8|rot13)-(?:encoded|hashed|encrypted|protected|based|salted|style|compatible)
PROSE = (?!(?i:\d{1,4}-{UNIT}|{ENCODING})(?![\w-]*[A-Z\d]))
QUOTED = \\{0,3}["']((?![$<{%])[^"'\\\n]{4,200})\\{0,3}["']
QUOTED_WORD = \\{0,3}["']((?![$<{%])[^"'\\\n ]{4,200})\\{0,3}["']
NAMES = password,passwd,passphrase,passcode,secret,token,api_key,api-key,apikey
NAME = (?:pass(?:word|wd|phrase|code)|secret|token|api[_-]?key)s?
GAP = [ \t]{0,20}
SPACE = [ \t]{0,4}
NEXT = (?:[ \t\r\n]|\\{1,8}[nrt]){1,40}+
MARK = (?:\\{0,7}["'])
ARGUMENT = ((?![-$<])[^{END}]{4,200})

KEY_NAME = (?:[A-Z0-9]{1,12} ){0,4}PRIVATE KEY(?: BLOCK)?
KEY_BEGIN = -{4,5} ?BEGIN {KEY_NAME} ?-{4,5}|\bPrivate-Lines:[ \t]*\d{1,4}|\A\s{0,2}(?:(?:[A-Z0-9]{1,12} ){0,4}PRIVATE )?KEY(?: BLOCK)?-{4,5}
KEY_END = -{4,5} ?END (?P<whole>{KEY_NAME} ?-{4,5})|-{4,5} ?END(?: [A-Z0-9 ]{0,60}+)?\s*+\Z
KEY_UP_TO_END = (?:[^-]++|-(?!-{3,4} ?(?:BEGIN|END) ))*+-{4,5} ?END [A-Z0-9 ]{0,60}+-{0,5}
BASE = [A-Za-z0-9+/=]
BETWEEN = (?:\\{1,8}[nrt]|[\s"'`>|#,*+\\])
KEY_HEADER = (?:Proc-Type|DEK-Info|Version|Comment|Hash|Charset|Private-MAC)\b[^\n\\]{0,200}+
KEY_LAST_LINE = (?:(?:\r?\n|\\{1,8}n)[ \t>|#*"']{0,8}+(?={BASE}{0,15}[0-9+/=]|{BASE}{1,15}["'`)}\]]{0,4}(?:\Z|\r?\n|\\{1,8}n)){BASE}{1,15}+)
KEY_MATERIAL = (?:{BETWEEN}{0,40}+(?:{KEY_HEADER}|{BASE}{16,}+))*+{KEY_LAST_LINE}?+
KEY_TOKENS = (?s:(?P<between>{BETWEEN}++)|(?P<line>{BASE}++)|.)
KEY_MIDDLE = {BASE}++(?:(?:\r?\n|\\{1,8}n){BASE}++)++\s*+\Z

KINDS_OF_KEY = (?:access|auth|private|secret|signing|encryption|master|account|license|subscription|service|storage|shared)[_-]?key
PASSWORD = pass(?:word|wd|phrase|code)|passwort|kennwort|(?<![a-z])pwd|(?<=[_-])pass|\bpass(?==)
SEPARATOR = ["'`\\\]]{0,5}+(?:[ \t]{0,4}:[ \t]{0,4}[a-z][\w.\[\]|? ]{0,40}?=(?!=)|[ \t]{0,20}(?:=>|:=|={1,3}|!==?|:(?!//|:))|>|[ \t](?=[^\s:=]))[ \t]{0,8}+
ASSIGNED = (?i:(?P<key>(?P<password>{PASSWORD})|secret|token|api[_-]?key|credentials?|{KINDS_OF_KEY})(?:[_-]?(?:access|key|base|value|text|confirm(?:ation)?|[0-9]{1,2})){0,3}+(?P<separator>{SEPARATOR}))
ASSIGNED_BEGINS = pass|pwd|kennwort|secret|token|credential|api[_-]?key|{KINDS_OF_KEY}
VALUE_QUOTE = [bfruBFRU]{0,2}(?P<escapes>\\{0,15})(?P<quote>["'`])
VALUE_CLOSING = (?<!\\)(?P<escapes>\\*+)(?:(?P<quote>["'`])|\n)
VALUE_UNQUOTED = (?:[^\s"'`\\<>,;&)\]}|]|\\(?!["'nrtbfu/])|[,;&)\]}|](?![\s"'`\\,;&)\]}|<]|\Z|[\w-]{1,30}[=:]))*+
PLACEHOLDER = \$?\{++[^{}]*+\}++|\$\([^()]*+\)?|\$(?:[A-Z_][A-Z0-9_]*+|[a-z_]++)|<[^<>]*+>|%\(?\w*+\)?[sd]?|%\w++%|[*•.xX_-]++|(?s:\[redacted:.*+)
TYPE = str(?:ing)?|int(?:eger)?|number|bytes?|bool(?:ean)?|any|object|optional|required|unknown|void|char|text|varchar|secretstr
PROGRAM_WORD = (?i:(?:no(?:ne|t|pe)?|null|nil|nan|undefined|true|false|yes|{TYPE}|self|this|await|new|typing|lambda|function|\w*(?:pass(?:word|wd|phrase)?|pwd|secret|token|key|credentials?))[!?.:]*)
PROGRAM_PATH = [A-Za-z_$][\w$]*+(?:(?:\.|->|::|\?\.)[A-Za-z_$][\w$]*+)++
PROGRAM_CALL = (?:[A-Za-z_$][\w$]*+(?:(?:\.|->|::|\?\.)[A-Za-z_$][\w$]*+)*+)?[(\[{]
COMPLAINT = (?i:(?:invalid|expired|wrong|missing|incorrect|bad|forgot(?:ten)?|confirm|repeat|reset|change)[ _-]?\Z)
FLAG = (?:--[\w-]*|(?:^|[^\w-])-[\w-]*)$

private_key | ?kty | jwk | JSON Web Key, RFC 7517 | \\{0,7}["'](?:d|p|q|dp|dq|qi|k)\\{0,7}["']\s{0,4}:\s{0,4}\\{0,7}["']([A-Za-z0-9_-]{16,}+)
private_key | ?LS0tLS1CRUdJTi | - | "-----BEGIN …PRIVATE KEY" in base64: Kubernetes | LS0tLS1CRUdJTi[A-Za-z0-9+/]{1,16}?(?:BSSVZBVEUgS0V|QUklWQVRFIEtFW|UFJJVkFURSBLRV)[A-Za-z0-9+/=]++
url_credentials | ?@ | - | RFC 3986; a port and a template are no password | :(?<=[A-Za-z0-9]:)(?:\\{0,3}/){2}[^\s/:@?#"'<>\\]{0,256}+:(?!\d{1,5}[?#]|\$?\{|%[({])([^\s/@"'<>\\]++(?:@(?=[^\s/@"'<>\\]*+@)[^\s/@"'<>\\]*+)*+)@
jwt | ?eyJ | - | RFC 7519, where a run of its characters begins | (?<![A-Za-z0-9_-])(?>[A-Za-z0-9_-]*?(?=eyJ))(eyJ[A-Za-z0-9_-]{6,}+\.(?:eyJ[A-Za-z0-9_-]{6,}+(?:\.[A-Za-z0-9_-]++)?+|[A-Za-z0-9_-]*+\.[A-Za-z0-9_-]++(?:\.[A-Za-z0-9_-]++){0,2}+))
bearer_token | ?authorization | sample | RFC 9110 | (?i:authorization["'\\]{0,4}{SPACE}[:=]{SPACE}["'\\]{0,4}(?:(?:bearer|basic|token|apikey|bot|pat)[ \t]{1,4}([A-Za-z0-9._~+/=-]++)|(?:[A-Za-z][A-Za-z-]{1,20}[ \t]{1,4})?((?=[A-Za-z._~+/=:-]{0,80}[0-9])[A-Za-z0-9._~+/=:-]{16,}+)))
bearer_token | ?bearer | sample | RFC 6750 | (?i:\bbearer(?:[ \t]{1,4}|%20)((?=[A-Za-z._~+/=-]*+[0-9])[A-Za-z0-9._~+/=-]{8,}+))
GROUPS = (?:[ \u00a0-][0-9]{3,}+)*+
card_number | ? | luhn | ISO/IEC 7812; not within a hash or behind a decimal point | ([0-9](?:(?<![A-Fa-f0-9].)(?<!\d\..)|(?<=\\[bf].)|(?<=\\u[0-9A-Fa-f]{4}.))[0-9]{2,}+{GROUPS})(?![A-Fa-f]|\.[0-9])
card_number | ?%20 | luhn | the same in an address | %20([0-9]{3,}+{GROUPS})(?![A-Fa-f]|\.[0-9])
iban | ? | iban | ISO 13616 | [A-Z]{2}[0-9]{2}(?=[ \u00a0-]?[A-Z0-9]{4}[ \u00a0-]?[A-Z0-9]{4})(?:(?<![A-Za-z0-9]....)|(?<=\\[nrt]....))

cookie | ?cookie | - | RFC 6265 | (?i:\b(?:set-)?cookies?{MARK}?{SPACE}[:=]{SPACE}{MARK}?([!#$%&*+.^_`|~0-9A-Za-z-]{1,80}=(?![ \t])[^\s"'\\;]{8,}+(?:;[ \t]{0,2}[^"'\\\r\n;]{1,4096}+){0,50}+))
SESSION = {MARK}?[ \t]{0,2}[:=][ \t]{0,2}{MARK}?((?=[a-z_%.-]{0,60}[0-9])(?=[0-9_%.-]{0,60}[a-z])[a-z0-9_%.+/-]{20,}+)(?![(\[])
cookie | =sess | - | sessions | (?i:(?:ion)?(?:[_.-]?(?:id|key|token))?{SESSION})
cookie | =sid,li_at | - | sessions, LinkedIn | (?i:(?<![a-z]sid)(?<![a-z]li_at){SESSION})
cookie | =remember_me,remember_user,cf_clearance | - | sessions, Cloudflare | (?i:\w{0,20}{SESSION})

api_key | ^sk-proj-,sk-ant-,sk-or-,sk-svcacct-,sk-admin-,sk-lf- | - | OpenAI, Anthropic, OpenRouter, Langfuse | [A-Za-z0-9_-]{8,}+
api_key | ^sk- | - | OpenAI and many like it; "risk-averse" is none | (?=[A-Za-z0-9_-]{0,60}?[0-9])[A-Za-z0-9_-]{16,}+
api_key | ^ghp_,gho_,ghu_,ghs_,ghr_,gsk_,hf_,api_org_,xai-,npm_,lin_api_,lin_oauth_,ntn_,r8_,AKCp | - | GitHub, Groq, Hugging Face, xAI, npm, Linear, Notion, Replicate, Artifactory | [A-Za-z0-9]{20,}+
DIGIT_EARLY = (?=[A-Za-z_-]{0,60}[0-9])[A-Za-z0-9_-]{20,}+
api_key | ^fw_,csk-,esecret_,pcsk_,tgp_v1_,jina_,tvly-,lsv2_pt_,lsv2_sk_,nvapi-,phx_,apify_api_ | - | Fireworks, Cerebras, Pinecone, Together, Jina, Tavily, LangSmith, NVIDIA, PostHog, Apify | {DIGIT_EARLY}
api_key | ^nfp_,rnd_,uploadcare_,CCIPAT_,bkua_,squ_,sqp_,sqa_,sbp_,sb_secret_,vcp_,vck_,vca_,napi_,vercel_blob_rw_,fo1_,tfp_ | - | Netlify, Render, CircleCI, Buildkite, Sonar, Supabase, Vercel, Neon, Fly, Typeform | {DIGIT_EARLY}
api_key | ^figd_,figo_,LTAI,sk_prod_,rk_prod_,pscale_tkn_,pscale_pw_,pscale_oauth_,sha256~,dckr_pat_,dckr_oat_,ATBB,FLWSECK-,duffel_test_,duffel_live_,tk-us-,fio-u-,secret-token: | - | Figma, Alibaba, RFC 8959, Stripe, PlanetScale, OpenShift, Docker, Bitbucket, Flutterwave, Duffel, Frame.io | {DIGIT_EARLY}
DOTTED = [A-Za-z0-9_-]{16,}+(?:\.[A-Za-z0-9_-]++)*+
api_key | ^glpat-,gldt-,glrt-,glrtr-,glcbt-,glptt-,glft-,glffct-,glimt-,glagent-,glsoat-,gloas-,GR1348941,github_pat_ | - | GitLab, GitHub | {DOTTED}
api_key | ^GOCSPX-,hvs.,hvb.,hvr.,tskey-,whsec_,pplx-,HRKU-,PMAK-,dnkey-,xkeysib-,xsmtpsib-,sq0atp-,sq0csp-,NRAK-,NRII-,NRJS-,AGE-SECRET-KEY-1,dt0c01.,dt0s01.,dt0s16.,bedrock-api-key- | - | Google, Vault, Tailscale, Stripe, Perplexity, Heroku, Postman, Brevo, Square, New Relic, age, Dynatrace, AWS | {DOTTED}
api_key | ^dp.pt.,dp.st.,dp.ct.,dp.sa.,dp.scim.,dp.audit. | - | Doppler | (?:[a-z_]{2,40}\.)?[A-Za-z0-9]{20,}+
api_key | ^ATATT3,ATCTT3 | - | Atlassian | [A-Za-z0-9_-]{20,}+(?:=[A-F0-9]{8})?+
api_key | ^shpat_,shpca_,shppa_,shpss_,dop_v1_,doo_v1_,dor_v1_,dapi,pul-,rubygems_,sntryu_,sgp_,sgp_local_,shippo_live_,shippo_test_,s-s4t2ud-,s-s4t2af-,FLWSECK_TEST-,FLWPUBK_TEST- | - | Shopify, DigitalOcean, Databricks, Pulumi, RubyGems, Sentry, Sourcegraph, Shippo, Snyk, Flutterwave | [A-Fa-f0-9]{16,}+(?:-[A-Za-z0-9]++)*+
api_key | ^glsa_,glc_,fm1a_,fm1r_,fm2_,sntrys_,ops_eyJ,eyJrIjoi,AQVN,ZXlK | - | Grafana, Fly, Sentry, 1Password, Yandex | [A-Za-z0-9+/=_-]{24,}+
api_key | ^CLOJARS_,rdme_,EZAK,EZTK,pnu_,p8e-,ico-,cio,oy2 | - | Clojars, ReadMe, EasyPost, Prefect, Intra42, crates.io, NuGet | [A-Za-z0-9]{26,}+{ENDS}
api_key | ^sm_aat_,sm_pat_,sm_sat_ | - | Sumsub and its like | [A-Za-z0-9]{16}{ENDS}
api_key | ^AKIA,ASIA,ABIA,ACCA | - | AWS | [A-Z0-9]{16}
api_key | ^A3T | - | AWS | [A-Z2-7]{17}{ENDS}
api_key | ^ABSK | - | AWS Bedrock | [A-Za-z0-9+/]{100,}+
api_key | ^AIza,1//0 | - | Google | [A-Za-z0-9_-]{30,}+
api_key | ^ya29. | - | Google | [A-Za-z0-9_.-]{20,}+
api_key | ^xoxa-,xoxb-,xoxc-,xoxd-,xoxe-,xoxo-,xoxp-,xoxr-,xoxs-,xoxe.xoxb-,xoxe.xoxp-,xapp- | - | Slack | [A-Za-z0-9-]{8,}+
api_key | ^sk_live_,sk_test_,pk_live_,pk_test_,rk_live_,rk_test_ | - | Stripe | [A-Za-z0-9]{10,}+
api_key | ^pypi- | - | PyPI | [A-Za-z0-9_-]{40,}+
api_key | ^SG. | - | SendGrid | [A-Za-z0-9_-]{16,}+\.[A-Za-z0-9_-]{16,}+
api_key | ^key-,pubkey- | - | Mailgun | [a-f0-9]{32}{ENDS}
api_key | ^API- | - | Octopus Deploy | [A-Z0-9]{26}{ENDS}
api_key | ^secret_ | - | Notion, before ntn_ | [A-Za-z0-9]{43}{ENDS}
api_key | ^4b1d | - | ClickHouse | [A-Za-z0-9]{38}{ENDS}
api_key | ^cmVmd | - | Artifactory | [A-Za-z0-9]{59}{ENDS}
api_key | ^EAAA | - | Square | [A-Za-z0-9_-]{60}{ENDS}
api_key | ^EAA | - | Facebook | [A-Za-z0-9]{100,}+
api_key | ^sk_ | - | ElevenLabs | [a-f0-9]{48}{ENDS}
login | ^xprv,yprv,zprv | - | wallets, BIP 32 | [1-9A-HJ-NP-Za-km-z]{100,112}{ENDS}
api_key | ^hooks.slack.com/ | - | Slack | (?:services|workflows|triggers)/[A-Za-z0-9/_-]{16,}+{ENDS}
api_key | ^discord.com/api/,discordapp.com/api/,canary.discord.com/api/,ptb.discord.com/api/ | - | Discord | (?:v\d{1,2}/)?webhooks/\d{15,21}/[A-Za-z0-9_-]{30,}+{ENDS}
api_key | ^ | - | Microsoft Teams | [a-z0-9-]{1,60}\.webhook\.office\.com/webhookb2/{UUID}[^\s"'<>]{20,}+
api_key | ^ | - | Telegram, of a bot | [0-9]{6,16}:A[A-Za-z0-9_-]{33,35}
api_key | ^ | - | Discord | [MNO][A-Za-z0-9_-]{22,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,40}
api_key | ^mfa. | - | Discord | [A-Za-z0-9_-]{60,}+{ENDS}
api_key | ^ | - | Azure, of an application | [A-Za-z0-9_~.]{3}[0-9][QR]~[A-Za-z0-9_~.-]{31,34}
api_key | ^ | - | Azure, of a store, a service, DevOps | (?:[A-Za-z0-9/+]{70,80}\+A[A-Z][A-Za-z0-9]{6,8}==|[A-Za-z0-9]{20,60}JQQJ99[A-Za-z0-9]{10,40}|[A-Za-z0-9_-]{40,56}Az(?:Se|Fu|Ca)[A-Za-z0-9_-]{6,10}={0,2}|[A-Za-z0-9]{70,80}AZDO[A-Za-z0-9]{4})
api_key | ^sig= | - | Azure, a signed address | [A-Za-z0-9%/+]{40,60}(?:%3[Dd]|=){ENDS}
api_key | ^ | - | Terraform | [A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40,70}
api_key | ^s. | - | Vault, before hvs. | (?=[A-Za-z]{0,22}[0-9][A-Za-z]{0,22}[0-9])[A-Za-z0-9]{24}{ENDS}
api_key | ^t1. | - | Yandex | [A-Za-z0-9_-]{5,200}={0,2}\.[A-Za-z0-9_-]{86}{ENDS}
api_key | ^A3- | - | 1Password | [A-Z0-9]{6}-(?:[A-Z0-9]{11}|[A-Z0-9]{6}-[A-Z0-9]{5})(?:-[A-Z0-9]{5}){3}{ENDS}
api_key | ^sc_,ext_,scauth_,authress_ | - | Authress | [A-Za-z0-9]{5,30}\.[A-Za-z0-9]{4,6}\.acc[_-][A-Za-z0-9-]{10,32}\.[A-Za-z0-9+/_=-]{30,}+{ENDS}
api_key | ^pat.,sat. | - | Harness | [A-Za-z0-9_-]{22}\.[A-Za-z0-9]{24}\.[A-Za-z0-9]{20}{ENDS}
api_key | ^pat | - | Airtable, HubSpot | (?:[A-Za-z0-9]{14}\.[a-f0-9]{64}|-[a-z]{2}[0-9]-{UUID}){ENDS}
api_key | ^ | - | Mailchimp, Mailgun | [a-h0-9]{32}-(?:us[0-9]{1,2}|[a-h0-9]{8}-[a-h0-9]{8})
api_key | ^SK | - | Twilio | [a-f0-9]{32}{ENDS}
api_key | ^ | - | MaxMind | [A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk
api_key | ^v1.0- | - | Cloudflare | [a-f0-9]{24}-[a-f0-9]{100,146}{ENDS}
api_key | ^access-sandbox-,access-development-,access-production- | - | Plaid | {UUID}{ENDS}
api_key | ^sl. | - | Dropbox | [A-Za-z0-9_=-]{100,}+{ENDS}
api_key | ^pk. | - | Mapbox | [A-Za-z0-9]{60}\.[A-Za-z0-9_-]{22}{ENDS}
api_key | ^live_,test_ | - | TypingDNA, Lob | (?:(?<=live_)[A-Za-z0-9_=-]{40}|[a-f0-9]{35}){ENDS}
api_key | ^ | - | Facebook | [0-9]{15,16}(?:\||%7C)[A-Za-z0-9_-]{27,40}
api_key | ^AAAAAAAAAAAAAAAAAAAAAA | - | Twitter | [A-Za-z0-9%]{80,100}{ENDS}
api_key | ^AAAA | - | Firebase | [A-Za-z0-9_-]{7}:APA91b[A-Za-z0-9_-]{60,200}{ENDS}
api_key | =adafruit,adobe,airtable,algolia,alibaba,asana,atlassian,confluence,jira,beamer,bitbucket,bittrex,meraki,cloudflare,codecov,cohere,coinbase,confluent,contentful,datadog,discord,droneci,dropbox,etsy,facebook,fastly,finicity,finnhub,flickr,freshbooks,gitter,heroku,hubspot,intercom,jfrog,artifactory,kraken,kucoin,launchdarkly,linkedin,looker,mailchimp,mailgun,mapbox,mattermost,messagebird,netlify,newrelic,new_relic,nytimes,okta,plaid,privateai,rapidapi,sendbird,sentry,snyk,sonar,squarespace,sumo,telegram,travis,twitch,twitter,typeform,yandex,zendesk | - | a value beside its vendor's name | (?i:[\w .-]{0,24}["'`\\\]]{0,4}{SPACE}(?:=>|:=|[=:]){SPACE}["'`\\]{0,4}({UUID}|(?=[A-Z_=-]{0,40}[0-9])(?=[0-9_=-]{0,40}[A-Z])[A-Z0-9_=-]{16,100}){ENDS})

login | ~curl,http_,https_,wget,xh_ | command | curl(1), HTTPie | (?<![\w-])-(?:[uUa]|-(?:(?:proxy-)?user|auth))(?:=|[ \t]{0,4})(?:\\{0,3}["'])?(?:[^\s:"'\\$]{1,80}:|:)((?![/$<{\\])[^\s"'\\]{2,})
login | ~sshpass,docker login,podman login,mysql,redis-cli,mongo,az login | command | commands with -p | (?<![\w-])-[pa][ \t]{0,4}(?:\\{0,3}["'])?((?![-/$<{\\])[^\s"'\\]{4,})
login | =machine,default | - | netrc(5) | (?:(?<=default)|{NEXT}[^\s\\]{1,200}){NEXT}login{NEXT}[^\s\\]{1,200}{NEXT}password{NEXT}([^\s\\"']{2,})
login | ="auth,"identitytoken,"registrytoken | - | Docker's config.json | \\{0,3}"{SPACE}:{SPACE}\\{0,3}"([A-Za-z0-9+/=._-]{8,}+)
login | ~_auth | - | npmrc | (?:(?m:^)|:)_auth{SPACE}={SPACE}["']?([A-Za-z0-9+/]{8,}+={0,2}+)(?![\w.(])
login | =<add | - | NuGet.Config | [ \t]{1,4}key=\\{0,3}"[^"<>\n]{0,60}(?i:password|secret|token|key)\\{0,3}"[ \t]{1,4}value=\\{0,3}"([^"\\\n]{4,})
login | ~value | - | Kubernetes, ECS, Compose: name: DB_PASSWORD ⏎ value: X; not a reference | (?i:name{MARK}?{SPACE}[:=]{SPACE}{MARK}?[\w.-]{0,60}?(?:passw(?:or)?d|passphrase|_pass|secret|token|credentials?|(?:api|access|private)[_-]?key)\w{0,20}{MARK}?{SPACE},?(?:\s|\\{1,7}[nrt]){0,60}+{MARK}?value{MARK}?{SPACE}[:=]{SPACE}{MARK}?((?![$<{\[])[^\s"'\\,}]{4,}))
login | ="value" | - | the same, the value first | (?i:[ ]?:[ ]?{QUOTED},[ ]?"name"[ ]?:[ ]?"\w{0,60}(?:{NAME}|key)\w{0,20}")
login | ~identified,password | - | SQL | (?i:(?:identified(?: with [\w'"]{1,40})?(?: by| as)(?: password)?|(?:with|(?:user|role) [\w'"@%.-]{1,80}) password|set password for [\w'"@%.-]{1,80} =) {1,4}\\{0,3}'([^'\\\n]{4,200})(?=\\{0,3}'))
login | ~$ | - | crypt(5), bcrypt, Argon2: /etc/shadow, htpasswd | \$(?<![A-Za-z0-9$]\$)(?:[156y]|2[abxy]|apr1|argon2(?:id|[id]))\$([A-Za-z0-9./$=,+-]{22,300})
login | =pass | - | "pass": "X", not a lone word | (?i:(?<=["']pass){MARK}{SPACE}:{SPACE}{MARK}((?=[a-z]{0,80}[^a-z"'\\])[^"'\\\n]{6,200}))
login | =temporary password | - | MySQL's installer | (?: is generated)? for \S{1,80}: (\S{4,200})
login | =api key,access key,secret key,license key | - | pages of accounts | (?i:(?: is)?{SPACE}[:=]{SPACE}["'`\\]{0,4}((?=[A-Z_./+=-]{0,80}[0-9])[A-Z0-9_./+=-]{16,200}))
login | =secret_id,secret-id,secret id,secretid | - | Vault, Consul, Nomad | (?i:{MARK}?[ \t]{0,12}[:=]?[ \t]{0,16}{MARK}?({UUID}))
login | =:// | - | a token as the user of an address | ((?=[A-Za-z_-]{0,60}[0-9])[A-Za-z0-9_-]{20,255})@
SAYS = ["'`]?{SPACE}(?::=|[:=：]){SPACE}["'`]?
login | ~contraseñ,mot de passe,hasło,haslo,senha,wachtwoord,lösenord,parol,şifre,пароль,パスワード,密码,密碼,口令,비밀번호 | - | in other languages | (?i:(?<![a-z])(?:contraseñas?|mot de passe|has[lł]o|senha|wachtwoord|lösenord|parola|parolă|şifre|пароль|パスワード|密码|密碼|口令|비밀번호){SAYS}{MIXED})
login | =passwort,kennwort,wachtwort,wachtwoord,contraseña,mot de passe,senha,hasło,lösenord | - | mein Passwort ist X | (?i:[ \t]{1,4}(?:ist|lautet|war|is|es|est|é|to|är)[ \t]{1,4}{MIXED})
login | =密码,密碼,パスワード,비밀번호 | - | 密码是X | [ ]?(?:是|为|為|は|는|은)[ ]?{MIXED}
login | ~pw:,pw=,pw",psk,salt=,salt:,hmac,app_key | - | short names | (?i:(?<![a-z])(?:pw|(?:\w{1,20}_)?(?:psk|salt)|hmac[_-]?key|app_key){SAYS}{MIXED})
login | ~psk | - | wpa_supplicant | (?i:(?<![a-z])(?:wpa[_-]?)?psk{SPACE}=?{SPACE}["']([^"'\\\n]{8,63})["'])
login | ~psk= | - | NetworkManager | (?m:^)[ \t]{0,20}psk=([^\s"'\\]{8,64})
login | ~_key | - | OPENAI_KEY=X | {BEGINS}(?![A-Z0-9_]{0,40}PUB(?:LIC)?_)[A-Z][A-Z0-9_]{1,40}_KEY["'`]?{SPACE}(?::=|[:=]){SPACE}["'`]?(?=\S{20}){KEYLIKE}
login | =oauth_token | - | hub's and gh's files | [ \t]{1,4}(?=\S{20}){KEYLIKE}
login | =/pass: | - | cmdkey | (?i:{MIXED})
login | =password,passwd,passphrase,passcode | - | the password is X; my password was "X" | (?i:s? (?:is|was|to):?[ \t]{1,4}(?:now )?(?:{PROSE}{MIXED}|{QUOTED}))
login | =secret,token,api_key,api-key,api key,apikey | - | the token is X | s? (?:is|was):?[ \t]{1,4}{PROSE}{KEYLIKE}
login | ~pass | - | a table: password, X | (?i:\|{GAP}[`*]{0,2}(?:\w{1,20}[ _-])?pass\w{2,6}[`*]{0,2}{GAP}\|{GAP}`?(?!\w{1,20}\(){MIXED})
login | ~{NAMES} | - | a table: token, X | \|{GAP}[`*]{0,2}(?:\w{1,20}[ _-])?(?i:{NAME})[`*]{0,2}{GAP}\|{GAP}`?{KEYLIKE}
login | =password for,passphrase for | - | a terminal: Enter password for a: X | (?i: [^\n:]{1,80}(?::[^\s:]{1,80})?: {MIXED})
login | ={NAMES} | - | X on the next line, also of a YAML list | (?i:s?"?:?{SPACE}(?:[>|][+-]?)?{SPACE}\r?\n{GAP}(?:- )?["']?{KEYLIKE}(?=["']?{SPACE}(?:\r?\n|\Z)))
login | ={NAMES} | - | a block of YAML | (?i:s?: [>|][+-]?\r?\n[ \t]{1,20}([^\s"'\\]{6,200})(?={SPACE}(?:\r?\n|\Z)))
login | ={NAMES} | - | a list: "password": ["X"] | (?i:s?"?{SPACE}[:=]{SPACE}\[{SPACE}["']?{MIXED})
login | ~{NAMES},requirepass,masterauth,pre-shared-key | - | directives: requirepass X, rootpassword X | (?<![\w-])(?:root|admin|user|bind)?(?:{NAME}|requirepass|masterauth|pre-shared-key|api-key)[ \t]{1,2}(?:[057] )?(?=\S{10}){KEYLIKE}
login | =password 7_ | - | Cisco | ([0-9A-F]{8,80})\b
login | ~{NAMES} | - | ENV DB_PASSWORD X, setx API_KEY X, aws configure set aws_secret_access_key X | (?i:\b(?:ENV|ARG|setx|set|set-variable|config user)[ .](?:\w{0,40}{NAME}|\w{0,40}_key) {1,4}{MIXED})
login | ~{NAMES} | - | setPassword("X"), with_token("X") | (?i:(?:set|with|use|add)_?{NAME}\([ ]?{QUOTED_WORD})
login | =setenv(,putenv( | - | setenv("TOKEN", "X") | (?i:["']\w{0,40}{NAME}\w{0,20}["'],[ ]?{QUOTED})
login | =SecretKeySpec,ConvertTo-SecureString | - | Java, PowerShell | (?: -String)?[ (]{1,2}{QUOTED}
login | ~pass: | - | {user: a, pass: X} | \{[^{}\n]{0,200}\bpass: {MIXED}
login | =userPassword:: | - | LDIF | [ ]([A-Za-z0-9+/]{8,400}={0,2})
login | ={SSHA,{SMD5 | - | RFC 2307 | (?:256|512)?\}([A-Za-z0-9+/]{16,200}={0,2})
login | =rootpw,bindpw | - | OpenLDAP, Kickstart | [ \t]{1,8}{MIXED}
login | ~auth(,auth=,auth =,login( | - | Python: auth=("a", "X") | (?:HTTPBasicAuth|HTTPDigestAuth|basic_auth|\bauth[ ]?=[ ]?|\blogin)\(["'][^"'\n]{1,60}["'],[ ]?{QUOTED_WORD}\)
login | ~auth= | - | a line of an environment | (?m:^)(?:\w{1,20}_)?AUTH={MIXED}
login | ~key=,sig=,signature=,code=,token= | - | the query of an address; no title of words and numbers | (?i:[?&#](?:api[_-]?)?(?:key|sig|code|x-amz-signature|signature|(?:access|auth|id)_token)=((?!(?:[a-z]+|\d+)(?:-(?:[a-z]+|\d+)){2,20}(?![\w-]))(?=[a-z_%.-]{0,60}[0-9])(?=[0-9_%.-]{0,60}[a-z])[a-z0-9_%.~+/-]{16,2000}=?=?))
login | =signature= | - | AWS | ([0-9a-f]{64})
login | =--from-literal=,fly secrets set_,flyctl secrets set_,heroku config:set_ | - | kubectl, Fly, Heroku | (?:[\w.-]{1,60}={KEYLIKE}|[\w.-]{0,50}(?i:{NAME}|key)={MIXED})
login | =openssl_ | - | openssl(1) | [^\n]{0,200}? (?:-k |-pass(?:in|out)? pass:)((?![$<])[^{END}]{4,200})
login | =sqlcmd_,bcp_,twine_,useradd_,usermod_ | - | -p X | [^\n]{0,200}? -[pP] ?['"]?{ARGUMENT}
login | =ldap | - | ldapsearch(1) | \w{1,12} [^\n]{0,200}? -w ?['"]?{ARGUMENT}
login | =smbclient_ | - | smbclient(1) | [^\n]{0,200}?-U ?[^\s%]{1,60}%([^{END}]{4,200})
login | =xfreerdp_ | - | xfreerdp(1) | [^\n]{0,200}?/p:([^{END}]{4,200})
login | =htpasswd - | - | htpasswd(1) | \w{0,6}b\w{0,6} \S{1,200} \S{1,80} ((?![$<])[^{END}]{4,200})
login | =rabbitmqctl add_user_,rabbitmqctl change_password_ | - | rabbitmqctl(8) | \S{1,80} ((?![$<])[^{END}]{4,200})
login | =net use_ | - | Windows | \S{1,200} ((?![/$<*])[^{END}]{4,200}) /user
login | ~chpasswd | - | chpasswd(8) | echo ["']?[\w.-]{1,60}:((?![$<])[^\s"']{4,200})["']? ?\| ?(?:sudo )?chpasswd
login | =chpasswd | - | chpasswd(8) | [ ]?<<< ?["']?[\w.-]{1,60}:((?![$<])[^\s"']{4,200})
login | ~--password-stdin | - | docker login | echo ["']?((?![$<])[^\s"'|]{4,200})["']? ?\| ?[^\n|]{1,200}--password-stdin
login | =vault login_ | - | Vault | (?:-\S{1,40} ){0,4}{MIXED}
login | =--token_ | - | kubeadm | ([a-z0-9]{6}\.[a-z0-9]{16})\b
login | =K10 | - | k3s | ([0-9a-f]{64}::server:[0-9a-f]{16,64})
login | =unseal key_ | - | Vault | (?:\d{1,2}|\([^)\n]{1,20}\)): ([A-Za-z0-9+/=]{32,90})
login | =snmp-server community_ | - | Cisco | ((?!public\b|private\b)\S{4,64}) R[OW]\b
login | ~wifi: | - | QR codes of networks | WIFI:[^\n]{0,120}?P:([^;\n(?]{8,63});
login | =jdbc:oracle: | - | Oracle | \w{1,8}:[\w.-]{1,60}/([^\s@/]{4,100})@
login | =apisid=,psid=,psidts=,psidcc= | - | Google | ([A-Za-z0-9_/.-]{16,200})
login | =private,secret,wallet | - | wallets | (?i:[^\n]{0,40}?\b(0x[0-9a-f]{64})\b)
login | ~seed,mnemonic,recovery | - | wallets, BIP 39 | (?i:(?:(?:seed|recovery|secret|backup)[ _-]?(?:phrase|words)|mnemonic)["']?(?: is)?{SPACE}[:=]?{SPACE}["'`]?((?:[a-z]{3,8} ){11,23}[a-z]{3,8})\b)
login | =recovery code | - | around a second factor | (?i:s?(?: is)?[:=] ?([A-Za-z0-9]{3,8}(?:-[A-Za-z0-9]{3,8}){1,5}))
login | ~pin:,pin=,pin is,pin code | - | a PIN | (?<!GPIO )\bPIN(?: code)?(?: is|:|=) ?(\d{4,8})\b
login | =otp,one-time code,one-time password | - | one-time codes | (?i:(?: is|:|=) ?(\d{6,8})\b)

MAIL_AT = (?<=[\w+-])(?:@|%40|&#64;|[ ]?[\[({][ ]?(?:at|AT|@)[ ]?[\])}][ ]?)(?=[^\W_])
EAST = \u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3
MAIL_LOCAL = (?:[{EAST}]++|(?:[^\W{EAST}]|[!#$&'*+/=?^`{|}~.-])++)
MAIL_IN_FRONT = [=/`{|?&]|(?<![^\W_])'
MAIL_DOMAIN = (?:[^\W_](?:[^\W_]|-){0,62}+(?:\.|[ ]?[\[({][ ]?(?:dot|DOT|\.)[ ]?[\])}][ ]?)){1,8}(?:xn--[a-z0-9-]{2,59}|(?P<top>[A-Za-z]{2,24})|[^\W\d_A-Za-z]{2,24})(?![A-Za-z0-9_@-])
FILE = (?i:png|jpg|jpeg|gif|svg|webp|avif|ico|m?js|tsx?|jsx|s?css|map|json|html?|vue|ya?ml|toml|txt)
UNIT_FILE = (?i:service|timer|socket|slice|scope|target|(?:auto)?mount|device|path|swap)
SCP_BEHIND = \(|:(?:[/~.]|\d{1,5}/|[\w.-]{1,80}/|[\w-]{1,80}\.git\b)
SSH_BEFORE = (?<![\w-])(?:ssh|sftp|mosh|sshfs|autossh|ssh-copy-id)(?:[ \t]++-{1,2}[^\s-]\S*+(?:[ \t]++(?!-)[^\s@]++)?+)*+[ \t]++["']?\Z

PHONE_NAME = tel(?:efon\w{0,4}|éfono|éphone|efone|efoon|ephone)?|(?:tele)?phone|fon|mobile?\w{0,8}|cell(?:ulare)?|fax|call|ring|sms|whats ?app|viber|signal|handy(?:nummer)?|rufnummer|kom(?:órka|\.)?|portable|m[óo]vil|celular|puhelin|gsm|телефон|тел|моб|τηλ(?:έφωνο)?
PHONE_BEFORE = (?i:(?<![a-z])(?:{PHONE_NAME})|电话|電話|手机|手機|携帯|전화|휴대폰|โทร|טלפון|هاتف|جوال|फ़ोन|फोन|मोबाइल)(?:[ _-]?(?:no|nr|num(?:ber|mer|ero)?|number))?\W{0,12}\Z
PHONE_WITH_CODE = \(?[+＋]\(?\d[\d ()./\u00a0\u2010-\u2015-]{5,30}
PHONE_GROUPS = (?<![\w.,:/+-])(?!\d{4}-\d\d-\d\d|\d{1,3}(?:\.\d{1,3}){3}(?![\d.]))\(?\d{1,6}+\)?(?:[ \u00a0./\u2010-\u2015-]{1,2}\(?\d{1,10}+\)?)++(?!\w)
PHONE_ROW = (?<![\w.,/+-])\d{7,17}+(?![\w.]?\d)
PHONE_ABROAD = (?<![\w.,:/+-])00([1-9]\d{0,2}[ ()./-]{1,2}\d[\d ()./-]{5,16}\d)(?![\w/-]|[.,]\d)

ID_LEFT = (?<![A-Za-z\u00c0-\u024f0-9_$€£])(?<![0-9][.:/+-])(?<![0-9a-f]-)(?<![A-Z]-)
ID_RIGHT = (?![A-Za-z\u00c0-\u024f0-9_]|[./:+-][0-9]|-[0-9a-zA-Z])
ID_BEGINS = {ID_LEFT}(?:(?=[0-9](?:[ \u00a0./+-]?[0-9A-Z]){7})[0-9]++|[XYZKLM](?=-?[0-9]{7})|[A-Z]{6}(?=[0-9]{2})|[A-Z]{4}(?=[0-9]{6})|[A-Z]{3}(?=[ \u00a0][A-Z]{3}[ \u00a0][0-9]))
"""

IBAN_LENGTHS = """
NO15 BE16 DK18 FI18 FK18 FO18 GL18 NL18 SD18 MK19 SI19 AT20 BA20 EE20 KZ20 LT20 LU20 MN20 XK20 CH21 HR21 LI21 LV21
BG22 BH22 CR22 DE22 GB22 GE22 IE22 ME22 RS22 VA22 AE23 GI23 IL23 IQ23 OM23 SO23 TL23 AD24 CZ24 ES24 MD24 PK24 RO24
SA24 SE24 SK24 TN24 VG24 LY25 PT25 ST25 IS26 TR26 BI27 DJ27 FR27 GR27 IT27 MC27 MR27 SM27 AL28 AZ28 BY28 CY28 DO28
GT28 HN28 HU28 LB28 NI28 PL28 SV28 BR29 EG29 PS29 QA29 UA29 JO30 KW30 MU30 YE30 MT31 SC31 LC32 RU33
"""
"""Of each country the length of its account numbers, as SWIFT has registered them (ISO 13616)."""

ID_NAMES = (
    "national id, national identity, national identification, identity number, identity card, identity no, tax id, tax number, "
    "personalausweis, dowód osobisty, dowodu osobistego"
)
"""Names that any number may have."""

NATIONAL_IDS = r"""
PL | pl.pesel | PESEL | - | 99999999999 | -
NL | nl.bsn | BSN, burgerservicenummer, sofinummer, sofi-nummer | - | - | 999999999 9999.99.999 9999_99_999
ES | es.dni | DNI, NIF, documento nacional | - | 99999999A 99999999-A 99.999.999-A | -
ES | es.nie | NIE, NIF, extranjero | - | A9999999A A-9999999-A | -
BR | br.cpf | CPF, cadastro de pessoa | 999.999.999-99 | - | 99999999999 999999999-99
RO | ro.cnp | CNP, cod numeric personal | - | 9999999999999 | -
IT | it.codicefiscale | codice fiscale, codicefiscale, codice_fiscale, C.F., CF | AAAAAA99A99A999A | - | AAA_AAA_99A99_A999A
FR | fr.nir | NIR, sécurité sociale, securite sociale, numéro de sécu, INSEE | 9_99_99_99_999_999_99 | 999999999999999 9999999999999_99 | -
FR | fr.nif | numéro fiscal, numero fiscal, SPI | - | - | 9999999999999 99_99_999_999_999
DE | de.idnr | steuer-id, steuerid, steuer-identifikationsnummer, steuerliche identifikationsnummer, steueridentifikationsnummer, steuer-idnr, idnr, TIN | - | 99999999999 99_999_999_999 | -
GR | gr.amka | AMKA, ΑΜΚΑ, α.μ.κ.α | - | 99999999999 | -
SE | se.personnummer | personnummer, personnr, PNR, samordningsnummer | - | 999999-9999 99999999-9999 999999+9999 999999999999 | 9999999999
NO | no.fodselsnummer | fødselsnummer, fodselsnummer, personnummer, FNR | - | 99999999999 999999_99999 | -
DK | dk.cpr | CPR, personnummer | - | 999999-9999 | 9999999999
FI | fi.hetu | HETU, henkilötunnus, henkilotunnus | 999999-999A 999999A999A | 999999-9999 999999A9999 | -
IS | is_.kennitala | kennitala, KT | - | 999999-9999 | 9999999999
EE | ee.ik | isikukood | - | 99999999999 | -
LT | lt.asmens | asmens kodas, asmens kodo, asmens kodą | - | 99999999999 | -
LV | lv.pvn | personas kods, personas kodu, personas koda | - | 999999-99999 | 99999999999
BE | be.nn+be.bis | NISS, INSZ, rijksregisternummer, registre national, numéro national | 99.99.99-999.99 | 99999999999 999999-999-99 99_99_99_999_99 | -
BG | bg.egn | EGN, ЕГН, единен граждански номер | - | 9999999999 | -
CH | ch.ssn | AHV, AVS, AHVN13, NAVS | 999.9999.9999.99 | 9999999999999 | -
CZ SK | cz.rc | rodné číslo, rodne cislo, RČ, RC | 999999/9999 | - | 9999999999
HR | hr.oib | OIB, osobni identifikacijski broj | - | - | 99999999999
SI RS BA ME MK HR | si.emso | EMŠO, EMSO, JMBG, ЈМБГ, ЕМБГ, matični broj, матични број | - | 9999999999999 | -
IE | ie.pps | PPS, PPSN, personal public service | - | 9999999A 9999999AA | -
PT | pt.cc | cartão de cidadão, cartao de cidadao, cartão do cidadão | 99999999_9_AA9 99999999_9AA9 | - | 999999999AA9
PT | pt.nif | NIF, contribuinte | - | - | 999999999 999_999_999
GB | gb.nhs | NHS | - | - | 999_999_9999 999-999-9999 9999999999
GB | gb.utr | UTR, taxpayer reference | - | - | 9999999999 99999_99999
US | us.ssn+us.itin | SSN, ITIN, social security | 999-99-9999 | - | 999999999 999_99_9999
CA | ca.sin | SIN, NAS, social insurance, assurance sociale | - | - | 999999999 999_999_999 999-999-999
IN | in_.aadhaar | aadhaar, aadhar, adhaar, आधार, UIDAI | - | 9999_9999_9999 9999-9999-9999 | 999999999999
CN | cn.ric | 身份证, 身份證, 公民身份, resident id | 999999999999999999 99999999999999999X 99999999999999999x | - | -
KR | kr.rrn | 주민등록번호, 주민번호, RRN | 999999-9999999 | - | 9999999999999
JP | jp.in_ | マイナンバー, 個人番号, my number | - | - | 999999999999 9999_9999_9999 9999-9999-9999
TH | th.pin | บัตรประชาชน, เลขประจำตัว, thai id | 9-9999-99999-99-9 | - | 9999999999999 9_9999_99999_99_9
ID | id.nik | NIK, KTP, induk kependudukan | - | - | 9999999999999999
MY | my.nric | NRIC, MyKad, kad pengenalan | - | 999999-99-9999 | 999999999999
PK | pk.cnic | CNIC, NADRA | - | 99999-9999999-9 | 9999999999999
IL | il.idnr | תעודת זהות, מספר זהות, ת.ז, ת"ז, ת״ז, teudat zehut | - | - | 999999999 99999999-9
TR | tr.tckimlik | TCKN, TC no, T.C., kimlik no, kimlik numarası, tckimlik | - | 99999999999 | -
ZA | za.idnr | south african id, RSA id, SA id, id number | - | 9999999999999 999999_9999_99_9 | -
RU | ru.inn | ИНН, INN | - | - | 999999999999
UA | ua.rntrc | РНОКПП, ІПН, RNTRC | - | - | 9999999999
MX | mx.curp | CURP | AAAA999999AAAAAA99 AAAA999999AAAAAAA9 | - | -
AR | ar.cuit | CUIT, CUIL | - | 99-99999999-9 | 99999999999
CL | cl.rut | RUT, RUN | 99.999.999-* | 99999999-* | 99999999*
DO | do.cedula | cédula, cedula | - | 999-9999999-9 | 99999999999
EC | ec.ci | cédula, cedula | - | - | 9999999999 999999999-9
AU | au.tfn | TFN, tax file | - | - | 999999999 999_999_999
NZ | nz.ird | IRD | - | - | 99999999 999999999 99-999-999 999-999-999
AT | at.vnr | SVNR, SV-Nr, sozialversicherungsnummer, versicherungsnummer | - | 9999_999999 | 9999999999
"""
"""
A line a kind of number: its countries; the modules of `stdnum` of which one must find it right; its names, of which one in
capitals counts in small letters only in front of : or =; and its layouts:

- those that no other number is likely to have, found wherever they stand
- those that are found beside a name, or where the settings name one of the countries
- those that are found beside a name only: nine digits of anything pass a check digit one time in ten

In a layout 9 is a digit, A a capital letter, * either, _ a space; all else is itself.
"""

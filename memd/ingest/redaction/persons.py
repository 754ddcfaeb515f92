"""Finds what of persons is replaced where the settings ask for it: addresses, national ids, phone numbers, words.

Rule: nothing is imported for what is not asked for. Names are not guessed: who is to be left out is on the list.
"""

from __future__ import annotations

from memd.errors import ConfigError
from memd.ingest.redaction.spans import Find
from memd.ingest.redaction.unescaped import in_unescaped
from memd.settings.model import IngestSettings
from memd.settings.redacted import LISTED_WORD

EXTRA = "pip install 'memd-proxy[persons]'"


def personal(settings: IngestSettings) -> dict[str, Find]:
    """The finders that `redact_persons` and `redact_words` ask for, by the names of their marks.

    Raises:
        ConfigError: a package of the extra is not installed, or a country is none.
    """
    finders: dict[str, Find] = {}
    asked, countries = settings.redact_persons, settings.redact_countries
    if "email" in asked:
        from memd.ingest.redaction.mail import mail_addresses

        finders["email"] = in_unescaped(mail_addresses)
    try:
        if countries and not {"national_id", "phone"}.isdisjoint(asked):
            _check_countries(countries)
        if "national_id" in asked:
            from memd.ingest.redaction.national_ids import national_ids

            finders["national_id"] = in_unescaped(national_ids(countries))
        if "phone" in asked:
            from memd.ingest.redaction.phones import phone_numbers

            finders["phone"] = in_unescaped(phone_numbers(countries))
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"ingest.redact_persons needs the package {missing.name}, which is not installed: {EXTRA}, and start again"
        ) from None
    if settings.redact_words:
        from memd.ingest.redaction.words import listed_words

        finders[LISTED_WORD] = listed_words(settings.redact_words)
    return finders


def _check_countries(countries: tuple[str, ...]) -> None:
    """Refuse what is no country: its numbers would stay, and nobody be told."""
    from phonenumbers import SUPPORTED_REGIONS

    if unknown := [one for one in countries if one not in SUPPORTED_REGIONS]:
        raise ConfigError(
            f"ingest.redact_countries: {', '.join(unknown)} is no country of ISO 3166 whose numbers are known; "
            "give its two letters there (GB, not UK; GR, not EL)"
        )

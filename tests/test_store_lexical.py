"""The lexical index: what finds a chunk by its words, and what becomes of it when its files are not what they were."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import tantivy
from crash_files import CrashFiles
from daemon_process import wait_until
from drafts import adjusted, deprecated, draft, open_store, seal_all, unit_vector

from memd.entries import Draft
from memd.errors import StoreWriteFailed
from memd.store.disk import DiskFiles
from memd.store.files import FileChecksum
from memd.store.lexical.analyzer import analyze, analyze_query
from memd.store.lexical.bm25 import LexicalHit, LexicalQuery, _with_term
from memd.store.lexical.index import FRESH_ENTRIES_MAX
from memd.store.lexical.stamp import FORMAT, Stamp, StampedFolder
from memd.store.lexical.terms import ChunkTerms, TermsCache, TermsTable
from memd.store.store import Store, TopicLog
from memd.store.tools.backup import backup
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


def filled(directory: Path, texts: dict[str, str] | None = None) -> Store:
    store = open_store(None, directory, segment_entries_max=6)
    everything = {**(IDENTIFIERS if texts is None else texts), **{text: text for text in OTHERS}}
    store.topic("talk").append([said(name, text) for name, text in everything.items()])
    return store


def found(topic: TopicLog, text: str, k: int = 10) -> list[str]:
    """The contents found by the words of `text`, best first: the same before and after new entries are indexed."""
    hits = best(topic, text, k)
    topic.index_terms()
    assert not topic.unindexed_terms
    indexed = best(topic, text, k)
    assert [hit.canonical_id for hit in hits] == [hit.canonical_id for hit in indexed]
    return contents(topic, indexed)


def best(topic: TopicLog, text: str, k: int = 10) -> list[LexicalHit]:
    snapshot = topic.snapshot()
    return topic.lexical_query(text).best(k, snapshot.live_places)


def contents(topic: TopicLog, hits: list[LexicalHit]) -> list[str]:
    snapshot = topic.snapshot()
    live = snapshot.live_places([hit.canonical_id for hit in hits])
    places = [live[hit.canonical_id] for hit in hits if hit.canonical_id in live]
    known = snapshot.hits_at(unit_vector("q")[None], places)
    return [snapshot.entry(known[place]).content for place in places]


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


def test_only_a_rare_identifier_as_a_whole_is_exact(tmp_path: Path) -> None:
    topic = filled(tmp_path).topic("talk")
    assert [hit.is_exact for hit in topic.lexical_query("ERR_7421").best(1)] == [True]
    assert [hit.is_exact for hit in topic.lexical_query("err 7421").best(1)] == [False]
    assert [hit.is_exact for hit in topic.lexical_query("bicycle").best(1)] == [False]


@pytest.mark.parametrize("unwanted", [1, 40, 250, 10_000])
def test_what_is_found_does_not_depend_on_how_many_are_looked_up_at_once(tmp_path: Path, unwanted: int) -> None:
    chosen = random.Random(5)  # few words: many chunks score the same
    texts = (" ".join(chosen.choices(["bicycle", "tyre", "river", "walk", "lamp"], k=6)) for _ in range(300))
    topic = filled(tmp_path, {f"{number}": text for number, text in enumerate(texts)}).topic("talk")
    topic.index_terms()
    rejected = set(chosen.sample([hit.canonical_id for hit in best(topic, "bicycle tyre", 400)], 200))

    def found(unwanted: int) -> list[LexicalHit]:
        query, live = topic.lexical_query("bicycle tyre"), topic.snapshot().live_places
        some = query.best(10, lambda ids: live([one for one in ids if one not in rejected]), unwanted=unwanted)
        return some + query.best(10, live)

    assert found(unwanted) == found(0)


def test_english_words_are_found_in_every_form(tmp_path: Path) -> None:
    topic = filled(tmp_path).topic("talk")
    assert found(topic, "bicycles") == ["The red bicycle has a flat tyre."]
    assert found(topic, "Who is walking?") == ["We walked along the river."]


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
    ],
)
def test_other_languages_are_found_by_plain_tokens_or_by_their_characters(
    tmp_path: Path, text: str, query: str
) -> None:
    assert found(filled(tmp_path, {"text": text}).topic("talk"), query) == [text]


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
def test_accents_and_other_differences_of_writing_do_not_count(tmp_path: Path, text: str, query: str) -> None:
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
    assert best(topic, query)[0].coverage > 0.9
    assert found(topic, "Where is it?") == found(topic, "WHERE IS IT?") == []


def test_an_index_whose_terms_were_made_in_another_way_is_rebuilt(tmp_path: Path) -> None:
    text = "Gestern habe ich zwei rote Fahrräder für die Kinder gekauft."
    store = filled(tmp_path, {"text": text})
    store.topic("talk").index_terms()
    store.close()
    stamp = tmp_path / "talk" / "lexical" / "stamp.json"
    stamp.write_text(stamp.read_text().replace(f'"format":{FORMAT}', f'"format":{FORMAT - 1}'))
    topic = open_store(None, tmp_path).topic("talk")
    assert topic.unindexed_terms
    assert found(topic, "Fahrrad") == [text]


def test_function_words_of_a_chunk_s_language_are_no_words_of_it(tmp_path: Path) -> None:
    german = "Der Keller steht unter Wasser, weil wir ihn nicht gegen den Regen abgedichtet haben."
    topic = filled(tmp_path, {"german": german, "english": "They won the war when the river froze."}).topic("talk")
    assert found(topic, "Wann haben wir den Zahnarzt angerufen?") == []
    assert found(topic, "Wann war der Fluss zugefroren?") == ["They won the war when the river froze."]
    [keller] = best(topic, "Was ist mit dem Keller?")
    assert keller.coverage == pytest.approx(1), "what says nothing is no part of the question"


def test_texts_in_english_need_no_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memd.store.lexical.languages._detector", lambda: pytest.fail("loaded"))
    for text in ("", "1 2 3", IDENTIFIERS["error"], "Where did you put the keys of the car?"):
        assert not any(term.startswith("\0") for term in analyze(text))


def test_a_question_without_a_word_that_says_anything_finds_nothing(tmp_path: Path) -> None:
    topic = filled(tmp_path).topic("talk")
    for text in ("yes, do that", "and what about it?", "", " \n", "!!!", "zebra"):
        assert found(topic, text) == []


def test_coverage_is_the_share_of_what_is_asked_for(tmp_path: Path) -> None:
    topic = filled(tmp_path).topic("talk")
    whole, part = topic.lexical_query("flat bicycle").best(1)[0], topic.lexical_query("flat quantum zebra").best(1)[0]
    assert whole.coverage == pytest.approx(1.0)
    assert 0 < part.coverage < 0.4


def test_of_a_long_question_a_chunk_may_cover_one_clause(tmp_path: Path) -> None:
    topic = filled(tmp_path, {"told": "The release code of the copper windmill 532 is hidden."}).topic("talk")
    long = "Go on with the next part as before, and report at the end what the northern quarry 77 costs"
    [whole] = topic.lexical_query(f"{long}, the copper windmill 532, the ferry.").best(1)
    [part] = topic.lexical_query(f"{long}, the copper bridge 91 of the harbour, the ferry.").best(1)
    assert whole.coverage == pytest.approx(1.0) and part.coverage < 0.5


def test_a_clause_ends_with_an_arabic_comma_too(tmp_path: Path) -> None:
    topic = filled(tmp_path, {"told": "رمز طاحونة النحاس 532 مخفي."}).topic("talk")
    long = "تابع الجزء التالي كما كان وأخبرني في النهاية كم يكلف المحجر الشمالي 77"
    [whole] = topic.lexical_query(f"{long}، طاحونة النحاس 532، العبارة.").best(1)
    assert whole.coverage == pytest.approx(1.0)


def test_a_very_long_question_makes_no_table_of_all_its_words_in_all_new_chunks() -> None:
    fresh = {number: ChunkTerms.of(analyze(f"The copper windmill {number} turns. " * 3)) for number in range(500)}
    short, long = "copper windmill 77", " ".join(f"word{number}" for number in range(10_000)) + " copper windmill 77"

    def query(text: str) -> LexicalQuery:
        cache = TermsCache().for_index()
        return LexicalQuery(None, text, mean_terms=9.0, terms_cache=cache, fresh=TermsTable.of(fresh))

    tracemalloc.start()
    try:
        found = query(long).best(3)
        assert tracemalloc.get_traced_memory()[1] < 25 << 20, "and not 40 MB more"
    finally:
        tracemalloc.stop()
    told = query(short).best(3)
    assert [one.canonical_id for one in found] == [one.canonical_id for one in told] and told
    assert [one.score for one in found] == pytest.approx([one.score for one in told])


def test_the_best_of_many_new_chunks_are_found_however_many_better_ones_are_not_wanted() -> None:
    told = {number: ChunkTerms.of(analyze("copper windmill " * (1 + number % 7) + "turns")) for number in range(300)}
    parts = [{one: told[one] for one in range(begin, begin + 100)} for begin in (0, 100, 200)]
    table, cache = TermsTable.joined([TermsTable.of(part) for part in parts]), TermsCache().for_index()
    query = LexicalQuery(None, "copper windmill", mean_terms=9.0, terms_cache=cache, fresh=table)
    all_of_them = query.best(300)
    assert [one.canonical_id for one in all_of_them[:2]] == [6, 13] and len(all_of_them) == 300
    wanted = {one.canonical_id for one in all_of_them[::50]}
    assert query.best(3, lambda _: wanted) == [one for one in all_of_them if one.canonical_id in wanted][:3]
    assert query.best(3, lambda _: {all_of_them[-1].canonical_id}) == all_of_them[-1:]
    assert query.best(3, lambda _: ()) == []


def test_words_that_nobody_said_take_no_place_of_a_long_question(tmp_path: Path) -> None:
    topic = filled(tmp_path, {"told": "The release code of the copper windmill is hidden."}).topic("talk")
    unheard = " ".join(f"zq{number}x" for number in range(200))
    [hit] = topic.lexical_query(f"{unheard} copper windmill").best(1)
    assert contents(topic, [hit]) == ["The release code of the copper windmill is hidden."] and hit.coverage < 0.1


def test_scores_for_given_chunks_are_those_of_the_search(tmp_path: Path) -> None:
    topic = filled(tmp_path).topic("talk")
    question = topic.lexical_query("red session.py on the river")
    best = question.best(10)
    assert len(best) == 3
    assert question.hits_of([hit.canonical_id for hit in best] + [1, 2]) == {hit.canonical_id: hit for hit in best}


def test_what_was_superseded_is_not_found(tmp_path: Path) -> None:
    topic = filled(tmp_path).topic("talk")
    assert found(topic, "ERR_7421")
    snapshot = topic.snapshot()
    entry = snapshot.find(draft("error").uuid)
    assert entry is not None
    topic.append([adjusted(entry, 1)])
    assert found(topic, "ERR_7421") == [IDENTIFIERS["error"]], "once, as its newest entry"
    topic.append([deprecated(entry)])
    assert found(topic, "ERR_7421") == []


def test_an_index_that_lags_behind_does_not_bring_back_dead_chunks(tmp_path: Path) -> None:
    topic = filled(tmp_path).topic("talk")
    question = topic.lexical_query("ERR_7421")
    entry = topic.snapshot().find(draft("error").uuid)
    assert entry is not None
    topic.append([deprecated(entry)])
    after = topic.snapshot()
    assert question.best(5, after.live_places) == []


def test_an_append_is_found_by_the_next_question(tmp_path: Path) -> None:
    topic = filled(tmp_path).topic("talk")
    assert found(topic, "giraffe") == []
    topic.append([said("new", "A giraffe came by."), said("other", "An okapi came by.")])
    assert topic.unindexed_terms
    fresh = best(topic, "giraffe came")
    assert contents(topic, fresh) == ["A giraffe came by.", "An okapi came by."]
    assert topic.unindexed_terms, "it has not waited for the index"
    topic.index_terms()
    assert best(topic, "giraffe came") == fresh, "to the last digit of the scores"


def test_a_question_makes_no_files_and_finds_what_has_no_index_yet(tmp_path: Path) -> None:
    topic = filled(tmp_path).topic("talk")
    hits = best(topic, "ERR_7421")
    assert hits and not (tmp_path / "talk" / "lexical").exists()
    topic.index_terms()
    assert (tmp_path / "talk" / "lexical" / "stamp.json").exists() and not topic.unindexed_terms
    assert contents(topic, best(topic, "ERR_7421")) == contents(topic, hits)


def test_an_append_is_found_while_the_index_is_being_written(tmp_path: Path) -> None:
    topic = filled(tmp_path).topic("talk")
    topic.index_terms()
    topic.append([said("new", "A giraffe came by.")])
    asked: list[list[str]] = []
    for n in range(60):
        topic.append([said(f"more {n}", f"Locker {n} is green.")])
    topic.index_terms(give_way=lambda: asked.append(contents(topic, best(topic, "giraffe locker green", 100))))
    assert [len(texts) for texts in asked] == [61]


def test_of_very_many_new_chunks_the_words_of_the_newest_are_found_and_all_once_the_index_has_them(
    tmp_path: Path,
) -> None:
    topic = filled(tmp_path).topic("talk")
    topic.index_terms()
    topic.append([said(f"more {n}", f"Locker {n} is green.") for n in range(FRESH_ENTRIES_MAX + 1)])
    found_now = contents(topic, best(topic, "locker bicycle", 1000))
    assert len(found_now) == FRESH_ENTRIES_MAX + 1
    assert "The red bicycle has a flat tyre." in found_now and "Locker 0 is green." not in found_now
    topic.index_terms()
    assert len(best(topic, "locker bicycle", 1000)) == FRESH_ENTRIES_MAX + 2


@pytest.mark.linux
def test_an_attempt_that_fails_leaves_no_threads_though_somebody_still_has_the_error(tmp_path: Path) -> None:
    """tantivy's writer has six, and 32 MB: an error is kept while it is waited for the next attempt."""
    topic = filled(tmp_path).topic("talk")
    topic.append([said(f"more {n}", f"Locker {n} is green.") for n in range(60)])

    def fail() -> None:
        raise StoreWriteFailed("the disk is full")

    with pytest.raises(StoreWriteFailed) as kept:
        topic.index_terms(give_way=fail)
    wait_until(lambda: "segment_updater" not in names_of_threads(), lambda: str(names_of_threads()))
    topic.index_terms()
    assert not topic.unindexed_terms and kept.tb is not None


def names_of_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((task / "comm").read_text()[:15])
    return names


def test_it_stays_through_a_restart_and_is_topped_up_from_the_log(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.topic("talk").index_terms()
    stamp = tmp_path / "talk" / "lexical" / "stamp.json"
    store.topic("talk").append([said("late", "A giraffe came by.")])  # and then memd is killed
    before = stamp.read_bytes()
    store.close()
    again = open_store(None, tmp_path, segment_entries_max=6).topic("talk")
    segments = set((tmp_path / "talk" / "lexical").glob("*.store"))
    assert found(again, "giraffe") == ["A giraffe came by."]
    assert found(again, "ERR_7421") == [IDENTIFIERS["error"]]
    assert stamp.read_bytes() != before
    assert segments <= set((tmp_path / "talk" / "lexical").glob("*.store")), "added to, not rebuilt"


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [truncated, flipped, Path.unlink])
@pytest.mark.parametrize("pattern", ["*.idx", "*.term", "*.store", "*.fieldnorm", "meta.json", "stamp.json"])
def test_whatever_is_wrong_with_its_files_it_is_built_anew(
    tmp_path: Path, damage: Callable[[Path], None], pattern: str
) -> None:
    store = filled(tmp_path)
    store.topic("talk").index_terms()
    store.close()
    damage(next((tmp_path / "talk" / "lexical").glob(pattern)))
    topic = open_store(None, tmp_path, segment_entries_max=6).topic("talk")
    for name, text in IDENTIFIERS.items():
        assert found(topic, text)[0] == text, name
    assert topic.findings == []


@pytest.mark.process
@pytest.mark.parametrize("name", ["cut_while_nobody_asks", "cut_as_soon_as_it_is_written"])
def test_nothing_but_a_question_reads_files_that_may_be_cut_short_by_then(tmp_path: Path, name: str) -> None:
    """To read what is mapped into memory and no longer there ends a process with SIGBUS."""
    code = f"import sys, pathlib, test_store_lexical; test_store_lexical.{name}(pathlib.Path(sys.argv[1]))"
    tests = Path(__file__).parent
    paths = os.pathsep.join(str(path) for path in (tests, tests / "support", tests.parent))
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert ended.returncode == 0, ended.stderr


def cut_while_nobody_asks(directory: Path) -> None:
    topic = filled(directory).topic("talk")
    topic.index_terms()
    cut_short(directory / "talk" / "lexical")
    let_tantivy_look(directory / "other")
    assert contents(topic, best(topic, "ERR_7421"))[0] == IDENTIFIERS["error"]


def cut_as_soon_as_it_is_written(directory: Path) -> None:
    topic = filled(directory).topic("talk")
    write = StampedFolder.write

    def write_and_cut(self: StampedFolder, stamp: Stamp, known: Mapping[str, FileChecksum]) -> Stamp:
        written = write(self, stamp, known)
        cut_short(self.path)
        return written

    StampedFolder.write = write_and_cut  # type: ignore[method-assign]  # in a process of its own
    topic.index_terms()
    assert contents(topic, best(topic, "ERR_7421"))[0] == IDENTIFIERS["error"]


def cut_short(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix not in (".json", ".lock"):
            path.write_bytes(b"")


def let_tantivy_look(folder: Path) -> None:
    """Return once tantivy's threads have looked whether indexes have changed: twice at this one, which reloads by
    itself, so that they have looked at each other one in between."""
    folder.mkdir()
    index = tantivy.Index(tantivy.SchemaBuilder().add_unsigned_field("number").build(), str(folder))
    writer = index.writer(15_000_000, 1)
    for count in (1, 2):
        writer.add_document(tantivy.Document(number=count))
        writer.commit()
        wait_until(lambda count=count: index.searcher().num_docs == count, lambda: "not reloaded")  # type: ignore[misc]


def test_an_index_of_another_log_is_not_used(tmp_path: Path) -> None:
    filled(tmp_path / "one").topic("talk").index_terms()
    texts = {"other": "Another log altogether."}
    other = filled(tmp_path / "two", texts)
    other.close()
    shutil.copytree(tmp_path / "one" / "talk" / "lexical", tmp_path / "two" / "talk" / "lexical")
    topic = open_store(None, tmp_path / "two").topic("talk")
    assert found(topic, "ERR_7421") == []
    assert found(topic, "altogether") == texts_of(texts)


def texts_of(texts: dict[str, str]) -> list[str]:
    return list(texts.values())


def test_sealed_segments_are_found_too_with_their_true_cosines(tmp_path: Path) -> None:
    topic = filled(tmp_path).topic("talk")
    seal_all(topic)
    snapshot = topic.snapshot()
    hit = topic.lexical_query("ERR_7421").best(1)[0]
    place = snapshot.live_places([hit.canonical_id]).get(hit.canonical_id)
    assert place is not None
    known = snapshot.hits_at(unit_vector("error")[None], [place])[place]
    assert known.cosine == pytest.approx(1.0)
    assert found(topic, "tyre") == ["The red bicycle has a flat tyre."]


def test_verify_and_backup_leave_it_out(tmp_path: Path) -> None:
    store = filled(tmp_path / "memory")
    store.topic("talk").index_terms()
    report = backup(tmp_path / "memory", tmp_path / "copy", DiskFiles())
    assert report.findings == [] and not (tmp_path / "copy" / "talk" / "lexical").exists()
    store.close()
    truncated(next((tmp_path / "memory" / "talk" / "lexical").glob("*.idx")))
    assert verify(tmp_path / "memory", DiskFiles()).ok
    copy = open_store(None, tmp_path / "copy").topic("talk")
    assert found(copy, "v2.3.1") == [IDENTIFIERS["version"]]


def test_where_there_is_no_folder_for_it_the_index_is_kept_in_memory() -> None:
    topic = open_store(CrashFiles()).topic("talk")
    topic.append([said("error", IDENTIFIERS["error"])])
    assert found(topic, "ERR_7421") == [IDENTIFIERS["error"]]


WORDS = [f"{stem}{number}" for stem in ("harbour", "crane", "ferry", "rope") for number in range(8)]
QUESTIONS = ("harbour1 crane2", "rope3", "ferry0 ferry1 rope7 crane4 harbour6", "crane5 crane5 unknown")


def written_at_random(topic: TopicLog, source: random.Random, changes: int, *, index_every: int) -> None:
    """Tell, praise, delete and replace chunks, and bring the index up to date now and then."""
    live = list(topic.append([said(f"first {n}", text_at_random(source)) for n in range(20)]))
    for number in range(changes):
        at = source.randrange(len(live))
        what = source.choice(["tell", "tell", "praise", "delete", "replace"])
        if what == "praise":
            live[at] = topic.append([adjusted(live[at], live[at].utility_steps % 8 + 1)])[0]
        elif what != "tell" and len(live) > 5:
            topic.append([deprecated(live.pop(at))])
        if what in ("tell", "replace"):
            live += topic.append([said(f"chunk {number}", text_at_random(source))])
        if number % index_every == 0:
            answers(topic)  # what is counted for one question is kept for later ones
            topic.index_terms()
    seal_all(topic)


def text_at_random(source: random.Random) -> str:
    return " ".join(source.choices(WORDS, weights=range(1, len(WORDS) + 1), k=source.randrange(3, 40)))


def answers(topic: TopicLog) -> list[list[LexicalHit]]:
    return [best(topic, question, 30) for question in QUESTIONS]


def test_after_corrections_the_words_that_were_asked_for_are_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = open_store(None, tmp_path).topic("talk")
    entries = topic.append([said(str(number), f"The harbour has {WORDS[number]}.") for number in range(20)])
    question = f"harbour {' '.join(WORDS[:20])}"
    topic.index_terms()
    topic.lexical_query(question)
    counted: list[str] = []

    def read(name: str) -> tantivy.Query:
        counted.append(name)
        return _with_term(name)

    monkeypatch.setattr("memd.store.lexical.bm25._with_term", read)
    for entry in entries[:3]:
        topic.append([deprecated(entry)])
        topic.index_terms()
        topic.lexical_query(question)
    assert counted == [], "tantivy reads every chunk of a term for that"


@pytest.mark.parametrize("seed", range(3))
def test_the_same_log_gives_the_same_answers_however_its_index_came_about(tmp_path: Path, seed: int) -> None:
    store = open_store(None, tmp_path / "memory", segment_entries_max=90)
    talk = store.topic("talk")
    written_at_random(talk, random.Random(seed), 200, index_every=7)
    lagging = answers(talk)
    assert talk.unindexed_terms and all(lagging)
    talk.index_terms()
    updated = answers(talk)
    store.close()
    shutil.rmtree(tmp_path / "memory" / "talk" / "lexical")
    store = open_store(None, tmp_path / "memory", segment_entries_max=90)
    store.topic("talk").index_terms()
    rebuilt = answers(store.topic("talk"))
    assert updated == rebuilt, "scores, coverage and order"
    assert lagging == rebuilt
    store.close()


def test_neighbours_are_what_was_said_before_and_after_wherever_it_lies(tmp_path: Path) -> None:
    store = open_store(None, tmp_path, segment_entries_max=3)
    topic = store.topic("talk")
    entries = topic.append([draft(number) for number in range(3)]) + topic.append([draft(number) for number in (3, 4)])
    topic.append([adjusted(entries[1], 2)])  # its newest entry is behind all others; its place in time is not
    seal_all(topic)
    snapshot = topic.snapshot()

    def place(number: int) -> tuple[int, int]:
        entry = snapshot.find(entries[number].uuid)
        assert entry is not None
        found_at = snapshot.live_places([entry.canonical_id]).get(entry.canonical_id)
        assert found_at is not None
        return found_at

    places = [place(number) for number in range(5)]
    expected = [
        (places[number - 1] if number else None, places[number + 1] if number < 4 else None) for number in range(5)
    ]
    assert snapshot.neighbours(places) == expected
    topic.append([deprecated(entries[2])])
    after = topic.snapshot()
    assert after.neighbours([places[3]]) == [(places[1], places[4])]


def test_a_large_index_that_is_on_disk_answers_the_first_question_after_a_restart(tmp_path: Path) -> None:
    texts = IDENTIFIERS | {f"t{number}": f"Entry {number} of a long list." for number in range(600)}
    store = filled(tmp_path, texts)
    assert best(store.topic("talk"), "ERR_7421") == [], "too many came later for a waiting query to read"
    store.topic("talk").index_terms()
    store.close()
    assert found(open_store(None, tmp_path).topic("talk"), "ERR_7421") == [IDENTIFIERS["error"]]


def test_many_topics_without_an_index_are_asked_at_the_same_time(tmp_path: Path) -> None:
    threads, rounds = 8, 100
    store = open_store(None, tmp_path)
    topics = [[store.topic(f"t{number}-{count}") for count in range(rounds)] for number in range(threads)]
    together = threading.Barrier(threads)

    def ask(own: list[TopicLog]) -> list[list[str]]:
        together.wait()
        return [contents(one, best(one, "red bicycle")) for one in own]

    with contextlib.closing(store), ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(ask, topics)) == [[[]] * rounds] * threads

"""Files of foreign formats: read into parts that know their headings, page and sheet; bad ones refused in bounds."""

import datetime
import importlib.util
import mailbox
import os
import signal
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import made_documents as made
import pytest

from memd.errors import BadDocument
from memd.ingest.readers.files import KEPT_BYTES_MAX, MEMORY_BYTES_MAX, FileReader
from memd.ingest.readers.text import FORMATS, GivenSection, is_readable, table_text, title_of

pytestmark = pytest.mark.process
WORD_MAIN = "word/document.xml"


@pytest.fixture(scope="module")
def reader() -> Iterator[FileReader]:
    with FileReader() as reader:
        yield reader


def places(sections: tuple[GivenSection, ...]) -> list[tuple[tuple[str, ...], int | str | None, str]]:
    return [(one.heading, one.page or one.sheet, one.text) for one in sections]


def reason(reader: FileReader, path: Path) -> str:
    with pytest.raises(BadDocument) as refused:
        reader.sections(path)
    return str(refused.value)


# -- what is read -----------------------------------------------------------------------------------------------------


def test_a_pdf_is_cut_at_pages_and_at_the_headings_of_its_outline(reader: FileReader, tmp_path: Path) -> None:
    first = "# 1 Leave\nTwenty-six days a year, and the last of them is taken in March.\n## Sick\nCall Marta."
    path = made.pdf(tmp_path / "guide.pdf", [first, "Bring a paper.", "# Pay\nOn the 25th."], title="House Rules")
    assert places(reader.sections(path)) == [
        (("House Rules", "1 Leave"), 1, "Twenty-six days a year, and the last of them is taken in March."),
        (("House Rules", "1 Leave", "Sick"), 1, "Call Marta."),
        (("House Rules", "1 Leave", "Sick"), 2, "Bring a paper."),
        (("House Rules", "Pay"), 3, "On the 25th."),
    ]


def test_a_word_document_is_cut_at_headings_and_its_tables_name_columns(reader: FileReader, tmp_path: Path) -> None:
    table = [["Room", "Seats"], ["Fern", "12"], ["Oak", "40"]]
    path = made.word(tmp_path / "a.docx", ["Hello.", "# Rooms", "- one", "- two", table, "## Keys", "At the desk."])
    assert places(reader.sections(path)) == [
        ((), None, "Hello."),
        (("Rooms",), None, "- one\n- two\n\nRoom: Fern; Seats: 12\n\nRoom: Oak; Seats: 40"),
        (("Rooms", "Keys"), None, "At the desk."),
    ]


def word_of(path: Path, body: str, more: str) -> Path:
    """A Word document with this body, in which names of the namespace `more` are used too."""
    word = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    content = f"<w:document {word} {more}><w:body>{body}</w:body></w:document>"
    return made.replaced(made.word(path, []), WORD_MAIN, content.encode())


def test_of_word_insertions_controls_and_boxes_are_read_once(reader: FileReader, tmp_path: Path) -> None:
    compatible = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
    box = "<w:txbxContent><w:p><w:r><w:t>boxed</w:t></w:r></w:p></w:txbxContent>"
    body = (
        "<w:p><w:r><w:t>The key is </w:t></w:r><w:ins><w:r><w:t>green</w:t></w:r></w:ins>"
        "<w:del><w:r><w:delText>red</w:delText></w:r></w:del><w:r><w:tab/><w:t>.</w:t></w:r></w:p>"
        "<w:sdt><w:sdtContent><w:p><w:r><w:t>In a control.</w:t></w:r></w:p></w:sdtContent></w:sdt>"
        f"<w:p><w:r><mc:AlternateContent><mc:Choice>{box}</mc:Choice><mc:Fallback>{box}</mc:Fallback>"
        "</mc:AlternateContent></w:r></w:p>"
    )
    sections = reader.sections(word_of(tmp_path / "a.docx", body, compatible))
    assert places(sections) == [((), None, "The key is green\t.\n\nIn a control.\n\nboxed")]


def test_of_word_lines_and_inner_cells_stay_apart_and_formulas_are_read(reader: FileReader, tmp_path: Path) -> None:
    math = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
    cells = "".join(f"<w:tc><w:p><w:r><w:t>{number}</w:t></w:r></w:p></w:tc>" for number in (3, 4))
    inner = f"<w:tbl><w:tr>{cells}</w:tr></w:tbl>"
    half = "<m:f><m:num><m:r><m:t>1</m:t></m:r></m:num><m:den><m:r><m:t>2</m:t></m:r></m:den></m:f>"
    total = '<m:nary><m:naryPr><m:chr m:val="∑"/></m:naryPr><m:sub><m:r><m:t>k</m:t></m:r></m:sub></m:nary>'
    body = (
        "<w:p><w:r><w:t>0:08</w:t></w:r><w:r><w:br/><w:t>Correct.</w:t></w:r></w:p>"
        f"<w:p><w:r><w:t>Area </w:t></w:r><m:oMath>{half}{total}<m:r><m:t>ab</m:t></m:r></m:oMath></w:p>"
        f"<w:tbl><w:tr><w:tc><w:p><w:r><w:t>Fern</w:t></w:r></w:p></w:tc><w:tc>{inner}<w:p/></w:tc></w:tr></w:tbl>"
    )
    sections = reader.sections(word_of(tmp_path / "a.docx", body, math))
    assert places(sections) == [((), None, "0:08\nCorrect.\n\nArea (1)/(2)∑_(k)ab\n\nFern; 3 4")]


def test_of_word_two_columns_whose_first_row_is_no_header_are_read_as_they_are(
    reader: FileReader, tmp_path: Path
) -> None:
    cell = "<w:tc><w:p><w:r><w:t>{}</w:t></w:r></w:p></w:tc>".format
    rows = [f"<w:tr>{cell(name)}{cell(value)}</w:tr>" for name, value in (("Name", "Kari"), ("Bank", "NO93"))]
    body = f"<w:tbl>{''.join(rows)}</w:tbl>"
    assert places(reader.sections(word_of(tmp_path / "a.docx", body, ""))) == [((), None, "Name; Kari\n\nBank; NO93")]


def test_slides_have_their_number_as_page_and_the_notes_with_them(reader: FileReader, tmp_path: Path) -> None:
    path = made.slides(tmp_path / "a.pptx", [("Goals", "Fewer keys."), ("Next", "Oak room.")], notes="Ask Ann.")
    assert places(reader.sections(path)) == [(("Goals",), 1, "Fewer keys."), (("Next",), 2, "Oak room.\n\nAsk Ann.")]


def test_rows_of_a_workbook_name_their_columns_and_sheet(reader: FileReader, tmp_path: Path) -> None:
    rows: list[list[Any]] = [
        ["Prices of 2026"],
        [],
        ["Thing", "Price", "Since", "Sold"],
        ["Lamp", 20.5, datetime.date(2026, 3, 1), True],
    ]
    sheets = {"Prices": rows, "Empty": [], "Codes": [[1, 2], [3, 4]]}
    path = made.workbook(tmp_path / "a.xlsx", sheets)
    assert places(reader.sections(path)) == [
        ((), "Prices", "Prices of 2026\n\nThing: Lamp; Price: 20.5; Since: 2026-03-01; Sold: yes"),
        ((), "Codes", "1; 2\n\n3; 4"),
    ]


@pytest.mark.parametrize("end", ["\r\n", "\r"])
@pytest.mark.parametrize("name", ["a.md", "a.txt", "a.csv"])
def test_lines_end_alike_whatever_ends_them_in_the_file(
    reader: FileReader, tmp_path: Path, name: str, end: str
) -> None:
    text = "---\ntitle: Key\n---\n\n# Gate\n\nkey, door\nred, 4\n\nblue, 5\n"
    (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).write_bytes(text.replace("\n", end).encode())
    assert reader.sections(tmp_path / "other" / name) == reader.sections(tmp_path / name)


@pytest.mark.parametrize("text", ["name;town\nAnn;Graz\n", "name,town\nAnn,Graz\n", '"name"\t"town"\r\n"Ann"\t"Graz"'])
def test_rows_of_a_csv_name_their_columns(reader: FileReader, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert places(reader.sections(tmp_path / "a.csv")) == [((), None, "name: Ann; town: Graz")]


PAGE = """<!doctype html><html><head><title>Ferns</title><style>p {}</style></head><body>
<nav><a href="/">Home</a></nav><header>Banner</header><main><h1>Care</h1><p>Water <b>twice</b>
a week<!-- no -->.<br>Never more.</p><script>alert(1)</script><ul><li>shade<li>rain</ul><h2>Pots</h2>
<table><tr><th>Pot<th>Price<tr><td>small<td>3</table><pre>a  b</pre><div hidden>secret</div>
<p style="color: red;Display : none">secret</p><p style="visibility:hidden">secret</p></main>
<footer>Imprint</footer></body></html>"""


CELLS = "<td>Apple<br>Books<style>td {}</style><td><p>iOS</p><p>mac<b>OS</b></p>"
BUTTONS = (
    "<h2><button>Is it free?</button></h2><p>Yes.<h2>Dogs <button>Copy</button></h2><p>No.<form>Name <p>here</form>"
)
NAMED = "<tr><th>Passenger:<td>Ola<th>Flight<td>SK 4472<tr><th>Gate<td>C12<tr><th>Bus<td>"
UNNAMED = "<tr><td>Mon<td>nine"
FORMS = "<body> <form><h1>Canteen</h1>\n<p>It closes at two.</form>\n<form><p>Soup.</form>"
PAGES: dict[str, tuple[str | bytes, list[tuple[tuple[str, ...], str]]]] = {
    "headings without navigation and scripts": (
        PAGE,
        [
            (("Ferns", "Care"), "Water twice a week.\nNever more.\n\n- shade\n- rain"),
            (("Ferns", "Care", "Pots"), "Pot: small; Price: 3\n\n```\na  b\n```"),
        ],
    ),
    "no body, words of a cell": (
        f"<!doctype html><title>Ferns</title><section>Rain.</section><table><tr>{CELLS}</table>",
        [(("Ferns",), "Rain.\n\nApple Books; iOS macOS")],
    ),
    "its own encoding": ('<meta charset="iso-8859-2"><p>Wałbrzych'.encode("iso-8859-2"), [((), "Wałbrzych")]),
    "names of rows": (f"<table>{NAMED}</table>", [((), "Passenger: Ola; Flight: SK 4472\n\nGate: C12\n\nBus")]),
    "names of rows and columns": (
        "<table><tr><td><th>Who<th>Where<tr><th>Summer<td>Ola<td>Oslo</table>",
        [((), "Summer; Who: Ola; Where: Oslo")],
    ),
    "a head": (f"<table><thead><tr><td>Day<td>Hour</thead>{UNNAMED}</table>", [((), "Day: Mon; Hour: nine")]),
    "two columns without names": (f"<table>{UNNAMED}<tr><td>Tue<td>ten</table>", [((), "Mon; nine\n\nTue; ten")]),
    "three columns": (f"<table><tr><td>Day<td>Hour<td>Who{UNNAMED}<td>Ola", [((), "Day: Mon; Hour: nine; Who: Ola")]),
    "no encoding": ("<p>Wałbrzych", [((), "Wałbrzych")]),
    "buttons that are headings": (BUTTONS, [(("Is it free?",), "Yes."), (("Dogs",), "No.")]),
    "a page within forms": (FORMS, [(("Canteen",), "It closes at two.\n\nSoup.")]),
}


@pytest.mark.parametrize("name", PAGES)
def test_of_a_page_what_people_read_is_read(reader: FileReader, tmp_path: Path, name: str) -> None:
    page, sections = PAGES[name]
    (tmp_path / "a.html").write_bytes(page.encode() if isinstance(page, str) else page)
    assert places(reader.sections(tmp_path / "a.html")) == [(heading, None, text) for heading, text in sections]


def test_a_book_is_read_by_chapters_in_their_order(reader: FileReader, tmp_path: Path) -> None:
    path = made.book(tmp_path / "a.epub", "The Fern", ["<h1>One</h1><p>It rains.</p>", "<h1>Two</h1><p>It grows.</p>"])
    assert places(reader.sections(path)) == [
        (("The Fern", "One"), None, "It rains."),
        (("The Fern", "Two"), None, "It grows."),
    ]


def test_mails_of_a_file_and_of_a_box_are_read_below_their_subjects(reader: FileReader, tmp_path: Path) -> None:
    mails = [EmailMessage(), EmailMessage()]
    mails[0].set_content("Hi Kari,\nthe cabin costs 14,500 kroner, the key hangs behind the barometer – at the left.")
    mails[1].set_content("<p>The plumber comes <b>Thursday</b>.</p><h2>Price</h2><p>900 kroner.</p>", "html")
    mails[1].add_attachment(b"%PDF", maintype="application", subtype="pdf", filename="offer.pdf")
    for one, subject in zip(mails, ("Cabin in Hemsedal", "See plumber.no"), strict=True):
        one["From"], one["Subject"], one["Date"] = "ola@example.no", subject, "Tue, 10 Mar 2026 21:12:00 +0100"
    with closing(mailbox.mbox(tmp_path / "archive.mbox")) as box:
        for one in mails:
            box.add(one)
    (tmp_path / "plumber.eml").write_bytes(bytes(mails[1]))
    head = "From: ola@example.no\nDate: Tue, 10 Mar 2026 21:12:00 +0100\n\n"
    plumber = (("See plumber.no",), None, f"{head}The plumber comes Thursday.\n\n[file: offer.pdf]")
    price = (("See plumber.no", "Price"), None, "900 kroner.")
    boxed = reader.sections(tmp_path / "archive.mbox")
    assert {section.said_at for section in boxed} == {1_773_173_520_000_000}
    cabin, *box_plumber = places(boxed)
    assert cabin[0] == ("Cabin in Hemsedal",) and cabin[2].startswith(f"{head}Hi Kari,\nthe cabin costs 14,500")
    assert "barometer – at the left." in cabin[2]
    assert places(reader.sections(tmp_path / "plumber.eml")) == box_plumber == [plumber, price]
    odd = bytes(mails[1]).replace(b'charset="utf-8"', b'charset="x-nobody"').replace(b"10 Mar 2026", b"10 Mar 2226")
    (tmp_path / "odd.eml").write_bytes(odd)
    assert "The plumber comes" in places(read := reader.sections(tmp_path / "odd.eml"))[0][2]
    assert read[0].said_at is None, "it is not yet"


GATE = "<p>The gate opens at nine, not at ten as in winter, and shuts when it gets dark.</p>"
ADDRESS = "The gate opens: https://news.example/" + "a" * 1_400


@pytest.mark.parametrize(
    ("plain", "page", "text"),
    [
        ("Your program shows no HTML.", GATE, "Your program shows no HTML.\n\nThe gate opens at nine, not"),
        ("Meeting on Friday, room 5.", GATE * 9, "Meeting on Friday, room 5.\n\nThe gate opens at nine, not"),
        (ADDRESS, GATE, ADDRESS + "\n\nThe gate opens at nine, not"),
        ("The gate opens when it gets dark.", GATE * 9, "The gate opens at nine, not"),
        ("482913", GATE, "482913\n\nThe gate opens at nine, not"),
        ("The gate opens: PIN 77-88-99.", GATE * 9, "The gate opens: PIN 77-88-99.\n\nThe gate opens at nine, not"),
        ("It gets dark at nine.", GATE, "It gets dark at nine.\n\nThe gate opens at nine, not"),
        ("\N{THUMBS UP SIGN}", GATE, "\N{THUMBS UP SIGN}\n\nThe gate opens at nine, not"),
        ("\n", GATE, "The gate opens at nine, not"),
        (
            "Gate: nine.\n> when does it open?",
            "<p>Gate: nine.</p><blockquote>when does it open?</blockquote>",
            "Gate: nine.\n>",
        ),
        ("The gate opens at nine.", "<p></p><img src='a.png'>", "The gate opens at nine."),
        ("The gate opens at nine.", "<!-- nothing -->", "The gate opens at nine."),
        ("門は九時に\n開きます。", "<p>門は九時に開き<b>ます</b>。", "門は九時に\n開きます。"),
        ("See the page.", GATE + "<p>Bread.</p>" * 20_000, "See the page."),
        ("The gate opens at nine. " * 60, GATE * 100, "The gate opens at nine. The"),
    ],
)
@pytest.mark.parametrize("charset", ["utf-8", "x-nobody", "idna", "rot13"])
def test_a_mail_whose_plain_part_is_a_stub_is_read_by_its_html_too(
    reader: FileReader, tmp_path: Path, plain: str, page: str, text: str, charset: str
) -> None:
    mail = EmailMessage()
    mail["From"], mail["Subject"] = "gate@example.no", "Opening"
    mail.set_content(plain)
    mail.add_alternative(page, "html")
    mail.add_attachment("<p>You are subscribed to the list, which has many members, rules and a long page.", "html")
    written = bytes(mail).replace(b'html; charset="utf-8"', f'html; charset="{charset}"'.encode(), 1)
    (tmp_path / "gate.mbox").write_bytes(b"From gate\n" + written + b"\nFrom list\nSubject: Empty\n\n\n")
    (heading, _, shown), *_ = places(reader.sections(tmp_path / "gate.mbox"))
    assert heading == ("Opening",) and shown.startswith(f"From: gate@example.no\n\n{text}")
    assert "Bread" not in shown and "subscribed" not in shown
    assert ("in winter" in shown) == ("not" in text), "the HTML is read where it has more, and nowhere else"


@pytest.mark.parametrize("kinds", [("plain", "html"), ("html", "plain")])
def test_a_list_s_footer_does_not_take_a_mail_s_place(
    reader: FileReader, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    mail = EmailMessage()
    mail["From"] = "gate@example.no"
    mail.set_content("At nine.", kinds[0])
    mail.make_mixed()
    footer = EmailMessage()
    footer.set_content("<p>You are subscribed to the list, which has many members, rules and a long page.", kinds[1])
    mail.attach(footer)
    (tmp_path / "gate.eml").write_bytes(bytes(mail))
    [(_, _, shown)] = places(reader.sections(tmp_path / "gate.eml"))
    assert shown == "From: gate@example.no\n\nAt nine."


BAD_HEADERS = (
    (b"To", b"99group: a@b;(<99)99"),
    (b"Cc", b".?=group: a@b;\\<"),
    (b"Content-Disposition", b"+9999=?x?b?\tgroup: a@b;]=?utf-8*en?Q?a?="),
)


def test_one_mail_that_cannot_be_read_leaves_the_others(reader: FileReader, tmp_path: Path) -> None:
    bad = b"From a\nSubject: Bad\nContent-Type: text/%s; charset=%s\n\n%s\n"
    forms = [
        bad % one for one in ((b"plain", b"idna", b"\xff"), (b"html", b"utf-7", b"+2AA-"), (b"html", b"a", b"<!-- -->"))
    ]
    forms += [b"From d\n%s: %s\n\nText.\n" % one for one in BAD_HEADERS]
    kind = b"Content-Type: multipart/"
    broken = b"From c\nSubject: Bad\n%srelated; boundary=b\n\n--b\n%smixed\n\n--b--\n" % (kind, kind)
    (tmp_path / "a.mbox").write_bytes(b"\n".join([*forms, broken, b"From b\nSubject: Gate\n\nAt nine.\n"]))
    assert places(reader.sections(tmp_path / "a.mbox"))[-1] == (("Gate",), None, "At nine.")


def test_a_mail_that_is_nested_too_deeply_costs_no_other_of_its_box(reader: FileReader, tmp_path: Path) -> None:
    kinds = (f'Content-Type: multipart/mixed; boundary="b{at}"\n\n--b{at}\n' for at in range(1_000))
    deep = f"From a\nSubject: Deep\nFrom: eva@example.no\n{''.join(kinds)}\nText.\n\n"
    (tmp_path / "a.mbox").write_text(f"{deep}From b\nSubject: Gate\n\nAt nine.\n")
    read = places(reader.sections(tmp_path / "a.mbox"))
    assert read == [(("Deep",), None, "From: eva@example.no"), (("Gate",), None, "At nine.")]


@pytest.mark.parametrize("kind", ["plain", "html"])
def test_a_mail_is_read_in_time_that_grows_with_its_longest_word(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.eml").write_text(f"From: a@example.no\nContent-Type: text/{kind}\n\n{'0123456789abcdef' * 12_000}")
    with FileReader(seconds_max=8) as hasty:
        [section] = hasty.sections(tmp_path / "a.eml")
    assert section.text.endswith("cdef")


@pytest.mark.parametrize("mark", ["<i hidden>x</i>", "<script>x</script>", "<form>x</form>"])
def test_a_page_is_read_in_time_that_grows_with_its_length(tmp_path: Path, mark: str) -> None:
    (tmp_path / "a.html").write_text(f"<p>{f'a few words {mark}' * 60_000}")
    with FileReader(seconds_max=8) as hasty:
        [section] = hasty.sections(tmp_path / "a.html")
    assert section.text.count("words") == 60_000


def test_a_heading_with_nothing_below_it_is_text_itself(reader: FileReader, tmp_path: Path) -> None:
    inner = "<h1>Keys</h1><h2>The red one opens the gate</h2><h2>The blue one is lost</h2><p>In May.</p><h2>Ask Bo</h2>"
    (tmp_path / "a.html").write_text(f"<body>{inner}")
    marked = "# Keys\n## The red one opens the gate\n## The blue one is lost\nIn May.\n## Ask Bo\n"
    (tmp_path / "a.md").write_text(marked)
    blocks = marked.rstrip().split("\n")
    made.word(tmp_path / "a.docx", blocks)
    for suffix, title in ((".html", ()), (".md", ()), (".docx", ()), (".epub", ("Ferns",))):
        if suffix == ".epub":
            made.book(tmp_path / "a.epub", "Ferns", [inner])
        assert places(reader.sections(tmp_path / f"a{suffix}")) == [
            ((*title, "Keys"), None, "The red one opens the gate"),
            ((*title, "Keys", "The blue one is lost"), None, "In May."),
            ((*title, "Keys"), None, "Ask Bo"),
        ], suffix
    path = made.slides(tmp_path / "a.pptx", [("We begin on 4 June", ""), ("Next", "Oak room.")])
    assert places(reader.sections(path)) == [((), 1, "We begin on 4 June"), (("Next",), 2, "Oak room.")]
    path = made.pdf(tmp_path / "a.pdf", ["# Gate\nIt is red.\n## Bring a key", "# Pay\nOn the 25th."], title="House")
    assert places(reader.sections(path)) == [
        (("House", "Gate"), 1, "It is red."),
        (("House", "Gate"), 1, "Bring a key"),
        (("House", "Pay"), 2, "On the 25th."),
    ]


def test_a_row_without_figures_names_the_columns_and_years_and_repeated_names_do(
    reader: FileReader, tmp_path: Path
) -> None:
    assert table_text([["a", "b"], ["c", "d"]]) == "a: c; b: d"
    assert table_text([["a", "b"]]) == "a; b"
    assert table_text([["Report"], ["3", "4"], ["a", "b"]]) == "Report\n\n3; 4\n\na; b"
    assert table_text([["a", ""], ["", "d", "e"]]) == "a\n\nd; e"

    assert table_text([["City", "2023", "2024"], ["Oslo", "17", "19"]]) == "City: Oslo; 2023: 17; 2024: 19"
    assert table_text([["", "01/2026", "2026-02"], ["Ops", "9", "7"]]) == "Ops; 01/2026: 9; 2026-02: 7"
    assert (
        table_text([["Name", "Phone", "Phone"], ["Ada", "home", "office"]]) == "Name: Ada; Phone: home; Phone: office"
    )
    assert table_text([["Alan", "1912", "1954"], ["Grace", "1906", "1992"]]) == "Alan; 1912; 1954\n\nGrace; 1906; 1992"
    (tmp_path / "a.csv").write_text("id,said\n" + '1,"plain, fine"\n' * 2_000 + '2,"he said ""no, x"""\n')
    assert reader.sections(tmp_path / "a.csv")[0].text.endswith('id: 2; said: he said "no, x"')


@pytest.mark.parametrize("said", ["Microsoft Word - x", "report_v3.doc", "untitled", "Presentation1", None, " "])
def test_the_name_of_a_program_or_file_is_no_title(said: str | None) -> None:
    assert title_of(said) == ""
    assert title_of("House\nRules") == "House Rules"


# -- what is not ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [one for one, way in FORMATS.items() if way.needs and way.reader != "page"])
def test_a_file_that_is_not_what_its_name_says_is_named(reader: FileReader, tmp_path: Path, suffix: str) -> None:
    for content in (b"plain words", b"PK\3\4 half an archive", b"%PDF-1.7\n1 0 obj", bytes(range(256)) * 40):
        (tmp_path / f"a{suffix}").write_bytes(content)
        assert "it is" in reason(reader, tmp_path / f"a{suffix}") or "has no" in reason(reader, tmp_path / f"a{suffix}")
    (tmp_path / f"a{suffix}").write_bytes(b"")
    assert reason(reader, tmp_path / f"a{suffix}") == "it is empty"
    (tmp_path / "b.csv").write_text("a,b\nc,d\n")
    assert reader.sections(tmp_path / "b.csv")


def test_an_encrypted_file_is_named(reader: FileReader, tmp_path: Path) -> None:
    assert "encrypted" in reason(reader, made.pdf(tmp_path / "a.pdf", ["secret"], password="open"))
    (tmp_path / "a.docx").write_bytes(bytes.fromhex("d0cf11e0a1b11ae1") + bytes(2000))
    assert "encrypted" in reason(reader, tmp_path / "a.docx")
    locked = made.archive(tmp_path / "a.epub", {"META-INF/container.xml": "<c/>", "META-INF/rights.xml": "<r/>"})
    assert "encrypted" in reason(reader, locked)


@pytest.mark.parametrize("name", ["a.pdf", "a.csv", "a.txt", "a.xlsx", "a.html"])
def test_two_gigabytes_are_refused_before_they_are_read(reader: FileReader, tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(2 << 30)
    assert "2,147,483,648 bytes" in reason(reader, tmp_path / name)


def test_a_zip_bomb_is_not_unpacked_and_one_that_lies_about_its_size_neither(
    reader: FileReader, tmp_path: Path
) -> None:
    path = made.archive(tmp_path / "a.docx", {WORD_MAIN: bytes(1_000_000)})
    said, bomb = ((number).to_bytes(4, "little") for number in (1_000_000, 320_000_000))
    path.write_bytes(path.read_bytes().replace(said, bomb))
    for suffix in (".docx", ".pptx", ".xlsx", ".epub"):
        path = path.rename(path.with_suffix(suffix))
        assert "unpacks to 320,000,000 bytes" in reason(reader, path)

    path = made.replaced(made.word(tmp_path / "a.docx", []), WORD_MAIN, bytes(50_000_000))
    said, lie = ((number).to_bytes(4, "little") for number in (50_000_000, 100))
    path.write_bytes(path.read_bytes().replace(said, lie))
    assert "Bad CRC-32" in reason(reader, path)


LAUGHS = (
    "<!DOCTYPE x [<!ENTITY a '"
    + "ha" * 1000
    + "'>{}]>".format(
        "".join(f"<!ENTITY {one} '{('&' + other + ';') * 50}'>" for other, one in zip("abcdef", "bcdefg", strict=True))
    )
)


@pytest.mark.parametrize(
    "inside",
    [
        LAUGHS + "<w:document>&g;</w:document>",
        "<!DOCTYPE x [<!ENTITY a SYSTEM 'file:///etc/hostname'>]><w:document>&a;</w:document>",
        "<w:document>" + "<w:p>" * 100_000,
        "<w:document>" + "<w:p>" * 100_000 + "</w:p>" * 100_000 + "</w:document>",
    ],
)
def test_hostile_xml_is_neither_expanded_nor_followed(reader: FileReader, tmp_path: Path, inside: str) -> None:
    namespace = '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
    content = inside.replace("<w:document>", namespace)
    path = made.replaced(made.word(tmp_path / "a.docx", []), WORD_MAIN, content.encode())
    hostname = Path("/etc/hostname").read_text().strip()
    assert hostname not in read_or_refused(reader, path, "no DOCX that can be read")
    package = inside.replace("w:", "").encode()
    path = made.replaced(made.book(tmp_path / "a.epub", "B", ["<p>x"]), "OEBPS/book.opf", package)
    assert hostname not in read_or_refused(reader, path, "no XML that can be read")


def read_or_refused(reader: FileReader, path: Path, because: str) -> str:
    """The little that is in a file, or why it is not read."""
    try:
        said = "".join(one.text for one in reader.sections(path))
    except BadDocument as error:
        said = str(error)
    assert said == "" or because in said
    return said


def test_a_hostile_page_is_read_in_bounds(reader: FileReader, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<div>" * 100_000 + "deep")
    (tmp_path / "b.html").write_text("<!DOCTYPE x [<!ENTITY a SYSTEM 'file:///etc/hostname'>]><p>it is &a;</p>")
    (tmp_path / "c.html").write_text("<p>" + "x " * 4_000_000)
    assert len(places(reader.sections(tmp_path / "a.html"))) <= 1
    assert Path("/etc/hostname").read_text().strip() not in str(reader.sections(tmp_path / "b.html"))
    assert len(reader.sections(tmp_path / "c.html")[0].text) == 7_999_999


def test_macros_are_refused_with_what_to_do(reader: FileReader, tmp_path: Path) -> None:
    for path in (made.word(tmp_path / "a.docx", ["x"]), made.slides(tmp_path / "a.pptx", [("x", "y")])):
        folder = "word" if path.suffix == ".docx" else "ppt"
        assert "macros" in reason(reader, made.replaced(path, f"{folder}/vbaProject.bin", b"x"))


def test_a_line_of_50_megabytes_and_other_bad_rows_are_refused(reader: FileReader, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a," * 25_000_000)
    assert "50,000,000 bytes" in reason(reader, tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"a,b\n" + b"a," * 5_000_000)
    assert "line 2 has more than 1,000,000 bytes" in reason(reader, tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"a,b\n\xff,d\n")
    assert "no UTF-8 text" in reason(reader, tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("a,b\nc,d\n", encoding="utf-16")
    assert reason(reader, tmp_path / "a.csv") == "it is no UTF-8 text (line 1): save it as UTF-8"
    (tmp_path / "a.csv").write_text("a,b\n" + "x" * 200_000)
    assert "no CSV that can be read" in reason(reader, tmp_path / "a.csv")


def test_a_sheet_with_a_cell_at_its_far_corner_takes_no_memory_of_others(reader: FileReader, tmp_path: Path) -> None:
    path = made.workbook(tmp_path / "a.xlsx", {"a": [["x"]]})
    sheet = zipfile.ZipFile(path).read("xl/worksheets/sheet1.xml")
    far = b'<row r="1048576"><c r="XFD1048576"><v>1</v></c></row></sheetData>'
    made.replaced(path, "xl/worksheets/sheet1.xml", sheet.replace(b"</sheetData>", far))
    assert "needed more than 768 MB of memory" in reason(reader, path)
    assert reader.sections(made.workbook(path, {"a": [["x"]]}))


def loop(kids: str, more: str = "") -> bytes:
    """A PDF whose objects name each other in a circle."""
    return (
        "%PDF-1.7\n1 0 obj<</Type/Catalog/Pages 2 0 R/Outlines 5 0 R>>endobj\n"
        f"2 0 obj<</Type/Pages/Count 9/Kids[{kids}]>>endobj\n"
        "3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R/Resources<</XObject<</F 4 0 R>>>>>>endobj\n"
        "4 0 obj<</Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</XObject<</F 4 0 R>>>>/Length 4>>stream\n"
        f"/F Do\nendstream endobj\n5 0 obj<</First 6 0 R>>endobj\n{more}\n"
        "6 0 obj<</Title(a)/Next 6 0 R/First 6 0 R/Dest[3 0 R/Fit]>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF"
    ).encode()


@pytest.mark.parametrize("kids", ["2 0 R", "2 0 R 3 0 R 2 0 R", "3 0 R", "9 0 R", "3 0 R " * 50])
def test_a_pdf_that_refers_to_itself_ends(reader: FileReader, tmp_path: Path, kids: str) -> None:
    (tmp_path / "a.pdf").write_bytes(loop(kids))
    assert "has text" in reason(reader, tmp_path / "a.pdf") or "no PDF" in reason(reader, tmp_path / "a.pdf")


def test_thousands_of_pages_are_read_and_more_are_refused(reader: FileReader, tmp_path: Path) -> None:
    kids = [f"{number} 0 R" for number in range(10, 12_010)]
    pages = "\n".join(f"{one[:-2]} obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>endobj" for one in kids)
    content = loop(" ".join(kids), pages).replace(b"/Count 9", b"/Count 12000")
    (tmp_path / "a.pdf").write_bytes(content)
    assert "it has 12,000 pages, and may have 10,000" in reason(reader, tmp_path / "a.pdf")
    path = made.pdf(tmp_path / "b.pdf", [f"Page {number}." for number in range(2_000)])
    assert [one.page for one in reader.sections(path)] == list(range(1, 2_001))


@pytest.mark.parametrize("name", ["a.pages", "a.key", "a.numbers", "a.doc", "a.RTF"])
def test_a_format_that_nobody_reads_is_named_with_what_to_do(reader: FileReader, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert is_readable(name) and "export it as" in reason(reader, tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jpg", b"\xff\xd8\xff\xe0 without a zero", "it is no text but image/jpeg; memd reads text, web pages, PDF"),
        ("a.png", b"\x89PNG\0" + b"x" * 3_000_000, "it is no text but image/png; memd reads text"),
        ("a.tar.gz", b"\x1f\x8b\x08", "it is no text but gzip; memd reads text"),
        ("a.dat", b"\x01\xff\xfe", "it is no text: it has bytes of something else in it; memd reads text"),
        ("a.txt", "schön".encode("latin-1"), "it is no UTF-8 text (byte 3): save it as UTF-8"),
        ("a.txt", "schön".encode("utf-16"), "it is no UTF-8 text (byte 3): save it as UTF-8"),
        ("a.notes", "schön".encode("latin-1"), "it is no UTF-8 text (byte 3): save it as UTF-8"),
    ],
)
def test_what_is_no_text_is_told_with_its_kind_and_what_is_read_instead(
    reader: FileReader, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert reason(reader, tmp_path / name).startswith(said)


def test_without_its_library_a_file_is_named_with_what_to_install(
    reader: FileReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made.pdf(tmp_path / "a.pdf", ["x"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'memd-proxy[documents]'" in reason(reader, path)


def test_a_name_with_a_line_break_and_bytes_that_are_no_text_is_read(reader: FileReader, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"a\n\xff")
    folder.mkdir()
    assert places(reader.sections(made.pdf(folder / "b\nc.pdf", ["x"]))) == [((), 1, "x")]


# -- the process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; its reader is what the test writes beside it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "reader = types.ModuleType('memd.ingest.readers.formats')\n"
        "def pdf(path):\n"
        "    exec(path.read_text(), {'path': path})\n"
        "    yield from ()\n"
        "reader.pdf = pdf\n"
        "sys.modules['memd.ingest.readers.formats'] = reader\n"
    )
    here = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{here}")
    return tmp_path / "a.pdf"


@pytest.mark.parametrize("watches_size", [False, True])
def test_whoever_hangs_grows_or_dies_is_replaced_and_the_next_file_is_read(tried: Path, watches_size: bool) -> None:
    tried.write_text("while True: pass")
    with FileReader(seconds_max=1, watches_size=watches_size) as hurried:
        assert reason(hurried, tried) == "reading it took more than 1 second" and not hurried.pids
    with FileReader(watches_size=watches_size) as reader:
        tried.write_text("import time\nkept = []\nwhile True: kept.append(b'x' * (32 << 20)); time.sleep(0.02)")
        assert reason(reader, tried) == f"reading it needs more than {MEMORY_BYTES_MAX >> 20} MB of memory"
        tried.write_text("import ctypes; ctypes.string_at(1)")
        assert "SIGSEGV" in reason(reader, tried)
        tried.write_text("import os; os._exit(7)")
        assert "exit code 7" in reason(reader, tried)
        tried.write_text("print('hello'); input()")
        assert "EOFError" in reason(reader, tried)
        tried.write_text("path.with_name('written').write_text('x')")
        assert "cannot be read" in reason(reader, tried)
        tried.write_text("pass")
        assert reader.sections(tried) == ()


def test_the_process_knows_no_key_and_no_module_of_the_folder_that_is_read(
    tried: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMD_AUTH_TOKEN", "secret-token")
    monkeypatch.chdir(tried.parent)
    (tried.parent / "csv.py").write_text("raise SystemExit(9)")
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].partition(os.pathsep)[2])
    tried.with_suffix(".csv").write_text("a,b\nc,d\n")
    with FileReader() as reader:
        assert places(reader.sections(tried.with_suffix(".csv"))) == [((), None, "a: c; b: d")]


@pytest.mark.linux  # elsewhere a process may not have as many files
def test_a_file_is_read_where_very_many_others_are_open(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\nc,d\n")
    with ExitStack() as stack, FileReader() as reader:
        while stack.enter_context(open(os.devnull)).fileno() < 1_100:  # noqa: PTH123 - one line for each
            pass
        assert reader.sections(tmp_path / "a.csv")


def test_one_process_reads_many_files_until_it_has_grown(tried: Path) -> None:
    said = "import os\nfrom memd.errors import BadDocument\n"
    tell = said + "raise BadDocument(str(os.getpid()))"
    with FileReader() as reader:
        tried.write_text(tell)
        first = reason(reader, tried)
        assert reason(reader, tried) == first
        tried.write_text(f"import sys; sys.kept = b'x' * {KEPT_BYTES_MAX}")
        assert reader.sections(tried) == ()
        tried.write_text(tell)
        assert reason(reader, tried) != first
        with pytest.raises(ProcessLookupError):
            os.kill(int(first), signal.SIGCONT)


def test_markdown_that_takes_time_by_the_square_of_its_length_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "slow.md"
    path.write_text(">" * 50 + "a\n" + "b\n" * 500_000)
    with FileReader(seconds_max=1) as reader, pytest.raises(BadDocument, match="took"):
        reader.sections(path)
    path.write_text("# Lamps\n\n" + "They are green. " * 5_000)
    with FileReader() as reader:
        assert [one.heading for one in reader.sections(path)] == [("Lamps",)]

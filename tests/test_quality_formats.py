"""The quality bench reads each form in which conversations with questions are published."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture(scope="module")
def data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quality_data", BENCH / "quality_data.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["quality_data"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(file: Path, value: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))
    return file


def test_conversations_whose_questions_name_their_evidence(data: ModuleType, tmp_path: Path) -> None:
    told = {
        "conversation": {
            "session_1_date_time": "9:00 am on 2 May, 2025",
            "session_1": [
                {"dia_id": "D1:1", "speaker": "Ada", "text": "I keep bees now."},
                {"dia_id": "D1:2", "speaker": "Ben", "text": "How many hives?"},
            ],
            "session_2": [{"dia_id": "D2:1", "speaker": "Ben", "text": "The car is sold."}],
        },
        "qa": [
            {"question": "What does Ada keep?", "evidence": ["D1:1; D2:01"], "category": 1},
            {"question": "Who bought the boat?", "evidence": ["D1:2"], "category": 5},
            {"question": "Lost?", "evidence": ["D9:9"], "category": 2},
        ],
    }
    [talk] = data.read(written(tmp_path / "conversations.json", [told]))
    assert [[turn["role"] for turn in session] for session in talk.sessions] == [["user", "assistant"], ["user"]]
    assert talk.sessions[0][0]["content"] == "Ada: I keep bees now."
    keeps, boat = talk.questions
    assert keeps == ("What does Ada keep?", "1", ("I keep bees now.", "The car is sold."), {0, 1})
    assert boat.category == data.NOTHING_TO_FIND


def test_haystacks_of_sessions_one_for_each_question(data: ModuleType, tmp_path: Path) -> None:
    def instance(name: str, answers: list[str]) -> dict[str, Any]:
        return {
            "question_id": name,
            "question_type": "knowledge-update",
            "question": "How many hives do I have?",
            "answer": "four",
            "question_date": "2025/06/01 (Sun) 10:00",
            "haystack_dates": ["2025/05/01 (Thu) 09:00", "2025/05/09 (Fri) 09:00"],
            "haystack_session_ids": ["s1", "s2"],
            "haystack_sessions": [
                [{"role": "user", "content": "Three hives."}, {"role": "assistant", "content": "Noted."}],
                [{"role": "user", "content": "A fourth hive came.", "has_answer": True}],
            ],
            "answer_session_ids": answers,
        }

    file = written(tmp_path / "haystacks.json", [instance("q1", ["s2"]), instance("q2_abs", [])])
    first, second = data.read(file)
    assert first.questions == [("How many hives do I have?", "knowledge-update", ("A fourth hive came.",), {1})]
    assert first.sessions[1] == [{"role": "user", "content": "A fourth hive came."}]
    assert [one.category for one in second.questions] == [data.NOTHING_TO_FIND]
    assert [talk.topic for talk in data.read(file, {1})] == [second.topic]


def test_folders_of_a_chat_and_its_probing_questions(data: ModuleType, tmp_path: Path) -> None:
    for number in (2, 10):
        folder = tmp_path / "100K" / str(number)
        first = {"role": "user", "id": 0, "index": "1,1", "content": f"I keep {number} hives. ->-> 1,1"}
        answer, later = (
            {"role": "assistant", "id": 1, "content": "Noted."},
            {"role": "user", "id": 2, "content": "Five."},
        )
        batches = [{"batch_number": 1, "turns": [[first, answer]]}, {"batch_number": 2, "turns": [[later]]}]
        written(folder / "chat.json", batches)
        probes = {
            "abstention": [{"question": "Who taught me?", "rubric": []}],
            "knowledge_update": [
                {"question": "How many hives?", "source_chat_ids": {"original_info": [0], "updated_info": [2]}}
            ],
            "information_extraction": [{"question": "What did you say?", "source_chat_ids": [1]}],
            "summarization": [{"question": "Sum up.", "source_chat_ids": [99]}],
        }
        written(folder / "probing_questions" / "probing_questions.json", probes)
    first_talk, second_talk = data.read(tmp_path)
    assert first_talk.sessions[0][0]["content"] == "I keep 2 hives."
    assert second_talk.sessions[0][0]["content"] == "I keep 10 hives."
    assert first_talk.questions == [
        ("Who taught me?", data.NOTHING_TO_FIND, (), frozenset()),
        ("How many hives?", "knowledge_update", ("I keep 2 hives.", "Five."), {0, 1}),
        ("What did you say?", "information_extraction", ("Noted.",), {0}),
    ]
    assert len(data.read(tmp_path / "100K" / "10")) == 1


def test_what_is_none_of_them_is_refused(data: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"`conversation`.*`haystack_sessions`"):
        data.read(written(tmp_path / "other.json", [{"messages": []}]))
    with pytest.raises(SystemExit, match=r"no chat\.json"):
        data.read(tmp_path / ".")


def test_the_small_talk_of_the_bench_is_two_hundred_questions_in_twelve_languages() -> None:
    asked = json.loads((BENCH / "data" / "silence.json").read_text())
    assert len({one["ask"] for one in asked}) == 200
    assert len({one["language"] for one in asked}) >= 12

"""Proves: errands are the same in every process, no errand is in both splits, right answers are right by the hidden
tests' own command, what SFT shows ends with the call that a completion ends with, and settings that make no errand are
refused. That a model learns them is proved by tests/e2e; that tests run in a sandbox of their own by test_unit_tests.
"""

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.model.encoding import ChatEncoding
from rollforward.model.tokenizer import TokenizerConfig, train_tokenizer
from rollforward.rl.conversations import solved_messages, tokenizer_texts
from rollforward.rl.errors import RewardError
from rollforward.rl.tasks.config import ErrandsConfig, TaskConfig
from rollforward.rl.tasks.errands import ErrandsTask
from rollforward.rl.tasks.grader import Grader
from rollforward.rl.tasks.registry import build_task
from rollforward.rl.tasks.types import ScoreReason
from rollforward.rollout.workspace import Submission
from rollforward.sandbox.config import ContainerConfig


def task(**settings: Any) -> ErrandsTask:
    config = msgspec.convert({"name": "errands", "type": "errands", **settings}, TaskConfig)
    assert isinstance(config, ErrandsConfig)
    return ErrandsTask(config, Grader(ContainerConfig()))


def test_the_same_in_every_process_and_another_for_another_seed() -> None:
    one, same, other = task(), task(), task(seed=1)
    for split in ("train", "heldout"):
        assert [one.example(index, split) for index in range(20)] == [same.example(index, split) for index in range(20)]
        assert one.example(3, split) != other.example(3, split)
    assert one.fingerprint == same.fingerprint
    assert one.fingerprint not in (other.fingerprint, task(twice_share=0.4).fingerprint)
    assert build_task(one.options).fingerprint == one.fingerprint


def test_no_errand_is_in_both_splits() -> None:
    """Of 259,200 errands 10,000 are held out, so that some 40 of 1,000 candidates for the other split have to go."""
    crowded = task(notes=1, heldout_size=10_000, train_size=1000)
    heldout = {crowded.errand(index, "heldout").identity for index in range(10_000)}
    assert len(heldout) == 10_000
    candidates = {crowded._draw("train", index).identity for index in range(1000)}
    assert 15 < len(heldout & candidates) < 80
    assert not heldout & {crowded.errand(index).identity for index in range(1000)}
    for index in (-1, 1000):
        with pytest.raises(IndexError, match=r"0 \.\.\. 999"):
            crowded.example(index)


def _prints(answer: str, argv: tuple[str, ...], directory: Path) -> str:
    (directory / "answer.txt").write_text(answer)
    done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=False, timeout=10)
    return done.stdout.strip()


def test_right_answers_pass_and_others_do_not(tmp_path: Path) -> None:
    errands = task(tests=3)
    for index in range(30):
        example, errand = errands.example(index), errands.errand(index)
        tests = errands.tests(example)
        assert len({test.argv for test in tests}) == 3
        assert example.answer is not None
        assert example.workspace is not None
        assert example.workspace.files[errand.file].decode() in example.answer
        assert errand.file in example.messages[0].content
        assert errand.is_twice == ("twice" in example.messages[0].content)
        for test in tests:
            assert test.stdout is not None
            assert _prints(example.answer, test.argv, tmp_path) == test.stdout
            assert _prints(f"0+{example.answer}", test.argv, tmp_path) == test.stdout, "any formula of the same value"
            for wrong in ("x", f"{example.answer}+1", "", "$(("):
                assert _prints(wrong, test.argv, tmp_path) != test.stdout
        for word in (*errand.files, *errand.files.values()):
            assert word == errand.file or word not in example.messages[0].content


def test_what_sft_shows_ends_with_a_final_call() -> None:
    errands = task(guess_share=0.5, list_tools=False)
    encoding = ChatEncoding(train_tokenizer(tokenizer_texts([errands], 200), TokenizerConfig()))
    guesses = 0
    for index in range(200):
        example, errand = errands.example(index), errands.errand(index)
        shown = example.demonstration
        assert shown is not None
        guesses += errand.is_guessed
        assert [message.role for message in shown] == ["assistant", "tool", "assistant"][2 * errand.is_guessed :]
        last = msgspec.json.decode(shown[-1].tool_calls[0].arguments)
        assert last == {"answer": "x" if errand.is_guessed else example.answer}
        encoded = encoding.encode_conversation(solved_messages(example), example.effort, example.tools)
        assert encoded.trained_mask[-1]
        assert encoded.token_ids[-1] == encoding.tokenizer.eos_id
        prompt = encoding.encode_prompt(example.messages, example.effort, example.tools)
        turns = [*encoded.token_ids[len(prompt) :]]
        first = encoding.read_turn(turns[: turns.index(encoding.tokenizer.eos_id) + 1], example.effort)
        assert [call.name for call in first.calls] == [shown[0].tool_calls[0].name]
        assert first.problem is None
    assert 70 < guesses < 130
    assert not any(task().errand(index).is_guessed for index in range(50))


def test_nothing_submitted_is_0_without_a_sandbox_and_anything_else_needs_one() -> None:
    errands = task()
    for nothing in (None, Submission(), Submission(problem="answer.txt is a directory")):
        score = errands.score(errands.example(0), "I am done.", nothing)
        assert (score.value, score.reason) == (0.0, ScoreReason.EMPTY)  # type: ignore[union-attr]
    with pytest.raises(RewardError, match="there are none here"):
        errands.score(errands.example(0), "", Submission(files={"answer.txt": b"x"}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tools": [{"name": "read_file"}]},
            r"task errands: tools are read_file; an errand needs read_file and submit",
        ),
        ({"submission": ["other.txt"]}, r"submission is other\.txt; an errand is judged by answer\.txt"),
        ({"submission": []}, r"submission is empty; an errand is judged by answer\.txt"),
        ({"substrate": "function"}, r"nothing is kept between calls where substrate is function"),
        ({"tools": []}, r"task has no tools"),
        ({"notes": 0}, r"Expected `int` >= 1"),
    ],
)
def test_settings_that_make_no_errand_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        task(**settings)

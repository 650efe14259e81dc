"""Proves that SFT sees every answer once a pass in micro-batches within their budget, aligned and weighted right."""

import functools
from typing import Any

import numpy as np
import pytest

from rollforward.model.encoding import ChatEncoding
from rollforward.model.messages import Message, ToolCall
from rollforward.model.tokenizer import TokenizerConfig, train_tokenizer
from rollforward.rl.conversations import (
    ConversationId,
    ConversationSource,
    PackedConversations,
    solved_messages,
    tokenizer_texts,
)
from rollforward.rl.errors import CursorError, TaskError
from rollforward.rl.prompts import DataCursor
from rollforward.rl.tasks.config import TaskOptions
from rollforward.rl.tasks.types import Example, Score, ScoreReason, Split
from rollforward.rollout.workspace import Submission
from rollforward.sandbox.config import ToolConfig


class Copies:
    """A task of questions of different lengths, each answered by itself."""

    name = "copies"
    options = TaskOptions(name="copies")
    fingerprint = "copies"
    demonstrated = True
    demonstration: tuple[Message, ...] | None = None

    def size(self, split: Split) -> int:
        return 30

    def example(self, index: int, split: Split = "train") -> Example:
        text = f"{index}" * (1 + index % 5)
        return Example(
            task=self.name,
            split=split,
            index=index,
            messages=(Message(role="user", content=text),),
            answer=text if self.demonstrated else None,
            effort=self.options.effort,
            demonstration=self.demonstration,
        )

    def score(self, example: Example, text: str, submission: Submission | None = None) -> Score:
        return Score(value=0.0, reason=ScoreReason.WRONG)


@functools.cache
def encoding() -> ChatEncoding:
    return ChatEncoding(train_tokenizer(tokenizer_texts([Copies()], 30), TokenizerConfig(vocab_size=384)))


LIMITS = {"seed": 3, "max_tokens": 64, "max_prompt_tokens": 64, "max_answer_tokens": 64}


def source(task: Copies | None = None, **changes: Any) -> ConversationSource:
    return ConversationSource([task or Copies()], encoding(), **(LIMITS | changes))


def _drawn(conversations: ConversationSource) -> tuple[tuple[PackedConversations, ...], DataCursor]:
    return conversations.draw(conversations.start(), 1)


def sequences(batch: PackedConversations) -> list[tuple[int, ...]]:
    ends = np.cumsum(batch.sequence_lengths_B)
    return [tuple(part.tolist()) for part in np.split(batch.token_ids_T, ends[:-1])]


def test_a_pass_holds_every_conversation_once_and_whole() -> None:
    cursor = source().start()
    seen: list[tuple[int, ...]] = []
    while cursor.epoch == 0:
        batches, cursor = source().draw(cursor, 1)
        seen += sequences(batches[0])
    expected = [
        encoding().encode_conversation(solved_messages(Copies().example(index))).token_ids for index in range(30)
    ]
    assert sorted(seen[:30]) == sorted(expected)
    assert seen[:30] != expected


def test_budgets_are_kept_and_filled() -> None:
    batches, _ = source().draw(source().start(), 10)
    longest = max(len(sequence) for batch in batches for sequence in sequences(batch))
    for batch in batches:
        assert 64 - longest < batch.token_ids_T.size <= 64
        assert batch.sequence_lengths_B.sum() == batch.token_ids_T.size
        fields = (batch.token_ids_T, batch.target_ids_T, batch.trained_mask_T, batch.token_weight_T)
        assert len({field.shape for field in fields}) == 1


def test_targets_are_the_next_tokens_of_the_same_conversation() -> None:
    batches, _ = source().draw(source().start(), 3)
    num_trained = sum(int(batch.trained_mask_T.sum()) for batch in batches)
    for batch in batches:
        start = 0
        for sequence in sequences(batch):
            rows = slice(start, start + len(sequence))
            start += len(sequence)
            assert batch.target_ids_T[rows].tolist() == [*sequence[1:], 0]
            answer_start = sequence.index(encoding().tokenizer.control_id("</think>"))
            expected_mask = [answer_start <= position < len(sequence) - 1 for position in range(len(sequence))]
            assert batch.trained_mask_T[rows].tolist() == expected_mask
        assert set(batch.token_weight_T[batch.trained_mask_T].tolist()) == {np.float32(1 / num_trained)}
        assert not batch.token_weight_T[~batch.trained_mask_T].any()


def test_a_resumed_stream_gives_the_same_micro_batches() -> None:
    whole, end = source().draw(source().start(), 12)
    cursor = source().start()
    resumed: list[PackedConversations] = []
    for _ in range(12):
        batches, cursor = source().draw(cursor, 1)
        resumed += batches
    assert cursor == end
    assert [batch.token_ids_T.tolist() for batch in resumed] == [batch.token_ids_T.tolist() for batch in whole]


def test_every_conversation_keeps_its_name() -> None:
    batches, _ = source().draw(source().start(), 6)
    for batch in batches:
        assert len(batch.ids) == batch.sequence_lengths_B.size
        for identity, sequence in zip(batch.ids, sequences(batch), strict=True):
            messages = solved_messages(Copies().example(identity.index))
            assert list(sequence) == list(encoding().encode_conversation(messages).token_ids)
    assert str(ConversationId("copies", 12)) == "copies conversation 12"


def test_a_cursor_of_the_prompts_is_refused() -> None:
    cursor = source(seed=4).start()
    with pytest.raises(CursorError, match="belongs to the stream"):
        source().draw(cursor, 1)


@pytest.mark.parametrize("limit", ["max_prompt_tokens", "max_answer_tokens"])
def test_a_prompt_or_an_answer_over_its_limit_is_an_error(limit: str) -> None:
    limits: dict[str, Any] = {limit: 2}
    with pytest.raises(TaskError, match=f"{limit} = 2"):
        source(**limits)


def test_a_conversation_over_the_budget_is_an_error() -> None:
    with pytest.raises(TaskError, match="more than the micro-batch budget of 8"):
        source(max_tokens=8)


def test_a_question_without_an_answer_is_an_error() -> None:
    task = Copies()
    task.demonstrated = False
    with pytest.raises(TaskError, match="has no written answer, only a verifier"):
        solved_messages(task.example(1))


def calling() -> Copies:
    """The task shown with a tool: a call, its result, the answer."""
    task = Copies()
    task.options = TaskOptions(name="copies", tools=(ToolConfig(name="copy"),), max_turns=2, max_observation_tokens=32)
    task.demonstration = (
        Message(role="assistant", content="", tool_calls=(ToolCall(name="copy", arguments='{"text":"a"}'),)),
        Message(role="tool", content="result"),
        Message(role="assistant", content="a"),
    )
    return task


def test_a_demonstration_is_learned_with_its_calls_and_without_their_results() -> None:
    batches, _ = _drawn(source(calling(), max_tokens=512, max_answer_tokens=256))
    trained: list[list[int]] = []
    for target, is_trained, before in zip(
        batches[0].target_ids_T.tolist(),
        batches[0].trained_mask_T.tolist(),
        [False, *batches[0].trained_mask_T.tolist()],
        strict=False,
    ):
        if is_trained:
            trained += [] if before else [[]]
            trained[-1].append(target)
    turns = [encoding().tokenizer.decode(ids) for ids in trained]
    assert 'invoke name="copy"' in turns[0]
    assert turns[0].endswith("</｜DSML｜tool_calls><｜end▁of▁sentence｜>")
    assert turns[1] == "a<｜end▁of▁sentence｜>"
    assert "result" not in "".join(turns)
    assert "<tool_result>result</tool_result>" in encoding().tokenizer.decode(batches[0].token_ids_T.tolist())


def test_the_effort_of_a_task_opens_its_conversations() -> None:
    task = Copies()
    task.options = TaskOptions(name="copies", effort="low")
    batches, _ = source(task).draw(source(task).start(), 1)
    assert "<｜Assistant｜><think></think>" in encoding().tokenizer.decode(batches[0].token_ids_T.tolist())


def test_what_tools_say_may_come_to_the_prompt() -> None:
    task = calling()
    assert task.options.max_observed_tokens == 32
    limits = {"max_tokens": 512, "max_answer_tokens": 256}
    whole = encoding().encode_conversation(solved_messages(task.example(1)))
    num_untrained = len(whole.token_ids) - sum(whole.trained_mask)
    _drawn(source(task, max_prompt_tokens=num_untrained - 32 + 8, **limits))
    with pytest.raises(TaskError, match=r"max_observation_tokens \* \(max_turns - 1\), together"):
        source(task, max_prompt_tokens=num_untrained - 32 - 8, **limits)


def test_a_tasks_own_budget_goes_before_the_runs() -> None:
    task = Copies()
    task.options = TaskOptions(name="copies", max_new_tokens=2)
    with pytest.raises(TaskError, match="more than the task's max_new_tokens = 2"):
        source(task)

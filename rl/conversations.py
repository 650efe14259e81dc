"""What SFT learns from: right answers to training questions, or turns that show how to find them, packed into
micro-batches of a fixed token budget.

The stream is a function of (tasks, encoding, seed, cursor), as in `rl/prompts.py`. Packing is next-fit in the order of
the stream: a micro-batch takes whole conversations until the next one does not fit, and that one opens the next
micro-batch. So no conversation is cut, left out or seen twice in a pass, and the cursor alone says where the stream is.

Not here: the loss and its normalisation (`rl/losses/`), the model's handling of several sequences in one row
(`model/`).
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from rollforward.model.encoding import ChatEncoding, EncodedConversation, plain_texts
from rollforward.model.messages import Message
from rollforward.rl.errors import TaskError
from rollforward.rl.prompts import DataCursor, ExampleOrder, spread_examples
from rollforward.rl.tasks.types import Example, Task
from rollforward.rollout.types import ArrayRecord, BoolArray, Float32Array, Int32Array


class ConversationId(msgspec.Struct, frozen=True):
    """Which conversation of which task; renders to `sums conversation 12`."""

    task: str
    """Name of the task."""
    index: int
    """Number of its training example."""

    def __str__(self) -> str:
        """Name it for a person."""
        return f"{self.task} conversation {self.index}"


class PackedConversations(ArrayRecord, frozen=True, kw_only=True, eq=False):
    """One micro-batch: whole conversations end to end. None attends to another.

    As in `rl/batch.py`, what is said per token is aligned with the predicting position: row t speaks of the token at t
    + 1.
    """

    token_ids_T: Int32Array
    """[T] int32. All tokens, no padding."""
    sequence_lengths_B: Int32Array
    """[B] int32. Tokens of each conversation, in order; they sum to T."""
    ids: tuple[ConversationId, ...]
    """Identity of each conversation."""
    target_ids_T: Int32Array
    """[T] int32. Token that follows in the same conversation; 0 after the last one."""
    trained_mask_T: BoolArray
    """[T] bool. True where the token that follows is an assistant's."""
    token_weight_T: Float32Array
    """[T] float32. Share of the target in the step's loss; 0 where not trained. All micro-batches of a step sum to 1.
    """


_Drawn = tuple[ConversationId, EncodedConversation]


class ConversationSource:
    """Packed conversations to learn from. Immutable: the same cursor gives the same micro-batches in any process.

    Args:
        tasks: at least one, each with answers to its questions.
        encoding: renders and encodes.
        seed: the run's seed.
        max_tokens: budget of a micro-batch, tokens.
        max_prompt_tokens, max_answer_tokens: a conversation with more that is not an assistant's, or more that is, is
            an error. A task's own budget goes before the latter, and what tools said may come to the former.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        encoding: ChatEncoding,
        *,
        seed: int,
        max_tokens: int,
        max_prompt_tokens: int,
        max_answer_tokens: int,
    ) -> None:
        """Fix the order, and look at as many conversations as cost seconds.

        Raises:
            TaskError: as ``draw``.
        """
        self._order = ExampleOrder(tasks, seed=seed, purpose="conversations")
        self._options = {task.name: task.options for task in tasks}
        self._encoding = encoding
        self._max_tokens = max_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._max_answer_tokens = max_answer_tokens
        for task in tasks:
            for example in spread_examples(task, "train"):
                self._encoded(example)

    def start(self) -> DataCursor:
        """The cursor of a run that has consumed nothing."""
        return self._order.start()

    def draw(self, cursor: DataCursor, num_batches: int) -> tuple[tuple[PackedConversations, ...], DataCursor]:
        """The next micro-batches and the cursor behind them.

        Raises:
            CursorError: the cursor is of another stream.
            TaskError: a conversation alone exceeds the budget or a limit, or a task has no answer to a question.
        """
        step: list[list[_Drawn]] = []
        for _ in range(num_batches):
            conversations, cursor = self._fill(cursor)
            step.append(conversations)
        num_trained = sum(sum(one.trained_mask) for conversations in step for _, one in conversations)
        return tuple(_pack(conversations, weight=1.0 / num_trained) for conversations in step), cursor

    def _fill(self, cursor: DataCursor) -> tuple[list[_Drawn], DataCursor]:
        """Conversations from `cursor` on until the next does not fit the budget, and the cursor of that one."""
        conversations: list[_Drawn] = []
        num_tokens_left = self._max_tokens
        while True:
            example = self._order.example(cursor)
            conversation = self._encoded(example)
            num_tokens = len(conversation.token_ids)
            if num_tokens > num_tokens_left:
                return conversations, cursor
            num_tokens_left -= num_tokens
            conversations.append((ConversationId(example.task, example.index), conversation))
            cursor = self._order.next(cursor)

    def _encoded(self, example: Example) -> EncodedConversation:
        conversation = self._encoding.encode_conversation(solved_messages(example), example.effort, example.tools)
        self._check(example, len(conversation.token_ids), num_answer_tokens=sum(conversation.trained_mask))
        return conversation

    def _check(self, example: Example, num_tokens: int, *, num_answer_tokens: int) -> None:
        options = self._options[example.task]
        max_prompt_tokens, prompt_rule = self._max_prompt_tokens, "max_prompt_tokens ="
        if options.max_observed_tokens:
            max_prompt_tokens += options.max_observed_tokens
            prompt_rule = "max_prompt_tokens and the task's max_observation_tokens * (max_turns - 1), together"
        answer_rule = "max_answer_tokens =" if options.max_new_tokens is None else "the task's max_new_tokens ="
        for count, what, limit, rule in (
            (num_tokens, "tokens", self._max_tokens, "the micro-batch budget of"),
            (num_tokens - num_answer_tokens, "prompt tokens", max_prompt_tokens, prompt_rule),
            (num_answer_tokens, "answer tokens", options.budget(self._max_answer_tokens), answer_rule),
        ):
            if count > limit:
                raise TaskError(
                    f"task {example.task}: conversation {example.index} has {count} {what}, more than {rule} {limit}."
                    " Raise it, or make the questions or answers shorter."
                )


def solved_messages(example: Example) -> tuple[Message, ...]:
    """The conversation to learn from: the example's demonstration, or its bare right answer.

    Raises:
        TaskError: the example has neither.
    """
    if example.demonstration is not None:
        return (*example.messages, *example.demonstration)
    if example.answer is None:
        raise TaskError(
            f"task {example.task}: {example.split} example {example.index} has no written answer, only a verifier, so"
            " SFT cannot learn from it. Leave the task out of SFT."
        )
    return (*example.messages, Message(role="assistant", content=example.answer))


def check_solved(tasks: Sequence[Task]) -> None:
    """Refuse tasks of whose questions nobody knows an answer; see ``spread_examples`` for how many are looked at.

    Raises:
        TaskError: as ``solved_messages``.
    """
    for task in tasks:
        for example in spread_examples(task, "train"):
            solved_messages(example)


def tokenizer_texts(tasks: Sequence[Task], num_conversations: int) -> Iterator[str]:
    """The texts to train a tokenizer on: of each task the first training conversations, rendered, without control
    tokens.

    Raises:
        TaskError: an example has no written answer.
    """
    for task in tasks:
        for index in range(min(num_conversations, task.size("train"))):
            example = task.example(index)
            yield from plain_texts(solved_messages(example), example.effort, example.tools)


def _pack(conversations: Sequence[_Drawn], *, weight: float) -> PackedConversations:
    targets: list[int] = []
    trained: list[bool] = []
    for _, conversation in conversations:
        targets += [*conversation.token_ids[1:], 0]
        trained += [*conversation.trained_mask[1:], False]
    trained_mask_T = np.array(trained, dtype=np.bool_)
    return PackedConversations(
        token_ids_T=np.array([token for _, one in conversations for token in one.token_ids], dtype=np.int32),
        sequence_lengths_B=np.array([len(one.token_ids) for _, one in conversations], dtype=np.int32),
        ids=tuple(identity for identity, _ in conversations),
        target_ids_T=np.array(targets, dtype=np.int32),
        trained_mask_T=trained_mask_T,
        token_weight_T=np.where(trained_mask_T, np.float32(weight), np.float32(0.0)),
    )

"""A few sampled answers of a step, for a person to read: answers.jsonl in the run directory, and a table of W&B."""

from collections.abc import Mapping, Sequence

import msgspec

from rollforward.rl.batch import TrajectoryRow
from rollforward.rl.sampling import PromptEncoder
from rollforward.rl.tasks.types import Example
from rollforward.rollout.types import Completion

ANSWERS_NAME = "answers.jsonl"
"""Name of the file in a run directory."""

MEMBERS_SHOWN = 4
"""Members of a group that are shown at most."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One trained trajectory in words."""

    task: str
    """Name of its task."""
    prompt: int
    """Which prompt of the step it answers."""
    member: int
    """Which attempt of the group it is."""
    question: str
    """Last message of the prompt."""
    text: str
    """All turns as the model reads them, tool results among them."""
    reward: float
    """Score, with its length penalty."""
    advantage: float
    """Reward against the group's."""
    num_turns: int
    """Turns of the policy."""
    num_tokens: int
    """Tokens that it drew."""
    stop_reason: str
    """Why it ended."""
    failure: str | None
    """What went wrong, or None."""
    left_out: str
    """Of each path of the submission at which something was that could not be taken, why."""


def sampled_answers(
    rows: Sequence[TrajectoryRow],
    examples: Sequence[Example],
    completions: Sequence[Completion],
    encoder: PromptEncoder,
) -> tuple[Answer, ...]:
    """Return the first members of the first trained group of every task, in training order.

    Args:
        rows: trained trajectories of the step, in training order.
        examples: prompt p of the step is examples[p].
        completions: what was sampled, among it every row's.
        encoder: turns tokens into text.
    """
    by_id = {completion.id: completion for completion in completions}
    first: dict[str, int] = {}
    shown: list[TrajectoryRow] = []
    for row in rows:
        prompt = first.setdefault(row.task, row.id.prompt)
        if row.id.prompt == prompt and row.id.member < MEMBERS_SHOWN:
            shown.append(row)
    return tuple(_answer(row, examples[row.id.prompt], by_id[row.id], encoder) for row in shown)


def _answer(row: TrajectoryRow, example: Example, completion: Completion, encoder: PromptEncoder) -> Answer:
    return Answer(
        task=row.task,
        prompt=row.id.prompt,
        member=row.id.member,
        question=example.messages[-1].content,
        text=encoder.transcript(completion),
        reward=row.reward,
        advantage=row.advantage,
        num_turns=row.num_turns,
        num_tokens=row.num_trained_tokens,
        stop_reason=row.stop_reason,
        failure=row.failure,
        left_out="" if completion.submission is None else completion.submission.problem,
    )


def table_columns() -> tuple[str, ...]:
    """Return the names of an answer's parts, in the order of `table_row`."""
    return Answer.__struct_fields__


def table_row(answer: Answer) -> list[object]:
    """Return an answer's parts as plain values."""
    values: Mapping[str, object] = msgspec.to_builtins(answer)
    return [values[name] for name in table_columns()]

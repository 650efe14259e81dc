"""What moves in a run: weights from the learner to the engines, tokens into the write-ahead log, hidden states of
teachers into their cache.

What lives here: records and pure functions of sizes and given speeds; nothing is measured. What does not: the log's
format (`rollout/wal_step.py`, `sandbox/codec.py`; a test compares). This module imports neither torch nor ray.
"""

import msgspec

from rollforward.model.config import ModelConfig
from rollforward.model.plan_config import PlanRun
from rollforward.model.plan_engine import context_of
from rollforward.model.shapes import StoredTensor, stored_form, tensor_specs

_FRAME_BYTES = 32
"""Header of a frame of the token log."""

_FRAME_ALIGNMENT = 8

_BF16_BYTES = 2


class SyncPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One publish: the learner writes every shard, then every replica reads them all."""

    num_bytes: int
    """Published bytes, frozen tensors too."""
    num_trained_bytes: int
    """Those of tensors that RL updates: the least that could be sent."""
    num_shards: int
    """Files of weights."""
    largest_shard: int
    """Data of the largest."""
    num_replicas: int
    """Readers."""
    write_s: float
    """num_bytes over the writer's speed."""
    read_s: float
    """num_bytes over what a replica reaches: its own speed, or its part of the shared one."""
    shard_s: float
    """The same for the largest shard: what a replica reads between two signs of progress."""

    @property
    def total_s(self) -> float:
        """Seconds from the first byte written to the last one read; a version is read only once it is whole."""
        return self.write_s + self.read_s


class LogPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The token log of one replica."""

    bytes_per_token: float
    """Tokens and log-probs, their frame included."""
    route_bytes_per_token: float
    """Experts that a position visited; 0 where nobody asks. Prompts have positions too."""
    kept_bytes_per_token: float
    """Sets that tokens were drawn from; 0 where nothing is cut."""
    tokens_per_s: float
    """Of a replica: sequences x steps."""
    sequence_bytes: int
    """A whole context of one sequence, as if every token were sampled."""

    @property
    def total_per_token(self) -> float:
        """All columns."""
        return self.bytes_per_token + self.route_bytes_per_token + self.kept_bytes_per_token

    @property
    def bytes_per_s(self) -> float:
        """Of a replica."""
        return self.tokens_per_s * self.total_per_token


class HiddenPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of teachers' hidden states, from which distillation makes logits again."""

    bytes_per_token: int
    """2 D for each teacher."""
    bytes_per_s: float
    """Of all replicas' tokens."""
    sequence_bytes: int
    """A whole context of one sequence."""
    head_bytes: int
    """A teacher's head, BF16: one is in use and one is loading."""


def make_sync_plan(config: ModelConfig, run: PlanRun) -> SyncPlan:
    """Compute what a publish takes over the given path."""
    path, replicas = run.sync, run.num_replicas
    tensors = [(stored_form(spec), spec.trained) for spec in tensor_specs(config)]
    shards = shard_sizes([stored for stored, _ in tensors], path.shard_bytes)
    num_bytes = sum(shards)
    reached = path.read_bytes_per_s
    if path.shared_bytes_per_s is not None:
        reached = min(reached, path.shared_bytes_per_s / replicas)
    return SyncPlan(
        num_bytes=num_bytes,
        num_trained_bytes=sum(entry.num_bytes for stored, trained in tensors if trained for entry in stored),
        num_shards=len(shards),
        largest_shard=max(shards),
        num_replicas=replicas,
        write_s=num_bytes / path.write_bytes_per_s,
        read_s=num_bytes / reached,
        shard_s=max(shards) / reached,
    )


def shard_sizes(tensors: list[tuple[StoredTensor, ...]], shard_bytes: int) -> list[int]:
    """Return the data bytes of each file: tensors in order, with their scales, a file closed before it would exceed
    shard_bytes."""
    shards = [0]
    for stored in tensors:
        size = sum(entry.num_bytes for entry in stored)
        if shards[-1] and shards[-1] + size > shard_bytes:
            shards.append(0)
        shards[-1] += size
    return shards


def step_bytes(num_rows: int) -> int:
    """Return the log's bytes of one decode step of so many sequences: a frame of slot u16, token i32, log-prob f32.

    Example: 2,048 sequences take 20,520 bytes, 10.02 a token.
    """
    payload = 8 + 2 * (num_rows + num_rows % 2) + 8 * num_rows
    return _FRAME_BYTES + -(-payload // _FRAME_ALIGNMENT) * _FRAME_ALIGNMENT


def make_log_plan(config: ModelConfig, run: PlanRun) -> LogPlan:
    """Compute what the token log of a replica takes; the few records of a request's beginning and end are left out."""
    rows = run.engine.sequences
    expert_bytes = 1 if config.n_routed_experts <= 256 else 2
    route = config.num_hidden_layers * config.num_experts_per_tok * expert_bytes
    plan = LogPlan(
        bytes_per_token=step_bytes(rows) / rows,
        route_bytes_per_token=route + 4 + 8 / rows if run.wal.routes else 0.0,
        kept_bytes_per_token=4 + 4 * run.wal.kept_tokens if run.wal.kept_tokens else 0.0,
        tokens_per_s=rows * run.engine.steps_per_s,
        sequence_bytes=0,
    )
    return msgspec.structs.replace(plan, sequence_bytes=round(context_of(config, run.engine) * plan.total_per_token))


def make_hidden_plan(config: ModelConfig, run: PlanRun) -> HiddenPlan:
    """Compute what the hidden states of all teachers take, whose width is taken as the student's."""
    per_token = _BF16_BYTES * config.hidden_size * run.teachers
    tokens_per_s = run.num_replicas * run.engine.sequences * run.engine.steps_per_s
    return HiddenPlan(
        bytes_per_token=per_token,
        bytes_per_s=per_token * tokens_per_s,
        sequence_bytes=per_token * context_of(config, run.engine),
        head_bytes=_BF16_BYTES * config.vocab_size * config.hidden_size,
    )

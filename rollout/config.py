"""Schema of the rollout side: replicas, batching, durability of the log. Read by `rollout/`; assembled in
`rl/config.py`."""

from typing import Annotated, Literal

import msgspec

from rollforward.rollout.wal_records import WalConfig


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine replicas and their log. No field changes a sampled bit."""

    engines: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Engine replicas, one Ray actor each."""
    max_batch_requests: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Requests that a replica decodes together; the rest wait."""
    prefill_chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] = 2048
    """Prompt tokens of one prefill call."""
    cache_blocks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Blocks of compressed cache entries of a replica. None: enough for max_batch_requests of the longest request. With
    fewer, requests wait and running ones are preempted: their tokens stay, their cache is computed again."""
    prefix_sharing: bool = True
    """Whether whole blocks of equal tokens under one weight version are kept once."""
    threads: Annotated[int, msgspec.Meta(ge=1)] = 2
    """CPU threads of a replica; the learner waits while it computes."""
    max_attempts: Annotated[int, msgspec.Meta(ge=1)] = 3
    """How often a request is begun, the first time included, when damage in the log makes what was sampled useless; one
    that is damaged once more fails as infra."""
    ledger: str | None = None
    """Socket of a ledger that is told of every token that leaves a replica; set by `rollforward drill`."""
    heartbeat_s: Annotated[float, msgspec.Meta(gt=0, le=1e7)] = 2.0
    """How often a replica's process is asked for a sign of life, seconds, while it has something to do."""
    heartbeat_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=1e7)] = 30.0
    """Seconds without a sign of life after which a replica's process is killed and started again from its log. Longer
    than a machine that is only busy keeps it from answering."""
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=1e7)] = 180.0
    """Seconds that a replica's process may take to come up; one that does not counts as lost. Longer where a cluster
    must get a machine first."""
    drain_s: Annotated[float, msgspec.Meta(gt=0, le=1e7)] = 25.0
    """Seconds that a replica takes at most to hand over, on SIGTERM to its process and where a notice names no time of
    its own."""
    kv_save_bytes: Annotated[int, msgspec.Meta(ge=0)] = 8 << 30
    """Bytes of key-values that a replica saves at most, beside its log, when it hands over: what its successor need not
    prefill. The longest requests come first. Leave the disk room for the token log; 0 saves none."""
    max_restarts: Annotated[int, msgspec.Meta(ge=0)] = 3
    """How often a replica is started again under one weight version, so within a step; at one loss more the run ends,
    and `rollforward resume` goes on. Replicas that were told to go elsewhere do not count."""
    bias_alarm_z: Annotated[float, msgspec.Meta(gt=0)] = 4.0
    """Standard deviations between the mean length of the responses trained on and the one that all attempts, unfinished
    ones too, tell of, beyond which a run warns of a length bias."""
    max_infra_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """Share of a step's completions that the platform may fail, sampling and judging taken together; of more the run
    ends with the first cause, its state kept, because what is left says little about the policy."""
    agent_loop: Literal["replica", "actors"] = "replica"
    """Who runs the calls of completions that keep a sandbox: their replica, or actors of their own that need no GPU and
    outlast replicas."""
    agent_actors: Annotated[int, msgspec.Meta(ge=1)] = 1
    """(`actors`) How many; completions are shared out among them."""
    agent_resources: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}
    """(`actors`) What a node must have for each, in Ray's names."""
    wal: WalConfig = WalConfig()
    """The token log: what a published token survives, and sizes."""

    def __post_init__(self) -> None:
        """Refuse a timeout that no answer could keep."""
        if self.heartbeat_timeout_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"rollout.heartbeat_timeout_s is {self.heartbeat_timeout_s:g} with heartbeat_s {self.heartbeat_s:g}; a"
                f" replica must be asked twice before it is given up. Set it to {2 * self.heartbeat_s:g} at least"
            )

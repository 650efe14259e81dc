"""Schema of the rollout side: replicas, batching, durability of the log. Read by `rollout/`; assembled in
`rl/config.py`."""

from typing import Annotated

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
    threads: Annotated[int, msgspec.Meta(ge=1)] = 2
    """CPU threads of a replica; the learner waits while it computes."""
    max_attempts: Annotated[int, msgspec.Meta(ge=1)] = 3
    """How often a request is begun, the first time included, when damage in the log makes what was sampled useless; one
    that is damaged once more fails as infra."""
    wal: WalConfig = WalConfig()
    """The token log: what a published token survives, and sizes."""

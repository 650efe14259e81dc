"""Preemption: the key-values of unfinished sequences are saved, so that whoever goes on need not prefill.

Every token is in the log already; nothing here decides whether one is kept. What is saved is named in the log when it
is durable, and used by resume.py.

Here: which sequences are worth a file, in which order. Not here: files (kv_store.py), stopping (local.py).
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

from torch import Tensor

from rollforward.model.config import ModelConfig
from rollforward.rollout.engine.kv_file import WeightsId
from rollforward.rollout.engine.kv_store import KvStore, export_sequence
from rollforward.rollout.engine.sequence import Sequence
from rollforward.rollout.wal import WalWriter


def save_sequences(
    store: KvStore,
    sequences: SequenceOf[Sequence],
    storage: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    log: WalWriter,
    weights: WeightsId,
    has_time: Callable[[], bool] = lambda: True,
) -> int:
    """Save the key-values of unfinished sequences and append KV_SAVED for each; return how many.

    Args:
        store: the replica's.
        sequences: with slots; those without cached tokens and those that are over are left out.
        storage: the cache.
        config: the model.
        log: open, on the slots of the sequences.
        weights: which computed the cache.
        has_time: asked before each; False ends it (a drain has a deadline, and the log is safe without).

    Raises:
        WalWriteError, WalFencedError, WalStalledError: the log failed.

    Invariants: the longest first, which saves the most prefill per byte. A disk that refuses and a full budget cost
    the state, never an error.
    """
    num_saved = 0
    for sequence in sorted(filter(_is_worth_saving, sequences), key=lambda one: one.num_cached, reverse=True):
        if not has_time():
            break
        manifest = store.save(
            sequence.request.id,
            sequence.attempt,
            num_cached=sequence.num_cached,
            weights=weights,
            token_ids=sequence.token_ids,
            planes=export_sequence(storage, sequence.slot, sequence.blocks, sequence.num_cached, config),
        )
        if manifest is not None:
            log.append_kv_saved(sequence.log_slot, manifest=manifest, fingerprint=store.fingerprint)
            num_saved += 1
    return num_saved


def _is_worth_saving(sequence: Sequence) -> bool:
    """Whether a later process may use its cache: it is not over, and the log has the routes of what is cached."""
    if sequence.stop_reason is not None or sequence.slot < 0 or sequence.num_cached == 0:
        return False
    return sequence.routes is None or sequence.num_cached <= _logged_routes(sequence)


def _logged_routes(sequence: Sequence) -> int:
    """Return the positions whose routes the log has: those before the newest sampled token."""
    if sequence.num_sampled == 0:
        return 0
    return (len(sequence.token_ids) if sequence.turn_ids.size else sequence.observed[-1][0]) - 1

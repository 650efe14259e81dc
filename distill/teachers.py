"""Teachers in memory, one in use and one that is being loaded, and what they say of the student's tokens.

    shelf   use(A, then=B): A is there, B is read by a thread --> use(B, then=C): A is let go, B is there, C is read
    scorer  tokens --A's trunk, gathered layer by layer--> hidden vectors --A's head--> log-probs of the tokens

A trunk is used for the passes of one teacher over a step's micro-batches, a head also by the losses, so each has a
shelf of its own. Here: who is in memory. Not here: how a teacher is read (teacher_weights.py), where its vectors are
kept (hidden_cache.py).

Letters: R scored rows of a micro-batch, V vocabulary, E width of the teacher.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rollforward.distill.teacher_source import TeacherSource
from rollforward.distill.teacher_weights import ShardedTeacher, read_head
from rollforward.kernels.loss.linear_logprob import linear_logprob
from rollforward.model.collectives import RankGroups
from rollforward.model.scoring import ScoringBatch, scored_rows, target_hidden
from rollforward.model.train_config import Precision
from rollforward.model.transformer import Transformer
from rollforward.model.weights import ModelWeights

T = TypeVar("T")


class _Loading(Generic[T]):
    """Something that a thread loads."""

    def __init__(self, name: str, load: Callable[[threading.Event], T]) -> None:
        """Start; ``load`` returns early, with whatever it has, once the event is set."""
        self.name = name
        self._until = threading.Event()
        self._found: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(load,), name=f"load {name}", daemon=True)
        self._thread.start()

    def _run(self, load: Callable[[threading.Event], T]) -> None:
        try:
            self._found = load(self._until)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error

    def wait(self) -> T:
        """Return what was loaded, or raise what the thread raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        found, self._found = self._found, None
        assert found is not None, "loaded is taken once"
        return found

    def abandon(self) -> T | None:
        """Stop early, and return what there is to be let go."""
        self._until.set()
        self._thread.join()
        found, self._found = self._found, None
        return found


class _Shelf(Generic[T]):
    """At most one teacher's thing in use and one being loaded. One thread uses it; loading has another.

    Whoever got something from ``use`` lets go of it before the next call that names another teacher.
    """

    def __init__(self, sources: Mapping[str, TeacherSource]) -> None:
        """Load nothing yet."""
        self._sources = dict(sources)
        self._in_use: tuple[str, T] | None = None
        self._loading: _Loading[T] | None = None
        self._loads = self._held_max = 0
        self._loaded: list[weakref.ref[object]] = []

    @property
    def loads(self) -> int:
        """How many were loaded, or begun to be."""
        return self._loads

    @property
    def held_max(self) -> int:
        """Most that were in memory or being loaded at one time. More than 2 says that somebody keeps what he should
        have let go of."""
        return self._held_max

    def use(self, name: str, then: str | None) -> T:
        """Return a teacher's, which the one before has to make room for, and begin to load another.

        Args:
            name: of a teacher; what is in use or being loaded already is not loaded again.
            then: the teacher that is to be loaded meanwhile; None, or ``name`` itself, begins nothing.

        Raises:
            TeacherReadError: it could not be loaded; names the teacher. The next call tries again.
        """
        if self._in_use is None or self._in_use[0] != name:
            self._release()
            loading = self._begin(name)
            self._loading = None
            self._in_use = name, loading.wait()
        if then not in (None, name):
            self._begin(then)
        return self._in_use[1]

    def clear(self) -> None:
        """Let go of everything; a load that is under way is given up. May be used again."""
        self._release()
        self._abandon()

    def close(self) -> None:
        """Let go of everything, at the end."""
        self.clear()

    def _load(self, source: TeacherSource, until: threading.Event) -> T:
        raise NotImplementedError

    def _memory(self, held: T) -> object:
        """What exists as long as its memory is not free."""
        raise NotImplementedError

    def _let_go(self, held: T) -> None:
        """What has to be done when one is no longer held."""

    def _begin(self, name: str) -> _Loading[T]:
        """The load of a teacher, which may be under way."""
        if self._loading is None or self._loading.name != name:
            self._abandon()
            self._loaded = [one for one in self._loaded if one() is not None]
            self._held_max = max(self._held_max, len(self._loaded) + 1)
            self._loads += 1
            self._loading = _Loading(name, lambda until: self._noted(self._load(self._sources[name], until)))
        return self._loading

    def _noted(self, held: T) -> T:
        self._loaded.append(weakref.ref(self._memory(held)))
        return held

    def _release(self) -> None:
        if self._in_use is not None:
            (_, held), self._in_use = self._in_use, None
            self._let_go(held)

    def _abandon(self) -> None:
        loading, self._loading = self._loading, None
        found = None if loading is None else loading.abandon()
        if found is not None:
            self._let_go(found)


class TeacherShelf(_Shelf[ShardedTeacher]):
    """Trunks: mapped, this rank's share read and checked once before it is used."""

    def __init__(self, sources: Mapping[str, TeacherSource], groups: RankGroups, *, precision: Precision) -> None:
        """Load nothing yet.

        Args:
            sources: teachers by name. groups: all ranks; each has a shelf and uses the same teachers in the same order.
            precision: of the forward.
        """
        super().__init__(sources)
        self._groups = groups
        self._precision: Precision = precision

    def _load(self, source: TeacherSource, until: threading.Event) -> ShardedTeacher:
        teacher = ShardedTeacher(source, self._groups, precision=self._precision)
        try:
            teacher.prefetch(until)
        except BaseException:
            teacher.close()
            raise
        return teacher

    def _memory(self, held: ShardedTeacher) -> object:
        return held

    def _let_go(self, held: ShardedTeacher) -> None:
        held.close()


class HeadShelf(_Shelf[Tensor]):
    """Heads: [V, E] float32, whole on every rank, in memory of their own."""

    def __init__(self, sources: Mapping[str, TeacherSource], *, precision: Precision) -> None:
        """Load nothing yet.

        Args:
            sources: teachers by name. precision: of the forward.
        """
        super().__init__(sources)
        self._precision: Precision = precision

    def _load(self, source: TeacherSource, until: threading.Event) -> Tensor:
        return read_head(source, precision=self._precision, until=until)

    def _memory(self, held: Tensor) -> object:
        return held.untyped_storage()  # which views share


class TeacherScorer:
    """What teachers say of tokens that the student sampled. Every rank has one; ``score`` is collective."""

    def __init__(self, trunks: TeacherShelf, heads: HeadShelf, *, precision: Precision) -> None:
        """Bind the shelves, which have the same teachers.

        Args:
            trunks, heads: of ``precision``.
            precision: of the forward.
        """
        self._trunks, self._heads = trunks, heads
        self._precision: Precision = precision

    def score(
        self, teacher: str, then: str | None, batches: Sequence[ScoringBatch | None]
    ) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Forward micro-batches through a teacher, one at a time as they are asked for.

        The experts are the teacher's own choice, whatever routes a batch has, and its distribution is over the whole
        vocabulary at temperature 1, whatever set a token was drawn from.

        Args:
            teacher: by name. then: the teacher that is scored next, which is loaded meanwhile.
            batches: of this rank, as many on every rank; None is a pass in which it has nothing to compute.

        Yields:
            For each batch hidden_RE, float32, of which in native precision every value is a BF16 number, and
            teacher_logprobs_R, float32, the log-probs of the targets; None for None.

        Raises:
            TeacherReadError: names the teacher. RankLostError: another rank died.

        Invariants: bits do not depend on ranks, packing or the other rows.
        """
        trunk, head_VE = self._trunks.use(teacher, then), self._heads.use(teacher, then)
        transformer, weights = Transformer(trunk.config, self._precision), trunk.weights()
        for batch in batches:
            if batch is None:
                trunk.skip_pass()
                yield None
            else:
                yield _scored(transformer, weights, head_VE, batch)


@torch.no_grad()
def _scored(
    transformer: Transformer, weights: ModelWeights, head_VE: Tensor, batch: ScoringBatch
) -> tuple[Tensor, Tensor]:
    hidden_RE = target_hidden(transformer, weights, replace(batch, routes_TLK=None))
    logprobs_R, _ = linear_logprob(hidden_RE, head_VE, batch.target_ids_T[scored_rows(batch)], temperature=1.0)
    return hidden_RE, logprobs_R

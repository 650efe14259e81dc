"""Text to token ids and back: a byte-level BPE whose control tokens can never be typed by a user.

Here: the `Tokenizer` machine (immutable after loading), its training, and the list of control tokens. Not here: how a
conversation becomes text (`model/encoding.py`).

A `tokenizer.json` holds ordinary entries (bytes and merges) and added entries (control tokens). `Tokenizer.encode`
reads text with the added entries switched off, so a user who writes a control token's spelling gets the bytes of that
spelling. Control ids enter a sequence through `Tokenizer.control_id` alone. The official DeepSeek-V4 file needs this:
it does not flag ids 128800 to 128845 as special, so an ordinary encoder turns them into control ids wherever they
stand.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from rollforward.model.errors import TokenizerError

BOS: Final = "<｜begin▁of▁sentence｜>"
"""Opens every sequence; id 0."""
EOS: Final = "<｜end▁of▁sentence｜>"
"""Closes every assistant turn; id 1."""
PAD: Final = "<｜▁pad▁｜>"
"""Fills unused positions; id 2."""
USER: Final = "<｜User｜>"
"""Opens a user turn."""
ASSISTANT: Final = "<｜Assistant｜>"
"""Opens an assistant turn; `THINK` or `END_THINK` follows."""
THINK: Final = "<think>"
"""Opens the reasoning of a turn."""
END_THINK: Final = "</think>"
"""Closes the reasoning of a turn; directly after `ASSISTANT` it says that there is none."""
DSML: Final = "｜DSML｜"
"""Marks each tag of a tool call."""

CONTROL_TOKENS: Final[tuple[str, ...]] = (
    BOS,
    EOS,
    PAD,
    USER,
    ASSISTANT,
    THINK,
    END_THINK,
    DSML,
    "<｜System｜>",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
)
"""DeepSeek-V4's control tokens in their official spellings; a trained tokenizer gives them the ids 0, 1, 2, ... in this
order.
"""

REQUIRED_CONTROL_TOKENS: Final[tuple[str, ...]] = CONTROL_TOKENS[:8]
"""The control tokens without which no conversation can be rendered."""

_WORDS: Final = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a tokenizer is trained. The defaults suit a model of about a million parameters and a handful of tasks."""

    vocab_size: Annotated[int, msgspec.Meta(ge=320, le=131072)] = 512
    """Most entries, control tokens included. Fewer are used when the texts hold fewer merges; see `size_multiple`."""
    size_multiple: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    """The vocabulary is filled with placeholders up to a multiple of this, so that rows of logits fill whole tiles."""
    digit_run: Annotated[int, msgspec.Meta(ge=1, le=3)] = 1
    """Most digits in one token. DeepSeek-V4 takes 3; one digit a token is what a tiny model learns arithmetic from:
    with 3 it meets a thousand unrelated symbols, most of them a handful of times.
    """
    split: Literal["words", "phrases"] = "phrases"
    """Where merges stop. `words`: at word boundaries, as in DeepSeek-V4. `phrases`: at digits only, so that a task's
    fixed wording becomes a few tokens; right when the texts are few and short.
    """
    num_conversations: Annotated[int, msgspec.Meta(ge=1)] = 2000
    """Rendered conversations of each task to train on."""

    def __post_init__(self) -> None:
        """Refuse a vocabulary that padding would push over its own limit."""
        if self.vocab_size % self.size_multiple:
            raise TokenizerError(
                f"tokenizer.vocab_size is {self.vocab_size}; it must be a multiple of tokenizer.size_multiple = "
                f"{self.size_multiple}, because "
                "placeholders fill it up to one. Use "
                f"{self.vocab_size // self.size_multiple * self.size_multiple or self.size_multiple}."
            )


class Tokenizer:
    """A loaded `tokenizer.json`. Immutable, safe to share between threads, the same ids in every process.

    Args:
        serialized: the text of a `tokenizer.json` with byte-level BPE.

    Raises:
        TokenizerError: the text is no such tokenizer, or a control token that conversations need is missing.
    """

    def __init__(self, serialized: str) -> None:
        """Build the two encoders: the whole vocabulary for decoding, the one without added entries for text."""
        try:
            self._whole = tokenizers.Tokenizer.from_str(serialized)
            plain = json.loads(serialized)
            added = plain["added_tokens"]
            plain.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain, ensure_ascii=False))
            self._control_ids: dict[str, int] = {entry["content"]: entry["id"] for entry in added}
            self._spellings = {id_: spelling for spelling, id_ in self._control_ids.items()}
        except Exception as error:  # the tokenizers library raises bare Exception
            raise TokenizerError(
                f"tokenizer.json cannot be read ({error}); it must be a byte-level BPE saved by the tokenizers library."
            ) from error
        missing = [token for token in REQUIRED_CONTROL_TOKENS if token not in self._control_ids]
        if missing:
            raise TokenizerError(
                f"tokenizer.json lacks the control tokens {', '.join(missing)}; conversations of DeepSeek-V4 need "
                "them as added tokens. "
                "Train the tokenizer with rollforward, or take the file that belongs to the checkpoint."
            )
        self._serialized = serialized

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read `path`, a `tokenizer.json` or the folder that holds one.

        Raises:
            TokenizerError: there is no such file, or `Tokenizer` refuses it.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(
                f"{file}: the tokenizer cannot be read ({error}). Give a tokenizer.json or the folder that holds one."
            ) from error

    def save(self, path: Path) -> None:
        """Write `tokenizer.json` into the folder `path`, byte for byte what was loaded or trained."""
        (path / "tokenizer.json").write_text(self._serialized, encoding="utf-8")

    @property
    def serialized(self) -> str:
        """The text of the `tokenizer.json`, byte for byte what was loaded or trained."""
        return self._serialized

    @property
    def vocab_size(self) -> int:
        """Number of rows that an embedding needs: the largest id plus one."""
        return max(self._whole.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def bos_id(self) -> int:
        """Id of `BOS`."""
        return self._control_ids[BOS]

    @property
    def eos_id(self) -> int:
        """Id of `EOS`."""
        return self._control_ids[EOS]

    @property
    def pad_id(self) -> int:
        """Id of `PAD`."""
        return self._control_ids[PAD]

    def control_id(self, spelling: str) -> int:
        """The id of the control token written `spelling`.

        Raises:
            TokenizerError: this tokenizer has no such control token.
        """
        if spelling not in self._control_ids:
            raise TokenizerError(
                f"{spelling!r} is no control token of this tokenizer; it has {', '.join(list(self._control_ids)[:20])}."
            )
        return self._control_ids[spelling]

    def encode(self, text: str) -> list[int]:
        """The ids of `text` as plain text: never a control id, whatever the text spells.

        Raises:
            TokenizerError: `text` holds a lone surrogate, which no UTF-8 text can.

        Invariants: deterministic; `decode(encode(text)) == text`.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"character {error.start} of the text is a lone surrogate; text must be valid Unicode. Decode its "
                "source again."
            ) from error
        return self._plain.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`; control tokens by their spelling, bytes that are no UTF-8 as U+FFFD. Ids beyond the
        vocabulary give nothing.
        """
        return self._whole.decode(token_ids, skip_special_tokens=False)

    def decode_pieces(self, token_ids: Sequence[int]) -> list[tuple[str, bool]]:
        """The text of `token_ids` in order, cut at control tokens: each text with whether it is one control token, by
        its spelling. Otherwise as `decode`.
        """
        pieces: list[tuple[str, bool]] = []
        for spelling, group in itertools.groupby(token_ids, self._spellings.get):
            ids = list(group)
            pieces += [(self.decode(ids), False)] if spelling is None else [(spelling, True)] * len(ids)
        return pieces


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """Train a byte-level BPE on plain texts, without a control token among them.

    Ids are control tokens first, then the 256 bytes, then merges by falling frequency, then placeholders up to a
    multiple of `config.size_multiple`.

    Args:
        texts: the text between control tokens of rendered conversations (`ChatEncoding.plain_texts`).
        config: sizes and rules.

    Returns:
        A tokenizer of at most `config.vocab_size` entries.

    Invariants: deterministic for the same sequence of texts, in any process.
    Source: pre-tokenisation after the official tokenizer of DeepSeek-V4 (runs of digits isolated, then words, then
    bytes).
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(rf"\p{{N}}{{1,{config.digit_run}}}"), behavior="isolated")
    ]
    if config.split == "words":
        steps.append(pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue] - the stub lists no setter
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    num_placeholders = -tokenizer.get_vocab_size() % config.size_multiple
    tokenizer.add_special_tokens(
        [
            AddedToken(f"<｜place▁holder▁no▁{index}｜>", special=True, normalized=False)
            for index in range(num_placeholders)
        ]
    )
    return Tokenizer(tokenizer.to_str(pretty=False))

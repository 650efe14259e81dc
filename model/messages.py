"""Records of a conversation, as tasks write them and `model/encoding.py` renders them."""

from typing import Literal

import msgspec

ReasoningEffort = Literal["non-think", "low", "high", "max"]
"""How long the model may reason before it answers. `non-think` is DeepSeek's chat mode; the others choose the text that
opens the prompt.
"""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    """Who speaks."""
    content: str
    """What is said; plain text, in which the spelling of a control token is text as well."""
    reasoning: str = ""
    """What an assistant thought before `content`; rendered only where the effort and the rules of retention let it be.
    """

    def __post_init__(self) -> None:
        """Refuse reasoning by anyone but the assistant."""
        if self.reasoning and self.role != "assistant":
            raise ValueError(
                f"a message of role {self.role!r} carries reasoning; only an assistant reasons. Move it into content "
                "or drop it."
            )

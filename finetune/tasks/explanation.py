"""The words of a text, and how a prediction changes without each of them."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import chain
from typing import Any, Self

from finetune.files import escape_controls

# Chinese and Japanese don't use spaces, so each letter is a word. So is each emoji.
WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|[\U0001f000-\U0001faff\u2600-\u27bf]"
    r"|[^\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+(?:['\u2019.@-]\w+)*"
)
# Smaller changes of a probability are not marked.
MIN_MARKED = 0.05
# As text, an explanation lists only changes of at least this fraction of the largest change.
MIN_NOTABLE = 0.05
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class WordChange:
    """How the probability of a class, or a regression value, changes if a word is left out.

    ``label`` is the class in multi-label data, ``column`` the text of a sentence pair.
    """

    word: str
    change: float
    label: str | None = None
    column: str | None = None

    def __str__(self) -> str:
        """Format the word and its change, such as ``invoice -0.52``."""
        return f"{self.label + ': ' if self.label else ''}{self.word} {self.change:+.2g}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields that the task uses."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Explanation(list[WordChange]):
    """The words of a text or pair, the largest fall first."""

    text = ""

    @classmethod
    def of(cls, text: str, changes: Iterable[WordChange]) -> Self:
        """Create the explanation of a text."""
        explanation = cls(changes)
        explanation.text = text
        return explanation

    def _repr_html_(self) -> str:
        words = ", ".join(map(str, self))
        marked = MarkedText.of(self.text, [change.to_json() for change in self])
        return f"<p>{marked.__html__()}</p><p>{escape(words)}</p>"


def find_words(text: str) -> dict[str, Spans]:
    """Return the positions of each word, by lowercase word.

    >>> find_words("To be, or not to be?")
    {'to': [(0, 2), (14, 16)], 'be': [(3, 5), (17, 19)], 'or': [(7, 9)], 'not': [(10, 13)]}
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    for match in WORD.finditer(text):
        spans.setdefault(match[0].casefold(), []).append(match.span())
    return dict(spans)


def leave_out(text: str, spans: Spans) -> str:
    """Remove parts of a text, each with an adjacent space.

    >>> leave_out("Pay the invoice now", [(8, 15)]), leave_out("Pay now", [(0, 3)])
    ('Pay the now', 'now')
    """
    parts, end = list[str](), 0
    for first, last in spans:
        kept = text[end:first]
        has_space = (kept or "".join(parts)).endswith(" ") or first == 0
        parts.append(kept)
        end = last + 1 if has_space and text[last : last + 1] == " " else last
    return "".join([*parts, text[end:]])


def decisive(changes: Iterable[WordChange]) -> set[str]:
    """Return the lowercase words without which the probability falls notably."""
    return {each.word.casefold() for each in changes if each.change <= -MIN_MARKED}


def split_at_words(text: str, words: Collection[str]) -> list[tuple[str, bool]]:
    """Split a text into pieces, each with a flag for whether it is one of the words."""
    found = find_words(text)
    spans = sorted(chain.from_iterable(found[word] for word in found.keys() & {*words}))
    pieces, end = list[tuple[str, bool]](), 0
    for first, last in spans:
        pieces += [(text[end:first], False), (text[first:last], True)]
        end = last
    return [*filter(lambda piece: piece[0], [*pieces, (text[end:], False)])]


class MarkedText(str):
    """A text whose decisive words are highlighted on pages."""

    words: Collection[str] = ()

    @classmethod
    def of(cls, text: str, changes: Sequence[Mapping[str, Any]]) -> Self:
        """Create a text with the JSON of its explanation."""
        marked = cls(text)
        marked.words = decisive(WordChange(**change) for change in changes)
        return marked

    def __html__(self) -> str:
        return "".join(
            f"<mark>{escape(escape_controls(part))}</mark>" if is_word
            else escape(escape_controls(part))
            for part, is_word in split_at_words(self, self.words)
        )  # fmt: skip


def notable(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the words of a JSON explanation as text, without tiny changes."""
    changes = [WordChange(**row) for row in rows]
    least = MIN_NOTABLE * max((abs(change.change) for change in changes), default=0.0)
    return [str(change) for change in changes if abs(change.change) >= least]

"""The number that a solution gives as its answer, taken from its text. Standard library only.

Three readings, each returning a Decimal or None (no number is no answer):

* `strict_answer`: the number after the LAST `####`, on the same line. Money signs, bold, quotes,
  `\\boxed{}` and `%` around it do not matter, nor does any text that follows it.
* `boxed_answer`: the same for the last `\\boxed{...}`.
* `lenient_answer`: the strict answer where there is one, otherwise the last number of the text.

Only the last marker counts, or a model would learn to hedge with several. A number that is glued to
more (`7:30`, `10-7`, `3/4`, `1e3`, `1,2,3`) is another thing than its first digits: such an answer
reads as None, never as a part of itself. Values are Decimals and compare exactly: 18.00 is 18, and
no two different numbers are equal.

Every reading takes time linear in the text: the patterns below cannot backtrack (possessive
quantifiers) or start over at each character.
"""

import re
from decimal import Decimal

MARKER = "####"
BOX = r"\boxed{"

_SPACE = r"[^\S\r\n]"
_SIGN = r"[-+\u2212\u2010\u2011\ufe63\uff0d]"
_MONEY_OR_MARKUP = r"\\boxed\{|\\text\{|\\[$(\[]|[$€£¥*_`\"'(\[{]"
_ATOM = r"\.?[0-9][0-9.,:]*+(?:[eE][-+]?[0-9]++)?+"
_AFTER_MARKER = re.compile(
    rf"(?:{_MONEY_OR_MARKUP}|{_SPACE})*+(?P<sign>{_SIGN})?+(?:{_MONEY_OR_MARKUP})*+(?P<atom>{_ATOM})"
)
# What makes the digits before it only the start of an expression, a range, a mixed fraction or a
# number whose thousands are set apart by other than commas.
_CONTINUES = re.compile(
    r"[-+*/^:x×·'_\u2212\u2010-\u2013][0-9]|[½⅓⅔¼¾]|\\,|\{,\}|\\(?:[dt]?frac|times|cdot|div)"
    r"| [0-9]{1,9}/[0-9]"
)
_ANYWHERE = re.compile(_ATOM)
_DIGITS = re.compile(r"(?:[0-9]++|[0-9]{1,3}(?:,[0-9]{3})++)?(?:\.[0-9]++)?")
_TRAILING_MARKUP = re.compile(rf"(?:[$*_`\"')\]}}%.,:]|\\[)\]%$]|{_SPACE}|[\r\n])*+")
_MINUS_SIGNS = frozenset("-\u2212\u2010\u2011\ufe63\uff0d")


def strict_answer(text: str) -> Decimal | None:
    """The number right after the last `####` of `text`, or None.

    >>> strict_answer("6 x 3 = 18, so #### $1,800.00 (a year)")
    Decimal('1800.00')
    >>> strict_answer("#### 18, or rather #### unknown") is None
    True
    """
    return _number_after(text, MARKER)


def boxed_answer(text: str) -> Decimal | None:
    r"""The number that opens the last `\boxed{...}` of `text`, or None."""
    return _number_after(text, BOX)


def lenient_answer(text: str) -> Decimal | None:
    """The strict answer if `text` has one, otherwise the last number in it, or None.

    A minus belongs to that number unless something stands before it that it can subtract from:
    `is -7` is -7, `10-7` is not.
    """
    answer = strict_answer(text)
    return answer if answer is not None else _last_number(text)


def gold_number(answer: str) -> Decimal | None:
    """The number of a gold answer: the strict one of a text with `####`, else the bare number."""
    if MARKER in answer:
        return strict_answer(answer)
    found = _AFTER_MARKER.match(answer.strip())
    if not found or not _TRAILING_MARKUP.fullmatch(answer.strip(), found.end()):
        return None
    return _signed(found["sign"], _value(found["atom"]))


def _number_after(text: str, marker: str) -> Decimal | None:
    at = text.rfind(marker)
    if at < 0:
        return None
    found = _AFTER_MARKER.match(text, at + len(marker))
    if not found or _CONTINUES.match(text, found.end()):
        return None
    return _signed(found["sign"], _value(found["atom"]))


def _last_number(text: str) -> Decimal | None:
    last = None
    for found in _ANYWHERE.finditer(text):
        if _digits_of(found[0]) is not None:
            last = found
    if last is None:
        return None
    return _signed(_sign_before(text, last.start()), _value(last[0]))


def _sign_before(text: str, at: int) -> str | None:
    while at and text[at - 1] in "$€£¥":
        at -= 1
    if not at or text[at - 1] not in _MINUS_SIGNS:
        return None
    before = text[max(0, at - 64) : at - 1].rstrip()[-1:]
    subtracts = before.isnumeric() or before in list(")]}%")
    hyphen = text[at - 2 : at - 1].isalpha()
    return None if subtracts or hyphen else "-"


def _digits_of(atom: str) -> str | None:
    digits = atom.rstrip(".,:")
    return digits if _DIGITS.fullmatch(digits) else None


def _value(atom: str) -> Decimal | None:
    digits = _digits_of(atom)
    return None if digits is None else Decimal(digits.replace(",", ""))


def _signed(sign: str | None, value: Decimal | None) -> Decimal | None:
    # copy_negate, as unary minus rounds to the precision of the decimal context.
    return value.copy_negate() if value is not None and sign in _MINUS_SIGNS else value

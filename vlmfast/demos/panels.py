"""Format answers for the page: texts and counters."""

from __future__ import annotations

import html
from typing import Any

from vlmfast.engine.stats import Stats

from .talk import FULL, RECIPE, RESTORED, Conversation, Turn

AGAIN = "Looked again at full detail: "
EMPTY = '<p class="answer none">–</p>'
_NONE = "–"


def answer_html(talk: Conversation | None, side: str, title: str) -> str:
    """One side of a conversation: the last answer, and the earlier ones below it."""
    turns = [] if talk is None else list(talk.turns)
    if talk is not None and talk.current is not None and talk.current not in turns:
        turns.append(talk.current)
    last = _texts(turns[-1], side) if turns else []
    shown = "".join(f'<p class="answer">{html.escape(text)}</p>' for text in last)
    earlier = "".join(
        f"<li><span>{html.escape(turn.question)}</span> "
        f"<strong>{html.escape(' / '.join(_texts(turn, side)))}</strong></li>"
        for turn in turns[-2::-1]
    )
    if earlier:
        earlier = (
            f"<details><summary>Earlier ({len(turns) - 1})</summary><ul>{earlier}</ul></details>"
        )
    return f"<h2>{html.escape(title)}</h2>{shown or EMPTY}{earlier}"


def _texts(turn: Turn, side: str) -> list[str]:
    texts = [turn.texts[side] or "…"] if side in turn.texts else []
    if side == RECIPE and RESTORED in turn.texts:
        texts.append(AGAIN + (turn.texts[RESTORED] or "…"))
    return texts


def counters(turn: Turn | None) -> list[tuple[str, str, str]]:
    """Rows (counter, full model, recipe) with the cost of a turn, without those that are empty."""
    full = None if turn is None else turn.answers.get(FULL)
    shown = None if turn is None else turn.shown
    agree = None if turn is None else turn.agreement
    rows = [(what, text_of(full), text_of(shown)) for what, text_of in _COUNTED.items()]
    rows.append(("Agreement with the full model", _NONE, _per(agree)))
    return [row for row in rows if row[1:] != (_NONE, _NONE)]


def headline(turn: Turn) -> str:
    """What the recipe saved in a turn, from the rounded numbers of the table."""
    assert turn.shown is not None  # the turn is complete
    full, shown = turn.answers[FULL].stats, turn.shown.stats
    parts = [
        _ratio(
            round(full.equivalent_tokens, 1),
            round(shown.equivalent_tokens, 1),
            ("fewer visual tokens", "more visual tokens", "as many visual tokens"),
        ),
        _ratio(
            round(full.ttft_s * 1e3, 1),
            round(shown.ttft_s * 1e3, 1),
            ("faster first token", "slower first token", "first token as fast"),
        ),
    ]
    if shown.kv_bytes_full:
        parts.append(f"{_per(shown.kv_bytes / shown.kv_bytes_full)} of the KV cache")
    if shown.drafted and shown.rounds:
        parts.append(_drafts(shown))
    same = turn.agreement == 1
    parts.append("same answer" if same else f"{_per(turn.agreement)} of the answer agrees")
    return " · ".join(parts)


def _ratio(full: float, shown: float, words: tuple[str, str, str]) -> str:
    """``words``: for less, for more and for as much."""
    less, more, equal = words
    if min(full, shown) <= 0 or f"{max(full, shown) / min(full, shown):.1f}" == "1.0":
        return equal
    return f"{full / shown:.1f}× {less}" if full > shown else f"{shown / full:.1f}× {more}"


def table(rows: list[tuple[str, str, str]]) -> str:
    """The counters as HTML."""
    body = "".join(
        f'<tr><th scope="row">{html.escape(what)}</th>'
        f"<td>{html.escape(full)}</td><td>{html.escape(shown)}</td></tr>"
        for what, full, shown in rows
    )
    return (
        '<table class="counters"><caption class="hidden">Cost of the last answers</caption>'
        "<thead><tr>"
        '<th scope="col">Counter</th><th scope="col">Full model</th><th scope="col">Recipe</th>'
        f"</tr></thead><tbody>{body}</tbody></table>"
    )


def about(name: str, url: str) -> str:
    """The line at the top of the page."""
    where = f" at {html.escape(url)}" if url else ""
    return f'<h1 class="about"><b>vlmfast</b> {html.escape(name)}{where}</h1>'


def message(text: str, *, error: bool = False) -> str:
    """A line that screen readers announce."""
    role, kind = ("alert", "note error") if error else ("status", "note")
    return f'<div role="{role}" class="{kind}">{html.escape(text)}</div>'


def progress(text: str) -> str:
    """The status of an answer that is being generated."""
    bar = '<div class="bar" aria-hidden="true"></div>'
    line = f'<p class="headline">{html.escape(text)}</p>'
    return f'<div role="status" class="status busy">{line}{bar}</div>'


def result(turn: Turn) -> str:
    """The status of a complete turn: its headline, and what was asked."""
    assert turn.shown is not None  # the turn is complete
    asked = f"“{turn.question}” Answered with {turn.shown.recipe}; times of one run."
    return (
        f'<div role="status" class="status"><p class="headline">{html.escape(headline(turn))}</p>'
        f"<p>{html.escape(asked)}</p></div>"
    )


# --- counters ------------------------------------------------------------------------------------


def _tokens(stats: Stats) -> str:
    steps = [f"{kept} ({name})" for name, kept in stats.visual_tokens_kept.items()]
    return " → ".join([str(stats.visual_tokens_in), *steps])


def _kv(stats: Stats) -> str:
    share = f" ({_per(stats.kv_bytes / stats.kv_bytes_full)})" if stats.kv_bytes_full else ""
    return f"{stats.kv_bytes / 1e6:.3g} MB{share}"


def _drafts(stats: Stats) -> str:
    if stats.drafted and not stats.rounds:  # a server counts the drafts only
        return f"{stats.accepted} of {stats.drafted}"
    if stats.drafted:
        return f"{stats.mean_accepted:.2f} tokens per forward pass"
    return stats.speculation and f"nothing drafted ({stats.speculation})"


def _reused(stats: Stats) -> str:
    return f"{stats.prompt_reused} of {stats.prompt_reused + stats.prompt_fed}"


def _of(show: Any) -> Any:
    return lambda answer: _NONE if answer is None else show(answer.stats) or _NONE


def _per(fraction: float | None) -> str:
    return _NONE if fraction is None else f"{fraction:.0%}".replace("%", " %")


_COUNTED = {
    "Visual tokens": _of(_tokens),
    "Visual tokens, mean over layers": _of(lambda stats: f"{stats.equivalent_tokens:.1f}"),
    "Time to the first token": _of(lambda stats: f"{stats.ttft_s * 1e3:,.1f} ms"),
    "Tokens per second": _of(lambda s: f"{s.tokens_per_s:.0f}" if s.tokens_per_s else ""),
    "KV cache": _of(_kv),
    "Accepted drafts": _of(_drafts),
    "Prompt tokens reused from the cache": _of(lambda s: _reused(s) if s.prompt_reused else ""),
}

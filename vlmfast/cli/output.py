"""Tables and JSON that the commands print."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vlmfast.core.display import seconds, size, text_table

if TYPE_CHECKING:
    from vlmfast.api.vlm import Answer, Comparison
    from vlmfast.engine.stats import Stats

# Columns of text; all others are aligned to the right.
_TEXTS = ["recipe", "method", "saliency", "note", "answer", "kernel", "check", "result", "cases"]


def answer_json(recipe: str, answer: Answer) -> dict[str, Any]:
    """``recipe`` as it was given: the canonical text omits defaults."""
    return {
        "recipe": recipe,
        "answer": answer.text,
        "token_ids": answer.token_ids,
        "stats": answer.stats.to_dict(),
    }


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str))


def stats_row(recipe: str, stats: Stats) -> dict[str, str]:
    return {
        "recipe": recipe,
        "visual tokens": _tokens(stats.visual_tokens_in, stats.equivalent_tokens),
        "TTFT": seconds(stats.ttft_s),
        "tokens/s": f"{stats.tokens_per_s:.0f}" if stats.tokens_per_s else "-",
        "KV cache": in_bytes(stats.kv_bytes),
        "saliency": stats.saliency or "-",
    }


def _tokens(before: int, kept: float) -> str:
    kept = round(kept, 1)
    kept = int(kept) if kept == int(kept) else kept
    return str(before) if kept == before else f"{before} → {kept}"


def comparison_json(name: str, row: Comparison) -> dict[str, Any]:
    """A refused recipe has no answer and the reason as its ``error``."""
    if row.answer is None:
        return {"recipe": name, "answer": None, "error": row.error}
    return {**answer_json(name, row.answer), "agreement": row.agreement}


def comparison_row(name: str, row: Comparison) -> dict[str, str]:
    """Costs and answer; of a refused recipe, the reason."""
    if row.answer is None:
        columns = ("visual tokens", "TTFT", "tokens/s", "KV cache", "saliency", "agreement")
        reason = " ".join((row.error or "").split())
        return {"recipe": name, **dict.fromkeys(columns, "-"), "answer": f"refused: {reason}"}
    return {
        **stats_row(name, row.answer.stats),
        "agreement": f"{row.agreement:.0%}",
        "answer": " ".join(row.answer.text.split()),
    }


def bench_row(name: str, row: Any, full: Any) -> dict[str, str]:
    def against(text: str, ratio: float) -> str:
        return text if row is full else f"{text} ({ratio:.2f}x)"

    return {
        "recipe": name,
        "visual tokens": _tokens(row.visual_tokens_in, row.visual_tokens),
        "TTFT": against(seconds(row.ttft_s), full.ttft_s / row.ttft_s),
        "media": seconds(row.media_s),
        "tower": against(seconds(row.vision_s), full.vision_s / row.vision_s),
        "stages": seconds(row.stages_s),
        "prefill": against(seconds(row.prefill_s), full.prefill_s / row.prefill_s),
        "tokens/s": against(f"{row.tokens_per_s:.0f}", row.tokens_per_s / full.tokens_per_s),
        "KV cache": in_bytes(row.kv_bytes),
        "peak memory": in_bytes(row.peak_memory_bytes),
        "saliency": row.saliency or "-",
        "agreement": f"{row.agreement:.0%}",
    }


def check_rows(kind: str, rows: list[Any]) -> list[dict[str, str]]:
    """A line for each row, without columns in which no row has an entry."""
    results = {True: "passed", False: "FAILED", None: "not checked"}
    cells = [
        {
            kind: row.name,
            "result": results[row.passed],
            "cases": row.about or "-",
            "error": "-" if row.error is None else f"{row.error:.1%}",
            "time": "-" if row.seconds is None else seconds(row.seconds),
            "bytes": in_bytes(row.bytes),
            "copy rate": "-" if row.share is None else f"{row.share:.0%}",
            "note": row.note or "-",
        }
        for row in rows
    ]
    used = [key for key in cells[0] if any(line[key] != "-" for line in cells)]
    return [{key: line[key] for key in used} for line in cells]


def launch_row(request: Any) -> dict[str, str]:
    """Launches and reads of each part; of blocks and layers the mean."""

    def cell(*costs: Any) -> str:
        if not costs:
            return "-"
        sums = sum(x.launches for x in costs), sum(x.total_reads for x in costs)
        return " / ".join(f"{round(x / len(costs), 1):g}" for x in sums)

    return {
        "recipe": request.recipe,
        "visual tokens": str(request.visual_tokens),
        "attention in the tower": str(sum(cost.attention for cost in request.blocks)),
        "a block of it": cell(*request.blocks),
        "a layer of prefill": cell(*request.layers),
        "first token": cell(request.first_token),
        "decode step": cell(request.step),
    }


def audited(row: Any) -> str:
    return row.drafter if row.recipe == "none" else f"{row.recipe}+{row.drafter}"


def audit_row(row: Any) -> dict[str, str]:
    gaps = [gone.gap for gone in row.divergences if gone.gap is not None]
    return {
        "recipe": audited(row),
        "answers": str(row.prompts),
        "identical": f"{row.identical / row.prompts:.1%}",
        "common prefix": f"{sum(row.prefix) / sum(row.lengths):.1%}",
        "accepted": f"{row.accepted / row.rounds:.2f}" if row.drafted else "-",
        "decoded again": str(row.redecoded),
        "largest gap": f"{max(gaps):.3g} ulp" if gaps else "-",
        "bugs": str(row.bugs),
    }


def divergence(row: Any, gone: Any) -> str:
    where = f"{'BUG' if gone.bug else 'near tie'}: {audited(row)}, prompt {gone.prompt}: token "
    if gone.gap is None:
        return f"{where}{gone.at} ends the {'drafted' if gone.drafted is None else 'plain'} answer"
    return (
        f"{where}{gone.at} is {gone.drafted}, plain {gone.plain}; {gone.gap:.3g} ulp apart in "
        f"float32, {gone.own_gap:.3g} in the model's own type"
    )


def print_table(rows: list[dict[str, str]]) -> None:
    """Print aligned columns: texts to the left, numbers to the right; the last may be long."""
    print(text_table(rows, left=_TEXTS))


def in_bytes(value: float | None) -> str:
    return "-" if value is None else size(value)

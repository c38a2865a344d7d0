"""Texts, scores and logs of `compare_presses.py` and `presses.py`.

Imports neither vlmfast nor kvpress, which need different versions of transformers.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import platform
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

NAMES = ("badger", "crane", "falcon", "gecko", "heron", "jackal", "lemur", "otter", "wolf", "yak")
FOLLOW = 256  # tokens that are read after a prefix
KEEPS = (0.5, 0.2, 0.1)
COST = 0.2  # fraction of the slots that is kept where cost is measured
ROUNDS = 3  # how often cost is measured, all methods in turn
PYRAMID = "pyramidkv:window=64,kernel=5,pool=avg"
VLMFAST, KVPRESS = "vlmfast.jsonl", "kvpress.jsonl"  # logs
ROOM = 256  # tokens for which caches have free slots at first
PREFIXES = (1000, 2000, 4000, 8000)
PLACES = 10  # of texts of each length
BETWEEN = 9  # further places between them; texts of up to 2,000 tokens share none with the others


# --- texts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Token ids of a prefix, which is compressed, and of what is read after it.

    Parameters
    ----------
    ids : list of int
        The prefix, and for a document the text that follows.
    prefix : int
        Length of the prefix.
    questions : list of (list of int, list of int)
        Of passkeys: a question about each, and its answer.
    """

    ids: list[int]
    prefix: int
    questions: tuple[tuple[list[int], list[int]], ...] = ()

    @property
    def digest(self) -> str:
        """Identifies the text in logs and reports."""
        what = [self.ids, *self.questions] if self.questions else self.ids
        return hashlib.sha256(str(what).encode()).hexdigest()[:16]

    @property
    def part(self) -> str:
        """Of the log."""
        return "passkeys" if self.questions else "text"

    def chains(self) -> list[tuple[list[int], int]]:
        """Ids that are read after the prefix, and after how many of the last a token is scored."""
        if self.questions:
            return [([*q, *answer[:-1]], len(answer)) for q, answer in self.questions]
        after = self.ids[self.prefix : -1]
        return [(after, len(after))]


def manual(tokens: Any) -> list[int]:
    """Ids of the Python manual, which every interpreter ships."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return tokens(text, add_special_tokens=False).input_ids


def places(tokens: Any, counts: dict[int, int], follow: int) -> Iterator[tuple[int, list[int]]]:
    """Prefixes, and ids of texts with ``follow`` more, at places that ``counts`` does not move.

    Parameters
    ----------
    counts : dict of int to int
        How many texts of each of `PREFIXES`, at most 19. A text of each comes first.
    """
    most = PLACES + BETWEEN
    for prefix, count in counts.items():
        if prefix not in PREFIXES or not 0 <= count <= most:
            raise SystemExit(
                f"--documents and --passkeys: {prefix}:{count} must be one of "
                f"{', '.join(map(str, PREFIXES))}, and at most {most} texts"
            )
    ids = manual(tokens)
    for number in range(most):
        for at, prefix in enumerate(PREFIXES):
            if number < counts.get(prefix, 0):
                place = 3 * number % PLACES  # any few are spread
                if number >= PLACES:
                    place = 2 * number % BETWEEN + 0.375
                place += (at + 1) / len(PREFIXES)
                end = int(len(ids) * place / PLACES)
                length = prefix + follow - 1
                yield prefix, [tokens.bos_token_id, *ids[end - length : end]]


def read_texts(tokens: Any, counts: dict[int, int], follow: int = FOLLOW) -> list[Text]:
    """Texts of the manual, with ``follow`` tokens to read after the prefix."""
    return [Text(ids, prefix) for prefix, ids in places(tokens, counts, follow)]


def passkey_texts(tokens: Any, counts: dict[int, int]) -> list[Text]:
    """Texts of the manual with ten passkeys at ten depths, and a question about each."""
    found = enumerate(places(tokens, counts, 0))
    return [_with_passkeys(tokens, ids, random.Random(number)) for number, (_, ids) in found]


def _with_passkeys(tokens: Any, ids: list[int], draw: random.Random) -> Text:
    def of(text: str) -> list[int]:
        return tokens(text, add_special_tokens=False).input_ids

    names = draw.sample(NAMES, len(NAMES))
    questions = [
        (of(f"\nThe passkey of the {name} is"), of(f" {draw.randrange(10**4, 10**5)}"))
        for name in names
    ]
    lines = [[*question, *answer, *of(".\n")] for question, answer in questions]
    room = len(ids) - sum(map(len, lines))
    made: list[int] = []
    for number, line in enumerate(lines):
        begin, end = (int(room * max(at, 0) / len(lines)) for at in (number - 0.5, number + 0.5))
        made += [*ids[begin:end], *line]
    made += ids[len(made) - sum(map(len, lines)) : room]
    return Text(made, len(made), tuple(questions))


# --- scores --------------------------------------------------------------------------------------


def compared(full: Tensor, logits: Tensor, ids: Sequence[int]) -> dict[str, float]:
    """Means over the rows (T, V) of a model's logits; ``ids`` are the tokens that follow them.

    Returns
    -------
    dict
        ``kl``, the KL divergence from the full model's distribution; ``top1``, whether both rank
        the same token first; ``nll``, the negative log-likelihood of the text's token.
    """
    rows = []
    for wanted, found, token in zip(full, logits, ids, strict=True):
        p, q = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
        kl = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)
        rows.append((float(kl), float(p.argmax() == q.argmax()), -float(q[token])))
    return dict(zip(("kl", "top1", "nll"), map(fmean, zip(*rows, strict=True)), strict=True))


def scored(text: Text, full: list[Tensor], found: list[Tensor]) -> dict[str, Any]:
    """Scores of the logits before each scored token of `Text.chains`.

    Returns
    -------
    dict
        As of `compared`; of passkeys ``found``, whether each greedy answer is right.
    """
    if not text.questions:
        return compared(full[0], found[0], text.ids[text.prefix :])
    answers = [answer for _, answer in text.questions]
    pairs = zip(found, answers, strict=True)
    return {"found": [logits.argmax(-1).tolist() == answer for logits, answer in pairs]}


@contextmanager
def measured() -> Iterator[dict[str, Any]]:
    """Fills ``wall``, in seconds, ``load``, of the machine, and ``peak``, bytes at most (Linux)."""
    took: dict[str, Any] = {}
    gc.collect()
    with suppress(AttributeError):  # of the GNU C library: returns what is free
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before, start = _memory("VmRSS"), time.perf_counter()
    yield took
    took |= {"wall": time.perf_counter() - start, "load": os.getloadavg()[0]}
    took["peak"] = _memory("VmHWM") - before


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


# --- logs ----------------------------------------------------------------------------------------


class Log:
    """Rows of measurements in a file, one JSON object a line; a second run continues it.

    Parameters
    ----------
    path : Path
    settings : dict
        What all rows have in common, written first.

    Raises
    ------
    SystemExit
        When the file was measured with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            before, self.rows = read_log(path)
            if before != settings:
                raise SystemExit(
                    f"{path} was measured with {before}, not with {settings}; use other --logs"
                )
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a last line that an interrupted run left unfinished.
        lines = [json.dumps(row) + "\n" for row in (settings, *self.rows)]
        path.write_text("".join(lines), encoding="utf-8")
        self._done = {_counted(row) for row in self.rows}

    def missing(self, **key: Any) -> bool:
        """Whether no row has this ``part``, ``prompt``, ``method``, ``keep`` and ``round``."""
        return _counted(key) not in self._done

    def add(self, **row: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        self._done.add(_counted(row))


def _key(row: dict[str, Any]) -> tuple:
    return tuple(row[name] for name in ("part", "prompt", "method", "keep"))


def _counted(row: dict[str, Any]) -> tuple:
    return *_key(row), row.get("round", 0)


def read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Settings and rows of a log, without an unfinished last line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    settings, *rows = (json.loads(line) for line in lines if line.endswith("\n"))
    return settings, rows


def weights(folder: Path) -> str:
    """SHA-256 of the weights in a folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


# --- commands ------------------------------------------------------------------------------------


def counts(text: str) -> dict[int, int]:
    """``1000:8,2000:4``: how many texts of each prefix."""
    return {int(prefix): int(count) for prefix, count in (p.split(":") for p in text.split(","))}


def parser(doc: str) -> argparse.ArgumentParser:
    """The options of both sides."""
    made = argparse.ArgumentParser(description=doc.partition("\n")[0])
    made.add_argument("folder", type=Path, help="a Gemma 3 text model")
    made.add_argument("--documents", type=counts, default="1000:18,2000:14,4000:5,8000:3")
    made.add_argument("--passkeys", type=counts, default="1000:4,2000:4,4000:4,8000:4")
    made.add_argument(
        "--cost", type=int, nargs="*", default=PREFIXES, help="prefixes whose first text is timed"
    )
    made.add_argument("--logs", type=Path, default=Path("runs/presses"), help="of rows so far")
    return made


def settings(args: argparse.Namespace, transformers: str, **more: str) -> dict[str, Any]:
    """What the rows of a log have in common."""
    return {
        "weights": weights(args.folder),
        "dtype": "float32",
        "follow": FOLLOW,
        "threads": 1,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers,
        **more,
    }


class Run:
    """Measures texts and logs what is missing.

    Subclasses have the names of their ``methods``; ``none`` is the full model. What `prefill`
    returns is theirs.
    """

    methods: Sequence[str]

    def __init__(self, log: Log) -> None:
        self.log = log

    def ready(self, text: Text, method: str, keep: float) -> bool:
        """Whether a method can be measured yet."""
        return True

    def prefill(self, text: Text, method: str, keep: float) -> Any:
        """The compressed cache of the prefix, which keeps a share of the slots."""
        raise NotImplementedError

    def size(self, cache: Any) -> tuple[list[int], int]:
        """Slots by layer, and bytes."""
        raise NotImplementedError

    def logits(self, text: Text, cache: Any) -> list[Tensor]:
        """The logits before each scored token, by question."""
        raise NotImplementedError

    def scores(self, text: Text) -> None:
        """Log the scores of all methods on a text."""
        key = {"part": text.part, "prompt": text.digest}
        every = [("none", 1), *((method, keep) for keep in KEEPS for method in self.methods)]
        missing = [of for of in every if self.log.missing(**key, method=of[0], keep=of[1])]
        for method, keep in dict.fromkeys([*every[: bool(missing)], *missing]):
            if not self.ready(text, method, keep):
                continue
            cache = self.prefill(text, method, keep)
            (slots, _), logits = self.size(cache), self.logits(text, cache)
            if method == "none":  # always first
                full = logits
            if (method, keep) in missing:
                about = {**key, "method": method, "keep": keep, "prefix": text.prefix}
                self.log.add(**about, slots=slots, **scored(text, full, logits))

    def cost(self, text: Text) -> None:
        """Log time and memory of a prefill with each method."""
        for turn, method in product(range(ROUNDS), ("none", *self.methods)):
            keep = 1 if method == "none" else COST
            key = {"part": "cost", "prompt": text.digest, "method": method, "keep": keep}
            if not self.log.missing(**key, round=turn) or not self.ready(text, method, keep):
                continue
            with measured() as took:
                cache = self.prefill(text, method, keep)
            slots, held = self.size(cache)
            self.log.add(**key, round=turn, prefix=text.prefix, slots=slots, bytes=held, **took)

    def over(self, tokens: Any, args: argparse.Namespace) -> None:
        """Measure the scores of all texts, and the cost of some."""
        read = read_texts(tokens, args.documents)
        for text in [*read, *passkey_texts(tokens, args.passkeys)]:
            self.scores(text)
            print(f"{self.log.path}: {text.part} {text.prefix} {text.digest}", flush=True)
        first = {text.prefix: text for text in reversed(read)}
        for prefix in args.cost:
            self.cost(first[prefix])


# --- joining -------------------------------------------------------------------------------------

# Methods of both sides that are compared with each other, and whether they keep equally many slots.
PAIRS = (
    ("snapkv", "SnapKV", True),
    ("snapkv:window=64,kernel=5,pool=avg", "SnapKV", True),
    ("pyramidkv", "PyramidKV", False),
    (PYRAMID, "PyramidKV, budgets of vlmfast", True),
    ("streamingllm", "StreamingLLM", True),
    ("streamingllm", "StreamingLLM, rotated", True),
    ("h2o:decode=false", "ObservedAttention", True),
    ("h2o:decode=false,recent=0", "ObservedAttention", True),
    ("h2o:decode=false,recent=0,average=true", "ObservedAttention", True),
)
NOISE = 1e-3  # nats by which full models may differ: float32 in another order of summation

Rows = list[dict[str, Any]]


def joined(
    ours: tuple[dict[str, Any], Rows], others: tuple[dict[str, Any], Rows], every: Sequence[Text]
) -> dict[str, Any]:
    """The report on the rows that vlmfast and kvpress have logged for the same texts.

    Raises
    ------
    SystemExit
        When a side lacks a text, or the sides differ in what must be equal.
    """
    settings = {"vlmfast": ours[0], "kvpress": others[0]}
    for name in ("weights", "dtype", "follow", "machine"):
        if ours[0][name] != others[0][name]:
            raise SystemExit(f"{name} differs: {ours[0][name]} and {others[0][name]}")
    wanted = {(text.part, text.digest) for text in every}
    found: dict[str, dict[tuple, dict[str, Any]]] = {}
    for side, rows in (("vlmfast", ours[1]), ("kvpress", others[1])):
        own = {_key(row): row for row in rows if (row["part"], row["prompt"]) in wanted}
        for text, (method, keep) in product(sorted(wanted), sorted({key[2:] for key in own})):
            if (*text, method, keep) not in own:
                raise SystemExit(f"{side} has not measured {method} {keep} on {' '.join(text)}")
        found[side] = own
    noise = max(
        abs(found["vlmfast"][key]["nll"] - row["nll"])
        for key, row in found["kvpress"].items()
        if key[0] == "text" and key[2] == "none"
    )
    if noise > NOISE:
        raise SystemExit(f"the full models differ by {noise:.2g} nats, more than {NOISE:g}")
    for (part, prompt, method, keep), row in found["vlmfast"].items():
        for other in (of for own, of, equal in PAIRS if equal and own == method):
            slots = found["kvpress"][part, prompt, other, keep]["slots"]
            if sum(slots) != sum(row["slots"]):
                raise SystemExit(f"{method} keeps {row['slots']} slots, {other} {slots}")
    return {
        "settings": settings,
        "prompts": [
            {"part": text.part, "prefix": text.prefix, "prompt": text.digest} for text in every
        ],
        "noise": noise,
        "lines": [line for side, rows in found.items() for line in _lines(side, rows)],
        "pairs": [pair for own, other, _ in PAIRS for pair in _differences(found, own, other)],
        "cost": [*_costs("vlmfast", ours[1]), *_costs("kvpress", others[1])],
        "drafts": _drafts(_part(ours[1], "drafts")),
    }


def _lines(side: str, rows: dict[tuple, dict[str, Any]]) -> Rows:
    """Means by method and keep, over all prefixes."""
    full = {key[:2]: row for key, row in rows.items() if key[2] == "none"}
    lines = []
    for method, keep in dict.fromkeys(key[2:] for key in rows):
        own = [row for key, row in rows.items() if key[2:] == (method, keep)]
        line: dict[str, Any] = {"side": side, "method": method, "keep": keep, "prefix": None}
        texts, keys = _part(own, "text"), _part(own, "passkeys")
        line |= {"documents": len(texts), "passkey texts": len(keys)}
        for name in ("kl", "top1", "nll"):
            line[name] = fmean(row[name] for row in texts)
        line["slots"] = fmean(_share(row, full[row["part"], row["prompt"]]) for row in own)
        if keys:
            line["passkeys"] = fmean(fmean(row["found"]) for row in keys)
        lines.append(line)
    return lines


def _share(row: dict[str, Any], full: dict[str, Any]) -> float:
    """Slots of the longest layers, which are those without a window, as a fraction."""
    longest = max(full["slots"])
    pairs = zip(row["slots"], full["slots"], strict=True)
    return fmean(kept for kept, of in pairs if of == longest) / longest


def _differences(found: dict[str, dict[tuple, dict[str, Any]]], own: str, other: str) -> Rows:
    """KL of ``own`` minus that of ``other``, text by text: mean, least and most."""
    lines = []
    for keep in KEEPS:
        pairs = [
            row["kl"] - found["kvpress"]["text", prompt, other, keep]["kl"]
            for (part, prompt, method, kept), row in found["vlmfast"].items()
            if (part, method, kept) == ("text", own, keep)
        ]
        if not pairs:
            continue
        line = {"vlmfast": own, "kvpress": other, "keep": keep, "documents": len(pairs)}
        line |= {"kl": fmean(pairs), "least": min(pairs), "most": max(pairs)}
        lines.append(line)
    return lines


def _costs(side: str, rows: Rows) -> Rows:
    """Medians over the rounds: time over that of the full model in the same round, peak memory."""
    found: dict[tuple, Rows] = {}
    for row in _part(rows, "cost"):
        found.setdefault((row["prompt"], row["method"]), []).append(row)
    lines = []
    for (prompt, method), own in found.items():
        full = {row["round"]: row["wall"] for row in found[prompt, "none"]}
        line = {"side": side, "method": method, "prefix": own[0]["prefix"], "rounds": len(own)}
        line["over full"] = median(row["wall"] / full[row["round"]] for row in own)
        line |= {name: median(row[name] for row in own) for name in ("wall", "peak", "bytes")}
        line["load"] = max(row["load"] for row in own)
        lines.append(line)
    return lines


def _drafts(rows: Rows) -> Rows:
    """Of each drafter: accepted tokens per forward pass, and the plain decode time over its own."""
    lines = []
    plain = [row for row in rows if row["method"] == "none"]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        lines.append(
            {
                "method": method,
                "documents": len(own),
                "tokens": sum(row["tokens"] for row in own),
                "accepted per pass": sum(r["accepted"] for r in own)
                / sum(r["rounds"] for r in own),
                "speedup": sum(row["wall"] for row in plain) / sum(row["wall"] for row in own),
                "same": sum(row["same"] for row in own),
            }
        )
    return lines


def _part(rows: Iterable[dict[str, Any]], name: str) -> Rows:
    return [row for row in rows if row["part"] == name]

"""Adaptive speculation: chooses for each round whether to draft, and how much.

A draft pays where decoding the accepted tokens would take longer than drafting and verifying them.
That depends on the device, the batch, the drafter and the text. Every round is timed. A few sizes
of the tree ("arms") are tried, and each keeps a running mean of emitted tokens and seconds. The
next round takes the arm with the most tokens per second, by the goodput rule of SmartSpec
(arXiv 2406.14066)::

    rate(N, D) = E[1 + accepted] / (t_draft(D) + t_verify(N) + t_host),      off: N = 1

The measurements stay with the model, so that later answers reuse them. Nothing is drafted

- while a round would read too many bytes even if every draft were accepted. With ``S`` bytes of
  weights and cache in a step and ``T`` for a drafted token, a chain of D tokens gains at most
  ``(1 + D) S / (D T + S)``. Only drafters that run the model itself have a large T. The rule counts
  until a size has been tried, and as long as rounds that draft do not take clearly less time than
  their bytes predict, which is measured in every drafted round, and occasionally in a trial;
- before the answer has ``after`` tokens: short answers never pay for a drafter's prefill;
- while opening the drafter costs more than the rest of the answer could save, where an answer is
  expected to double in length (or to reach its limit);
- while no arm is ``margin`` times faster than plain decoding, except for an occasional trial where
  a drafter is open.

The leading arm is replaced when another one is ``hold`` times faster; others are tried
occasionally.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from vlmfast.core.drafting import Drafter, Target, Traffic
from vlmfast.core.params import param
from vlmfast.core.protocols import DrafterStage
from vlmfast.core.registry import stage_class

_TRIES = 5  # rounds of each arm before it is judged
_AGAIN = 64  # plain rounds from one trial of the best arm to the next
_OTHER = 12  # drafting rounds from one trial of another size to the next
_NEAR = 0.6  # of the best rate that another size needs for such a trial
_TRUSTED = 0.8  # of the predicted time that drafted rounds take at the least if bytes count
_KEEP = 0.95  # weight of the running mean in each round
_PREFERRED = ("draft-eagle", "draft-vispec")
_FREE = ("draft-ngram", "draft-recycle")


def _stage(name: str) -> DrafterStage:
    return cast(DrafterStage, stage_class(name)())


@dataclass(frozen=True)
class DraftAuto(DrafterStage):
    """Controls the other drafters of a recipe; alone it also chooses them."""

    name: ClassVar[str] = "draft-auto"
    paper: ClassVar[str] = "SmartSpec's goodput rule, arXiv 2406.14066"
    governs: ClassVar[bool] = True

    after: int = param(4, "tokens of an answer before the first draft", ge=1)
    margin: float = param(1.05, "least speed-up of drafting over plain decoding", ge=1)
    hold: float = param(1.05, "least speed-up of another tree to replace the current one", ge=1)

    def largest(self) -> tuple[int, int]:
        return 1, 0

    def open(self, target: Target) -> Drafter:
        raise NotImplementedError("draft-auto drafts nothing")

    def choice(self, ships: Callable[[DrafterStage], bool]) -> list[DrafterStage]:
        """The drafters of a recipe without any: a trained one, or those without weights."""
        for name in _PREFERRED:
            if ships(stage := _stage(name)):
                return [stage]
        return [_stage(name) for name in _FREE]

    def govern(self, limit: tuple[int, int], known: dict[Any, Any]) -> Governor:
        return Governor(self, limit, known)


class Arm:
    """Running means of one size of the tree."""

    def __init__(self) -> None:
        self.rounds, self.emitted, self.seconds = 0, 0.0, 0.0

    def add(self, emitted: int, seconds: float) -> None:
        self.rounds += 1
        keep = min(_KEEP, 1 - 1 / self.rounds)
        self.emitted = keep * self.emitted + (1 - keep) * emitted
        self.seconds = keep * self.seconds + (1 - keep) * seconds

    @property
    def rate(self) -> float:
        return self.emitted / self.seconds if self.seconds else 0.0


class Governor:
    """Chooses the size of each round's tree for one answer.

    Parameters
    ----------
    stage : DraftAuto
    limit : (int, int)
        Nodes and depth of the largest tree.
    known : dict
        Measurements of this model and these drafters; shared by all answers.
    """

    def __init__(self, stage: DraftAuto, limit: tuple[int, int], known: dict[Any, Any]) -> None:
        nodes, depth = limit
        sizes = {(nodes, depth), ((nodes + 1) // 2, (depth + 1) // 2), (min(nodes, 4), 1)}
        self.stage, self.known, self.off = stage, known, (1, 0)
        self.sizes = sorted(size for size in sizes if size[0] > 1 and size[1] > 0)
        self.opened, self.plain = False, 0
        self.traffic: Traffic | None = None
        self.reason = ""

    def arm(self, rows: int, size: tuple[int, int]) -> Arm:
        return self.known.setdefault((rows, size), Arm())

    def choose(
        self, rows: int, count: int, max_new_tokens: int, traffic: Traffic | None = None
    ) -> tuple[int, int]:
        """Nodes and depth of the next tree.

        Parameters
        ----------
        rows : int
            Sequences that are decoded together.
        count, max_new_tokens : int
            Tokens of the answer so far, and their limit.
        traffic : Traffic, optional
            Bytes that the next forward passes read.
        """
        self.traffic = traffic
        size, self.reason = self._choose(rows, count, max_new_tokens)
        return size

    def _choose(self, rows: int, count: int, limit: int) -> tuple[tuple[int, int], str]:
        if count < self.stage.after or limit - count < 2:
            return self.off, "off: the answer is short"
        arms = {size: self.arm(rows, size) for size in (self.off, *self.sizes)}
        if arms[self.off].rounds < _TRIES:
            return self.off, "off: timing plain decoding"
        untried = [size for size in self.sizes if arms[size].rounds < _TRIES]
        if hopeful := [size for size in untried if self._may_pay(rows, size)]:
            return hopeful[0], "trying"
        if len(untried) == len(self.sizes):
            turns = self.known["hopeless", rows] = self.known.get(("hopeless", rows), 0) + 1
            if turns % _AGAIN == 0:
                return untried[0], "trying whether bytes decide"
            return self.off, "off: drafts would read more bytes than they can save"
        best = max(self.sizes, key=lambda size: arms[size].rate)
        last = self.known.get(("last", rows), best)
        if arms[best].rate < self.stage.hold * arms[last].rate:
            best = last
        if arms[best].rate < self.stage.margin * arms[self.off].rate:
            self.plain += 1
            if self.opened and self.plain % _AGAIN == 0:
                return best, "trying again"
            return self.off, "off: drafts do not pay here"
        saved = min(limit - count, count) * (1 / arms[self.off].rate - 1 / arms[best].rate)
        if not self.opened and saved < self.known.get("open", 0.0):
            return self.off, "off: too few tokens to come"
        self.known["last", rows] = best
        # A mean of few rounds may be wrong: try another size occasionally.
        turns = self.known["turns", rows] = self.known.get(("turns", rows), 0) + 1
        near = [s for s in self.sizes if s != best and arms[s].rate > _NEAR * arms[best].rate]
        if turns % _OTHER == 0 and near:
            return near[turns // _OTHER % len(near)], "trying another size"
        return best, "drafting"

    def _may_pay(self, rows: int, size: tuple[int, int]) -> bool:
        """Whether a size that was not tried pays by its bytes if every draft is accepted."""
        if self.traffic is None or self.known.get(("bytes", rows), 1.0) < _TRUSTED:
            return True
        _, depth = size
        return 1 + depth >= self.stage.margin * self.traffic.relative(depth)

    def observe(
        self,
        rows: int,
        size: tuple[int, int],
        nodes: int,
        emitted: int,
        seconds: float,
        first: bool = False,
    ) -> None:
        """Record the tokens and seconds of a round with a tree of ``nodes`` nodes.

        ``size`` is the tree's limit. In the ``first`` round a drafter prefills the prompt: its
        extra time is the cost of opening the drafter.
        """
        if first:
            self.opened = True
            spent = max(seconds - self.arm(rows, size).seconds, 0.0)
            keep = _KEEP if "open" in self.known else 0.0
            self.known["open"] = keep * self.known.get("open", 0.0) + (1 - keep) * spent
        elif (size == self.off) == (nodes == 1):  # otherwise the limit left nothing to draft
            self.arm(rows, size).add(emitted, seconds)
            self._check_bytes(rows, min(size[1], nodes - 1), seconds)

    def _check_bytes(self, rows: int, drafted: int, seconds: float) -> None:
        """Compare the time of a round with what its bytes predict."""
        plain = self.arm(rows, self.off).seconds
        if drafted and plain and self.traffic is not None and self.traffic.draft:
            found = seconds / plain / self.traffic.relative(drafted)
            before = self.known.get(("bytes", rows), found)
            self.known["bytes", rows] = _KEEP * before + (1 - _KEEP) * found

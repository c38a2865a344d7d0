"""Drafts the last tokens again, for answers that repeat themselves."""

from dataclasses import dataclass
from typing import ClassVar

from vlmfast.drafters import DrafterStage, Tree, param


class Repeats:
    """The drafter of one request."""

    def __init__(self, stage, banned):
        self.stage, self.banned = stage, banned
        self.ids = []  # prompt and answer so far, without the token that is next

    def prefill(self, read):
        self.ids += read.ids

    def propose(self, root, budget):
        last = [*self.ids, root][-self.stage.period :]
        length = min(self.stage.tokens, budget.depth, budget.nodes - 1)
        drafts = [last[i % len(last)] for i in range(length)]
        while set(drafts) & set(self.banned):  # placeholders of images are never drafted
            drafts.pop()
        return Tree.chain([root, *drafts])

    def extend(self, done):
        self.ids += [done.tree.tokens[0], *done.emitted[:-1]]


@dataclass(frozen=True)
class Repeat(DrafterStage):
    """Repeats the last ``period`` tokens."""

    name: ClassVar[str] = "draft-repeat"
    paper: ClassVar[str] = "ours"
    lead: ClassVar[str | None] = "tokens"
    merges: ClassVar[bool] = True

    tokens: int = param(4, "tokens per draft", ge=1)
    period: int = param(2, "tokens that are repeated", ge=1)

    def largest(self):
        return 1 + self.tokens, self.tokens

    def open(self, target):
        return Repeats(self, target.banned)

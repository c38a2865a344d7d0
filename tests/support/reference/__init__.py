"""A dense model, written without the engine: nothing is removed and nothing is packed.

Plain loops over Hugging Face's decoder layers, with a textbook softmax and one additive mask per
layer. What a method drops is masked, by layer and head; what it merges or rounds is written over
the tokens concerned. `Dense` runs a prompt and its answer in one forward pass, with given rows or
under a rule that drops between layers; `Answer` feeds an answer to what a method has stored.
"""

from support.reference.answer import Answer, full_kv
from support.reference.dense import TOKENS, Before, Dense, Rule, closed

__all__ = ["TOKENS", "Answer", "Before", "Dense", "Rule", "closed", "full_kv"]

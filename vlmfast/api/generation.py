"""The gate for generation arguments: what every way of asking passes before an image is read.

Arguments are Hugging Face's, and legal ones mean what they mean there. The gate merges the
arguments of a call, the ``generation_config`` that it gives and the model's own as Hugging Face
does, checks types and ranges, and refuses what the engine cannot serve.
"""

from __future__ import annotations

import copy
import difflib
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError
from vlmfast.models.base import Adapter

if TYPE_CHECKING:
    from transformers import GenerationConfig

DEFAULT_NEW_TOKENS = 128

_LOOP = "it needs another decoding loop than vlmfast's"
_RETURNS = "vlmfast does not keep it"
_PROMPT = "a prompt is made of token ids and pixels"
_MODEL = "the model's own setting is used"
# What would need another loop, another forward pass, or a prompt that is no ids.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "assistant_early_exit",
            "assistant_model",
            "assistant_tokenizer",
            "constraints",
            "custom_generate",
            "dola_layers",
            "force_words_ids",
            "is_assistant",
            "negative_prompt_attention_mask",
            "negative_prompt_ids",
            "penalty_alpha",
            "prompt_lookup_num_tokens",
            "speculation_type",
            "token_healing",
            "use_mtp",
        ),
        _LOOP,
    ),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), _RETURNS),
    **dict.fromkeys(
        (
            "decoder_input_ids",
            "encoder_outputs",
            "inputs_embeds",
            "mm_encoder_outputs",
            "past_key_values",
            "position_ids",
        ),
        _PROMPT,
    ),
    **dict.fromkeys(
        ("vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy"), _MODEL
    ),
}
# Arguments of Hugging Face's ``generate`` that are no settings, and vlmfast's own.
_OF_CALL = (
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "seed",
    "stopping_criteria",
    "streamer",
    "strict",
)
_HANDED_ON = (
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
)
_LENGTHS = ("max_new_tokens", "max_length")
# Legal, and without effect here.
_IGNORED = ("debug_io", "logits_to_keep", "return_dict", "synced_gpus", "tokenizer")
# Whose ``None`` means "not given": Hugging Face has no way to switch them off.
_NEVER_NONE = ("max_length", "num_beams", "num_return_sequences")
_MOST = 2**31 - 1
_LEAST = 1e-30  # float32 logits over less than this are infinite
_SHOWN = 60


# --- checks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """What a check must know besides the value."""

    sampled: bool
    vocabulary: int


_Check = Callable[[str, Any, _Place], Any]


def shown(value: Any) -> str:
    """A value in an error: one line, and never a model or a tensor."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        try:
            text = repr(value)
        except ValueError:  # an int of more digits than Python writes
            return "a number of very many digits"
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    if isinstance(value, list | tuple) and len(value) <= 4:
        inner = ", ".join(map(shown, value))
        if len(inner) <= _SHOWN:
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return f"a {type(value).__name__}"


def one_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    text = str(error).strip().partition("\n")[0].strip()
    text = text or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]}..."


def _wrong(name: str, value: Any, must: str) -> VLMFastError:
    return VLMFastError(f"{name}={shown(value)} must be {must}")


def is_whole(value: Any) -> bool:
    """Whether a value counts as a whole number: everything Python can index with, but bools."""
    if isinstance(value, bool) or getattr(value, "dtype", None) in (torch.bool, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _whole(low: int, high: int = _MOST) -> _Check:
    def check(name: str, value: Any, place: _Place) -> int:
        if not is_whole(value) or not low <= operator.index(value) <= high:
            bound = f" and at most {high}" if high < _MOST else ""
            raise _wrong(name, value, f"a whole number of at least {low}{bound}")
        return operator.index(value)

    return check


def _only(*allowed: Any, why: str) -> _Check:
    def check(name: str, value: Any, place: _Place) -> Any:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or value not in allowed:
            raise _wrong(name, value, f"{allowed[0]}: {why}")
        return value

    return check


def _number(
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: bool = False,
    sampled: bool = False,
) -> _Check:
    """A finite number; ``sampled``: its range counts only where tokens are sampled."""

    def check(name: str, value: Any, place: _Place) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise _wrong(name, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise _wrong(name, value, "a finite number")
        if sampled and not place.sampled:
            return number
        if number < low or number > high or (above and number <= low):
            least = f"above {low:g}" if above else f"at least {low:g}"
            most = "" if high == math.inf else f" and at most {high:g}"
            raise _wrong(name, value, f"{least}{most}")
        return number

    return check


def _temperature(name: str, value: Any, place: _Place) -> float:
    if place.sampled and isinstance(value, numbers.Real) and value == 0:
        raise _wrong(name, value, "above 0; do_sample=False stands for greedy decoding")
    return _number(_LEAST, above=True, sampled=True)(name, value, place)


def _flag(name: str, value: Any, place: _Place) -> Any:
    if type(value).__name__ in ("bool", "bool_") or (type(value) is int and value in (0, 1)):
        return value
    raise _wrong(name, value, "True or False")


def _id(inside: bool) -> _Check:
    """One token; ``inside``: of the vocabulary."""

    def check(name: str, value: Any, place: _Place) -> int:
        low, high = (0, place.vocabulary - 1) if inside else (-(2**63), 2**63 - 1)
        if not is_whole(value) or not low <= operator.index(value) <= high:
            what = f"from 0 to {high}" if inside else "of 64 bits"
            raise _wrong(name, value, f"the id of a token, a whole number {what}")
        return operator.index(value)

    return check


def _ids(inside: bool, *, alone: bool = True) -> _Check:
    """Several tokens, ``alone``: or one; handed on as they were given."""
    one = _id(inside)

    def check(name: str, value: Any, place: _Place) -> Any:
        if isinstance(value, Tensor):
            if value.dim() > 1 or value.is_floating_point() or value.is_complex():
                raise _wrong(name, value, "the id of a token, or a list of such ids")
            several = value.tolist()
        else:
            several = value
        if alone and is_whole(several):
            one(name, several, place)
            return value
        if not isinstance(several, list | tuple):
            raise _wrong(name, value, "the id of a token, or a list of such ids")
        for token in several:
            one(f"{name}[...]", token, place)
        return value

    return check


_ends = _ids(inside=False)


def _eos(name: str, value: Any, place: _Place) -> Any:
    if isinstance(value, list | tuple) and not value:
        raise _wrong(name, value, "at least one token; None stands for no end token")
    return _ends(name, value, place)


def _suppressed(name: str, value: Any, place: _Place) -> Any:
    _ids(inside=False, alone=False)(name, value, place)
    tokens = value.tolist() if isinstance(value, Tensor) else value
    if place.sampled and len(set(tokens) & set(range(place.vocabulary))) == place.vocabulary:
        raise VLMFastError(f"{name} holds every token, so that none can be sampled")
    return value


def _bad_words(name: str, value: Any, place: _Place) -> Any:
    if not isinstance(value, list) or not value:
        raise _wrong(name, value, "a list of lists of ids")
    for word in value:
        if not isinstance(word, list) or not word:
            raise _wrong(f"{name}[...]", word, "a list of at least one id")
        _ids(inside=True)(f"{name}[...]", word, place)
    return value


def _biases(name: str, value: Any, place: _Place) -> Any:
    """As Hugging Face takes them: ``{(id, ...): bias}`` or ``[[[id, ...], bias], ...]``."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not pairs:
        raise _wrong(name, value, "a dict of tuples of ids and numbers")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _wrong(f"{name}[...]", pair, "ids and a number")
        tokens, bias = pair
        if not isinstance(tokens, tuple if isinstance(value, dict) else list) or not tokens:
            raise _wrong(f"{name}[...]", tokens, "ids")
        _ids(inside=True)(f"{name}[...]", tokens, place)
        if type(bias) is not float or not math.isfinite(bias):
            raise _wrong(f"{name}[...]", bias, "a finite float")
    return value


def _decay(name: str, value: Any, place: _Place) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _wrong(name, value, "a start and a factor")
    start, factor = value
    _whole(0)(f"{name}[0]", start, place)
    _number(0.0, 10.0)(f"{name}[1]", factor, place)
    return value


def _stops(name: str, value: Any, place: _Place) -> Any:
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list | tuple) or not all(isinstance(s, str) for s in several):
        raise _wrong(name, value, "a text, or a list of texts")
    if len(several) > 1 and not all(several):
        raise VLMFastError(f"{name} holds an empty text, which every answer contains")
    return value


def _early(name: str, value: Any, place: _Place) -> Any:
    if value is True or value is False or value == "never":
        return value
    raise _wrong(name, value, "True, False or 'never'")


def _allowing(name: str, value: Any, place: _Place) -> Any:
    """A function of row and ids to the tokens that may follow, whose results are checked."""
    if not callable(value):
        raise _wrong(name, value, "a function")

    def checked(row: int, ids: Tensor) -> Any:
        found = value(row, ids)
        try:
            tokens = torch.as_tensor(found)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            tokens = torch.zeros(0)
        whole = tokens.dtype in (torch.int64, torch.int32)
        inside = whole and tokens.dim() == 1 and len(tokens) > 0 and int(tokens.min()) >= 0
        if not inside or int(tokens.max()) >= place.vocabulary:
            raise VLMFastError(
                f"{name} returned {shown(found)}; it must return a list of at least one token, "
                f"from 0 to {place.vocabulary - 1}"
            )
        return found

    return checked


def _all_called(name: str, value: Any, place: _Place) -> Any:
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise _wrong(name, value, "a list of functions")
    return value


def _streamer(name: str, value: Any, place: _Place) -> Any:
    if not all(callable(getattr(value, method, None)) for method in ("put", "end")):
        raise _wrong(name, value, "a streamer with put and end")
    return value


def _seed(name: str, value: Any, place: _Place) -> int:
    if not is_whole(value):
        raise VLMFastError(f"{name}={shown(value)} must be a whole number, or None")
    return operator.index(value)


_BEAMS = "vlmfast decodes greedily or by sampling, one answer to a prompt"
_CHECKS: dict[str, _Check] = {
    # Lengths.
    "max_length": _whole(1),
    "max_new_tokens": _whole(1),
    "min_length": _whole(0),
    "min_new_tokens": _whole(0),
    "max_time": _number(0.0),
    "stop_strings": _stops,
    # The loop.
    "do_sample": _flag,
    "num_beams": _only(1, why=_BEAMS),
    "num_return_sequences": _only(1, why=_BEAMS),
    "num_beam_groups": _only(1, why=_BEAMS),
    "diversity_penalty": _only(0, why=_BEAMS),
    "guidance_scale": _only(1, why="guidance would need a second prompt"),
    "early_stopping": _early,
    "length_penalty": _number(),
    "seed": _seed,
    "strict": _flag,
    "use_cache": _flag,
    # The distribution.
    "temperature": _temperature,
    "top_k": _whole(-(2**31)),
    "top_p": _number(0.0, 1.0, sampled=True),
    "min_p": _number(0.0, 1.0, sampled=True),
    "top_h": _number(0.0, 1.0, above=True, sampled=True),
    "typical_p": _number(0.0, 1.0, above=True, sampled=True),
    "epsilon_cutoff": _number(0.0, 1.0, sampled=True),
    "eta_cutoff": _number(0.0, 1.0, sampled=True),
    "repetition_penalty": _number(_LEAST, 1 / _LEAST, above=True),
    "encoder_repetition_penalty": _number(_LEAST, 1 / _LEAST, above=True),
    "no_repeat_ngram_size": _whole(0),
    # Hugging Face makes a list of so many lists.
    "encoder_no_repeat_ngram_size": _whole(0, 1024),
    "renormalize_logits": _flag,
    "remove_invalid_values": _flag,
    "exponential_decay_length_penalty": _decay,
    # Tokens.
    "eos_token_id": _eos,
    "pad_token_id": _id(inside=False),
    "bos_token_id": _ends,
    "forced_bos_token_id": _id(inside=True),
    "forced_eos_token_id": _ids(inside=True),
    "bad_words_ids": _bad_words,
    "sequence_bias": _biases,
    "suppress_tokens": _suppressed,
    "begin_suppress_tokens": _ids(inside=False, alone=False),
    # What is called, and what is returned.
    "logits_processor": _all_called,
    "stopping_criteria": _all_called,
    "prefix_allowed_tokens_fn": _allowing,
    "streamer": _streamer,
    "return_dict_in_generate": _flag,
    "output_scores": _flag,
    "output_logits": _flag,
}


# --- the gate ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """Generation arguments that have passed the gate.

    Parameters
    ----------
    arguments : dict
        For Hugging Face's ``generate``.
    config : GenerationConfig
        What these, the config that was given and the model's own say together.
    explicit : bool
        Whether the call says how long the answer may be.
    streamer, seed, strict
        As `VLM.ask` takes them.
    stops : StoppingCriteria, optional
        Ends the answer at a stop string.
    """

    arguments: dict[str, Any]
    config: GenerationConfig
    explicit: bool
    streamer: Any = None
    seed: int | None = None
    strict: bool = False
    stops: Any = None

    def max_new_tokens(self, prompt: int) -> int:
        """New tokens that may follow ``prompt`` ids; below 1 where ``max_length`` leaves none."""
        if self.config.max_new_tokens is not None:
            return self.config.max_new_tokens
        most = self.arguments.get("max_length", self.config.max_length)
        return 20 if most is None else most - prompt  # as Hugging Face

    def changed(self, **arguments: Any) -> Generation:
        """The same with other arguments."""
        return replace(self, arguments={**self.arguments, **arguments})

    def streamed(self, streamer: Any, cancelled: Any) -> Generation:
        """The same, with tokens for ``streamer`` until ``cancelled`` says so."""
        criteria = [*(self.arguments.get("stopping_criteria") or []), cancelled]
        return replace(self.changed(stopping_criteria=criteria), streamer=streamer)

    def for_loop(self) -> dict[str, Any]:
        """The arguments for Hugging Face's ``generate`` with a loop of our own.

        It hands no tokenizer to such a loop, so stop strings are a criterion.
        """
        from transformers import StoppingCriteriaList

        given = dict(self.arguments)
        criteria = list(given.pop("stopping_criteria", None) or [])
        if self.stops is not None:
            criteria.append(self.stops)
        if criteria:
            given["stopping_criteria"] = StoppingCriteriaList(criteria)
        return given


def merged(
    own: GenerationConfig, config: GenerationConfig | None, given: Mapping[str, Any]
) -> GenerationConfig:
    """As Hugging Face puts it together: the arguments, the config given, the model's own."""
    found = copy.deepcopy(own if config is None else config)
    for key, value in vars(own).items():
        if getattr(found, key, None) is None:
            setattr(found, key, value)
    for key in vars(found).keys() & given.keys():
        setattr(found, key, given[key])
    return found


def gate(
    adapter: Adapter,
    given: Mapping[str, Any],
    *,
    names: Iterable[str] = (),
    default: int | None = DEFAULT_NEW_TOKENS,
    instead: str = "",
) -> Generation:
    """Check generation arguments, and put them together with the configs.

    Parameters
    ----------
    adapter : Adapter
    given : mapping
        Arguments of a call that are not its own.
    names : iterable of str
        Its own, which a misspelt one may be meant for.
    default : int, optional
        New tokens where neither call nor config says how many; Hugging Face's default without it.
    instead : str
        What an error about something that cannot be served adds.

    Raises
    ------
    VLMFastError
        For the first argument that is unknown, of a wrong type, out of range or not served.
    """
    from transformers import GenerationConfig

    own = adapter.model.generation_config
    config = given.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise _wrong("generation_config", config, "a transformers.GenerationConfig")
    settings = vars(own if config is None else config).keys() | vars(own).keys()
    for name, value in given.items():
        _known(adapter, name, value, settings, names, instead)
    # None switches off what a config says, and else is as good as not given.
    given = {
        key: value
        for key, value in given.items()
        if key not in _IGNORED
        and (value is not None or (key in settings and key not in _NEVER_NONE))
    }
    found = merged(own, config, given)
    for name in REFUSED:
        _served(name, getattr(found, name, None), instead)
    _checked(given, found, own, adapter)

    for name in ("cache_implementation", "compile_config", "watermarking_config"):
        _validated(found, name)
    caches = found.cache_implementation
    if caches in ("paged", "quantized"):
        raise VLMFastError(
            f"cache_implementation={caches!r} cannot be given: caches are those of the recipe"
            f"{instead}"
        )
    arguments = {key: value for key, value in given.items() if key in settings or key in _HANDED_ON}
    if caches is not None:  # the engine has its own, and Hugging Face would make one for nothing
        arguments["cache_implementation"] = None
    said = [*map(given.get, _LENGTHS), *(getattr(config, name, None) for name in _LENGTHS)]
    explicit = said[:3] != [None] * 3 or said[3] not in (None, 20)  # once the default of configs
    unset = not explicit and "max_new_tokens" not in given and found.max_new_tokens is None
    if unset and default is not None and found.max_length in (None, 20):
        arguments["max_new_tokens"] = found.max_new_tokens = default
    arguments["stop_strings"] = None  # or `generate` would look for a tokenizer
    return Generation(
        arguments,
        found,
        explicit,
        given.get("streamer"),
        given.get("seed"),
        bool(given.get("strict", False)),
        _stopping(adapter, found.stop_strings),
    )


def is_argument(adapter: Adapter, name: str) -> bool:
    """Whether a name is that of a generation argument, served or refused."""
    settings = vars(adapter.model.generation_config)
    return name in settings or name in REFUSED or name in (*_OF_CALL, *_IGNORED)


def _known(
    adapter: Adapter,
    name: str,
    value: Any,
    settings: Iterable[str],
    names: Iterable[str],
    instead: str,
) -> None:
    """Whether there is such an argument, and it can be served."""
    if name in REFUSED:
        _served(name, value, instead)
        return
    if name.startswith("vlmfast_"):
        raise VLMFastError(f"{name} cannot be given: names that begin with vlmfast_ are internal")
    if name in settings or name in (*_OF_CALL, *_IGNORED) or value is None:
        return
    tensors = (*adapter.tensors, *adapter.clip_tensors, *adapter.beside)
    if name in ("inputs", "input_ids", "attention_mask", "labels", "token_type_ids", *tensors):
        raise VLMFastError(
            f"{name} cannot be given: the prompt is made of the question, images and video; "
            "vlmfast.attach takes tensors"
        )
    near = difflib.get_close_matches(name, sorted({*names, *settings, *_OF_CALL}), 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise VLMFastError(f"there is no argument {shown(name)[1:-1]}{meant}")


def _served(name: str, value: Any, instead: str) -> None:
    if value is not None and value is not False:
        raise VLMFastError(f"{name} cannot be given: {REFUSED[name]}{instead}")


def _checked(
    given: dict[str, Any], found: GenerationConfig, own: GenerationConfig, adapter: Adapter
) -> None:
    """Types and ranges; writes plain Python numbers into ``given`` and ``found``."""
    sampled = found.do_sample
    if sampled is not None:
        _flag("do_sample", sampled, _Place(False, 0))
    place = _Place(bool(sampled), adapter.vocabulary)
    for name, check in _CHECKS.items():
        value = given[name] if name in given else getattr(found, name, None)
        if value is None:
            continue
        value = check(name, value, place)
        if name in given:
            given[name] = value
        if hasattr(found, name):
            setattr(found, name, value)
    # A checkpoint may have been saved with it; a call that asks for it is refused.
    off = "use_cache" in given or own.use_cache is not False
    if off and found.use_cache is not None and not found.use_cache:
        raise VLMFastError("use_cache=False cannot be given: vlmfast always decodes with a cache")
    if place.sampled and found.top_k is not None and found.top_k < 0:
        raise _wrong("top_k", found.top_k, "a whole number of at least 0; 0 keeps all tokens")
    if found.exponential_decay_length_penalty is not None:
        if found.eos_token_id is None:
            raise VLMFastError("exponential_decay_length_penalty needs an eos_token_id")
        _ids(inside=True)("eos_token_id", found.eos_token_id, place)


def _validated(found: GenerationConfig, name: str) -> None:
    """Hugging Face's own check of a setting that no table has."""
    from transformers import GenerationConfig

    value = getattr(found, name, None)
    if value is None:
        return
    try:
        GenerationConfig(**{name: value})
    except (ValueError, TypeError, AttributeError) as error:
        raise VLMFastError(f"{name}={shown(value)} cannot be used: {one_line(error)}") from error


def _stopping(adapter: Adapter, stops: Any) -> Any:
    """The criterion of stop strings."""
    if not stops or not any(stops):
        return None
    from transformers import StopStringCriteria

    try:
        return StopStringCriteria(adapter.processor.tokenizer, stops)
    except ValueError as error:
        raise VLMFastError(f"stop_strings={shown(stops)} cannot be used: {one_line(error)}") from (
            error
        )

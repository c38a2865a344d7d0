"""Checks of generation arguments, made before any image is read.

Arguments are Hugging Face's and have the same meaning. `gate` merges the arguments of a call, its
``generation_config`` and the model's own as Hugging Face does, checks types and ranges, and rejects
what the engine does not support.
"""

from __future__ import annotations

import copy
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlmfast.core.params import nearest
from vlmfast.errors import VLMFastError, check_memory, one_line
from vlmfast.models.base import Adapter

if TYPE_CHECKING:
    from transformers import GenerationConfig

DEFAULT_NEW_TOKENS = 128

# Would need another loop, another forward pass, or a prompt without ids.
REFUSED: dict[str, str] = {
    name: reason
    for reason, names in {
        "vlmfast's decoding loop does not support it": (
            "assistant_early_exit",
            "assistant_ensemble_weight",
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
        "vlmfast does not return it": ("output_attentions", "output_hidden_states"),
        "a prompt is made of token ids and pixels": (
            "decoder_input_ids",
            "encoder_outputs",
            "inputs_embeds",
            "mm_encoder_outputs",
            "past_key_values",
            "position_ids",
        ),
        "the model's own setting is used": (
            "vision_aspect_ratio",
            "vision_feature_layer",
            "vision_feature_select_strategy",
        ),
    }.items()
    for name in names
}
# Passed on to Hugging Face's ``generate``.
_PASSED_ON = (
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
)
# Arguments of Hugging Face's ``generate`` that are not settings, and vlmfast's own.
_OF_CALL = (*_PASSED_ON, "seed", "streamer", "strict", "top_logprobs")
_LENGTHS = ("max_new_tokens", "max_length")
# Accepted without effect.
_IGNORED = ("debug_io", "logits_to_keep", "return_dict", "synced_gpus", "tokenizer")
# ``None`` means "not given" for these: Hugging Face cannot switch them off.
_NEVER_NONE = ("max_length", "num_beams", "num_return_sequences")
_MOST = 2**31 - 1
_LEAST = 1e-30  # float32 logits overflow when divided by less, and vanish by its inverse
_SHOWN = 60


# --- checks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Context:
    """Context of a check."""

    sampled: bool
    vocabulary: int


_Check = Callable[[str, Any, _Context], Any]


def shown(value: Any) -> str:
    """A value for an error message: one line, without the contents of models or tensors."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        try:
            text = repr(value)
        except ValueError:  # an int with more digits than Python prints
            return "a number of very many digits"
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    if isinstance(value, list | tuple) and len(value) <= 4:
        inner = ", ".join(map(shown, value))
        if len(inner) <= _SHOWN:
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return f"a {type(value).__name__}"


def _wrong(name: str, value: Any, must: str) -> VLMFastError:
    return VLMFastError(f"{name}={shown(value)} must be {must}")


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number: anything with ``__index__`` except bools."""
    if isinstance(value, bool) or getattr(value, "dtype", None) in (torch.bool, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def check_whole(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """The value of a whole number; raises unless an argument is one, and within its bounds."""
    number = operator.index(value) if is_whole(value) else None
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    if number is None or not least <= number <= most:
        bounds = ("" if low is None else f" of at least {low}") + (
            "" if high in (None, _MOST) else f" and at most {high}"
        )
        raise _wrong(name, value, f"a whole number{bounds}")
    return number


def _whole(
    name: str, value: Any, context: _Context, low: int | None = 0, high: int | None = _MOST
) -> int:
    return check_whole(name, value, low, high)


def _only(name: str, value: Any, context: _Context, allowed: int, why: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or value != allowed:
        raise _wrong(name, value, f"{allowed}: {why}")
    return value


def _number(
    name: str,
    value: Any,
    context: _Context,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: bool = False,
    sampled: bool = False,
) -> float:
    """A finite number; with ``sampled`` its range is checked only when tokens are sampled."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _wrong(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(name, value, "a finite number")
    if sampled and not context.sampled:
        return number
    if number < low or number > high or (above and number <= low):
        least = f"above {low:g}" if above else f"at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise _wrong(name, value, f"{least}{most}")
    return number


def _temperature(name: str, value: Any, context: _Context) -> float:
    if context.sampled and isinstance(value, numbers.Real) and value == 0:
        raise _wrong(name, value, "above 0; use do_sample=False for greedy decoding")
    return _number(name, value, context, _LEAST, 1 / _LEAST, above=True, sampled=True)


def _flag(name: str, value: Any, context: _Context) -> Any:
    if type(value).__name__ in ("bool", "bool_") or (type(value) is int and value in (0, 1)):
        return value
    raise _wrong(name, value, "True or False")


def _id(name: str, value: Any, context: _Context, inside: bool = True) -> int:
    """A token id; with ``inside`` it must be in the vocabulary."""
    low, high = (0, context.vocabulary - 1) if inside else (-(2**63), 2**63 - 1)
    if not is_whole(value) or not low <= operator.index(value) <= high:
        what = f"from 0 to {high}" if inside else "of 64 bits"
        raise _wrong(name, value, f"the id of a token, a whole number {what}")
    return operator.index(value)


def _ids(
    name: str, value: Any, context: _Context, inside: bool = True, *, alone: bool = True
) -> Any:
    """Token ids, or with ``alone`` a single one; returned as they were given."""
    several = value
    if isinstance(value, Tensor):
        if value.dim() > 1 or value.is_floating_point() or value.is_complex():
            raise _wrong(name, value, "the id of a token, or a list of such ids")
        several = value.tolist()
    if alone and is_whole(several):
        _id(name, several, context, inside)
        return value
    if not isinstance(several, list | tuple):
        raise _wrong(name, value, "the id of a token, or a list of such ids")
    for token in several:
        _id(f"{name}[...]", token, context, inside)
    return value


def end_ids(config: GenerationConfig) -> list[int]:
    """Ids of the tokens that end an answer."""
    ends = config.eos_token_id
    return [] if ends is None else torch.as_tensor(ends).flatten().tolist()


def _eos(name: str, value: Any, context: _Context) -> Any:
    if isinstance(value, list | tuple) and not value:
        raise _wrong(name, value, "at least one token; use None for no end token")
    return _ids(name, value, context, inside=False)


def _suppressed(name: str, value: Any, context: _Context) -> Any:
    _ids(name, value, context, inside=False, alone=False)
    tokens = value.tolist() if isinstance(value, Tensor) else value
    if context.sampled and len(set(tokens) & set(range(context.vocabulary))) == context.vocabulary:
        raise VLMFastError(f"{name} contains every token, so that none can be sampled")
    return value


def _accepted(name: str, value: Any, make: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """What Hugging Face's ``make`` makes of a setting, which it checks."""
    try:
        return make(*args, **given)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise VLMFastError(f"{name}={shown(value)} cannot be used: {one_line(error)}") from error


def _setting(name: str, value: Any, context: _Context) -> Any:
    """A setting that Hugging Face's config checks."""
    from transformers import GenerationConfig

    _accepted(name, value, GenerationConfig, **{name: value})
    return value


def _biases(name: str, value: Any, context: _Context) -> Any:
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
        _ids(f"{name}[...]", tokens, context)
        if type(bias) is not float or not math.isfinite(bias):
            raise _wrong(f"{name}[...]", bias, "a finite float")
    return value


def _bad_words(name: str, value: Any, context: _Context) -> Any:
    if not isinstance(value, list) or not value:
        raise _wrong(name, value, "a list of lists of ids")
    for word in value:
        if not isinstance(word, list) or not word:
            raise _wrong(f"{name}[...]", word, "a list of at least one id")
        _ids(f"{name}[...]", word, context)
    return value


def _decay(name: str, value: Any, context: _Context) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _wrong(name, value, "a start and a factor")
    start, factor = value
    check_whole(f"{name}[0]", start, 0, _MOST)
    _number(f"{name}[1]", factor, context, 0.0, 10.0)
    return value


def _stops(name: str, value: Any, context: _Context) -> Any:
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list | tuple) or not all(isinstance(s, str) for s in several):
        raise _wrong(name, value, "a text, or a list of texts")
    if len(several) > 1 and not all(several):
        raise VLMFastError(f"{name} contains an empty text, which every answer contains")
    return value


def _early(name: str, value: Any, context: _Context) -> Any:
    if value is True or value is False or value == "never":
        return value
    raise _wrong(name, value, "True, False or 'never'")


def _allowing(name: str, value: Any, context: _Context) -> Any:
    """A function from (row, ids) to the allowed next tokens; its results are checked."""
    if not callable(value):
        raise _wrong(name, value, "a function")

    def checked(row: int, ids: Tensor) -> Any:
        found = value(row, ids)
        try:
            tokens = torch.as_tensor(found)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            check_memory(error)
            tokens = torch.zeros(0)
        whole = tokens.dtype in (torch.int64, torch.int32)
        inside = whole and tokens.dim() == 1 and len(tokens) > 0 and int(tokens.min()) >= 0
        if not inside or int(tokens.max()) >= context.vocabulary:
            raise VLMFastError(
                f"{name} returned {shown(found)}; it must return a list of at least one token, "
                f"from 0 to {context.vocabulary - 1}"
            )
        return found

    return checked


def _all_called(name: str, value: Any, context: _Context) -> Any:
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise _wrong(name, value, "a list of functions")
    return value


def _streamer(name: str, value: Any, context: _Context) -> Any:
    if not all(callable(getattr(value, method, None)) for method in ("put", "end")):
        raise _wrong(name, value, "a streamer with put and end")
    return value


_BEAMS = "vlmfast decodes greedily or by sampling, one answer to a prompt"
_CHECKS: dict[str, _Check] = {
    # Lengths.
    "max_length": partial(_whole, low=1),
    "max_new_tokens": partial(_whole, low=1),
    "min_length": _whole,
    "min_new_tokens": _whole,
    "max_time": partial(_number, low=0.0),
    "stop_strings": _stops,
    "prefill_chunk_size": partial(_whole, low=1),
    # The loop.
    "do_sample": _flag,
    "num_beams": partial(_only, allowed=1, why=_BEAMS),
    "num_return_sequences": partial(_only, allowed=1, why=_BEAMS),
    "num_beam_groups": partial(_only, allowed=1, why=_BEAMS),
    "diversity_penalty": partial(_only, allowed=0, why=_BEAMS),
    "guidance_scale": partial(_only, allowed=1, why="guidance would need a second prompt"),
    "early_stopping": _early,
    "length_penalty": _number,
    "seed": partial(_whole, low=None, high=None),
    "strict": _flag,
    "top_logprobs": _whole,
    "use_cache": _flag,
    # The distribution.
    "temperature": _temperature,
    "top_k": partial(_whole, low=-(2**31)),
    "top_p": partial(_number, low=0.0, high=1.0, sampled=True),
    "min_p": partial(_number, low=0.0, high=1.0, sampled=True),
    "top_h": partial(_number, low=0.0, high=1.0, above=True, sampled=True),
    "typical_p": partial(_number, low=0.0, high=1.0, above=True, sampled=True),
    "epsilon_cutoff": partial(_number, low=0.0, high=1.0, sampled=True),
    "eta_cutoff": partial(_number, low=0.0, high=1.0, sampled=True),
    "repetition_penalty": partial(_number, low=_LEAST, high=1 / _LEAST, above=True),
    "encoder_repetition_penalty": partial(_number, low=_LEAST, high=1 / _LEAST, above=True),
    "no_repeat_ngram_size": _whole,
    # Hugging Face allocates as many lists.
    "encoder_no_repeat_ngram_size": partial(_whole, high=1024),
    "renormalize_logits": _flag,
    "remove_invalid_values": _flag,
    "exponential_decay_length_penalty": _decay,
    # Tokens.
    "eos_token_id": _eos,
    "pad_token_id": partial(_id, inside=False),
    "bos_token_id": partial(_ids, inside=False),
    "decoder_start_token_id": partial(_ids, inside=False),
    "forced_bos_token_id": _id,
    "forced_eos_token_id": _ids,
    "bad_words_ids": _bad_words,
    "sequence_bias": _biases,
    "suppress_tokens": _suppressed,
    "begin_suppress_tokens": partial(_ids, inside=False, alone=False),
    # What Hugging Face checks.
    "cache_implementation": _setting,
    "compile_config": _setting,
    "watermarking_config": _setting,
    # Callables and outputs.
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
    """Generation arguments that `gate` has checked.

    Parameters
    ----------
    arguments : dict
        Passed to Hugging Face's ``generate``.
    config : GenerationConfig
        The arguments merged with the given config and the model's own.
    explicit : bool
        Whether the call sets the length of the answer.
    streamer, seed, strict, top_logprobs
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
    top_logprobs: int | None = None
    stops: Any = None

    def max_new_tokens(self, prompt: int) -> int:
        """New tokens allowed after ``prompt`` ids; below 1 if ``max_length`` leaves none."""
        if self.config.max_new_tokens is not None:
            return self.config.max_new_tokens
        most = self.arguments.get("max_length", self.config.max_length)
        return 20 if most is None else most - prompt  # as Hugging Face

    def changed(self, **arguments: Any) -> Generation:
        """A copy with other arguments."""
        return replace(self, arguments={**self.arguments, **arguments})

    def for_loop(self) -> dict[str, Any]:
        """The arguments for Hugging Face's ``generate`` with vlmfast's decoding loop.

        It passes no tokenizer to a custom loop, so stop strings become a stopping criterion.
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
    """Merge arguments, the given config and the model's own, as Hugging Face does."""
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
    elsewhere: Mapping[str, str] | None = None,
    default: int | None = DEFAULT_NEW_TOKENS,
    instead: str = "",
) -> Generation:
    """Check generation arguments, and merge them with the configs.

    Parameters
    ----------
    adapter : Adapter
    given : mapping
        Generation arguments of a call.
    names : iterable of str
        The call's own parameters, suggested for misspelt arguments.
    elsewhere : mapping, optional
        Arguments that belong elsewhere, and what the error says of each.
    default : int, optional
        New tokens if neither call nor config sets a length; Hugging Face's default if omitted.
    instead : str
        Appended to errors about unsupported arguments.

    Raises
    ------
    VLMFastError
        For the first argument that is unknown, of a wrong type, out of range or unsupported.
    """
    from transformers import GenerationConfig

    own = adapter.model.generation_config
    config = given.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise _wrong("generation_config", config, "a transformers.GenerationConfig")
    settings = vars(own if config is None else config).keys() | vars(own).keys()
    for name, value in given.items():
        if name in REFUSED:
            _served(name, value, instead)
        elif name.startswith("vlmfast_") or name not in (*settings, *_OF_CALL, *_IGNORED):
            _check_unset(adapter, name, value, elsewhere or {}, [*names, *settings])
    # None switches off a setting of the config; for other arguments it means "not given".
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

    caches = found.cache_implementation
    if caches in ("paged", "quantized"):
        raise VLMFastError(
            f"cache_implementation={caches!r} cannot be given: caches are those of the recipe"
            f"{instead}"
        )
    arguments = {key: value for key, value in given.items() if key in settings or key in _PASSED_ON}
    if caches is not None:  # the engine has its own; Hugging Face would allocate a second one
        arguments["cache_implementation"] = None
    lengths = [*map(given.get, _LENGTHS), *(getattr(config, name, None) for name in _LENGTHS)]
    explicit = lengths[:3] != [None] * 3 or lengths[3] not in (None, 20)  # 20: a former default
    unset = not explicit and "max_new_tokens" not in given and found.max_new_tokens is None
    if unset and default is not None and found.max_length in (None, 20):
        arguments["max_new_tokens"] = found.max_new_tokens = default
    arguments["stop_strings"] = None  # otherwise `generate` requires a tokenizer
    return Generation(
        arguments,
        found,
        explicit,
        given.get("streamer"),
        given.get("seed"),
        bool(given.get("strict", False)),
        given.get("top_logprobs"),
        _stopping(adapter, found.stop_strings),
    )


def is_argument(adapter: Adapter, name: str) -> bool:
    """Whether a name is a generation argument, supported or not."""
    settings = vars(adapter.model.generation_config)
    return name in settings or name in REFUSED or name in (*_OF_CALL, *_IGNORED)


def _check_unset(
    adapter: Adapter, name: str, value: Any, elsewhere: Mapping[str, str], known: list[str]
) -> None:
    """Raise where an argument that is not among the ``known`` ones has a value."""
    if name.startswith("vlmfast_"):
        raise VLMFastError(f"{name} cannot be given: names that begin with vlmfast_ are internal")
    if value is None:
        return
    tensors = (*adapter.tensors, *adapter.video_tensors, *adapter.beside)
    if name in ("inputs", "input_ids", "attention_mask", "labels", "token_type_ids", *tensors):
        raise VLMFastError(
            f"{name} cannot be given: the prompt is made of the question, images and video; "
            "vlmfast.attach takes tensors"
        )
    if name in elsewhere:
        raise VLMFastError(f"{name} cannot be given here: {elsewhere[name]}")
    # OpenAI's name, which is spelled more like max_kv_tokens.
    spelled = "max_new_tokens" if name == "max_tokens" else name
    raise VLMFastError(
        f"unknown argument {shown(name)[1:-1]}{nearest(spelled, sorted({*known, *_OF_CALL}))}"
    )


def _served(name: str, value: Any, instead: str) -> None:
    if value is not None and value is not False:
        raise VLMFastError(f"{name} cannot be given: {REFUSED[name]}{instead}")


def _checked(
    given: dict[str, Any], found: GenerationConfig, own: GenerationConfig, adapter: Adapter
) -> None:
    """Types and ranges; writes plain Python numbers into ``given`` and ``found``."""
    sampled = found.do_sample
    if sampled is not None:
        _flag("do_sample", sampled, _Context(False, 0))
    context = _Context(bool(sampled), adapter.vocabulary)
    for name, check in _CHECKS.items():
        value = given[name] if name in given else getattr(found, name, None)
        if value is None:
            continue
        value = check(name, value, context)
        if name in given:
            given[name] = value
        if hasattr(found, name):
            setattr(found, name, value)
    # Ignored in a checkpoint's config, rejected in a call.
    off = "use_cache" in given or own.use_cache is not False
    if off and found.use_cache is not None and not found.use_cache:
        raise VLMFastError("use_cache=False cannot be given: vlmfast always decodes with a cache")
    if context.sampled and found.top_k is not None and found.top_k < 0:
        raise _wrong("top_k", found.top_k, "a whole number of at least 0; 0 keeps all tokens")
    if found.exponential_decay_length_penalty is not None:
        if found.eos_token_id is None:
            raise VLMFastError("exponential_decay_length_penalty needs an eos_token_id")
        _ids("eos_token_id", found.eos_token_id, context)


def _stopping(adapter: Adapter, stops: Any) -> Any:
    """The stopping criterion of stop strings."""
    if not stops or not any(stops):
        return None
    from transformers import StopStringCriteria

    tokenizer = adapter.processor.tokenizer
    return _accepted("stop_strings", stops, StopStringCriteria, tokenizer, stops)

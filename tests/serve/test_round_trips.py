"""What clients send back of what they received: the history of a conversation is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from support.server_fuzz import CHAT, RESPONSES

QUESTION = {"role": "user", "content": "Is there a blue circle?"}
NEXT = {"role": "user", "content": "Describe the image."}


class Shape(BaseModel):
    shape: Literal["circle", "star"]


def dumps(found: Any) -> Iterator[Any]:
    """An object of the client in all forms in which it is sent back, each once."""
    yield found
    forms = (
        found.model_dump(mode="json"),
        found.model_dump(mode="json", exclude_none=True),
        found.model_dump(mode="json", exclude_unset=True),
        found.model_dump(mode="json", by_alias=True),
        found.to_dict(),
        found.to_dict(exclude_unset=False, exclude_none=True),
        json.loads(found.to_json()),
        json.loads(found.model_dump_json()),
    )
    yield from (form for n, form in enumerate(forms) if form not in forms[:n])


# --- chat completions ----------------------------------------------------------------------------


def accumulated(stream: Any) -> dict[str, Any]:
    """A message of all fields of the pieces of a stream, as many programs make it."""
    message: dict[str, Any] = {}
    for chunk in stream:
        for name, value in chunk.choices[0].delta.model_dump().items():
            if isinstance(value, str) and name != "role":
                message[name] = (message.get(name) or "") + value
            else:
                message[name] = message.get(name) or value
    return message


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's `parsed`
def test_chat_messages_are_taken_back(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    asked: dict[str, Any] = {"model": "tiny", "messages": [QUESTION], "max_tokens": 2}
    plain = create(**asked, temperature=0)
    text = plain.choices[0].message.content
    with client.chat.completions.stream(**asked, temperature=0) as stream:
        final = stream.get_final_completion()
    parsed = client.chat.completions.parse(**{**asked, "max_tokens": 40}, response_format=Shape)
    assert parsed.choices[0].message.parsed is not None
    found = [plain, create(**asked, logprobs=True, top_logprobs=2, temperature=0), final, parsed]
    histories = [form for each in found for form in dumps(each.choices[0].message)]
    streamed = accumulated(create(**asked, stream=True, temperature=0))
    assert streamed["content"] == text
    histories += [streamed, accumulated(create(**asked, stream=True, logprobs=True))]

    def again(message: Any) -> Any:
        given = create(**{**asked, "messages": [QUESTION, message, NEXT]}, temperature=0)
        return given.choices[0].message.content, given.usage.prompt_tokens

    expected = again({"role": "assistant", "content": text})
    for history in histories:
        content = history.content if isinstance(history, BaseModel) else history["content"]
        answer = again(history)
        if content == text:
            assert answer == expected
    other = again({"role": "assistant", "content": f"{text} and more"})
    assert other[1] > expected[1]  # the control


EMPTY = ("refusal", "audio", "annotations", "function_call", "tool_calls", "name", "parsed")


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_empty_fields_of_messages_are_unset(served: Any, path: str) -> None:
    def prompt(*messages: Any) -> int:
        body = {"model": "tiny", "messages": [QUESTION, *messages, NEXT]}
        body |= {"max_tokens": 1} if path == CHAT else {}
        response = served.post(path, body)
        assert response.status_code == 200, response.text
        found = response.json()
        return found["usage"]["prompt_tokens"] if path == CHAT else found["count"]

    words = "a blue circle"
    said = {"role": "assistant", "content": words}
    expected = prompt(said)
    for name in EMPTY:
        assert prompt({**said, name: None}) == expected
    for name in ("annotations", "tool_calls"):
        assert prompt({**said, name: []}) == expected
    silent = prompt({"role": "assistant"})
    assert silent < expected
    for nothing in ("", None, []):
        assert prompt({"role": "assistant", "content": nothing}) == silent
    assert prompt({"role": "assistant", "content": None, "refusal": words}) == expected
    parts = [{"type": "refusal", "refusal": words}]
    assert prompt({"role": "assistant", "content": parts}) == expected


UNKNOWN = {
    "annotations": [{"type": "url_citation"}],
    "tool_calls": [{"id": "a", "type": "function"}],
    "function_call": {"name": "f", "arguments": ""},
    "audio": {"id": "a"},
    "weight": 1,
    "reasoning_content": None,
}


def test_what_no_answer_has_is_refused(served: Any) -> None:
    for name, value in UNKNOWN.items():
        said = {"role": "assistant", "content": "no", name: value}
        response = served.post(CHAT, {"model": "tiny", "messages": [QUESTION, said, NEXT]})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"messages[1].{name}"


BOTH = (
    "metadata moderation prompt_cache_key prompt_cache_retention safety_identifier service_tier "
    "store stream stream_options temperature tool_choice tools top_logprobs top_p user "
)
UNSET = {
    CHAT: BOTH + "audio frequency_penalty functions logit_bias logprobs max_completion_tokens "
    "modalities n prediction presence_penalty reasoning_effort response_format seed stop verbosity "
    "web_search_options",
    RESPONSES: BOTH + "background context_management conversation include instructions "
    "max_tool_calls parallel_tool_calls previous_response_id prompt reasoning text truncation",
}


def test_null_is_unset(served: Any) -> None:
    """In all fields at once, and in nested ones."""
    body = {"model": "tiny", "messages": [QUESTION], "max_tokens": 1}
    given = {"model": "tiny", "input": [{"type": "message", **QUESTION}], "max_output_tokens": 1}
    for path, known in ((CHAT, body), (RESPONSES, given)):
        assert served.post(path, known | dict.fromkeys(UNSET[path].split())).status_code == 200
    nested = {
        "text": {"format": {"type": "text"}, "verbosity": None},
        "reasoning": {"effort": None, "summary": None},
    }
    assert served.post(RESPONSES, given | nested).status_code == 200
    for path, known, name in ((CHAT, body, "verbosity"), (RESPONSES, given, "top_logprobs")):
        response = served.post(path, {**known, name: 1})
        assert response.status_code == 400 and response.json()["error"]["param"] == name


# --- responses -----------------------------------------------------------------------------------


def test_output_of_responses_is_taken_back(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": [QUESTION], "max_output_tokens": 2}
    plain = client.responses.create(**asked, temperature=0)
    with client.responses.stream(**asked, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    parsed = client.responses.parse(**{**asked, "max_output_tokens": 60}, text_format=Shape)
    assert parsed.output_parsed is not None
    items = [event.item for event in events if event.type == "response.output_item.done"]
    items += [plain.output[0], final.output[0], parsed.output[0]]
    forms = [(item.content[0].text, form) for item in items for form in dumps(item)]
    forms += [
        (text, {**form, "phase": "final_answer"}) for text, form in forms if type(form) is dict
    ]

    def again(*items: Any) -> Any:
        given = client.responses.create(
            **{**asked, "input": [QUESTION, *items, NEXT]}, temperature=0
        )
        return given.output_text, given.usage.input_tokens

    expected = again({"role": "assistant", "content": plain.output_text})
    for text, form in forms:
        answer = again(form)
        if text == plain.output_text:
            assert answer == expected
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "status": None}
    assert again({**thought, "encrypted_content": None}, plain.output[0]) == expected
    assert again({"role": "assistant", "content": "other words"})[1] != expected[1]  # the control
    with pytest.raises(openai.BadRequestError, match="has no message"):
        client.responses.create(model="tiny", input=[thought])


# --- LangChain -----------------------------------------------------------------------------------


@pytest.fixture
def chat_model(served: Any) -> Callable[..., Any]:
    langchain = pytest.importorskip("langchain_openai")

    def made(**more: Any) -> Any:
        url = f"{served.url}/v1"
        options = {"model": "tiny", "base_url": url, "api_key": "unused", "max_retries": 0}
        return langchain.ChatOpenAI(**options, temperature=0, max_tokens=4, **more)

    return made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": True},
        {"output_version": "v1"},
        {"use_responses_api": True},
        {"use_responses_api": True, "output_version": "responses/v1"},
        {"use_responses_api": True, "output_version": "v1"},
    ],
    ids=str,
)
def test_messages_of_langchain_are_taken_back(
    chat_model: Callable[..., Any], options: dict[str, Any]
) -> None:
    from langchain_core.messages import HumanMessage, messages_from_dict, messages_to_dict

    model = chat_model(**options)
    question = HumanMessage("Is there a blue circle?")
    whole = model.invoke([question])
    pieces = list(model.stream([question]))
    joined = pieces[0]
    for piece in pieces[1:]:
        joined = joined + piece
    assert joined.text == whole.text and whole.text
    stored = messages_from_dict(messages_to_dict([whole]))[0]
    answers = [
        model.invoke([question, said, HumanMessage("Describe the image.")]).text
        for said in (whole, joined, stored)
    ]
    assert answers[0] and len(set(answers)) == 1

"""The clients that people use: OpenAI's, synchronous and not, and LangChain's."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from vlmfast.media import load_video

CLIP = Path(__file__).parents[2] / "examples" / "clip.mp4"


@pytest.fixture(scope="module")
def client(served: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture
def messages(image_url: Callable[..., str]) -> list[Any]:
    image = {"type": "image_url", "image_url": {"url": image_url(3), "detail": "high"}}
    text = {"type": "text", "text": "Describe it."}
    return [{"role": "user", "content": [image, text]}]


def gone(served: Any) -> float:
    """Number of clients that have left."""
    with served.client() as client:
        lines = client.get("/metrics").text.splitlines()
    values = [line for line in lines if "request_errors_total{" in line and '"499"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in values)


def test_plain_and_streamed(client: openai.OpenAI, messages: list[Any]) -> None:
    plain = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    text = plain.choices[0].message.content
    assert text and plain.choices[0].finish_reason == "stop"
    usage = plain.usage
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    assert usage.vlmfast["visual_tokens_in"] > usage.vlmfast["visual_tokens_kept"]["scope"] > 0
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == text and sum(map(bool, pieces)) > 2
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens


def test_own_fields(client: openai.OpenAI, messages: list[Any]) -> None:
    found = client.chat.completions.create(
        model="full",
        messages=messages,
        max_completion_tokens=2,
        extra_body={"recipe": "hired:0.1", "trace": True},
    )
    assert found.usage.vlmfast["recipe"] == "hired:0.1"
    assert found.usage.vlmfast["trace"]["tokens"]


def test_leaving_a_stream(served: Any, client: openai.OpenAI, messages: list[Any]) -> None:
    with client.chat.completions.create(model="tiny", messages=messages, stream=True) as stream:
        next(iter(stream))
    served.until(lambda: served.vlm.engine.load().decoding == 0)
    assert served.metric("request_errors_total", status="499") >= 1
    assert client.chat.completions.create(model="tiny", messages=messages).choices


def test_asynchronous_clients_together(served: Any, messages: list[Any]) -> None:
    async def ask(client: openai.AsyncOpenAI, stream: bool) -> str:
        found = await client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, stream=stream
        )
        if not stream:
            return found.choices[0].message.content
        text = ""
        async with found:
            async for chunk in found:
                text += chunk.choices[0].delta.content or ""
        return text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused") as client:
            return await asyncio.gather(*(ask(client, bool(n % 2)) for n in range(6)))

    found = asyncio.run(all_of_them())
    assert len(set(found)) == 1 and found[0]


def test_leaving_asynchronous_streams(served: Any, messages: list[Any]) -> None:
    """One client leaves its ``async with`` in mid-stream; another one's answer is complete."""
    before = gone(served)

    async def ask(client: openai.AsyncOpenAI, most: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, temperature=0, stream=True
        )
        text = ""
        async with stream:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if len(text) >= most:
                    break
        return text

    async def together() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused") as client:
            return await asyncio.gather(ask(client, 1), ask(client, 10**6))

    some, whole = asyncio.run(together())
    assert some and whole.startswith(some) and len(some) < len(whole)
    served.until(lambda: gone(served) == before + 1)
    served.until(lambda: served.vlm.engine.load().decoding == 0)


def test_video(served: Any, client: openai.OpenAI) -> None:
    data = CLIP.read_bytes()
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    question = "Which way does the cyan star move?"
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": question}]
    found = client.chat.completions.create(
        model="full",
        messages=[{"role": "user", "content": content}],
        extra_body={"num_frames": 4, "trace": True},
    )
    trace = found.usage.vlmfast["trace"]
    assert trace["items"] == [{"video": 0, "frame": n, "frames": 4} for n in range(4)]
    assert {token["item"] for token in trace["tokens"]} == set(range(4))
    frames = load_video(data, num_frames=4).frames
    expected = served.vlm.ask(question, video=frames)
    assert found.choices[0].message.content == expected.text
    assert found.usage.vlmfast["visual_tokens_in"] == expected.stats.visual_tokens_in
    one = client.chat.completions.create(
        model="full", messages=[{"role": "user", "content": content}], extra_body={"num_frames": 2}
    )
    assert one.usage.prompt_tokens < found.usage.prompt_tokens  # the control


def test_errors_have_their_classes(client: openai.OpenAI, messages: list[Any]) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError):
        create(model="gpt-4o", messages=messages)
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="tiny", messages=messages, temperature=7)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        create(model="tiny", messages=messages, tools=[{"type": "function", "function": {}}])


def test_keys(serve: Callable[..., Any], messages: list[Any]) -> None:
    served = serve(api_keys=("right",))
    for key, fails in (("right", False), ("wrong", True)):
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)
        if fails:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
        else:
            assert [model.id for model in client.models.list()] == ["tiny"]


def test_responses(client: openai.OpenAI, messages: list[Any], image_url: Any) -> None:
    image = {"type": "input_image", "image_url": image_url(3), "detail": "auto"}
    text = {"type": "input_text", "text": "Describe it."}
    given = [{"role": "user", "content": [image, text]}]
    plain = client.responses.create(model="tiny", input=given, temperature=0)
    chat = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    assert plain.output_text == chat.choices[0].message.content
    assert plain.status == "completed" and plain.usage.input_tokens == chat.usage.prompt_tokens
    with client.responses.stream(model="tiny", input=given, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == plain.output_text
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == plain.output_text and len(deltas) > 2
    assert [event.sequence_number for event in events] == list(range(len(events)))
    cut = client.responses.create(model="tiny", input=given, max_output_tokens=2, temperature=0)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    # The answer is part of the next request's input, as the client gives it back.
    more = [*given, *(item.model_dump(exclude_none=True) for item in plain.output)]
    more.append({"role": "user", "content": "Where is it?"})
    assert client.responses.create(model="tiny", input=more).output_text
    for refused in ({"store": True}, {"previous_response_id": plain.id}):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="tiny", input=given, **refused)


def test_langchain(served: Any, messages: list[Any], client: openai.OpenAI) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    chat = langchain_openai.ChatOpenAI(
        model="tiny", base_url=f"{served.url}/v1", api_key="unused", temperature=0, max_retries=0
    )
    expected = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    text = expected.choices[0].message.content
    found = chat.invoke(messages)
    assert found.content == text
    assert found.usage_metadata["total_tokens"] == expected.usage.total_tokens
    assert "".join(piece.content for piece in chat.stream(messages)) == text
    structured = chat.with_structured_output(
        {
            "title": "shape",
            "type": "object",
            "properties": {"shape": {"enum": ["star", "cross"]}},
            "required": ["shape"],
            "additionalProperties": False,
        },
        method="json_schema",
    )
    assert structured.invoke(messages)["shape"] in ("star", "cross")

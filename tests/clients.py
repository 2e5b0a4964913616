"""The server as real clients see it: the packages `openai`, `anthropic`, `litellm`, `langchain-openai` and
`llama-index`, and `curl`, against servers of its own.

Usage: clients.py PROGRAM. Prints a line for each promise, `ok NAME` or `not ok NAME: why`. `cargo xtask test clients`
runs it.
"""

import asyncio
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import typing

import anthropic
import openai
import pydantic

PROGRAM = sys.argv[1]
ASK = [{"role": "user", "content": "Tell me of a dog."}]
ROOT = pathlib.Path(__file__).parent.parent


def said(*args):
    """What the program itself says."""
    run = subprocess.run([PROGRAM, *args, "-q"], capture_output=True, text=True, check=True)
    return run.stdout.removesuffix("\n")


class Server:
    """The program; its key is `secret`."""

    def __init__(self, *args):
        words = [PROGRAM, "serve", "--port", "0", "-q", "--temp", "0.8", "--repeat-penalty", "1.1", *args]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        self.address = ""
        while not self.address.startswith("http://"):
            line = self.process.stderr.readline()
            assert line, f"the server does not start: {self.address}"
            self.address = line.strip()

    def openai(self, **more):
        return openai.OpenAI(base_url=self.address + "/v1", **{"api_key": "secret", "max_retries": 0, **more})

    def anthropic(self, **more):
        return anthropic.Anthropic(base_url=self.address, **{"api_key": "secret", "max_retries": 0, **more})


def chat_is_what_the_program_says(server):
    client = server.openai()
    expected = said("chat", "-st", "-p", ASK[0]["content"], "-n", "6", "--temp", "0", "--repeat-penalty", "1.1")
    settings = dict(model="story", messages=ASK, max_tokens=6, temperature=0)
    whole = client.chat.completions.create(**settings)
    assert whole.choices[0].message.content == expected, whole
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 6
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **settings))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens == 6
    assert len({c.id for c in chunks}) == 1 and chunks[-2].choices[0].finish_reason == "length"


def completions_are_what_generate_says(server):
    client = server.openai()
    expected = said("generate", "-p", "Tom", "-n", "12", "--seed", "7")
    settings = dict(model="story", prompt="Tom", max_tokens=12, seed=7, temperature=0.8, top_p=0.9)
    assert client.completions.create(**settings).choices[0].text == expected
    stream = client.completions.create(stream=True, **settings)
    assert "".join(c.choices[0].text for c in stream if c.choices) == expected
    several = client.completions.create(model="story", prompt=["Tom", "Lily"], n=2, max_tokens=3)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]


def logprobs_are_those_of_generate(server):
    client = server.openai()
    lines = said("generate", "-p", "Tom", "-n", "5", "--temp", "0", "--format", "jsonl", "--logprobs", "2")
    tokens = [line["logprobs"] for line in map(json.loads, lines.splitlines()) if line["t"] == "token"]
    found = client.completions.create(model="story", prompt="Tom", max_tokens=5, temperature=0, logprobs=2)
    assert found.choices[0].logprobs.token_logprobs == [t["chosen"]["logprob"] for t in tokens]
    chat = client.chat.completions.create(model="story", messages=ASK, max_tokens=3, logprobs=True, top_logprobs=2)
    content = chat.choices[0].logprobs.content
    assert len(content) == 3 and len(content[0].top_logprobs) == 2 and bytes(content[0].bytes).decode() == content[0].token


def responses_and_messages_are_what_a_chat_says(server):
    expected = said("chat", "-st", "-p", ASK[0]["content"], "-n", "6", "--temp", "0", "--repeat-penalty", "1.1")
    client = server.openai()
    settings = dict(model="story", input=ASK[0]["content"], max_output_tokens=6, temperature=0)
    response = client.responses.create(**settings)
    assert response.output_text == expected and response.status == "incomplete"
    events = list(client.responses.create(stream=True, **settings))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == expected
    client = server.anthropic()
    settings = dict(model="story", messages=ASK, max_tokens=6, extra_body={"temperature": 0})
    message = client.messages.create(**settings)
    assert message.content[0].text == expected and message.stop_reason == "max_tokens"
    with client.messages.stream(**settings) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().usage.output_tokens == 6
    count = client.messages.count_tokens(model="story", messages=ASK).input_tokens
    assert count == message.usage.input_tokens + message.usage.cache_read_input_tokens


def errors_are_those_that_clients_know(server):
    def fails(kind, does):
        try:
            does()
        except kind as e:
            return e
        raise AssertionError(f"no {kind.__name__}")

    client, other = server.openai(), server.anthropic()
    bad = fails(openai.BadRequestError, lambda: client.completions.create(model="story", prompt="a", temperature=-1))
    assert bad.body["param"] == "temperature", bad.body
    long = "Once upon a time " * 4000
    bad = fails(openai.BadRequestError, lambda: client.completions.create(model="story", prompt=long))
    assert bad.code == "context_length_exceeded", bad.body
    fails(openai.NotFoundError, lambda: client.models.retrieve("other"))
    bad = fails(openai.BadRequestError, lambda: client.embeddings.create(model="story", input="a", dimensions=0))
    assert bad.body["param"] == "dimensions", bad.body
    fails(openai.AuthenticationError, lambda: server.openai(api_key="wrong").models.list())
    fails(anthropic.AuthenticationError, lambda: server.anthropic(api_key="wrong").messages.create(
        model="story", messages=ASK, max_tokens=1))
    fails(anthropic.BadRequestError, lambda: other.messages.create(model="story", messages=[], max_tokens=1))
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    bad = fails(openai.BadRequestError, lambda: client.chat.completions.create(model="story", messages=ASK, tools=[tool]))
    assert bad.body["param"] == "tools"
    assert [m.id for m in client.models.list()] == ["story"]


def a_client_that_gives_up_frees_its_slot(server):
    endless = dict(model="story", prompt="Tom", max_tokens=-1, extra_body={"ignore_eos": True})
    try:
        server.openai(timeout=0.05).completions.create(**endless)
        raise AssertionError("it was too fast to give up")
    except openai.APITimeoutError:
        pass
    stream = server.openai().completions.create(stream=True, **endless)
    next(iter(stream))
    stream.close()
    client = server.openai()
    for _ in range(200):
        metrics = client._client.get(server.address + "/metrics").text
        if 'vllm:num_requests_running{model_name="story"} 0\n' in metrics:
            return
        time.sleep(0.05)
    raise AssertionError("a slot is still taken")


class Animal(pydantic.BaseModel):
    kind: typing.Literal["cat", "fox"]
    age: typing.Annotated[int, pydantic.Field(ge=0, le=99)]


def texts_follow_a_schema(server):
    client = server.openai()
    parsed = client.chat.completions.parse(model="story", messages=ASK, response_format=Animal, max_tokens=200, seed=1)
    assert parsed.choices[0].finish_reason == "stop", parsed
    assert parsed.choices[0].message.parsed.kind in ("cat", "fox"), parsed
    settings = dict(model="story", messages=ASK, max_tokens=200, seed=1)
    schema = {"type": "json_schema", "json_schema": {"name": "animal", "schema": Animal.model_json_schema()}}
    stream = client.chat.completions.create(stream=True, response_format=schema, **settings)
    Animal.model_validate_json("".join(c.choices[0].delta.content or "" for c in stream))
    some = client.chat.completions.create(response_format={"type": "json_object"}, **settings).choices[0]
    assert some.finish_reason == "length" or isinstance(json.loads(some.message.content), dict), some


def tools_are_called(server):
    """By a model that can say nothing but a call, in Llama 3's form."""
    with tempfile.TemporaryDirectory() as folder:
        for file in (ROOT / "models/story").iterdir():
            if file.suffix in (".json", ".safetensors") and "packed" not in file.name:
                os.symlink(file, os.path.join(folder, file.name))
        config = os.path.join(folder, "tokenizer_config.json")
        os.remove(config)
        template = (ROOT / "tests/fixtures/chat/llama3.2-instruct.jinja").read_text()
        known = json.loads((ROOT / "models/story/tokenizer_config.json").read_text())
        with open(config, "w") as file:
            json.dump(known | {"chat_template": template}, file)
        place = {"type": "object", "properties": {"at": {"enum": ["fox", "cat"]}}, "required": ["at"], "additionalProperties": False}
        call = {"type": "object", "properties": {"name": {"const": "look"}, "parameters": place},
                "required": ["name", "parameters"], "additionalProperties": False}
        calling = Server("-m", folder, "--json-schema", json.dumps(call))
        try:
            calls(calling, place)
        finally:
            calling.process.terminate()
            calling.process.wait(60)


def calls(server, place):
    client = server.openai()
    tool = {"type": "function", "function": {"name": "look", "description": "Look at it", "parameters": place}}
    settings = dict(model="story", tools=[tool], temperature=0, max_tokens=200)
    whole = client.chat.completions.create(messages=ASK, **settings).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None, whole
    made = whole.message.tool_calls[0]
    assert made.function.name == "look" and json.loads(made.function.arguments)["at"] in ("fox", "cat"), made
    chunks = list(client.chat.completions.create(messages=ASK, stream=True, **settings))
    streamed = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert streamed[0].function.name == "look" and len(streamed) > 2, chunks
    assert "".join(c.function.arguments for c in streamed) == made.function.arguments, chunks
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # What the tool said goes back.
    more = [*ASK, whole.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": made.id, "content": "red"}]
    again = client.chat.completions.create(model="story", messages=more, tools=[tool], max_tokens=3)
    assert again.usage.prompt_tokens > client.chat.completions.create(
        model="story", messages=ASK, tools=[tool], max_tokens=1).usage.prompt_tokens
    # Anthropic's form of the same.
    mine = {"name": "look", "description": "Look at it", "input_schema": tool["function"]["parameters"]}
    said = server.anthropic().messages.create(model="story", max_tokens=200, messages=ASK, tools=[mine],
                                              extra_body={"temperature": 0})
    used = [part for part in said.content if part.type == "tool_use"]
    assert said.stop_reason == "tool_use" and used[0].name == "look" and used[0].input["at"] in ("fox", "cat"), said


def clients_beside_each_other_have_the_same_answers(server):
    prompts = [f"Once there was a {what}" for what in ("fox", "cat", "dog", "girl", "boy", "bird")]
    settings = dict(model="story", max_tokens=20, seed=3, temperature=0.9)
    alone = [server.openai().completions.create(prompt=p, **settings).choices[0].text for p in prompts]

    async def together():
        async with openai.AsyncOpenAI(base_url=server.address + "/v1", api_key="secret", max_retries=0) as client:
            asked = [client.completions.create(prompt=p, **settings) for p in prompts]
            cancelled = asyncio.create_task(client.completions.create(
                model="story", prompt="Tom", max_tokens=-1, extra_body={"ignore_eos": True}))
            answers = await asyncio.gather(*asked)
            cancelled.cancel()
            return [a.choices[0].text for a in answers]

    assert asyncio.run(together()) == alone


def embeddings_are_what_embed_says(server):
    os.environ["LLAMA_INDEX_CACHE_DIR"] = tempfile.gettempdir()
    from langchain_openai import OpenAIEmbeddings  # Late: both take seconds.
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    texts = ["Tom is a dog.", "Once upon a time"]
    run = [PROGRAM, "embed", "-q", "--pooling", "mean", *texts]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    expected = [json.loads(line)["embedding"] for line in lines]

    def same(found):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert len(one) == len(other) and max(abs(a - b) for a, b in zip(one, other)) < 1e-6, (one, other)

    client = server.openai()
    for form in ("float", "base64", openai.NOT_GIVEN):
        answer = client.embeddings.create(model="story", input=texts, encoding_format=form)
        assert [each.index for each in answer.data] == [0, 1] and answer.usage.prompt_tokens > 0, answer.usage
        same([each.embedding for each in answer.data] if form != "base64" else expected)
    short = client.embeddings.create(model="story", input=texts[0], dimensions=8).data[0].embedding
    assert len(short) == 8 and abs(sum(x * x for x in short) - 1) < 1e-5, short
    address = dict(base_url=server.address + "/v1", api_key="secret", model="story", max_retries=0)
    langchain = OpenAIEmbeddings(check_embedding_ctx_length=False, **address)
    same(langchain.embed_documents(texts))
    same([langchain.embed_query(text) for text in texts])
    address = dict(api_base=server.address + "/v1", api_key="secret", model_name="story", max_retries=0)
    llama_index = OpenAILikeEmbedding(**address)
    same(llama_index.get_text_embedding_batch(texts))
    same([llama_index.get_query_embedding(text) for text in texts])


def litellm_understands_it(server):
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # Nothing of a network.
    import litellm  # Late: it takes seconds.

    litellm.suppress_debug_info = True

    expected = said("chat", "-st", "-p", ASK[0]["content"], "-n", "6", "--temp", "0", "--repeat-penalty", "1.1")
    settings = dict(model="openai/story", api_base=server.address + "/v1", api_key="secret", messages=ASK, max_tokens=6,
                    temperature=0, num_retries=0)
    whole = litellm.completion(**settings)
    assert whole.choices[0].message.content == expected and whole.usage.completion_tokens == 6, whole
    chunks = litellm.completion(stream=True, **settings)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected
    try:
        litellm.completion(**settings | {"api_key": "wrong"})
        raise AssertionError("any key will do")
    except litellm.AuthenticationError:
        pass
    try:
        litellm.completion(**settings | {"temperature": -1})
        raise AssertionError("any temperature will do")
    except litellm.BadRequestError as e:
        assert "temperature" in str(e), e


def curl_understands_it(server):
    def curl(path, *args):
        words = ["curl", "-sS", "-w", "\n%{http_code}", *args, server.address + path]
        body, _, status = subprocess.run(words, capture_output=True, text=True, check=True).stdout.rpartition("\n")
        return int(status), body

    key = ["-H", "Authorization: Bearer secret"]
    body = json.dumps({"prompt": "Tom", "max_tokens": 4, "temperature": 0, "stream": True})
    status, events = curl("/v1/completions", "-N", *key, "-d", body)
    texts = [json.loads(e[6:])["choices"][0]["text"] for e in events.split("\n\n") if e.startswith("data: {")]
    expected = said("generate", "-p", "Tom", "-n", "4", "--temp", "0", "--format", "jsonl")
    expected = "".join(line["text"] for line in map(json.loads, expected.splitlines()) if line["t"] == "token")
    assert (status, "".join(texts)) == (200, expected) and events.strip().endswith("data: [DONE]"), events
    # With HTTP/2 asked for, in chunks, and with a body that waits to be asked for.
    for more in (["--http2"], ["-H", "Transfer-Encoding: chunked"], ["-H", "Expect: 100-continue"]):
        assert curl("/v1/completions", *more, *key, "-d", body)[0] == 200, more
    assert curl("/health") == (200, '{"status":"ok"}') and curl("/v1/models")[0] == 401
    assert curl("/v1/completions", *key, "-d", "{")[0] == 400 and curl("/v1/completions", *key)[0] == 405
    assert curl("/", "-I")[0] == 200 and curl("/nothing", *key)[0] == 404


def main():
    server = Server("--api-key", "secret", "--slots", "3", "--pooling", "mean")
    checks = [
        chat_is_what_the_program_says,
        completions_are_what_generate_says,
        logprobs_are_those_of_generate,
        responses_and_messages_are_what_a_chat_says,
        errors_are_those_that_clients_know,
        texts_follow_a_schema,
        tools_are_called,
        clients_beside_each_other_have_the_same_answers,
        embeddings_are_what_embed_says,
        litellm_understands_it,
        curl_understands_it,
        a_client_that_gives_up_frees_its_slot,
    ]
    for check in checks:
        name = check.__name__.replace("_", " ")
        try:
            check(server)
            print("ok", name, flush=True)
        except Exception as e:  # Whatever it is, the others are tried.
            print(f"not ok {name}: {type(e).__name__}: {e}".replace("\n", " ")[:1000], flush=True)
    server.process.terminate()
    print("ok the server ends" if server.process.wait(60) == 0 else "not ok the server ends: another code", flush=True)


main()

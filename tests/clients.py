"""The server as real clients see it: the `openai` and `anthropic` packages against a server of its own.

Usage: clients.py PROGRAM. Prints a line for each promise, `ok NAME` or `not ok NAME: why`. `cargo xtask test clients`
runs it.
"""

import json
import subprocess
import sys
import time

import anthropic
import openai

PROGRAM = sys.argv[1]
ASK = [{"role": "user", "content": "Tell me of a dog."}]


def said(*args):
    """What the program itself says."""
    run = subprocess.run([PROGRAM, *args, "-q"], capture_output=True, text=True, check=True)
    return run.stdout.removesuffix("\n")


class Server:
    def __init__(self, *args):
        words = [PROGRAM, "serve", "--port", "0", "-q", *args]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        self.address = ""
        while not self.address.startswith("http://"):
            self.address = self.process.stderr.readline().strip()

    def openai(self, **more):
        return openai.OpenAI(base_url=self.address + "/v1", **{"api_key": "secret", "max_retries": 0, **more})

    def anthropic(self, **more):
        return anthropic.Anthropic(base_url=self.address, **{"api_key": "secret", "max_retries": 0, **more})


def chat_is_what_the_program_says(server):
    client = server.openai()
    expected = said("chat", "-st", "-p", ASK[0]["content"], "-n", "6", "--temp", "0")
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
    expected = said("chat", "-st", "-p", ASK[0]["content"], "-n", "6", "--temp", "0")
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
    fails(openai.NotFoundError, lambda: client.embeddings.create(model="story", input="a"))
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


def main():
    server = Server("--api-key", "secret", "--slots", "3")
    checks = [
        chat_is_what_the_program_says,
        completions_are_what_generate_says,
        logprobs_are_those_of_generate,
        responses_and_messages_are_what_a_chat_says,
        errors_are_those_that_clients_know,
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

"""Chat templates as transformers renders them: every template in the source distribution of llama-cpp-python and in this
project with the conversations below, and the expressions of `tests/fixtures/chat/expressions.json`, in jinja2 and in
the project's renderer.

Usage: templates.py RENDERER SDIST. Prints a line for each template, `ok NAME` or `not ok NAME: why`. A template agrees
if the texts are equal, if both refuse, or if ours refuses in one line that names the construct, which is then shown.
`cargo xtask test templates` runs it.
"""

import collections
import datetime
import json
import pathlib
import subprocess
import sys
import tarfile

import jinja2
import jinja2.ext
import jinja2.sandbox

ROOT = pathlib.Path(__file__).parent.parent
UNIX = 1_709_219_105  # 2024-02-29 15:05:05 UTC
NOW = datetime.datetime.fromtimestamp(UNIX, datetime.timezone.utc)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


class Generation(jinja2.ext.Extension):
    """`{% generation %}`, whose body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller):
        return caller()


def transformers(default=None):
    """An environment as transformers makes it; `default` is that of `json.dumps`."""

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys,
                          default=default)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals |= {"raise_exception": raise_exception, "strftime_now": NOW.strftime}
    return made


def call(name, arguments, number=0):
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}abcdef", "type": "function", "function": function}


def tool(name, description, parameters):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = tool("get_weather", "The weather of a \"place\" <now> & later", {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "A city, as in Zürich"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"type": ["integer", "null"], "minimum": 0, "maximum": 1e16, "default": None},
        "near": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}, "required": ["lon", "lat"]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "exact": {"type": "boolean", "default": False},
        "tolerance": {"type": "number", "default": 1e-05, "exclusiveMinimum": 1.0},
    },
    "required": ["place", "days"],
})
MOVE = tool("move", "Moves a file.", {
    "type": "object", "properties": {"src": {"type": "string"}, "dst": {"type": "string"}}, "required": ["src", "dst"]})
NOTHING = tool("noop", "", {"type": "object", "properties": {}})
ARGUMENTS = {"place": "Zürich “☂”", "days": 3, "near": {"lon": 8.55, "lat": 1e-07}, "tags": ["a", "b's"], "exact": True, "tolerance": None}
USER = {"role": "user", "content": "What is the weather?"}
SYSTEM = {"role": "system", "content": "You are a weather man."}
ANSWER = {"role": "assistant", "content": "It rains."}
CALLED = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [call("get_weather", json.dumps(ARGUMENTS))]},
    {"role": "tool", "tool_call_id": "call_0abcdef", "name": "get_weather", "content": "{\"sky\": \"rain\", \"mm\": 1e-05}"},
]
SEVERAL = [
    SYSTEM,
    USER,
    {"role": "assistant", "content": "I look.", "reasoning_content": "Two calls.",
     "tool_calls": [call("move", {"src": "b", "dst": "a"}, 0), call("noop", {}, 1)]},
    {"role": "tool", "tool_call_id": "call_0abcdef", "name": "move", "content": "done"},
    {"role": "tool", "tool_call_id": "call_1abcdef", "name": "noop", "content": [{"type": "text", "text": "nothing"}]},
    {"role": "assistant", "content": "<think>\nWell.\n</think>\n\nMoved."},
    {"role": "user", "content": "Thanks.\n"},
]

# Messages as clients send them, and what else a template gets.
CONVERSATIONS = {
    "plain": dict(messages=[USER]),
    "system": dict(messages=[SYSTEM, USER]),
    "turns": dict(messages=[SYSTEM, USER, ANSWER, {"role": "user", "content": "  And tomorrow? "}]),
    "answered": dict(messages=[USER, ANSWER], add_generation_prompt=False),
    "tools": dict(messages=[SYSTEM, USER], tools=[WEATHER, MOVE]),
    "called": dict(messages=CALLED, tools=[WEATHER]),
    "answered-call": dict(messages=[*CALLED, ANSWER, USER], tools=[WEATHER, MOVE]),
    "several-calls": dict(messages=SEVERAL, tools=[MOVE, NOTHING]),
    "reasoning": dict(messages=[USER, ANSWER | {"reasoning_content": "Clouds.\n"}, USER]),
    "parts": dict(messages=[{"role": "user", "content": [{"type": "text", "text": "Wet"}, {"type": "text", "text": "?"}]}]),
    "developer": dict(messages=[{"role": "developer", "content": "Be brief."}, USER, ANSWER, USER]),
    "unicode": dict(messages=[{"role": "user", "content": "日本 \u2028 'é' \"\\\" \x85 <|x|> {{ 1 }} \ttab\r\nend\n\n"}], tools=[NOTHING]),
    "thinking-off": dict(messages=[SYSTEM, USER], kwargs={
        "enable_thinking": False, "thinking": False, "reasoning_effort": "low", "date_string": "1 Jan 2020", "n": {"b": 1e16, "a": [None]}}),
    "thinking-on": dict(messages=SEVERAL[1:], tools=[MOVE], kwargs={"enable_thinking": True, "thinking": True, "documents": [
        {"title": "T", "text": "Rain falls.", "doc_id": 1}]}),
}


def text(content):
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def normalised(message):
    """A message as servers hand it to a template: contents are texts, arguments objects."""
    made = {"role": {"developer": "system"}.get(message["role"], message["role"]), "content": text(message["content"])}
    if "reasoning_content" in message:
        made["reasoning_content"] = message["reasoning_content"]
    if "tool_calls" in message:
        made["tool_calls"] = [call(c["function"]["name"], parsed(c["function"]["arguments"])) | {"id": c["id"]}
                              for c in message["tool_calls"]]
    return made | {name: message[name] for name in ("tool_call_id", "name") if name in message}


def parsed(arguments):
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def ours(name, source, case):
    """What the project's renderer is given."""
    def of(message):
        made = {("reasoning" if k == "reasoning_content" else k): v for k, v in message.items() if k != "tool_calls"}
        made["tool_calls"] = [{"id": c["id"], "name": c["function"]["name"], "arguments": json.dumps(c["function"]["arguments"])}
                              for c in message.get("tool_calls", [])]
        return made

    return {
        "name": name, "source": source, "unix": UNIX, "bos": TOKENS["bos_token"],
        "tokens": [t for t in TOKENS.items() if t[0] != "bos_token"],
        "add_generation_prompt": case.get("add_generation_prompt", True),
        "messages": [of(normalised(m)) for m in case["messages"]],
        "tools": json.dumps(case["tools"]) if "tools" in case else None,
        "kwargs": [(k, json.dumps(v)) for k, v in case.get("kwargs", {}).items()],
    }


class Jinja2:
    """A template in jinja2."""

    def __init__(self, source):
        # Ours renders two things that Python refuses: no tools are no list, and what makes a list is none for JSON.
        self.strict, self.lenient = (compiled(environment, source) for environment in ENVIRONMENTS)

    def render(self, case):
        """The text, or why there is none; and the text where less is refused."""
        strict = rendered(self.strict, self.values(case))
        if isinstance(strict, str):
            return strict, strict
        return strict, rendered(self.lenient, {**self.values(case), "tools": case.get("tools", [])})

    def values(self, case):
        messages, tools = [normalised(m) for m in case["messages"]], case.get("tools")
        return {"documents": None, "add_generation_prompt": case.get("add_generation_prompt", True), **TOKENS,
                "messages": messages, "tools": tools, **case.get("kwargs", {})}


# As transformers', and one that writes what makes a list as the list.
ENVIRONMENTS = transformers(), transformers(list)


def compiled(environment, source):
    try:
        return environment.from_string(source)
    except Exception as why:
        return why


def rendered(template, values):
    if isinstance(template, Exception):
        return template
    try:
        return template.render(**values)
    except Exception as why:  # Templates fail in any way.
        return why


def sources(sdist):
    """Templates by name."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = pathlib.PurePosixPath(member.name)
            if path.suffix == ".jinja" and member.isfile():
                yield path.name, archive.extractfile(member).read().decode()
    for path in sorted(ROOT.glob("tests/fixtures/**/*.jinja")):
        yield str(path.relative_to(ROOT)), path.read_text()
    for path in sorted([*ROOT.glob("models/*/tokenizer_config.json"), *ROOT.glob("tests/fixtures/**/tokenizer_config.json")]):
        source = json.loads(path.read_text()).get("chat_template")
        if source:
            yield str(path.relative_to(ROOT)), source


def short(text, at):
    return repr(text[max(0, at - 20):at + 40])


def compare(answer, theirs):
    """`None` where they agree, else what is wrong; and why ours refuses what theirs does not."""
    strict, lenient = theirs
    found, refused = answer.get("text"), answer.get("refused")
    if found is None:
        one_line = len(refused) < 400 and "\n" not in refused
        return (None, refused if isinstance(strict, str) else None) if one_line else (f"not a line: {refused}", None)
    if found in (strict, lenient):
        return None, None
    if not isinstance(strict, str):
        return f"ours {short(found, 0)}, theirs refused: {strict!r}", None
    at = next((i for i, (a, b) in enumerate(zip(found, strict)) if a != b), min(len(found), len(strict)))
    return f"ours {short(found, at)}, theirs {short(strict, at)}", None


def main():
    renderer, sdist = sys.argv[1:]
    templates = {name: (source, CONVERSATIONS) for name, source in sources(sdist)}
    expressions = json.loads((ROOT / "tests/fixtures/chat/expressions.json").read_text())
    greeting = {"messages": [{"role": "user", "content": "hi"}]}
    templates |= {source: (source, {"": greeting}) for source, _ in expressions}
    cases = [(name, source, *case) for name, (source, cases) in templates.items() for case in cases.items()]
    lines = "".join(json.dumps(ours(name, source, case)) + "\n" for name, source, _, case in cases)
    run = subprocess.run([renderer], input=lines, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in run.stdout.split("\n")[:-1]]
    wrong, refused, known = collections.defaultdict(list), collections.defaultdict(list), {}
    for (name, source, conversation, case), answer in zip(cases, answers, strict=True):
        template = known.get(name) or known.setdefault(name, Jinja2(source))
        different, alone = compare(answer, template.render(case))
        wrong[name] += [f"{conversation}: {different}"] if different else []
        refused[name] += [f"{conversation}: {alone}"] if alone else []
    for name, (source, all_cases) in templates.items():
        if wrong[name]:
            print(f"not ok {name}: {len(wrong[name])} of {len(all_cases)} differ, {wrong[name][0]}"[:1000], flush=True)
        elif refused[name]:
            print(f"ok {name} (of {len(all_cases)}, {len(refused[name])} are refused: {refused[name][0]})", flush=True)
        else:
            print(f"ok {name}", flush=True)


main()

"""The server's page as people see it: headless Chromium, driven through chromedriver, with a server of its own and a
stand-in for one whose answers are written here.

Usage: page.py PROGRAM [FOLDER]. Prints a line for each promise, `ok NAME` or `not ok NAME: why`; pictures of the page go
to FOLDER. `cargo xtask test clients` runs it.
"""

import atexit
import base64
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

PROGRAM, FOLDER = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
PATIENCE = 20


def fetched(url, body=None, method=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.read()
    except urllib.error.HTTPError as e:
        raise AssertionError(e.read().decode()[:500]) from None


class Server:
    """The program."""

    def __init__(self, *args):
        words = [PROGRAM, "serve", "--port", "0", "-q", "--temp", "0.8", "--repeat-penalty", "1.1", *args]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        atexit.register(self.process.terminate)
        self.address = ""
        while not self.address.startswith("http://"):
            line = self.process.stderr.readline()
            assert line, f"the server does not start: {self.address}"
            self.address = line.strip()

    def running(self):
        page = fetched(self.address + "/metrics").decode()
        return int(float(page.split("vllm:num_requests_running{")[1].splitlines()[0].split()[-1]))


HOSTILE = r"""<img src=x onerror="window.hit=1"><script>window.hit=1</script>

# A <b>title</b>

1. one
   - **inner**
2. two `<i>code</i>`

```html
<script>window.hit=1</script>
```

| a | b |
|---|---|
| <u>1</u> | 2 |

> said *so* and 2*3*4
>> twice
"""

LINKS = r"""[good](https://example.com/a_(b)?q=1 "t"), [*also*](http://example.com/x), <https://example.com/y>, and
https://example.com/z_z_z (see https://example.com/end). `https://example.com/code`
[bad](javascript:window.hit=1) [bad](JavaScript:window.hit=1) [bad](java	script:window.hit=1) [bad](data:text/html,<script>)
[bad](//example.com) [bad](vbscript:x) [bad](file:///etc/passwd) [bad](https://bank.example@evil.example/) [bad](blob:x)
![picture](https://example.com/i.png) [x](https://example.com/"onclick="window.hit=1") [open](https://example.com
"""

EMPHASIS = r"""***both** one* and **strong *inner* strong** and ~~gone~~, snake_case_name, __init__.py, 2 * 3 * 4, **open, \*not\*

- [ ] to do
- [x] **done**
  1. inside
     - deeper

| left | right | code |
|:---|---:|:-:|
| a \| b | 1 | `c` |
| short |
| too | many | cells | here |

not | a table
| --- |

a | b
---|---
1 | 2
"""

CODE = """```python
# a comment, "quoted"
def f(x="text # no comment", y=12.5):
    return None
```

```rust
fn f<'a>(x: &'a str) -> char { 'x' } // comment
```

```html
<script>window.hit=1</script> <!-- <b> -->
```

```
def plain
```
"""

# Each would take minutes if the time grew with the square of the length.
LONG = {"stars": "*a " * 30000, "brackets": "[" * 50000, "links": "[a](" * 20000, "ticks": "`a`` " * 20000, "quotes": "> " * 3000,
        "lists": "".join(" " * 2 * i + "- a\n" for i in range(300)), "nested": "**a " * 9000 + "a** " * 9000,
        "columns": "|" * 40001 + "\n" + "|-" * 40000 + "|\n" + "|\n" * 5000, "fences": "`" * 70000 + "\n",
        "rules": "- " * 30000 + "x", "strings": "```js\n" + "'\"`/*" * 9000, "urls": "https://" + "a.)" * 20000, "underscores": "_" * 50000}


class Stand(http.server.BaseHTTPRequestHandler):
    """A server whose answer is what its class says, in pieces."""

    protocol_version = "HTTP/1.1"
    page, deltas, refusal, cut, pause, asked = b"", [], None, None, 0.0, []
    reason, continues = "stop", True

    def log_message(self, *args):
        pass

    def send(self, status, kind, data):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/":
            self.send(200, "text/html; charset=utf-8", Stand.page)
        else:
            self.send(200, "application/json", json.dumps({"data": [{"id": "stand-in.GGUF", "context_length": 2000}]}).encode())

    def do_POST(self):
        Stand.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if Stand.refusal:
            status, message = Stand.refusal
            return self.send(status, "application/json", json.dumps({"error": {"message": message}}).encode())
        request = Stand.asked[-1]
        deltas, begun = Stand.deltas, ""
        if request.get("continue_final_message"):
            if not Stand.continues:
                return self.send(400, "application/json", b'{"error": {"message": "cannot be continued"}}')
            begun = request["messages"][-1]["content"]
            while begun and deltas and begun.startswith(deltas[0].get("content", "")):
                begun, deltas = begun[len(deltas[0].get("content", "")):], deltas[1:]
            assert not begun, begun
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        parts = [{"choices": [{"delta": delta}]} for delta in deltas]
        parts.append({"choices": [{"delta": {}, "finish_reason": Stand.reason}]})
        parts.append({"choices": [], "usage": {"prompt_tokens": 1000, "completion_tokens": len(deltas)}})
        for i, part in enumerate(parts):
            if Stand.cut == i:
                Stand.cut = None
                break
            self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
            self.wfile.flush()
            time.sleep(Stand.pause)
        else:
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True  # a page that stopped an answer


class Browser:
    """A WebDriver session."""

    def __init__(self):
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        self.driver = driver
        for line in driver.stdout:
            if "successfully on port" in line:
                self.url = "http://127.0.0.1:" + line.split()[-1].rstrip(".")
                break
        # In a container there is no sandbox for root and little shared memory.
        flags = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1200,800"]
        options = {"goog:chromeOptions": {"args": flags, "binary": os.environ.get("CHROMIUM", "/usr/bin/chromium")}}
        made = self.call("", {"capabilities": {"alwaysMatch": options}})
        self.url += "/session/" + made["sessionId"]

    def call(self, path, body=None, method=None):
        base = self.url if "/session/" in self.url else self.url + "/session"
        return json.loads(fetched(base + path, body, method))["value"]

    def run(self, script, *args):
        return self.call("/execute/sync", {"script": script, "args": list(args)})

    def devtools(self, command, **parameters):
        return self.call("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, address):
        self.call("/url", {"url": address})

    def type(self, text, where="#input"):
        found = self.call("/element", {"using": "css selector", "value": where})
        self.call(f"/element/{next(iter(found.values()))}/value", {"text": text})

    def click(self, where):
        found = self.call("/element", {"using": "css selector", "value": where})
        self.call(f"/element/{next(iter(found.values()))}/click", {})

    def press(self, name):
        """Presses the last button of this name that is seen."""
        script = """const all = [...document.querySelectorAll("button")].filter(b => b.offsetParent && b.textContent === arguments[0]);
                    all.at(-1)?.click(); return !!all.length"""
        assert self.run(script, name), f"no button {name}"

    def text(self, where):
        return self.run("return [...document.querySelectorAll(arguments[0])].map(n => n.innerText)", where)

    def until(self, script, *args):
        end = time.monotonic() + PATIENCE
        while not (found := self.run("return " + script, *args)):
            assert time.monotonic() < end, f"it never comes to that: {script}; the page says {self.text('body')}"
            time.sleep(0.02)
        return found

    def answered(self):
        self.until("""document.querySelector("#send").textContent === "Send" && document.querySelector("article.assistant") !== null""")
        return self.text("article.assistant:last-of-type > .text")[0]

    def ask(self, text):
        self.type(text + "\ue007")  # Enter

    def fresh(self, address):
        """The page as somebody sees it who was never there."""
        self.open(address)
        self.run("localStorage.clear()")
        self.open(address)

    def stored(self):
        """The messages of the conversation, as they are kept."""
        return self.run("return JSON.parse(localStorage['chat:' + chat.id]).messages")

    def picture(self, name):
        if FOLDER:
            with open(os.path.join(FOLDER, name + ".png"), "wb") as file:
                file.write(base64.b64decode(self.call("/screenshot")))


def a_conversation_is_what_the_server_says(b, server, _stand):
    b.fresh(server.address)
    b.click("#settings")
    b.type("0", "#temperature")
    b.type("6", "#max_tokens")
    b.until("document.querySelector('#top_k').placeholder !== ''")
    b.picture("settings")
    b.press("Done")
    b.ask("Tell me of a dog.")
    said = subprocess.run([PROGRAM, "chat", "-st", "-p", "Tell me of a dog.", "-n", "6", "--temp", "0", "--repeat-penalty", "1.1", "-q"],
                          capture_output=True, text=True, check=True).stdout.strip()
    assert " ".join(b.answered().split()) == " ".join(said.split()), (b.answered(), said)
    foot = b.text("article.assistant .foot")[0]
    assert "cut off" in foot, foot
    b.ask("And then?")
    b.answered()
    assert len(b.text("article")) == 4
    b.picture("conversation")
    b.open(server.address)
    assert len(b.text("article")) == 4 and b.text("#list li button")[0] == "Tell me of a dog.", b.text("body")


def an_answer_stops_and_is_generated_again(b, server, _stand):
    b.fresh(server.address)
    b.run("localStorage.setItem('settings', JSON.stringify({max_tokens: '1500', temperature: '0.9'}))")
    b.open(server.address)
    b.ask("Tell me a very long story.")
    b.until("document.querySelector('article.assistant > .text')?.innerText.length > 20")
    b.picture("streaming")
    b.press("Stop")
    first = b.answered()
    assert "stopped" in b.text("article.assistant .foot")[0] and first
    end = time.monotonic() + PATIENCE
    while server.running():
        assert time.monotonic() < end, "the server goes on"
        time.sleep(0.02)
    b.press("Regenerate")
    b.until("document.querySelector('article.assistant > .text')?.innerText.length > 20")
    b.type("\ue00c")  # Escape
    assert b.answered() and len(b.text("article")) == 2
    b.press("Edit")
    b.picture("edit")
    b.press("Cancel")
    assert len(b.text("article")) == 2 and b.run("return document.querySelector('#input').value") == ""
    b.press("Edit")
    b.ask(" Of a cat.")
    b.until("document.querySelector('article.assistant > .text')?.innerText.length > 20")
    b.press("Stop")
    b.answered()
    assert b.text("article.user > .text") == ["Tell me a very long story. Of a cat."]


def what_a_model_writes_is_text(b, _server, stand):
    b.fresh(stand)
    Stand.deltas = [{"reasoning_content": "Hm <b>.</b>"}] + [{"content": HOSTILE[i:i + 7]} for i in range(0, len(HOSTILE), 7)]
    Stand.pause = 0.002
    Stand.deltas.append({"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": '{"at": "<b>"}'}}]})
    b.ask("<b>bold</b>")
    b.answered()
    assert b.run("return window.hit ?? 0") == 0 and b.text("article.user > .text") == ["<b>bold</b>"]
    inside = "document.querySelectorAll('article.assistant {}').length"
    assert b.run("return " + inside.format(":is(img, script, b, i, u)")) == 0
    for what, count in [("h3", 1), ("ol > li", 2), ("ol > li ul > li strong", 1), ("li code", 1), (".text pre", 1), ("td", 2),
                        ("blockquote em", 1), ("blockquote blockquote", 1), (".calls pre", 1)]:
        assert b.run("return " + inside.format(what)) == count, what
    assert b.text("article.assistant h3") == ["A <b>title</b>"] and "2*3*4" in b.text("blockquote")[0]
    assert b.run("return [...document.querySelectorAll('ol > li')].map(l => l.value)") == [1, 2]
    assert not b.run("return document.querySelector('details').open"), "thoughts are folded"
    assert "Calls look" in b.text(".calls")[0]
    foot = b.text("article.assistant .foot")[0]
    assert f"{len(Stand.deltas)} tokens · " in foot and foot.endswith(" tokens/s"), foot
    b.picture("hostile")
    b.run("document.querySelector('details').open = true")
    assert "Hm <b>.</b>" in b.text("details")[0]
    b.run("show()")
    assert b.run("return document.querySelector('details').open"), "what was unfolded stays so"


def links_lead_only_to_the_web(b, _server, stand):
    b.fresh(stand)
    Stand.deltas = [{"content": LINKS}]
    b.ask("links")
    b.answered()
    links = b.run("return [...document.querySelectorAll('article a')].map(a => [a.textContent, a.getAttribute('href'), a.rel, a.target, a.title])")
    at = "https://example.com/"
    assert [link[:2] for link in links] == [
        ["good", at + "a_(b)?q=1"], ["also", "http://example.com/x"], [at + "y"] * 2, [at + "z_z_z"] * 2, [at + "end"] * 2,
        ["picture", at + "i.png"], ["x", at + "%22onclick=%22window.hit=1%22"], [at[:-1], at]], links
    for _, href, rel, target, title in links:
        assert href.startswith(("http://example.com", at)) and rel == "noopener noreferrer" and (target, title) == ("_blank", href), links
    text = b.text("article.assistant > .text")[0]
    assert "(javascript:window.hit=1)" in text and "https://bank.example@evil.example/" in text and "end)." in text, text
    assert b.run("return [...document.querySelectorAll('article a em')].length") == 1 and b.run("return window.hit ?? 0") == 0
    b.picture("links")


def markdown_is_what_people_know(b, _server, stand):
    b.fresh(stand)
    Stand.deltas = [{"content": EMPHASIS[i:i + 5]} for i in range(0, len(EMPHASIS), 5)]
    b.ask("markdown")
    b.answered()
    of = lambda what: b.run("return [...document.querySelectorAll('article.assistant > .text ' + arguments[0])].map(n => n.textContent)", what)
    assert of("em") == ["both one", "inner"] and of("strong") == ["both", "strong inner strong", "done"] and of("del") == ["gone"], (of("em"), of("strong"))
    for literal in ["snake_case_name", "__init__.py", "2 * 3 * 4", "**open", "*not*"]:
        assert literal in of("p")[0], (literal, of("p"))
    assert of(".task") == [" to do".strip(), "doneinsidedeeper"] and of("li li li") == ["deeper"], of("li")
    assert b.run("return [...document.querySelectorAll('.task > input')].map(n => [n.checked, n.disabled, n.ariaLabel])") == [
        [False, True, "Not done"], [True, True, "Done"]]
    assert of("th") == ["left", "right", "code", "a", "b"] and of("td") == ["a | b", "1", "c", "short", "too", "many", "cells", "1", "2"], of("td")
    assert b.run("return [...document.querySelectorAll('tr:nth-child(2) > td')].map(n => n.style.textAlign)")[:3] == ["", "right", "center"]
    assert any("not | a table" in p for p in of("p"))
    b.picture("markdown")
    for name, text in LONG.items():
        took = b.run("const began = performance.now(); render(arguments[0]); return performance.now() - began", text)
        assert took < 4000, (name, took)


def code_has_colours_and_is_copied(b, _server, stand):
    b.fresh(stand)
    Stand.deltas = [{"content": "As *this*:\n\n" + CODE}]
    b.ask("code")
    b.answered()
    of = lambda kind: b.run("return [...document.querySelectorAll('pre .' + arguments[0])].map(n => n.textContent)", kind)
    assert of("c") == ['# a comment, "quoted"', "// comment", "<!-- <b> -->"], of("c")
    assert of("s") == ['"text # no comment"', "'x'"] and of("n") == ["12.5", "1"], (of("s"), of("n"))
    assert of("k") == ["def", "return", "None", "fn", "str", "char", "<script", ">", "</script", ">"], of("k")
    assert b.run("return document.querySelectorAll('pre')[3].textContent") == "def plain" and b.run("return window.hit ?? 0") == 0
    for scheme in ["light", "dark"]:
        b.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for where in ["pre .c", "pre .s", "pre .n", "pre .k"]:
            assert contrast(b, where) >= 4.5, (scheme, where, contrast(b, where))
        b.picture("code-" + scheme)
    b.devtools("Emulation.setEmulatedMedia", features=[])
    b.run("navigator.clipboard.writeText = async text => { window.copied = text }")
    b.run("document.querySelector('[aria-label=\"Copy this code\"]').click()")
    b.until("window.copied?.startsWith('# a comment') && document.querySelector('#status').textContent === 'Copied'")
    b.press("Copy")
    assert b.until("window.copied.startsWith('As') && window.copied") == Stand.deltas[0]["content"]
    b.until("[...document.querySelectorAll('article button')].some(b => b.textContent === 'Copied')")


def a_new_conversation_has_something_to_try(b, _server, stand):
    b.fresh(stand)
    Stand.deltas = [{"content": "fine"}]
    b.until("document.querySelector('.hello h2')?.textContent === 'stand-in'")
    assert b.text("#model") == ["stand-in"] and b.text("#gauge") == ["0 of 2,000\ntokens"], b.text("#gauge")
    b.picture("new")
    tries = b.text(".hello button")
    assert len(tries) == 3
    b.press(tries[1])
    assert b.answered() == "fine" and b.text("article.user > .text") == [tries[1]]
    assert b.text("#gauge") == ["1,001 of 2,000\ntokens"], b.text("#gauge")


def enter_makes_a_line_on_a_phone(b, _server, stand):
    Stand.deltas = [{"content": "fine"}]
    b.devtools("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    b.devtools("Emulation.setTouchEmulationEnabled", enabled=True)
    b.fresh(stand)
    assert b.run("return matchMedia('(hover: none) and (pointer: coarse)').matches"), "it is no phone"
    b.ask("one")
    b.type("two")
    assert b.run("return [document.querySelector('#input').value, document.querySelector('#input').enterKeyHint]") == ["one\ntwo", "enter"]
    assert not b.text("article")
    b.picture("phone-two-lines")
    b.press("Send")
    assert b.answered() == "fine" and b.text("article.user > .text") == ["one\ntwo"]
    b.run("pick()")
    b.click("#menu")
    b.picture("phone-list")
    seen = "return [...document.querySelectorAll('#list button')].map(n => getComputedStyle(n).opacity)"
    assert set(b.run(seen)) == {"1"}, "a finger can hit what it does not see"
    b.devtools("Emulation.setTouchEmulationEnabled", enabled=False)
    b.devtools("Emulation.clearDeviceMetricsOverride")
    b.open(stand)
    b.ask("again")
    b.answered()
    assert b.text("article.user > .text") == ["one\ntwo", "again"]


def a_lost_connection_is_survived(b, _server, stand):
    b.fresh(stand)
    words = [f"word{i} " for i in range(30)]
    Stand.deltas, Stand.cut, Stand.pause, Stand.asked = [{"content": w} for w in words], 12, 0.01, []
    b.ask("Go on.")
    b.until("document.querySelector('article.assistant .foot')?.innerText.includes('Trying again')")
    b.picture("lost")
    assert b.answered().strip() == "".join(words).strip()
    first, second = Stand.asked
    assert first["seed"] == second["seed"] >= 0 and "continue_final_message" not in first and second["continue_final_message"]
    assert second["messages"] == first["messages"] + [{"role": "assistant", "content": "".join(words[:12])}]
    # The whole network is gone, and the user has enough.
    b.devtools("Network.enable")
    b.devtools("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    b.ask("And now?")
    b.until("[...document.querySelectorAll('article.assistant .foot')].at(-1).innerText.includes('is lost')")
    b.press("Stop")
    b.answered()
    b.devtools("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    b.press("Regenerate")
    assert b.answered().strip() == "".join(words).strip()


def an_answer_goes_on_after_a_reload(b, server, _stand):
    for sampled in [{"temperature": "0"}, {"temperature": "0.9", "seed": "7"}]:
        wanted = {**sampled, "max_tokens": "700"}
        b.fresh(server.address)
        b.run("localStorage.setItem('settings', JSON.stringify(arguments[0]))", wanted)
        b.open(server.address)
        b.ask("Tell me a story of a dog.")
        b.answered()
        whole, [foot], gauge = b.stored(), b.text("article.assistant .foot"), b.text("#gauge")
        assert "700 tokens · " in foot, foot
        b.press("Regenerate")
        for length in [60, 250]:
            b.until("chat.messages[1].content.length > arguments[0]", length)
            b.open(server.address)
            assert len(b.run("return chat.messages[1].content")) < len(whole[1]["content"]), "it was over before the reload"
        b.answered()
        assert b.stored()[1]["content"] == whole[1]["content"], (b.stored(), whole)
        assert len(b.text("article")) == 2 and "700 tokens · " in b.text("article.assistant .foot")[0], b.text("article.assistant .foot")
        assert b.text("#gauge") == gauge


def what_is_unfinished_is_asked_for_once(b, _server, stand):
    words = [f"word{i} " for i in range(40)]
    Stand.deltas, Stand.pause, Stand.asked = [{"reasoning_content": "Hm."}] + [{"content": w} for w in words], 0.05, []
    b.fresh(stand)
    b.ask("Go on.")
    b.until("chat.messages[1]?.content.length > 30")
    # Another window shows it, and leaves it to the first.
    b.until("(localStorage['chat:' + chat.id] ?? '').includes('word0')")
    first = b.call("/window")
    second = b.call("/window/new", {"type": "tab"})["handle"]
    b.call("/window", {"handle": second})
    b.open(stand)
    assert b.text("article.assistant > .text")[0].startswith("word0") and "not finished" in b.text("article.assistant .foot")[0]
    b.until("!document.querySelector('article.assistant .foot').innerText.includes('not finished')")
    assert len(Stand.asked) == 1 and b.answered().endswith("word39")
    b.call("/window", method="DELETE")
    b.call("/window", {"handle": first})
    # A template that cannot continue: the whole answer comes again, and takes the place of what there was.
    Stand.continues = False
    b.press("Regenerate")
    b.until("chat.messages[1].content.length > 60")
    b.open(stand)
    assert b.answered() == "".join(words).strip() and b.stored()[1]["thoughts"] == "Hm."
    assert Stand.asked[2]["messages"][-1]["reasoning_content"] == "Hm."
    assert [r.get("continue_final_message") for r in Stand.asked[2:]] == [True, None] and Stand.asked[-1]["seed"] == Stand.asked[1]["seed"]
    # What was closed before the first word is asked again.
    Stand.continues, Stand.pause = True, 0.3
    b.press("Regenerate")
    b.until("chat.messages[1].thoughts === 'Hm.'")
    b.open(stand)
    Stand.pause = 0.0
    assert b.answered() == "".join(words).strip() and b.stored()[1]["thoughts"] == "Hm."


def an_answer_cut_off_is_continued(b, server, stand):
    def with_most(tokens):
        b.run("settings.max_tokens = arguments[0]", str(tokens))
    b.fresh(server.address)
    b.run("settings.temperature = '0'")
    assert b.text("#gauge") == ["0 of 2,048\ntokens"]
    with_most(24)
    b.ask("Tell me of a dog.")
    b.answered()
    whole, gauge = b.stored()[1]["content"], b.text("#gauge")
    assert "Continue" in b.text("article.assistant .foot")[0]
    used = int(gauge[0].split()[0])
    assert 30 < used < 60 and b.run("return document.querySelector('meter').value") == used
    with_most(12)
    b.press("Regenerate")
    b.answered()
    assert "cut off at the maximum number of tokens · 12 tokens" in b.text("article.assistant .foot")[0], b.text(".foot")
    b.press("Continue")
    b.answered()
    assert b.stored()[1]["content"] == whole and "24 tokens" in b.text("article.assistant .foot")[0], (b.stored(), whole)
    assert b.text("#gauge") == gauge
    b.picture("continue")
    # One that was stopped goes on too.
    b.fresh(stand)
    Stand.deltas, Stand.pause, Stand.asked = [{"content": f"word{i} "} for i in range(40)], 0.03, []
    b.ask("Go on.")
    b.until("chat.messages[1]?.content.length > 30")
    b.press("Stop")
    b.answered()
    b.press("Continue")
    assert b.answered().split() == [f"word{i}" for i in range(40)] and "stopped" not in b.text("article.assistant .foot")[0]


def errors_are_said_in_words(b, _server, stand):
    b.fresh(stand)
    Stand.deltas = [{"content": "fine"}]
    Stand.refusal = 400, "`temperature`: -1 is too small"
    b.ask("Hello")
    b.answered()
    assert b.text(".error:not([hidden])") == ["`temperature`: -1 is too small"]
    b.picture("error")
    Stand.refusal = 401, "no key"
    b.press("Try again")
    b.answered()
    assert "API key" in b.text(".error:not([hidden])")[0] and "settings" in b.text(".error:not([hidden])")[0]
    Stand.refusal = 429, "too many wait"
    b.press("Try again")
    b.until("document.querySelector('article.assistant .foot').innerText.includes('busy')")
    Stand.refusal = None
    assert b.answered() == "fine" and b.run("return document.querySelector('.error:not([hidden])')") is None


def conversations_are_kept_apart(b, _server, stand):
    b.fresh(stand)
    Stand.deltas = [{"content": "fine"}]
    for name in ["first", "second"]:
        b.ask(name)
        b.answered()
        b.press("New conversation")
    titles = "[...document.querySelectorAll('#list li button:first-child')].map(n => n.innerText)"
    assert b.run("return " + titles) == ["New conversation", "second", "first"]
    b.press("first")
    assert b.text("article.user > .text") == ["first"]
    # An answer that runs goes on while another conversation is looked at.
    Stand.deltas, Stand.pause = [{"content": f"{i} "} for i in range(20)], 0.02
    b.ask("more")
    b.press("second")
    assert b.text("article.user > .text") == ["second"]
    b.until("!document.querySelector('#list').innerText.includes('…')")
    b.press("first")
    assert b.answered().endswith(" 19") and len(b.text("article")) == 4
    Stand.pause = 0.0
    b.run("""document.querySelector('[aria-label="Delete first"]').click()""")
    assert "first" not in b.run("return " + titles)
    b.press("Undo")
    b.open(stand)
    assert sorted(b.run("return " + titles)) == ["first", "second"]


TITLES = "[...document.querySelectorAll('#list li button:first-child')].map(n => n.innerText)"


def conversations_are_renamed_and_found(b, _server, stand):
    b.fresh(stand)
    for question, answer in [("Of dogs", "Bones."), ("Of cats", "<b>Milk</b>.")]:
        Stand.deltas = [{"content": answer}]
        b.ask(question)
        b.answered()
        b.press("New conversation")
    b.press("Of dogs")
    b.run("""document.querySelector('[aria-label="Rename Of dogs"]').click()""")
    b.picture("rename")
    b.type("\ue009a\ue000<i>Pets</i>\ue007", "#list input")
    assert b.run("return " + TITLES)[-1] == "<i>Pets</i>" and b.text("#title") == ["<i>Pets</i>"]
    b.run("""document.querySelector('[aria-label="Rename <i>Pets</i>"]').click()""")
    b.type("no\ue00c", "#list input")  # Escape
    assert "<i>Pets</i>" in b.run("return " + TITLES)
    # A name that is typed stays while another window answers.
    b.run("""document.querySelector('[aria-label="Rename <i>Pets</i>"]').click();
        const key = Object.keys(localStorage).find(key => localStorage[key].includes("Of cats"));
        const theirs = JSON.parse(localStorage[key]);
        theirs.messages[1].content += " More.";
        window.onstorage({ key, newValue: JSON.stringify(theirs) });
        theirs.title = "Cats";
        window.onstorage({ key, newValue: JSON.stringify(theirs) });
        theirs.title = "Of cats";
        window.onstorage({ key, newValue: JSON.stringify(theirs) });""")
    b.type("\ue009a\ue000Pets\ue007", "#list input")
    assert "Pets" in b.run("return " + TITLES)
    b.run("""document.querySelector('[aria-label="Rename Pets"]').click()""")
    b.type("\ue009a\ue000<i>Pets</i>\ue007", "#list input")
    b.type("milk", "#search")
    assert b.run("return " + TITLES) == ["Of cats"] and b.text("#status") == ["1 conversation"]
    b.type("no such", "#search")
    assert b.text("#list") == ["Nothing found"]
    b.open(stand)
    assert sorted(b.run("return " + TITLES)) == ["<i>Pets</i>", "Of cats"]


def imported(b, folder, text, name="file.json"):
    path = os.path.join(folder, name)
    with open(path, "wb") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    b.run("notice()")
    b.type(path, "#file")
    return b.until("!document.querySelector('#notice').hidden && document.querySelector('#notice span').textContent")


def conversations_move_by_files(b, _server, stand):
    with tempfile.TemporaryDirectory() as folder:
        b.devtools("Browser.setDownloadBehavior", behavior="allow", downloadPath=folder)
        b.fresh(stand)
        Stand.deltas = [{"reasoning_content": "Hm."}, {"content": HOSTILE},
                        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "look", "arguments": "{}"}}]}]
        b.ask("Of dogs")
        b.answered()
        b.press("Export")
        path, end = os.path.join(folder, "conversations.json"), time.monotonic() + PATIENCE
        while not os.path.exists(path):
            assert time.monotonic() < end, "no file comes"
            time.sleep(0.02)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        [conversation] = json.loads(text)["conversations"]
        assert conversation["title"] == "Of dogs" and [m["role"] for m in conversation["messages"]] == ["user", "assistant"]
        assert conversation["messages"][1]["content"] == HOSTILE and conversation["messages"][1]["reasoning_content"] == "Hm."
        assert imported(b, folder, text) == "0 new conversations imported.", "it is there already"
        b.fresh(stand)
        assert imported(b, folder, text) == "1 new conversation imported."
        b.press("Of dogs")
        assert b.stored()[1]["content"] == HOSTILE and b.run("return window.hit ?? 0") == 0 and "Calls look" in b.text(".calls")[0]
        # The same name with other words is another conversation.
        conversation["messages"][0]["content"] = "Of cats"
        conversation["title"] = "<img src=x onerror=window.hit=1>"
        assert imported(b, folder, json.dumps([conversation])) == "1 new conversation imported."
        before = b.run("return JSON.stringify(localStorage)")
        good = {"role": "user", "content": "a"}
        of = lambda **fields: json.dumps({"conversations": [{"messages": [good]}, {"messages": [{**good, **fields}]}]})
        place = "conversations[1].messages[0]."
        for hostile, why in [
            ("", "it is not JSON"), ("{", "it is not JSON"), (b"\xff\xfe\x00", "it is not JSON"), ("null", "it is not JSON"),
            ("{}", "`conversations` is not a list"), ("[]", "`conversations` is not a list"), ("7", "`conversations` is not a list"),
            ("[" * 100000 + "]" * 100000, "conversations[0].messages is not a list"), ("[null]", "conversations[0].messages is not a list"),
            (json.dumps([{"messages": []}]), "conversations[0].messages is not a list"),
            (json.dumps([{"messages": [good] * 5001}]), "a list of 1 to 5,000"), (json.dumps([{"messages": [good]}] * 1001), "a list of 1 to 1,000"),
            (json.dumps([{"messages": [None]}]), "conversations[0].messages[0].role"), (of(role="system"), place + "role is not `user` or `assistant`"),
            (of(content=None), place + "content is not text"), (of(content={"toString": "x"}), place + "content"),
            (of(content="a" * 1000001), place + "content is not text of at most"), (of(reasoning_content=[]), place + "reasoning_content is not text"),
            (of(tool_calls="x"), place + "tool_calls is not a list"), (of(tool_calls=[{"id": "a", "function": {"name": "b"}}]), place + "tool_calls"),
            ("[" + "1," * 6000000 + "1]", "larger than 10 MB"), (json.dumps([{"messages": [{**good, "content": "a" * 999999}] * 9}]), "storage is full"),
        ]:
            said = imported(b, folder, hostile, "<b>.json")
            assert said.startswith("Cannot import <b>.json: ") and why in said, (hostile[:80], said)
        assert b.run("return JSON.stringify(localStorage)") == before, "nothing of a wrong file stays"
        # Unexpected fields are left out, and a wrong name or time does no harm.
        odd = '[{"id": "../x", "at": "now", "title": 7, "pending": true, "__proto__": {"a": 1}, "messages": [{"role": "assistant", "content": "b", "pending": "left", "error": "<b>"}]}]'
        assert imported(b, folder, odd) == "1 new conversation imported."
        Stand.asked = []
        b.open(stand)
        kept = b.run("return chats.find(c => c.title === 'b')")
        assert sorted(kept) == ["at", "id", "messages", "named", "title"] and kept["messages"] == [{"role": "assistant", "content": "b"}], kept
        assert kept["id"].isalnum() and kept["at"] > 1e12 and not Stand.asked and b.run("return window.hit ?? 0") == 0
        b.picture("imported")
        # Nor does a name that only looks like the one of another conversation, or a time that never comes.
        odd = [{"id": [kept["id"]], "at": 1e300, "messages": [good]}]
        assert imported(b, folder, json.dumps(odd)) == "1 new conversation imported."
        b.open(stand)
        assert b.run("return chats.find(c => c.title === 'b').messages")[0]["content"] == "b"
        assert b.run("return chats.every(c => typeof c.id === 'string' && c.at <= Date.now())")


def it_needs_no_mouse_and_no_eyes(b, _server, stand):
    b.fresh(stand)
    Stand.deltas = [{"content": "The answer."}]
    b.ask("Hello")
    b.answered()
    b.until("document.querySelector('#status').textContent.includes('The answer.')")
    tree = b.devtools("Accessibility.getFullAXTree")["nodes"]
    of = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n["ignored"]]
    nameless = [o for o in of if o[0] in ("button", "textbox", "spinbutton") and not o[1]]
    assert not nameless, nameless
    for what in [("textbox", "Message"), ("button", "Send"), ("heading", "You"), ("heading", "Answer"),
                 ("navigation", "Conversations"), ("button", "Delete Hello"), ("button", "Rename Hello"), ("searchbox", "Search conversations"),
                 ("meter", "Context used")]:
        assert what in of, (what, of)
    reached = set()
    for _ in range(30):
        b.devtools("Input.dispatchKeyEvent", type="rawKeyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.add(b.run("return document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"))
    wanted = {"Send", "Message", "Settings", "New conversation", "Search conversations", "Rename Hello", "Delete Hello", "Export", "Import",
              "Edit", "Regenerate", "Copy"}
    assert wanted <= reached, wanted - reached


def contrast(b, where):
    """Of a text with what is behind it."""
    colours = b.run("""const node = document.querySelector(arguments[0]), of = c => c.match(/[\\d.]+/g).map(Number);
        let back = node; while (back && (of(getComputedStyle(back).backgroundColor)[3] ?? 1) === 0) back = back.parentElement;
        return [of(getComputedStyle(node).color), of(getComputedStyle(back).backgroundColor)]""", where)

    def luminance(colour):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour[:3])]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted(map(luminance, colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def it_fits_a_phone_and_the_dark(b, _server, stand):
    b.fresh(stand)
    Stand.deltas = [{"reasoning_content": "Let me think."}, {"content": HOSTILE + "\n" + "wide" * 60}]
    b.ask("Hello, this is a longer message than fits into one line of a small screen.")
    b.answered()
    Stand.refusal = 400, "no"
    b.ask("Again")
    b.answered()
    Stand.refusal = None
    for scheme in ["light", "dark"]:
        b.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for where in ["article.user > .text", "article.assistant > .text", ".error:not([hidden])", ".foot", "#send", "summary", "#model"]:
            assert contrast(b, where) >= 4.5, (scheme, where, contrast(b, where))
        b.picture("desktop-" + scheme)
        b.devtools("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
        width = b.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert width == [360, 360], width
        seen = b.run("const r = document.querySelector('#send').getBoundingClientRect(); return [r.right <= 360, r.bottom <= 740, r.height >= 30]")
        assert seen == [True] * 3, seen
        b.run("document.querySelector('#turns').scrollTop = 0")
        b.picture("phone-" + scheme)
        b.click("#menu")
        b.picture("phone-menu-" + scheme)
        assert b.run("return document.activeElement.id") == "new"
        b.run("document.querySelector('main').click()")
        assert not b.run("return document.body.classList.contains('open')")
        b.click("#settings")
        b.picture("phone-settings-" + scheme)
        assert b.run("const r = document.querySelector('dialog').getBoundingClientRect(); return r.left >= 0 && r.right <= 360")
        b.press("Done")
        b.devtools("Emulation.clearDeviceMetricsOverride")
    back = b.run("return getComputedStyle(document.body).backgroundColor")
    assert max(map(int, back[4:-1].split(","))) < 60, back
    b.devtools("Emulation.setEmulatedMedia", features=[])


def main():
    # Its texts do not end by themselves, so that there is something to stop.
    server = Server("--slots", "2", "--logit-bias", "1-inf", "--logit-bias", "3-inf")
    Stand.page = open(os.environ["PAGE"], "rb").read() if "PAGE" in os.environ else fetched(server.address + "/")
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stand)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    stand = f"http://127.0.0.1:{listener.server_port}/"
    checks = [
        a_conversation_is_what_the_server_says,
        an_answer_stops_and_is_generated_again,
        what_a_model_writes_is_text,
        links_lead_only_to_the_web,
        markdown_is_what_people_know,
        code_has_colours_and_is_copied,
        a_new_conversation_has_something_to_try,
        enter_makes_a_line_on_a_phone,
        a_lost_connection_is_survived,
        an_answer_goes_on_after_a_reload,
        what_is_unfinished_is_asked_for_once,
        an_answer_cut_off_is_continued,
        errors_are_said_in_words,
        conversations_are_kept_apart,
        conversations_are_renamed_and_found,
        conversations_move_by_files,
        it_needs_no_mouse_and_no_eyes,
        it_fits_a_phone_and_the_dark,
    ]
    browser = Browser()
    try:
        checked(checks, browser, server, stand)
    finally:
        browser.call("", method="DELETE")
        browser.driver.terminate()


def checked(checks, browser, server, stand):
    for check in checks:
        name = "the page: " + check.__name__.replace("_", " ")
        Stand.refusal, Stand.cut, Stand.pause, Stand.deltas, Stand.continues = None, None, 0.0, [], True
        try:
            check(browser, server, stand)
            print("ok", name, flush=True)
        except Exception as e:  # Whatever it is, the others are tried.
            print(f"not ok {name}: {type(e).__name__}: {e}".replace("\n", " ")[:1500], flush=True)


main()

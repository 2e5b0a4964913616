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


HOSTILE = """<img src=x onerror="window.hit=1"><script>window.hit=1</script>

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
"""


class Stand(http.server.BaseHTTPRequestHandler):
    """A server whose answer is what its class says, in pieces."""

    protocol_version = "HTTP/1.1"
    page, deltas, refusal, cut, pause, asked = b"", [], None, None, 0.0, []

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
            self.send(200, "application/json", json.dumps({"data": [{"id": "stand-in"}]}).encode())

    def do_POST(self):
        Stand.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if Stand.refusal:
            status, message = Stand.refusal
            return self.send(status, "application/json", json.dumps({"error": {"message": message}}).encode())
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        parts = [{"choices": [{"delta": delta}]} for delta in Stand.deltas]
        parts.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        parts.append({"choices": [], "usage": {"completion_tokens": len(Stand.deltas)}})
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
                        ("blockquote em", 1), (".calls pre", 1)]:
        assert b.run("return " + inside.format(what)) == count, what
    assert b.text("article.assistant h3") == ["A <b>title</b>"] and "2*3*4" in b.text("blockquote")[0]
    assert b.run("return [...document.querySelectorAll('ol > li')].map(l => l.value)") == [1, 2]
    assert not b.run("return document.querySelector('details').open"), "thoughts are folded"
    assert "Calls look" in b.text(".calls")[0]
    foot = b.text("article.assistant .foot")[0]
    assert f"{len(Stand.deltas)} tokens, " in foot and " tokens/s, the first after " in foot, foot
    b.picture("hostile")
    b.run("document.querySelector('details').open = true")
    assert "Hm <b>.</b>" in b.text("details")[0]
    b.run("show()")
    assert b.run("return document.querySelector('details').open"), "what was unfolded stays so"


def a_lost_connection_is_survived(b, _server, stand):
    b.fresh(stand)
    words = [f"word{i} " for i in range(30)]
    Stand.deltas, Stand.cut, Stand.pause, Stand.asked = [{"content": w} for w in words], 12, 0.01, []
    b.ask("Go on.")
    b.until("document.querySelector('article.assistant .foot')?.innerText.includes('Trying again')")
    b.picture("lost")
    assert b.answered().strip() == "".join(words).strip()
    assert len(Stand.asked) == 2 and Stand.asked[0] == Stand.asked[1] and Stand.asked[0]["seed"] >= 0
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
    # The page is closed in the middle of an answer.
    Stand.pause = 0.2
    b.ask("More.")
    b.until("document.querySelectorAll('article').length === 6")
    b.open(stand)
    assert "was closed" in b.text(".error:not([hidden])")[0]
    Stand.pause = 0.0
    b.press("Try again")
    assert b.answered().strip() == "".join(words).strip()


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
                 ("navigation", "Conversations"), ("button", "Delete Hello")]:
        assert what in of, (what, of)
    reached = set()
    for _ in range(30):
        b.devtools("Input.dispatchKeyEvent", type="rawKeyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.add(b.run("return document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"))
    assert {"Send", "Message", "Settings", "New conversation", "Edit", "Regenerate", "Copy"} <= reached, reached


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
        a_lost_connection_is_survived,
        errors_are_said_in_words,
        conversations_are_kept_apart,
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
        Stand.refusal, Stand.cut, Stand.pause, Stand.deltas = None, None, 0.0, []
        try:
            check(browser, server, stand)
            print("ok", name, flush=True)
        except Exception as e:  # Whatever it is, the others are tried.
            print(f"not ok {name}: {type(e).__name__}: {e}".replace("\n", " ")[:1500], flush=True)


main()

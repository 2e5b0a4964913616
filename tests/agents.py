"""The server as coding agents see it: Codex CLI, qwen-code and opencode, each of which does a task with its shell.

Usage: agents.py PROGRAM MODEL NODE_MODULES. PROGRAM is built for MODEL, the file of SmolLM2. Prints a line for each
promise, `ok NAME` or `not ok NAME: why`, and leaves each agent's requests and answers beside NODE_MODULES, as JSON
lines. `cargo xtask test clients` runs it.
"""

import http.client
import http.server
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import urllib.parse

PROGRAM, MODEL, MODULES = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
TEMPLATE = pathlib.Path(__file__).parent / "fixtures/chat/agents.jinja"
COLOUR = random.choice(["red", "blue", "green", "purple", "orange"])
SERVE = ["serve", "--port", "0", "-q", "--api-key", "secret", "--chat-template", TEMPLATE, "--temp", "0",
         "--repetition-penalty", "1"]
SECONDS = 120


class Recorder(http.server.ThreadingHTTPServer):
    """Stands between an agent and the server, and keeps what they say."""

    daemon_threads = True

    def __init__(self, address):
        super().__init__(("127.0.0.1", 0), Passing)
        self.to = urllib.parse.urlsplit(address).netloc
        self.seen = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Passing(http.server.BaseHTTPRequestHandler):
    """A request that is passed on, and its answer, which is passed back as it comes."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        passed = http.client.HTTPConnection(self.server.to, timeout=SECONDS)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection", "accept-encoding")}
        passed.request(self.command, self.path, sent or None, headers)
        reply = passed.getresponse()
        seen = {"path": self.path, "body": sent.decode(), "status": reply.status, "answer": ""}
        self.server.seen.append(seen)
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.headers.get("Content-Type", ""))
        self.send_header("Connection", "close")  # An answer ends with its connection.
        self.end_headers()
        self.close_connection = True
        while part := reply.read1():
            seen["answer"] += part.decode(errors="replace")
            self.wfile.write(part)
            self.wfile.flush()

    do_GET = do_HEAD = do_POST

    def log_message(self, *_):
        pass


def codex(home, url):
    (home / ".codex").mkdir()
    provider = {"name": "local", "base_url": url, "env_key": "KEY", "wire_api": "responses", "request_max_retries": 0,
                "stream_max_retries": 0}
    (home / ".codex/config.toml").write_text(
        'model = "smollm2-135m"\nmodel_provider = "local"\ncheck_for_update_on_startup = false\n'
        "[analytics]\nenabled = false\n[model_providers.local]\n"
        + "".join(f"{k} = {json.dumps(v)}\n" for k, v in provider.items()))
    return ["codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"], {"KEY": "secret"}


def qwen_code(home, url):
    (home / ".qwen").mkdir()
    settings = {"privacy": {"usageStatisticsEnabled": False}, "telemetry": {"enabled": False},
                "general": {"enableAutoUpdate": False, "disableAutoUpdate": True}}
    (home / ".qwen/settings.json").write_text(json.dumps(settings))
    return ["qwen", "--auth-type", "openai", "--yolo", "-p"], {
        "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "secret", "OPENAI_MODEL": "smollm2-135m"}


def opencode(home, url):
    models = {"smollm2-135m": {"name": "SmolLM2", "tool_call": True, "limit": {"context": 2048, "output": 512}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": url, "apiKey": "secret"}, "models": models}
    config = {"autoupdate": False, "share": "disabled", "model": "local/smollm2-135m", "small_model": "local/smollm2-135m",
              "permission": "allow", "provider": {"local": provider}}
    names = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    return ["opencode", "run"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config),
                                 **{f"OPENCODE_DISABLE_{name}": "1" for name in names}}


def does_a_task(agent, address):
    """Its call reads a file whose text only the file has; the model's answer has it from the call's result."""
    recorder = Recorder(address)
    with tempfile.TemporaryDirectory() as folder:
        home, work = pathlib.Path(folder, "home"), pathlib.Path(folder, "work")
        home.mkdir(), work.mkdir()
        (work / "fox.txt").write_text(f"The fox is {COLOUR}.\n")
        words, variables = agent(home, recorder.url())
        # Nothing of a network but this machine: what is not plain HTTP to it fails at once.
        env = {"HOME": str(home), "PATH": f"{MODULES}/.bin:{os.environ['PATH']}", "HTTPS_PROXY": "http://127.0.0.1:9",
               "NO_PROXY": "127.0.0.1", "TERM": "dumb", "LANG": "C.UTF-8", **variables}
        run = subprocess.run([*words, "What is in fox.txt?"], cwd=work, env=env, stdin=subprocess.DEVNULL,
                             capture_output=True, text=True, timeout=SECONDS)
    recorder.shutdown()
    seen = recorder.seen
    with open(MODULES.parent / f"{agent.__name__}.jsonl", "w") as file:
        file.writelines(json.dumps(one) + "\n" for one in seen)
    refused = [(one["path"], one["status"], one["answer"]) for one in seen if one["status"] != 200]
    assert not refused, f"refused: {refused}"
    ended = f"code {run.returncode}, {len(seen)} requests, {run.stdout[-300:]!r}, {run.stderr[-300:]!r}"
    assert run.returncode == 0, ended
    assert any(f"The fox is {COLOUR}" in one["body"] for one in seen), f"no result of a call comes back: {ended}"
    assert f"Its colour is {COLOUR}." in run.stdout, f"another end: {ended}"


def main():
    server = subprocess.Popen([PROGRAM, *SERVE, "-m", MODEL], stderr=subprocess.PIPE, text=True)
    address = server.stderr.readline().strip()
    assert address.startswith("http://"), f"the server does not start: {address}"
    threading.Thread(target=lambda: [print(line, end="", file=sys.stderr) for line in server.stderr], daemon=True).start()
    for agent in (codex, qwen_code, opencode):
        name = f"{agent.__name__.replace('_', '-')} does a task with its shell to the end"
        try:
            does_a_task(agent, address)
            print("ok", name, flush=True)
        except Exception as e:  # Whatever it is, the others are tried.
            print(f"not ok {name}: {type(e).__name__}: {e}".replace("\n", " ")[:1500], flush=True)
    server.terminate()
    print("ok the agents' server ends" if server.wait(60) == 0 else "not ok the agents' server ends: another code", flush=True)


main()

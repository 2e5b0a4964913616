"""Promises of the Python package, for `cargo xtask test wheel`. Prints `ok NAME` or `not ok NAME: why`.

    wheel.py PROGRAM MODEL SCRATCH REFERENCE
"""

import ast
import json
import subprocess
import sys
import threading

import antigravity_story as package

program, model_path, scratch, reference = sys.argv[1:]
PROMPT = "Once upon a time"
TALK = [{"role": "user", "content": "Tell me of a dog."}]


def promise(name, holds, why=""):
    print(f"ok {name}" if holds else f"not ok {name}: {why!r}", flush=True)


def run(*words):
    out = subprocess.run([program, *words, "-q", "--model-path", model_path], check=True, stdout=subprocess.PIPE)
    return out.stdout.decode()[:-1]


def refusal(call, *args, **options):
    try:
        call(*args, **options)
    except package.Error as error:
        return error.status, str(error)
    return 0, "no error"


with open(package.__file__) as file:
    tree = ast.parse(file.read(), feature_version=(3, 9))
promise("the package is in the language of Python 3.9", len(tree.body) > 5)
model = package.Model(max_seq_len=512)
text = run("generate", "-p", PROMPT, "-n", "60", "--temperature=0")
promise("a text is the program's", model.generate(PROMPT, num_tokens=60, temperature=0) == text, text)
seeded = run("generate", "-p", PROMPT, "-n", "40", "--seed=5", "--top-k=7")
promise("so is a sampled one", model.generate(PROMPT, num_tokens=40, seed=5, top_k=7) == seeded, seeded)
answer = run("chat", "-p", TALK[0]["content"], "--single-turn", "--temperature=0", "-n", "50")
pieces = list(model.chat(TALK, temperature=0, num_tokens=50))
promise("an answer is the program's", "".join(pieces) == answer, "".join(pieces))
promise("it comes in pieces of text", len(pieces) > 5 and {p.kind for p in pieces} == {"text"}, pieces)
stopped = model.generate(PROMPT, num_tokens=60, temperature=0, stop=["\n", text[30:36]])
promise("a stop string ends a text", stopped == text[: text.index(text[30:36])], stopped)
other = package.Model(model_path)
promise("a model from a path gives the same text", other.generate(PROMPT, num_tokens=60, temperature=0) == text)
other.close()

with model.session() as session, model.session() as second:
    begun = []
    for piece in session.stream(PROMPT, num_tokens=60, temperature=0):
        begun.append(piece)
        if len(begun) == 9:
            break
    session.save(scratch)
    second.load(scratch)
    rest = session.generate(None, num_tokens=100, temperature=0)
    promise("a text that was left goes on", ("".join(begun) + rest).startswith(text), "".join(begun) + rest)
    promise("so does a saved one", second.generate(None, num_tokens=100, temperature=0) == rest, rest)
    held = second.tokens()
    second.rewind(5)
    promise("a session is rewound", second.tokens() == held[:5], held)

endless = package.Model(max_seq_len=256, eviction_policy="sliding", eviction_window=128)
with endless.session() as session:
    threading.Timer(0.3, session.cancel).start()
    cut = session.generate(PROMPT, num_tokens=-1, ignore_eos=True, seed=1)
    promise("another thread cancels a text without end", len(cut) > 0)

exact = package.Model(model_path, weight_type="f32", max_seq_len=1024)
with open(reference) as file:
    cases = json.load(file)
texts = [case["text"] for case in cases]
for pooling in ["mean", "cls", "last"]:
    vectors = exact.embed(texts, pooling=pooling)
    # Both have length 1.
    cosines = [sum(a * b for a, b in zip(v, case[pooling])) for v, case in zip(vectors, cases)]
    promise(f"vectors pooled by {pooling} are those of transformers", min(cosines) >= 0.9999, cosines)
    alone = [exact.embed([text], pooling=pooling)[0] for text in texts]
    promise(f"and have the same bits alone ({pooling})", alone == vectors)
lines = run("embed", *texts, "--pooling", "last", "--weight-type", "f32").split("\n")
written = [json.loads(line) for line in lines]
promise("the program writes the same vectors", [w["embedding"] for w in written] == vectors, written[0])
promise("and counts their tokens", [w["tokens"] for w in written] == [case["tokens"] for case in cases], written)
short = exact.embed(texts[:1], pooling="last", dimensions=16)[0]
scale = sum(x * x for x in vectors[0][:16]) ** 0.5
near = all(abs(a * scale - b) < 1e-6 for a, b in zip(short, vectors[0]))
has_length_1 = abs(sum(x * x for x in short) - 1) < 1e-6
promise("a shortened vector has length 1", len(short) == 16 and near and has_length_1, short)
exact.close()

behind = [" a time", " a dog"]
lines = run("score", "--prompt", "Once upon", *behind).split("\n")
sums = model.score(behind, "Once upon")
promise("scores are the program's", sums == [json.loads(line)["logprob"] for line in lines] and sums[0] > sums[1], sums)

ids = model.tokenize(PROMPT)
promise("tokens become their text again", model.detokenize(ids) == PROMPT and len(ids) > 1, ids)
promise("no text has no tokens", model.tokenize("") == [] and model.detokenize([]) == "", model.tokenize(""))
promise("version and model are told", package.model_info()["vocab_size"] > 100 and "story" in package.version())
promise("a plan is told", 1e6 < package.Model.plan()["needed"] <= package.Model.plan()["available"])
for name, status, words, call in [
    ("an unknown option", 2, "--temperatur", lambda: model.generate(PROMPT, temperatur=0)),
    ("a missing model", 3, "/no/such", lambda: package.Model("/no/such")),
    ("a missing session", 3, "no such file", lambda: model.session().load("/no/such")),
    ("embeddings without a pooling", 2, "--pooling", lambda: model.embed(["a"])),
    ("an unknown pooling", 2, "max", lambda: model.embed(["a"], pooling="max")),
    ("too many dimensions", 2, "--dimensions 257", lambda: model.embed(["a"], pooling="cls", dimensions=257)),
    ("a text that is too long", 2, "--max-seq-len", lambda: model.embed(["a dog " * 600], pooling="cls")),
    ("an unknown token", 2, "not a token", lambda: model.detokenize([1 << 31])),
    ("a broken conversation", 2, "robot", lambda: list(model.chat([{"role": "robot", "content": ""}]))),
]:
    got = refusal(call)
    promise(f"{name} is refused", got[0] == status and words in got[1], got)

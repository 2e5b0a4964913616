"""Makes golden/recall.json: facts put into golden/text.txt, and prompts that ask for them.

    python3 recall.py PROGRAM

PROGRAM is antigravity for this model, which turns the answers into token ids.
"""

import json
import pathlib
import random
import subprocess
import sys

GOLDEN = pathlib.Path(__file__).parent / "golden"
OWNERS = ["White Rabbit", "March Hare", "Duchess", "Mock Turtle", "Dormouse", "Caterpillar", "Hatter", "Gryphon"]
CHARACTERS_PER_TOKEN = 3.9


def ids(text):
    call = [sys.argv[1], "tokenize", "--no-special", "--format", "json", "-p", text]
    return json.loads(subprocess.check_output(call))["ids"]


def main():
    text = (GOLDEN / "text.txt").read_text()
    paragraphs = [" ".join(p.split()) for p in text.split("\n\n")]
    paragraphs = [p for p in paragraphs if len(p) > 80]
    draw = random.Random(1)
    items = []
    for i, owner in enumerate(OWNERS):
        distance = 400 if i % 2 else 1300
        number, start = str(draw.randrange(1000, 10000)), draw.randrange(len(paragraphs))
        between = []
        while sum(map(len, between)) < distance * CHARACTERS_PER_TOKEN:
            between.append(paragraphs[(start + len(between)) % len(paragraphs)])
        fact = f"The number of the {owner}'s room is"
        before = paragraphs[(start - 1) % len(paragraphs)]
        prompt = "\n\n".join([before, f"{fact} {number}.", *between, fact])
        item = {"form": "plain", "distance": distance, "prompt": prompt, "answer_ids": ids(f" {number}")}
        items.append({**item, "correct_f32": True})
    (GOLDEN / "recall.json").write_text(json.dumps({"items": items}, indent=1) + "\n")


main()

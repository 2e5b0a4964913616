#!/usr/bin/env python3
"""Runs a command at a terminal: at_terminal.py WAIT KEYS WAIT KEYS … -- COMMAND…

Types each KEYS when WAIT was shown after the keys before; in KEYS, ^C is Ctrl-C and so on. Prints all that was shown, and
ends with the command's exit code; 124 after two minutes, or where something is not shown.
"""
import os
import pty
import re
import select
import sys
import time


def main():
    end = sys.argv.index("--")
    steps, command = sys.argv[1:end], sys.argv[end + 1 :]
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm"
        os.execvp(command[0], command)
    shown, seen, deadline = b"", 0, time.time() + 120
    while time.time() < deadline:
        while steps and steps[0].encode() in shown[seen:]:
            seen = len(shown)
            keys = re.sub(r"\^([@-_])", lambda key: chr(ord(key[1]) & 31), steps[1])
            os.write(terminal, keys.encode())
            steps = steps[2:]
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            piece = os.read(terminal, 65536)
        except OSError:
            piece = b""
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
        shown += piece
        if not piece:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            sys.exit(124 if steps else code)
    os.kill(child, 9)
    sys.exit(124)


main()

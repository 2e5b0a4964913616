#!/usr/bin/env python3
"""A device for tests: an adb daemon on loopback, without authentication, that runs this machine's shell.

It passes for a Linux board with a 64-bit Arm CPU: `uname -m` says so, programs are started by an emulator
that the shell's environment names, and everything is kept under --root, which is the shell's TMPDIR.
Services: shell, shell,v2 (with a terminal where `pty` is asked for), exec, sync (STAT SEND), tcp.

A fault to order: shells whose stream ends without an exit code (--cut-shells).
"""
import argparse
import fcntl
import os
import queue
import shutil
import signal
import socket
import stat
import struct
import subprocess
import termios
import threading

CNXN, OPEN, OKAY, WRTE, CLSE = (int.from_bytes(x, "little") for x in (b"CNXN", b"OPEN", b"OKAY", b"WRTE", b"CLSE"))
MAXDATA = 256 * 1024
BANNER = b"device::ro.product.name=fake;ro.product.model=fake;ro.product.device=fake;features=shell_v2,cmd"
STDIN, STDOUT, STDERR, EXIT, CLOSE_STDIN, WINDOW = range(6)  # packets of the shell protocol


class Stream:
    """One of the streams in a connection."""

    def __init__(self, conn, local, remote):
        self.conn, self.local, self.remote = conn, local, remote
        self.incoming, self.rest = queue.Queue(), b""
        self.credit, self.open = threading.Semaphore(0), True

    def recv(self):
        """One piece from the host; empty at the end."""
        data = self.incoming.get()
        if data:
            self.conn.send(OKAY, self.local, self.remote)
        return data or b""

    def read(self, count):
        while len(self.rest) < count:
            data = self.recv()
            if not data:
                raise EOFError
            self.rest += data
        data, self.rest = self.rest[:count], self.rest[count:]
        return data

    def write(self, data):
        for i in range(0, len(data), self.conn.maxdata):
            if not self.open:
                raise BrokenPipeError
            self.conn.send(WRTE, self.local, self.remote, data[i : i + self.conn.maxdata])
            self.credit.acquire()  # one piece at a time is on its way

    def end(self):
        """The other side has closed the stream, or is gone."""
        self.open = False
        self.incoming.put(None)
        self.credit.release()

    def close(self):
        if self.open:
            self.open = False
            self.conn.send(CLSE, self.local, self.remote)
        self.conn.streams.pop(self.local, None)


class Connection:
    """One adb server that has connected."""

    def __init__(self, sock, device):
        self.sock, self.device, self.lock = sock, device, threading.Lock()
        self.streams, self.count, self.maxdata = {}, 0, 4096

    def send(self, command, arg0, arg1, data=b""):
        head = struct.pack("<6I", command, arg0, arg1, len(data), sum(data) & 0xFFFFFFFF, command ^ 0xFFFFFFFF)
        with self.lock:
            try:
                self.sock.sendall(head + data)
            except OSError:
                pass

    def exact(self, count):
        data = bytearray()
        while len(data) < count:
            piece = self.sock.recv(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def run(self):
        try:
            while True:
                command, arg0, arg1, size, _, _ = struct.unpack("<6I", self.exact(24))
                self.handle(command, arg0, arg1, self.exact(size) if size else b"")
        except (EOFError, OSError):
            pass
        finally:
            for stream in list(self.streams.values()):
                stream.end()
            self.sock.close()

    def handle(self, command, arg0, arg1, data):
        if command == CNXN:
            self.maxdata = min(arg1, MAXDATA)
            self.send(CNXN, 0x01000000, MAXDATA, BANNER)
        elif command == OPEN:
            self.count += 1
            stream = self.streams[self.count] = Stream(self, self.count, arg0)
            name = data.rstrip(b"\0").decode()
            threading.Thread(target=self.serve, args=(stream, name), daemon=True).start()
        elif arg1 in self.streams:
            stream = self.streams[arg1]
            if command == OKAY:
                stream.credit.release()
            elif command == WRTE:
                stream.incoming.put(data)
            elif command == CLSE:
                self.streams.pop(arg1, None)
                stream.end()

    def serve(self, stream, name):
        kind, _, argument = name.partition(":")
        service = {"shell": shell, "exec": shell, "sync": sync, "tcp": tcp}.get(kind.split(",")[0])
        if not service:
            self.send(CLSE, 0, stream.remote)
            self.streams.pop(stream.local, None)
            return
        self.send(OKAY, stream.local, stream.remote)
        try:
            service(self.device, stream, argument, kind.split(",")[1:])
        except (EOFError, ConnectionError):
            pass
        finally:
            stream.close()


def shell(device, stream, command, asked):
    """A command; with `v2` its stderr is apart and its exit code comes back; with `pty` it runs at a terminal."""
    v2, pty = "v2" in asked, os.openpty() if "pty" in asked else None
    environment = device.environment | {k: v for k, _, v in (word.partition("=") for word in asked) if k == "TERM"}

    def packet(kind, data):
        stream.write(struct.pack("<BI", kind, len(data)) + data if v2 else data)

    words = ["/bin/sh"] + (["-c", command] if command else [])
    process = subprocess.Popen(
        words,
        stdin=pty[1] if pty else subprocess.PIPE,
        stdout=pty[1] if pty else subprocess.PIPE,
        stderr=subprocess.PIPE if v2 and not pty else subprocess.STDOUT,
        env=environment,
        cwd=device.root,
        start_new_session=True,
        preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if pty else None,
    )
    if pty:
        os.close(pty[1])
        process.stdin = process.stdout = open(pty[0], "r+b", buffering=0)

    def pump(pipe, kind):
        try:
            while data := os.read(pipe.fileno(), 32768):
                packet(kind, data)
        except BrokenPipeError:
            process.send_signal(signal.SIGHUP)  # what adbd does
            pipe.close()
        except OSError:
            pass  # a terminal that nobody holds any more

    def feed():
        try:
            while True:
                if v2:
                    kind, size = struct.unpack("<BI", stream.read(5))
                    data = stream.read(size)
                else:
                    kind, data = STDIN, stream.recv()
                    if not data:
                        raise EOFError
                if kind == STDIN:
                    process.stdin.write(data)
                    process.stdin.flush()
                elif kind == WINDOW and pty:
                    rows, columns = data.decode().split(",")[0].split("x")
                    fcntl.ioctl(pty[0], termios.TIOCSWINSZ, struct.pack("4H", int(rows), int(columns), 0, 0))
                elif kind == CLOSE_STDIN:
                    process.stdin.close()
        except (EOFError, OSError, ValueError):
            if not stream.open and process.poll() is None:
                process.send_signal(signal.SIGHUP)

    pipes = [(process.stdout, STDOUT)] + ([(process.stderr, STDERR)] if process.stderr else [])
    pumps = [threading.Thread(target=pump, args=pipe, daemon=True) for pipe in pipes]
    threading.Thread(target=feed, daemon=True).start()
    for thread in pumps:
        thread.start()
    if device.options.cut_shells is not None and device.options.cut_shells in command:
        process.stdout.peek(1)
        process.stdin.close()
        return  # without an exit code; the command goes on
    for thread in pumps:
        thread.join()
    code = process.wait()
    try:
        process.stdin.close()  # adbd closes all that the command had; its children may still read
    except OSError:
        pass
    if v2:
        packet(EXIT, bytes([128 - code if code < 0 else code & 255]))


def sync(_device, stream, _argument, _asked):
    """File transfer."""
    while True:
        kind, size = struct.unpack("<4sI", stream.read(8))
        if kind == b"QUIT":
            return
        path = stream.read(size).decode()
        if kind == b"STAT":
            try:
                found = os.lstat(path)
                facts = (found.st_mode, found.st_size & 0xFFFFFFFF, int(found.st_mtime))
            except OSError:
                facts = (0, 0, 0)
            stream.write(struct.pack("<4s3I", b"STAT", *facts))
        elif kind == b"SEND":
            path, _, mode = path.rpartition(",")
            error = receive(stream, path, int(mode))
            answer = struct.pack("<4sI", b"FAIL", len(error)) + error.encode() if error else b"OKAY\0\0\0\0"
            stream.write(answer)
        else:
            stream.write(struct.pack("<4sI", b"FAIL", 15) + b"unknown request")
            return


def tcp(_device, stream, port, _asked):
    """A connection to a port here, for `adb forward`."""
    with socket.create_connection(("127.0.0.1", int(port))) as there:

        def up():
            try:
                while data := stream.recv():
                    there.sendall(data)
                there.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        threading.Thread(target=up, daemon=True).start()
        while data := there.recv(32768):
            stream.write(data)


def receive(stream, path, mode):
    """Takes one pushed file; returns what went wrong."""
    error, file = None, None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = open(path, "wb")
    except OSError as e:
        error = str(e)
    while True:
        kind, size = struct.unpack("<4sI", stream.read(8))
        if kind == b"DONE":
            break
        data = stream.read(size)
        if not error:
            try:
                file.write(data)
            except OSError as e:
                error = "write failed: " + os.strerror(e.errno)
    if file:
        file.close()
    if not error:
        os.chmod(path, stat.S_IMODE(mode))
        os.utime(path, (size, size))
    return error


class Device:
    """What all connections share."""

    def __init__(self, options):
        self.options, self.root = options, os.path.abspath(options.root)
        programs = os.path.join(self.root, "bin")
        os.makedirs(programs, exist_ok=True)
        self.program(programs, "uname", 'case $1 in -m) echo aarch64;; *) echo Linux;; esac')
        self.environment = {
            "PATH": programs + ":/usr/bin:/bin",
            "TMPDIR": self.root,
            "HOME": "/",
            "ANTIGRAVITY_EMULATOR": options.emulator,
            "QEMU_CPU": options.cpu,
            "QEMU_LD_PREFIX": "/usr/aarch64-linux-gnu",
        }

    @staticmethod
    def program(directory, name, script):
        path = os.path.join(directory, name)
        with open(path, "w") as file:
            file.write("#!/bin/sh\n" + script + "\n")
        os.chmod(path, 0o755)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="directory that is the device's storage")
    parser.add_argument("--port", type=int, default=0, help="0: any; stay off 5555 to 5585, which adb scans")
    parser.add_argument("--emulator", default=shutil.which("qemu-aarch64-static") or "")
    parser.add_argument("--cpu", default="max,sve=off")
    parser.add_argument("--cut-shells", metavar="TEXT", help="those whose command holds TEXT")
    options = parser.parse_args()
    device = Device(options)
    listener = socket.create_server(("127.0.0.1", options.port))
    print(listener.getsockname()[1], flush=True)
    while True:
        sock = listener.accept()[0]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=Connection(sock, device).run, daemon=True).start()


if __name__ == "__main__":
    main()

"""One language model as a Python package: text, conversations and tokens.

    from antigravity_story import Model
    model = Model()
    print(model.generate("Once upon a time", num_tokens=100))
    for piece in model.chat([{"role": "user", "content": "Tell me of a dog."}]):
        print(piece, end="", flush=True)

Keyword arguments are the flags of `antigravity generate` with underscores: num_tokens, temperature, top_k, stop, seed,
json_schema and the like; of `Model`, those of the model, its device and its cache: max_seq_len, threads, backend.
A session keeps what it has computed, so that a conversation's next answer comes sooner: see `Model.session`.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

__all__ = ["Error", "Model", "Piece", "Session", "model_info", "version"]

_ABI = 1
_CANCELLED_CALLBACK = 1
_USAGE = 2
_KINDS = ("text", "thought", "tool_call")


class Error(Exception):
    """A failure in one line; `status` is the exit code of the same failure of the program."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Piece(str):
    """A piece of an answer. `kind` is text, thought or tool_call; a tool call is JSON with id, name and arguments."""

    kind: str = "text"


class _Result(ctypes.Structure):
    _fields_ = [
        ("stop_reason", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("prompt_tokens", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
        ("first_token_us", ctypes.c_uint64),
        ("decoding_us", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
    ]


class _Memory(ctypes.Structure):
    _fields_ = [("needed", ctypes.c_uint64), ("peak", ctypes.c_uint64), ("available", ctypes.c_uint64)]


_text = (ctypes.c_char_p, ctypes.c_size_t)
_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
)
_ids = ctypes.POINTER(ctypes.c_uint32)
_size = ctypes.POINTER(ctypes.c_size_t)
_FUNCTIONS: Dict[str, Sequence[Any]] = {
    "plan": (*_text, *_text, ctypes.POINTER(_Memory)),
    "load": (*_text, *_text, ctypes.POINTER(ctypes.c_void_p)),
    "free": (ctypes.c_void_p,),
    "tokenize": (ctypes.c_void_p, *_text, ctypes.c_int32, _ids, ctypes.c_size_t, _size),
    "detokenize": (ctypes.c_void_p, _ids, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, _size),
    "embed": (ctypes.c_void_p, *_text, *_text, ctypes.POINTER(ctypes.c_float), ctypes.c_size_t, _size),
    "score": (ctypes.c_void_p, *_text, *_text, ctypes.POINTER(ctypes.c_double), ctypes.c_size_t, _size),
    "session_new": (ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)),
    "session_free": (ctypes.c_void_p,),
    "session_save": (ctypes.c_void_p, *_text),
    "session_load": (ctypes.c_void_p, *_text),
    "session_rewind": (ctypes.c_void_p, ctypes.c_size_t),
    "session_tokens": (ctypes.c_void_p, _ids, ctypes.c_size_t, _size),
    "cancel": (ctypes.c_void_p,),
    "generate": (ctypes.c_void_p, *_text, *_text, _Callback, ctypes.c_void_p, ctypes.POINTER(_Result)),
    "chat": (ctypes.c_void_p, *_text, *_text, _Callback, ctypes.c_void_p, ctypes.POINTER(_Result)),
}


def _open_library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "libantigravity.so"))
    for name in ("version", "model_info", "last_error"):
        getattr(library, "antigravity_" + name).restype = ctypes.c_char_p
    library.antigravity_abi_version.restype = ctypes.c_uint32
    if library.antigravity_abi_version() != _ABI:
        raise ImportError("libantigravity.so is of another version than this package; install it again")
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, "antigravity_" + name)
        function.argtypes, function.restype = list(arguments), ctypes.c_int32
    return library


_library = _open_library()


def _check(status: int) -> None:
    if status != 0:
        raise Error(status, _library.antigravity_last_error().decode())


def _encode(text: Optional[str]) -> "tuple[Optional[bytes], int]":
    data = None if text is None else text.encode()
    return data, len(data or b"")


def _options(options: Dict[str, Any]) -> "tuple[Optional[bytes], int]":
    return _encode(json.dumps(options))


def _read_ids(call: Callable[[Any, int, Any], int]) -> List[int]:
    """Calls a function that writes ids to a buffer, first to learn their number."""
    count = ctypes.c_size_t(0)
    buffer = (ctypes.c_uint32 * 0)()
    status = call(buffer, 0, ctypes.byref(count))
    if status == _USAGE and count.value > 0:
        buffer = (ctypes.c_uint32 * count.value)()
        status = call(buffer, count.value, ctypes.byref(count))
    _check(status)
    return list(buffer)[: count.value]


def version() -> str:
    """Version of the library and its model."""
    return str(_library.antigravity_version().decode())


def model_info() -> Dict[str, Any]:
    """Facts about the model."""
    return dict(json.loads(_library.antigravity_model_info()))


class Session:
    """One sequence of tokens, for one thread at a time; made by `Model.session`."""

    def __init__(self, model: Model) -> None:
        handle = ctypes.c_void_p()
        self._handle: Optional[int] = None
        _check(_library.antigravity_session_new(model._handle, ctypes.byref(handle)))
        self._handle = handle.value

    def generate(self, prompt: Optional[str], **options: Any) -> str:
        """Completes a prompt; None continues the session's text."""
        return "".join(self.stream(prompt, **options))

    def stream(self, prompt: Optional[str], **options: Any) -> Iterator[Piece]:
        """Completes a prompt piece by piece. An iterator that is left early cancels the text."""
        return self._pieces(_library.antigravity_generate, _encode(prompt), options)

    def chat(self, messages: Sequence[Dict[str, Any]], **options: Any) -> Iterator[Piece]:
        """Answers a conversation piece by piece; `tools` and `chat_template_kwargs` as in the API of OpenAI."""
        return self._pieces(_library.antigravity_chat, _encode(json.dumps(list(messages))), options)

    def cancel(self) -> None:
        """Cancels the text that is being generated, from any thread."""
        _check(_library.antigravity_cancel(self._handle))

    def tokens(self) -> List[int]:
        """The tokens that the session holds."""
        return _read_ids(lambda *buffer: int(_library.antigravity_session_tokens(self._handle, *buffer)))

    def rewind(self, tokens: int) -> None:
        """Cuts the session back to its first tokens."""
        _check(_library.antigravity_session_rewind(self._handle, tokens))

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Saves the session to a file."""
        _check(_library.antigravity_session_save(self._handle, *_encode(os.fspath(path))))

    def load(self, path: "str | os.PathLike[str]") -> None:
        """Replaces the session by the one in a file. Sessions that load the same file share its memory."""
        _check(_library.antigravity_session_load(self._handle, *_encode(os.fspath(path))))

    def close(self) -> None:
        """Frees the session."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _library.antigravity_session_free(handle)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _pieces(self, function: Any, text: Any, options: Dict[str, Any]) -> Iterator[Piece]:
        """Runs a call on a thread of its own and yields its pieces. The call waits while a piece is used, so that a
        text that is left continues with the next one."""
        pieces: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        left, used = threading.Event(), threading.Semaphore(0)

        def tell(kind: int, data: int, length: int, _: Any) -> int:
            piece = Piece(ctypes.string_at(data, length).decode())
            piece.kind = _KINDS[kind]
            pieces.put(piece)
            used.acquire()
            return _CANCELLED_CALLBACK if left.is_set() else 0

        def run() -> None:
            try:
                _check(function(self._handle, *text, *_options(options), _Callback(tell), None, None))
                pieces.put(None)
            except BaseException as error:
                pieces.put(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            while True:
                piece = pieces.get()
                if piece is None:
                    return
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
                used.release()
        finally:
            left.set()
            used.release()
            if thread.is_alive() and self._handle is not None:
                _library.antigravity_cancel(self._handle)
            thread.join()


class Model:
    """The loaded model. Without a path it is the one inside the package."""

    def __init__(self, path: "Optional[str | os.PathLike[str]]" = None, **options: Any) -> None:
        handle = ctypes.c_void_p()
        self._handle: Optional[int] = None
        path = None if path is None else os.fspath(path)
        _check(_library.antigravity_load(*_encode(path), *_options(options), ctypes.byref(handle)))
        self._handle = handle.value

    @staticmethod
    def plan(path: "Optional[str | os.PathLike[str]]" = None, **options: Any) -> Dict[str, int]:
        """Bytes that the model needs, at most takes, and that are available, without loading it."""
        memory = _Memory()
        path = None if path is None else os.fspath(path)
        _check(_library.antigravity_plan(*_encode(path), *_options(options), ctypes.byref(memory)))
        return {"needed": memory.needed, "peak": memory.peak, "available": memory.available}

    def session(self) -> Session:
        """An empty session, which keeps what it computes."""
        return Session(self)

    def generate(self, prompt: str, **options: Any) -> str:
        """Completes a prompt."""
        with self.session() as session:
            return session.generate(prompt, **options)

    def stream(self, prompt: str, **options: Any) -> Iterator[Piece]:
        """Completes a prompt piece by piece."""
        with self.session() as session:
            yield from session.stream(prompt, **options)

    def chat(self, messages: Sequence[Dict[str, Any]], **options: Any) -> Iterator[Piece]:
        """Answers a conversation piece by piece."""
        with self.session() as session:
            yield from session.chat(messages, **options)

    def tokenize(self, text: str, add_special: bool = False) -> List[int]:
        """Token ids of a text."""
        call = _library.antigravity_tokenize
        return _read_ids(lambda *buffer: int(call(self._handle, *_encode(text), int(add_special), *buffer)))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        call, count = _library.antigravity_detokenize, ctypes.c_size_t(0)
        array = (ctypes.c_uint32 * len(ids))(*ids)
        buffer = ctypes.create_string_buffer(0)
        status = call(self._handle, array, len(ids), buffer, 0, ctypes.byref(count))
        if status == _USAGE and count.value > 0:
            buffer = ctypes.create_string_buffer(count.value)
            status = call(self._handle, array, len(ids), buffer, count.value, ctypes.byref(count))
        _check(status)
        return buffer.raw[: count.value].decode()

    def embed(self, texts: Sequence[str], **options: Any) -> List[List[float]]:
        """One vector of length 1 for each text. Options: pooling (mean, cls or last) and dimensions."""
        texts, count = list(texts), ctypes.c_size_t(0)
        buffer = (ctypes.c_float * (len(texts) * int(model_info()["hidden_size"])))()
        call, encoded = _library.antigravity_embed, (*_encode(json.dumps(texts)), *_options(options))
        _check(call(self._handle, *encoded, buffer, len(buffer), ctypes.byref(count)))
        width = count.value // max(len(texts), 1)
        return [list(buffer[i * width : (i + 1) * width]) for i in range(len(texts))]

    def score(self, texts: Sequence[str], prompt: str = "") -> List[float]:
        """How probable each text is behind a prompt: the sum of its tokens' log-probabilities."""
        texts, count = list(texts), ctypes.c_size_t(0)
        buffer = (ctypes.c_double * len(texts))()
        call, encoded = _library.antigravity_score, (*_encode(prompt), *_encode(json.dumps(texts)))
        _check(call(self._handle, *encoded, buffer, len(buffer), ctypes.byref(count)))
        return list(buffer)

    def close(self) -> None:
        """Frees the model; its sessions stay usable."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _library.antigravity_free(handle)

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

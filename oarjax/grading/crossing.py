"""Let tests in one interpreter call functions of a program in another; only plain data crosses.

The source of this module is put in front of both programs in their sandboxes (``grading/code.py``), so it imports
nothing of the package. ``serve`` runs with the untrusted program and answers calls, one line of JSON each; ``check``
runs the tests. What arrives there has been rebuilt from JSON: whatever a program does to its own interpreter, it can
only choose values. None, bool, int, float, complex, str, bytes, list, tuple, dict, set and frozenset cross, and
iterators as iterators of such values; subclasses cross as the plain type. The built-in exceptions cross by name.
"""

import builtins
import json
import os
import sys
from itertools import islice
from typing import Any

MAX_LINE = 1 << 22
MAX_DEPTH = 50
MAX_ITEMS = 100_000  # of an iterator
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
UNRAISED = AssertionError, StopIteration, StopAsyncIteration
"""Exceptions that arrive as RuntimeError: assertions are the tests' own, ``all(map(f, values))`` ends at a stop."""
REFUSED = 96
"""Exit code of tests whose own values cannot cross."""


class NotPlain(TypeError):
    """Raised for a value that cannot cross."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return plain data as JSON: a type's name and its content."""
    if depth > MAX_DEPTH:
        raise NotPlain(f"nested deeper than {MAX_DEPTH}")
    if value is None:
        return None
    if isinstance(value, bool):
        return ["bool", int(value)]
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", [float.hex(value.real), float.hex(value.imag)]]
    if isinstance(value, str):
        return ["str", str.__str__(value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]]
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return [name, [encode(item, depth + 1) for item in value]]
    if hasattr(value, "__next__") or isinstance(value, range):
        return ["iterator", [encode(item, depth + 1) for item in islice(value, MAX_ITEMS)]]
    raise NotPlain(f"a {type(value).__name__} does not cross; return plain data")


def decode(tree: Any) -> Any:
    """Build plain data from JSON.

    Raises:
        ValueError, TypeError, KeyError: it is something else.
    """
    if tree is None:
        return None
    name, content = tree
    if name == "bool":
        return bool(content)
    if name == "int":
        return int(content, 16)
    if name == "float":
        return float.fromhex(content)
    if name == "complex":
        return complex(*map(float.fromhex, content))
    if name == "str":
        return str(content)
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "dict":
        return {decode(k): decode(v) for k, v in content}
    if name == "iterator":
        return iter([decode(item) for item in content])
    return SEQUENCES[name](decode(item) for item in content)


def send(file, message):
    file.write(json.dumps(message) + "\n")
    file.flush()


def receive(file):
    """Return the other side's next message; end this process if there is none."""
    line = file.readline(MAX_LINE)
    if not line.endswith("\n"):
        sys.exit(1)
    return json.loads(line)


def serve(program, read, write):
    """Run a program, name what it defines, and answer calls until the tests end."""
    calls, replies = os.fdopen(read, encoding="utf-8"), os.fdopen(write, "w", encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "<completion>", "exec"), names)
    send(replies, [[name, *describe(value)] for name, value in names.items() if not name.startswith("__")])
    while True:
        call = receive(calls)
        try:
            arguments = [decode(a) for a in call["arguments"]]
            keywords = {name: decode(a) for name, a in call["keywords"].items()}
            value = encode(names[call["name"]](*arguments, **keywords))
            reply = {"value": value, "arguments": [encode(a) for a in arguments]}
        except Exception as error:
            builtins_of = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            reply = {"error": builtins_of[0], "message": str(error)[:1000]}
        send(replies, reply)


def describe(value):
    """Return what a name stands for: a module, a function (or class), or plain data."""
    if isinstance(value, type(sys)):
        return "module", value.__name__
    if callable(value):
        return "function", None
    try:
        return "value", encode(value)
    except NotPlain:
        return "other", None


def check(tests, read, write, done):
    """Run tests with a program's functions, and print ``done`` after the last one.

    Built-in functions are never the program's, and modules are this interpreter's own.
    """
    replies, calls = os.fdopen(read, encoding="utf-8"), os.fdopen(write, "w", encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    for name, kind, content in receive(replies):
        if not isinstance(name, str) or hasattr(builtins, name):
            continue
        if kind == "function":
            names[name] = remote(name, replies, calls)
        elif kind == "value":
            names[name] = decode(content)
        elif kind == "module" and content.split(".")[0] in sys.stdlib_module_names:
            __import__(content)
            names[name] = sys.modules[content]
    exec(compile(tests, "<tests>", "exec"), names)
    print(done)


def remote(name, replies, calls):
    """Return a function that calls the program's function of this name; lists and the like may change in place."""

    def call(*arguments, **keywords):
        try:
            sent = [encode(a) for a in arguments]
            by_keyword = {key: encode(value) for key, value in keywords.items()}
        except NotPlain as error:
            print(f"{name}: {error}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(REFUSED)
        send(calls, {"name": name, "arguments": sent, "keywords": by_keyword})
        reply = receive(replies)
        if "error" in reply:
            kind = getattr(builtins, str(reply["error"]), RuntimeError)
            usable = isinstance(kind, type) and issubclass(kind, Exception) and kind not in UNRAISED
            raise (kind if usable else RuntimeError)(str(reply["message"]))
        for argument, content in zip(arguments, reply["arguments"], strict=True):
            update(argument, content)
        return decode(reply["value"])

    return call


def update(mine, theirs):
    """Give a list, dict or set the content that it has in the program."""
    if type(mine) in (list, dict, set):
        content = decode(theirs)
        if type(content) is not type(mine):
            raise TypeError("an argument came back as another type")
        mine.clear()
        (mine.extend if isinstance(mine, list) else mine.update)(content)

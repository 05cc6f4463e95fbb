"""The command line: finds the verb, and turns whatever ends it into an exit code and one line."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence

from ..errors import AuditorError
from . import audit, completion, diff, options, snippet, verbs
from .verbs import PROGRAM


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 clean, 1 findings, 2 error, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb, rest = (words[0], words[1:]) if words and words[0] in VERBS else ("audit", words)
    debug = "--debug" in words
    try:
        make_parser, run = VERBS[verb]
        parser = make_parser()
        args = parser.parse_args((options.configured(parser) if verb == "audit" else []) + rest)
        args.command = f"{PROGRAM} {shlex.join(words)}"
        return int(run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except AuditorError as error:
        return _failed(str(error), f"docs/errors.md#{error.slug} explains this", debug)
    except Exception as error:  # whatever else breaks is ours to fix, and the user still gets one clear line
        text = str(error).strip().split("\n")[0]
        return _failed(f"internal error, {type(error).__name__}: {text}", "please report it with --debug", debug)


def _failed(message: str, hint: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}\nhint: {hint}", file=sys.stderr)
    return 2


def _complete(args: argparse.Namespace) -> int:
    print(completion.script(args.shell, {name: make for name, (make, _) in VERBS.items()}), end="")
    return 0


VERBS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[argparse.Namespace], int]]] = {
    "audit": (options.audit_parser, audit.audit),
    "explain": (verbs.explain_parser, verbs.explain),
    "rules": (verbs.rules_parser, verbs.rules),
    "apply": (verbs.apply_parser, verbs.apply),
    "snippet": (snippet.snippet_parser, snippet.snippet),
    "diff": (diff.diff_parser, diff.diff),
    "completion": (completion.completion_parser, _complete),
}

"""Parses TARGET, which names the user's model, and imports its module as the user's own code would."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import linecache
import re
import shlex
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar
from zipfile import ZipFile, is_zipfile

from ..capture.source import Place, kind_of, line_of
from ..emulation.regions import written_as_meant
from ..errors import CallbackError, LoadError, describe, first_line, let_through, origin_of, printable
from ..isolation import isolate
from ..isolation.process import ieee, swap_attribute
from ..records import Progress
from .importer import NAME, as_script, import_source, name_of, root_of
from .nearby import find_near, find_project, hint_at_file

T = TypeVar("T")

PROGRAM = ".pt2"
"""Suffix of an exported program's file."""

HUB_FILE = "hubconf.py"
"""The file of a repository that defines the entry points of `torch.hub`."""

MARKERS = ("config.json", "model_index.json", "adapter_config.json", "modules.json")
"""Files of directories that an `hf:` target names."""

SLOW = 10.0
"""Seconds of an import after which the running line is named."""

_SYMBOL = re.compile(r"(?P<where>.+?):(?P<symbol>[A-Za-z_][\w.]*(?:\(.*\))?)", re.DOTALL)


@dataclass(frozen=True)
class Target:
    """A parsed TARGET: a file or a module name, and the symbol in it.

    hub: "timm" or "hf" (Hugging Face) for a model of these libraries, whose name is the first of `args`; "program" for
    an exported program, whose file is the first of `args`. words: the command-line arguments of the user's script.
    """

    text: str
    path: Path | None
    module: str
    symbol: str | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    hub: str = ""
    words: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """A name for messages: of the file or module, or the whole target if no Python file is its own."""
        if self.hub:
            return self.text
        return self.path.name if self.path else self.module

    @property
    def name(self) -> str:
        if self.hub:
            path = Path(str(self.args[0]))
            name = path.stem if self.hub == "program" else path.name
            return f"{name}-{self.symbol}" if self.symbol else name
        stem = self.path.stem if self.path else self.module
        if self.path is not None and self.path.name == HUB_FILE:
            stem = self.path.parent.name
        return f"{stem}-{self.symbol}" if self.symbol else stem

    @property
    def place(self) -> str:
        """The file or module as the user wrote it, without a symbol."""
        return self.text.partition(":")[0]

    @property
    def script(self) -> str:
        """The first entry of `sys.argv` while the user's code runs."""
        return str(self.path or self.module)

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders for `sys.path`, see `as_script`: the parent of the file's outermost package, the working directory,
        and the file's folder; for a module the working directory only."""
        here = str(Path.cwd())
        if self.path is None:
            return (here,)
        return (root_of(self.module, self.path), here, str(self.path.parent))


def parse(text: str) -> Target:
    """Parse `path/to/model.py[:symbol]`, `package.module[:symbol]`, `directory:entry` of a hubconf.py, `program.pt2`,
    `timm:NAME` or `hf:NAME_OR_PATH[:method]`.

    A symbol or a timm name may have literal arguments. After ` -- ` follow the arguments of a script that parses its
    command line on import. Raises: LoadError(slug="missing-target" | "bad-target" | "directory-target").
    """
    if " -- " in text:
        where, _, words = text.partition(" -- ")
        try:
            return replace(parse(where), text=text, words=tuple(shlex.split(words)))
        except ValueError as error:
            raise LoadError(f"cannot read the arguments in {text!r}: {error}", slug="bad-target") from error
    hub, colon, name = text.partition(":")
    if colon and hub in ("timm", "hf"):
        return _parse_hub(text, hub, name)
    if Path(text).suffix == PROGRAM:
        if not Path(text).is_file():
            raise LoadError(f"{text} does not exist: check the path (from {Path.cwd()})", slug="missing-target")
        return Target(text, None, "torch", None, (text,), {}, "program")
    where = text
    symbol = None
    match = _SYMBOL.fullmatch(text)
    if match:
        where = match["where"]
        symbol = match["symbol"]
    called: str | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if symbol:
        called, args, kwargs = _split_call(symbol)
    if symbol is None:
        _require_readable_symbol(text)
    try:
        if where.endswith(".py") or Path(where).exists() or "/" in where or "\\" in where:
            path = _existing_file(Path(where))
            return Target(text, path, _module_name(path), called, args, kwargs)
    except OSError as error:
        message = f"{text[:100]!r} ... is not a valid path ({error.strerror})"
        raise LoadError(f"{message}: write path/to/model.py[:symbol]", "bad-target") from error
    _require_module_name(text, where)
    return Target(text, None, where, called, args, kwargs)


def _parse_hub(text: str, hub: str, name: str) -> Target:
    """Parse what follows `timm:` or `hf:`. Raises: LoadError(slug="bad-target")."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if hub == "timm" and name.endswith(")"):
        name, bracket, inside = name.partition("(")
        _, args, kwargs = _split_call(f"create_model{bracket}{inside}")
        if _has_names((args, kwargs)):
            message = "there is no file whose names they could be: write plain numbers, strings, lists or dicts"
            raise LoadError(f"cannot read the arguments in {text!r}: {message}", slug="bad-target")
    if not name.strip():
        raise LoadError(f"{text!r} names no model: write timm:resnet18 or hf:path/to/directory", slug="bad-target")
    if hub == "timm":
        return Target(text, None, "timm", None, (name, *args), kwargs, hub)
    folder, _, method = name.rpartition(":")
    if folder and method.isidentifier():
        return Target(text, None, "transformers", method, (folder,), {}, hub)
    return Target(text, None, "transformers", None, (name, *args), kwargs, hub)


def _require_readable_symbol(text: str) -> None:
    """Raises: LoadError(slug="bad-target") if a Python file is followed by a symbol that cannot be read. text: a target
    without a symbol that can."""
    file, colon, symbol = text.partition(".py:")
    if not colon or Path(text).exists() or not Path(f"{file}.py").is_file():
        return
    hint = "write name, or name(1, width=8), with each bracket closed"
    raise LoadError(f"cannot read the symbol {symbol!r} after {file}.py: {hint}", slug="bad-target")


def _require_module_name(text: str, where: str) -> None:
    """Raises: LoadError(slug="bad-target") if `where` cannot name a module. text: the whole target."""
    if all(part.isidentifier() for part in where.split(".")):
        return
    hint = "write path/to/model.py[:symbol]"
    script, _, arguments = text.partition(" ")
    if arguments.startswith("-"):
        hint = f'the arguments of a script stand after " -- ": write "{script} -- {arguments}"'
    raise LoadError(f"{text!r} is neither a file nor a module name: {hint}", "bad-target")


USAGE_ERROR = 2
"""The exit code of argparse for missing or wrong arguments."""


def import_target(target: Target) -> ModuleType:
    """Import the target's module; `if __name__ == "__main__"` blocks do not run.

    Raises: LoadError(slug="missing-target" | "syntax-error" | "missing-package" | "import-raises").
    """
    try:
        with _named_if_slow(target):
            return import_source(target.module, target.path)
    except (Exception, SystemExit) as error:
        raise _import_error(error, target) from error


def _import_error(error: Exception | SystemExit, target: Target) -> LoadError:
    """The error for an exception of the target's import."""
    if isinstance(error, SyntaxError):
        place = f"{Path(error.filename or target.label).name}:{error.lineno}"
        return LoadError(f"{place}: syntax error, {error.msg}: fix the file and run again", "syntax-error")
    if isinstance(error, PackageNotFoundError):
        return _no_installation(error, target)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _no_module(error.name, target)
    message = f"importing {target.label} raised {blame(error)}"
    message += hint_at_file(error, target.path)
    if isinstance(error, SystemExit) and error.code == USAGE_ERROR:
        message += (
            f': if it parses its command line, give its arguments in the target, as "{target.label} -- --option value"'
        )
    if isinstance(error, NameError) and error.name == "get_ipython":
        message += ": remove the lines with get_ipython(), which only a notebook defines"
    return LoadError(message, "import-raises")


def _no_installation(error: PackageNotFoundError, target: Target) -> LoadError:
    """The error for code that asks for the version of a package that is not installed, mostly the clone's own."""
    folder = None if target.path is None else find_project(target.path)
    what = error.name if folder is None else f"-e {folder}"
    message = f"{target.label} reads the metadata of the package {error.name!r}, which is not installed"
    return LoadError(f"{message} ({blame(error)}): run `pip install {what}`", "missing-package")


def _no_module(name: str, target: Target) -> LoadError:
    """The error for a module that the target is, or that the target imports. name: of the module."""
    is_target = target.path is None and f"{target.module}.".startswith(f"{name}.")
    hint = "install it in the environment that runs the audit"
    if is_target:
        hint = "give a path such as ./model.py, or run where the module can be imported"
    if folder := find_near(target.module if is_target else name, target.path):
        hint = f"it lies in {folder}: run there, or put that folder on PYTHONPATH"
    if is_target:
        return LoadError(f"no file or module is called {target.module!r}: {hint}", "missing-target")
    package = name.partition(".")[0]
    if target.path is not None and target.module == package:
        hint = f"{target.label} has the name of the package {package!r}, and hides it: rename {target.label}"
    return LoadError(f"{target.label} needs {name!r}, which is missing: {hint}", "missing-package")


@contextmanager
def _named_if_slow(target: Target) -> Iterator[None]:
    """If the body, an import, takes more than SLOW seconds, say which line of the user's files runs, and what to do: a
    script may train when it is imported. Nothing is said of a line that imports a library."""
    importing = threading.get_ident()

    def name_line() -> None:
        frames = traceback.walk_stack(sys._current_frames().get(importing))  # the innermost first
        within = takewhile(lambda at: at[0].f_code.co_filename != __file__, frames)
        top_levels = [(frame, line) for frame, line in within if _is_top_level(frame, target)]
        if not top_levels:
            return
        frame, line = top_levels[0]
        file = Path(frame.f_code.co_filename)
        code = linecache.getline(str(file), line).strip()
        if code.startswith(("import ", "from ")):
            return
        hint = 'move code that trains under `if __name__ == "__main__":`, or name a file that only builds the model'
        message = (
            f"importing {target.label} has taken {SLOW:g} seconds, now at {file.name}:{line} ({code[:60]}): {hint}"
        )
        print(f"warning: {printable(message)}", file=sys.stderr)

    timer = threading.Timer(SLOW, name_line)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_top_level(frame: FrameType, target: Target) -> bool:
    """Whether the frame runs the top level of the target's module, or of another module of the user's."""
    if frame.f_code.co_name != "<module>":
        return False
    return frame.f_globals.get("__name__") == target.module or kind_of(frame.f_code.co_filename) == "own"


@contextmanager
def user_code(target: Target, seed: int) -> Iterator[None]:
    """Run the body as the user's script would run, see `as_script`, with all generators seeded.

    `torch.autocast("cuda")` as a decorator keeps its settings even without CUDA. Afterwards
    `sys.dont_write_bytecode` is restored, and all state that `isolate` restores, including `sys.path`.
    """
    with (
        swap_attribute(sys, "dont_write_bytecode", True),
        ieee(),
        isolate(seed=seed),
        written_as_meant(),
        as_script([target.script, *target.words], target.folders),
    ):
        yield


def named_in(target: Target, advice: str, slug: str, seed: int = 0) -> Any:
    """The object that a target's symbol names. Raises: LoadError(slug) with advice if it does not exist."""
    with user_code(target, seed):
        module = import_target(target)
    try:
        return attrgetter(str(target.symbol))(module)
    except AttributeError as error:
        raise LoadError(f"{target.label} has no {target.symbol!r}: {advice}", slug=slug) from error


def _existing_file(path: Path) -> Path:
    if (path / "__init__.py").is_file():
        path = path / "__init__.py"
    if path.is_dir():
        if (path / HUB_FILE).is_file():
            return (path / HUB_FILE).resolve()
        if any((path / name).is_file() for name in MARKERS):
            raise LoadError(f"{path} is a model's directory: write hf:{path}", slug="directory-target")
        scripts = sorted(p.name for p in path.glob("*.py"))[:3]
        example = f", for example {path / scripts[0]}" if scripts else ""
        raise LoadError(
            f"{path} is a directory: give the file that contains the model{example}", slug="directory-target"
        )
    if not path.exists():
        raise LoadError(f"{path} does not exist: check the path (from {Path.cwd()})", slug="missing-target")
    if path.suffix != ".py":
        if path.suffix == PROGRAM:
            raise LoadError(f"an exported program has no symbols: write {path}", slug="bad-target")
        if _is_torchscript(path):
            hint = f"write a model.py with get_model(), which returns torch.jit.load({path.name!r}), and get_inputs()"
            raise LoadError(f"{path} is a TorchScript file: {hint}", slug="bad-target")
        hint = "name the .py file that builds the model and pass weights with --weights"
        if path.suffix == ".ipynb":
            hint = f"export it with `jupyter nbconvert --to script {path}`, and name the .py file"
        raise LoadError(f"{path} is not a Python file: {hint}", slug="bad-target")
    return path.resolve()


def _is_torchscript(path: Path) -> bool:
    """Whether a file is an archive that `torch.jit.save` wrote: it contains code and constants."""
    if not is_zipfile(path):
        return False
    with ZipFile(path) as archive:
        names = archive.namelist()
    return any(name.endswith("/constants.pkl") for name in names) and any("/code/" in name for name in names)


def _module_name(path: Path) -> str:
    """The name under which the user's code imports the file: its stem, with the packages around it; `_` for a dot.

    A folder is a package if it has an `__init__.py`, or if the file imports the folder by name or relatively.
    """
    folders = list(path.parents)
    depth = 0
    while folders[depth].name.isidentifier() and (folders[depth] / "__init__.py").exists():
        depth += 1
    names, dots = _imports(path)
    named = (
        level
        for level, folder in enumerate(folders, 1)
        if folder.name in names and not _holds_its_namesake(folder, path) and not _is_elsewhere(folder)
    )
    parts = [name_of(folder.name) for folder in reversed(folders[: max(depth, next(named, 0), dots)])]
    return ".".join(parts if path.name == "__init__.py" and parts else [*parts, name_of(path.stem)])


def _imports(path: Path) -> tuple[set[str], int]:
    """The packages that a file imports by name, and the number of levels that its relative imports go up."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return set(), 0  # importing it reports the error
    names, dots = set[str](), 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            dots = max(dots, node.level)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names, dots


def _holds_its_namesake(folder: Path, file: Path) -> bool:
    """Whether `import NAME`, with the folder's name, finds a package or module inside the folder, as in a clone whose
    folder has the package's name: around the file, in the folder itself, or in its `src`."""
    around = [place for place in file.parents if folder in (place, *place.parents)]
    searched = [*around, folder / "src"]
    return any((place / f"{folder.name}.py").is_file() or (place / folder.name).is_dir() for place in searched)


def _is_elsewhere(folder: Path) -> bool:
    """Whether `import NAME`, with the folder's name, imports a module from elsewhere."""
    try:
        spec = importlib.util.find_spec(folder.name)
    except (ImportError, ValueError):
        return False
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return any(place and folder not in (Path(place), *Path(place).parents) for place in places)


def _split_call(symbol: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """`Net(3, width=8)` -> ("Net", (3,), {"width": 8}); nothing is evaluated. Arguments are literals, names of the
    model's file, and calls of these names: `GPT(GPTConfig(n_layer=2))`, see `importer.with_names`."""
    if "(" not in symbol:
        return symbol, (), {}
    try:
        tree = ast.parse(symbol, mode="eval").body
        if not isinstance(tree, ast.Call) or any(keyword.arg is None for keyword in tree.keywords):
            raise ValueError
        args, kwargs = _arguments(tree)
    except (SyntaxError, ValueError) as error:
        hint = "write name(1, width=8) with numbers, strings, lists, dicts, or names of the file as in GPT(Config(n=2))"
        raise LoadError(f"cannot read the arguments in {symbol!r}: {hint}", slug="bad-target") from error
    return ast.unparse(tree.func), args, kwargs


def _arguments(tree: ast.Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if any(keyword.arg is None for keyword in tree.keywords):
        raise ValueError("** is not supported")
    args = tuple(_argument(node) for node in tree.args)
    return args, {str(keyword.arg): _argument(keyword.value) for keyword in tree.keywords}


def _argument(node: ast.expr) -> Any:
    """The value of a literal; for a name or a call, a dict that `importer.with_names` reads. Raises: ValueError."""
    match node:
        case ast.Call(func=ast.Name(id="dict"), args=[]):
            return _arguments(node)[1]
        case ast.Call():
            args, kwargs = _arguments(node)
            return {NAME: _dotted(node.func), "args": args, "kwargs": kwargs}
        case ast.Name() | ast.Attribute():
            return {NAME: _dotted(node)}
        case ast.List():
            return [_argument(item) for item in node.elts]
        case ast.Tuple():
            return tuple(_argument(item) for item in node.elts)
        case ast.Dict() if None not in node.keys:
            keys = [ast.literal_eval(key) for key in node.keys if key is not None]
            return dict(zip(keys, map(_argument, node.values), strict=True))
    return ast.literal_eval(node)


def _has_names(value: Any) -> bool:
    """Whether parsed arguments contain a name or a call, which `importer.with_names` reads."""
    if isinstance(value, (list, tuple)):
        return any(map(_has_names, value))
    return isinstance(value, dict) and (NAME in value or any(map(_has_names, value.values())))


def _dotted(node: ast.expr) -> str:
    """`torch.float32` as text. Raises: ValueError for anything but names and dots."""
    text = ast.unparse(node)
    if not all(part.isidentifier() for part in text.split(".")):
        raise ValueError(f"{text} is not a name")
    return text


def call(function: Callable[..., T], what: str, slug: str, *args: Any, **kwargs: Any) -> T:
    """Call `function(*args, **kwargs)`; an exception becomes a LoadError that starts with `what`."""
    try:
        return function(*args, **kwargs)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(f"{what} raised {blame(error)}", slug=slug) from error


def arguments_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The function's arguments by name; none if Python cannot say, as of the forward of a TorchScript file."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def required_arguments(function: Callable[..., Any]) -> list[str]:
    """Names of the function's arguments that have no default."""
    parameters = arguments_of(function).values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def blame(error: BaseException) -> str:
    """The error as text, with the innermost line of user code: `TypeError: message (model.py:12)`.

    If the error was raised from another error, such as a library's failed import, the other error follows, unless the
    message quotes it.
    """
    first = origin_of(error)
    text = describe(error, None)
    if first_line(first)[:80] not in text:
        text = f"{text.rstrip('.')}, from {describe(first, None)}"
    frames = [*traceback.extract_tb(error.__traceback__), *traceback.extract_tb(first.__traceback__)]
    places = [line_of(Place(f.filename, f.lineno or 0)) for f in frames if kind_of(f.filename) == "own"]
    return f"{text} ({places[-1]})" if places else text


def guard_progress(progress: Progress) -> Progress:
    """Wrap the caller's callback: if it raises, the audit ends with CallbackError(slug="bad-callback")."""

    def call_guarded(stage: str, detail: str, done: int, total: int) -> None:
        try:
            progress(stage, detail, done, total)
        except Exception as error:
            let_through(error)
            raise CallbackError(
                f"progress raised {blame(error)}: it is called as progress(stage, detail, done, total)", "bad-callback"
            ) from error

    return call_guarded

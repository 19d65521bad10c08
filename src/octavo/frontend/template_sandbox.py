"""A Jinja environment in which a chat template from a stranger can neither reach Python nor run without end.

Jinja's immutable sandbox keeps templates away from Python's internals; it does not bound their time or memory. Here
every loop turn, call, filter and string or list that is made is counted against the budget of the rendering, and every
single operation that could make something far larger than its inputs is checked before it is done.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from string import Formatter
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_int, make_attrgetter, sync_do_join
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment, pass_eval_context
from jinja2.visitor import NodeTransformer

__all__ = ["Budget", "BudgetError", "TemplateEnvironment", "TemplateRaisedError"]

MAX_STEPS = 1_000_000
MAX_SECONDS = 3.0  # of processor time of the rendering thread
MAX_CHARACTERS = 8_000_000  # of one string, one container or the whole output
MAX_TOTAL_CHARACTERS = 64_000_000  # of everything made while rendering
_MAX_BITS = 8192  # of a number
_MAX_WIDTH = 1000  # of padding, indentation and precision

# Names that no template can write, for what the compiler is made to call.
_LOOP, _CONCAT, _WEIGH, _READ = "octavo loop", "octavo concat", "octavo weigh", "octavo read"

# Every method of strings but those that make bytes or tables, or take a table.
_STRING_METHODS = frozenset(
    name for name in dir(str) if name[0] != "_" and name not in ("encode", "format_map", "maketrans", "translate")
)
_METHODS: tuple[tuple[Any, frozenset[str]], ...] = (
    (str, _STRING_METHODS),
    (dict, frozenset({"get", "items", "keys", "values", "copy"})),
    ((list, tuple), frozenset({"index", "count", "copy"})),
    ((int, float, bytes, set, frozenset, range), frozenset({"is_integer"})),
)

# Filters with no use in a chat template and no bound on their time, or no reason to be trusted with one.
_DROPPED_FILTERS = ("pprint", "urlize", "random", "xmlattr", "wordwrap", "striptags")


class BudgetError(TemplateError):
    """The template needs more time or memory than a rendering may take."""


class TemplateRaisedError(TemplateError):
    """The template itself refused the conversation, with ``raise_exception``."""


class Budget:
    """What one rendering has used, and the sizes of the containers it works with."""

    def __init__(self) -> None:
        self.steps = 0
        self.characters = 0
        self._deadline = time.thread_time() + MAX_SECONDS
        self._weights: dict[int, tuple[Any, int]] = {}

    def tick(self) -> None:
        """Count one step."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise BudgetError(f"it takes more than {MAX_STEPS} steps")
        if not self.steps & 255:
            self._check_time()

    def charge(self, characters: int) -> None:
        """Count something of this size that has been or will be made."""
        if characters > MAX_CHARACTERS:
            raise BudgetError(f"it makes a text or list of more than {MAX_CHARACTERS} characters")
        self.characters += characters
        if self.characters > MAX_TOTAL_CHARACTERS:
            raise BudgetError(f"it makes texts of more than {MAX_TOTAL_CHARACTERS} characters in all")
        if characters > 1 << 16:
            self._check_time()

    def _check_time(self) -> None:
        if time.thread_time() > self._deadline:
            raise BudgetError(f"it takes more than {MAX_SECONDS:g} seconds")

    def weigh(self, value: Any) -> int:
        """About the number of characters the value has when written out in full.

        Each container is measured once and remembered, so shared parts cost nothing to measure, while the size counts
        them as often as they would be written: a list that holds itself twice over forty levels is refused at once.
        """
        if isinstance(value, str):
            return len(value) + 8
        if isinstance(value, int) and not isinstance(value, bool):
            return 8 + value.bit_length() // 3
        if not isinstance(value, (list, tuple, dict)):
            return 32
        known = self._weights.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        weight = 16
        nested = False
        for item in value if not isinstance(value, dict) else chain(value.keys(), value.values()):
            weight += self.weigh(item)
            nested = nested or isinstance(item, (list, tuple, dict))
        if weight > MAX_CHARACTERS:
            raise BudgetError(f"it builds a list or object of more than {MAX_CHARACTERS} characters")
        if nested or len(value) > 16:
            # Holding the object keeps its id from being used again for another one. What is held counts too.
            self._weights[id(value)] = (value, weight)
            self.charge(256)
        return weight

    def read(self, value: Any) -> Any:
        """Check the time before an operation that reads all of a large value, and hand it on."""
        if isinstance(value, (str, list, tuple, dict)) and self.weigh(value) > 1 << 14:
            self._check_time()
        return value

    def made(self, value: Any) -> Any:
        """Count a value that an operation has made, and hand it on."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.charge(16 * len(value))
            self.weigh(value)
        return value


class _Loop:
    """What a loop runs over, counting its turns."""

    __slots__ = ("_budget", "_iterable")

    def __init__(self, budget: Budget, iterable: Iterable[Any]) -> None:
        self._budget = budget
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        tick = self._budget.tick
        for item in self._iterable:
            tick()
            yield item

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


class _Instrument(NodeTransformer):
    """Rewrites a parsed template so that loops, joined strings, slices, containers and comparisons pass the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through(_LOOP, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(_CONCAT, nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through(_WEIGH, node) if isinstance(node.arg, nodes.Slice) and node.ctx == "load" else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const):
            node.expr = _through(_READ, node.expr)
        for operand in node.ops:
            if not isinstance(operand.expr, nodes.Const):
                operand.expr = _through(_READ, operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        # Whether a name is defined is asked of the name itself.
        if node.args:
            node.node = _through(_READ, node.node)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if _all_constant(node.items) else _through(_WEIGH, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" or _all_constant(node.items) else _through(_WEIGH, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return node if _all_constant([pair.value for pair in node.items]) else _through(_WEIGH, node)


def _all_constant(items: Iterable[nodes.Node]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; for serving it is only a block."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment chat templates are compiled and rendered in, with what they may use and their budget."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Nothing is computed while compiling, where no budget runs.
            optimized=False,
            finalize=self._finalize,
            extensions=[_Generation, loopcontrols],
            cache_size=0,
        )
        self._local = threading.local()
        self.concat = self._concat  # type: ignore[method-assign]
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self._install_filters()

    # -- the budget of the rendering that runs in this thread ----------------------------------------------------------

    @property
    def budget(self) -> Budget:
        """The budget of the rendering in this thread."""
        budget = getattr(self._local, "budget", None)
        if budget is None:
            raise SecurityError("a template ran outside a rendering")
        return budget  # type: ignore[no-any-return]

    def start(self) -> Budget:
        """Give this thread a fresh budget."""
        self._local.budget = Budget()
        return self.budget

    # -- compilation ---------------------------------------------------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Instrument().visit(tree)  # type: ignore[no-any-return]

    # -- operations ----------------------------------------------------------------------------------------------------

    @pass_context
    def _finalize(self, context: Context, value: Any) -> Any:
        if isinstance(value, str):
            return value
        return self._text(value)

    def _text(self, value: Any) -> str:
        """``str`` of a value whose written size has been checked."""
        if isinstance(value, str):
            return value
        if isinstance(value, Namespace):
            raise SecurityError("a namespace cannot be written as text")
        self.budget.charge(self.budget.weigh(value))
        text = str(value)
        self.budget.charge(len(text))
        return text

    def _concat(self, parts: Iterable[str]) -> str:
        pieces = list(parts)
        self.budget.charge(sum(map(len, pieces)))
        return "".join(pieces)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if callable(value):
            for types, allowed in _METHODS:
                if isinstance(obj, types):
                    return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget.tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.tick()
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self.budget
        budget.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = __self._check_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def _check_method(self, owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Refuse a string method whose result would be too large; the arguments, with iterators made lists."""
        if name in ("center", "ljust", "rjust", "zfill"):
            _check_width(args[0] if args else kwargs.get("width"), MAX_CHARACTERS)
        elif name == "expandtabs":
            _check_width(args[0] if args else kwargs.get("tabsize", 8), 64)
            self.budget.charge(64 * owner.count("\t") + len(owner))
        elif name == "replace" and len(args) >= 2:
            self._check_replace(owner, args[0], args[1])
        elif name == "join" and args:
            items = list(args[0])
            self._check_join(owner, items)
            return (items, *args[1:])
        return args

    def _check_replace(self, text: str, old: Any, new: Any) -> None:
        if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
            self.budget.charge(len(text) + text.count(old) * (len(new) - len(old)))

    def _check_join(self, separator: str, items: list[Any]) -> None:
        self.budget.charge(sum(map(self.budget.weigh, items)) + len(separator) * len(items))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template = value.__self__
        if value.__name__ != "format":
            raise SecurityError("str.format_map is not available")

        def bounded(*args: Any, **kwargs: Any) -> str:
            fields = 0
            widest = 0
            for _, field, spec, _ in Formatter().parse(template):
                if field is None:
                    continue
                fields += 1
                if spec and "{" in spec:
                    raise SecurityError("str.format with computed widths is not available")
                widest = max(widest, *map(int, re.findall(r"\d{1,9}", spec or "") or ["0"]))
            _check_width(widest, _MAX_WIDTH)
            self._check_formatted(len(template), fields, widest, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return bounded

    def _check_formatted(self, length: int, fields: int, widest: int, values: list[Any]) -> None:
        largest = max(map(self.budget.weigh, values), default=0)
        self.budget.charge(length + fields * (largest + widest + 32))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        budget.tick()
        for operand in (left, right):
            if isinstance(operand, int) and operand.bit_length() > _MAX_BITS:
                raise BudgetError(f"it computes with numbers of more than {_MAX_BITS} bits")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
                    size = len(sequence) if isinstance(sequence, str) else budget.weigh(sequence)
                    budget.charge(max(count, 0) * size)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
                raise BudgetError(f"it computes with numbers of more than {_MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            return self._percent(left, right)
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            budget.charge(len(left) + (len(right) if isinstance(right, (str, list, tuple)) else 0))
        return budget.made(super().call_binop(context, operator, left, right))

    def _percent(self, template: str, values: Any) -> str:
        if re.search(r"%[^a-zA-Z%]*\*", template):
            raise SecurityError("formatting with computed widths is not available")
        widest = max(map(int, re.findall(r"\d{1,9}", template)), default=0)
        if widest > _MAX_WIDTH and re.search(rf"%[^a-zA-Z%]*\d{{{len(str(_MAX_WIDTH))},}}", template):
            raise BudgetError(f"it formats with a width of more than {_MAX_WIDTH}")
        operands = list(values) if isinstance(values, tuple) else [values]
        self._check_formatted(len(template), template.count("%"), _MAX_WIDTH, operands)
        return self.budget.made(template % values)  # type: ignore[no-any-return]

    # -- filters -------------------------------------------------------------------------------------------------------

    def _install_filters(self) -> None:
        for name in _DROPPED_FILTERS:
            self.filters.pop(name, None)
        checks: dict[str, Callable[..., None]] = {
            "center": lambda value, width=80: _check_width(width, MAX_CHARACTERS),
            "indent": self._check_indent,
            "replace": lambda s, old="", new="", count=None: self._check_replace(str(s), old, new),
            "batch": lambda value, linecount=1, fill_with=None: _check_width(linecount, 100_000),
            "slice": lambda value, slices=1, fill_with=None: _check_width(slices, 100_000),
            "round": lambda value, precision=0, method="common": _check_width(abs(precision), 100),
            "truncate": lambda s, *args, **kwargs: None,
        }
        for name, function in list(self.filters.items()):
            self.filters[name] = self._counted(function, checks.get(name))
        own: dict[str, Callable[..., Any]] = {
            "tojson": self._tojson,
            "string": self._text,
            "format": lambda value, *args, **kwargs: self._percent(self._text(value), kwargs or args),
            "sum": pass_environment(_sum),
            "int": self._int,
            "join": self._join,
        }
        for name, function in own.items():
            self.filters[name] = self._counted(function, None)
        self.filters[_LOOP] = lambda iterable: _Loop(self.budget, iterable)
        self.filters[_CONCAT] = lambda parts: self._concat([self._text(part) for part in parts])
        self.filters[_READ] = lambda value: self.budget.read(value)
        self.filters[_WEIGH] = lambda value: self.budget.made(value)

    def _counted(self, function: Callable[..., Any], check: Callable[..., None] | None) -> Callable[..., Any]:
        """A filter that counts as a step, is checked before and whose result is counted."""
        passes = getattr(function, "jinja_pass_arg", None)
        first = 0 if passes is None else 1

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            if check is not None:
                check(*args[first:], **kwargs)
            return self.budget.made(function(*args, **kwargs))

        if passes is not None:
            counted.jinja_pass_arg = passes  # type: ignore[attr-defined]
        return counted

    def _check_indent(self, s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> None:
        size = len(width) if isinstance(width, str) else width
        _check_width(size, _MAX_WIDTH)
        text = str(s)
        self.budget.charge(len(text) + (len(text.splitlines()) + 1) * size)

    @pass_eval_context
    def _join(self, eval_ctx: Any, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        items = list(value)
        self._check_join(str(d), items)
        return sync_do_join(eval_ctx, items, d, attribute)

    def _int(self, value: Any, default: int = 0, base: int = 10) -> int:
        if isinstance(value, str) and len(value) > _MAX_WIDTH:
            return default
        return do_int(value, default, base)

    def _tojson(
        self,
        x: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # As in transformers: Jinja's own filter escapes for HTML, which would change what the model reads.
        size = len(indent) if isinstance(indent, str) else indent or 0
        _check_width(size, 64)
        self.budget.charge(self.budget.weigh(x) * (2 + size))
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _sum(environment: TemplateEnvironment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """Adds numbers only: adding up lists would copy them again and again."""
    getter = make_attrgetter(environment, attribute) if attribute is not None else None
    total = start
    for item in iterable:
        number = item if getter is None else getter(item)
        if not isinstance(number, (int, float)) or not isinstance(total, (int, float)):
            raise TypeError("sum adds numbers only")
        total += number
    return total


def _check_width(width: Any, limit: int) -> None:
    if isinstance(width, Undefined) or not isinstance(width, int):
        raise TypeError("a width must be a whole number")
    if width > limit:
        raise BudgetError(f"it asks for a width or count of {width:.4g}, the limit is {limit}")


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateRaisedError(str(message)[:1000])


def _strftime_now(format: str) -> str:
    if not isinstance(format, str) or len(format) > 256:
        raise TypeError("strftime_now takes a date format of up to 256 characters")
    return datetime.now().strftime(format)

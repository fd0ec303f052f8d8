"""The sandbox that chat templates run in.

Templates come from model hubs and are untrusted code. They run in Jinja's immutable sandbox, with the same setup as in
transformers (``trim_blocks``, ``lstrip_blocks``, loop controls, ``raise_exception``, ``strftime_now``, a ``tojson``
that does not escape HTML), so the same template gives the same text. Three differences are deliberate. A template gets
no randomness and no clock. It may call only functions on a list (``methods``, ``filters``, ``functions``). An allowance
limits the work and output of one rendering (``allowance``). All of these spend it, including the operators
(``operators``) of the compiled code (``compiler``).

Frequent lookups and calls of chat templates use shortcuts, but only if the value is exactly a dict, list or string and
the sandbox would give the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Cycler
from markupsafe import Markup

from megatron_sft_idx.chat.template.allowance import ITEM, QUOTED, Allowance, text_bytes
from megatron_sft_idx.chat.template.compiler import (
    DICT_ATTRIBUTES,
    LOOP_ATTRIBUTES,
    CountingGenerator,
    GenerationBlocks,
)
from megatron_sft_idx.chat.template.filters import filters_of, tests_of
from megatron_sft_idx.chat.template.functions import TemplateNamespace, globals_of, paid_dict
from megatron_sft_idx.chat.template.methods import METHODS, QUICK, SHORT, call_method
from megatron_sft_idx.chat.template.operators import Operators, numbers_in

MARK = "trace "
"""The names of filters that tracing puts into a syntax tree begin with this. No template may call them."""

_MISSING = object()
_PLAIN = frozenset({str, int, bool, float, list, dict, type(None)})
_VIEWS = frozenset({"items", "keys", "values"})
_FIELD_UNITS = 128  # units for a field of ``str.format``, which is looked up and formatted in Python


class TemplateEnvironment(Operators, ImmutableSandboxedEnvironment):
    """A sandbox with the names and filters that chat templates expect.

    Args:
        template_date: the day, ``YYYY-MM-DD``, for ``strftime_now``; None rejects templates that ask for it.

    Attributes:
        allowance: the remaining budget of the current rendering. One environment serves one rendering at a time.

    Raises:
        ValueError: ``template_date`` is not a date.
    """

    code_generator_class = CountingGenerator
    intercepted_binops = frozenset({"*", "**", "%", "/", "//"})

    def __init__(self, template_date: str | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols])
        self.allowance = Allowance()
        self.concat = self.allowance.joined  # type: ignore[method-assign]
        self.finalize: Callable[..., Any] = self.allowance.soft_text
        self.filters = filters_of(self, self.filters)
        self.tests: dict[str, Any] = tests_of(self, self.tests)
        self.globals.update(globals_of(self, template_date))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return ``obj.attribute`` like the sandbox."""
        kind = type(obj)
        if kind is dict and attribute not in DICT_ATTRIBUTES:
            value = obj.get(attribute, _MISSING)
            return value if value is not _MISSING else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext:
            if attribute in LOOP_ATTRIBUTES:
                return getattr(obj, attribute)
        elif kind is TemplateNamespace:
            value = obj.__dict__.get(attribute, _MISSING)
            if type(value) in _PLAIN:
                return value
        elif attribute in METHODS.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return ``obj[argument]`` like the sandbox."""
        if type(obj) is dict and type(argument) is str:
            value = obj.get(argument, _MISSING)
            if value is not _MISSING:
                return value
            if argument not in DICT_ATTRIBUTES:
                return self.undefined(obj=obj, name=argument)
        elif type(obj) is list and type(argument) is int and -len(obj) <= argument < len(obj):
            return obj[argument]
        return super().getitem(obj, self.key(argument))

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a filter named in a string, as in ``map("trim")``.

        Raises:
            TemplateRuntimeError: the filter does not exist, or is a mark of tracing, which templates must not call.
        """
        if isinstance(name, str) and name.startswith(MARK):
            raise TemplateRuntimeError(f"No filter named {name!r}.")
        return super().call_filter(name, *args, **kwargs)

    def call(
        __self,  # noqa: N805 - templates may pass any keyword
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call an object for a template: methods of plain values if they are on the list, all others like the sandbox.

        Methods that modify their object need no check here, because the sandbox's lookups never return them.
        """
        kind = type(__obj)
        __self.allowance.spend(4 * ITEM * (len(args) + len(kwargs)))
        plain = kind is BuiltinMethodType or (
            kind is MethodType and (isinstance(__obj.__self__, Markup) or __obj.__self__ is Markup)
        )
        if plain or kind is Macro or __obj is TemplateNamespace:
            kwargs.pop("_loop_vars", None)  # compiled loops and blocks pass their scopes, meant for the context
            kwargs.pop("_block_vars", None)
            if plain:
                return call_method(__self, __obj.__self__, __obj.__name__, args, kwargs)
            if kind is Macro:
                return __obj(__context.eval_ctx, *args, **kwargs)
            return TemplateNamespace(paid_dict(__self, args, kwargs))
        if args and kind is MethodType and type(__obj.__self__) in (LoopContext, Cycler):
            __self.allowance.weigh(args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_method(
        self,
        context: Context,
        value: Any,
        name: str,
        loop_vars: dict[str, Any] | None,
        block_vars: dict[str, Any] | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call ``value.name(...)`` for compiled code, which also passes the scopes of its loop and block."""
        kind = type(value)
        if kind is str and name in METHODS[str]:
            short = not args or (type(args[0]) is str and len(args[0]) < SHORT)
            if not (short and name in QUICK) or kwargs:
                return call_method(self, value, name, args, kwargs)
            allowance = self.allowance
            allowance.remaining -= 2 * (len(value) if value.isascii() else 4 * len(value))
            if allowance.remaining < 0:
                allowance.extend_or_refuse()
            return getattr(value, name)(*args)
        if kind is dict and not kwargs:
            if name == "get" and args and type(args[0]) is str:
                return value.get(*args)
            if name in _VIEWS and not args:
                return getattr(value, name)()
        if loop_vars is not None:
            kwargs["_loop_vars"] = loop_vars
        if block_vars is not None:
            kwargs["_block_vars"] = block_vars
        return self.call(context, self.getattr(value, name), *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a template's ``str.format`` or ``str.format_map``; None if ``value`` is neither.

        It formats like the sandbox, pays for each field, and rejects fields without a defined text.
        """
        if super().wrap_str_format(value) is None:
            return None
        text, by_map = value.__self__, value.__name__ == "format_map"
        formatter = _EscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _MeteredFormatter(self)

        def formatted(*args: Any, **kwargs: Any) -> str:
            if by_map and (kwargs or len(args) != 1):
                raise TypeError("format_map() takes exactly one argument, a mapping")
            self.allowance.spend(text_bytes(text))
            written = formatter.vformat(text, () if by_map else args, args[0] if by_map else kwargs)
            return type(text)(written)  # type: ignore[no-any-return]

        return formatted

    def __reduce__(self) -> Any:
        raise TypeError("a template environment cannot be pickled; pickle the ChatTemplate instead")


class _MeteredFormatter(SandboxedFormatter):
    """Formats fields like the sandbox, and pays for each."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Format one field."""
        allowance: Allowance = self._env.allowance  # type: ignore[attr-defined]
        allowance.weigh(value, QUOTED, written=True)
        allowance.spend(_FIELD_UNITS + 4 * numbers_in(format_spec))
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Apply ``!r``, ``!s`` and ``!a``."""
        if conversion:
            self._env.allowance.weigh(value, QUOTED, written=True)  # type: ignore[attr-defined]
        return super().convert_field(value, conversion)


class _EscapeFormatter(_MeteredFormatter, SandboxedEscapeFormatter):
    """Formats the fields of Markup, with escaping, and pays for each."""

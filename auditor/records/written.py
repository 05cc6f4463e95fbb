"""Annotations of record fields: meaning, allowed values, and the file that stores them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

T = TypeVar("T")

NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""{text in a JSON file: the number, which JSON cannot represent, that it stands for}."""

LARGEST = 2**64 - 1
"""The largest whole number in a file, large enough for any seed."""

EXPONENTS = (-1100, 1023)
"""Range of integer keys, which are exponents of floating-point numbers."""


@dataclass(frozen=True)
class FileField:
    """A field that is stored in a file: `Annotated[float, FileField("meaning")]`.

    meaning: description with unit, in Markdown. measured: whether measurements.json stores it; else plan.json, which
    people commit, and which has settings and decisions. choices: allowed texts. least, most: bounds of a number. exact:
    whether all digits are stored, as for settings; measured values have seven.
    """

    meaning: str
    measured: bool = False
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    exact: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        narrowed: CoreSchema = self._narrow(handler(source))
        return narrowed

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "description": self.meaning, "measured": self.measured}

    def _narrow(self, schema: Any) -> Any:
        """The pydantic schema, with this field's bounds, choices and number of digits."""
        match schema["type"]:
            case "nullable":
                return {**schema, "schema": self._narrow(schema["schema"])}
            case "tuple":
                return {**schema, "items_schema": [self._narrow(item) for item in schema["items_schema"]]}
            case "dict":
                keys = schema.get("keys_schema", core_schema.any_schema())  # pydantic 2.7 leaves out `Any`
                values = schema.get("values_schema", core_schema.any_schema())
                keys = core_schema.int_schema(ge=EXPONENTS[0], le=EXPONENTS[1]) if keys["type"] == "int" else keys
                return {**schema, "keys_schema": keys, "values_schema": self._narrow(values)}
            case "float":
                limited = core_schema.float_schema(ge=self.least, le=self.most, strict=True)
                encode = core_schema.plain_serializer_function_ser_schema(self._number)
                return core_schema.no_info_before_validator_function(revive, limited, serialization=encode)
            case "int":
                least = None if self.least is None else int(self.least)
                return core_schema.int_schema(ge=least, le=LARGEST, strict=True)
            case "str" if self.choices:
                return core_schema.literal_schema(list(self.choices))
            case "any":
                encode = core_schema.plain_serializer_function_ser_schema(plain)
                return core_schema.no_info_after_validator_function(revive, schema, serialization=encode)
        return schema

    def _number(self, value: float | None) -> Any:
        return value if self.exact and math.isfinite(value or 0) else plain(value)


@dataclass(frozen=True)
class MeasurementField(FileField):
    """A FileField that is stored in measurements.json."""

    measured: bool = True


def empty() -> Any:
    """A dataclass field that defaults to an empty dict."""
    return field(default_factory=dict)


class _Anything:
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.any_schema()


Unwritten = Annotated[T, Field(init=False, exclude=True), _Anything()]
"""A field that no file stores: `Unwritten[int]`. After loading, the field has its default."""


def plain(value: Any) -> Any:
    """Convert a rule's evidence to JSON data.

    Numbers have seven significant digits: further digits vary with the order of a reduction.
    """
    if isinstance(value, float):
        text = next((text for text, odd in NOT_FINITE.items() if value == odd), "NaN")
        return float(f"{value:.7g}") if math.isfinite(value) else text
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def revive(value: Any) -> Any:
    """The inverse of `plain`: turn text such as "Infinity" back into a number."""
    if isinstance(value, list):
        return [revive(item) for item in value]
    if isinstance(value, dict):
        return {key: revive(item) for key, item in value.items()}
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value

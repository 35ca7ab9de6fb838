"""The base of every options class: a frozen model whose fields declare their valid values.

A component owns its options, in a file that imports nothing heavy, so that a command line is read before torch is
loaded. `toolkit.run.config` composes them into the settings of a run.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from toolkit.errors import UserError

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1."""


class Options(BaseModel):
    """Options of a component. They are checked when they are made, and never change.

    Raises:
        UserError: where a value cannot be, alone or together with others, or a name is unknown.
    """

    model_config = ConfigDict(
        frozen=True, use_attribute_docstrings=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    switch: ClassVar[str] = ""
    """The field, of this group or of the options around it, without which a group has no effect."""

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _user_error(error) from None

    def check_together(self) -> None:
        """Raise UserError if valid fields do not fit together. Overrides call `super()`'s first."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self.check_together()
        return self

    def replace(self, **changes: Any) -> Self:
        """Return a copy with `changes`, which is checked as a new one is."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)


def _user_error(error: ValidationError) -> UserError:
    """The first thing that pydantic found, as one sentence."""
    found = error.errors(include_url=False)[0]
    if isinstance(raised := found.get("ctx", {}).get("error"), UserError):
        if raised.field is None or not found["loc"]:
            return raised
        group = [part for part in found["loc"] if isinstance(part, str) and part != raised.field]
        return UserError(field=".".join([*group, raised.field]), value=raised.value, remedy=raised.remedy)
    field = ".".join(part for part in found["loc"] if isinstance(part, str))
    said = "there is no such option" if found["type"] == "extra_forbidden" else found["msg"]
    return UserError(field=field, value=found["input"], remedy=said[0].lower() + said[1:])

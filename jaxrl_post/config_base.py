"""What every section of the schema is made of: the base class, and the numbers a key may hold."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=0)]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
MODULE_FUNCTION = r"^[\w.]+:\w+$"


def _importable(path: str) -> str:
    """As it is. Raises: ValueError unless it is `module:function`; of a file's path it says the module."""
    if re.fullmatch(MODULE_FUNCTION, path) and not path.partition(":")[0].endswith(".py"):
        return path
    place, _, name = path.rpartition(":") if ":" in path else (path, "", "")
    folder, module = PurePath(place).parent, PurePath(place).name.removesuffix(".py")
    if not re.fullmatch(r"\w+", module) or not place.endswith(".py"):
        raise ValueError(f"{path!r} is not allowed: give module:function, as in rewards:score for score of rewards.py")
    near = "the folder the run is started in" if folder == PurePath() else f"{folder}, which PYTHONPATH must then name"
    raise ValueError(f"{path!r} is a file: give {module}:{name or 'FUNCTION'}. The module is looked for in {near}")


FunctionPath = Annotated[str, AfterValidator(_importable), Field(json_schema_extra={"pattern": MODULE_FUNCTION})]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def default_kind(kind: str) -> BeforeValidator:
    """A section given without `kind` is of the default kind, as it is when not given at all."""

    def with_kind(value: Any) -> Any:
        return {"kind": kind, **value} if isinstance(value, dict) else value

    return BeforeValidator(with_kind)

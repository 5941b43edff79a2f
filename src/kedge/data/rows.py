"""Rows of a dataset with the keys that each row has.

Arrow gives a dict in a row the keys of that dict in all rows, with null for those that the row does
not have.  It cannot tell them from nulls of the user's, so the rule is: in dicts from Arrow, keys
with null are dropped; JSON columns, JSON text and lists of dicts are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def exact_columns(
    columns: Mapping[str, Sequence[Any]], features: Mapping[str, Any]
) -> dict[str, Any]:
    """Columns of a ``datasets.Dataset`` with these features, without the keys that Arrow adds."""
    return {
        name: [_exact(value, features.get(name)) for value in values]
        if _has_dicts(features.get(name))
        else values
        for name, values in columns.items()
    }


def exact_dataset(dataset: Any) -> Any:
    """A ``datasets.Dataset`` for other libraries, with JSON instead of Arrow's dicts."""
    try:
        from datasets import Json
    except ImportError:  # datasets before 4.7
        return dataset
    features = dataset.features
    if not any(map(_has_dicts, features.values())):
        return dataset
    return dataset.map(
        exact_columns,
        fn_kwargs={"features": features},
        batched=True,
        features=type(features)({name: _as_json(f, Json()) for name, f in features.items()}),
    )


def _has_dicts(feature: Any) -> bool:
    inner = _inner(feature)
    return isinstance(feature, Mapping) or (inner is not None and _has_dicts(inner))


def _inner(feature: Any) -> Any:
    """The feature of a list's items; None if the feature is not a list."""
    return feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)


def _as_json(feature: Any, json: Any) -> Any:
    """The feature with JSON instead of dicts."""
    if not _has_dicts(feature):
        return feature
    return json if isinstance(feature, Mapping) else [_as_json(_inner(feature), json)]


def _exact(value: Any, feature: Any) -> Any:
    if isinstance(value, Mapping) and isinstance(feature, Mapping):
        return {k: _exact(v, feature.get(k)) for k, v in value.items() if v is not None}
    inner = _inner(feature)
    if isinstance(value, list) and inner is not None:
        return [_exact(item, inner) for item in value]
    return value

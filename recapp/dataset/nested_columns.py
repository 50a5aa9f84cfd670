"""Columns inside of nested columns, by names with dots.

    user    struct<id, country>         user.id, user.country    a value a row
    items   list<struct<id, price>>     items.id, items.price    a list a row
    context map<text, text>             context.device           the value of that key

A null above a field is a null of the field, and a map without a key has a null there. The last
value of a key counts. Where a column has such a name itself, that column is meant.
"""

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from recapp.dataset.arrow_types import is_list, with_values, without_views


def leaves_of(name: str, kind: pa.DataType) -> Iterator[str]:
    """Yield the name of each leaf of a column, in the order in which Parquet has them; the keys and
    the values of a map are called like the map.
    """
    if is_list(kind):
        yield from leaves_of(name, kind.value_type)
    elif pt.is_struct(kind):
        for field in kind:
            yield from leaves_of(f"{name}.{field.name}", field.type)
    elif pt.is_map(kind):
        yield name
        yield from (name for _ in leaves_of(name, kind.item_type))
    else:
        yield name


def with_parts(types: pa.Schema, names: Iterable[str] = ()) -> pa.Schema:
    """Return the columns of some rows, behind them the fields of nested ones, and those of some
    names that are values of maps.
    """
    leaves = [leaf for field in types for leaf in leaves_of(field.name, field.type)]
    own = set(types.names)
    for name in dict.fromkeys([*leaves, *names]):
        if name not in own and (found := _found(types, name)):
            column, steps = found
            empty = pa.nulls(0, types.field(column).type)
            types = types.append(pa.field(name, _taken(empty, steps).type))
    return types


def own_column(types: pa.Schema, name: str) -> str:
    """Return the column that is read for a name: the nested one in which it is, or itself."""
    found = None if name in types.names else _found(types, name)
    return found[0] if found else name


def part_of(column: pa.Array, own_name: str, name: str) -> pa.Array:
    """Return the values of a name in a nested column, without views.

    Args:
        column: The nested column, or a plain one.
        own_name: Its name.
        name: The name of a part of it, or its own.
    """
    steps = () if name == own_name else _steps(column.type, name.removeprefix(f"{own_name}."))
    assert steps is not None, f"{name} is no part of {own_name}"
    return _taken(column, steps)


def _found(types: pa.Schema, name: str) -> tuple[str, Sequence[str]] | None:
    """Return the nested column in which a name is, and the steps to it; None if there is none."""
    above = (field for field in types if name.startswith(f"{field.name}."))
    for field in above:
        steps = _steps(field.type, name.removeprefix(f"{field.name}."))
        if steps and types.names.count(field.name) == 1:
            return field.name, steps
    return None


def _steps(kind: pa.DataType, name: str) -> Sequence[str] | None:
    """Return the fields and keys that lead to a name inside of a type; None if nothing does."""
    if is_list(kind):
        return _steps(kind.value_type, name)
    if pt.is_map(kind):
        # a key may have dots, where nothing follows it
        nested = pt.is_nested(kind.item_type) and not is_list(kind.item_type)
        key, _, rest = name.partition(".") if nested else (name, "", "")
        return _behind(key, kind.item_type, rest) if _key(kind, key) else None
    for field in kind if pt.is_struct(kind) else ():
        if f"{name}.".startswith(f"{field.name}.") and kind.get_field_index(field.name) >= 0:
            rest = name[len(field.name) + 1 :]
            if steps := _behind(field.name, field.type, rest):
                return steps
    return None


def _behind(step: str, kind: pa.DataType, rest: str) -> Sequence[str] | None:
    steps = _steps(kind, rest) if rest else ()
    return None if steps is None else (step, *steps)


def _key(kind: pa.DataType, key: str) -> pa.Scalar | None:
    """Return a key in the type of the keys of a map; None if it cannot be one."""
    try:
        return pa.scalar(key).cast(kind.key_type)
    except pa.ArrowException:
        return None


def _taken(column: pa.Array, steps: Sequence[str]) -> pa.Array:
    if not steps:
        return without_views(column)
    if is_list(column.type):
        return with_values(column, lambda values: _taken(values, steps))
    if pt.is_map(column.type):
        # Arrow looks nothing up in views, and a part of a map's rows takes no mask
        pairs = map(without_views, (column.keys, column.items))
        plain = pa.MapArray.from_arrays(column.offsets, *pairs)
        inner = pc.map_lookup(plain, _key(plain.type, steps[0]), "last")
        inner = pc.if_else(column.is_valid(), inner, None) if column.null_count else inner
    else:
        inner = pc.struct_field(column, [column.type.get_field_index(steps[0])])
    return _taken(inner, steps[1:])

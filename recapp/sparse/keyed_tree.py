"""A KeyedJaggedTensor as a tree of torch's `pytree`: `torch.export` and data loaders take it apart
and put it together.

    leaves    values, weights, lengths; and the inverse indices, if there are some
    context   keys, stride; and the bags per key and rank, where keys have different numbers, and
              the keys of the inverse indices

If all keys have the same number of bags and there are no inverse indices, the lengths give the
stride, and the context has None for it. So an exported program takes batches of other sizes.
"""

from typing import Any

from torch import Tensor
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, KeyEntry, TreeSpec, register_pytree_node

Context = tuple[Any, ...]

_LEAVES = [GetAttrKey(name) for name in ("_values", "_weights", "_lengths", "_inverse_indices")]


def register_tree(kind: Any) -> None:
    """Register a KeyedJaggedTensor with torch's `pytree`.

    Args:
        kind: The class.
    """

    def unflatten(leaves: Any, context: Context) -> Any:
        values, weights, lengths, *index = leaves
        keys, stride, strides, inverse = (*context, None, None)[:4]
        stride = _stride(len(keys), lengths) if stride is None else stride
        return kind.unchecked(
            list(keys),
            values,
            weights,
            lengths,
            stride,
            strides=None if strides is None else [list(of_ranks) for of_ranks in strides],
            inverse_indices=None if inverse is None else (list(inverse), index[0]),
        )

    register_pytree_node(
        kind,
        _flatten,
        unflatten,
        serialized_type_name="recapp.sparse.keyed_jagged_tensor.KeyedJaggedTensor",
        to_dumpable_context=list,
        from_dumpable_context=_as_tuple,
        flatten_with_keys_fn=_flatten_with_keys,
    )
    register_pytree_flatten_spec(kind, _flatten_as)


def _flatten(kjt: Any) -> tuple[list[Any], Context]:
    leaves = [kjt.values(), kjt.weights_or_none(), kjt.lengths()]
    keys = tuple(kjt.keys())
    inverse = kjt.inverse_indices_or_none()
    if inverse is None and not kjt.variable_stride_per_key():
        return leaves, (keys, None if keys else kjt.stride())
    context = (keys, kjt.stride())
    strides = None
    if kjt.variable_stride_per_key():
        strides = tuple(map(tuple, kjt.stride_per_key_per_rank()))
    if inverse is None:
        return leaves, (*context, strides)
    return [*leaves, inverse[1]], (*context, strides, tuple(inverse[0]))


def _stride(keys: int, lengths: Any) -> int:
    """Return the number of bags of each key. While torch maps a tree, leaves may have any type."""
    return lengths.shape[0] // keys if isinstance(lengths, Tensor) and lengths.dim() else 0


def _flatten_with_keys(kjt: Any) -> tuple[list[tuple[KeyEntry, Any]], Context]:
    leaves, context = _flatten(kjt)
    return list(zip(_LEAVES, leaves, strict=False)), context


def _as_tuple(stored: Any) -> Any:
    """Return the lists of JSON as tuples again."""
    return tuple(map(_as_tuple, stored)) if isinstance(stored, list) else stored


def _flatten_as(kjt: Any, spec: TreeSpec) -> list[Any]:
    """Return the leaves of a tensor with its keys in the order of the tensor with which a graph was
    traced.
    """
    keys = list(spec.context[0])
    if keys != kjt.keys():
        kjt = kjt.permute([kjt.index_of(key) for key in keys])
    return _flatten(kjt)[0]

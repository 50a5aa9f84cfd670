"""TorchRec's managed collisions (ZCH): they map any ids to the slots of a fixed number of rows.

    ids 17 -3 17 4e9   --profile-->  counts and last uses of an interval, by id
                       --policy-->   the ids with the highest scores have the slots 0..zch_size-2
                       --remap-->    0 1 0 7999          zch_size-1 for all ids without a slot

A policy scores ids by their number of occurrences and by the step of their last use. Slot ids
replace the ids before the lookup, in unsharded and in sharded tables (`wrapped_collections.py`).

Arguments that recapp does not need (`input_hash_size`, `buckets`) are accepted. An argument that
should change the result and cannot raises an error.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from recapp.errors import ConfigError, suggest
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor, as_int64
from recapp.tables.collections import ModuleByName
from recapp.tables.config import EmbeddingConfig, IdRule
from recapp.transport.communicator import Comm

Threshold = Callable[[Tensor], tuple[Tensor, float | Tensor]]
"""Takes the count of each id of an interval; returns the ids that may have rows, as a mask or as
indices, and the threshold.
"""
COUNTS = "counts"
LAST_USED = "last_access_iter"


class MCHEvictionPolicy(ABC):
    """Chooses the ids that keep the rows of a full table.

    Args:
        threshold_filtering_func: Chooses the ids of an interval that count, by their occurrences
            in the interval (`Threshold`); None takes all.

    Raises:
        ConfigError: `threshold_filtering_func` is no function.
    """

    keeps: ClassVar[tuple[str, ...]]
    """The values that a table keeps for each row: its count, the step of its last use, or both."""

    def __init__(self, threshold_filtering_func: Threshold | None = None) -> None:
        if threshold_filtering_func is not None and not callable(threshold_filtering_func):
            raise ConfigError(
                f"threshold_filtering_func is a {type(threshold_filtering_func).__name__}: give a "
                "function of counts such as average_threshold_filter, or None"
            )
        self.threshold_filtering_func = threshold_filtering_func

    @abstractmethod
    def scores(self, counts_N: Tensor, last_used_N: Tensor, now: int) -> Tensor:
        """Return a score for each id; the ids of the lowest scores lose their rows.

        Args:
            counts_N: The number of occurrences of each id.
            last_used_N: The step in which each id occurred last.
            now: The number of this step.
        """


class LFU_EvictionPolicy(MCHEvictionPolicy):
    """Evicts the ids that occurred least often. The argument is that of `MCHEvictionPolicy`."""

    keeps = (COUNTS,)

    @override
    def scores(self, counts_N: Tensor, last_used_N: Tensor, now: int) -> Tensor:
        return counts_N


class LRU_EvictionPolicy(MCHEvictionPolicy):
    """Evicts the ids that were not used for the longest time.

    Args:
        decay_exponent: A number above 0; it does not change the order of the ids.
        threshold_filtering_func: The filter of ids by their counts (`MCHEvictionPolicy`).

    Raises:
        ConfigError: `decay_exponent` is out of range, or `threshold_filtering_func` is no function.
    """

    keeps = (LAST_USED,)

    def __init__(
        self, decay_exponent: float = 1.0, threshold_filtering_func: Threshold | None = None
    ) -> None:
        super().__init__(threshold_filtering_func)
        if not isinstance(decay_exponent, int | float) or not decay_exponent > 0:
            raise ConfigError(
                f"decay_exponent={decay_exponent}: must be above 0 for LRU_EvictionPolicy, "
                "because at 0 the time since the last use has no effect"
            )

    @override
    def scores(self, counts_N: Tensor, last_used_N: Tensor, now: int) -> Tensor:
        return last_used_N


class DistanceLFU_EvictionPolicy(MCHEvictionPolicy):
    """Evicts the ids of the lowest score: the count divided by a power of the steps since the last
    use.

    Args:
        decay_exponent: The power, at least 0.
        threshold_filtering_func: The filter of ids by their counts (`MCHEvictionPolicy`).

    Raises:
        ConfigError: `decay_exponent` is out of range, or `threshold_filtering_func` is no function.
    """

    keeps = (COUNTS, LAST_USED)

    def __init__(
        self, decay_exponent: float = 1.0, threshold_filtering_func: Threshold | None = None
    ) -> None:
        super().__init__(threshold_filtering_func)
        if not isinstance(decay_exponent, int | float) or not decay_exponent >= 0:
            raise ConfigError(
                f"decay_exponent={decay_exponent}: must be at least 0 for "
                "DistanceLFU_EvictionPolicy"
            )
        self._decay_exponent = decay_exponent

    @override
    def scores(self, counts_N: Tensor, last_used_N: Tensor, now: int) -> Tensor:
        return counts_N / (now - last_used_N + 1).double().pow(self._decay_exponent)


@torch.no_grad()
def dynamic_threshold_filter(
    id_counts: Tensor, threshold_skew_multiplier: float = 10.0
) -> tuple[Tensor, Tensor]:
    """Keep the ids whose count is above a multiple of the mean count.

    Args:
        id_counts: The count of each id.
        threshold_skew_multiplier: The multiple.
    """
    threshold = id_counts.sum() * (threshold_skew_multiplier / max(1, id_counts.numel()))
    return id_counts > threshold, threshold


@torch.no_grad()
def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the ids whose count is above the mean count.

    Args:
        id_counts: The count of each id.
    """
    threshold = id_counts.float().mean()
    return id_counts > threshold, threshold


@torch.no_grad()
def probabilistic_threshold_filter(
    id_counts: Tensor, per_id_probability: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Keep an id if at least one of its occurrences is drawn, by torch's generator.

    Args:
        id_counts: The count of each id.
        per_id_probability: The probability with which each occurrence is drawn.
    """
    missed_N = torch.full_like(id_counts, 1 - per_id_probability, dtype=torch.float).pow(id_counts)
    threshold_N = torch.rand(id_counts.shape, device=id_counts.device)
    return 1 - missed_N > threshold_N, threshold_N


LARGEST_INPUT = 2**63 - 1
NO_ID = 2**63 - 1  # marks a slot without an id; this value itself never gets a slot


class ManagedCollisionModule(nn.Module):
    """A class for type annotations; its only subclass is `MCHManagedCollisionModule`."""


class MCHManagedCollisionModule(ManagedCollisionModule):
    """Gives slots to the ids of a table by an eviction policy. In training mode the ids that occur
    compete for slots.

    Its buffers have TorchRec's names, so that a state dict of TorchRec loads. A module that has
    counted no step yet has no buffers in its state dict. A state dict does not keep the ids since
    the last interval.

    Args:
        zch_size: The number of rows, equal to the table's `num_embeddings`; all ids without a slot
            share the last row.
        device: The device of the slots of an unsharded table; None takes the CPU. On the meta
            device there are no slots, and the table must be sharded.
        eviction_policy: The policy that chooses the ids with slots.
        eviction_interval: The number of training steps between two runs of the policy.
        input_hash_size: Ignored, because any int64 is an id.
        input_hash_func: Must be None, because recapp does not hash ids.
        mch_size: Must be None; TorchRec ignores it.
        mch_hash_func: Must be None; TorchRec ignores it.
        name: The name of the module.
        output_global_offset: Must be 0, the first slot.
        output_segments: Must be None, because a plan cuts the table.
        buckets: Ignored, because a checkpoint loads under any plan.

    Raises:
        ConfigError: A number is out of range, `eviction_policy` is no policy, or an argument has a
            value that recapp does not support.
    """

    def __init__(
        self,
        zch_size: int,
        device: torch.device | str | None,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = LARGEST_INPUT,
        input_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        mch_size: int | None = None,
        mch_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
    ) -> None:
        super().__init__()
        for setting, number in (
            ("zch_size", zch_size),
            ("eviction_interval", eviction_interval),
            ("buckets", buckets),
        ):
            if type(number) is not int or number < 1:
                raise ConfigError(f"{setting}={number}: must be a whole number of at least 1")
        if not isinstance(eviction_policy, MCHEvictionPolicy):
            raise ConfigError(
                f"eviction_policy is a {type(eviction_policy).__name__}: give LRU_EvictionPolicy(),"
                " LFU_EvictionPolicy() or DistanceLFU_EvictionPolicy() of recapp.modules.mc_modules"
            )
        refused = {
            "input_hash_func": (input_hash_func, "ids of any size are told apart as they are"),
            "mch_size": (mch_size, "there is no second range of rows, and TorchRec ignores it"),
            "mch_hash_func": (mch_hash_func, "there is no second range, and TorchRec ignores it"),
            "output_global_offset": (output_global_offset or None, "slots begin at 0"),
            "output_segments": (output_segments, "a plan cuts the table"),
        }
        for setting, (value, why) in refused.items():
            if value is not None:
                raise ConfigError(f"{setting} would have no effect here: {why}; leave it out")
        self.policy = eviction_policy
        self.name = name
        self._zch_size = zch_size
        self._interval = eviction_interval
        self._input_hash_size = input_hash_size
        self._buckets = buckets
        self._seen: list[Tensor] = []  # ids of each step since the last decision
        self._evicted: Tensor | None = None
        where = torch.device("cpu" if device is None else device)
        if where.type != "meta":
            self.begin(where)

    def begin(self, device: torch.device) -> None:
        """Create the buffers on a device, without an id in any slot."""
        none_Z = torch.zeros(self._zch_size, dtype=torch.int64, device=device)
        self.register_buffer("_mch_sorted_raw_ids", none_Z + NO_ID)
        self.register_buffer("_mch_remapped_ids_mapping", torch.arange(self._zch_size).to(none_Z))
        for name in self.policy.keeps:
            self.register_buffer(f"_mch_{name}", none_Z.clone())
        self.register_buffer("_current_iter_tensor", none_Z[:1].clone())
        ends = torch.full((1025,), -1, dtype=torch.int64, device=device)
        ends[:2] = torch.tensor([0, self._zch_size])
        self.register_buffer("_output_segments_tensor", ends)

    def _buffer(self, name: str) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None:
            raise ConfigError(
                f"{type(self).__name__}: the module is on the meta device, so it cannot give ids "
                'their slots: build it with device="cpu", or shard its table and call that'
            )
        return buffer

    def output_size(self) -> int:
        """Return the number of rows."""
        return self._zch_size

    def input_size(self) -> int:
        """Return the argument `input_hash_size`; larger ids are allowed, too."""
        return self._input_hash_size

    def buckets(self) -> int:
        """Return the argument `buckets`."""
        return self._buckets

    def open_slots(self) -> Tensor:
        """Return the count of slots without an id, [1]."""
        return (self._buffer("_mch_sorted_raw_ids")[:-1] == NO_ID).sum().view(1)

    def evict(self) -> Tensor | None:
        """Return the slots that went to other ids since the last call; None for none."""
        gone = self._evicted
        self._evicted = None
        return gone

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Count ids in training mode, and replace them by slot ids (`profile`, `remap`)."""
        return self.remap(self.profile(features))

    @torch.no_grad()
    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Count the ids of a step in training mode; every `eviction_interval` steps run the policy
        that chooses the ids with slots.

        Args:
            features: The ids; all features count alike.

        Returns:
            The argument, unchanged.

        Raises:
            ConfigError: The module is on the meta device.
        """
        step = self._buffer("_current_iter_tensor")
        if not self.training:
            return features
        step += 1
        self._seen.append(torch.cat([as_int64(f.values().flatten()) for f in features.values()]))
        if len(self._seen) >= self._interval:
            self._decide(int(step))
            self._seen = []
        return features

    def _decide(self, now: int) -> None:
        """Give slots to the ids with the highest scores. The candidates are the ids of the interval
        and the ids that have slots.
        """
        first = now - len(self._seen) + 1
        at_L = torch.cat([torch.full_like(ids, first + i) for i, ids in enumerate(self._seen)])
        ids_U, inverse_L, counts_U = torch.unique(
            torch.cat(self._seen), return_inverse=True, return_counts=True
        )
        used_U = torch.zeros_like(ids_U).scatter_reduce_(0, inverse_L, at_L, "amax")
        some_U = ids_U != NO_ID
        if self.policy.threshold_filtering_func is not None:
            passed, _ = self.policy.threshold_filtering_func(counts_U)
            may_U = torch.zeros_like(some_U)
            may_U[passed] = True
            some_U &= may_U
        # sort by frequency, because among equal scores the first ids win
        order_N = counts_U[some_U].argsort(descending=True, stable=True)
        chosen_N = some_U.nonzero()[:, 0][order_N]
        self._replace(ids_U[chosen_N], counts_U[chosen_N], used_U[chosen_N], now)

    def _replace(self, ids_N: Tensor, counts_N: Tensor, used_N: Tensor, now: int) -> None:
        known_ids_Z = self._buffer("_mch_sorted_raw_ids")
        at_N, known_N = self._find(ids_N)
        buffers = {name: self._buffer(f"_mch_{name}") for name in self.policy.keeps}
        more = {COUNTS: counts_N, LAST_USED: used_N}
        if COUNTS in buffers:
            buffers[COUNTS][at_N[known_N]] += counts_N[known_N]
        if LAST_USED in buffers:
            buffers[LAST_USED][at_N[known_N]] = used_N[known_N]
        new = {name: more[name][~known_N] for name in more}
        room = self._zch_size - 1
        none = torch.zeros(room, dtype=torch.int64, device=known_ids_Z.device)
        scores = torch.cat(
            [
                self.policy.scores(
                    buffers[COUNTS][:room] if COUNTS in buffers else none,
                    buffers[LAST_USED][:room] if LAST_USED in buffers else none,
                    now,
                ),
                self.policy.scores(new[COUNTS], new[LAST_USED], now),
            ]
        )
        order = scores.argsort(descending=True, stable=True)
        come = order[:room][order[:room] >= room] - room
        gone = order[room:][order[room:] < room]
        known_ids_Z[gone] = ids_N[~known_N][come]
        for name, data in buffers.items():
            data[gone] = new[name][come]
            data[room:] = NO_ID if name == COUNTS else now
        slots_Z = self._buffer("_mch_remapped_ids_mapping")
        evicted = slots_Z[gone]
        before = evicted[:0] if self._evicted is None else self._evicted
        self._evicted = torch.unique(torch.cat([before, evicted]))
        sorted_Z = known_ids_Z.argsort(stable=True)
        for data in (known_ids_Z, slots_Z, *buffers.values()):
            data.copy_(data[sorted_Z])

    def _find(self, ids_L: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position of each id among those with slots, and whether it has one."""
        known_ids_Z = self._buffer("_mch_sorted_raw_ids")
        at_L = torch.searchsorted(known_ids_Z[:-1], ids_L)
        return at_L, (known_ids_Z[at_L] == ids_L) & (ids_L != NO_ID)

    @torch.no_grad()
    def remap(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Replace ids by their slot ids; an id without a slot gets the last one.

        Raises:
            ConfigError: The module is on the meta device.
        """
        slots_Z = self._buffer("_mch_remapped_ids_mapping")
        outputs = {}
        for name, feature in features.items():
            at_L, known_L = self._find(as_int64(feature.values()))
            slot_L = torch.where(known_L, slots_Z[at_L], self._zch_size - 1)
            outputs[name] = JaggedTensor.unchecked(
                slot_L, feature.weights_or_none(), feature.lengths(), feature.offsets_or_none()
            )
        return outputs

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._buffers and int(self._buffer("_current_iter_tensor")) > 0:
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Load slots; a state dict without slots clears those of the module."""
        if not self._buffers and f"{prefix}_mch_sorted_raw_ids" in state_dict:
            self.begin(torch.device("cpu"))  # a stored model loads before it is sharded
        if any(prefix + name in state_dict for name in self._buffers):
            super()._load_from_state_dict(state_dict, prefix, *others)
        elif self._buffers:
            self.begin(self._buffer("_current_iter_tensor").device)
        self._seen = []

    @override
    def extra_repr(self) -> str:
        return f"{self._zch_size:,} rows, {type(self.policy).__name__}"


class ManagedCollisionCollection(nn.Module):
    """The managed collisions of the tables of a collection.

    Args:
        managed_collision_modules: A module for each table, by the table's name.
        embedding_configs: The tables; `num_embeddings` equals the `zch_size` of the module.
        need_preprocess: Ignored, because recapp preprocesses nothing.

    Raises:
        ConfigError: A table or a module lacks its partner, their sizes differ, or a table is
            dynamic or has an id rule or a `min_key`.
    """

    def __init__(
        self,
        managed_collision_modules: Mapping[str, MCHManagedCollisionModule],
        embedding_configs: Sequence[EmbeddingConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        names = [t.name for t in embedding_configs]
        for name, module in managed_collision_modules.items():
            if name not in names:
                raise ConfigError(
                    f"managed_collision_modules has {name}, which is no table of embedding_configs:"
                    f" {suggest(name, names)}"
                )
            if not isinstance(module, MCHManagedCollisionModule):
                raise ConfigError(
                    f"managed_collision_modules[{name}] is a {type(module).__name__}: give an "
                    "MCHManagedCollisionModule of recapp.modules.mc_modules"
                )
        for t in embedding_configs:
            _check_fits(t, managed_collision_modules.get(t.name))
        self._managed_collision_modules = ModuleByName(dict(managed_collision_modules))
        self._embedding_configs = list(embedding_configs)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables of the constructor, in order."""
        return list(self._embedding_configs)

    def _module(self, table: str) -> MCHManagedCollisionModule:
        module = self._managed_collision_modules[table]
        assert isinstance(module, MCHManagedCollisionModule)
        return module

    def on_ranks(self, comm: Comm) -> "ManagedCollisionCollection":
        """Return a copy on the device of the ranks that starts from the slots of rank 0. Every rank
        calls this.

        Args:
            comm: The communicator of the ranks; its device holds the slots.
        """
        twin = copy.deepcopy(self)
        for t in self._embedding_configs:
            module = twin._module(t.name)
            if not any(True for _ in module.buffers()):
                module.begin(comm.device)
        twin.to(comm.device)
        twin.load_state_dict(comm.broadcast(twin.state_dict()))
        return twin

    def open_slots(self) -> dict[str, Tensor]:
        """Return the count of slots without an id, by table."""
        return {t.name: self._module(t.name).open_slots() for t in self._embedding_configs}

    def evict(self) -> dict[str, Tensor | None]:
        """Return the slots that went to other ids since the last call, by table."""
        return {t.name: self._module(t.name).evict() for t in self._embedding_configs}

    def forward(
        self, features: KeyedJaggedTensor, frozen: Collection[str] = (), comm: Comm | None = None
    ) -> KeyedJaggedTensor:
        """Replace the ids of the tables' features by slot ids, and count them in training mode.

        Args:
            features: Ids of at least the tables' features.
            frozen: The tables whose slots stay with their ids.
            comm: The ranks whose ids count, which all call this; None counts the own ids alone.

        Returns:
            The bags of these features with slot ids as values, in the order of the tables.

        Raises:
            ConfigError: Two tables have one feature, a module has no buffers, or torch.export runs.
        """
        if torch.compiler.is_exporting():
            raise ConfigError(
                "torch.export: the row of an id may change in training, and an exported program "
                "is fixed: export the model without its managed collisions, with collections "
                "that take rows"
            )
        table_of: dict[str, str] = {}
        for t in self._embedding_configs:
            for key in t.feature_names:
                if key in table_of:
                    raise ConfigError(
                        f"feature {key} is read by the tables {table_of[key]} and {t.name}, "
                        "which give its ids different rows: give each table a feature of its own"
                    )
                table_of[key] = t.name
        bags = features.permute([features.index_of(key) for key in table_of])
        per_key = dict(zip(table_of, bags.length_per_key(), strict=True))
        counts = [sum(per_key[key] for key in t.feature_names) for t in self._embedding_configs]
        ids_T = [*torch.split(as_int64(bags.values()), counts)]
        slots = []
        for t, ids, of_all in zip(
            self._embedding_configs, ids_T, self._of_all(ids_T, comm), strict=True
        ):
            module = self._module(t.name)
            if t.name not in frozen:
                module.profile({t.name: _one_bag(of_all)})
            slots.append(module.remap({t.name: _one_bag(ids)})[t.name].values())
        return KeyedJaggedTensor.unchecked(
            bags.keys(),
            torch.cat(slots),
            bags.weights_or_none(),
            bags.lengths(),
            bags.stride(),
            bags.length_per_key(),
            strides=bags.stride_per_key_per_rank() if bags.variable_stride_per_key() else None,
            inverse_indices=features.inverse_indices_or_none(),
        )

    def _of_all(self, ids_T: Sequence[Tensor], comm: Comm | None) -> Sequence[Tensor]:
        if comm is None or comm.world == 1 or not self.training:
            return ids_T
        ids_of_ranks = comm.all_gather([ids.cpu() for ids in ids_T])
        return [torch.cat(of_ranks).to(comm.device) for of_ranks in zip(*ids_of_ranks, strict=True)]


def _one_bag(ids: Tensor) -> JaggedTensor:
    return JaggedTensor.unchecked(ids, None, torch.full((1,), len(ids), device=ids.device))


def _check_fits(table: EmbeddingConfig, module: MCHManagedCollisionModule | None) -> None:
    if module is None:
        raise ConfigError(
            f"table {table.name} is not in managed_collision_modules: give it an "
            f"MCHManagedCollisionModule of zch_size={table.num_embeddings}, or put it into a "
            "collection of its own"
        )
    if table.dynamic is not None:
        raise ConfigError(
            f"table {table.name} is dynamic and evicts rows by its own settings: set "
            f"num_embeddings={module.output_size()}, or use the table without managed collisions"
        )
    if table.id_rule is not IdRule.ERROR or table.min_key:
        setting = f"min_key={table.min_key}" if table.min_key else f"id_rule={table.id_rule}"
        raise ConfigError(
            f"table {table.name}: {setting}: managed collisions take any id as it is: leave it out"
        )
    if module.output_size() != table.num_embeddings:
        raise ConfigError(
            f"table {table.name}: its module has zch_size={module.output_size()}, the table "
            f"num_embeddings={table.num_embeddings}: give both the same number"
        )

"""A finished group as bytes, for the state of a run; and whether what was asked then is what is asked now."""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from kept_tokens import KeptTokens
from kept_tokens.messages import decode, encode

from .arrival import Completion
from .environments import MultiTurn
from .rollouts import Group
from .sources import Prompt


class _StoredCompletion(msgspec.Struct, array_like=True):
    """Arrays as little-endian bytes, as in `Completion`."""

    token_ids: bytes
    logprobs: bytes
    kept: tuple[bytes, bytes] | None
    finish_reason: str
    stop_token_id: int | None
    weight_versions: list[tuple[int, int, int]]
    sampled: bytes | None
    reference: bytes | None


class _StoredGroup(msgspec.Struct, array_like=True):
    completions: list[_StoredCompletion]
    rewards: list[float]


def pack_group(group: Group) -> bytes:
    """Rollouts and rewards; the prompt is a function of the settings."""
    return encode(_StoredGroup([_pack(one) for one in group.completions], group.rewards))


def unpack_group(prompt: Prompt, data: bytes) -> Group:
    """What `pack_group` packed.

    Raises:
        KeptTokensError: these are not the bytes of a group.
    """
    stored = decode(data, _StoredGroup)
    return Group(prompt, [_unpack(one) for one in stored.completions], stored.rewards)


def fingerprint(prompt: Prompt, room: int) -> bytes:
    """16 bytes of everything that decides on the rollouts and rewards of a group, the weights apart.

    Args:
        prompt: What was asked.
        room: The most tokens of one sequence. It decides where the policy's rollouts end that have no
            max_tokens, and after which turn those of several turns do.
    """
    source = prompt.source
    bounded = "max_tokens" in source.sampling and not isinstance(source.environment, MultiTurn)
    asked = {
        "group": prompt.group,
        "token_ids": prompt.token_ids,
        "sampling": sorted(source.sampling.items()),
        "truncates": source.truncates,
        "seed": prompt.seed if source.sends_seed else None,
        "size": source.group_size,
        "environment": repr(source.environment),
        "example": repr(prompt.example),
        "room": None if bounded or source.frozen is not None else room,
        "frozen": source.frozen and [source.frozen.name, source.frozen.model],
        "reference": source.reference and [source.reference.name, source.reference.model],
        "scored": source.algorithm.reference_weight > 0,
        "hint": source.algorithm.hint,
    }
    return hashlib.blake2b(msgspec.json.encode(asked), digest_size=16).digest()


def span_of_versions(group: Group) -> tuple[int, int] | None:
    """The oldest and the newest weights that sampled a token of the group; None: a frozen generator did."""
    versions = [version for one in group.completions for version, _, _ in one.weight_versions]
    return (min(versions), max(versions)) if versions else None


def _pack(one: Completion) -> _StoredCompletion:
    return _StoredCompletion(
        token_ids=_bytes(one.token_ids, "<i4"),
        logprobs=_bytes(one.logprobs, "<f4"),
        kept=None if one.kept is None else one.kept.to_bytes(),
        finish_reason=one.finish_reason,
        stop_token_id=one.stop_token_id,
        weight_versions=list(one.weight_versions),
        sampled=None if one.sampled is None else _bytes(one.sampled, "u1"),
        reference=None if one.reference is None else _bytes(one.reference, "<f4"),
    )


def _unpack(one: _StoredCompletion) -> Completion:
    return Completion(
        token_ids=np.frombuffer(one.token_ids, "<i4"),
        logprobs=np.frombuffer(one.logprobs, "<f4"),
        kept=None if one.kept is None else KeptTokens.from_bytes(*one.kept),
        finish_reason=one.finish_reason,
        stop_token_id=one.stop_token_id,
        weight_versions=one.weight_versions,
        sampled=None if one.sampled is None else np.frombuffer(one.sampled, "u1").astype(bool),
        reference=None if one.reference is None else np.frombuffer(one.reference, "<f4"),
    )


def _bytes(values: Sequence[float] | np.ndarray, kind: str) -> bytes:
    return np.asarray(values).astype(kind).tobytes()

"""`enter` against a plain walk over the tokens, in one call and in two."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax.models.context import Clock, Context, enter

LENGTH = 8


@jax.jit
def enter_ids(positions, ids, clock):
    return enter(Context(positions, ids), clock, *ids.shape)


def walk(ids, positions, time=0, start=0, position=0, segment=0):
    """(documents, times, fresh, clock) of one row, token by token."""
    documents, times, document, fresh, seen = [], [], 1, False, False
    for token_id, token_position in zip(ids, positions, strict=True):
        times.append(time)
        if token_id == 0:
            documents.append(0)
            continue
        if segment not in (0, token_id):
            document, start = document + 1, time
            fresh |= not seen
        documents.append(document)
        seen, segment, time, position = True, token_id, time + 1, token_position + 1
    return documents, times, fresh, (time, start, position, segment)


rows = st.lists(st.integers(0, 3), min_size=LENGTH, max_size=LENGTH)


@settings(max_examples=150, deadline=None)
@given(rows, rows)
def test_two_calls_follow_the_walk(first, second):
    clock, expected_clock = Clock.zeros(1), (0, 0, 0, 0)
    for ids in (first, second):
        positions = np.arange(LENGTH, dtype=np.int32) * 3
        documents, times, fresh, expected_clock = walk(ids, positions, *expected_clock)
        inside, clock = enter_ids(positions[None], np.array([ids], np.int32), clock)
        assert inside.segment_ids[0].tolist() == documents
        valid = np.array(ids) > 0
        assert inside.time[0][valid].tolist() == np.array(times)[valid].tolist()
        assert bool(inside.fresh[0]) == fresh
        assert tuple(int(a[0]) for a in (clock.time, clock.start, clock.position, clock.segment)) == expected_clock


def test_no_context_continues_the_last_document():
    _, clock = enter_ids(np.array([[0, 1, 0]], np.int32), np.array([[4, 4, 0]], np.int32), Clock.zeros(1))
    inside, clock = enter(None, clock, 1, 2)
    assert inside.positions.tolist() == [[2, 3]]
    assert inside.segment_ids.tolist() == [[1, 1]]
    assert inside.time.tolist() == [[2, 3]]
    assert int(clock.segment[0]) == 4

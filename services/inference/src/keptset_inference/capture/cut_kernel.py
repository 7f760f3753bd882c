"""The cut of `cut.py` as three Triton kernels: read every row once, choose, write every row once.

A row is read in chunks of CHUNK ids. The k-th largest of the chunks' largest values is a lower bound of the
k-th largest value, and no more than k chunks (and those tied) reach it: only those are read again, and what
they hold above the bound is a few more than k candidates. One program a row chooses among these.

Values are compared as integers of the same order, so that a k-th value is found bit by bit, exactly, in 32
counts. Sums run over trees of fixed shape and places come from prefix sums: same input, same output.
"""

import triton
import triton.language as tl

CHUNK = 64
"""Ids, at most: see `cut.chunk_of`."""
READ = 8192
"""Values that a program reads or writes at once."""
WORK = 2048
"""Values that it works on at once."""
CANDIDATES = 2048
"""Room for what reaches the bound. Where more do, tied ones say, the whole row is searched: slow, exact."""
WARPS = 8

LOWEST = tl.constexpr(-(2**31))
MINUS_INFINITY = tl.constexpr(-0x7F800001)  # its key, and that of infinity
INFINITY = tl.constexpr(0x7F800000)
NO_SET = tl.constexpr(-1)
PAD = tl.constexpr(2**31 - 1)


@triton.jit
def _key(values):
    """Integers in the order of the floats, -0.0 equal to 0.0; above LOWEST."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth_key(keys, k):
    """The largest key that at least k of the keys reach; LOWEST if there are fewer."""
    kth = tl.where(tl.sum((keys >= 0).to(tl.int32)) >= k, 0, LOWEST)
    for step in range(31):
        trial = kth | (1 << (30 - step))
        kth = tl.where(tl.sum((keys >= trial).to(tl.int32)) >= k, trial, kth)
    return kth


@triton.jit
def _count_in_row(row_ptr, limit, key, WORK: tl.constexpr):
    """How many values of a row reach a key."""
    count = tl.zeros((), tl.int32)
    for start in range(0, limit, WORK):
        ids = start + tl.arange(0, WORK)
        values = tl.load(row_ptr + ids, mask=ids < limit, other=-float("inf"))
        count += tl.sum(((_key(values) >= key) & (ids < limit)).to(tl.int32))
    return count


@triton.jit
def _kth_key_of_row(row_ptr, limit, k, WORK: tl.constexpr):
    """As `_kth_key`, over a whole row, which is read 32 times."""
    kth = tl.where(_count_in_row(row_ptr, limit, 0, WORK) >= k, 0, LOWEST)
    for step in range(31):
        trial = kth | (1 << (30 - step))
        kth = tl.where(_count_in_row(row_ptr, limit, trial, WORK) >= k, trial, kth)
    return kth


@triton.jit
def _in_the_nucleus(values, valid, p):
    """Which of the values are in the smallest set of the most likely that has at least the mass p; of those
    tied at its border the first.
    """
    weights = tl.where(valid, tl.exp(values - tl.max(tl.where(valid, values, -float("inf")))), 0.0)
    wanted = p * tl.sum(weights)
    keys = tl.where(valid, _key(values), LOWEST)
    border = tl.where(tl.sum(tl.where(keys >= 0, weights, 0.0)) >= wanted, 0, LOWEST)
    for step in range(31):
        trial = border | (1 << (30 - step))
        border = tl.where(tl.sum(tl.where(keys >= trial, weights, 0.0)) >= wanted, trial, border)
    before = tl.sum(tl.where(keys > border, weights, 0.0))
    tied = (keys == border) & valid
    place = tl.cumsum(tied.to(tl.int32), 0) - 1
    return ((keys > border) & valid) | (tied & (before + place.to(tl.float32) * weights < wanted))


@triton.jit
def _choose(keys, bound, chosen, CHUNKS: tl.constexpr):
    """Write down the chunks that reach the bound, in order; how many there are."""
    can = (keys >= bound) & (keys > MINUS_INFINITY)
    place = tl.cumsum(can.to(tl.int32), 0) - 1
    tl.store(chosen + place, tl.arange(0, CHUNKS), mask=can)
    return tl.sum(can.to(tl.int32))


@triton.jit
def _collect(
    row_ptr,
    limit,
    bound,
    chosen,
    num_chosen,
    found_ids,
    found_bits,
    CHUNK: tl.constexpr,
    WORK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Write down what reaches the bound in the chosen chunks, ids ascending; how much there is, all of it."""
    AT_ONCE: tl.constexpr = WORK // CHUNK
    num_found = tl.zeros((), tl.int32)
    for start in range(0, num_chosen, AT_ONCE):
        entry = start + tl.arange(0, AT_ONCE)
        chunk = tl.load(chosen + entry, mask=entry < num_chosen, other=0)
        ids = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        inside = (entry < num_chosen)[:, None] & (ids < limit)
        values = tl.load(row_ptr + ids, mask=inside, other=-float("inf"))
        candidate = inside & (_key(values) >= bound) & (values > -float("inf"))
        flags = candidate.to(tl.int32)
        of_chunk = tl.sum(flags, axis=1)
        before = tl.cumsum(of_chunk, 0) - of_chunk
        place = num_found + before[:, None] + tl.cumsum(flags, 1) - 1
        fits = candidate & (place < CANDIDATES)
        tl.store(found_ids + place, ids, mask=fits)
        tl.store(found_bits + place, values.to(tl.int32, bitcast=True), mask=fits)
        num_found += tl.sum(of_chunk)
    return num_found


@triton.jit
def _keep_of_candidates(found_ids, found_bits, num_found, k, kept_ids, kept_bits, CANDIDATES: tl.constexpr):
    """Exactly the k largest, of those tied at the k-th value the lowest ids; ascending. How many."""
    entry = tl.arange(0, CANDIDATES)
    there = entry < num_found
    ids = tl.load(found_ids + entry, mask=there, other=0)
    bits = tl.load(found_bits + entry, mask=there, other=0)
    keys = tl.where(there, _key(bits.to(tl.float32, bitcast=True)), LOWEST)
    kth = _kth_key(keys, k)
    above = there & (keys > kth)
    tied = there & (keys == kth)
    room = k - tl.sum(above.to(tl.int32))
    keep = above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= room))
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(kept_ids + place, ids, mask=keep)
    tl.store(kept_bits + place, bits, mask=keep)
    return tl.sum(keep.to(tl.int32))


@triton.jit
def _keep_of_row(row_ptr, limit, k, kept_ids, kept_bits, WORK: tl.constexpr):
    """The same from the whole row."""
    kth = _kth_key_of_row(row_ptr, limit, k, WORK)
    room = k - _count_in_row(row_ptr, limit, kth + 1, WORK)  # those above
    num_tied = tl.zeros((), tl.int32)
    num_kept = tl.zeros((), tl.int32)
    for start in range(0, limit, WORK):
        ids = start + tl.arange(0, WORK)
        values = tl.load(row_ptr + ids, mask=ids < limit, other=-float("inf"))
        keys = _key(values)
        finite = values > -float("inf")
        tied = finite & (keys == kth)
        rank = num_tied + tl.cumsum(tied.to(tl.int32), 0)
        keep = (finite & (keys > kth)) | (tied & (rank <= room))
        place = num_kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(kept_ids + place, ids, mask=keep)
        tl.store(kept_bits + place, values.to(tl.int32, bitcast=True), mask=keep)
        num_tied += tl.sum(tied.to(tl.int32))
        num_kept += tl.sum(keep.to(tl.int32))
    return num_kept


@triton.jit
def read_kernel(
    logits_ptr,  # float32 [R, V], contiguous in a row
    row_stride,
    top_k_ptr,  # int32 [R]; 0 = leave this row alone
    scratch_ptr,  # int32 [R, ...], the largest value of each chunk as a key first
    scratch_stride,
    vocabulary,
    limit,  # ids from here on do not count
    CHUNK: tl.constexpr,
    READ: tl.constexpr,
):
    """The largest value of each chunk. What is no number counts as infinite. Grid: rows, parts of READ."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(top_k_ptr + row) == 0:
        return
    chunk = tl.program_id(1) * (READ // CHUNK) + tl.arange(0, READ // CHUNK)
    ids = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    # Read by the vocabulary, which is mostly a multiple of 16: then four values are read at once.
    values = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocabulary, other=-float("inf"))
    values = tl.where(values == values, values, float("inf"))
    values = tl.where(ids < limit, values, -float("inf"))
    maxima = scratch_ptr + row * scratch_stride
    tl.store(maxima + chunk, _key(tl.max(values, axis=1)), mask=chunk * CHUNK < limit)


@triton.jit(do_not_specialize=["columns_stride", "width"])  # what changes from step to step
def choose_kernel(
    logits_ptr,
    row_stride,
    top_k_ptr,
    top_p_ptr,  # float32 [R]; 1 = no nucleus
    columns_ptr,  # int32 [R, 1 + width]
    columns_stride,
    scratch_ptr,  # int32 [R, 2 * (CHUNKS + CANDIDATES + WIDTH)]; in the end the values of the set first
    scratch_stride,
    limit,  # ids from here on are never kept
    width,
    CHUNKS: tl.constexpr,  # power of two, >= limit / CHUNK, >= WIDTH
    WIDTH: tl.constexpr,  # power of two, >= width
    CHUNK: tl.constexpr,
    WORK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The set of a row. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(top_k_ptr + row)
    columns = columns_ptr + row * columns_stride
    if k == 0:
        tl.store(columns, NO_SET)
        return
    row_ptr = logits_ptr + row * row_stride
    maxima = scratch_ptr + row * scratch_stride
    chosen = maxima + CHUNKS
    found_ids = chosen + CHUNKS
    found_bits = found_ids + CANDIDATES
    kept_ids = found_bits + CANDIDATES
    kept_bits = kept_ids + WIDTH

    # 1. What reaches the k-th largest of the chunks' largest.
    chunk = tl.arange(0, CHUNKS)
    keys = tl.load(maxima + chunk, mask=chunk * CHUNK < limit, other=LOWEST)
    if tl.max(keys) >= INFINITY:
        tl.store(columns, PAD)
        return
    bound = _kth_key(keys, k)
    num_chosen = _choose(keys, bound, chosen, CHUNKS)
    tl.debug_barrier()
    num_found = _collect(
        row_ptr, limit, bound, chosen, num_chosen, found_ids, found_bits, CHUNK, WORK, CANDIDATES
    )
    tl.debug_barrier()

    # 2. Of these exactly k.
    if num_found <= CANDIDATES:
        num_kept = _keep_of_candidates(found_ids, found_bits, num_found, k, kept_ids, kept_bits, CANDIDATES)
    else:
        num_kept = _keep_of_row(row_ptr, limit, k, kept_ids, kept_bits, WORK)
    tl.debug_barrier()

    # 3. Of these the nucleus.
    entry = tl.arange(0, WIDTH)
    keep = entry < num_kept
    ids = tl.load(kept_ids + entry, mask=keep, other=0)
    bits = tl.load(kept_bits + entry, mask=keep, other=0)
    p = tl.load(top_p_ptr + row)
    if p < 1.0:
        keep = _in_the_nucleus(bits.to(tl.float32, bitcast=True), keep, p)
    count = tl.sum(keep.to(tl.int32))
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(columns, count)
    tl.store(columns + 1 + place, ids, mask=keep)
    tl.store(columns + 1 + entry, PAD, mask=(entry >= count) & (entry < width))
    tl.store(maxima + place, bits, mask=keep)


@triton.jit(do_not_specialize=["columns_stride"])
def write_kernel(
    logits_ptr,
    row_stride,
    columns_ptr,
    columns_stride,
    scratch_ptr,
    scratch_stride,
    vocabulary,
    WIDTH: tl.constexpr,
    READ: tl.constexpr,
):
    """A row with nothing but its set. Grid: rows, parts of READ."""
    row = tl.program_id(0).to(tl.int64)
    columns = columns_ptr + row * columns_stride
    count = tl.load(columns)
    if (count < 0) | (count > WIDTH):  # NO_SET, PAD
        return
    start = tl.program_id(1) * READ
    row_ptr = logits_ptr + row * row_stride
    fill = start + tl.arange(0, READ)
    tl.store(row_ptr + fill, -float("inf"), mask=fill < vocabulary)
    entry = tl.arange(0, WIDTH)
    ids = tl.load(columns + 1 + entry, mask=entry < count, other=-1)
    bits = tl.load(scratch_ptr + row * scratch_stride + entry, mask=entry < count, other=0)
    tl.debug_barrier()
    tl.store(row_ptr + ids, bits.to(tl.float32, bitcast=True), mask=(ids >= start) & (ids < start + READ))

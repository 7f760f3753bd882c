"""Which sequences go into which row of which rank: whole sequences, the same number of rows on every rank."""

import heapq


def first_fit_decreasing(lengths: list[int], row_tokens: int) -> list[list[int]]:
    """Indices of `lengths`, row by row: the longest first, each into the first row that has room.

    The room of all rows is the leaves of a tree whose nodes hold the most room below them, so that the first
    row with enough is found in as many looks as the tree is deep.

    Raises:
        ValueError: a length that fits no row.
    """
    leaves = 1
    while leaves < len(lengths):
        leaves *= 2
    most_room = [row_tokens] * (2 * leaves)  # node n has the children 2n and 2n + 1
    rows: list[list[int]] = []
    for index in longest_first(lengths):
        length = lengths[index]
        if length > row_tokens:
            raise ValueError(
                f"sample {index}: {length} tokens do not fit trainer.row_tokens = {row_tokens}; raise it"
            )
        node = 1
        while node < leaves:
            node *= 2
            node += most_room[node] < length
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(index)
        most_room[node] -= length
        while node > 1:
            node //= 2
            most_room[node] = max(most_room[2 * node], most_room[2 * node + 1])
    return rows


def balanced(lengths: list[int], row_tokens: int, num_rows: int) -> list[list[int]] | None:
    """Indices of `lengths` in `num_rows` rows of about as many tokens; fullest row first.

    Longest processing time first (Graham 1969): the longest goes to the emptiest row. None if it does not
    fit there; then more rows are needed.
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    filled = [(0, row) for row in range(num_rows)]  # a heap
    for index in longest_first(lengths):
        tokens, row = filled[0]
        if tokens + lengths[index] > row_tokens:
            return None
        rows[row].append(index)
        heapq.heapreplace(filled, (tokens + lengths[index], row))
    return [rows[row] for _, row in sorted(filled, key=lambda entry: (-entry[0], entry[1]))]


def rows_of_ranks(lengths: list[int], row_tokens: int, ranks: int) -> list[list[list[int]]]:
    """Rows of indices of `lengths` for each rank, the same number for all; a row may be empty.

    Ranks step from row to row together, so the rows of one round hold about as many tokens. One rank alone
    has full rows instead: as few as first fit gives.

    Raises:
        ValueError: a length that fits no row.
    """
    full = first_fit_decreasing(lengths, row_tokens)
    if ranks == 1:
        return [full]
    rounds = -(-len(full) // ranks)
    while (rows := balanced(lengths, row_tokens, rounds * ranks)) is None:
        rounds += 1
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    for number, row in enumerate(rows):
        turn, place = divmod(number, ranks)
        # to and fro, so that the rank that takes the fullest row of one round takes the emptiest of the next
        shares[place if turn % 2 == 0 else ranks - 1 - place].append(row)
    return shares


def longest_first(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
